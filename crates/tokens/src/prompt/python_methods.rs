//! Python methods, Jinja2 filters and Jinja2 tests for which minijinja behaves differently. The
//! differences concern white space, letter case, positions in characters, and the definition of a
//! sequence. Templates that use a name not listed here are rejected at load.

use std::sync::Arc;

use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

use super::number;
use super::python::{self, POISON};
use super::white_space::{is_space, strip_with};

/// Clock and time zone of `strftime_now`.
pub(super) type TemplateClock = Arc<dyn Fn() -> jiff::Zoned + Send + Sync>;

/// Methods of strings and dicts that behave as in Python.
pub(super) const METHODS: [&str; 28] = [
    "capitalize",
    "count",
    "endswith",
    "find",
    "get",
    "isalnum",
    "isalpha",
    "isdigit",
    "islower",
    "isspace",
    "isupper",
    "items",
    "join",
    "keys",
    "lower",
    "lstrip",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rsplit",
    "rstrip",
    "split",
    "startswith",
    "strip",
    "title",
    "upper",
    "values",
];

/// Filters that behave as in Jinja2.
pub(super) const FILTERS: [&str; 30] = [
    "abs",
    "capitalize",
    "count",
    "d",
    "default",
    "dictsort",
    "first",
    "float",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "safe",
    "select",
    "selectattr",
    "string",
    "tojson",
    "trim",
    "unique",
    "upper",
];

/// Tests that behave as in Jinja2.
pub(super) const TESTS: [&str; 32] = [
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "boolean",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "even",
    "false",
    "float",
    "ge",
    "gt",
    "in",
    "integer",
    "iterable",
    "le",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "true",
    "undefined",
    "greaterthan",
];

/// Installs the Python methods, filters and tests in an environment.
pub(super) fn install(env: &mut Environment<'_>) {
    env.set_unknown_method_callback(call_method);
    env.set_formatter(|out, _, value| out.write_str(&python::text(value)).map_err(Error::from));
    env.add_filter("string", |value: &Value| python::text(value));
    env.add_filter("trim", |value: &Value, chars: Option<&str>| {
        strip_with(&python::text(value), chars, true, true).to_owned()
    });
    env.add_filter("capitalize", |value: &Value| {
        capitalize(&python::text(value))
    });
    env.add_filter("int", number::int_filter);
    env.add_filter("float", number::float_filter);
    env.add_filter("join", join);
    env.add_filter("items", |value: &Value| {
        minijinja::filters::items(value).and_then(|pairs| pairs_as_tuples(&pairs))
    });
    env.add_filter(
        "dictsort",
        |value: &Value, options: minijinja::value::Kwargs| {
            minijinja::filters::dictsort(value, options).and_then(|pairs| pairs_as_tuples(&pairs))
        },
    );
    env.add_filter(
        "tojson",
        |value: &Value, ascii: Option<bool>, options: minijinja::value::Kwargs| {
            python::tojson(value, ascii, &options)
        },
    );
    env.add_test("sequence", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined
        )
    });
    env.add_test("iterable", |value: &Value| {
        !value.is_none() && value.try_iter().is_ok()
    });
    env.add_test("number", python::is_number);
    env.add_test("float", python::is_float);
}

/// Formats the current time.
pub(super) fn strftime(now: &TemplateClock, format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, &now())
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

fn join(value: &Value, separator: Option<&str>) -> Result<String, Error> {
    let items: Vec<String> = value.try_iter()?.map(|item| python::text(&item)).collect();
    Ok(items.join(separator.unwrap_or_default()))
}

/// Converts pairs to Python tuples, because minijinja prints pairs as lists.
fn pairs_as_tuples(pairs: &Value) -> Result<Value, Error> {
    let tuple = |pair: Value| Ok(python::tuple(pair.try_iter()?.collect()));
    Ok(python::list(
        pairs.try_iter()?.map(tuple).collect::<Result<_, Error>>()?,
    ))
}

fn call_method(
    state: &State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if !METHODS.contains(&method) {
        return Err(Error::from(ErrorKind::UnknownMethod));
    }
    let Some(text) = value.as_str() else {
        let result = pycompat::unknown_method_callback(state, value, method, args)?;
        return if method == "items" {
            pairs_as_tuples(&result)
        } else {
            Ok(result)
        };
    };
    let arg = |place: usize| args.get(place).filter(|value| !value.is_none());
    let chars = || arg(0).map(text_arg).transpose();
    Ok(match (method, args.len()) {
        ("strip", 0..=1) => Value::from(strip_with(text, chars()?, true, true)),
        ("lstrip", 0..=1) => Value::from(strip_with(text, chars()?, true, false)),
        ("rstrip", 0..=1) => Value::from(strip_with(text, chars()?, false, true)),
        ("split", 0..=1) => python::list(split(text, chars()?)?),
        ("split", 2) => python::list(split_n(text, text_arg(&args[0])?, split_limit(&args[1])?)?),
        ("rsplit", 2) => python::list(rsplit_n(text, text_arg(&args[0])?, split_limit(&args[1])?)?),
        ("find", 1) => char_position(text, text.find(text_arg(&args[0])?)),
        ("rfind", 1) => char_position(text, text.rfind(text_arg(&args[0])?)),
        ("count", 1) => Value::from(count(text, text_arg(&args[0])?)),
        ("removeprefix", 1) => Value::from(text.strip_prefix(text_arg(&args[0])?).unwrap_or(text)),
        ("removesuffix", 1) => Value::from(text.strip_suffix(text_arg(&args[0])?).unwrap_or(text)),
        ("capitalize", 0) => Value::from(capitalize(text)),
        ("title", 0) => Value::from(title(text)),
        ("isdigit" | "isalpha" | "isalnum" | "isspace" | "islower" | "isupper", 0) => {
            Value::from(all_chars_are(text, method)?)
        }
        ("upper" | "lower", 0) | ("replace", 2..=3) | ("startswith" | "endswith" | "join", 1) => {
            return pycompat::unknown_method_callback(state, value, method, args);
        }
        _ => {
            return Err(Error::new(
                ErrorKind::UnknownMethod,
                format!("str.{method} with these arguments"),
            ));
        }
    })
}

fn text_arg(value: &Value) -> Result<&str, Error> {
    value
        .as_str()
        .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "the argument is not a string"))
}

fn split_limit(value: &Value) -> Result<usize, Error> {
    // A negative limit means no limit.
    Ok(usize::try_from(i64::try_from(value.clone())?).unwrap_or(usize::MAX - 1))
}

fn separator(text: &str) -> Result<&str, Error> {
    if text.is_empty() {
        Err(Error::new(ErrorKind::InvalidOperation, "empty separator"))
    } else {
        Ok(text)
    }
}

fn split(text: &str, at: Option<&str>) -> Result<Vec<Value>, Error> {
    Ok(match at {
        None => text
            .split(is_space)
            .filter(|word| !word.is_empty())
            .map(Value::from)
            .collect(),
        Some(at) => text.split(separator(at)?).map(Value::from).collect(),
    })
}

fn split_n(text: &str, at: &str, limit: usize) -> Result<Vec<Value>, Error> {
    Ok(text
        .splitn(limit + 1, separator(at)?)
        .map(Value::from)
        .collect())
}

fn rsplit_n(text: &str, at: &str, limit: usize) -> Result<Vec<Value>, Error> {
    let mut parts: Vec<Value> = text
        .rsplitn(limit + 1, separator(at)?)
        .map(Value::from)
        .collect();
    parts.reverse();
    Ok(parts)
}

/// Converts a byte position to a position in characters, as Python counts. Returns -1 for `None`.
fn char_position(text: &str, byte: Option<usize>) -> Value {
    byte.map_or(Value::from(-1), |byte| {
        Value::from(text[..byte].chars().count())
    })
}

fn count(text: &str, what: &str) -> usize {
    if what.is_empty() {
        text.chars().count() + 1
    } else {
        text.matches(what).count()
    }
}

/// Implements Python's `str.capitalize()`. Python uses title case for a non-ASCII first letter and
/// a context-dependent form of sigma. Such texts become [`POISON`].
fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        None => String::new(),
        Some(first) if first.is_ascii() && !text.contains('Σ') => {
            format!(
                "{}{}",
                first.to_ascii_uppercase(),
                chars.as_str().to_lowercase()
            )
        }
        Some(_) => POISON.to_owned(),
    }
}

/// Implements Python's `str.title()` for ASCII. Other texts become [`POISON`].
fn title(text: &str) -> String {
    if !text.is_ascii() {
        return POISON.to_owned();
    }
    let mut inside = false;
    let cased = |c: char| {
        let cased = if inside {
            c.to_ascii_lowercase()
        } else {
            c.to_ascii_uppercase()
        };
        inside = c.is_ascii_alphabetic();
        cased
    };
    text.chars().map(cased).collect()
}

/// Implements the `is…` methods for ASCII. For other texts, Python's result depends on its Unicode
/// tables, so they are an error.
fn all_chars_are(text: &str, method: &str) -> Result<bool, Error> {
    if !text.is_ascii() {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("str.{method} of text beyond ASCII"),
        ));
    }
    let every = |test: fn(&u8) -> bool| !text.is_empty() && text.bytes().all(|byte| test(&byte));
    Ok(match method {
        "isdigit" => every(u8::is_ascii_digit),
        "isalpha" => every(u8::is_ascii_alphabetic),
        "isalnum" => every(u8::is_ascii_alphanumeric),
        "isspace" => !text.is_empty() && text.chars().all(is_space),
        "islower" => {
            text.bytes().any(|c| c.is_ascii_lowercase())
                && !text.bytes().any(|c| c.is_ascii_uppercase())
        }
        _ => {
            text.bytes().any(|c| c.is_ascii_uppercase())
                && !text.bytes().any(|c| c.is_ascii_lowercase())
        }
    })
}
