//! The manifests, the chart and the Dockerfile: held against the schemas of Kubernetes, our own reader of configurations, a real
//! Envoy, and one another. What is applied together is read from the README's own commands.

#![expect(clippy::unwrap_used, reason = "a test ends where something fails")]

#[path = "../examples/support/mod.rs"]
mod support;

#[path = "manifests/set.rs"]
mod set;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use serde_json::{Value, json};
use warmroute::config::Config;

use set::{FOLDER, Pods, Set, named, policy_ports, validated};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// The oldest version of Kubernetes that the manifests are for.
const KUBERNETES: &str = "1.30";
/// The ways of the README, and what the chart renders, with the engines that it does not. Read once for all tests.
fn sets() -> &'static [Set] {
    static SETS: LazyLock<Vec<Set>> = LazyLock::new(|| {
        let mut sets = Set::of_readme();
        assert_eq!(sets.len(), 7, "the README names seven ways");
        let chart = fs::read_dir(format!("{FOLDER}/chart/ci")).unwrap();
        let mut values: Vec<PathBuf> = chart.map(|entry| entry.unwrap().path()).collect();
        values.sort();
        assert_eq!(values.len(), 3);
        let engines = || Set::of("", ["engines", "namespace.yaml"]);
        sets.extend(
            values
                .iter()
                .map(|values| Set::of_chart(values).with(engines())),
        );
        sets
    });
    &SETS
}

/// A shipped configuration as this machine can check it: the model's files are those of the examples.
fn prepared(text: &str) -> Value {
    let text = text
        .replace("/models/", &format!("{ROOT}/examples/models/"))
        .replace("tokenizer.json", "tokenizer.json.gz");
    serde_saphyr::from_str(&text).unwrap()
}

fn parsed(set: &Set) -> Config {
    let config = prepared(set.text("warmroute", "warmroute.yaml"));
    let config = Config::parse(
        Path::new("/etc/warmroute/warmroute.yaml"),
        config.to_string().as_bytes(),
    );
    config.unwrap_or_else(|errors| panic!("{}: {errors:?}", set.name))
}

/// The ports at which warmroute listens: ext_proc, health, admin, xDS where it has its own, and the API where it is on.
fn listens(config: &Config) -> (u64, u64, u64, [Option<u64>; 2]) {
    let api = config.api.as_ref().map(|api| api.listen);
    let xds = config
        .envoy
        .as_ref()
        .and_then(|envoy| envoy.xds.as_ref()?.listen);
    let port = |address: std::net::SocketAddr| u64::from(address.port());
    (
        port(config.listen.tcp.unwrap()),
        port(config.listen.health.unwrap()),
        port(config.admin.listen),
        [xds, api].map(|listen| listen.map(port)),
    )
}

fn is_warmroute(pod: &Pods<'_>) -> bool {
    pod.labels["app"] == "warmroute"
}

fn warmroute(set: &Set) -> Pods<'_> {
    set.pods().into_iter().find(is_warmroute).unwrap()
}

#[test]
fn every_object_is_as_its_schema_says() {
    for set in sets() {
        let mut seen = BTreeSet::new();
        let said = validated(&Value::from(set.objects.clone()), KUBERNETES);
        for (object, said) in set.objects.iter().zip(said.as_array().unwrap()) {
            let (kind, name) = (
                object["kind"].as_str().unwrap(),
                object["metadata"]["name"].as_str().unwrap(),
            );
            let of = format!("{}: {kind} {name}", set.name);
            assert!(seen.insert((kind, name)), "{of} is there twice");
            let namespace = &object["metadata"]["namespace"];
            assert_eq!(
                *namespace,
                if kind == "Namespace" {
                    Value::Null
                } else {
                    json!("inference")
                },
                "{of}"
            );
            match said.as_str() {
                None => {}
                // Dynamo's operator publishes none with its chart.
                Some("no schema") => assert_eq!(kind, "DynamoGraphDeployment", "{of}"),
                Some(wrong) => panic!("{of}: {wrong}"),
            }
        }
    }
}

#[test]
fn what_is_wrong_is_found() {
    const GATEWAY: &str = "gateway.envoyproxy.io/v1alpha1";
    let wrong = json!([
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"ports": [{"prot": 1, "port": 2}]}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"ports": [{"port": "two"}]}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"ports": [{"port": 2}]}},
        {"apiVersion": "else/v1", "kind": "Other", "metadata": {"name": "a"}},
        {"apiVersion": GATEWAY, "kind": "BackendTrafficPolicy", "spec": {"retry": {"retries": 5}}},
        {"apiVersion": GATEWAY, "kind": "ClientTrafficPolicy", "spec": {"headers": {"enableEnvoyHeaders": "yes"}}},
        {"apiVersion": GATEWAY, "kind": "ClientTrafficPolicy", "spec": {"headers": {"enableEnvoyHeaders": true}}},
    ]);
    let said = validated(&wrong, KUBERNETES);
    assert!(said[0].as_str().unwrap().contains("prot"), "{said}");
    assert!(said[1].as_str().unwrap().contains("two"), "{said}");
    assert_eq!((&said[2], &said[3]), (&Value::Null, &json!("no schema")));
    assert!(said[4].as_str().unwrap().contains("retries"), "{said}");
    assert!(said[5].as_str().unwrap().contains("yes"), "{said}");
    assert_eq!(said[6], Value::Null);
}

#[test]
fn a_configuration_is_read_and_its_drain_fits_into_the_grace_of_its_pod() {
    for set in sets() {
        let config = parsed(set);
        let advice: Vec<_> = config
            .advice(&config.typical_workers())
            .into_iter()
            .map(|advice| advice.seen)
            .collect();
        assert_eq!(advice, [""; 0], "{}", set.name);
        let drain = serde_json::to_value(&config.drain).unwrap();
        let period = |key: &str| humantime::parse_duration(drain[key].as_str().unwrap()).unwrap();
        let grace = warmroute(set).spec["terminationGracePeriodSeconds"]
            .as_u64()
            .unwrap();
        let needed = period("grace") + period("deadline");
        assert!(
            needed < Duration::from_secs(grace),
            "{}: {needed:?} within {grace} s",
            set.name
        );
    }
}

#[test]
fn pods_are_confined() {
    for set in sets() {
        for pod in set.pods() {
            let of = format!("{}: {}", set.name, pod.name());
            let init = pod.spec["initContainers"].as_array().into_iter().flatten();
            for container in pod.containers().chain(init) {
                let image = container["image"].as_str().unwrap();
                let tag = image
                    .rsplit('/')
                    .next()
                    .unwrap()
                    .split_once(':')
                    .map(|(_, tag)| tag);
                assert!(tag.is_some_and(|tag| tag != "latest"), "{of}: {image}");
                if pod.owner["kind"] == "DynamoGraphDeployment" {
                    continue; // its operator makes the pods
                }
                let security = &container["securityContext"];
                assert_eq!(security["allowPrivilegeEscalation"], false, "{of}");
                assert_eq!(security["capabilities"]["drop"], json!(["ALL"]), "{of}");
                assert!(
                    container["resources"]["limits"]["memory"].is_string(),
                    "{of}"
                );
                if pod.labels["warmroute.dev/engine"].is_null() {
                    assert_eq!(security["readOnlyRootFilesystem"], true, "{of}");
                }
            }
            if pod.owner["kind"] != "DynamoGraphDeployment" {
                let security = &pod.spec["securityContext"];
                assert_eq!(security["seccompProfile"]["type"], "RuntimeDefault", "{of}");
                let root = security["runAsNonRoot"] == true
                    && security["runAsUser"].as_u64().is_some_and(|user| user > 0);
                assert!(
                    root || !pod.labels["warmroute.dev/engine"].is_null(),
                    "{of}"
                );
            }
        }
    }
}

#[test]
fn what_is_named_is_there() {
    for set in sets() {
        for pod in set.pods() {
            let of = format!("{}: {}", set.name, pod.name());
            for volume in pod.spec["volumes"].as_array().into_iter().flatten() {
                if let Some(map) = volume.get("configMap") {
                    set.find("ConfigMap", &map["name"]);
                }
            }
            for container in pod.containers() {
                let volumes = pod.spec["volumes"].as_array().into_iter().flatten();
                let volumes: Vec<&Value> = volumes.map(|volume| &volume["name"]).collect();
                for mount in container["volumeMounts"].as_array().into_iter().flatten() {
                    assert!(volumes.contains(&&mount["name"]), "{of}: {mount}");
                }
            }
            let account = &pod.spec["serviceAccountName"];
            if !account.is_null() {
                set.find("ServiceAccount", account);
            }
            let token = pod.spec["automountServiceAccountToken"] == true;
            assert_eq!(
                token,
                is_warmroute(&pod),
                "{of}: only warmroute asks the API server"
            );
        }
        let binding = set.find("RoleBinding", &json!("warmroute"));
        assert_eq!(
            binding["subjects"][0]["name"],
            warmroute(set).spec["serviceAccountName"],
            "{}",
            set.name
        );
        assert_eq!(binding["subjects"][0]["namespace"], "inference");
        let role = set.find(
            binding["roleRef"]["kind"].as_str().unwrap(),
            &binding["roleRef"]["name"],
        );
        assert_eq!(role["kind"], "Role", "{}: of one namespace only", set.name);
        let rule = |groups: &[&str], resources: &[&str]| json!({"apiGroups": groups, "resources": resources, "verbs": ["get", "list", "watch"]});
        let mut rules = vec![
            rule(&[""], &["pods"]),
            rule(&["inference.networking.k8s.io"], &["inferencepools"]),
        ];
        if set.name.ends_with("scaled.yaml") {
            let resources = ["inferenceobjectives", "inferencemodelrewrites"];
            rules.push(rule(
                &["llm-d.ai", "inference.networking.x-k8s.io"],
                &resources,
            ));
        }
        assert_eq!(
            role["rules"],
            json!(rules),
            "{}: this and nothing else",
            set.name
        );
    }
}

#[test]
fn selectors_select_pods() {
    for set in sets() {
        for object in &set.objects {
            let spec = &object["spec"];
            match object["kind"].as_str().unwrap() {
                "Deployment" | "DaemonSet" => {
                    let own = set.selected(&spec["selector"]["matchLabels"]);
                    assert!(
                        own.iter().all(|pod| std::ptr::eq(pod.owner, object)),
                        "{}: {object}",
                        set.name
                    );
                    let mut spread = Vec::new();
                    named(&spec["template"]["spec"], "labelSelector", &mut spread);
                    assert!(
                        spread
                            .iter()
                            .all(|selector| selector["matchLabels"]
                                == spec["selector"]["matchLabels"])
                    );
                }
                "Service" => drop(set.selected(&spec["selector"])),
                "PodDisruptionBudget" | "InferencePool" => {
                    drop(set.selected(&spec["selector"]["matchLabels"]))
                }
                "NetworkPolicy" => drop(set.selected(&spec["podSelector"]["matchLabels"])),
                "HorizontalPodAutoscaler" => {
                    drop(set.find("Deployment", &spec["scaleTargetRef"]["name"]))
                }
                _ => {}
            }
        }
    }
}

#[test]
fn ports_of_warmroute_agree() {
    for set in sets() {
        let config = parsed(set);
        let (ext_proc, health, admin, [xds, api]) = listens(&config);
        let pod = warmroute(set);
        for (name, port) in [("ext-proc", ext_proc), ("health", health), ("admin", admin)] {
            assert_eq!(pod.port(&json!(name)), Some(port), "{}: {name}", set.name);
        }
        let container = pod.containers().next().unwrap();
        for (probe, service) in [
            ("readinessProbe", "readiness"),
            ("livenessProbe", "liveness"),
        ] {
            assert_eq!(
                container[probe]["grpc"],
                json!({"port": health, "service": service}),
                "{}",
                set.name
            );
        }
        let annotations = &pod.owner["spec"]["template"]["metadata"]["annotations"];
        assert_eq!(annotations["prometheus.io/port"], json!(admin.to_string()));

        let all: BTreeSet<u64> = [Some(ext_proc), Some(health), Some(admin), xds, api]
            .into_iter()
            .flatten()
            .collect();
        let policies = set
            .all("NetworkPolicy")
            .filter(|policy| policy["spec"]["podSelector"]["matchLabels"]["app"] == "warmroute");
        let open: BTreeSet<u64> = policies
            .flat_map(|policy| policy_ports(&policy["spec"]["ingress"]))
            .collect();
        assert_eq!(
            open, all,
            "{}: what policies let in, and where warmroute listens",
            set.name
        );
        for service in set
            .all("Service")
            .filter(|service| service["spec"]["selector"]["app"] == "warmroute")
        {
            for port in service["spec"]["ports"].as_array().unwrap() {
                let target = pod
                    .port(&port["targetPort"])
                    .or(port["targetPort"].as_u64());
                assert!(
                    target.is_some_and(|target| [Some(ext_proc), xds, api].contains(&Some(target))),
                    "{}: {port}",
                    set.name
                );
                // Without an address of its own a service changes no port.
                assert!(
                    service["spec"]["clusterIP"].is_null() || port["port"].as_u64() == target,
                    "{}: {port}",
                    set.name
                );
            }
        }
        if let Some(from) = config.takeover.and_then(|takeover| takeover.from) {
            let (service, port) = from
                .strip_prefix("http://")
                .unwrap()
                .split_once(':')
                .unwrap();
            assert_eq!(
                port.parse().ok(),
                api,
                "{}: they copy from one another",
                set.name
            );
            let ports = &set.find("Service", &json!(service))["spec"]["ports"];
            assert!(
                ports
                    .as_array()
                    .unwrap()
                    .iter()
                    .any(|own| own["port"].as_u64() == api),
                "{}: {from}",
                set.name
            );
            let policies = set.all("NetworkPolicy").filter(|policy| {
                policy["spec"]["podSelector"]["matchLabels"]["app"] == "warmroute"
            });
            let reaches: BTreeSet<u64> = policies
                .flat_map(|policy| policy_ports(&policy["spec"]["egress"]))
                .collect();
            assert!(
                reaches.contains(&api.unwrap()),
                "{}: policies let nobody out to the others",
                set.name
            );
        }
        for picker in set
            .all("InferencePool")
            .map(|pool| &pool["spec"]["endpointPickerRef"])
        {
            let ports = &set.find("Service", &picker["name"])["spec"]["ports"];
            assert!(
                ports
                    .as_array()
                    .unwrap()
                    .iter()
                    .any(|port| port["port"] == picker["port"]["number"]),
                "{}",
                set.name
            );
        }
    }
}

#[test]
fn workers_are_found_where_they_listen_and_policies_let_them_be_asked() {
    for set in sets() {
        let pools = parsed(set).kubernetes.unwrap().pools;
        let egress = set
            .all("NetworkPolicy")
            .filter(|policy| policy["spec"]["podSelector"]["matchLabels"]["app"] == "warmroute");
        let egress: BTreeSet<u64> = egress
            .flat_map(|policy| policy_ports(&policy["spec"]["egress"]))
            .collect();
        let inside = set.all("NetworkPolicy");
        let inside = inside.filter(|policy| {
            policy["spec"]["podSelector"]["matchLabels"]["warmroute.dev/engine"] == "true"
        });
        let inside: BTreeSet<u64> = inside
            .flat_map(|policy| policy_ports(&policy["spec"]["ingress"]))
            .collect();
        for pool in &pools {
            assert_eq!(pool.namespace, None, "{}: its own", set.name);
            let (selector, ports) = match &pool.name {
                Some(name) => {
                    let found = &set.find("InferencePool", &json!(name))["spec"];
                    let ports = found["targetPorts"]
                        .as_array()
                        .unwrap()
                        .iter()
                        .map(|port| port["number"].clone());
                    (
                        found["selector"]["matchLabels"].clone(),
                        ports.collect::<Vec<_>>(),
                    )
                }
                None => (
                    json!(pool.selector),
                    pool.ports.iter().map(|port| json!(port)).collect(),
                ),
            };
            let events = json!(pool.worker.kv_events);
            let events = ["port", "replay_port"].map(|key| events[key].clone());
            let events: Vec<&Value> = events.iter().filter(|port| port.is_number()).collect();
            assert!(
                !events.is_empty(),
                "{}: who says nothing is known by predictions only",
                set.name
            );
            for pod in set.selected(&selector) {
                let of = format!("{}: {}", set.name, pod.name());
                assert_eq!(
                    pod.labels["warmroute.dev/engine"], "true",
                    "{of}: policies know it by this"
                );
                let arguments: String = pod
                    .containers()
                    .map(|container| container["args"].to_string())
                    .collect();
                for port in &events {
                    assert!(
                        arguments.contains(&format!("tcp://*:{port}")),
                        "{of} does not publish at {port}: {arguments}"
                    );
                }
                if pod.owner["kind"] == "Deployment" {
                    for port in ports.iter().chain(events.iter().copied()) {
                        assert_eq!(pod.port(port), port.as_u64(), "{of}");
                    }
                }
                for port in ports.iter().chain(events.iter().copied()) {
                    let port = port.as_u64().unwrap();
                    assert!(
                        egress.contains(&port) && inside.contains(&port),
                        "{of}: a policy is in the way of {port}"
                    );
                }
            }
        }
    }
}

/// The value at which Envoy's configuration has an address, as `host:port`.
fn addresses(config: &Value) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    named(config, "socket_address", &mut found);
    let address = |at: &Value| {
        (
            at["address"].as_str().unwrap().to_owned(),
            at["port_value"].as_u64().unwrap(),
        )
    };
    found.into_iter().map(address).collect()
}

#[test]
fn a_real_envoy_takes_its_configuration_which_asks_where_warmroute_is() {
    let shipped: Value =
        serde_saphyr::from_str(&fs::read_to_string(format!("{ROOT}/envoy/xds.yaml")).unwrap())
            .unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut checked = 0;
    for set in sets()
        .iter()
        .filter(|set| set.all("DaemonSet").next().is_some())
    {
        checked += 1;
        let text = set.text("warmroute-envoy", "envoy.yaml");
        let mut config: Value = serde_saphyr::from_str(text).unwrap();
        let pod = set
            .pods()
            .into_iter()
            .find(|pod| pod.labels["app"] == "warmroute-envoy")
            .unwrap();
        for (host, port) in addresses(&config) {
            match host.strip_suffix(".inference.svc.cluster.local") {
                Some(service) => {
                    let ports = &set.find("Service", &json!(service))["spec"]["ports"];
                    assert!(
                        ports
                            .as_array()
                            .unwrap()
                            .iter()
                            .any(|own| own["port"] == port),
                        "{}: {port}",
                        set.name
                    );
                }
                None if host == "0.0.0.0" => {
                    assert_eq!(pod.port(&json!(port)), Some(port), "{}", set.name)
                }
                None => assert_eq!((host.as_str(), port), ("127.0.0.1", 9900)),
            }
        }
        same_as_shipped(&config, &shipped);
        let arguments = pod.containers().next().unwrap()["args"].as_array().unwrap();
        assert!(
            arguments.contains(&json!("--service-node"))
                && arguments.contains(&json!("--service-cluster"))
        );
        config["node"] = json!({"id": "pod", "cluster": "warmroute-gateway"});
        let file = dir.path().join("envoy.yaml");
        fs::write(&file, config.to_string()).unwrap();
        support::envoy::validate(&file).unwrap();
    }
    assert_eq!(checked, 3, "(b), (c) and the chart have an Envoy");
    let (one, other) = (
        Set::of("", ["envoy/envoy-config.yaml"]),
        fs::read_to_string(format!("{FOLDER}/chart/files/envoy.yaml")),
    );
    assert_eq!(
        one.text("warmroute-envoy", "envoy.yaml").trim_end(),
        other.unwrap().trim_end(),
        "the chart's copy"
    );
}

/// What the README of `envoy/` explains is the same here, but for what several replicas and other clients ask.
fn same_as_shipped(config: &Value, shipped: &Value) {
    let manager = |of: &Value| {
        of["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
            .clone()
    };
    let (mut own, mut theirs) = (manager(config), manager(shipped));
    assert_eq!(
        own.as_object_mut().unwrap().remove("use_remote_address"),
        Some(json!(true))
    );
    let filters = theirs["http_filters"].as_array_mut().unwrap();
    assert_eq!(filters.remove(0)["name"], "first_token_probe");
    assert!(
        filters[0]["typed_config"]["grpc_service"]
            .as_object_mut()
            .unwrap()
            .remove("initial_metadata")
            .is_some()
    );
    let routes = theirs["route_config"]["virtual_hosts"][0]["routes"]
        .as_array_mut()
        .unwrap();
    assert_eq!(routes.pop().unwrap()["match"]["prefix"], "/");
    assert_eq!(own, theirs);
    // Who leaves is noticed within the grace.
    let check = &config["static_resources"]["clusters"][2]["health_checks"][0];
    assert_eq!(
        (
            &check["grpc_health_check"]["service_name"],
            &check["interval"]
        ),
        (&json!("readiness"), &json!("2s"))
    );
    assert!(
        check["unhealthy_threshold"]
            .as_u64()
            .is_some_and(|times| times <= 2),
        "{check}"
    );
    let cluster = |of: &Value, name: &str| {
        let clusters = of["static_resources"]["clusters"].as_array().unwrap();
        clusters
            .iter()
            .find(|cluster| cluster["name"] == name)
            .unwrap()
            .clone()
    };
    assert_eq!(cluster(config, "workers"), cluster(shipped, "workers"));
    for name in ["ext_proc", "xds"] {
        let (own, theirs) = (cluster(config, name), cluster(shipped, name));
        for key in ["circuit_breakers", "typed_extension_protocol_options"] {
            assert_eq!(own[key], theirs[key], "{name}");
        }
        assert_eq!(
            own["transport_socket"]["name"], "envoy.transport_sockets.tls",
            "{name}"
        );
    }
}

#[test]
fn gateways_ask_warmroute_by_tls_where_it_is() {
    for set in sets() {
        let config = parsed(set);
        assert!(config.listen.tls.is_some(), "{}", set.name);
        let hosts = set
            .all("DestinationRule")
            .map(|rule| (&rule["spec"]["host"], &rule["spec"]["trafficPolicy"]["tls"]));
        let backends = set.all("Backend").map(|backend| {
            (
                &backend["spec"]["endpoints"][0]["fqdn"]["hostname"],
                &backend["spec"]["tls"],
            )
        });
        for (host, tls) in hosts.chain(backends) {
            let service = host
                .as_str()
                .unwrap()
                .strip_suffix(".inference.svc.cluster.local")
                .unwrap();
            assert_eq!(
                set.find("Service", &json!(service))["spec"]["selector"]["app"],
                "warmroute",
                "{}",
                set.name
            );
            assert_eq!(
                tls["insecureSkipVerify"], true,
                "{}: warmroute's certificate is self-signed",
                set.name
            );
        }
        for route in set.all("HTTPRoute") {
            set.find("Gateway", &route["spec"]["parentRefs"][0]["name"]);
            let backend = &route["spec"]["rules"][0]["backendRefs"][0];
            set.find(
                backend["kind"].as_str().unwrap_or("Service"),
                &backend["name"],
            );
        }
        for policy in set
            .objects
            .iter()
            .filter(|object| object["spec"]["targetRefs"].is_array())
        {
            let target = &policy["spec"]["targetRefs"][0];
            set.find(target["kind"].as_str().unwrap(), &target["name"]);
        }
    }
}

/// Control planes accept a name that matches nothing without an error.
#[test]
fn names_of_generated_resources_agree() {
    let mut checked = 0;
    for set in sets() {
        let services = set
            .all("Service")
            .filter(|service| service["spec"]["selector"]["app"] == "warmroute");
        let pickers = services.map(|service| {
            let name = service["metadata"]["name"].as_str().unwrap();
            json!(format!(
                "outbound|{}||{name}.inference.svc.cluster.local",
                service["spec"]["ports"][0]["port"]
            ))
        });
        let pickers: Vec<_> = pickers.collect();
        for filter in set.all("EnvoyFilter") {
            let gateway = &filter["spec"]["workloadSelector"]["labels"]["gateway.networking.k8s.io/gateway-name"];
            set.find("Gateway", gateway);
            for patch in filter["spec"]["configPatches"].as_array().unwrap() {
                let mut clusters = Vec::new();
                named(&patch["patch"], "cluster_name", &mut clusters);
                clusters.extend(patch.pointer("/match/cluster/name"));
                assert!(
                    clusters.iter().all(|name| pickers.contains(name)),
                    "{}: {clusters:?}",
                    set.name
                );
                if let Some(route) = patch.pointer("/match/routeConfiguration/vhost/route/name") {
                    let parts: Vec<_> = route.as_str().unwrap().split('.').collect();
                    let rules = &set.find("HTTPRoute", &json!(parts[1]))["spec"]["rules"];
                    assert!(
                        parts[0] == "inference"
                            && rules[parts[2].parse::<usize>().unwrap()].is_object(),
                        "{route}"
                    );
                }
                checked += 1;
            }
        }
        for gateway in set
            .all("Gateway")
            .filter_map(|gateway| gateway["spec"].get("infrastructure"))
        {
            let proxy = set.find("EnvoyProxy", &gateway["parametersRef"]["name"]);
            let patches = proxy["spec"]["bootstrap"]["jsonPatches"]
                .as_array()
                .unwrap();
            for pool in set.all("InferencePool") {
                let name = pool["metadata"]["name"].as_str().unwrap();
                let cluster = format!("envoy.clusters.endpointpicker_{name}_inference_ext_proc");
                for limit in ["max_requests", "max_pending_requests"] {
                    let key = format!("circuit_breakers.{cluster}.default.{limit}");
                    let path = json!(format!("/layered_runtime/layers/0/static_layer/{key}"));
                    assert!(
                        patches.iter().any(|patch| patch["path"] == path),
                        "{}: {path}",
                        set.name
                    );
                }
            }
            checked += 1;
        }
    }
    assert_eq!(checked, 7, "patches of EnvoyFilters, and an EnvoyProxy");
}

/// Each pool names a Service of its own, and warmroute maps the Services onto the pools.
#[test]
fn two_pools_are_confined_by_their_services() {
    let two = sets()
        .iter()
        .filter(|set| set.all("InferencePool").count() == 2);
    let set = two.into_iter().next().unwrap();
    let config: Value = serde_saphyr::from_str(set.text("warmroute", "warmroute.yaml")).unwrap();
    let pools = set.all("InferencePool").map(|pool| {
        let service = pool["spec"]["endpointPickerRef"]["name"].as_str().unwrap();
        (
            format!("{service}.inference"),
            pool["metadata"]["name"].clone(),
        )
    });
    assert_eq!(
        config["confine"]["authority"],
        Value::Object(pools.collect())
    );
}

/// Resolvers of Envoy see every replica, and Envoy balances over them.
#[test]
fn the_service_of_warmroute_is_headless() {
    for set in sets() {
        assert_eq!(
            set.find("Service", &json!("warmroute"))["spec"]["clusterIP"],
            "None",
            "{}",
            set.name
        );
    }
}

/// What is in both is the same: an object of the chart, and the manifest of its kind and name. Policies are cut otherwise.
#[test]
fn the_chart_renders_the_manifests() {
    let same = |chart: Set, manifests: Set| {
        let mut compared = 0;
        for object in chart
            .objects
            .iter()
            .filter(|object| object["kind"] != "NetworkPolicy")
        {
            let (mut own, mut theirs) = (
                object.clone(),
                manifests
                    .find(
                        object["kind"].as_str().unwrap(),
                        &object["metadata"]["name"],
                    )
                    .clone(),
            );
            for one in [&mut own, &mut theirs] {
                if let Some(data) = one["data"].as_object_mut() {
                    data.values_mut().for_each(|text| {
                        *text = serde_saphyr::from_str(text.as_str().unwrap()).unwrap()
                    });
                }
                one.pointer_mut("/spec/template/metadata/annotations")
                    .map(|all| all.as_object_mut()?.remove("checksum/config"));
                one.pointer_mut("/spec/template/spec/containers/0")
                    .map(|all| all.as_object_mut()?.remove("imagePullPolicy"));
            }
            assert_eq!(own, theirs);
            compared += 1;
        }
        compared
    };
    let chart =
        |values: &str| Set::of_chart(Path::new(&format!("{FOLDER}/chart/ci/{values}.yaml")));
    let pool = Set::of(
        "",
        [
            "warmroute",
            "gateway-api/warmroute-config.yaml",
            "gateway-api/pool.yaml",
        ],
    );
    assert_eq!(same(chart("gateway-api"), pool), 8);
    assert_eq!(
        same(chart("envoy"), Set::of("", ["warmroute", "envoy"])),
        12
    );
}

#[test]
fn the_image_has_what_the_binary_needs() {
    let file = fs::read_to_string(format!("{ROOT}/Dockerfile")).unwrap();
    let line = |start: &str| {
        file.lines()
            .filter_map(|line| line.strip_prefix(start))
            .next_back()
            .unwrap()
            .to_owned()
    };
    assert_eq!(line("FROM "), "gcr.io/distroless/cc-debian12:nonroot");
    let user = line("USER ");
    assert!(
        user.split(':')
            .all(|id| id.parse::<u32>().is_ok_and(|id| id > 0)),
        "{user}"
    );
    let manifest = fs::read_to_string(format!("{ROOT}/Cargo.toml")).unwrap();
    let rust = manifest
        .lines()
        .find_map(|line| line.strip_prefix("rust-version = "))
        .unwrap();
    assert!(
        file.contains(&format!(
            "FROM rust:{}-bookworm AS build",
            rust.trim_matches('"')
        )),
        "the same Rust"
    );
    // glibc and libgcc_s are what this base has beside distroless/static.
    let linked = Command::new("ldd")
        .arg(env!("CARGO_BIN_EXE_warmroute"))
        .output()
        .unwrap();
    let linked = String::from_utf8(linked.stdout).unwrap();
    let names: Vec<&str> = linked
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(names.contains(&"libc.so.6"), "{linked}");
    let there = ["linux-vdso.so.1", "libgcc_s.so.1", "libm.so.6", "libc.so.6"];
    assert!(
        names
            .iter()
            .all(|name| there.contains(name) || name.contains("/ld-linux")),
        "{linked}"
    );
}
