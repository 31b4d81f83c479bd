//! The shipped manifests, applied as `kubectl apply --server-side` applies them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::admin_client::collection;
use crate::control_plane::TestControlPlane;
use crate::runner::CaseResult;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Manifest directories and stored chart renderings, in the order in which they are applied.
const SOURCES: [&str; 10] = [
    "examples/kubernetes/namespace.yaml",
    "examples/kubernetes/warmroute",
    "examples/kubernetes/nats",
    "examples/kubernetes/engines",
    "examples/kubernetes/gateway-api",
    "examples/kubernetes/envoy",
    "examples/kubernetes/envoy-gateway",
    "examples/kubernetes/dynamo",
    "tests/data/chart/gateway-api.yaml",
    "tests/data/chart/envoy.yaml",
];

fn files(source: &str) -> anyhow::Result<Vec<PathBuf>> {
    let path = Path::new(ROOT).join(source);
    if path.is_file() {
        return Ok(vec![path]);
    }
    let entries = std::fs::read_dir(&path).with_context(|| format!("{}", path.display()))?;
    let mut files: Vec<PathBuf> = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<anyhow::Result<_>>()?;
    files.retain(|file| {
        file.extension()
            .is_some_and(|extension| extension == "yaml")
    });
    files.sort();
    Ok(files)
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

pub(super) async fn shipped_manifests(plane: Arc<TestControlPlane>) -> CaseResult {
    let mut applied = 0;
    let mut absent = BTreeSet::new();
    for source in SOURCES {
        for file in files(source)? {
            let yaml = std::fs::read_to_string(&file)?;
            for document in yaml
                .split("\n---\n")
                .filter(|document| document.contains("\nkind:") || document.starts_with("kind:"))
            {
                let object: Value = serde_saphyr::from_str(document)?;
                match object_path(&plane, &object).await? {
                    Some(path) => {
                        plane
                            .admin
                            .apply(&path, document)
                            .await
                            .with_context(|| format!("{}", file.display()))?;
                        applied += 1;
                    }
                    None => {
                        absent.insert(object["kind"].as_str().unwrap_or_default().to_owned());
                    }
                }
            }
        }
    }
    ensure!(applied >= 40, "only {applied} objects were applied");
    let absent: Vec<String> = absent.into_iter().collect();
    Ok(format!(
        "{applied} objects accepted by strict validation; not installed: {}",
        absent.join(", ")
    ))
}
