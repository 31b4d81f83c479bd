//! Envoy configurations and gateway resources.

use super::*;

/// Returns host and port of every socket address in an Envoy configuration.
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
fn envoy_configuration_is_valid_and_finds_warmroute() {
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
        assert_same_as_shipped(&config, &shipped);
        let arguments = pod.containers().next().unwrap()["args"].as_array().unwrap();
        assert!(
            arguments.contains(&json!("--service-node"))
                && arguments.contains(&json!("--service-cluster"))
        );
        config["node"] = json!({"id": "pod", "cluster": "warmroute-gateway"});
        let file = dir.path().join("envoy.yaml");
        fs::write(&file, config.to_string()).unwrap();
        warmroute_testbed::envoy::validate(&file).unwrap();
    }
    assert_eq!(checked, 3, "envoy, dynamo and the chart have an Envoy");
    let [manifest, chart] = ["envoy/envoy.yaml", "chart/files/envoy.yaml"]
        .map(|file| fs::read_to_string(format!("{FOLDER}/{file}")).unwrap());
    assert_eq!(manifest, chart, "the chart's copy");
}

/// Compares with the shipped file that `envoy/README.md` explains. Only the settings for remote
/// clients and several replicas may differ.
fn assert_same_as_shipped(config: &Value, shipped: &Value) {
    let manager = |config: &Value| {
        config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
            .clone()
    };
    let mut own = manager(config);
    let mut theirs = manager(shipped);
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
    // Envoy must detect a draining replica within the grace period.
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
    let cluster = |config: &Value, name: &str| {
        let clusters = config["static_resources"]["clusters"].as_array().unwrap();
        clusters
            .iter()
            .find(|cluster| cluster["name"] == name)
            .unwrap()
            .clone()
    };
    assert_eq!(cluster(config, "workers"), cluster(shipped, "workers"));
    for name in ["ext_proc", "xds"] {
        let own = cluster(config, name);
        let theirs = cluster(shipped, name);
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
fn gateways_call_warmroute_with_tls() {
    for set in sets() {
        let config = parsed(set);
        assert!(config.listeners.ext_proc.tls.is_some(), "{}", set.name);
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
        checked += check_circuit_breakers(set);
    }
    assert_eq!(checked, 7, "patches of EnvoyFilters, and an EnvoyProxy");
}

/// Asserts that EnvoyProxies patch the limits of each endpoint picker. Returns their number.
fn check_circuit_breakers(set: &ManifestSet) -> usize {
    let mut checked = 0;
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
    checked
}

/// Each pool names its own Service, and warmroute maps the Services to the pools.
#[test]
fn two_pools_map_to_their_services() {
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
        config["routing"]["pool_routes"]["authorities"],
        Value::Object(pools.collect())
    );
}
