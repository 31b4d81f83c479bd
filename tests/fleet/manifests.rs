//! Validates the overlays, the chart and the Dockerfile against the schemas of Kubernetes, the
//! configuration parser of warmroute, a real Envoy, and one another.

mod chart;
mod dynamo;
mod gateways;
mod image;
mod ports;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;
use std::time::Duration;

use serde_json::{Value, json};
use warmroute_server::config::Config;

use crate::support::manifest_set::{
    CHART_KUBERNETES, FOLDER, ManifestSet, PodTemplates, chart_values, named, overlays,
    policy_ports, validated,
};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// Oldest supported Kubernetes version.
const KUBERNETES: &str = CHART_KUBERNETES;
/// Manifests of the engines, which the chart does not contain.
const ENGINES: [&str; 3] = [
    "base/namespace.yaml",
    "base/engine-network-policy.yaml",
    "engines/vllm.yaml",
];

/// Returns the overlays, and the renderings of the chart together with the engine manifests. They
/// are parsed once for all tests.
fn sets() -> &'static [ManifestSet] {
    static SETS: LazyLock<Vec<ManifestSet>> = LazyLock::new(|| {
        let overlays = overlays();
        let readme = fs::read_to_string(format!("{FOLDER}/README.md")).unwrap();
        for overlay in &overlays {
            let command = format!("kubectl apply -k deploy/overlays/{overlay}\n");
            assert!(readme.contains(&command), "README.md lacks: {command}");
        }
        let mut sets: Vec<_> = overlays
            .iter()
            .map(|name| ManifestSet::of_overlay(name))
            .collect();
        assert_eq!(sets.len(), 7);
        let chart = chart_values();
        assert_eq!(chart.len(), 5);
        let with_engines =
            |values| ManifestSet::of_chart(values).with(ManifestSet::of_files(ENGINES));
        sets.extend(chart.iter().map(|values| with_engines(values)));
        sets
    });
    &SETS
}

/// Returns a shipped configuration with the tokenizer files of the examples.
fn prepared(text: &str) -> Value {
    let text = text
        .replace("/models/", &format!("{ROOT}/examples/models/"))
        .replace("tokenizer.json", "tokenizer.json.gz");
    serde_saphyr::from_str(&text).unwrap()
}

fn parsed(set: &ManifestSet) -> Config {
    let config = prepared(set.text("warmroute", "warmroute.yaml"));
    let config = Config::parse(
        Path::new("/etc/warmroute/warmroute.yaml"),
        config.to_string().as_bytes(),
    );
    config.unwrap_or_else(|errors| panic!("{}: {errors:?}", set.name))
}

/// Returns the ports of warmroute: ext_proc, health, admin, and the optional ones of xDS and the
/// API.
fn listener_ports(config: &Config) -> (u64, u64, u64, [Option<u64>; 2]) {
    let api = config.listeners.api.as_ref().map(|api| api.address);
    let xds = config
        .envoy
        .as_ref()
        .and_then(|envoy| envoy.xds.as_ref()?.address);
    let port = |address: std::net::SocketAddr| u64::from(address.port());
    (
        port(config.listeners.ext_proc.address.unwrap()),
        port(config.listeners.ext_proc.health_address.unwrap()),
        port(config.listeners.admin.address),
        [xds, api].map(|listen| listen.map(port)),
    )
}

fn is_warmroute(pod: &PodTemplates<'_>) -> bool {
    pod.labels["app"] == "warmroute"
}

fn warmroute(set: &ManifestSet) -> PodTemplates<'_> {
    set.pods().into_iter().find(is_warmroute).unwrap()
}

#[test]
fn objects_match_their_schemas() {
    for set in sets() {
        let mut found = BTreeSet::new();
        let errors = validated(&Value::from(set.objects.clone()), KUBERNETES);
        for (object, error) in set.objects.iter().zip(errors.as_array().unwrap()) {
            let kind = object["kind"].as_str().unwrap();
            let name = object["metadata"]["name"].as_str().unwrap();
            let of = format!("{}: {kind} {name}", set.name);
            assert!(found.insert((kind, name)), "{of}: duplicate object");
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
            match error.as_str() {
                None => {}
                // The chart of Dynamo's operator contains no schema.
                Some("no schema") => assert_eq!(kind, "DynamoGraphDeployment", "{of}"),
                Some(error) => panic!("{of}: {error}"),
            }
        }
    }
}

#[test]
fn schema_violations_are_reported() {
    const GATEWAY: &str = "gateway.envoyproxy.io/v1alpha1";
    let objects = json!([
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"ports": [{"prot": 1, "port": 2}]}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"ports": [{"port": "two"}]}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"ports": [{"port": 2}]}},
        {"apiVersion": "else/v1", "kind": "Other", "metadata": {"name": "a"}},
        {"apiVersion": GATEWAY, "kind": "BackendTrafficPolicy", "spec": {"retry": {"retries": 5}}},
        {"apiVersion": GATEWAY, "kind": "ClientTrafficPolicy", "spec": {"headers": {"enableEnvoyHeaders": "yes"}}},
        {"apiVersion": GATEWAY, "kind": "ClientTrafficPolicy", "spec": {"headers": {"enableEnvoyHeaders": true}}},
    ]);
    let errors = validated(&objects, KUBERNETES);
    assert!(errors[0].as_str().unwrap().contains("prot"), "{errors}");
    assert!(errors[1].as_str().unwrap().contains("two"), "{errors}");
    assert_eq!(
        (&errors[2], &errors[3]),
        (&Value::Null, &json!("no schema"))
    );
    assert!(errors[4].as_str().unwrap().contains("retries"), "{errors}");
    assert!(errors[5].as_str().unwrap().contains("yes"), "{errors}");
    assert_eq!(errors[6], Value::Null);
}

#[test]
fn drain_fits_into_termination_grace_period() {
    for set in sets() {
        let config = parsed(set);
        let advice: Vec<_> = config
            .advice(&config.typical_workers())
            .into_iter()
            .map(|advice| advice.finding)
            .collect();
        assert_eq!(advice, [""; 0], "{}", set.name);
        let drain = serde_json::to_value(&config.process.drain).unwrap();
        let period = |key: &str| humantime::parse_duration(drain[key].as_str().unwrap()).unwrap();
        let grace = warmroute(set).spec["terminationGracePeriodSeconds"]
            .as_u64()
            .unwrap();
        let needed = period("grace_period") + period("timeout");
        assert!(
            needed < Duration::from_secs(grace),
            "{}: the drain takes {needed:?}, the grace period is {grace} s",
            set.name
        );
    }
}

#[test]
fn pods_have_restricted_security_contexts() {
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
                    continue; // The operator creates the pods.
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
fn referenced_objects_exist() {
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
                "{of}: only warmroute may use the API server"
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
        assert_eq!(role["kind"], "Role", "{}: not a ClusterRole", set.name);
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
            "{}: rules of the role",
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
                    let constraints = &spec["template"]["spec"]["topologySpreadConstraints"];
                    named(constraints, "labelSelector", &mut spread);
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
                    set.find("Deployment", &spec["scaleTargetRef"]["name"]);
                }
                _ => {}
            }
        }
    }
}

/// Envoy must resolve the address of every replica to balance requests over them.
#[test]
fn warmroute_service_is_headless() {
    for set in sets() {
        assert_eq!(
            set.find("Service", &json!("warmroute"))["spec"]["clusterIP"],
            "None",
            "{}",
            set.name
        );
    }
}
