//! Tables of the keys of a settings file with their types, defaults and descriptions, from the
//! schema.

use serde_json::Value;

const TABLE_HEAD: &str = "| key | type | default | description |\n|---|---|---|---|\n";

/// Returns one section with a table per top-level key, as Markdown.
pub(crate) fn key_tables(schema: &str) -> String {
    let schema: Value = serde_json::from_str(schema).unwrap();
    let mut tables = String::new();
    write_keys(&schema, &schema, "", &mut tables);
    tables
}

/// Writes the rows of the keys of a section.
fn write_keys(section: &Value, schema: &Value, path: &str, table: &mut String) {
    let Some(keys) = section["properties"].as_object() else {
        return;
    };
    let required = section["required"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    for (key, property) in keys {
        if path.is_empty() {
            table.push_str(&format!("\n## {key}\n{TABLE_HEAD}"));
        }
        let path = format!("{path}{key}");
        let inner = without_null(property, schema);
        let is_required = required.iter().any(|name| name == key);
        let default = match property.get("default") {
            None | Some(Value::Null) if is_required => "required".to_owned(),
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) if !text.is_empty() => format!("`{text}`"),
            Some(value) => format!("`{value}`"),
        };
        let description = property["description"].as_str().unwrap_or_default();
        let description = description.replace('|', "\\|").replace("\n\n", " ");
        let kind = type_name(inner, schema).replace('|', "\\|");
        table.push_str(&format!(
            "| `{path}` | {kind} | {default} | {description} |\n"
        ));
        write_inner_keys(inner, schema, &path, table);
    }
}

/// Writes the rows of the keys below a section, a list or a map.
fn write_inner_keys(property: &Value, schema: &Value, path: &str, table: &mut String) {
    write_keys(property, schema, &format!("{path}."), table);
    if let Some(items) = property.get("items") {
        write_inner_keys(
            without_null(items, schema),
            schema,
            &format!("{path}[]"),
            table,
        );
    }
    if let Some(values) = property
        .get("additionalProperties")
        .filter(|values| values.is_object())
    {
        write_inner_keys(
            without_null(values, schema),
            schema,
            &format!("{path}.NAME"),
            table,
        );
    }
    for choice in property["anyOf"].as_array().into_iter().flatten() {
        write_keys(choice, schema, &format!("{path}."), table);
    }
}

/// Follows references, and removes the alternative `null`.
fn without_null<'a>(property: &'a Value, schema: &'a Value) -> &'a Value {
    let is_null = |choice: &&Value| choice["type"] == "null";
    if let Some(reference) = property["$ref"].as_str() {
        let target = schema.pointer(reference.trim_start_matches('#')).unwrap();
        return without_null(target, schema);
    }
    if let Some([inner]) = property["allOf"].as_array().map(Vec::as_slice) {
        return without_null(inner, schema);
    }
    match property["anyOf"].as_array().map(Vec::as_slice) {
        Some([inner, null]) if is_null(&null) => without_null(inner, schema),
        _ => property,
    }
}

/// Returns the type of a key in words.
fn type_name(property: &Value, schema: &Value) -> String {
    let choices = property["oneOf"]
        .as_array()
        .or(property["anyOf"].as_array());
    if let Some(choices) = choices {
        let names = choices.iter().filter_map(|choice| {
            let inner = without_null(choice, schema);
            let is_variable = choice["type"] == "string" && choice.get("description").is_none();
            match choice["const"].as_str() {
                Some(name) => Some(format!("`{name}`")),
                None if is_variable && choice.get("pattern").is_some() => None,
                None => Some(type_name(inner, schema)),
            }
        });
        return names.collect::<Vec<_>>().join(", ");
    }
    for (definition, name) in [("Duration", "duration"), ("ByteSize", "size")] {
        if *property == schema["definitions"][definition] {
            return name.to_owned();
        }
    }
    let types: Vec<&str> = match &property["type"] {
        Value::Array(types) => types.iter().filter_map(Value::as_str).collect(),
        other => other.as_str().into_iter().collect(),
    };
    let name = match types.first() {
        Some(&"object") if property.get("properties").is_some() => "section",
        Some(&"object") => "map",
        Some(&"array") => {
            let items = without_null(&property["items"], schema);
            return format!("list of {}", type_name(items, schema));
        }
        Some(&"string") => "text",
        Some(other) => other,
        None => "any",
    };
    name.to_owned()
}
