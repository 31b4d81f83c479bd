//! Checkpoints of an evaluation: positions at which a longer conversation can begin.

use super::PlanRun;
use crate::prompt::direct::UnsupportedError;
use crate::prompt::direct::plan::PlanStep;
use crate::prompt::direct::value::MessageRange;

/// Start of an iteration over the messages, at which the evaluation of a longer conversation can
/// begin. The output before it depends only on the messages before it and on the variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::prompt) struct RenderCheckpoint {
    /// Number of messages before the iteration.
    pub(in crate::prompt) message_count: usize,
    /// Position of the loop among the outermost loops over messages, from 1.
    loop_number: u32,
}

/// A checkpoint and its position in the rendered text.
#[derive(Clone, Copy, Debug)]
pub(in crate::prompt) struct CheckpointPosition {
    pub(in crate::prompt) checkpoint: RenderCheckpoint,
    /// Number of leading messages on which the text before the checkpoint depends at most.
    pub(in crate::prompt) prefix_length: usize,
    /// Length of the text before the checkpoint in bytes.
    pub(in crate::prompt) text_length: usize,
}

impl<'a> PlanRun<'a> {
    /// Sets the checkpoint at which the output begins.
    pub(in crate::prompt::direct) fn starting_at(self, start: Option<RenderCheckpoint>) -> Self {
        Self { start, ..self }
    }

    /// Requests the last checkpoint in each of these numbers of leading messages.
    pub(in crate::prompt::direct) fn with_checkpoints_in(self, prefixes: &'a [usize]) -> Self {
        Self { prefixes, ..self }
    }

    /// Evaluates all steps of a template. Returns the requested checkpoints that exist.
    pub(in crate::prompt::direct) fn run(
        mut self,
        steps: &'a [PlanStep],
        out: &mut String,
    ) -> Result<Vec<CheckpointPosition>, UnsupportedError> {
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
    ) -> Result<u32, UnsupportedError> {
        self.message_loops += 1;
        let is_start = |start: &RenderCheckpoint| start.loop_number == self.message_loops;
        let Some(start) = self.start.filter(is_start) else {
            return Ok(0);
        };
        self.start = None;
        self.checkpoints.clear();
        out.clear();
        messages
            .iteration_after(start.message_count)
            .ok_or(UnsupportedError)
    }

    /// Records an iteration of an outermost loop as the last checkpoint in the requested prefixes.
    /// The output so far must depend only on the messages of a prefix.
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
        for &prefix_length in self.prefixes {
            if message_count > prefix_length || !self.dependencies.is_within(prefix_length) {
                continue;
            }
            self.checkpoints
                .retain(|known| known.prefix_length != prefix_length);
            self.checkpoints.push(CheckpointPosition {
                checkpoint: RenderCheckpoint {
                    message_count,
                    loop_number: self.message_loops,
                },
                prefix_length,
                text_length,
            });
        }
    }
}
