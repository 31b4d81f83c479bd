//! Evaluation of common chat templates without minijinja, over borrowed texts.
//!
//! Loops over the messages, comparisons of roles and concatenations are evaluated from a compiled
//! plan. If the evaluation reaches unsupported code, it ends, and minijinja renders the whole
//! template. Both always produce the same text.
//! `docs/decisions/0047-evaluate-common-templates-directly.md` records the measured gain.
//!
//! Decision 0047.

mod compile;
mod eval;
mod operations;
mod plan;
mod value;

use std::collections::BTreeMap;

use minijinja::Value;
use minijinja::machinery::ast::Stmt;

use super::conversation::TemplateMessage;
use super::python_methods::TemplateClock;
use eval::PlanRun;
pub(super) use eval::{CheckpointPosition, RenderCheckpoint};
use plan::{RenderPlan, VariableSlot};
use value::TemplateValue;

/// Text rendered from a template.
pub(super) struct RenderOutput {
    pub(super) text: String,
    /// The last checkpoint of each requested prefix that has one.
    pub(super) checkpoints: Vec<CheckpointPosition>,
}

/// A compiled template and its clock.
pub(super) struct DirectRenderer {
    plan: RenderPlan,
    clock: TemplateClock,
}

impl DirectRenderer {
    /// Compiles a template. Unsupported parts end the evaluation when they are reached.
    pub(super) fn compile(template: &Stmt<'_>, clock: &TemplateClock) -> Self {
        Self {
            plan: compile::template(template),
            clock: clock.clone(),
        }
    }

    /// Renders a conversation like minijinja, after the checkpoint `start` if it is set. Also
    /// returns the last checkpoint of each requested prefix, if there is one. `prefix_lengths` are
    /// the lengths of these prefixes in messages. Returns `None` if anything is not supported.
    pub(super) fn render(
        &self,
        turns: &[TemplateMessage<'_>],
        variables: &BTreeMap<&str, Value>,
        start: Option<RenderCheckpoint>,
        prefix_lengths: &[usize],
    ) -> Option<RenderOutput> {
        if variables.keys().any(|name| compile::is_function(name)) {
            return None;
        }
        let mut slots = vec![TemplateValue::Undefined; self.plan.names.len()];
        for (name, value) in variables {
            if let Some(slot) = self.slot(name) {
                slots[slot.at()] = TemplateValue::from_minijinja(value.clone());
            }
        }
        if let Some(slot) = self.slot("messages") {
            slots[slot.at()] = TemplateValue::all(turns);
        }
        let texts: usize = turns
            .iter()
            .skip(start.map_or(0, |start| start.message_count))
            .map(|turn| turn.role.len() + turn.content.text_bytes())
            .sum();
        // Reserves space for the text that templates add around each message.
        let mut text = String::with_capacity(texts + 64 * turns.len() + 256);
        let checkpoints = PlanRun::new(turns, slots, &self.plan.macros, &self.clock)
            .run(&self.plan.steps, start, prefix_lengths, &mut text)
            .ok()?;
        Some(RenderOutput { text, checkpoints })
    }

    fn slot(&self, name: &str) -> Option<VariableSlot> {
        self.plan
            .names
            .iter()
            .position(|known| **known == *name)
            .map(VariableSlot::new)
    }
}

#[cfg(test)]
mod tests;
