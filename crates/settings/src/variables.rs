//! Environment variables in the texts of a settings file: `${NAME}`, or `${NAME:-default}` with a
//! value for an unset variable. `$${` stands for a literal `${`.

use super::{SourcePosition, Tree, Value};

/// Returns the value of an environment variable. A value that is not UTF-8 counts as unset.
#[expect(
    clippy::disallowed_methods,
    reason = "settings files refer to the environment"
)]
pub(super) fn read(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Replaces the variables in all texts of a tree. Returns the errors with their positions.
pub(super) fn interpolate(
    tree: &mut Tree,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Vec<(SourcePosition, String)> {
    let mut errors = Vec::new();
    interpolate_tree(tree, variable, &mut errors);
    errors
}

fn interpolate_tree(
    tree: &mut Tree,
    variable: &dyn Fn(&str) -> Option<String>,
    errors: &mut Vec<(SourcePosition, String)>,
) {
    match &mut tree.value {
        Value::Text(text) if text.contains("${") => match interpolate_text(text, variable) {
            Ok(result) => *text = result,
            Err(error) => errors.push((tree.position, error)),
        },
        Value::List(items) => {
            for item in items {
                interpolate_tree(item, variable, errors);
            }
        }
        Value::Map(entries) => {
            for (_, value) in entries {
                interpolate_tree(value, variable, errors);
            }
        }
        _ => {}
    }
}

fn interpolate_text(
    text: &str,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<String, String> {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("${") {
        let (before, reference) = rest.split_at(start);
        if let Some(before) = before.strip_suffix('$') {
            result.push_str(before);
            result.push_str("${");
            rest = &reference[2..];
            continue;
        }
        result.push_str(before);
        let end = reference.find('}').ok_or_else(|| {
            format!("`{text}` has `${{` without `}}`; write $${{ for the two characters")
        })?;
        result.push_str(&resolve(&reference[2..end], variable)?);
        rest = &reference[end + 1..];
    }
    result.push_str(rest);
    Ok(result)
}

/// Returns the value of a reference: `NAME` or `NAME:-default`.
fn resolve(reference: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
    let (name, default) = match reference.split_once(":-") {
        Some((name, default)) => (name, Some(default)),
        None => (reference, None),
    };
    let is_name = name
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        && name.starts_with(|first: char| !first.is_ascii_digit());
    if !is_name {
        return Err(format!(
            "`{name}` is not the name of an environment variable; write for example ${{POD_IP}}"
        ));
    }
    variable(name)
        .or_else(|| default.map(str::to_owned))
        .ok_or_else(|| {
            format!(
                "the environment variable {name} is not set; set it, or write a default: ${{{name}:-value}}"
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interpolated(text: &str) -> Result<String, String> {
        let variable = |name: &str| match name {
            "POD_IP" => Some("10.0.0.7".to_owned()),
            "EMPTY" => Some(String::new()),
            "NESTED" => Some("${POD_IP}".to_owned()),
            _ => None,
        };
        interpolate_text(text, &variable)
    }

    #[test]
    fn variables_are_replaced_in_texts() {
        for (text, expected) in [
            ("${POD_IP}:8000", "10.0.0.7:8000"),
            ("a${POD_IP}b${POD_IP}", "a10.0.0.7b10.0.0.7"),
            ("x${EMPTY}y", "xy"),
            ("${ABSENT:-127.0.0.1}:1", "127.0.0.1:1"),
            ("${ABSENT:-}", ""),
            ("${POD_IP:-unused}", "10.0.0.7"),
            ("$${POD_IP}", "${POD_IP}"),
            ("$5 and $name", "$5 and $name"),
            ("${NESTED}", "${POD_IP}"),
        ] {
            assert_eq!(interpolated(text).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn invalid_references_are_errors() {
        for (text, part) in [
            ("${ABSENT}", "ABSENT is not set"),
            ("${POD_IP", "without `}`"),
            ("${1A}", "is not the name"),
            ("${a-b}", "is not the name"),
            ("${}", "is not the name"),
        ] {
            let error = interpolated(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
