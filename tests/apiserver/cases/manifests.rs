//! The shipped manifests: rendered by kustomize and helm, and applied as `kubectl apply
//! --server-side` and `helm install` apply them.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tokio::process::Command;

use crate::admin_client::collection;
use crate::control_plane::TestControlPlane;
use crate::manifest_set::{
    FOLDER, ManifestSet, chart_arguments, chart_values, documents, overlays, rendered,
};
use crate::runner::CaseResult;

/// Kinds whose definitions are not installed; `--set` leaves them out of the chart.
const WITHOUT_MONITORS: &str = "metrics.podMonitor.enabled=false,\
    metrics.serviceMonitor.enabled=false,metrics.prometheusRule.enabled=false";

/// Runs a program. Returns its output, or the error that it prints.
async fn output_of<S: AsRef<OsStr>>(
    program: &Path,
    arguments: impl IntoIterator<Item = S>,
) -> anyhow::Result<Result<String, String>> {
    let mut command = Command::new(program);
    // Helm stores caches and plugins in the home directory.
    command.env("HOME", env!("CARGO_TARGET_TMPDIR"));
    let output = command.args(arguments).kill_on_drop(true).output().await?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ok(if output.status.success() {
        Ok(text(output.stdout))
    } else {
        Err(text(output.stderr))
    })
}

/// Returns the path of an object, or `None` if its kind is not installed.
async fn object_path(plane: &TestControlPlane, object: &Value) -> anyhow::Result<Option<String>> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let api = text(&object["apiVersion"]);
    let kind = text(&object["kind"]);
    let page = collection(&api, None, "").trim_end_matches('/').to_owned();
    let (status, resources) = plane.admin.try_get(&page).await?;
    if status.as_u16() == 404 {
        return Ok(None);
    }
    let is_kind =
        |resource: &&Value| resource["kind"] == kind && !text(&resource["name"]).contains('/');
    let resources = resources["resources"].as_array().context("no resources")?;
    let Some(resource) = resources.iter().find(is_kind) else {
        return Ok(None);
    };
    let namespace = text(&object["metadata"]["namespace"]);
    let namespace = (resource["namespaced"] == true).then_some(namespace.as_str());
    Ok(Some(format!(
        "{}/{}",
        collection(&api, namespace, &text(&resource["name"])),
        text(&object["metadata"]["name"])
    )))
}

/// Returns objects in a fixed order, without the hash that kustomize appends to the name of a
/// ConfigMap.
fn normalize_objects(objects: &[Value]) -> BTreeSet<String> {
    let hashed: Vec<String> = objects
        .iter()
        .filter(|object| object["kind"] == "ConfigMap")
        .filter_map(|object| object["metadata"]["name"].as_str())
        .filter_map(|name| Some(name.strip_prefix("warmroute-envoy")?.to_owned()))
        .filter(|suffix| !suffix.is_empty())
        .collect();
    let text = |object: &Value| {
        let text = sort_keys(object).to_string();
        hashed
            .iter()
            .fold(text, |text, suffix| text.replace(suffix.as_str(), ""))
    };
    objects.iter().map(text).collect()
}

/// Returns a value with sorted keys.
fn sort_keys(value: &Value) -> Value {
    match value {
        Value::Array(items) => items.iter().map(sort_keys).collect(),
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().collect();
            fields.sort_by_key(|(key, _)| *key);
            let fields = fields.into_iter();
            Value::Object(
                fields
                    .map(|(key, value)| (key.clone(), sort_keys(value)))
                    .collect(),
            )
        }
        _ => value.clone(),
    }
}

/// kustomize renders every overlay as the other tests do, and the API server accepts its objects
/// with strict validation.
pub(super) async fn overlays_are_accepted(plane: Arc<TestControlPlane>) -> CaseResult {
    let mut applied = 0;
    let mut absent = BTreeSet::new();
    for overlay in overlays() {
        let directory = format!("{FOLDER}/overlays/{overlay}");
        let yaml = output_of(&plane.programs.kustomize, ["build", &directory])
            .await?
            .map_err(anyhow::Error::msg)?;
        let built = normalize_objects(&documents(&yaml, &overlay));
        let own = normalize_objects(&ManifestSet::of_overlay(&overlay).objects);
        let different: Vec<_> = built.symmetric_difference(&own).collect();
        ensure!(different.is_empty(), "{overlay}: {different:?}");
        for document in yaml.split("\n---\n") {
            let object: Value = serde_saphyr::from_str(document)?;
            match object_path(&plane, &object).await? {
                Some(path) => {
                    plane
                        .admin
                        .apply(&path, document)
                        .await
                        .with_context(|| format!("{overlay}: {path}"))?;
                    applied += 1;
                }
                None => {
                    absent.insert(object["kind"].as_str().unwrap_or_default().to_owned());
                }
            }
        }
    }
    ensure!(applied >= 120, "only {applied} objects were applied");
    let absent: Vec<String> = absent.into_iter().collect();
    Ok(format!(
        "{applied} objects accepted by strict validation; not installed: {}",
        absent.join(", ")
    ))
}

/// The stored renderings of the chart equal the output of helm, and `helm lint` accepts every file of
/// values.
pub(super) async fn chart_renderings_are_current(plane: Arc<TestControlPlane>) -> CaseResult {
    let helm = &plane.programs.helm;
    let mut compared = 0;
    for values in chart_values() {
        let text = output_of(helm, chart_arguments(&values))
            .await?
            .map_err(anyhow::Error::msg)?;
        let stored = rendered(&values);
        let stored = stored.split_once('\n').map(|(_, rest)| rest);
        ensure!(
            stored == Some(text.as_str()),
            "tests/data/chart differs from helm's rendering with {}: set UPDATE_GOLDEN=1",
            values.display()
        );
        let chart = format!("{FOLDER}/chart");
        let values = values.display().to_string();
        output_of(helm, ["lint", "--strict", &chart, "--values", &values])
            .await?
            .map_err(anyhow::Error::msg)?;
        compared += 1;
    }
    Ok(format!("{compared} renderings are equal"))
}

/// helm rejects wrong values by the schema or by the templates.
pub(super) async fn wrong_values_are_rejected(plane: Arc<TestControlPlane>) -> CaseResult {
    let wrong = [
        ("image.repository=", "/image/repository"),
        ("replica=3", "'replica' not allowed"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("image.digest=sha256:12", "/image/digest"),
        ("nats.enabled=yes", "/nats/enabled"),
        ("podLabels.app=x", "'app'"),
        ("inferencePool.ports=null", "'ports'"),
        ("config.listen.tcp=x", "'listen' not allowed"),
        ("config.listeners.admin=null", "'admin'"),
        (
            "config.listeners.admin.address=9005",
            "/config/listeners/admin/address",
        ),
        ("config.models=null", "'models'"),
        ("config.routing.policy=secondz", "/config/routing/policy"),
        ("config.routing.overload.prefil=1", "'prefil' not allowed"),
        (
            "envoy.enabled=true",
            "port 9004 in config.envoy.xds.address",
        ),
        ("serviceAccount.create=false", "set serviceAccount.name"),
        (
            "metrics.podMonitor.enabled=true,metrics.serviceMonitor.enabled=true",
            "enable one of them",
        ),
        (
            "nats.enabled=true,config.replicas.nats.servers[0]=nats://x",
            "set only one of them",
        ),
    ];
    let chart = format!("{FOLDER}/chart");
    for (values, expected) in wrong {
        let arguments = [
            "template",
            "warmroute",
            &chart,
            "--kube-version",
            "1.30",
            "--set",
            "image.repository=registry.example/warmroute",
            "--set",
        ];
        let result = output_of(&plane.programs.helm, arguments.into_iter().chain([values])).await?;
        let error = result
            .err()
            .with_context(|| format!("{values} is accepted"))?;
        ensure!(error.contains(expected), "{values}: {error}");
    }
    Ok(format!("{} values", wrong.len()))
}

/// helm installs, upgrades and uninstalls the chart. A changed configuration replaces the pods only
/// if it needs a restart.
pub(super) async fn chart_is_accepted(plane: Arc<TestControlPlane>) -> CaseResult {
    let kubeconfig = plane.kubeconfig()?.display().to_string();
    let chart = format!("{FOLDER}/chart");
    let mut notes = Vec::new();
    for values in chart_values() {
        let name = values.file_stem().and_then(OsStr::to_str).context("name")?;
        let namespace = format!("chart-{name}");
        let file = values.display().to_string();
        let helm = async |command: &[&str]| {
            let common = ["--kubeconfig", &kubeconfig, "--namespace", &namespace];
            let arguments = command.iter().copied().chain(common);
            let result = output_of(&plane.programs.helm, arguments).await?;
            result.map_err(|error| anyhow::anyhow!("{name}: helm {}: {error}", command[0]))
        };
        let install = ["install", "warmroute", &chart, "--create-namespace"];
        let with_values = ["--values", &file, "--set", WITHOUT_MONITORS];
        notes.push(helm(&[&install[..], &with_values].concat()).await?);
        let page = format!("/apis/apps/v1/namespaces/{namespace}/deployments/warmroute");
        let generation = async || {
            let (_, deployment) = plane.admin.try_get(&page).await?;
            anyhow::Ok(deployment["metadata"]["generation"].as_u64())
        };
        let first = generation().await?;
        let mut seen = Vec::new();
        for change in [
            "config.routing.weights.router_temperature=0.5",
            "config.queue.timeout=\"9s\"",
        ] {
            let upgrade = ["upgrade", "warmroute", &chart, "--reset-then-reuse-values"];
            helm(&[&upgrade[..], &["--set-json", change]].concat()).await?;
            seen.push(generation().await?);
        }
        ensure!(
            first == Some(1) && seen == [Some(1), Some(2)],
            "{name}: the Deployment has the generations {first:?} and {seen:?}"
        );
        helm(&["uninstall", "warmroute"]).await?;
        let (status, _) = plane.admin.try_get(&page).await?;
        ensure!(status.as_u16() == 404, "{name}: {status} after uninstall");
    }
    let warned = notes
        .iter()
        .filter(|notes| notes.contains("WARNING: The replicas do not share their bookings"));
    ensure!(warned.count() == 1, "notes: {notes:?}");
    Ok(format!(
        "{} releases installed, upgraded, uninstalled",
        notes.len()
    ))
}
