//! Environment variables in the texts of a settings file: `${NAME}`, or `${NAME:-default}` with a
//! value for an unset variable. `$${` stands for a literal `${`. A text with variables is read as the
//! type of its key, so that `${PORT}` can be a number.

use super::reader::ValuePath;
use super::{SourcePosition, YamlNode, YamlValue};

/// Returns the value of an environment variable. A value that is not UTF-8 counts as unset.
#[expect(
    clippy::disallowed_methods,
    reason = "settings files refer to the environment"
)]
pub(super) fn read(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// A text whose variables have no value.
pub(super) struct UnresolvedText {
    pub(super) path: ValuePath,
    pub(super) position: SourcePosition,
    pub(super) problem: String,
}

/// Replaces the variables in all texts of a tree, except below the ignored keys of the root. Returns
/// the texts that cannot be resolved. An anchored text has one problem, however many aliases it has.
pub(super) fn interpolate(
    tree: &mut YamlNode,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Vec<UnresolvedText> {
    let mut unresolved = Vec::new();
    interpolate_tree(tree, &mut ValuePath::new(), variable, &mut unresolved);
    unresolved
}

fn interpolate_tree(
    tree: &mut YamlNode,
    path: &mut ValuePath,
    variable: &dyn Fn(&str) -> Option<String>,
    unresolved: &mut Vec<UnresolvedText>,
) {
    let is_root = path.is_empty();
    let mut descend = |index, inner: &mut YamlNode| {
        path.push(index);
        interpolate_tree(inner, path, variable, unresolved);
        path.pop();
    };
    match &mut tree.value {
        YamlValue::List(items) => {
            for (index, item) in items.iter_mut().enumerate() {
                descend(index, item);
            }
        }
        YamlValue::Map(entries) => {
            for (index, (key, value)) in entries.iter_mut().enumerate() {
                if !(is_root && is_ignored_key(&key.name)) {
                    descend(index, value);
                }
            }
        }
        YamlValue::Text(text) if text.contains("${") => match interpolate_text(text, variable) {
            Ok(result) => tree.written = Some(std::mem::replace(text, result).into()),
            Err(problem) => unresolved.push(UnresolvedText {
                path: path.clone(),
                position: tree.defined,
                problem,
            }),
        },
        _ => {}
    }
}

/// Returns whether the root ignores a key. Such keys hold anchors that other values repeat.
pub(super) fn is_ignored_key(key: &str) -> bool {
    key.starts_with("x-")
}

/// Returns the values of the texts with variables that may be secret, and the texts in the file, with
/// the longest value first.
pub(super) fn substituted_texts(tree: &YamlNode) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    collect_substituted(tree, &mut found);
    found.sort_by_key(|(value, _)| std::cmp::Reverse(value.len()));
    found
}

fn collect_substituted<'a>(tree: &'a YamlNode, found: &mut Vec<(&'a str, &'a str)>) {
    match (&tree.value, &tree.written) {
        (YamlValue::Text(value), Some(written)) => {
            let is_number = value.parse::<f64>().is_ok();
            if !value.is_empty() && !is_number && value.parse::<bool>().is_err() {
                found.push((value, written));
            }
        }
        (YamlValue::List(items), _) => items
            .iter()
            .for_each(|item| collect_substituted(item, found)),
        (YamlValue::Map(entries), _) => {
            for (_, value) in entries {
                collect_substituted(value, found);
            }
        }
        _ => {}
    }
}

/// Replaces a value with the text in the file, where it is not a part of a word.
pub(super) fn hide_value(message: &str, value: &str, written: &str) -> String {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut result = String::with_capacity(message.len());
    let mut rest = message;
    while let Some(start) = rest.find(value) {
        let (before, after) = (&rest[..start], &rest[start + value.len()..]);
        let joins_word = (before.ends_with(is_word) && value.starts_with(is_word))
            || (after.starts_with(is_word) && value.ends_with(is_word));
        result.push_str(before);
        result.push_str(if joins_word { value } else { written });
        rest = after;
    }
    result + rest
}

/// Returns a text that is read as `text`.
pub fn escape_references(text: &str) -> String {
    text.replace("${", "$${")
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
                "the environment variable {name} is not set; set it, or write a default: \
                ${{{name}:-value}}"
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
