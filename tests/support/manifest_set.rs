//! Objects of manifests that are applied together, with lookups by kind, name and label. The
//! overlays are rendered here, without kustomize; `tests/apiserver` compares both renderings.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde_json::{Value, json};
use warmroute_testbed::programs::{environment, install_once, target_dir};
use warmroute_testbed::pypi::{self, PypiPackages};
use xxhash_rust::xxh3::xxh3_64;

pub(crate) const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy");
/// Kubernetes version of the stored chart renderings, the oldest that the chart accepts.
pub(crate) const CHART_KUBERNETES: &str = "1.30";
/// Directory of the stored chart renderings.
const RENDERED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/chart");
const VALIDATE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/fleet/manifests/validate.py"
);
/// Pinned packages of the validator.
const REQUIREMENTS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/fleet/manifests/requirements.txt"
);

/// Objects, and the name of their origin.
pub(crate) struct ManifestSet {
    pub(crate) name: String,
    pub(crate) objects: Vec<Value>,
}

/// Pod template of one workload object.
pub(crate) struct PodTemplates<'a> {
    pub(crate) owner: &'a Value,
    pub(crate) labels: &'a Value,
    pub(crate) spec: &'a Value,
}

/// Returns a program of a Python package with pinned requirements. The first call installs it.
pub(crate) fn install_pinned(requirements: &str, program: &str) -> PathBuf {
    // Changed requirements need a new installation.
    let hash = xxh3_64(&fs::read(requirements).unwrap());
    let name = format!("{program}-{hash:016x}");
    let file = format!("bin/{program}");
    let installed = install_once(&target_dir().unwrap(), &name, &file, |scratch| {
        let packages = scratch.join("packages");
        let requirements = PypiPackages::Hashed(Path::new(requirements));
        pypi::install(requirements, scratch, &packages)?;
        Ok(packages)
    });
    installed.unwrap_or_else(|error| panic!("{error:#}"))
}

/// Validates each object against the schemas of a Kubernetes version. The result is null for a
/// valid object, "no schema", or the error. The first call installs the validator.
pub(crate) fn validated(objects: &Value, version: &str) -> Value {
    let validator = install_pinned(REQUIREMENTS, "kubernetes-validate");
    let packages = validator.ancestors().nth(2).unwrap();
    let mut command = Command::new("python3");
    command
        .arg("-B")
        .arg(VALIDATE)
        .arg(version)
        .env("PYTHONPATH", packages);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(objects.to_string().as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{VALIDATE} failed");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A kustomization, with the fields that the manifests use. Other fields are rejected, because
/// [`objects_of_kustomization`] does not implement them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Kustomization {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    resources: Vec<String>,
    #[serde(default)]
    config_map_generator: Vec<ConfigMapArgs>,
    #[serde(default)]
    images: Vec<ImageOverride>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigMapArgs {
    name: String,
    namespace: String,
    behavior: Option<String>,
    files: Vec<String>,
    options: Option<GeneratorOptions>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct GeneratorOptions {
    disable_name_suffix_hash: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ImageOverride {
    name: String,
    new_name: String,
    new_tag: String,
}

impl ImageOverride {
    /// Changes the containers that have this image.
    fn apply(&self, object: &mut Value) {
        let Some(pod) = object.pointer_mut("/spec/template/spec") else {
            return;
        };
        for kind in ["initContainers", "containers"] {
            let containers = pod.get_mut(kind).and_then(Value::as_array_mut);
            for container in containers.into_iter().flatten() {
                let image = container["image"].as_str().unwrap();
                if image.split(':').next() == Some(&self.name) {
                    container["image"] = json!(format!("{}:{}", self.new_name, self.new_tag));
                }
            }
        }
    }
}

/// Renders a directory as `kustomize build` does, except for the hash in the names of generated
/// ConfigMaps.
fn objects_of_kustomization(directory: &Path) -> Vec<Value> {
    let file = directory.join("kustomization.yaml");
    let text = fs::read_to_string(&file).unwrap_or_else(|_| panic!("{}", file.display()));
    let kustomization: Kustomization =
        serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let mut objects = Vec::new();
    for resource in &kustomization.resources {
        let path = directory.join(resource);
        if path.is_dir() {
            objects.extend(objects_of_kustomization(&path))
        } else {
            objects.extend(objects_of_file(&path))
        }
    }
    for map in &kustomization.config_map_generator {
        // warmroute reloads its file; Envoy reads its file only at startup.
        let is_fixed = map
            .options
            .as_ref()
            .is_some_and(|options| options.disable_name_suffix_hash);
        assert_eq!(is_fixed, map.name == "warmroute", "{}", file.display());
        let metadata = json!({"name": map.name, "namespace": map.namespace});
        let files = map.files.iter().map(|name| {
            let text = fs::read_to_string(directory.join(name)).unwrap();
            (name.clone(), Value::from(text))
        });
        let generated = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "data": Value::Object(files.collect()),
            "metadata": metadata,
        });
        let existing = objects
            .iter_mut()
            .find(|object| object["kind"] == "ConfigMap" && object["metadata"] == metadata);
        match (existing, map.behavior.as_deref()) {
            (None, None) => objects.push(generated),
            (Some(existing), Some("replace")) => *existing = generated,
            (_, behavior) => panic!("{}: {} {behavior:?}", file.display(), map.name),
        }
    }
    for image in &kustomization.images {
        objects.iter_mut().for_each(|object| image.apply(object));
    }
    objects
}

fn objects_of_file(file: &Path) -> Vec<Value> {
    let text = fs::read_to_string(file).unwrap_or_else(|_| panic!("{}", file.display()));
    documents(&text, &file.display().to_string())
}

/// Returns the names of all overlays in sorted order.
pub(crate) fn overlays() -> Vec<String> {
    let entries = fs::read_dir(format!("{FOLDER}/overlays")).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Returns the values files of the chart in sorted order.
pub(crate) fn chart_values() -> Vec<PathBuf> {
    let entries = fs::read_dir(format!("{FOLDER}/chart/ci")).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Returns the arguments with which Helm renders the stored files.
pub(crate) fn chart_arguments(values: &Path) -> Vec<String> {
    let arguments = [
        "template",
        "warmroute",
        &format!("{FOLDER}/chart"),
        "--namespace",
        "inference",
        "--kube-version",
        CHART_KUBERNETES,
        "--values",
        values.to_str().unwrap(),
    ];
    arguments.map(str::to_owned).to_vec()
}

/// Returns all files of the chart in sorted order.
fn chart_files(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
    {
        if entry.is_dir() {
            files.extend(chart_files(&entry))
        } else {
            files.push(entry)
        }
    }
    files.sort();
    files
}

/// Returns the stored rendering of the chart with a values file. Panics if the chart has changed
/// since the rendering. With `UPDATE_GOLDEN=1`, renders it again with the `helm` on the path.
pub(crate) fn rendered(values: &Path) -> String {
    let chart = PathBuf::from(format!("{FOLDER}/chart"));
    let mut content = Vec::new();
    let mut files = chart_files(&chart);
    files.retain(|file| !file.ends_with("README.md"));
    for file in files {
        let name = file
            .strip_prefix(&chart)
            .unwrap()
            .to_str()
            .unwrap()
            .as_bytes()
            .to_owned();
        for part in [name, fs::read(&file).unwrap()] {
            content.extend((part.len() as u64).to_le_bytes());
            content.extend(part);
        }
    }
    let head = format!(
        "# Rendering of the chart {:016x} with ci/{} by Helm\n",
        xxh3_64(&content),
        file_name(values)
    );
    let stored = Path::new(RENDERED).join(file_name(values));
    if environment("UPDATE_GOLDEN").is_some() {
        let mut helm = Command::new("helm");
        helm.args(chart_arguments(values));
        let output = helm
            .output()
            .unwrap_or_else(|error| panic!("helm: {error}"));
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        fs::write(
            &stored,
            head.clone() + &String::from_utf8(output.stdout).unwrap(),
        )
        .unwrap();
    }
    let text = fs::read_to_string(&stored).unwrap();
    assert!(
        text.starts_with(&head),
        "{} is a rendering of another chart version: set UPDATE_GOLDEN=1, with helm on the path",
        stored.display()
    );
    text
}

fn file_name(file: &Path) -> &str {
    file.file_name().unwrap().to_str().unwrap()
}

pub(crate) fn documents(text: &str, from: &str) -> Vec<Value> {
    let all: Vec<Value> =
        serde_saphyr::from_multiple(text).unwrap_or_else(|error| panic!("{from}: {error}"));
    all.into_iter()
        .filter(|document| !document.is_null())
        .collect()
}

impl ManifestSet {
    /// Reads the objects of these files.
    pub(crate) fn of_files<'a>(files: impl IntoIterator<Item = &'a str>) -> Self {
        let files = files.into_iter().map(|file| Path::new(FOLDER).join(file));
        Self {
            name: String::new(),
            objects: files.flat_map(|file| objects_of_file(&file)).collect(),
        }
    }

    /// Renders an overlay.
    pub(crate) fn of_overlay(name: &str) -> Self {
        let directory = Path::new(FOLDER).join("overlays").join(name);
        Self {
            name: name.to_owned(),
            objects: objects_of_kustomization(&directory),
        }
    }

    /// Reads the rendering of the chart with a values file.
    pub(crate) fn of_chart(values: &Path) -> Self {
        let objects = documents(&rendered(values), file_name(values));
        Self {
            name: format!("chart with {}", values.display()),
            objects,
        }
    }

    /// Adds the objects of another set.
    pub(crate) fn with(mut self, other: Self) -> Self {
        self.objects.extend(other.objects);
        self
    }

    pub(crate) fn all<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> {
        self.objects
            .iter()
            .filter(move |object| object["kind"] == kind)
    }

    pub(crate) fn find<'a>(&'a self, kind: &'a str, name: &Value) -> &'a Value {
        let found = self
            .all(kind)
            .find(|object| object["metadata"]["name"] == *name);
        found.unwrap_or_else(|| panic!("{}: no {kind} {name}", self.name))
    }

    pub(crate) fn pods(&self) -> Vec<PodTemplates<'_>> {
        let templates = self.objects.iter().flat_map(|owner| {
            let components = owner["spec"]["components"].as_array().into_iter().flatten();
            let own = std::iter::once(&owner["spec"]["template"]);
            own.chain(components.map(|component| &component["podTemplate"]))
                .map(move |template| (owner, template))
        });
        let templates = templates.filter(|(_, template)| template.is_object());
        let pods = templates.map(|(owner, template)| PodTemplates {
            owner,
            labels: &template["metadata"]["labels"],
            spec: &template["spec"],
        });
        pods.collect()
    }

    /// Returns the pod templates with these labels. Panics if there are none.
    pub(crate) fn selected(&self, labels: &Value) -> Vec<PodTemplates<'_>> {
        let required = labels
            .as_object()
            .unwrap_or_else(|| panic!("{}: {labels} is not a selector", self.name));
        assert!(
            !required.is_empty(),
            "{}: an empty selector selects everything",
            self.name
        );
        let mut pods = self.pods();
        pods.retain(|pod| {
            required
                .iter()
                .all(|(label, value)| pod.labels[label] == *value)
        });
        assert!(
            !pods.is_empty(),
            "{}: no pod has the labels {labels}",
            self.name
        );
        pods
    }

    /// Returns a file of a ConfigMap.
    pub(crate) fn text(&self, map: &str, file: &str) -> &str {
        self.find("ConfigMap", &json!(map))["data"][file]
            .as_str()
            .unwrap()
    }
}

impl PodTemplates<'_> {
    pub(crate) fn containers(&self) -> impl Iterator<Item = &Value> {
        self.spec["containers"].as_array().into_iter().flatten()
    }

    /// Returns the number of a container port by number or name, or `None` if no container declares
    /// it.
    pub(crate) fn port(&self, port: &Value) -> Option<u64> {
        let declared = self
            .containers()
            .flat_map(|container| container["ports"].as_array().into_iter().flatten());
        let mut declared =
            declared.filter(|own| own["name"] == *port || own["containerPort"] == *port);
        declared
            .next()
            .and_then(|own| own["containerPort"].as_u64())
    }

    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.owner["kind"], self.owner["metadata"]["name"])
    }
}

/// Collects the values of a key at any depth.
pub(crate) fn named<'a>(value: &'a Value, key: &str, found: &mut Vec<&'a Value>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| named(item, key, found)),
        Value::Object(fields) => {
            found.extend(fields.get(key));
            fields.values().for_each(|field| named(field, key, found));
        }
        _ => {}
    }
}

/// Returns the ports that the rules of a policy allow, with ranges expanded.
pub(crate) fn policy_ports(rules: &Value) -> BTreeSet<u64> {
    let mut ports = Vec::new();
    named(rules, "ports", &mut ports);
    let ports = ports
        .into_iter()
        .flat_map(|ports| ports.as_array().into_iter().flatten());
    let range = |port: &Value| {
        let first = port["port"].as_u64().unwrap();
        first..=port["endPort"].as_u64().unwrap_or(first)
    };
    ports.flat_map(range).collect()
}
