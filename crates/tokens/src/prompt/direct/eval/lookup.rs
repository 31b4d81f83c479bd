//! Lookups, comparisons, filters and methods of values.

use memchr::memmem;
use minijinja::Value;
use minijinja::machinery::ast::CompareOpKind;
use minijinja::value::{Kwargs, ValueKind};

use crate::prompt::direct::eval::PlanRun;
use crate::prompt::direct::operations::{map_text, value_of};
use crate::prompt::direct::plan::{KnownFilter, StringMethod};
use crate::prompt::direct::value::{
    EvalResult, LoopCounter, TemplateValue, UnsupportedError, message_field, part_field, position,
};
use crate::prompt::{python, white_space};

impl<'a> PlanRun<'a> {
    pub(super) fn field(&self, of: &TemplateValue<'a>, key: &str) -> EvalResult<TemplateValue<'a>> {
        Ok(match of {
            TemplateValue::Message(number) => message_field(&self.turns[*number], key)?,
            TemplateValue::Part(part) => part_field(part, key),
            TemplateValue::Loop(counter) => {
                self.record_loop_field(counter, key);
                match key {
                    "index" => TemplateValue::Int(i64::from(counter.index) + 1),
                    "index0" => TemplateValue::Int(i64::from(counter.index)),
                    "first" => TemplateValue::Bool(counter.index == 0),
                    "last" => TemplateValue::Bool(counter.index + 1 == counter.length),
                    "length" => TemplateValue::Int(i64::from(counter.length)),
                    "previtem" => counter
                        .neighbor(-1)?
                        .map_or(TemplateValue::Undefined, TemplateValue::Message),
                    "nextitem" => counter
                        .neighbor(1)?
                        .map_or(TemplateValue::Undefined, TemplateValue::Message),
                    _ => return Err(UnsupportedError),
                }
            }
            TemplateValue::Namespace(fields) => {
                let fields = fields.borrow();
                fields
                    .iter()
                    .find(|(known, _)| *known == key)
                    .map_or(TemplateValue::Undefined, |(_, value)| value.clone())
            }
            TemplateValue::Other(value) if value.kind() == ValueKind::Map => {
                TemplateValue::from_minijinja(value.get_attr(key).map_err(|_| UnsupportedError)?)
            }
            _ => return Err(UnsupportedError),
        })
    }

    /// Records the messages on which a field of the variable `loop` depends.
    fn record_loop_field(&self, counter: &LoopCounter, key: &str) {
        let Some(messages) = counter.over else {
            return;
        };
        let next = i64::from(counter.index) + 1;
        match key {
            // The value is the same in every conversation that contains the next message.
            "last" if next < i64::from(counter.length) => {
                self.dependencies.record_item(messages, next);
            }
            "last" | "length" => self.dependencies.record_all(),
            "nextitem" => self.dependencies.record_item(messages, next),
            // The previous messages were read by previous iterations, or precede the start
            // checkpoint.
            _ => {}
        }
    }

    pub(super) fn item(&self, of: &TemplateValue<'a>, at: i64) -> EvalResult<TemplateValue<'a>> {
        Ok(match of {
            TemplateValue::Messages(messages) => {
                self.dependencies.record_item(*messages, at);
                messages
                    .at(at)
                    .map_or(TemplateValue::Undefined, TemplateValue::Message)
            }
            TemplateValue::Parts(parts) => position(at, parts.len())
                .map_or(TemplateValue::Undefined, |at| {
                    TemplateValue::Part(&parts[at])
                }),
            TemplateValue::List(items) => {
                position(at, items.len()).map_or(TemplateValue::Undefined, |at| items[at].clone())
            }
            TemplateValue::Other(value) if value.kind() == ValueKind::Seq => {
                TemplateValue::from_minijinja(
                    value
                        .get_item(&Value::from(at))
                        .map_err(|_| UnsupportedError)?,
                )
            }
            _ => return Err(UnsupportedError),
        })
    }

    pub(super) fn compare(
        &self,
        comparison: CompareOpKind,
        left: &TemplateValue<'a>,
        right: &TemplateValue<'a>,
    ) -> EvalResult<bool> {
        let ordered = || match (left, right) {
            (TemplateValue::Int(left), TemplateValue::Int(right)) => Ok(left.cmp(right)),
            _ => Err(UnsupportedError),
        };
        Ok(match comparison {
            CompareOpKind::Eq => left.equals(right)?,
            CompareOpKind::Ne => !left.equals(right)?,
            CompareOpKind::Lt => ordered()?.is_lt(),
            CompareOpKind::Lte => ordered()?.is_le(),
            CompareOpKind::Gt => ordered()?.is_gt(),
            CompareOpKind::Gte => ordered()?.is_ge(),
            CompareOpKind::In => self.contains(right, left)?,
            CompareOpKind::NotIn => !self.contains(right, left)?,
        })
    }

    fn contains(&self, whole: &TemplateValue<'a>, item: &TemplateValue<'a>) -> EvalResult<bool> {
        let key = || item.text().ok_or(UnsupportedError);
        if let Some(whole) = whole.text() {
            return Ok(memmem::find(whole.as_bytes(), key()?.as_bytes()).is_some());
        }
        match whole {
            TemplateValue::List(items) => {
                // Compares all items, so that an unsupported item is detected even after a match.
                let equal = items
                    .iter()
                    .map(|known| known.equals(item))
                    .collect::<Result<Vec<_>, _>>()?;
                Ok(equal.contains(&true))
            }
            TemplateValue::Message(_) | TemplateValue::Part(_) => Ok(!matches!(
                self.field(whole, key()?)?,
                TemplateValue::Undefined
            )),
            TemplateValue::Other(value) if value.kind() == ValueKind::Map => {
                let found = value
                    .get_item(&Value::from(key()?))
                    .map_err(|_| UnsupportedError)?;
                Ok(!found.is_undefined())
            }
            _ => Err(UnsupportedError),
        }
    }

    pub(super) fn filtered(
        &mut self,
        over: TemplateValue<'a>,
        filter: &'a KnownFilter,
    ) -> EvalResult<TemplateValue<'a>> {
        match filter {
            KnownFilter::Trim => map_text(&over, white_space::strip),
            KnownFilter::Length => {
                if over.messages().is_some() {
                    self.dependencies.record_all();
                }
                Ok(TemplateValue::Int(over.len()? as i64))
            }
            KnownFilter::First | KnownFilter::Last if over.text().is_some() => {
                Err(UnsupportedError)
            }
            KnownFilter::First => self.item(&over, 0),
            KnownFilter::Last => self.item(&over, -1),
            KnownFilter::Identity => over
                .text()
                .is_some()
                .then_some(over.clone())
                .ok_or(UnsupportedError),
            KnownFilter::Default(otherwise) => match over {
                TemplateValue::Undefined => self.term(otherwise),
                defined => Ok(defined),
            },
            KnownFilter::Replace(pair) => {
                let what = self.term(&pair.0)?;
                let by = self.term(&pair.1)?;
                let (Some(text), Some(what), Some(by)) = (over.text(), what.text(), by.text())
                else {
                    return Err(UnsupportedError);
                };
                Ok(TemplateValue::owned(text.replace(what, by)))
            }
            KnownFilter::Json(options) => {
                let value = value_of(&over)?;
                let options: Kwargs = options
                    .iter()
                    .map(|(name, value)| (&**name, value.clone()))
                    .collect();
                python::tojson(&value, None, &options)
                    .map(TemplateValue::owned)
                    .map_err(|_| UnsupportedError)
            }
        }
    }

    pub(super) fn call_method(
        &self,
        over: &TemplateValue<'a>,
        method: StringMethod,
        args: &[TemplateValue<'a>],
    ) -> EvalResult<TemplateValue<'a>> {
        let text = |place: usize| {
            args.get(place)
                .and_then(TemplateValue::text)
                .ok_or(UnsupportedError)
        };
        let chars = || args.first().map(|_| text(0)).transpose();
        let whole = || over.text().ok_or(UnsupportedError);
        Ok(match method {
            StringMethod::Strip | StringMethod::LStrip | StringMethod::RStrip => {
                let chars = chars()?;
                let start = !matches!(method, StringMethod::RStrip);
                let end = !matches!(method, StringMethod::LStrip);
                map_text(over, |text| {
                    white_space::strip_with(text, chars, start, end)
                })?
            }
            StringMethod::StartsWith => TemplateValue::Bool(whole()?.starts_with(text(0)?)),
            StringMethod::EndsWith => TemplateValue::Bool(whole()?.ends_with(text(0)?)),
            StringMethod::Replace => TemplateValue::owned(whole()?.replace(text(0)?, text(1)?)),
            StringMethod::Split => {
                let at = Some(text(0)?)
                    .filter(|at| !at.is_empty())
                    .ok_or(UnsupportedError)?;
                match over {
                    TemplateValue::Text(whole) => {
                        TemplateValue::List(whole.split(at).map(TemplateValue::Text).collect())
                    }
                    _ => {
                        TemplateValue::List(whole()?.split(at).map(TemplateValue::owned).collect())
                    }
                }
            }
            StringMethod::Get
                if matches!(over, TemplateValue::Message(_) | TemplateValue::Part(_)) =>
            {
                match self.field(over, text(0)?)? {
                    TemplateValue::Undefined => match args.get(1) {
                        Some(TemplateValue::Undefined) => return Err(UnsupportedError),
                        otherwise => otherwise.cloned().unwrap_or(TemplateValue::None),
                    },
                    found => found,
                }
            }
            StringMethod::Get => return Err(UnsupportedError),
        })
    }
}
