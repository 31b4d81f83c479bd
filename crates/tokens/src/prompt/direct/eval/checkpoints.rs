//! Checkpoints of an evaluation: positions at which the rendering of another conversation can start.

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

impl<'a> PlanRun<'a> {
    /// Sets the checkpoint at which the output begins.
    pub(crate) fn starting_at(self, start: Option<RenderCheckpoint>) -> Self {
        Self { start, ..self }
    }

    /// Requests the last checkpoint of the prefixes with these lengths.
    pub(crate) fn with_prefix_lengths(self, prefix_lengths: &'a [usize]) -> Self {
        Self {
            prefix_lengths,
            ..self
        }
    }

    /// Evaluates all steps of a template. Returns the last checkpoint of each requested prefix that
    /// has one.
    pub(crate) fn run(
        mut self,
        steps: &'a [PlanStep],
        out: &mut String,
    ) -> EvalResult<Vec<CheckpointPosition>> {
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
