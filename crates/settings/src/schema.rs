//! JSON Schema of a settings file, derived from its types. Editors use it for completion and checks.

use schemars::generate::SchemaSettings;
use schemars::transform::{Transform, transform_subschemas};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use super::{ByteSize, DurationSetting};

/// Pattern of an address and a port.
pub const ADDRESS_PATTERN: &str = ":[0-9]+$";

/// Pattern of a text with an environment variable. Such a text is valid for each scalar key.
const VARIABLE_PATTERN: &str = r"\$\{[A-Za-z_]";

/// Pattern of a duration, with the units of `humantime`.
const DURATION_PATTERN: &str = concat!(
    r"^\s*0\s*$|^(\s*[0-9]+(\.[0-9]+)?\s*",
    "(nanos|nsec|ns|usec|us|µs|millis|msec|ms|seconds?|secs?|s|minutes?|mins?|m",
    r"|hours?|hrs?|h|days?|d|weeks?|wks?|w|months?|M|years?|yrs?|y))+\s*$",
);

/// Returns the JSON Schema of a settings file with the content `T`, as indented JSON.
pub fn settings_schema<T: JsonSchema>(title: &str) -> String {
    // Draft 7 is the newest version that all YAML editors support.
    let mut generator = SchemaSettings::draft07()
        .with_transform(ReaderRules)
        .into_generator();
    let mut schema = generator.root_schema_for::<T>();
    let mut root = Map::new();
    for (key, value) in [
        ("$schema", schema.remove("$schema")),
        ("title", Some(title.into())),
    ] {
        root.extend(value.map(|value| (key.to_owned(), value)));
    }
    schema.remove("title");
    root.extend(std::mem::take(schema.ensure_object()));
    if root.contains_key("properties") {
        // The reader ignores these keys, which hold anchors.
        root.insert("patternProperties".to_owned(), json!({"^x-": true}));
    }
    format!("{:#}\n", Value::Object(root))
}

/// Adapts a derived schema to the rules of the reader.
#[derive(Clone)]
struct ReaderRules;

impl Transform for ReaderRules {
    fn transform(&mut self, schema: &mut Schema) {
        transform_subschemas(self, schema);
        let Some(object) = schema.as_object_mut() else {
            return;
        };
        adapt_annotations(object);
        allow_empty_section(object);
        allow_variables(object);
    }
}

/// Removes annotations that are meaningful in Rust only.
fn adapt_annotations(object: &mut Map<String, Value>) {
    // Names of Rust types.
    if object.get("format").is_some() {
        object.remove("format");
    }
    // Sets are written as lists, and a repeated element is accepted.
    object.remove("uniqueItems");
    // The properties of a section have the same defaults.
    if object.get("default").is_some_and(Value::is_object) {
        object.remove("default");
    }
    if let Some(Value::String(text)) = object.get_mut("description") {
        let paragraphs = text.split("\n\n").map(|lines| lines.replace('\n', " "));
        *text = paragraphs
            .collect::<Vec<_>>()
            .join("\n\n")
            .replace("`None`", "`null`");
    }
}

/// Allows `null` for a section without required keys: its value has the defaults.
fn allow_empty_section(object: &mut Map<String, Value>) {
    let is_section = object.get("type") == Some(&json!("object"))
        && object.contains_key("properties")
        && !object.contains_key("required");
    if is_section {
        object.insert("type".to_owned(), json!(["object", "null"]));
    }
}

/// Allows texts with variables. The reader converts the result to the type of the key.
fn allow_variables(object: &mut Map<String, Value>) {
    let variable = json!({"type": "string", "pattern": VARIABLE_PATTERN});
    if let Some(Value::String(pattern)) = object.get_mut("pattern") {
        *pattern = format!("{pattern}|{VARIABLE_PATTERN}");
        return;
    }
    if let Some(Value::Array(names)) = object.get_mut("oneOf") {
        let is_name = |name: &Value| name.get("const").is_some() || name.get("enum").is_some();
        if !names.is_empty() && names.iter().all(is_name) {
            names.push(variable);
        }
        return;
    }
    let types = match object.get("type") {
        Some(Value::String(name)) => vec![name.clone()],
        Some(Value::Array(names)) => names
            .iter()
            .filter_map(|name| name.as_str().map(str::to_owned))
            .collect(),
        _ => return,
    };
    let is_scalar = |name: &String| matches!(name.as_str(), "integer" | "number" | "boolean");
    if types.iter().any(is_scalar) && !types.iter().any(|name| name == "string") {
        let types: Vec<_> = types.into_iter().chain(["string".to_owned()]).collect();
        object.insert("type".to_owned(), json!(types));
        object.insert("pattern".to_owned(), VARIABLE_PATTERN.into());
    }
}

impl JsonSchema for DurationSetting {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Duration".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "description": "Length of time with its unit, for example 250ms, 30s or 5m.",
            "pattern": DURATION_PATTERN,
        })
    }
}

impl JsonSchema for ByteSize {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "ByteSize".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "description": "Size with its unit, for example 16KiB or 32MiB.",
            "pattern": r"^[0-9.]+ *([kKmMgGtTpPeE][iI]?)?[bB]$|^[0-9.]+ *[kKmMgGtTpPeE][iI]?$",
        })
    }
}
