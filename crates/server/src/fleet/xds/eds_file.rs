//! Envoy's endpoint file: an EDS `DiscoveryResponse` in YAML. Envoy reads the file only when it is
//! renamed into the watched directory, and does not detect writes in place.

use std::io::{self, Write};
use std::path::Path;

use serde::{Serialize, Serializer};
use warmroute_core::worker::Worker;
use warmroute_metrics::{Metrics, OutcomeLabel};
use warmroute_runtime::lifecycle::directory;
use warmroute_settings::{ByteSize, read_regular_file};

use super::subset_labels::{SubsetLabels, hosts};

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
    /// Set only if Envoy's load balancers must exclude the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    health_status: Option<&'static str>,
    metadata: EndpointMetadata,
}

#[derive(Serialize)]
struct EnvoyEndpoint {
    address: EdsAddress,
}

#[derive(Serialize)]
struct EdsAddress {
    socket_address: SocketAddress,
}

#[derive(Serialize)]
struct SocketAddress {
    address: String,
    port_value: u16,
}

#[derive(Serialize)]
struct EndpointMetadata {
    filter_metadata: FilterMetadata,
}

#[derive(Serialize)]
struct FilterMetadata {
    #[serde(rename = "envoy.lb")]
    lb: SubsetMetadata,
}

/// Labels by name, each a single value or a list.
struct SubsetMetadata(SubsetLabels);

impl Serialize for SubsetMetadata {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(
            self.0
                .entries()
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

/// Renders the file of a fleet: one endpoint per address, sorted by address.
pub fn render<'w>(
    workers: impl IntoIterator<Item = &'w Worker>,
    cluster: &str,
) -> Result<String, serde_saphyr::SerializeError> {
    let lb_endpoints = hosts(workers)
        .into_iter()
        .map(|(endpoint, labels)| LbEndpoint {
            endpoint: EnvoyEndpoint {
                address: EdsAddress {
                    socket_address: SocketAddress {
                        address: endpoint.0.ip().to_string(),
                        port_value: endpoint.0.port(),
                    },
                },
            },
            health_status: (!labels.accepts_requests).then_some("DRAINING"),
            metadata: EndpointMetadata {
                filter_metadata: FilterMetadata {
                    lb: SubsetMetadata(labels),
                },
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
    // Quoted, because Envoy's YAML 1.1 parser interprets more plain scalars than the serializer
    // assumes.
    let options = serde_saphyr::ser_options! { no_lang_directive: true, quote_all: true };
    serde_saphyr::to_string_with_options(&response, options)
}

/// Replaces the file by a rename, unless it already has this text. Creates the directory if
/// necessary.
pub fn write(path: &Path, text: &str, metrics: &Metrics) -> io::Result<FileWriteOutcome> {
    let result = replace(path, text);
    let outcome = match result {
        Ok(FileWriteOutcome::Unchanged) => return result,
        Ok(FileWriteOutcome::Replaced) => "written",
        Err(_) => "failed",
    };
    metrics
        .endpoints
        .file_writes
        .get_or_create(&OutcomeLabel { outcome })
        .inc();
    result
}

/// Result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileWriteOutcome {
    /// The file was replaced.
    Replaced,
    /// The file already had this text; Envoy does not reload it.
    Unchanged,
}

/// Maximum size of an endpoint file that is compared with its new content.
const MAX_ENDPOINTS_FILE: ByteSize = ByteSize::mib(256);

fn replace(path: &Path, text: &str) -> io::Result<FileWriteOutcome> {
    if read_regular_file(path, MAX_ENDPOINTS_FILE).is_ok_and(|bytes| bytes == text.as_bytes()) {
        return Ok(FileWriteOutcome::Unchanged);
    }
    directory::prepare(path)?;
    let mut file = builder().tempfile_in(directory::of(path))?;
    file.write_all(text.as_bytes())?;
    file.persist(path)?;
    Ok(FileWriteOutcome::Replaced)
}

/// Returns a builder of readable temporary files. They are private by default, but Envoy may run as
/// another user.
fn builder() -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".endpoints-");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644));
    builder
}

#[cfg(test)]
mod tests;
