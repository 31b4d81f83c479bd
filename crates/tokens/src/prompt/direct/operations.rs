//! Operations on values. Each supports only values for which it is known to equal minijinja.

use minijinja::Value;
use minijinja::machinery::ast::BinOpKind;
use minijinja::value::ValueKind;

use super::plan::ValueTest;
use super::value::{EvalResult, TemplateValue, UnsupportedError};
use crate::prompt::python::{self, POISON};

/// Writes a value as the output `{{ value }}` does.
pub(super) fn print(value: &TemplateValue<'_>, out: &mut String) -> EvalResult<()> {
    let TemplateValue::Other(other) = value else {
        return join(value, out);
    };
    let text = python::text(other);
    if text.contains(POISON) {
        return Err(UnsupportedError);
    }
    out.push_str(&text);
    Ok(())
}

/// Writes a value as the operator `~` does.
pub(super) fn join(value: &TemplateValue<'_>, out: &mut String) -> EvalResult<()> {
    match (value, value.text()) {
        (_, Some(text)) => out.push_str(text),
        (TemplateValue::Undefined, _) => {}
        (TemplateValue::Int(number), _) => out.push_str(&number.to_string()),
        _ => return Err(UnsupportedError),
    }
    Ok(())
}

/// Returns a part of a text. It is borrowed if the text is borrowed.
pub(super) fn map_text<'a>(
    value: &TemplateValue<'a>,
    part: impl for<'t> Fn(&'t str) -> &'t str,
) -> EvalResult<TemplateValue<'a>> {
    match value {
        TemplateValue::Text(text) => Ok(TemplateValue::Text(part(text))),
        _ => value
            .text()
            .map(|text| TemplateValue::owned(part(text)))
            .ok_or(UnsupportedError),
    }
}

pub(super) fn arithmetic<'a>(
    operation: BinOpKind,
    left: &TemplateValue<'a>,
    right: &TemplateValue<'a>,
) -> EvalResult<TemplateValue<'a>> {
    if let (BinOpKind::Add, Some(left), Some(right)) = (operation, left.text(), right.text()) {
        return Ok(TemplateValue::owned([left, right].concat()));
    }
    let (TemplateValue::Int(left), TemplateValue::Int(right)) = (left, right) else {
        return Err(UnsupportedError);
    };
    let result = match operation {
        BinOpKind::Add => left.checked_add(*right),
        BinOpKind::Sub => left.checked_sub(*right),
        // Python's result for negative numbers differs.
        BinOpKind::Rem if *left >= 0 && *right > 0 => Some(left % right),
        _ => None,
    };
    result.map(TemplateValue::Int).ok_or(UnsupportedError)
}

pub(super) fn matches_test(value: &TemplateValue<'_>, kind: ValueTest) -> EvalResult<bool> {
    Ok(match kind {
        ValueTest::Defined => !matches!(value, TemplateValue::Undefined),
        ValueTest::Undefined => matches!(value, TemplateValue::Undefined),
        ValueTest::None => matches!(value, TemplateValue::None),
        ValueTest::Text => value.text().is_some(),
        ValueTest::Mapping => match value {
            TemplateValue::Message(_) | TemplateValue::Part(_) => true,
            TemplateValue::Other(value) => value.kind() == ValueKind::Map,
            TemplateValue::Namespace(_) | TemplateValue::Loop(_) => return Err(UnsupportedError),
            _ => false,
        },
        ValueTest::Iterable => match value {
            TemplateValue::Messages(_)
            | TemplateValue::Message(_)
            | TemplateValue::Parts(_)
            | TemplateValue::Part(_)
            | TemplateValue::List(_) => true,
            TemplateValue::None | TemplateValue::Int(_) | TemplateValue::Bool(_) => false,
            _ if value.text().is_some() => true,
            _ => return Err(UnsupportedError),
        },
        ValueTest::True => matches!(value, TemplateValue::Bool(true)),
        ValueTest::False => matches!(value, TemplateValue::Bool(false)),
    })
}

/// Converts a value to a minijinja value.
pub(super) fn value_of(value: &TemplateValue<'_>) -> EvalResult<Value> {
    match value {
        TemplateValue::Other(value) => Ok(value.clone()),
        TemplateValue::Int(number) => Ok(Value::from(*number)),
        TemplateValue::Bool(flag) => Ok(Value::from(*flag)),
        _ => value.text().map(Value::from).ok_or(UnsupportedError),
    }
}
