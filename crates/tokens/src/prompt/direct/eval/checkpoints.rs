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
    /// Length of the text before the checkpoint in bytes.
    pub(in crate::prompt) text_length: usize,
}

impl<'a> PlanRun<'a> {
    /// Sets the checkpoint at which the output begins.
    pub(in crate::prompt::direct) fn starting_at(self, start: Option<RenderCheckpoint>) -> Self {
        Self { start, ..self }
    }

    /// Requests the checkpoints after these numbers of messages.
    pub(in crate::prompt::direct) fn with_checkpoints_after(
        self,
        checkpoints_after: &'a [usize],
    ) -> Self {
        Self {
            checkpoints_after,
            ..self
        }
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

    /// Records a requested checkpoint if it is at this iteration of an outermost loop, and if the
    /// output so far depends only on the messages before it.
    pub(super) fn record_checkpoint(
        &mut self,
        messages: MessageRange,
        index: u32,
        text_length: usize,
    ) {
        let is_requested = |count: &usize| messages.iteration_after(*count) == Some(index);
        let requested = self.checkpoints_after.iter().copied().find(is_requested);
        let Some(message_count) = requested else {
            return;
        };
        if !self.has_loop_state && self.dependencies.is_within(message_count) {
            self.checkpoints.push(CheckpointPosition {
                checkpoint: RenderCheckpoint {
                    message_count,
                    loop_number: self.message_loops,
                },
                text_length,
            });
        }
    }
}
