//! The settings of warmroute that Envoy's configuration must match.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use warmroute_core::worker::{ModelName, Worker};
use warmroute_doctor::envoy::expected::{ExpectedEnvoy, XdsServer};
use warmroute_http2_filter::service_of_authority;
use warmroute_server::config::Config;
use warmroute_server::ext_proc::config::FailureMode;
use warmroute_server::prefill::{PrefillConfig, PrefillMode};

/// Margin of Envoy's `max_message_timeout` over the longest wait of a request.
const WAIT_MARGIN: Duration = Duration::from_millis(500);
/// Margin of Envoy's timeout over the prefill of a retry.
const RETRY_MARGIN: Duration = Duration::from_secs(1);

/// Headers with which trusted clients pin workers; see envoy/README.md.
const PIN_HEADERS: [&str; 9] = [
    "x-worker-instance-id",
    "x-prefill-instance-id",
    "x-dp-rank",
    "x-data-parallel-rank",
    "x-prefill-dp-rank",
    "x-dynamo-worker-instance-id",
    "x-dynamo-prefill-instance-id",
    "x-dynamo-dp-rank",
    "x-dynamo-prefill-dp-rank",
];

/// Returns the settings that Envoy's configuration must match.
pub(super) fn expected_envoy(config: &Config, workers: &[Worker]) -> ExpectedEnvoy {
    let routing_headers = config.gateway.routing_headers();
    let names =
        |names: &mut dyn Iterator<Item = &str>| names.map(str::to_owned).collect::<Vec<_>>();
    let mut reserved = names(&mut routing_headers.reserved_names());
    if config.requests.clients.trusted {
        reserved.retain(|name| !PIN_HEADERS.contains(&name.as_str()));
    }
    ExpectedEnvoy {
        tcp: config.listeners.ext_proc.address,
        tls: config.listeners.ext_proc.tls.is_some(),
        unix: config.listeners.ext_proc.unix_socket.clone(),
        body_limit: config.requests.limits.max_body_size.0,
        exchange_deadline: config.requests.limits.decision_timeout.get(),
        longest_wait: longest_wait(config),
        prefill_retry_wait: longest_call(config).map(|longest| longest + RETRY_MARGIN),
        mirror_clusters: mirror_clusters(config),
        paths: config.requests.api_paths(),
        fail_closed: config.gateway.failure.mode == FailureMode::FailClosed,
        clear_route_cache: config.gateway.clear_route_cache,
        fallbacks: config.gateway.fallback_endpoints,
        replicas: config.replicas.is_some(),
        authority_pools: config
            .routing
            .pool_routes
            .authorities
            .iter()
            .map(|(authority, pool)| (service_of_authority(authority), pool.clone()))
            .collect(),
        headers: names(&mut routing_headers.header_names()),
        endpoint_headers: names(&mut routing_headers.endpoint_names()),
        reserved_headers: reserved,
        endpoints_file: config
            .envoy
            .as_ref()
            .and_then(|envoy| Some((envoy.endpoints_file.clone()?, envoy.cluster.clone()))),
        xds: xds_server(config),
        workers: workers
            .iter()
            .filter(|worker| !worker.draining)
            .cloned()
            .collect(),
    }
}

fn xds_server(config: &Config) -> Option<XdsServer> {
    let envoy = config.envoy.as_ref()?;
    let listen = envoy.xds.as_ref()?.address;
    let clusters = envoy.clusters().into_iter().map(|cluster| cluster.name);
    Some(XdsServer {
        listen,
        clusters: clusters.collect(),
    })
}

fn mirror_clusters(config: &Config) -> BTreeMap<String, BTreeSet<ModelName>> {
    let mut mirrors: BTreeMap<String, BTreeSet<ModelName>> = BTreeMap::new();
    for model in &config.models {
        let prefill = model.prefill.as_ref();
        if let Some(prefill) = prefill.filter(|prefill| prefill.mode == PrefillMode::Mirror) {
            let models = mirrors.entry(prefill.cluster.clone()).or_default();
            models.insert(model.name.clone());
        }
    }
    mirrors
}

/// Returns the longest total time of the attempts of one prefill, if any model calls prefills.
fn longest_call(config: &Config) -> Option<Duration> {
    let prefills = config
        .models
        .iter()
        .filter_map(|model| model.prefill.as_ref());
    prefills
        .filter(|prefill| prefill.mode == PrefillMode::Call)
        .map(PrefillConfig::max_call_time)
        .max()
}

/// Returns the longest timeout extension that a request may need, if any request waits.
fn longest_wait(config: &Config) -> Option<Duration> {
    let queue = &config.queue;
    let is_queued = !queue.busy_threshold().is_unset();
    let queue_wait = is_queued.then(|| queue.timeout.get());
    let session_wait = config.sessions.as_ref().map(|sessions| {
        let engine = sessions.engine.as_ref();
        let open_timeout = engine.map(|engine| engine.timeout.get());
        sessions.wait_timeout.get() + open_timeout.unwrap_or_default()
    });
    let longest: Duration = queue_wait
        .into_iter()
        .chain(session_wait)
        .chain(longest_call(config))
        .sum();
    (!longest.is_zero()).then(|| longest + WAIT_MARGIN)
}
