//! Endpoints in ZeroMQ's notation.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::error::ZmtpError;

/// `tcp://host:port` or `ipc://path`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ZmtpEndpoint {
    /// Host and port; an IPv6 address is in brackets.
    Tcp(String),
    /// Path of a Unix socket.
    Ipc(PathBuf),
}

impl ZmtpEndpoint {
    /// Returns the address to bind. ZeroMQ's wildcard `*` means all IPv4 addresses.
    pub(crate) fn bind_address(address: &str) -> String {
        match address.strip_prefix("*:") {
            Some(port) => format!("0.0.0.0:{port}"),
            None => address.to_owned(),
        }
    }
}

impl FromStr for ZmtpEndpoint {
    type Err = ZmtpError;

    fn from_str(text: &str) -> Result<Self, ZmtpError> {
        let error = |problem| ZmtpError::Endpoint {
            endpoint: text.to_owned(),
            problem,
        };
        match text.split_once("://") {
            Some(("tcp", address)) => {
                let port = address
                    .rsplit_once(':')
                    .map(|(_, port)| port.parse::<u16>());
                match port {
                    Some(Ok(_)) => Ok(ZmtpEndpoint::Tcp(address.to_owned())),
                    _ => Err(error("has no valid port")),
                }
            }
            Some(("ipc", "" | "*")) => Err(error("has no path")),
            Some(("ipc", path)) => Ok(ZmtpEndpoint::Ipc(PathBuf::from(path))),
            _ => Err(error("has a transport other than tcp and ipc")),
        }
    }
}

impl fmt::Display for ZmtpEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ZmtpEndpoint::Tcp(address) => write!(f, "tcp://{address}"),
            ZmtpEndpoint::Ipc(path) => write!(f, "ipc://{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_parsed_and_displayed() {
        for text in [
            "tcp://127.0.0.1:5557",
            "tcp://[::1]:5557",
            "tcp://engine.svc:1",
            "tcp://*:5557",
            "ipc:///run/e",
        ] {
            assert_eq!(text.parse::<ZmtpEndpoint>().unwrap().to_string(), text);
        }
        for text in [
            "tcp://host",
            "tcp://host:x",
            "tcp://host:70000",
            "ipc://",
            "ipc://*",
            "inproc://a",
            "host:1",
        ] {
            assert!(text.parse::<ZmtpEndpoint>().is_err(), "{text}");
        }
        assert_eq!(ZmtpEndpoint::bind_address("*:5557"), "0.0.0.0:5557");
        assert_eq!(ZmtpEndpoint::bind_address("[::]:5557"), "[::]:5557");
    }
}
