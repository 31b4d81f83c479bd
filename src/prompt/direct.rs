//! Chat templates without an interpreter's values: what most templates do with most conversations (loops over the messages,
//! comparisons of roles, texts one after another) is evaluated directly from the syntax tree, over texts that stay where
//! they are. It knows a part of Jinja2 and gives up wherever anything else comes up, down to the last oddity of mixed
//! types; then minijinja renders from the beginning. So it is never another opinion, only a shorter way to the same one.

mod compile;
mod eval;
mod operations;
mod plan;
mod value;

use std::collections::BTreeMap;

use minijinja::Value;
use minijinja::machinery::ast::Stmt;

use super::conversation::Turn;
use super::template::Clock;
use eval::Run;
use plan::{Plan, Slot};
use value::Val;

/// Something came up that is not known here.
struct GivenUp;

/// A template, ready to be evaluated.
pub(super) struct Direct {
    plan: Plan,
    clock: Clock,
}

impl Direct {
    /// What of a template is known here; the rest of it gives up where it is reached.
    pub(super) fn compile(template: &Stmt<'_>, clock: &Clock) -> Self {
        Self {
            plan: compile::template(template),
            clock: clock.clone(),
        }
    }

    /// The text of a conversation, as minijinja renders it, or nothing if that is not known for certain.
    pub(super) fn render(
        &self,
        turns: &[Turn<'_>],
        variables: &BTreeMap<&str, Value>,
    ) -> Option<String> {
        if variables.keys().any(|name| compile::is_function(name)) {
            return None;
        }
        let mut slots = vec![Val::Undefined; self.plan.names.len()];
        for (name, value) in variables {
            if let Some(slot) = self.slot(name) {
                slots[slot.at()] = Val::of(value.clone());
            }
        }
        if let Some(slot) = self.slot("messages") {
            slots[slot.at()] = Val::all(turns);
        }
        let texts: usize = turns
            .iter()
            .map(|turn| turn.role.len() + turn.content.bytes())
            .sum();
        // Most templates write some words of their own around each message.
        let mut out = String::with_capacity(texts + 64 * turns.len() + 256);
        Run::new(turns, slots, &self.plan.macros, &self.clock)
            .steps(&self.plan.steps, &mut out)
            .ok()?;
        Some(out)
    }

    fn slot(&self, name: &str) -> Option<Slot> {
        self.plan
            .names
            .iter()
            .position(|known| **known == *name)
            .map(Slot::new)
    }
}

#[cfg(test)]
mod tests;
