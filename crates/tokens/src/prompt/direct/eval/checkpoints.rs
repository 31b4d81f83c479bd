//! Checkpoints of an evaluation: positions at which the rendering of another conversation can start.

use std::cell::Cell;

use super::PlanRun;
use crate::prompt::direct::plan::PlanStep;
use crate::prompt::direct::value::{EvalResult, MessageRange, UnsupportedError};

/// Start of an iteration over the messages, at which another conversation can be resumed. The output
/// before it depends only on the variables and on the first `prefix_length` messages, which may be
/// more than `message_count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RenderCheckpoint {
    /// Number of messages before the iteration.
    pub(crate) message_count: usize,
    /// Length of the requested prefix in messages.
    pub(crate) prefix_length: usize,
    /// Position of the loop among the outermost loops over messages, from 1.
    loop_number: u32,
}

/// A checkpoint and its position in the rendered text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckpointPosition {
    pub(crate) checkpoint: RenderCheckpoint,
    /// Length of the text before the checkpoint in bytes.
    pub(crate) text_length: usize,
}

/// Messages on which the output so far may depend.
#[derive(Default)]
pub(super) struct DependencyTracker {
    /// Number of leading messages; `usize::MAX` if the output may depend on all messages, on their
    /// number, or on the time.
    leading: Cell<usize>,
}

impl DependencyTracker {
    /// Records a value that depends on all messages, on their number, or on the time.
    pub(super) fn record_all(&self) {
        self.leading.set(usize::MAX);
    }

    /// Records a dependency on the first `count` messages.
    pub(super) fn record_leading(&self, count: usize) {
        self.leading.set(self.leading.get().max(count));
    }

    /// Records the lookup of a message.
    pub(super) fn record_item(&self, messages: MessageRange, index: i64) {
        self.record_leading(messages.leading_count(index).unwrap_or(usize::MAX));
    }

    /// Records the bounds of a slice, which may depend on the number of messages.
    pub(super) fn record_slice(
        &self,
        messages: MessageRange,
        start: Option<i64>,
        stop: Option<i64>,
    ) {
        let bounds = [start, stop].into_iter().flatten();
        for bound in bounds.filter(|bound| *bound != 0) {
            self.record_item(messages, bound.saturating_sub(1));
        }
    }

    /// Returns whether the output depends only on the first `count` messages.
    pub(super) fn is_within(&self, count: usize) -> bool {
        self.leading.get() <= count
    }
}

impl<'a> PlanRun<'a> {
    /// Evaluates all steps of a template, after the checkpoint `start` if it is set. Returns the
    /// last checkpoint of each prefix that has one. `prefix_lengths` are the lengths of the
    /// prefixes.
    pub(crate) fn run(
        mut self,
        steps: &'a [PlanStep],
        start: Option<RenderCheckpoint>,
        prefix_lengths: &'a [usize],
        out: &mut String,
    ) -> EvalResult<Vec<CheckpointPosition>> {
        self.start = start;
        self.prefix_lengths = prefix_lengths;
        self.steps(steps, out)?;
        // The loop of the start checkpoint was not reached.
        if self.start.is_some() {
            return Err(UnsupportedError);
        }
        Ok(self.checkpoints)
    }

    /// Counts an outermost loop over messages, and returns its first iteration to evaluate. In the
    /// loop of the start checkpoint, discards the output so far.
    pub(super) fn enter_message_loop(
        &mut self,
        messages: MessageRange,
        out: &mut String,
    ) -> EvalResult<u32> {
        self.message_loops += 1;
        let is_start = |start: &RenderCheckpoint| start.loop_number == self.message_loops;
        let Some(start) = self.start.filter(is_start) else {
            return Ok(0);
        };
        self.start = None;
        self.dependencies.record_leading(start.prefix_length);
        self.checkpoints.clear();
        out.clear();
        messages
            .iteration_after(start.message_count)
            .ok_or(UnsupportedError)
    }

    /// Records the start of an iteration of an outermost loop. It replaces the checkpoint of each
    /// requested prefix that contains all messages on which the output so far depends.
    pub(super) fn record_checkpoint(
        &mut self,
        messages: MessageRange,
        index: u32,
        text_length: usize,
    ) {
        let Some(message_count) = messages
            .count_before(index)
            .filter(|_| !self.has_loop_state)
        else {
            return;
        };
        for &prefix_length in self.prefix_lengths {
            if message_count > prefix_length || !self.dependencies.is_within(prefix_length) {
                continue;
            }
            self.checkpoints
                .retain(|known| known.checkpoint.prefix_length != prefix_length);
            self.checkpoints.push(CheckpointPosition {
                checkpoint: RenderCheckpoint {
                    message_count,
                    prefix_length,
                    loop_number: self.message_loops,
                },
                text_length,
            });
        }
    }
}
