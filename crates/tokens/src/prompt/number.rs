//! Python's parsing and printing of numbers.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use super::white_space;

/// Formats a finite double as Python's `repr`: the shortest digits, in scientific notation from
/// 1e16 and below 1e-4.
pub(super) fn repr(value: f64) -> String {
    let scientific = format!("{value:e}");
    let (digits, exponent) = split_exponent(&scientific);
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        return if plain.contains('.') {
            plain
        } else {
            format!("{plain}.0")
        };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
}

fn split_exponent(scientific: &str) -> (&str, i32) {
    let (digits, exponent) = scientific.split_once('e').unwrap_or((scientific, "0"));
    (digits, exponent.parse().unwrap_or(0))
}

/// Implements Jinja2's filter `int`. Returns the default for a value that is not a number.
pub(super) fn int_filter(value: &Value, default: Option<&Value>) -> Result<Value, Error> {
    let default = || Ok(default.cloned().unwrap_or_else(|| Value::from(0)));
    if let Some(text) = value.as_str() {
        return match number_text(text)? {
            Some(digits) if is_integer(&digits) => digits
                .parse::<i128>()
                .map(Value::from)
                .map_err(|_| unsupported_number("an integer of many digits")),
            Some(digits) => digits.parse().map_or_else(
                |_| default(),
                |float| integer_part(float).map_or_else(default, Ok),
            ),
            None => default(),
        };
    }
    match number_of(value)? {
        None => default(),
        Some(number) if number.is_integer() => Ok(number),
        Some(number) => f64::try_from(number)
            .ok()
            .and_then(integer_part)
            .map_or_else(default, Ok),
    }
}

/// Implements Jinja2's filter `float`. Returns the default for a value that is not a number.
pub(super) fn float_filter(value: &Value, default: Option<&Value>) -> Result<Value, Error> {
    let default = || Ok(default.cloned().unwrap_or_else(|| Value::from(0.0)));
    if let Some(text) = value.as_str() {
        return match number_text(text)?.map(|digits| digits.parse::<f64>()) {
            Some(Ok(float)) if float.is_finite() => Ok(Value::from(float)),
            Some(Ok(_)) => Err(unsupported_number("a number that is not finite")),
            Some(Err(_)) | None => default(),
        };
    }
    match number_of(value)? {
        None => default(),
        Some(number) => f64::try_from(number).map(Value::from),
    }
}

/// Returns the value as a number, or `None` if it is neither a number nor a Boolean.
fn number_of(value: &Value) -> Result<Option<Value>, Error> {
    match value.kind() {
        ValueKind::Undefined => Err(Error::new(
            ErrorKind::UndefinedError,
            "an undefined value is not a number",
        )),
        ValueKind::Bool => Ok(Some(Value::from(i64::from(value.is_true())))),
        ValueKind::Number => Ok(Some(value.clone())),
        ValueKind::Plain => Err(unsupported_number("a float that Python prints differently")),
        _ => Ok(None),
    }
}

fn unsupported_number(what: &str) -> Error {
    Error::new(
        ErrorKind::InvalidOperation,
        format!("{what}, which only Python reads"),
    )
}

/// Removes surrounding white space and the underscores between digits. Returns `None` for misplaced
/// underscores. Returns an error for digits of other scripts, which Python accepts.
fn number_text(text: &str) -> Result<Option<String>, Error> {
    let text = white_space::strip(text);
    if text.chars().any(|c| !c.is_ascii() && c.is_numeric()) {
        return Err(unsupported_number("digits of another script"));
    }
    let bytes = text.as_bytes();
    let between = |at: usize| {
        let digit = |at: Option<usize>| {
            at.and_then(|at| bytes.get(at))
                .is_some_and(u8::is_ascii_digit)
        };
        digit(at.checked_sub(1)) && digit(Some(at + 1))
    };
    let misplaced = bytes
        .iter()
        .enumerate()
        .any(|(at, &byte)| byte == b'_' && !between(at));
    Ok((!misplaced).then(|| text.replace('_', "")))
}

fn is_integer(text: &str) -> bool {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns the integer part of a float, if it has one.
fn integer_part(float: f64) -> Option<Value> {
    (float.is_finite() && float.abs() < 1e38).then(|| Value::from(float as i128))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_print_as_in_python() {
        for (value, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5, "-2.5"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e17, "1.5e+17"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.25e-7, "1.25e-07"),
            (1e100, "1e+100"),
        ] {
            assert_eq!(repr(value), text);
        }
    }

    #[test]
    fn texts_become_numbers_as_in_jinja() {
        for (text, int, float) in [
            ("7", "7", "7.0"),
            (" -7\n", "-7", "-7.0"),
            ("1_000", "1000", "1000.0"),
            ("_1", "0", "0.0"),
            ("7.9", "7", "7.9"),
            ("1e3", "1000", "1000.0"),
            ("", "0", "0.0"),
            ("rain", "0", "0.0"),
            ("1__0", "0", "0.0"),
        ] {
            let value = Value::from(text);
            assert_eq!(int_filter(&value, None).unwrap().to_string(), int, "{text}");
            assert_eq!(
                repr(float_filter(&value, None).unwrap().try_into().unwrap()),
                float,
                "{text}"
            );
        }
        assert!(float_filter(&Value::from("nan"), None).is_err());
        assert!(int_filter(&Value::from("\u{661}"), None).is_err());
        assert_eq!(
            int_filter(&Value::from("x"), Some(&Value::from(5))).unwrap(),
            Value::from(5)
        );
    }
}
