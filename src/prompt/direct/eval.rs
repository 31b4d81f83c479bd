//! The evaluation. Every operation says for which values it is known to do what minijinja does with ours (see `methods` and
//! `python`), and gives up for all others.

use std::cell::RefCell;
use std::rc::Rc;

use memchr::memmem;
use minijinja::Value;
use minijinja::value::{Kwargs, ValueKind};

use super::GivenUp;
use super::operations::{arithmetic, is, join, mapped, print, value_of};
use super::plan::{Comparison, For, Known, Macro, Method, Slot, Step, Term};
use super::value::{Counter, Val, of_message, of_part, position};
use crate::prompt::conversation::Turn;
use crate::prompt::template::Clock;
use crate::prompt::{methods, python, template};

/// Iterations a template may take. Who needs more is left to minijinja and its fuel.
const MOST_ITERATIONS: u32 = 100_000;

/// How a list of steps ended.
#[derive(PartialEq, Eq)]
pub(super) enum Flow {
    On,
    Break,
    Continue,
}

/// One evaluation.
pub(super) struct Run<'a> {
    turns: &'a [Turn<'a>],
    slots: Vec<Val<'a>>,
    /// What macros begin with: the slots as they were before anything was set.
    given: Vec<Val<'a>>,
    macros: &'a [Macro],
    clock: &'a Clock,
    iterations: u32,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        turns: &'a [Turn<'a>],
        slots: Vec<Val<'a>>,
        macros: &'a [Macro],
        clock: &'a Clock,
    ) -> Self {
        let given = if macros.is_empty() {
            Vec::new()
        } else {
            slots.clone()
        };
        Self {
            turns,
            slots,
            given,
            macros,
            clock,
            iterations: 0,
        }
    }

    pub(super) fn steps(&mut self, steps: &'a [Step], out: &mut String) -> Result<Flow, GivenUp> {
        for step in steps {
            let flow = match step {
                Step::Raw(text) => {
                    out.push_str(text);
                    Flow::On
                }
                Step::Emit(term) => {
                    let value = self.term(term)?;
                    print(&value, out)?;
                    Flow::On
                }
                Step::Texts(terms) => {
                    for term in terms {
                        match self.plain(term) {
                            Some(text) => out.push_str(text),
                            None => out.push_str(self.term(term)?.text().ok_or(GivenUp)?),
                        }
                    }
                    Flow::On
                }
                Step::Joined(terms) => {
                    for term in terms {
                        match self.plain(term) {
                            Some(text) => out.push_str(text),
                            None => join(&self.term(term)?, out)?,
                        }
                    }
                    Flow::On
                }
                Step::If {
                    test,
                    then,
                    otherwise,
                } => {
                    let chosen = if self.is_true(test)? { then } else { otherwise };
                    self.steps(chosen, out)?
                }
                Step::For(node) => self.for_loop(node, out)?,
                Step::Set(slot, term) => {
                    self.slots[slot.at()] = self.term(term)?;
                    Flow::On
                }
                Step::SetField(space, name, term) => {
                    let value = self.term(term)?;
                    self.set_field(*space, name, value)?;
                    Flow::On
                }
                Step::Nothing => Flow::On,
                Step::Break => Flow::Break,
                Step::Continue => Flow::Continue,
                Step::Unknown => return Err(GivenUp),
            };
            if flow != Flow::On {
                return Ok(flow);
            }
        }
        Ok(Flow::On)
    }

    fn for_loop(&mut self, node: &'a For, out: &mut String) -> Result<Flow, GivenUp> {
        let over = self.term(&node.over)?;
        let length = match &over {
            // Which of them are there is only known by going through them.
            Val::Other(value) if value.kind() != ValueKind::Seq => return Err(GivenUp),
            _ if over.text().is_some() => return Err(GivenUp),
            _ => u32::try_from(over.len()?).map_err(|_| GivenUp)?,
        };
        let before: Vec<Val<'a>> = node
            .own
            .iter()
            .map(|slot| self.slots[slot.at()].clone())
            .collect();
        for index in 0..length {
            self.count()?;
            for (slot, value) in node.own.iter().zip(&before) {
                // Those two get another value at once.
                if *slot != node.target && *slot != node.counter {
                    self.slots[slot.at()] = value.clone();
                }
            }
            self.slots[node.counter.at()] = Val::Counter(Counter {
                index,
                length,
                over: over.messages(),
            });
            self.slots[node.target.at()] = self.item(&over, i64::from(index))?;
            if self.steps(&node.body, out)? == Flow::Break {
                // Whether the `else` of a loop counts that as an iteration, engines for templates disagree on.
                if !node.otherwise.is_empty() {
                    return Err(GivenUp);
                }
                break;
            }
        }
        for (slot, value) in node.own.iter().zip(before) {
            self.slots[slot.at()] = value;
        }
        if length == 0 {
            self.steps(&node.otherwise, out)
        } else {
            Ok(Flow::On)
        }
    }

    fn call_macro(
        &mut self,
        called: &'a Macro,
        given: &'a [(Slot, Term)],
    ) -> Result<Val<'a>, GivenUp> {
        let body = called.body.as_ref().ok_or(GivenUp)?;
        self.count()?;
        let mut values = Vec::with_capacity(called.parameters.len());
        for (slot, default) in &called.parameters {
            let given = given
                .iter()
                .find(|(known, _)| known == slot)
                .map(|(_, term)| term);
            let value = given
                .or(default.as_ref())
                .map_or(Ok(Val::Undefined), |term| self.term(term))?;
            if given.is_some() && matches!(value, Val::Undefined) {
                // Whether it is the default then, engines for templates disagree on.
                return Err(GivenUp);
            }
            values.push((*slot, value));
        }
        // Slots are one for each name, and a macro sees none of the variables of the place where it is called.
        values.extend(
            called
                .named
                .iter()
                .map(|slot| (*slot, self.given[slot.at()].clone())),
        );
        for (slot, value) in &mut values {
            std::mem::swap(&mut self.slots[slot.at()], value);
        }
        let mut text = String::new();
        self.steps(body, &mut text)?;
        for (slot, before) in values {
            self.slots[slot.at()] = before;
        }
        Ok(Val::Owned(text.into()))
    }

    /// Counts an iteration.
    fn count(&mut self) -> Result<(), GivenUp> {
        self.iterations += 1;
        if self.iterations > MOST_ITERATIONS {
            Err(GivenUp)
        } else {
            Ok(())
        }
    }

    fn set_field(&mut self, space: Slot, name: &'a str, value: Val<'a>) -> Result<(), GivenUp> {
        let Val::Space(space) = &self.slots[space.at()] else {
            return Err(GivenUp);
        };
        let mut fields = space.borrow_mut();
        match fields.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known = value,
            None => fields.push((name, value)),
        }
        Ok(())
    }

    fn term(&mut self, term: &'a Term) -> Result<Val<'a>, GivenUp> {
        Ok(match term {
            Term::Text(text) => Val::Text(text),
            Term::Int(number) => Val::Int(*number),
            Term::Bool(flag) => Val::Bool(*flag),
            Term::None => Val::None,
            Term::Var(slot) => self.slots[slot.at()].clone(),
            Term::Field(of, key) => {
                let of = self.term(of)?;
                self.field(&of, key)?
            }
            Term::Item(of, at) => {
                let (of, at) = (self.term(of)?, self.term(at)?);
                let Val::Int(at) = at else {
                    return Err(GivenUp);
                };
                self.item(&of, at)?
            }
            Term::Slice(of, start, stop) => {
                let Val::Messages(messages) = self.term(of)? else {
                    return Err(GivenUp);
                };
                let (start, stop) = (self.end(start.as_deref())?, self.end(stop.as_deref())?);
                Val::Messages(messages.cut(start, stop)?)
            }
            Term::Backwards(of) => match self.term(of)? {
                Val::Messages(messages) => Val::Messages(messages.reversed()),
                _ => return Err(GivenUp),
            },
            Term::If(parts) => {
                let test = self.is_true(&parts.0)?;
                self.term(if test { &parts.1 } else { &parts.2 })?
            }
            Term::Filtered(over, filter) => {
                let over = self.term(over)?;
                self.filtered(over, filter)?
            }
            Term::Is(over, kind) => Val::Bool(is(&self.term(over)?, *kind)?),
            Term::Method(over, method, args) => {
                let over = self.term(over)?;
                let args: Vec<Val<'a>> = args
                    .iter()
                    .map(|arg| self.term(arg))
                    .collect::<Result<_, _>>()?;
                self.call(&over, *method, &args)?
            }
            Term::List(items) => Val::List(
                items
                    .iter()
                    .map(|item| self.term(item))
                    .collect::<Result<_, _>>()?,
            ),
            Term::Space(fields) => {
                let field = |(name, value): &'a (Box<str>, Term)| Ok((&**name, self.term(value)?));
                Val::Space(Rc::new(RefCell::new(
                    fields.iter().map(field).collect::<Result<_, _>>()?,
                )))
            }
            Term::Now(format) => {
                let format = self.term(format)?;
                let time = template::strftime(self.clock, format.text().ok_or(GivenUp)?);
                Val::owned(time.map_err(|_| GivenUp)?)
            }
            Term::Unknown => return Err(GivenUp),
            _ => self.operation(term)?,
        })
    }

    /// Whether the value of a term counts as true: the same as of the value itself, which most tests need not make.
    fn is_true(&mut self, term: &'a Term) -> Result<bool, GivenUp> {
        match term {
            Term::Not(term) => Ok(!self.is_true(term)?),
            Term::And(pair) => Ok(self.is_true(&pair.0)? && self.is_true(&pair.1)?),
            Term::Or(pair) => Ok(self.is_true(&pair.0)? || self.is_true(&pair.1)?),
            Term::Compare(comparison, pair) => self.compared(*comparison, pair),
            _ => self.term(term)?.is_true(),
        }
    }

    fn compared(
        &mut self,
        comparison: Comparison,
        pair: &'a (Term, Term),
    ) -> Result<bool, GivenUp> {
        if let (Some(left), Some(right)) = (self.plain(&pair.0), self.plain(&pair.1)) {
            match comparison {
                Comparison::Eq => return Ok(left == right),
                Comparison::Ne => return Ok(left != right),
                _ => {}
            }
        }
        let (left, right) = (self.term(&pair.0)?, self.term(&pair.1)?);
        self.compare(comparison, &left, &right)
    }

    /// The text of a term, where it is one that lies there: of the template, or the role or the content of a message.
    fn plain(&self, term: &'a Term) -> Option<&'a str> {
        match term {
            Term::Text(text) => Some(text),
            Term::Var(slot) => match self.slots[slot.at()] {
                Val::Text(text) => Some(text),
                _ => None,
            },
            Term::Field(of, key) => {
                let Term::Var(slot) = **of else { return None };
                let Val::Message(number) = self.slots[slot.at()] else {
                    return None;
                };
                match of_message(&self.turns[number], key) {
                    Val::Text(text) => Some(text),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Terms that make one of others.
    fn operation(&mut self, term: &'a Term) -> Result<Val<'a>, GivenUp> {
        Ok(match term {
            Term::Not(_) => Val::Bool(self.is_true(term)?),
            Term::And(pair) => {
                let left = self.term(&pair.0)?;
                if left.is_true()? {
                    self.term(&pair.1)?
                } else {
                    left
                }
            }
            Term::Or(pair) => {
                let left = self.term(&pair.0)?;
                if left.is_true()? {
                    left
                } else {
                    self.term(&pair.1)?
                }
            }
            Term::Compare(comparison, pair) => Val::Bool(self.compared(*comparison, pair)?),
            Term::Arithmetic(operation, pair) => {
                let (left, right) = (self.term(&pair.0)?, self.term(&pair.1)?);
                arithmetic(*operation, &left, &right)?
            }
            Term::Joined(terms) => {
                let mut text = String::new();
                for term in terms {
                    let value = self.term(term)?;
                    join(&value, &mut text)?;
                }
                Val::Owned(text.into())
            }
            Term::Call(called, given) => self.call_macro(&self.macros[*called], given)?,
            _ => return Err(GivenUp),
        })
    }

    /// An end of a slice.
    fn end(&mut self, term: Option<&'a Term>) -> Result<Option<i64>, GivenUp> {
        match term.map(|term| self.term(term)).transpose()? {
            None | Some(Val::None) => Ok(None),
            Some(Val::Int(number)) => Ok(Some(number)),
            Some(_) => Err(GivenUp),
        }
    }

    fn field(&self, of: &Val<'a>, key: &str) -> Result<Val<'a>, GivenUp> {
        Ok(match of {
            Val::Message(number) => of_message(&self.turns[*number], key),
            Val::Part(part) => of_part(part, key),
            Val::Counter(counter) => match key {
                "index" => Val::Int(i64::from(counter.index) + 1),
                "index0" => Val::Int(i64::from(counter.index)),
                "first" => Val::Bool(counter.index == 0),
                "last" => Val::Bool(counter.index + 1 == counter.length),
                "length" => Val::Int(i64::from(counter.length)),
                "previtem" => counter.beside(-1)?.map_or(Val::Undefined, Val::Message),
                "nextitem" => counter.beside(1)?.map_or(Val::Undefined, Val::Message),
                _ => return Err(GivenUp),
            },
            Val::Space(fields) => {
                let fields = fields.borrow();
                fields
                    .iter()
                    .find(|(known, _)| *known == key)
                    .map_or(Val::Undefined, |(_, value)| value.clone())
            }
            Val::Other(value) if value.kind() == ValueKind::Map => {
                Val::of(value.get_attr(key).map_err(|_| GivenUp)?)
            }
            _ => return Err(GivenUp),
        })
    }

    fn item(&self, of: &Val<'a>, at: i64) -> Result<Val<'a>, GivenUp> {
        Ok(match of {
            Val::Messages(messages) => messages.at(at).map_or(Val::Undefined, Val::Message),
            Val::Parts(parts) => {
                position(at, parts.len()).map_or(Val::Undefined, |at| Val::Part(&parts[at]))
            }
            Val::List(items) => {
                position(at, items.len()).map_or(Val::Undefined, |at| items[at].clone())
            }
            Val::Other(value) if value.kind() == ValueKind::Seq => {
                Val::of(value.get_item(&Value::from(at)).map_err(|_| GivenUp)?)
            }
            _ => return Err(GivenUp),
        })
    }

    fn compare(
        &self,
        comparison: Comparison,
        left: &Val<'a>,
        right: &Val<'a>,
    ) -> Result<bool, GivenUp> {
        let ordered = || match (left, right) {
            (Val::Int(left), Val::Int(right)) => Ok(left.cmp(right)),
            _ => Err(GivenUp),
        };
        Ok(match comparison {
            Comparison::Eq => left.equals(right)?,
            Comparison::Ne => !left.equals(right)?,
            Comparison::Lt => ordered()?.is_lt(),
            Comparison::Lte => ordered()?.is_le(),
            Comparison::Gt => ordered()?.is_gt(),
            Comparison::Gte => ordered()?.is_ge(),
            Comparison::In => self.contains(right, left)?,
            Comparison::NotIn => !self.contains(right, left)?,
        })
    }

    fn contains(&self, whole: &Val<'a>, item: &Val<'a>) -> Result<bool, GivenUp> {
        let key = || item.text().ok_or(GivenUp);
        if let Some(whole) = whole.text() {
            return Ok(memmem::find(whole.as_bytes(), key()?.as_bytes()).is_some());
        }
        match whole {
            Val::List(items) => {
                // All of them, so that a doubt about a later one does not depend on an earlier.
                let equal = items
                    .iter()
                    .map(|known| known.equals(item))
                    .collect::<Result<Vec<_>, _>>()?;
                Ok(equal.contains(&true))
            }
            Val::Message(_) | Val::Part(_) => {
                Ok(!matches!(self.field(whole, key()?)?, Val::Undefined))
            }
            Val::Other(value) if value.kind() == ValueKind::Map => {
                let found = value.get_item(&Value::from(key()?)).map_err(|_| GivenUp)?;
                Ok(!found.is_undefined())
            }
            _ => Err(GivenUp),
        }
    }

    fn filtered(&mut self, over: Val<'a>, filter: &'a Known) -> Result<Val<'a>, GivenUp> {
        match filter {
            Known::Trim => mapped(&over, methods::strip),
            Known::Length => Ok(Val::Int(over.len()? as i64)),
            Known::First | Known::Last if over.text().is_some() => Err(GivenUp),
            Known::First => self.item(&over, 0),
            Known::Last => self.item(&over, -1),
            Known::Same => over.text().is_some().then_some(over.clone()).ok_or(GivenUp),
            Known::Default(otherwise) => match over {
                Val::Undefined => self.term(otherwise),
                defined => Ok(defined),
            },
            Known::Replace(pair) => {
                let (what, by) = (self.term(&pair.0)?, self.term(&pair.1)?);
                let (Some(text), Some(what), Some(by)) = (over.text(), what.text(), by.text())
                else {
                    return Err(GivenUp);
                };
                Ok(Val::owned(text.replace(what, by)))
            }
            Known::Json(options) => {
                let value = value_of(&over)?;
                let options: Kwargs = options
                    .iter()
                    .map(|(name, value)| (&**name, value.clone()))
                    .collect();
                python::tojson(&value, None, &options)
                    .map(Val::owned)
                    .map_err(|_| GivenUp)
            }
        }
    }

    fn call(&self, over: &Val<'a>, method: Method, args: &[Val<'a>]) -> Result<Val<'a>, GivenUp> {
        let text = |place: usize| args.get(place).and_then(Val::text).ok_or(GivenUp);
        let chars = || args.first().map(|_| text(0)).transpose();
        let whole = || over.text().ok_or(GivenUp);
        Ok(match method {
            Method::Strip | Method::LStrip | Method::RStrip => {
                let (chars, start, end) = (
                    chars()?,
                    !matches!(method, Method::RStrip),
                    !matches!(method, Method::LStrip),
                );
                mapped(over, |text| methods::strip_with(text, chars, start, end))?
            }
            Method::StartsWith => Val::Bool(whole()?.starts_with(text(0)?)),
            Method::EndsWith => Val::Bool(whole()?.ends_with(text(0)?)),
            Method::Replace => Val::owned(whole()?.replace(text(0)?, text(1)?)),
            Method::Split => {
                let at = Some(text(0)?).filter(|at| !at.is_empty()).ok_or(GivenUp)?;
                match over {
                    Val::Text(whole) => Val::List(whole.split(at).map(Val::Text).collect()),
                    _ => Val::List(whole()?.split(at).map(Val::owned).collect()),
                }
            }
            Method::Get if matches!(over, Val::Message(_) | Val::Part(_)) => {
                match self.field(over, text(0)?)? {
                    Val::Undefined => match args.get(1) {
                        Some(Val::Undefined) => return Err(GivenUp),
                        otherwise => otherwise.cloned().unwrap_or(Val::None),
                    },
                    found => found,
                }
            }
            Method::Get => return Err(GivenUp),
        })
    }
}
