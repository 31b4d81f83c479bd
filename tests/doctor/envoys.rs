//! A real Envoy with each of the shipped configurations, as it is and with one thing changed: what its own page then says,
//! and what is found of it.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::service::Routes;
use tonic::transport::Server;
use warmroute::cmd::doctor::envoy::dump::Dump;
use warmroute::cmd::doctor::envoy::examine;
use warmroute::cmd::doctor::envoy::expected::Expected;
use warmroute::cmd::doctor::finding::{Finding, Level};
use warmroute::config::{Config, WorkerSource};
use warmroute::metrics::Metrics;
use warmroute::worker::Worker;
use warmroute::xds::config::EnvoyConfig;
use warmroute::xds::{Discovery, Envoys};

use crate::support::envoy::{self, Standalone};
use crate::support::ports::{FreePort, until};

/// Workers need not be there for what is looked at here.
fn workers() -> [SocketAddr; 3] {
    [18_001, 18_002, 18_003].map(|port| SocketAddr::from(([127, 0, 0, 1], port)))
}

/// What warmroute tells Envoys of the workers, until it is dropped.
fn tell(envoy: &EnvoyConfig, workers: &[Worker], config: &Config) -> (Arc<Envoys>, DropGuard) {
    let envoys = Envoys::new(envoy.clusters(), Arc::new(Metrics::new()));
    envoys.publish(workers);
    let closing = CancellationToken::new();
    let routes = Discovery::new(envoys.clone(), closing.clone()).beside(Routes::default());
    let socket = UnixListener::bind(config.listen.unix.as_ref().unwrap()).unwrap();
    let closed = closing.clone().cancelled_owned();
    let served = Server::builder()
        .add_routes(routes)
        .serve_with_incoming_shutdown(UnixListenerStream::new(socket), closed);
    tokio::spawn(served);
    (envoys, closing.drop_guard())
}

/// Both sides of one deployment, as they are before they start.
struct Sides {
    envoy: Value,
    ours: Value,
}

impl Sides {
    /// The shipped file, and what its head says that our configuration needs.
    fn shipped(name: &str, dir: &Path) -> Self {
        let (port, admin_port) = (FreePort::find().unwrap(), FreePort::find().unwrap());
        let (port, admin_port) = (port.release(), admin_port.release());
        let place = Standalone {
            run_dir: dir,
            port,
            admin_port,
        };
        let by_hand = if name == "route-per-header" {
            &workers()[..]
        } else {
            &[]
        };
        let text = place.config_of(name, by_hand).unwrap();
        let listed: Vec<Value> = workers()
            .iter()
            .zip(1..)
            .map(|(at, id)| json!({"id": id, "endpoint": at.to_string()}))
            .collect();
        let mut ours = json!({
            "listen": {"unix": place.ext_proc_socket()},
            "models": [{"name": "m"}],
            "workers": listed,
        });
        if text.contains("eds_workers.yaml") {
            ours["envoy"] = json!({"endpoints_file": place.endpoint_file()});
        }
        if name == "xds" {
            ours["envoy"] = json!({"xds": {}});
        }
        if let Some(by) = name.strip_prefix("disaggregated-") {
            ours["models"][0]["prefill"] = json!({"by": by});
            for (worker, role) in ours["workers"]
                .as_array_mut()
                .unwrap()
                .iter_mut()
                .zip(["prefill", "decode", "decode"])
            {
                worker["role"] = json!(role);
            }
        }
        if matches!(name, "subset" | "gateway-api" | "original-dst") {
            ours["failure"] = json!({"mode": "fail_closed"});
        }
        envoy::write_endpoints(&place.endpoint_file(), &workers()).unwrap();
        Self {
            envoy: serde_saphyr::from_str(&text).unwrap(),
            ours,
        }
    }

    /// Starts Envoy, and looks at what it says that it does.
    async fn examine(&self, dir: &Path) -> Vec<Finding> {
        let config = Config::parse(
            &dir.join("warmroute.yaml"),
            self.ours.to_string().as_bytes(),
        )
        .unwrap();
        let WorkerSource::Fixed(workers) = config.worker_source() else {
            panic!("another source")
        };
        let telling = config
            .envoy
            .as_ref()
            .filter(|envoy| envoy.xds.is_some())
            .map(|envoy| tell(envoy, &workers, &config));
        let envoy = envoy::start(&self.envoy.to_string(), dir, 1).await.unwrap();
        let address = std::fs::read_to_string(dir.join("envoy-admin")).unwrap();
        let page = format!("http://{address}/config_dump?include_eds");
        if let Some((envoys, _)) = &telling
            && self.envoy.to_string().contains("DELTA_GRPC")
        {
            let has = async || {
                envoys
                    .listeners()
                    .iter()
                    .any(|listener| listener.generation.is_some())
            };
            assert!(
                until(Duration::from_secs(60), has).await,
                "{:?}",
                envoys.listeners()
            );
        }
        let page = reqwest::get(page).await.unwrap().text().await.unwrap();
        drop((envoy, telling));
        examine(
            &Dump::read(&page).unwrap(),
            &Expected::new(&config, &workers),
        )
    }

    fn listener(&mut self) -> &mut Value {
        &mut self.envoy["static_resources"]["listeners"][0]
    }

    fn manager(&mut self) -> &mut Value {
        &mut self.listener()["filter_chains"][0]["filters"][0]["typed_config"]
    }

    fn filters(&mut self) -> &mut Vec<Value> {
        self.manager()["http_filters"].as_array_mut().unwrap()
    }

    fn filter(&mut self, name: &str) -> &mut Value {
        let found = self
            .filters()
            .iter_mut()
            .find(|filter| filter["name"] == name);
        &mut found.unwrap()["typed_config"]
    }

    fn main(&mut self) -> &mut Value {
        self.filter("envoy.filters.http.ext_proc")
    }

    fn modes(&mut self) -> &mut Value {
        &mut self.main()["processing_mode"]
    }

    fn probe(&mut self) -> &mut Value {
        self.filter("first_token_probe")
    }

    fn host(&mut self) -> &mut Value {
        &mut self.manager()["route_config"]["virtual_hosts"][0]
    }

    fn action(&mut self) -> &mut Value {
        &mut self.host()["routes"][0]["route"]
    }

    fn cluster(&mut self, name: &str) -> &mut Value {
        let clusters = self.envoy["static_resources"]["clusters"]
            .as_array_mut()
            .unwrap();
        clusters
            .iter_mut()
            .find(|cluster| cluster["name"] == name)
            .unwrap()
    }

    fn upstream(&mut self) -> &mut Value {
        let options = &mut self.cluster("workers")["typed_extension_protocol_options"];
        &mut options["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]
    }

    /// The filter for further tries.
    fn retry_filter(&mut self) -> &mut Value {
        &mut self.upstream()["http_filters"][0]["typed_config"]["extension_config"]["typed_config"]
    }

    fn policy(&mut self) -> &mut Value {
        &mut self.cluster("workers")["load_balancing_policy"]["policies"][0]["typed_extension_config"]
            ["typed_config"]
    }

    fn without(place: &mut Value, key: &str) {
        place
            .as_object_mut()
            .unwrap()
            .remove(key)
            .expect("it is there");
    }
}

/// What is changed, and what is found of it with which words among the mends.
#[derive(Clone, Copy)]
struct Fault {
    name: &'static str,
    file: &'static str,
    plant: fn(&mut Sides),
    expected: &'static [(Level, &'static str)],
    words: &'static str,
}

use Level::{Error, Warning};

const fn standalone(
    name: &'static str,
    plant: fn(&mut Sides),
    expected: &'static [(Level, &'static str)],
    words: &'static str,
) -> Fault {
    Fault {
        name,
        file: "standalone",
        plant,
        expected,
        words,
    }
}

const fn of(file: &'static str, fault: Fault) -> Fault {
    Fault { file, ..fault }
}

/// The filter, what it shows us, and what it does without us.
#[expect(clippy::too_many_lines, reason = "a table")]
fn filters() -> Vec<Fault> {
    vec![
        standalone(
            "no filter at all",
            |sides| {
                sides
                    .filters()
                    .retain(|filter| filter["name"] == "envoy.filters.http.router")
            },
            &[(Error, "envoy.filter")],
            "add the filter `envoy.filters.http.ext_proc` and the cluster `ext_proc`",
        ),
        standalone(
            "switched off on every route",
            |sides| {
                let off = sides.host()["routes"][1]["typed_per_filter_config"].clone();
                sides.host()["routes"][0]["typed_per_filter_config"] = off;
            },
            &[(Error, "envoy.filter")],
            "take `disabled: true` for `envoy.filters.http.ext_proc` out",
        ),
        standalone(
            "another socket",
            |sides| sides.ours["listen"] = json!({"tcp": "127.0.0.1:9002"}),
            &[(Error, "envoy.address"), (Error, "envoy.probe")],
            "address: {socket_address: {address: 127.0.0.1, port_value: 9002}}",
        ),
        standalone(
            "only watched",
            |sides| sides.main()["observability_mode"] = json!(true),
            &[(Error, "envoy.observability")],
            "`observability_mode: false`",
        ),
        standalone(
            "no bodies",
            |sides| sides.modes()["request_body_mode"] = json!("NONE"),
            &[(Error, "envoy.request_body")],
            "`request_body_mode: BUFFERED` under `processing_mode`",
        ),
        standalone(
            "streamed bodies",
            |sides| sides.modes()["request_body_mode"] = json!("STREAMED"),
            &[(Error, "envoy.request_body")],
            "`request_body_mode: BUFFERED` under `processing_mode`",
        ),
        standalone(
            "no headers",
            |sides| sides.modes()["request_header_mode"] = json!("SKIP"),
            &[(Error, "envoy.request_headers")],
            "`request_header_mode: SEND`",
        ),
        standalone(
            "no headers of answers",
            |sides| sides.modes()["response_header_mode"] = json!("SKIP"),
            &[(Warning, "envoy.response_headers")],
            "`response_header_mode: SEND`",
        ),
        standalone(
            "no trailers of answers",
            |sides| sides.modes()["response_trailer_mode"] = json!("SKIP"),
            &[(Error, "envoy.response_trailers")],
            "`response_trailer_mode: SEND`",
        ),
        standalone(
            "every token",
            |sides| sides.modes()["response_body_mode"] = json!("STREAMED"),
            &[(Warning, "envoy.response_body")],
            "`response_body_mode: NONE`",
        ),
        standalone(
            "answers held back",
            |sides| sides.modes()["response_body_mode"] = json!("BUFFERED"),
            &[(Error, "envoy.response_body")],
            "`response_body_mode: NONE`",
        ),
        standalone(
            "500 without us",
            |sides| sides.main()["failure_mode_allow"] = json!(false),
            &[(Warning, "envoy.failure_mode")],
            "`failure_mode_allow: true`",
        ),
        standalone(
            "no time",
            |sides| Sides::without(sides.main(), "message_timeout"),
            &[(Error, "envoy.message_timeout")],
            "`message_timeout: 1s`",
        ),
        standalone(
            "no time for waiting",
            |sides| {
                Sides::without(sides.main(), "max_message_timeout");
                sides.ours["queue"] = json!({"prefill_busy_threshold": 8192});
            },
            &[(Error, "envoy.max_message_timeout")],
            "`max_message_timeout: 30.5s`",
        ),
        standalone(
            "no time for so much waiting",
            |sides| sides.ours["queue"] = json!({"prefill_busy_threshold": 8192, "deadline": "2m"}),
            &[(Error, "envoy.max_message_timeout")],
            "`max_message_timeout: 120.5s`",
        ),
        standalone(
            "ended while it waits",
            |sides| {
                sides.main()["max_message_timeout"] = json!("1000s");
                sides.ours["queue"] = json!({"prefill_busy_threshold": 8192, "deadline": "11m"});
            },
            &[(Error, "envoy.idle_timeout")],
            "`stream_idle_timeout: 1260.5s`",
        ),
        standalone(
            "no wishes",
            |sides| sides.main()["allow_mode_override"] = json!(false),
            &[(Warning, "envoy.mode_override")],
            "`allow_mode_override: true`",
        ),
        standalone(
            "no word of who answered",
            |sides| Sides::without(sides.main(), "response_attributes"),
            &[(Warning, "envoy.response_attributes")],
            "`response_attributes: [upstream.address, response.flags]`",
        ),
        of(
            "gateway-api",
            standalone(
                "full duplex without lengths",
                |sides| Sides::without(sides.main(), "allow_content_length_header"),
                &[(Warning, "envoy.full_duplex")],
                "`allow_content_length_header: true`",
            ),
        ),
        of(
            "gateway-api",
            standalone(
                "full duplex, and to be served without us",
                |sides| sides.ours["failure"] = json!({"mode": "fail_open"}),
                &[(Warning, "envoy.failure_mode")],
                "`failure: {mode: fail_closed}`",
            ),
        ),
    ]
}

/// The filter that looks for first tokens.
fn probes() -> Vec<Fault> {
    vec![
        standalone(
            "the probe behind the other filter",
            |sides| sides.filters().swap(0, 1),
            &[(Error, "envoy.probe_order")],
            "put `first_token_probe` before `envoy.filters.http.ext_proc`",
        ),
        standalone(
            "a probe that cuts answers",
            |sides| sides.probe()["failure_mode_allow"] = json!(false),
            &[(Warning, "envoy.probe")],
            "`failure_mode_allow: true`",
        ),
        standalone(
            "a probe that holds answers up",
            |sides| sides.probe()["message_timeout"] = json!("10s"),
            &[(Warning, "envoy.probe")],
            "`message_timeout: 0.3s`",
        ),
        standalone(
            "a probe that does not say so",
            |sides| Sides::without(&mut sides.probe()["grpc_service"], "initial_metadata"),
            &[(Warning, "envoy.probe")],
            "`initial_metadata: [{key: x-warmroute-filter, value: probe}]`",
        ),
        standalone(
            "a probe that is not there",
            |sides| {
                sides
                    .filters()
                    .retain(|filter| filter["name"] != "first_token_probe")
            },
            &[(Warning, "envoy.probe")],
            "take x-warmroute-filter out",
        ),
        standalone(
            "first tokens of nobody",
            |sides| Sides::without(sides.probe(), "metadata_options"),
            &[(Warning, "envoy.probe")],
            "`warmroute` into `forwarding_namespaces",
        ),
    ]
}

/// The way to us and from our word to a worker.
#[expect(clippy::too_many_lines, reason = "a table")]
fn clusters() -> Vec<Fault> {
    vec![
        standalone(
            "breakers of the way to us",
            |sides| Sides::without(sides.cluster("ext_proc"), "circuit_breakers"),
            &[(Error, "envoy.circuit_breakers")],
            "in cluster `ext_proc` write `circuit_breakers: {thresholds: [{max_connections: 100000",
        ),
        standalone(
            "breakers of the workers",
            |sides| {
                sides.cluster("workers")["circuit_breakers"]["thresholds"][0]["max_requests"] =
                    json!(1024)
            },
            &[(Warning, "envoy.circuit_breakers")],
            "in cluster `workers` write `circuit_breakers",
        ),
        standalone(
            "HTTP/1 to us",
            |sides| {
                Sides::without(
                    sides.cluster("ext_proc"),
                    "typed_extension_protocol_options",
                )
            },
            &[(Error, "envoy.http2"), (Warning, "envoy.keepalive")],
            "`typed_extension_protocol_options` as in cluster `ext_proc`",
        ),
        standalone(
            "no pings",
            |sides| {
                let options = &mut sides.cluster("ext_proc")["typed_extension_protocol_options"];
                options["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]["explicit_http_config"] =
                    json!({"http2_protocol_options": {}});
            },
            &[(Warning, "envoy.keepalive")],
            "`connection_keepalive: {interval: 2s, timeout: 2s}`",
        ),
        standalone(
            "plaintext where we want TLS",
            |sides| {
                sides.ours["listen"] =
                    json!({"tcp": "127.0.0.1:9002", "tls": {"self_signed": true}});
                for cluster in ["ext_proc", "first_token_probe"] {
                    sides.cluster(cluster)["load_assignment"]["endpoints"][0]["lb_endpoints"][0]
                        ["endpoint"]["address"] =
                        json!({"socket_address": {"address": "127.0.0.1", "port_value": 9002}});
                }
            },
            &[(Error, "envoy.tls"), (Error, "envoy.tls")],
            "write a `transport_socket` as in envoy/README.md",
        ),
        standalone(
            "another key of the metadata",
            |sides| {
                sides.policy()["override_host_sources"][0]["metadata"]["path"][0]["key"] =
                    json!("x-worker");
            },
            &[(Error, "envoy.override_host")],
            "`- metadata: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint}]}`",
        ),
        standalone(
            "metadata that is dropped",
            |sides| {
                sides.main()["metadata_options"]["receiving_namespaces"]["untyped"] =
                    json!(["warmroute"]);
            },
            &[(Error, "envoy.metadata")],
            "`envoy.lb` into `receiving_namespaces",
        ),
        standalone(
            "no word of who served",
            |sides| Sides::without(sides.policy(), "selected_host_key"),
            &[(Warning, "envoy.served")],
            "write `selected_host_key: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint-served}]}`",
        ),
        standalone(
            "a balancer of its own",
            |sides| Sides::without(sides.cluster("workers"), "load_balancing_policy"),
            &[(Error, "envoy.way")],
            "write the `load_balancing_policy` of cluster `workers` in envoy/standalone.yaml",
        ),
        of(
            "subset",
            standalone(
                "one host per subset",
                |sides| {
                    sides.policy()["subset_selectors"][0]["single_host_per_subset"] = json!(true)
                },
                &[(Error, "envoy.way")],
                "take `single_host_per_subset` out",
            ),
        ),
        of(
            "subset",
            standalone(
                "nothing makes metadata of the id",
                |sides| {
                    sides
                        .filters()
                        .retain(|filter| filter["name"] != "envoy.filters.http.header_to_metadata")
                },
                &[(Error, "envoy.way")],
                "add the filter `envoy.filters.http.header_to_metadata`",
            ),
        ),
        of(
            "subset",
            standalone(
                "the endpoint beside the id",
                |sides| {
                    sides.main()["metadata_options"]["receiving_namespaces"]["untyped"] =
                        json!(["envoy.lb", "warmroute"]);
                },
                &[(Error, "envoy.way")],
                "take `envoy.lb` out of the `receiving_namespaces`",
            ),
        ),
        of(
            "original-dst",
            standalone(
                "the address in another header",
                |sides| {
                    sides.cluster("workers")["original_dst_lb_config"]["http_header_name"] =
                        json!("x-where")
                },
                &[(Error, "envoy.way")],
                "write `http_header_name: x-gateway-destination-endpoint`",
            ),
        ),
        of(
            "route-per-header",
            standalone(
                "routes that are not looked for again",
                |sides| sides.ours["gateway"] = json!({"clear_route_cache": false}),
                &[(Error, "envoy.clear_route_cache")],
                "`gateway: {clear_route_cache: true}`",
            ),
        ),
    ]
}

/// Routes, clients and workers.
#[expect(clippy::too_many_lines, reason = "a table")]
fn routes() -> Vec<Fault> {
    vec![
        standalone(
            "Envoy's own limit of bodies",
            |sides| Sides::without(sides.host(), "request_body_buffer_limit"),
            &[(Warning, "envoy.body_limit")],
            "write `request_body_buffer_limit: 33554432`, or in our configuration `limits: {body: 1MiB}`",
        ),
        standalone(
            "longer bodies than we take",
            |sides| sides.host()["request_body_buffer_limit"] = json!(64 << 20),
            &[(Error, "envoy.body_limit")],
            "`limits: {body: 64MiB}`",
        ),
        standalone(
            "longer bodies than we take, by the listener",
            |sides| {
                Sides::without(sides.host(), "request_body_buffer_limit");
                sides.listener()["per_connection_buffer_limit_bytes"] = json!(64 << 20);
            },
            &[(Error, "envoy.body_limit")],
            "`limits: {body: 64MiB}`",
        ),
        standalone(
            "generations are cut",
            |sides| Sides::without(sides.action(), "timeout"),
            &[(Error, "envoy.route_timeout")],
            "write `timeout: 0s` in the route /v1/",
        ),
        standalone(
            "prompts computed twice",
            |sides| sides.action()["retry_policy"]["retry_on"] = json!("connect-failure,5xx"),
            &[(Warning, "envoy.retry")],
            "write `retry_on: connect-failure,refused-stream,reset-before-request`",
        ),
        standalone(
            "the same dead worker again",
            |sides| Sides::without(&mut sides.action()["retry_policy"], "retry_host_predicate"),
            &[(Warning, "envoy.retry")],
            "write the `retry_host_predicate`",
        ),
        standalone(
            "no other worker",
            |sides| Sides::without(sides.action(), "retry_policy"),
            &[(Warning, "envoy.retry")],
            "write the `retry_policy` of envoy/standalone.yaml",
        ),
        standalone(
            "a header is left to clients",
            |sides| {
                let removed = &mut sides.manager()["early_header_mutation_extensions"][0]["typed_config"]
                    ["mutations"];
                removed
                    .as_array_mut()
                    .unwrap()
                    .retain(|line| line["remove"] != "x-data-parallel-rank");
            },
            &[(Warning, "envoy.client_headers")],
            "write - remove: x-data-parallel-rank",
        ),
        of(
            "original-dst",
            standalone(
                "clients go where they like",
                |sides| Sides::without(sides.manager(), "early_header_mutation_extensions"),
                &[(Error, "envoy.client_headers")],
                "- remove: x-gateway-destination-endpoint;",
            ),
        ),
        standalone(
            "another file of endpoints",
            |sides| sides.ours["envoy"]["endpoints_file"] = json!("/run/warmroute/eds.yaml"),
            &[(Error, "envoy.endpoints_file")],
            "path_config_source: {path: /run/warmroute/eds.yaml, watched_directory: {path: /run/warmroute}}",
        ),
        standalone(
            "endpoints of another cluster",
            |sides| sides.ours["envoy"]["cluster"] = json!("engines"),
            &[(Error, "envoy.endpoints_file")],
            "`envoy: {cluster: workers}`",
        ),
        standalone(
            "a folder that is not watched",
            |sides| {
                let eds = &mut sides.cluster("workers")["eds_cluster_config"]["eds_config"]["path_config_source"];
                eds["watched_directory"]["path"] = json!("/tmp");
            },
            &[(Error, "envoy.endpoints_file")],
            "write `watched_directory: {path: /tmp/",
        ),
        of(
            "xds",
            standalone(
                "a cluster that we do not tell of",
                |sides| {
                    sides.cluster("workers")["eds_cluster_config"]["service_name"] =
                        json!("engines")
                },
                &[(Error, "envoy.xds"), (Error, "envoy.endpoints")],
                "`envoy: {cluster: engines}`",
            ),
        ),
        standalone(
            "nobody listens",
            |sides| sides.ours["envoy"]["xds"] = json!({}),
            &[(Warning, "envoy.xds")],
            "DELTA_GRPC",
        ),
        standalone(
            "a worker that Envoy does not know",
            |sides| {
                let workers = sides.ours["workers"].as_array_mut().unwrap();
                workers.push(json!({"id": 4, "endpoint": "127.0.0.1:18004"}));
            },
            &[(Error, "envoy.endpoints")],
            "start warmroute, which writes",
        ),
    ]
}

/// Prefill and decode on different workers.
#[expect(clippy::too_many_lines, reason = "a table")]
fn disaggregated() -> Vec<Fault> {
    let fault = |name, plant, expected, words| Fault {
        name,
        file: "disaggregated-mirror",
        plant,
        expected,
        words,
    };
    vec![
        fault(
            "nobody gets a copy",
            |sides| {
                for route in sides.host()["routes"].as_array_mut().unwrap() {
                    let action = route.get_mut("route").and_then(Value::as_object_mut);
                    action.map(|action| action.remove("request_mirror_policies"));
                }
            },
            &[(Error, "envoy.mirror")],
            "`request_mirror_policies: [{cluster_header: x-prefill-cluster}]`",
        ),
        fault(
            "a cluster that asks for its own name",
            |sides| {
                Sides::without(
                    &mut sides.cluster("prefill")["eds_cluster_config"],
                    "service_name",
                )
            },
            &[(Error, "envoy.endpoints_file")],
            "in the `eds_cluster_config` of cluster `prefill` write `service_name: workers`",
        ),
        fault(
            "copies beyond Envoy's own limit",
            |sides| Sides::without(sides.cluster("prefill"), "circuit_breakers"),
            &[(Error, "envoy.circuit_breakers")],
            "in cluster `prefill` write",
        ),
        fault(
            "copies to whoever is there",
            |sides| {
                let policy = &mut sides.cluster("prefill")["load_balancing_policy"]["policies"][0];
                let fallback =
                    &mut policy["typed_extension_config"]["typed_config"]["fallback_policy"];
                fallback["policies"][0]["typed_extension_config"]["typed_config"]["fallback_policy"] =
                    json!("ANY_ENDPOINT");
            },
            &[(Warning, "envoy.mirror_fallback")],
            "`fallback_policy` of cluster `prefill`",
        ),
        fault(
            "the header of the copy is removed",
            |sides| sides.host()["request_headers_to_remove"] = json!(["x-prefill-cluster"]),
            &[(Error, "envoy.mirror")],
            "take `x-prefill-cluster` out",
        ),
        fault(
            "copies of some",
            |sides| {
                for route in sides.host()["routes"].as_array_mut().unwrap() {
                    if let Some(policies) = route.pointer_mut("/route/request_mirror_policies") {
                        policies[0]["runtime_fraction"] =
                            json!({"default_value": {"numerator": 50}});
                    }
                }
            },
            &[(Error, "envoy.mirror")],
            "take `runtime_fraction` out",
        ),
        fault(
            "nobody decodes",
            |sides| {
                for worker in sides.ours["workers"].as_array_mut().unwrap() {
                    worker["role"] = json!("prefill");
                    worker["bootstrap"] = json!({"port": 9000 + worker["id"].as_u64().unwrap()});
                }
            },
            &[(Warning, "envoy.fallback")],
            "in the `default_subset` of cluster `workers`",
        ),
        fault(
            "a further try that nobody sees",
            |sides| Sides::without(sides.upstream(), "http_filters"),
            &[(Error, "envoy.retry_filter")],
            "with the filter `another_room` of envoy/disaggregated-mirror.yaml",
        ),
        fault(
            "tries without a number",
            |sides| Sides::without(sides.host(), "include_request_attempt_count"),
            &[(Error, "envoy.retry_filter")],
            "`include_request_attempt_count: true`",
        ),
        of(
            "disaggregated-call",
            fault(
                "a further try with the blocks of the first",
                |sides| Sides::without(sides.upstream(), "http_filters"),
                &[(Error, "envoy.retry_filter")],
                "with the filter `prefilled_anew` of envoy/disaggregated-call.yaml",
            ),
        ),
        of(
            "disaggregated-call",
            fault(
                "the same while we are away",
                |sides| sides.retry_filter()["failure_mode_allow"] = json!(true),
                &[(Error, "envoy.retry_filter")],
                "`failure_mode_allow: false`",
            ),
        ),
        of(
            "disaggregated-call",
            fault(
                "no time for a prefill",
                |sides| {
                    sides.main()["max_message_timeout"] = json!("20s");
                    Sides::without(sides.retry_filter(), "max_message_timeout");
                },
                &[
                    (Error, "envoy.max_message_timeout"),
                    (Error, "envoy.retry_filter"),
                ],
                "`max_message_timeout: 41s`",
            ),
        ),
    ]
}

fn wrong(findings: &[Finding]) -> Vec<(Level, &str)> {
    let bad = findings
        .iter()
        .filter(|one| matches!(one.level, Level::Error | Level::Warning));
    let mut wrong: Vec<_> = bad.map(|one| (one.level, one.check)).collect();
    wrong.sort_unstable();
    wrong
}

async fn each(faults: Vec<Fault>) {
    let count = faults.len();
    let examined = stream::iter(faults).map(async |fault| {
        let dir = tempfile::Builder::new()
            .prefix("doctor-")
            .tempdir()
            .unwrap();
        let mut sides = Sides::shipped(fault.file, dir.path());
        (fault.plant)(&mut sides);
        let found = sides.examine(dir.path()).await;
        let mut expected = fault.expected.to_vec();
        expected.sort_unstable();
        assert_eq!(wrong(&found), expected, "{}: {found:#?}", fault.name);
        let mends: Vec<_> = found.iter().filter_map(|one| one.mend.as_deref()).collect();
        assert!(
            mends.iter().any(|mend| mend.contains(fault.words)),
            "{}: {mends:#?}",
            fault.name
        );
    });
    assert_eq!(examined.buffer_unordered(2).count().await, count);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_shipped_configuration_is_well() {
    for file in envoy::shipped().unwrap() {
        let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
        let dir = tempfile::Builder::new()
            .prefix("doctor-")
            .tempdir()
            .unwrap();
        let found = Sides::shipped(&name, dir.path()).examine(dir.path()).await;
        assert!(
            found.iter().all(|one| one.level == Level::Ok),
            "{name}: {found:#?}"
        );
        assert!(found.len() > 15, "{name}: {found:#?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_change_of_the_filter_is_found_and_mended() {
    each(filters()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_change_of_the_probe_is_found_and_mended() {
    each(probes()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_change_of_the_clusters_is_found_and_mended() {
    each(clusters()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_change_of_the_routes_is_found_and_mended() {
    each(routes()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_change_of_what_prefills_need_is_found_and_mended() {
    each(disaggregated()).await;
}
