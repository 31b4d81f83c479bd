//! Configurations of the shipped manifests: the generated configurations, with the fields that the
//! manifests gained after the generation. Envoy Gateway and Istio document the effect of these
//! fields. For EnvoyFilters, a test compares it.

use serde_json::{Value, json};

use crate::gateways::generated::{
    GatewayFixture, GeneratedConfig, ISTIO_AS_GENERATED, ISTIO_BUFFERED,
};
use crate::support::manifest_set::ManifestSet;

impl GatewayFixture {
    /// Returns the configuration for the shipped manifests.
    pub(crate) fn shipped(self) -> GeneratedConfig {
        let istio = self.picker == ISTIO_AS_GENERATED.picker;
        self.render(if istio {
            ISTIO_AS_GENERATED.generated()
        } else {
            self.generated()
        })
    }

    /// Changes a generated configuration as the control plane does for the shipped manifests.
    pub(crate) fn render(self, mut config: GeneratedConfig) -> GeneratedConfig {
        let set = self.set();
        for object in &set.objects {
            let spec = &object["spec"];
            match object["kind"].as_str().unwrap() {
                "DestinationRule" => destination_rule(config.cluster(self.picker), spec),
                "EnvoyFilter" => envoy_filter(&mut config, spec),
                "EnvoyExtensionPolicy" => cluster_settings(
                    config.cluster(self.picker),
                    &spec["extProc"][0]["backendSettings"],
                ),
                "BackendTrafficPolicy" => {
                    let workers = config.cluster(self.workers);
                    cluster_settings(workers, spec);
                    worker_idle_timeout(workers, &spec["timeout"]["http"]);
                    config
                        .routes()
                        .for_each(|route| retry(&mut route["route"], &spec["retry"]));
                }
                "ClientTrafficPolicy" if spec["headers"]["enableEnvoyHeaders"] == true => {
                    config
                        .filter("envoy.filters.http.router")
                        .as_object_mut()
                        .unwrap()
                        .remove("suppress_envoy_headers");
                }
                "EnvoyProxy" if names_proxy(&set, &object["metadata"]["name"]) => {
                    bootstrap(&mut config, spec)
                }
                _ => {}
            }
        }
        config
    }
}

/// Sets a field if the manifest sets it.
fn copy(target: &mut Value, field: &str, value: &Value) {
    if !value.is_null() {
        target[field] = value.clone();
    }
}

fn destination_rule(cluster: &mut Value, spec: &Value) {
    let policy = &spec["trafficPolicy"];
    copy(
        cluster,
        "connect_timeout",
        &policy["connectionPool"]["tcp"]["connectTimeout"],
    );
    let limit = &policy["connectionPool"]["http"]["http2MaxRequests"];
    cluster["circuit_breakers"]["thresholds"][0]["max_requests"] =
        limit.as_u64().unwrap_or(u32::MAX.into()).into();
    if policy["tls"]["sni"].is_string() {
        cluster["transport_socket"]["typed_config"]["sni"] = policy["tls"]["sni"].clone();
        let options = cluster["typed_extension_protocol_options"]
            .as_object_mut()
            .unwrap()
            .values_mut()
            .next()
            .unwrap();
        options
            .as_object_mut()
            .unwrap()
            .remove("upstream_http_protocol_options");
    }
}

/// Merges messages by field and appends lists. In maps of `Any` messages, the value of a key is
/// replaced.
fn merge(target: &mut Value, patch: &Value) {
    match (target, patch) {
        (Value::Object(target), Value::Object(patch)) => {
            for (key, value) in patch {
                let slot = target.entry(key).or_insert(Value::Null);
                if [
                    "typed_per_filter_config",
                    "typed_extension_protocol_options",
                ]
                .contains(&key.as_str())
                {
                    value
                        .as_object()
                        .unwrap()
                        .iter()
                        .for_each(|(name, any)| slot[name] = any.clone());
                } else {
                    merge(slot, value);
                }
            }
        }
        (Value::Array(target), Value::Array(patch)) => target.extend(patch.iter().cloned()),
        (target, patch) => *target = patch.clone(),
    }
}

fn envoy_filter(config: &mut GeneratedConfig, spec: &Value) {
    for patch in spec["configPatches"].as_array().unwrap() {
        assert_eq!(
            (&patch["match"]["context"], &patch["patch"]["operation"]),
            (&json!("GATEWAY"), &json!("MERGE"))
        );
        let value = &patch["patch"]["value"];
        let matches = &patch["match"];
        match patch["applyTo"].as_str().unwrap() {
            "CLUSTER" => merge(
                config.cluster(matches["cluster"]["name"].as_str().unwrap()),
                value,
            ),
            "HTTP_ROUTE" => {
                let name = &matches["routeConfiguration"]["vhost"]["route"]["name"];
                let routes: Vec<_> = config
                    .routes()
                    .filter(|route| route["name"] == *name)
                    .collect();
                assert!(!routes.is_empty(), "no route {name}");
                routes.into_iter().for_each(|route| merge(route, value));
            }
            "HTTP_FILTER" => {
                let name = &matches["listener"]["filterChain"]["filter"]["subFilter"]["name"];
                merge(
                    config.filter(name.as_str().unwrap()),
                    &value["typed_config"],
                );
            }
            other => panic!("unsupported patch target: {other}"),
        }
    }
}

/// Applies the fields that EnvoyExtensionPolicy and BackendTrafficPolicy share.
fn cluster_settings(cluster: &mut Value, settings: &Value) {
    let limits = &settings["circuitBreaker"];
    let threshold = &mut cluster["circuit_breakers"]["thresholds"][0];
    copy(threshold, "max_connections", &limits["maxConnections"]);
    copy(
        threshold,
        "max_pending_requests",
        &limits["maxPendingRequests"],
    );
    copy(threshold, "max_requests", &limits["maxParallelRequests"]);
    copy(
        cluster,
        "connect_timeout",
        &settings["timeout"]["tcp"]["connectTimeout"],
    );
    if let Some(options) = cluster["typed_extension_protocol_options"].as_object_mut() {
        let http2 = &mut options.values_mut().next().unwrap()["explicit_http_config"]["http2_protocol_options"];
        copy(
            http2,
            "connection_keepalive",
            &settings["http2"]["connectionKeepalive"],
        );
    }
    copy(
        cluster,
        "dns_refresh_rate",
        &settings["dns"]["dnsRefreshRate"],
    );
    copy(
        cluster,
        "respect_dns_ttl",
        &settings["dns"]["respectDnsTtl"],
    );
    let check = &settings["healthCheck"]["active"];
    if check.is_object() {
        assert_eq!(check["type"], "GRPC");
        cluster["common_lb_config"]["healthy_panic_threshold"] =
            json!({"value": settings["healthCheck"]["panicThreshold"]});
        cluster["health_checks"] = json!([{
            "timeout": check["timeout"],
            "interval": check["interval"],
            "unhealthy_threshold": check["unhealthyThreshold"],
            "healthy_threshold": check["healthyThreshold"],
            "grpc_health_check": {"service_name": check["grpc"]["service"]},
        }]);
    }
}

/// Sets the idle timeout of the connections to HTTP/1 workers.
fn worker_idle_timeout(cluster: &mut Value, timeouts: &Value) {
    let options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
    cluster["typed_extension_protocol_options"][options] = json!({
        "@type": format!("type.googleapis.com/{options}"),
        "common_http_protocol_options": {"idle_timeout": timeouts["connectionIdleTimeout"]},
        "explicit_http_config": {"http_protocol_options": {}},
    });
}

fn retry(route: &mut Value, settings: &Value) {
    if settings.is_null() {
        return;
    }
    let triggers: Vec<_> = settings["retryOn"]["triggers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|on| on.as_str().unwrap())
        .collect();
    let previous =
        "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate";
    route["retry_policy"] = json!({
        "retry_on": triggers.join(","),
        "num_retries": settings["numRetries"],
        "retry_host_predicate":
            [{"name": "envoy.retry_host_predicates.previous_hosts", "typed_config": {"@type": previous}}],
        "host_selection_retry_max_attempts": 5,
    });
}

/// Returns true if the Gateway refers to this EnvoyProxy. Others have no effect.
fn names_proxy(set: &ManifestSet, name: &Value) -> bool {
    set.all("Gateway")
        .any(|gateway| gateway["spec"]["infrastructure"]["parametersRef"]["name"] == *name)
}

fn bootstrap(config: &mut GeneratedConfig, spec: &Value) {
    // The bootstrap of Envoy Gateway has these layers, and patches refer to them.
    config.0["layered_runtime"] =
        json!({"layers": [{"name": "global_config", "static_layer": {}}]});
    for patch in spec["bootstrap"]["jsonPatches"].as_array().unwrap() {
        assert_eq!(patch["op"], "add");
        let (parent, key) = patch["path"].as_str().unwrap().rsplit_once('/').unwrap();
        config.0.pointer_mut(parent).unwrap()[key] = patch["value"].clone();
    }
}

/// Compares with Istio's output for an EnvoyFilter that differs in six fields.
#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn shipped_envoy_filters_render_as_istio_generates() {
    let mut shipped = ISTIO_BUFFERED.shipped();
    let mut generated = ISTIO_BUFFERED.generated();
    // In the generated file the attributes are in the overrides of a route, where Envoy ignores
    // them.
    let attributes = json!(["upstream.address", "response.flags"]);
    generated.ext_proc()["response_attributes"] = attributes.clone();
    assert_eq!(shipped.ext_proc(), generated.ext_proc());
    let picker = ISTIO_BUFFERED.picker;
    let options = &mut generated.cluster(picker)["typed_extension_protocol_options"];
    let options = options
        .as_object_mut()
        .unwrap()
        .values_mut()
        .next()
        .unwrap();
    let http2 = &mut options["explicit_http_config"]["http2_protocol_options"];
    http2["initial_stream_window_size"] = json!(65_536);
    http2["initial_connection_window_size"] = json!(1_048_576);
    for field in ["typed_extension_protocol_options", "connect_timeout"] {
        assert_eq!(
            shipped.cluster(picker)[field],
            generated.cluster(picker)[field],
            "{field}"
        );
    }
    let filter = "/typed_per_filter_config/envoy.filters.http.ext_proc";
    let route = shipped.routes().next().unwrap();
    assert_eq!(
        route["request_body_buffer_limit"].as_u64(),
        Some(33_554_432)
    );
    let mut own = route.pointer(filter).unwrap().clone();
    // Istio omits the default value.
    assert_eq!(
        own["overrides"]["processing_mode"]
            .as_object_mut()
            .unwrap()
            .remove("response_body_mode"),
        Some(json!("NONE"))
    );
    let theirs = generated
        .routes()
        .next()
        .unwrap()
        .pointer_mut(filter)
        .unwrap();
    let grpc = theirs["overrides"]["grpc_service"]["envoy_grpc"]
        .as_object_mut()
        .unwrap();
    assert!(grpc.remove("authority").is_some());
    theirs["overrides"]["metadata_options"]["forwarding_namespaces"]["untyped"]
        .as_array_mut()
        .unwrap()
        .truncate(1);
    assert_eq!(
        theirs["overrides"]
            .as_object_mut()
            .unwrap()
            .remove("response_attributes"),
        Some(attributes)
    );
    assert_eq!(own, *theirs);
}
