//! Ports of configurations, Services and NetworkPolicies.

use super::*;

#[test]
fn warmroute_ports_agree() {
    for set in sets() {
        let config = parsed(set);
        let (ext_proc, health, admin, [xds, api]) = listener_ports(&config);
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
        let is_monitored = ["PodMonitor", "ServiceMonitor"]
            .iter()
            .any(|kind| set.all(kind).next().is_some());
        let expected = (!is_monitored).then(|| admin.to_string());
        assert_eq!(annotations["prometheus.io/port"], json!(expected));

        let all: BTreeSet<u64> = [Some(ext_proc), Some(health), Some(admin), xds, api]
            .into_iter()
            .flatten()
            .collect();
        let open = warmroute_policy_ports(set, "ingress");
        assert_eq!(
            open, all,
            "{}: allowed ingress ports and listener ports",
            set.name
        );
        assert_services_map_ports(set, &pod, &[Some(ext_proc), xds, api], admin);
        let warm_start = config.index.warm_start;
        if let Some(url) = warm_start.and_then(|warm_start| warm_start.url) {
            assert_replicas_are_reachable(set, &url, api.unwrap());
        }
        assert_picker_ports_exist(set);
    }
}

/// Asserts the target ports of the Services of warmroute. Only the Service of a ServiceMonitor has
/// the admin port.
fn assert_services_map_ports(
    set: &ManifestSet,
    pod: &PodTemplates<'_>,
    targets: &[Option<u64>],
    admin: u64,
) {
    for service in set
        .all("Service")
        .filter(|service| service["spec"]["selector"]["app"] == "warmroute")
    {
        let is_for_metrics = service["metadata"]["name"] == "warmroute-metrics";
        for port in service["spec"]["ports"].as_array().unwrap() {
            let target = pod
                .port(&port["targetPort"])
                .or(port["targetPort"].as_u64());
            assert!(
                target.is_some_and(|target| if is_for_metrics {
                    target == admin
                } else {
                    targets.contains(&Some(target))
                }),
                "{}: {port}",
                set.name
            );
            // A headless Service does not map ports.
            assert!(
                service["spec"]["clusterIP"].is_null() || port["port"].as_u64() == target,
                "{}: {port}",
                set.name
            );
        }
    }
}

/// Asserts the port, the Service and the policies by which replicas copy the index from one
/// another.
fn assert_replicas_are_reachable(set: &ManifestSet, url: &str, api: u64) {
    let (service, port) = url
        .strip_prefix("http://")
        .unwrap()
        .split_once(':')
        .unwrap();
    assert_eq!(
        port.parse().ok(),
        Some(api),
        "{}: port from which replicas copy the index",
        set.name
    );
    let ports = &set.find("Service", &json!(service))["spec"]["ports"];
    assert!(
        ports
            .as_array()
            .unwrap()
            .iter()
            .any(|own| own["port"].as_u64() == Some(api)),
        "{}: {url}",
        set.name
    );
    let egress = warmroute_policy_ports(set, "egress");
    assert!(
        egress.contains(&api),
        "{}: policies allow no egress to other replicas",
        set.name
    );
}

/// Asserts that the ports that InferencePools name exist.
fn assert_picker_ports_exist(set: &ManifestSet) {
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

/// Returns the ports that the policies of warmroute allow in this direction.
fn warmroute_policy_ports(set: &ManifestSet, direction: &str) -> BTreeSet<u64> {
    set.all("NetworkPolicy")
        .filter(|policy| policy["spec"]["podSelector"]["matchLabels"]["app"] == "warmroute")
        .flat_map(|policy| policy_ports(&policy["spec"][direction]))
        .collect()
}

#[test]
fn worker_ports_match_pools_and_policies() {
    for set in sets() {
        let pools = parsed(set).workers.kubernetes.unwrap().pools;
        let egress = warmroute_policy_ports(set, "egress");
        let ingress = set.all("NetworkPolicy");
        let ingress = ingress.filter(|policy| {
            policy["spec"]["podSelector"]["matchLabels"]["warmroute.dev/engine"] == "true"
        });
        let ingress: BTreeSet<u64> = ingress
            .flat_map(|policy| policy_ports(&policy["spec"]["ingress"]))
            .collect();
        for pool in &pools {
            assert_eq!(
                pool.namespace, None,
                "{}: the namespace of warmroute",
                set.name
            );
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
                "{}: workers must publish KV events",
                set.name
            );
            for pod in set.selected(&selector) {
                assert_engine_has_ports(&pod, &ports, &events);
                let of = format!("{}: {}", set.name, pod.name());
                for port in ports.iter().chain(events.iter().copied()) {
                    let port = port.as_u64().unwrap();
                    assert!(
                        egress.contains(&port) && ingress.contains(&port),
                        "{of}: a policy blocks port {port}"
                    );
                }
            }
        }
    }
}

/// Asserts the label, the arguments and the container ports of an engine.
fn assert_engine_has_ports(pod: &PodTemplates<'_>, ports: &[Value], events: &[&Value]) {
    let of = pod.name();
    assert_eq!(
        pod.labels["warmroute.dev/engine"], "true",
        "{of}: the label that policies select"
    );
    let arguments: String = pod
        .containers()
        .map(|container| container["args"].to_string())
        .collect();
    for port in events {
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
}
