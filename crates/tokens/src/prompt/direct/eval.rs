//! Evaluation of a plan. Each operation supports only values for which it is known to equal
//! minijinja with the Python filters and methods of this crate.

mod checkpoints;
mod lookup;

use std::cell::RefCell;
use std::rc::Rc;

use minijinja::machinery::ast::CompareOpKind;
use minijinja::value::ValueKind;

use super::operations::{arithmetic, join, matches_test, print};
use super::plan::{LoopStep, PlanMacro, PlanStep, PlanTerm, VariableSlot};
use super::value::{EvalResult, LoopCounter, TemplateValue, UnsupportedError, message_field};
use crate::prompt::conversation::TemplateMessage;
use crate::prompt::python_methods::{self, TemplateClock};
use checkpoints::DependencyTracker;
pub(crate) use checkpoints::{CheckpointPosition, RenderCheckpoint};

/// Maximum number of iterations and macro calls. minijinja renders longer runs and limits them by
/// fuel.
const MAX_ITERATIONS: u32 = 100_000;

/// Control flow after a list of steps.
#[derive(PartialEq, Eq)]
pub(super) enum LoopFlow {
    On,
    Break,
    Continue,
}

/// One evaluation of a plan.
pub(super) struct PlanRun<'a> {
    turns: &'a [TemplateMessage<'a>],
    slots: Vec<TemplateValue<'a>>,
    /// Values of the slots at the start of the template. Each call of a macro starts with them.
    initial_slots: Vec<TemplateValue<'a>>,
    macros: &'a [PlanMacro],
    clock: &'a TemplateClock,
    iterations: u32,
    dependencies: DependencyTracker,
    /// Number of open loops and macro calls.
    depth: u32,
    /// Number of outermost loops over messages so far.
    message_loops: u32,
    /// True if a loop or macro changed a namespace, which later iterations may read.
    has_loop_state: bool,
    /// Checkpoint at which the output begins. `None` for the start of the template, and after the
    /// checkpoint was reached.
    start: Option<RenderCheckpoint>,
    /// Lengths of the prefixes whose last checkpoint is requested, in messages.
    prefix_lengths: &'a [usize],
    /// The last checkpoint of each requested prefix that has one.
    checkpoints: Vec<CheckpointPosition>,
}

impl<'a> PlanRun<'a> {
    pub(super) fn new(
        turns: &'a [TemplateMessage<'a>],
        slots: Vec<TemplateValue<'a>>,
        macros: &'a [PlanMacro],
        clock: &'a TemplateClock,
    ) -> Self {
        let initial_slots = if macros.is_empty() {
            Vec::new()
        } else {
            slots.clone()
        };
        Self {
            turns,
            slots,
            initial_slots,
            macros,
            clock,
            iterations: 0,
            dependencies: DependencyTracker::default(),
            depth: 0,
            message_loops: 0,
            has_loop_state: false,
            start: None,
            prefix_lengths: &[],
            checkpoints: Vec::new(),
        }
    }

    pub(super) fn steps(
        &mut self,
        steps: &'a [PlanStep],
        out: &mut String,
    ) -> EvalResult<LoopFlow> {
        for step in steps {
            let flow = match step {
                PlanStep::Raw(text) => {
                    out.push_str(text);
                    LoopFlow::On
                }
                PlanStep::Emit(term) => {
                    let value = self.term(term)?;
                    print(&value, out)?;
                    LoopFlow::On
                }
                PlanStep::Texts(terms) => {
                    for term in terms {
                        match self.borrowed_text(term) {
                            Some(text) => out.push_str(text),
                            None => out.push_str(self.term(term)?.text().ok_or(UnsupportedError)?),
                        }
                    }
                    LoopFlow::On
                }
                PlanStep::Joined(terms) => {
                    for term in terms {
                        match self.borrowed_text(term) {
                            Some(text) => out.push_str(text),
                            None => join(&self.term(term)?, out)?,
                        }
                    }
                    LoopFlow::On
                }
                PlanStep::If {
                    test,
                    then,
                    otherwise,
                } => {
                    let chosen = if self.is_true(test)? { then } else { otherwise };
                    self.steps(chosen, out)?
                }
                PlanStep::For(node) => self.for_loop(node, out)?,
                PlanStep::Set(slot, term) => {
                    self.slots[slot.at()] = self.term(term)?;
                    LoopFlow::On
                }
                PlanStep::SetField(space, name, term) => {
                    let value = self.term(term)?;
                    self.set_field(*space, name, value)?;
                    LoopFlow::On
                }
                PlanStep::Nothing => LoopFlow::On,
                PlanStep::Break => LoopFlow::Break,
                PlanStep::Continue => LoopFlow::Continue,
                PlanStep::Unknown => return Err(UnsupportedError),
            };
            if flow != LoopFlow::On {
                return Ok(flow);
            }
        }
        Ok(LoopFlow::On)
    }

    fn for_loop(&mut self, node: &'a LoopStep, out: &mut String) -> EvalResult<LoopFlow> {
        let over = self.term(&node.over)?;
        let length = match &over {
            // The length of such a value is known only after the iteration.
            TemplateValue::Other(value) if value.kind() != ValueKind::Seq => {
                return Err(UnsupportedError);
            }
            _ if over.text().is_some() => return Err(UnsupportedError),
            _ => u32::try_from(over.len()?).map_err(|_| UnsupportedError)?,
        };
        let before: Vec<TemplateValue<'a>> = node
            .own
            .iter()
            .map(|slot| self.slots[slot.at()].clone())
            .collect();
        let messages = over.messages();
        let outermost = messages.filter(|_| self.depth == 0);
        let first = match outermost {
            Some(messages) => self.enter_message_loop(messages, out)?,
            None => 0,
        };
        self.depth += 1;
        let mut is_complete = true;
        for index in first..length {
            self.count_iteration()?;
            if let Some(messages) = outermost {
                self.record_checkpoint(messages, index, out.len());
            }
            for (slot, value) in node.own.iter().zip(&before) {
                // The loop variable and the counter are assigned below.
                if *slot != node.target && *slot != node.counter {
                    self.slots[slot.at()] = value.clone();
                }
            }
            self.slots[node.counter.at()] = TemplateValue::Loop(LoopCounter {
                index,
                length,
                over: messages,
            });
            self.slots[node.target.at()] = self.item(&over, i64::from(index))?;
            if self.steps(&node.body, out)? == LoopFlow::Break {
                // Template engines differ in whether a loop that breaks runs its `else` block.
                if !node.otherwise.is_empty() {
                    return Err(UnsupportedError);
                }
                is_complete = false;
                break;
            }
        }
        self.depth -= 1;
        if let Some(messages) = messages.filter(|_| is_complete) {
            if outermost.is_some() {
                self.record_checkpoint(messages, length, out.len());
            }
            // The end of the loop depends on the number of messages.
            self.dependencies.record_all();
        }
        for (slot, value) in node.own.iter().zip(before) {
            self.slots[slot.at()] = value;
        }
        if length == 0 {
            self.steps(&node.otherwise, out)
        } else {
            Ok(LoopFlow::On)
        }
    }

    fn call_macro(
        &mut self,
        called: &'a PlanMacro,
        given: &'a [(VariableSlot, PlanTerm)],
    ) -> EvalResult<TemplateValue<'a>> {
        let body = called.body.as_ref().ok_or(UnsupportedError)?;
        self.count_iteration()?;
        let mut values = Vec::with_capacity(called.parameters.len());
        for (slot, default) in &called.parameters {
            let given = given
                .iter()
                .find(|(known, _)| known == slot)
                .map(|(_, term)| term);
            let value = given
                .or(default.as_ref())
                .map_or(Ok(TemplateValue::Undefined), |term| self.term(term))?;
            if given.is_some() && matches!(value, TemplateValue::Undefined) {
                // Template engines differ in whether the default replaces an undefined argument.
                return Err(UnsupportedError);
            }
            values.push((*slot, value));
        }
        // Each name has one slot. A macro does not see the variables of its caller, so all slots
        // that it names are reset.
        values.extend(
            called
                .named
                .iter()
                .map(|slot| (*slot, self.initial_slots[slot.at()].clone())),
        );
        for (slot, value) in &mut values {
            std::mem::swap(&mut self.slots[slot.at()], value);
        }
        let mut text = String::new();
        self.depth += 1;
        self.steps(body, &mut text)?;
        self.depth -= 1;
        for (slot, before) in values {
            self.slots[slot.at()] = before;
        }
        Ok(TemplateValue::Owned(text.into()))
    }

    /// Counts an iteration or a call of a macro. Returns an error if there are too many.
    fn count_iteration(&mut self) -> EvalResult<()> {
        self.iterations += 1;
        if self.iterations > MAX_ITERATIONS {
            Err(UnsupportedError)
        } else {
            Ok(())
        }
    }

    fn set_field(
        &mut self,
        space: VariableSlot,
        name: &'a str,
        value: TemplateValue<'a>,
    ) -> EvalResult<()> {
        self.has_loop_state |= self.depth > 0;
        let TemplateValue::Namespace(space) = &self.slots[space.at()] else {
            return Err(UnsupportedError);
        };
        let mut fields = space.borrow_mut();
        match fields.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known = value,
            None => fields.push((name, value)),
        }
        Ok(())
    }

    fn term(&mut self, term: &'a PlanTerm) -> EvalResult<TemplateValue<'a>> {
        Ok(match term {
            PlanTerm::Text(text) => TemplateValue::Text(text),
            PlanTerm::Int(number) => TemplateValue::Int(*number),
            PlanTerm::Bool(flag) => TemplateValue::Bool(*flag),
            PlanTerm::None => TemplateValue::None,
            PlanTerm::Var(slot) => self.slots[slot.at()].clone(),
            PlanTerm::Field(of, key) => {
                let of = self.term(of)?;
                self.field(&of, key)?
            }
            PlanTerm::Item(of, at) => {
                let of = self.term(of)?;
                let at = self.term(at)?;
                let TemplateValue::Int(at) = at else {
                    return Err(UnsupportedError);
                };
                self.item(&of, at)?
            }
            PlanTerm::Slice(of, start, stop) => {
                let TemplateValue::Messages(messages) = self.term(of)? else {
                    return Err(UnsupportedError);
                };
                let start = self.slice_bound(start.as_deref())?;
                let stop = self.slice_bound(stop.as_deref())?;
                self.dependencies.record_slice(messages, start, stop);
                TemplateValue::Messages(messages.slice(start, stop)?)
            }
            PlanTerm::Backwards(of) => match self.term(of)? {
                TemplateValue::Messages(messages) => TemplateValue::Messages(messages.reversed()),
                _ => return Err(UnsupportedError),
            },
            PlanTerm::If(parts) => {
                let test = self.is_true(&parts.0)?;
                self.term(if test { &parts.1 } else { &parts.2 })?
            }
            PlanTerm::List(items) => TemplateValue::List(
                items
                    .iter()
                    .map(|item| self.term(item))
                    .collect::<Result<_, _>>()?,
            ),
            PlanTerm::Namespace(fields) => {
                let field =
                    |(name, value): &'a (Box<str>, PlanTerm)| Ok((&**name, self.term(value)?));
                TemplateValue::Namespace(Rc::new(RefCell::new(
                    fields.iter().map(field).collect::<Result<_, _>>()?,
                )))
            }
            PlanTerm::Unknown => return Err(UnsupportedError),
            _ => self.operation(term)?,
        })
    }

    /// Returns whether a term is true. Logical operators and comparisons need no value for that.
    fn is_true(&mut self, term: &'a PlanTerm) -> EvalResult<bool> {
        match term {
            PlanTerm::Not(term) => Ok(!self.is_true(term)?),
            PlanTerm::And(pair) => Ok(self.is_true(&pair.0)? && self.is_true(&pair.1)?),
            PlanTerm::Or(pair) => Ok(self.is_true(&pair.0)? || self.is_true(&pair.1)?),
            PlanTerm::Compare(comparison, pair) => self.evaluate_comparison(*comparison, pair),
            _ => {
                let value = self.term(term)?;
                self.is_truthy(&value)
            }
        }
    }

    fn evaluate_comparison(
        &mut self,
        comparison: CompareOpKind,
        pair: &'a (PlanTerm, PlanTerm),
    ) -> EvalResult<bool> {
        if let (Some(left), Some(right)) =
            (self.borrowed_text(&pair.0), self.borrowed_text(&pair.1))
        {
            match comparison {
                CompareOpKind::Eq => return Ok(left == right),
                CompareOpKind::Ne => return Ok(left != right),
                _ => {}
            }
        }
        let left = self.term(&pair.0)?;
        let right = self.term(&pair.1)?;
        self.compare(comparison, &left, &right)
    }

    /// Returns the text of a term without copying it. Supports constants, variables and fields of a
    /// message.
    fn borrowed_text(&self, term: &'a PlanTerm) -> Option<&'a str> {
        match term {
            PlanTerm::Text(text) => Some(text),
            PlanTerm::Var(slot) => match self.slots[slot.at()] {
                TemplateValue::Text(text) => Some(text),
                _ => None,
            },
            PlanTerm::Field(of, key) => {
                let PlanTerm::Var(slot) = **of else {
                    return None;
                };
                let TemplateValue::Message(number) = self.slots[slot.at()] else {
                    return None;
                };
                match message_field(&self.turns[number], key).ok()? {
                    TemplateValue::Text(text) => Some(text),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Evaluates a term that combines others.
    fn operation(&mut self, term: &'a PlanTerm) -> EvalResult<TemplateValue<'a>> {
        Ok(match term {
            PlanTerm::Not(_) => TemplateValue::Bool(self.is_true(term)?),
            PlanTerm::And(pair) => {
                let left = self.term(&pair.0)?;
                if self.is_truthy(&left)? {
                    self.term(&pair.1)?
                } else {
                    left
                }
            }
            PlanTerm::Or(pair) => {
                let left = self.term(&pair.0)?;
                if self.is_truthy(&left)? {
                    left
                } else {
                    self.term(&pair.1)?
                }
            }
            PlanTerm::Compare(comparison, pair) => {
                TemplateValue::Bool(self.evaluate_comparison(*comparison, pair)?)
            }
            PlanTerm::Arithmetic(operation, pair) => {
                let left = self.term(&pair.0)?;
                let right = self.term(&pair.1)?;
                arithmetic(*operation, &left, &right)?
            }
            PlanTerm::Joined(terms) => {
                let mut text = String::new();
                for term in terms {
                    let value = self.term(term)?;
                    join(&value, &mut text)?;
                }
                TemplateValue::Owned(text.into())
            }
            _ => self.call(term)?,
        })
    }

    /// Evaluates a filter, test, method, macro or function.
    fn call(&mut self, term: &'a PlanTerm) -> EvalResult<TemplateValue<'a>> {
        Ok(match term {
            PlanTerm::Filtered(over, filter) => {
                let over = self.term(over)?;
                self.filtered(over, filter)?
            }
            PlanTerm::Is(over, kind) => {
                TemplateValue::Bool(matches_test(&self.term(over)?, *kind)?)
            }
            PlanTerm::Method(over, method, args) => {
                let over = self.term(over)?;
                let args: Vec<TemplateValue<'a>> = args
                    .iter()
                    .map(|arg| self.term(arg))
                    .collect::<Result<_, _>>()?;
                self.call_method(&over, *method, &args)?
            }
            PlanTerm::Now(format) => {
                self.dependencies.record_all();
                let format = self.term(format)?;
                let time =
                    python_methods::strftime(self.clock, format.text().ok_or(UnsupportedError)?);
                TemplateValue::owned(time.map_err(|_| UnsupportedError)?)
            }
            PlanTerm::Call(called, given) => self.call_macro(&self.macros[*called], given)?,
            _ => return Err(UnsupportedError),
        })
    }

    /// Returns true if a value is truthy, and records the dependency on messages.
    fn is_truthy(&self, value: &TemplateValue<'a>) -> EvalResult<bool> {
        if let Some(messages) = value.messages() {
            self.dependencies.record_item(messages, 0);
        }
        value.is_true()
    }

    /// Evaluates a bound of a slice.
    fn slice_bound(&mut self, term: Option<&'a PlanTerm>) -> EvalResult<Option<i64>> {
        match term.map(|term| self.term(term)).transpose()? {
            None | Some(TemplateValue::None) => Ok(None),
            Some(TemplateValue::Int(number)) => Ok(Some(number)),
            Some(_) => Err(UnsupportedError),
        }
    }
}
