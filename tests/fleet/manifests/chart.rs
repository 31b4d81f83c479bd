//! The chart, compared with the manifests, the configuration parser, the metrics and the command
//! line.

use warmroute::cmd::cli::{Cli, CliCommand};

use super::*;

fn chart(values: &str) -> ManifestSet {
    ManifestSet::of_chart(Path::new(&format!("{FOLDER}/chart/ci/{values}.yaml")))
}

fn chart_file(name: &str) -> String {
    fs::read_to_string(format!("{FOLDER}/chart/{name}")).unwrap()
}

/// Removes the labels that only the chart sets, and the annotations of its checksums.
fn without_chart_labels(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(without_chart_labels),
        Value::Object(fields) => {
            fields.retain(|key, _| {
                !["app.kubernetes.io/", "helm.sh/", "checksum/"]
                    .iter()
                    .any(|prefix| key.starts_with(prefix))
            });
            fields.values_mut().for_each(without_chart_labels);
        }
        _ => {}
    }
}

/// Objects of custom resources have no labels in the manifests.
fn without_own_labels(value: &mut Value) {
    if let Some(metadata) = value["metadata"].as_object_mut() {
        metadata.shift_remove("labels");
    }
}

/// Each object of the chart must equal the manifest with its kind and name. NetworkPolicies are not
/// compared, because the manifests split them differently, and the pod of `helm test` has no
/// manifest.
#[test]
fn chart_renders_the_manifests() {
    let count_equal = |chart: ManifestSet, manifests: ManifestSet| {
        let mut compared = 0;
        for object in chart
            .objects
            .iter()
            .filter(|object| object["kind"] != "NetworkPolicy" && object["kind"] != "Pod")
        {
            // The prefix of the release; the manifests have one server for all.
            let text = object.to_string().replace("warmroute-nats", "nats");
            let mut own: Value = serde_json::from_str(&text).unwrap();
            let kind = own["kind"].as_str().unwrap().to_owned();
            let mut theirs = manifests.find(&kind, &own["metadata"]["name"]).clone();
            for one in [&mut own, &mut theirs] {
                without_chart_labels(one);
                without_own_labels(one);
                if let Some(data) = one["data"].as_object_mut() {
                    data.values_mut().for_each(|text| {
                        *text = serde_saphyr::from_str(text.as_str().unwrap()).unwrap()
                    });
                }
                one.pointer_mut("/spec/template/spec/containers/0")
                    .map(|all| all.as_object_mut()?.remove("imagePullPolicy"));
            }
            assert_eq!(own, theirs);
            compared += 1;
        }
        compared
    };
    let istio = ManifestSet::of_overlay("istio");
    assert_eq!(count_equal(chart("gateway-api"), istio), 10);
    let envoy = ManifestSet::of_overlay("envoy");
    assert_eq!(count_equal(chart("envoy"), envoy), 14);
}

/// A setting that needs a restart must replace the pods.
#[test]
fn checksum_covers_all_settings_that_need_a_restart() {
    let reload = fs::read_to_string(format!("{ROOT}/crates/server/src/config/reload.rs")).unwrap();
    let body = reload.split_once("config = wanted.clone();").unwrap().1;
    let body = body.split_once("let problems").unwrap().0;
    let kept: BTreeSet<&str> = body
        .split("config.")
        .skip(1)
        .filter_map(|part| Some(part.split_once(" =")?.0.trim()))
        .collect();
    assert!(kept.len() > 15, "{kept:?}");
    let helpers = chart_file("templates/_helpers.tpl");
    let list = helpers
        .split_once("define \"warmroute.startupConfig\"")
        .unwrap()
        .1;
    let list = list.split_once("range list").unwrap().1;
    let list = list.split_once("}}").unwrap().0;
    let hashed: BTreeSet<&str> = list.split('"').skip(1).step_by(2).collect();
    assert_eq!(hashed, kept);
}

#[test]
fn schema_describes_all_values() {
    let schema: Value = serde_json::from_str(&chart_file("values.schema.json")).unwrap();
    let values: Value = serde_saphyr::from_str(&chart_file("values.yaml")).unwrap();
    let keys = |value: &Value| {
        value
            .as_object()
            .unwrap()
            .keys()
            .cloned()
            .collect::<BTreeSet<_>>()
    };
    let mut described = keys(&schema["properties"]);
    // Helm passes it to every chart.
    assert!(described.remove("global"));
    assert_eq!(described, keys(&values));
    let readme = chart_file("README.md");
    for key in keys(&values) {
        assert!(readme.contains(&format!("`{key}")), "README.md lacks {key}");
    }
}

/// Returns the names of metrics in an expression.
fn metric_names(expression: &str) -> BTreeSet<String> {
    let is_name = |character: char| character.is_ascii_alphanumeric() || character == '_';
    expression
        .split(|character| !is_name(character))
        .filter(|word| word.starts_with("warmroute_"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn alerts_use_existing_metrics_and_runbooks() {
    let families = fs::read_dir(format!("{ROOT}/crates/metrics/src/families")).unwrap();
    let families = families.map(|file| fs::read_to_string(file.unwrap().path()).unwrap());
    let families: Vec<String> = families.collect();
    let existing: BTreeSet<String> = families
        .iter()
        .flat_map(|family| family.lines())
        .filter_map(|line| line.trim().strip_prefix('"')?.split_once('"'))
        .map(|(name, metric)| {
            let suffix = if metric.contains("Counter") {
                "_total"
            } else {
                ""
            };
            format!("warmroute_{name}{suffix}")
        })
        .collect();
    let set = chart("scaled");
    let rules = set.find("PrometheusRule", &json!("warmroute"));
    let file =
        chart_file("files/rules.yaml").replace(r#"namespace=~".*""#, r#"namespace="inference""#);
    let file: Value = serde_saphyr::from_str(&file).unwrap();
    assert_eq!(rules["spec"]["groups"], file["groups"]);
    let rules = rules["spec"]["groups"][0]["rules"].as_array().unwrap();
    let page = fs::read_to_string(format!("{ROOT}/docs/troubleshooting.md")).unwrap();
    let anchors: BTreeSet<String> = page
        .lines()
        .filter_map(|line| line.trim_start_matches('#').strip_prefix(' '))
        .map(|heading| heading.to_lowercase().replace(' ', "-"))
        .collect();
    for rule in rules {
        let names = metric_names(rule["expr"].as_str().unwrap());
        for name in &names {
            let name = name.strip_suffix("_bucket").unwrap_or(name);
            assert!(existing.contains(name), "no metric {name}: {rule}");
        }
        let runbook = rule["annotations"]["runbook_url"].as_str().unwrap();
        let anchor = runbook.strip_prefix("docs/troubleshooting.md#").unwrap();
        assert!(anchors.contains(anchor), "no runbook {anchor}: {rule}");
        let mentioned = metric_names(rule["annotations"]["description"].as_str().unwrap());
        assert!(
            mentioned.iter().all(|name| existing.contains(name)),
            "{rule}"
        );
    }
}

#[test]
fn helm_test_runs_doctor_as_the_deployment_runs() {
    for values in chart_values() {
        let set = ManifestSet::of_chart(&values);
        let pod = set.find("Pod", &json!("warmroute-doctor"));
        assert_eq!(pod["metadata"]["annotations"]["helm.sh/hook"], "test");
        let doctor = &pod["spec"]["containers"][0];
        let args = doctor["args"].as_array().unwrap().iter();
        let args = args.map(|argument| argument.as_str().unwrap().into());
        let cli = Cli::parse_args(std::iter::once("warmroute".into()).chain(args)).unwrap();
        let CliCommand::Doctor(args) = cli.command else {
            panic!("{doctor}")
        };
        assert_eq!(
            args.config_file(),
            Path::new("/etc/warmroute/warmroute.yaml")
        );
        let deployed = warmroute(&set);
        for key in [
            "serviceAccountName",
            "initContainers",
            "volumes",
            "securityContext",
        ] {
            assert_eq!(pod["spec"][key], deployed.spec[key], "{}: {key}", set.name);
        }
        for key in ["image", "env", "volumeMounts", "securityContext"] {
            assert_eq!(doctor[key], deployed.spec["containers"][0][key], "{key}");
        }
        // The network policies select it; Service, Deployment and PodDisruptionBudget do not.
        let labels = &pod["metadata"]["labels"];
        assert_eq!(labels["app"], deployed.labels["app"]);
        let component = "app.kubernetes.io/component";
        for kind in ["Service", "Deployment", "PodDisruptionBudget"] {
            for object in set.all(kind) {
                let selector = &object["spec"]["selector"];
                let selector = selector.get("matchLabels").unwrap_or(selector);
                assert_ne!(selector[component], labels[component], "{object}");
                assert!(selector[component].is_string(), "{object}");
            }
        }
        if set.all("PodMonitor").next().is_some() {
            let monitor = set.find("PodMonitor", &json!("warmroute"));
            assert!(
                deployed
                    .port(&monitor["spec"]["podMetricsEndpoints"][0]["port"])
                    .is_some()
            );
            set.selected(&monitor["spec"]["selector"]["matchLabels"]);
        }
    }
}

/// Replicas that cannot exchange bookings route worse. A configured server that does not exist delays
/// the readiness of every replica.
#[test]
fn default_values_name_only_installed_nats_servers() {
    for values in chart_values() {
        let set = ManifestSet::of_chart(&values);
        let config = parsed(&set);
        let servers = config
            .replicas
            .into_iter()
            .flat_map(|replicas| replicas.nats.servers);
        let servers: Vec<String> = servers.map(|server| server.to_string()).collect();
        let own = |server: &&String| server.contains("//warmroute-nats:");
        assert_eq!(
            servers.iter().filter(own).count(),
            set.all("Service")
                .filter(|service| service["metadata"]["name"] == "warmroute-nats")
                .count(),
            "{}",
            set.name
        );
        if values.ends_with("defaults.yaml") {
            assert_eq!(servers, [""; 0]);
        }
    }
}
