//! Envoy's endpoint file: an EDS `DiscoveryResponse` in YAML. Envoy looks at it only when a file is *renamed* into the
//! watched folder, so a write in place would never be seen.

use std::io::{self, Write};
use std::path::Path;

use serde::{Serialize, Serializer};

use super::hosts::{Labels, hosts};
use crate::lifecycle::folder;
use crate::metrics::{Metrics, OutcomeLabel};
use crate::worker::Worker;

#[derive(Serialize)]
struct DiscoveryResponse<'a> {
    resources: [ClusterLoadAssignment<'a>; 1],
}

#[derive(Serialize)]
struct ClusterLoadAssignment<'a> {
    #[serde(rename = "@type")]
    type_url: &'static str,
    cluster_name: &'a str,
    endpoints: [LocalityLbEndpoints; 1],
}

#[derive(Serialize)]
struct LocalityLbEndpoints {
    lb_endpoints: Vec<LbEndpoint>,
}

#[derive(Serialize)]
struct LbEndpoint {
    endpoint: EnvoyEndpoint,
    /// Only where Envoy's own load balancers should leave it alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    health_status: Option<&'static str>,
    metadata: Metadata,
}

#[derive(Serialize)]
struct EnvoyEndpoint {
    address: Address,
}

#[derive(Serialize)]
struct Address {
    socket_address: SocketAddress,
}

#[derive(Serialize)]
struct SocketAddress {
    address: String,
    port_value: u16,
}

#[derive(Serialize)]
struct Metadata {
    filter_metadata: FilterMetadata,
}

#[derive(Serialize)]
struct FilterMetadata {
    #[serde(rename = "envoy.lb")]
    lb: Lb,
}

/// The labels by name, each one value or a list.
struct Lb(Labels);

impl Serialize for Lb {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(
            self.0
                .named()
                .map(|(name, values)| (name, OneOrList(values))),
        )
    }
}

struct OneOrList(Vec<String>);

impl Serialize for OneOrList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [only] => only.serialize(serializer),
            values => values.serialize(serializer),
        }
    }
}

/// The file for a fleet: one endpoint per address, in the order of the addresses.
pub fn render<'w>(
    workers: impl IntoIterator<Item = &'w Worker>,
    cluster: &str,
) -> Result<String, serde_saphyr::SerializeError> {
    let lb_endpoints = hosts(workers)
        .into_iter()
        .map(|(endpoint, labels)| LbEndpoint {
            endpoint: EnvoyEndpoint {
                address: Address {
                    socket_address: SocketAddress {
                        address: endpoint.0.ip().to_string(),
                        port_value: endpoint.0.port(),
                    },
                },
            },
            health_status: (!labels.open).then_some("DRAINING"),
            metadata: Metadata {
                filter_metadata: FilterMetadata { lb: Lb(labels) },
            },
        });
    let response = DiscoveryResponse {
        resources: [ClusterLoadAssignment {
            type_url: "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            cluster_name: cluster,
            endpoints: [LocalityLbEndpoints {
                lb_endpoints: lb_endpoints.collect(),
            }],
        }],
    };
    // Envoy's parser is of YAML 1.1, where more plain words than in ours mean something else than text.
    let options = serde_saphyr::ser_options! { no_lang_directive: true, quote_all: true };
    serde_saphyr::to_string_with_options(&response, options)
}

/// Puts the text into place by a rename, unless it is there already. Makes the folder where it is missing.
pub fn write(path: &Path, text: &str, metrics: &Metrics) -> io::Result<Written> {
    let result = replace(path, text);
    let outcome = match result {
        Ok(Written::Unchanged) => return result,
        Ok(Written::Replaced) => "written",
        Err(_) => "failed",
    };
    metrics
        .endpoint_file_writes
        .get_or_create(&OutcomeLabel { outcome })
        .inc();
    result
}

/// What a write came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The file has the new text.
    Replaced,
    /// The file had the text already; Envoy is not disturbed.
    Unchanged,
}

fn replace(path: &Path, text: &str) -> io::Result<Written> {
    if std::fs::read(path).is_ok_and(|bytes| bytes == text.as_bytes()) {
        return Ok(Written::Unchanged);
    }
    folder::prepare(path)?;
    let mut file = builder().tempfile_in(folder::of(path))?;
    file.write_all(text.as_bytes())?;
    file.persist(path)?;
    Ok(Written::Replaced)
}

/// Temporary files are private by default; Envoy may run as somebody else and has to read this one.
fn builder() -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".endpoints-");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644));
    builder
}

#[cfg(test)]
mod tests;
