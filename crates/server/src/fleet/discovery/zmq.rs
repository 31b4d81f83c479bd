//! ZMQ endpoints in the notation of engines and operators.
//!
//! An endpoint is stored in parts, because the port of a data-parallel rank is computed from that
//! of rank 0, and because a wildcard can be bound but not connected to.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// `tcp://host:port` or `ipc://path`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ZmqEndpoint {
    /// TCP endpoint.
    Tcp {
        /// Address, host name or wildcard; an IPv6 address without brackets.
        host: String,
        /// Port.
        port: u16,
    },
    /// Unix socket endpoint.
    Ipc {
        /// Path of the socket.
        path: String,
    },
}

impl ZmqEndpoint {
    /// Returns whether the host is a wildcard, which only the binding side can use.
    pub fn is_wildcard(&self) -> bool {
        match self {
            Self::Tcp { host, .. } => {
                host == "*" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified())
            }
            Self::Ipc { .. } => false,
        }
    }

    /// Returns the endpoint of a rank by vLLM's rule: port + rank. Returns `None` if there is no
    /// port or it overflows.
    pub fn for_rank(&self, rank: u32) -> Option<Self> {
        match self {
            Self::Tcp { host, port } => {
                let port = port.checked_add(u16::try_from(rank).ok()?)?;
                Some(Self::Tcp {
                    host: host.clone(),
                    port,
                })
            }
            Self::Ipc { .. } => (rank == 0).then(|| self.clone()),
        }
    }

    /// Returns the endpoint in the form of `zmq_bind`, with an address in place of `*`.
    pub fn to_bind(&self) -> String {
        match self {
            Self::Tcp { host, port } if host == "*" => format!("tcp://0.0.0.0:{port}"),
            other => other.to_string(),
        }
    }
}

impl fmt::Display for ZmqEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
            Self::Ipc { path } => write!(f, "ipc://{path}"),
        }
    }
}

impl FromStr for ZmqEndpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = |what: &str| {
            format!(
                "`{text}` {what}; write for example tcp://127.0.0.1:5557 or ipc:///run/engine.sock"
            )
        };
        match text.split_once("://") {
            Some(("tcp", address)) => tcp(address).map_err(invalid),
            Some(("ipc", "")) => Err(invalid("names no path")),
            Some(("ipc", path)) => Ok(Self::Ipc {
                path: path.to_owned(),
            }),
            Some(("inproc", _)) => Err(invalid(
                "can only be reached inside the engine's own process",
            )),
            Some(_) => Err(invalid("has a transport other than tcp and ipc")),
            None => Err(invalid("is not a ZMQ endpoint")),
        }
    }
}

fn tcp(address: &str) -> Result<ZmqEndpoint, &'static str> {
    let (host, port) = address.rsplit_once(':').ok_or("has no port")?;
    let port = port
        .parse::<u16>()
        .ok()
        .filter(|_| !port.starts_with('+'))
        .ok_or("has no valid port")?;
    let host = match host.strip_prefix('[').map(|rest| rest.strip_suffix(']')) {
        Some(bracketed) => {
            let address = bracketed.filter(|host| host.parse::<Ipv6Addr>().is_ok());
            address.ok_or("has brackets around something that is not an IPv6 address")?
        }
        None if host.contains(':') => return Err("has an IPv6 address without brackets"),
        None => host,
    };
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '*');
    if host.is_empty() || !host.chars().all(allowed) || (host.contains('*') && host != "*") {
        return Err("has no valid host");
    }
    if port == 0 {
        return Err("has port 0");
    }
    Ok(ZmqEndpoint::Tcp {
        host: host.to_owned(),
        port,
    })
}

impl JsonSchema for ZmqEndpoint {
    fn schema_name() -> Cow<'static, str> {
        "ZmqEndpoint".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": "^(tcp://.+:[0-9]+|ipc://.+)$"})
    }
}

impl Serialize for ZmqEndpoint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ZmqEndpoint {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EndpointVisitor;

        // A visitor makes the parser report the error at this text, not at the enclosing section.
        impl de::Visitor<'_> for EndpointVisitor {
            type Value = ZmqEndpoint;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a ZMQ endpoint, for example tcp://127.0.0.1:5557")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ZmqEndpoint, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_str(EndpointVisitor)
    }
}
