//! Envoy's endpoint file: an EDS `DiscoveryResponse` in YAML. Envoy reads the file only when it is
//! renamed into the watched directory, and does not detect writes in place.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::Path;

use serde_json::{Map, Value, json};
use warmroute_core::worker::Worker;
use warmroute_metrics::{Metrics, count_outcome};
use warmroute_runtime::lifecycle::directory;
use warmroute_settings::{ByteSize, read_regular_file};

use super::subset_labels::{SubsetLabels, hosts};

/// Renders the file of a fleet: one endpoint per address, sorted by address.
pub fn render<'w>(
    workers: impl IntoIterator<Item = &'w Worker>,
    cluster: &str,
) -> Result<String, serde_saphyr::SerializeError> {
    let lb_endpoints: Vec<_> = hosts(workers)
        .into_iter()
        .map(|(endpoint, labels)| lb_endpoint(endpoint.0, &labels))
        .collect();
    let response = json!({
        "resources": [{
            "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            "cluster_name": cluster,
            "endpoints": [{ "lb_endpoints": lb_endpoints }],
        }],
    });
    // Quoted, because Envoy's YAML 1.1 parser interprets more plain scalars than the serializer
    // assumes.
    let options = serde_saphyr::ser_options! { no_lang_directive: true, quote_all: true };
    serde_saphyr::to_string_with_options(&response, options)
}

fn lb_endpoint(address: SocketAddr, labels: &SubsetLabels) -> Value {
    let entries = labels.entries().into_iter();
    let metadata: Map<String, Value> = entries
        .map(|(name, values)| (name.to_owned(), one_or_list(values)))
        .collect();
    let mut host = json!({
        "endpoint": {
            "address": {
                "socket_address": {
                    "address": address.ip().to_string(),
                    "port_value": address.port(),
                },
            },
        },
        "metadata": { "filter_metadata": { "envoy.lb": metadata } },
    });
    if !labels.accepts_requests {
        // Excludes the host from Envoy's load balancers.
        host["health_status"] = "DRAINING".into();
    }
    host
}

fn one_or_list(mut values: Vec<String>) -> Value {
    match values.len() {
        1 => values.swap_remove(0).into(),
        _ => values.into(),
    }
}

/// Replaces the file by a rename, unless it already has this text. Creates the directory if
/// necessary. Returns whether the file was replaced; Envoy does not reload an equal file.
pub fn write(path: &Path, text: &str, metrics: &Metrics) -> io::Result<bool> {
    let result = replace(path, text);
    let outcome = match result {
        Ok(false) => return result,
        Ok(true) => "written",
        Err(_) => "failed",
    };
    count_outcome(&metrics.endpoints.file_writes, outcome);
    result
}

/// Maximum size of an endpoint file that is compared with its new content.
const MAX_ENDPOINTS_FILE: ByteSize = ByteSize::mib(256);

fn replace(path: &Path, text: &str) -> io::Result<bool> {
    if read_regular_file(path, MAX_ENDPOINTS_FILE).is_ok_and(|bytes| bytes == text.as_bytes()) {
        return Ok(false);
    }
    directory::prepare(path)?;
    let mut file = builder().tempfile_in(directory::of(path))?;
    file.write_all(text.as_bytes())?;
    file.persist(path)?;
    Ok(true)
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
