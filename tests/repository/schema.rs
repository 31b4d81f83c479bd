//! The published JSON Schemas of the settings files: they match the code, accept valid files and
//! reject files with unknown keys or wrong types.

use std::fs;
use std::path::{Path, PathBuf};

use boon::{Compiler, SchemaIndex, Schemas};
use serde_json::Value;
use warmroute_server::config::{config_schema, workers_schema};
use warmroute_settings::{ByteSize, DurationSetting};

/// Messages of errors that a schema finds as well.
const STRUCTURAL_ERRORS: [&str; 3] = ["unknown key", "required key", "` must be "];

/// Schema of the chart's values. Its definitions are those of the configuration.
const CHART_SCHEMA: &str = "deploy/chart/values.schema.json";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Compiled schema of one settings file.
struct SettingsSchema {
    schemas: Schemas,
    index: SchemaIndex,
}

impl SettingsSchema {
    fn compile(text: &str) -> Self {
        let mut schemas = Schemas::new();
        let mut compiler = Compiler::new();
        let schema: Value = serde_json::from_str(text).unwrap();
        compiler.add_resource("settings.json", schema).unwrap();
        let index = compiler.compile("settings.json", &mut schemas).unwrap();
        Self { schemas, index }
    }

    /// Validates the text of a YAML file. Returns the errors as text.
    fn validate(&self, yaml: &str) -> Result<(), String> {
        let value: Value = serde_saphyr::from_str(yaml).map_err(|error| error.to_string())?;
        let result = self.schemas.validate(&value, self.index);
        result.map_err(|error| format!("{error:#}"))
    }

    fn accept_files(&self, files: &[PathBuf]) {
        for file in files {
            let result = self.validate(&fs::read_to_string(file).unwrap());
            result.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        }
    }
}

/// Returns the files of a directory whose name ends with `suffix`.
fn files(directory: &Path, suffix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = paths
        .filter(|path| path.to_string_lossy().ends_with(suffix))
        .collect();
    found.sort();
    assert!(!found.is_empty(), "{}", directory.display());
    found
}

/// Returns the configurations of the overlays of `deploy`.
fn overlays() -> Vec<PathBuf> {
    let overlays = files(&root().join("deploy/overlays"), "");
    let mut found = Vec::new();
    for file in overlays
        .iter()
        .map(|overlay| overlay.join("warmroute.yaml"))
    {
        if file.exists() {
            found.push(file);
        }
    }
    assert!(found.len() > 5, "{found:?}");
    found
}

/// Returns the schema of the chart's values with the current schema of the configuration.
fn chart_schema() -> String {
    let mut config: Value = serde_json::from_str(&config_schema()).unwrap();
    let members = config.as_object_mut().unwrap();
    members.shift_remove("$schema");
    let mut definitions = members.shift_remove("definitions").unwrap();
    definitions["WarmrouteConfig"] = config;
    let mut chart: Value =
        serde_json::from_str(&fs::read_to_string(root().join(CHART_SCHEMA)).unwrap()).unwrap();
    chart["definitions"] = definitions;
    serde_json::to_string_pretty(&chart).unwrap() + "\n"
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "the environment enables rewriting of the schemas"
)]
fn published_schemas_are_up_to_date() {
    let published = [
        ("docs/schema/warmroute.json", config_schema()),
        ("docs/schema/workers.json", workers_schema()),
        (CHART_SCHEMA, chart_schema()),
    ];
    for (path, expected) in published {
        let file = root().join(path);
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(&file, &expected).unwrap();
        }
        let found = fs::read_to_string(&file).unwrap_or_default();
        assert!(
            found == expected,
            "{path} is out of date; UPDATE_GOLDEN=1 cargo test --test repository rewrites it"
        );
    }
}

#[test]
fn valid_configurations_match_schema() {
    let schema = SettingsSchema::compile(&config_schema());
    schema.accept_files(&[root().join("examples/warmroute.yaml")]);
    schema.accept_files(&files(&root().join("tests/data/config/valid"), ".yaml"));
    // These files are parts of a configuration.
    for file in files(&root().join("envoy"), ".warmroute.yaml") {
        let part = format!("models: []\n{}", fs::read_to_string(&file).unwrap());
        let result = schema.validate(&part);
        result.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }
    schema.accept_files(&overlays());
    for text in [
        "x-shared: {any: [1]}\nmodels: []",
        "models: [{name: '${MODEL}', block_size: '${SIZE:-16}', engine: '${ENGINE}', eagle: '${EAGLE}'}]",
        "models: [{name: m, policy: seconds}, {name: other, policy: {name: sticky, max_excess_tokens: 4}}]",
        "models: []\nrouting:\ngateway: {observe: sampled(0.5)}",
        "models: []\nprocess: {drain: {grace_period: 1.5s}}",
    ] {
        schema
            .validate(text)
            .unwrap_or_else(|error| panic!("{text}: {error}"));
    }
}

#[test]
fn chart_values_match_schema() {
    let schema = SettingsSchema::compile(&chart_schema());
    let values = fs::read_to_string(root().join("deploy/chart/values.yaml")).unwrap();
    let mut values: Value = serde_saphyr::from_str(&values).unwrap();
    values["image"]["repository"] = "registry.example/warmroute".into();
    schema.validate(&values.to_string()).unwrap();
    values["config"]["routing"]["policy"] = "secondz".into();
    let error = schema.validate(&values.to_string()).unwrap_err();
    assert!(error.contains("/config/routing/policy"), "{error}");
}

#[test]
fn valid_workers_files_match_schema() {
    let schema = SettingsSchema::compile(&workers_schema());
    schema.accept_files(&[
        root().join("examples/workers.yaml"),
        root().join("tests/data/config/workers/good.yaml"),
    ]);
    for text in [
        "- {id: 1, endpoint: '10.0.0.1'}",
        "- {id: 1}",
        "- {id: 1, endpoint: '10.0.0.1:80', rol: decode}",
        "- {id: 1, endpoint: '10.0.0.1:80', role: decod}",
        "workers: []",
    ] {
        assert!(schema.validate(text).is_err(), "{text}");
    }
    assert!(
        schema
            .validate("- {id: '7', endpoint: '10.0.0.1:80', role: both}")
            .is_ok()
    );
}

#[test]
fn structural_errors_do_not_match_schema() {
    let schema = SettingsSchema::compile(&config_schema());
    let mut rejected = 0;
    for file in files(&root().join("tests/data/config/mistakes"), ".yaml") {
        let Ok(yaml) = fs::read_to_string(&file) else {
            continue;
        };
        let errors = fs::read_to_string(file.with_extension("txt")).unwrap();
        let is_rejected = schema.validate(&yaml).is_err();
        let is_structural = STRUCTURAL_ERRORS.iter().any(|text| errors.contains(text));
        assert!(is_rejected || !is_structural, "{}", file.display());
        rejected += usize::from(is_rejected);
    }
    assert!(rejected >= 25, "{rejected}");
}

#[test]
fn unit_patterns_match_parsers() {
    let schema = SettingsSchema::compile(&config_schema());
    let accepts = |section: &str| schema.validate(&format!("models: []\n{section}")).is_ok();
    for text in [
        "250ms",
        "1.5s",
        "1h 30min",
        "2 weeks",
        "5",
        "0",
        "-1s",
        "3 parsecs",
    ] {
        let is_valid = text.parse::<DurationSetting>().is_ok();
        let section = format!("process: {{drain: {{grace_period: '{text}'}}}}");
        assert_eq!(accepts(&section), is_valid, "{text}");
    }
    for text in [
        "16KiB",
        "5MB",
        "1.5 GiB",
        "7",
        "512b",
        "8 elephants",
        "1k",
        "-1B",
    ] {
        let is_valid = text.parse::<ByteSize>().is_ok();
        let section = format!("requests: {{limits: {{max_body_size: '{text}'}}}}");
        assert_eq!(accepts(&section), is_valid, "{text}");
    }
}
