//! Closes gaps with a replay of the engine's recent batches. Replies are applied one by one, so
//! memory does not depend on the length of the replay. If the engine left out batches, the replay
//! is requested again from the gap, as long as that makes progress. Batches that are still missing
//! after that are lost.

use super::applier::{BatchApplier, EventApplier};
use super::sequencer::{ReplayAction, ReplayError};

/// Maximum number of requests in one replay. Gaps and restarts cause further requests.
const MAX_ROUNDS: usize = 16;
/// Number of batches that are applied before the task yields.
pub(super) const BURST: usize = 32;

/// One reply of a replay endpoint.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReplayReply {
    /// A batch: number and payload.
    Batch(u64, bytes::Bytes),
    /// A message that exceeds a limit and was skipped.
    Oversize(warmroute_zmtp::ExceededLimit),
    /// The end of the replay.
    End,
    /// No reply in time, or the connection was lost.
    Unanswered,
}

/// A source of replayed batches: an engine's replay endpoint, or a model of it in tests.
pub(super) trait ReplaySource {
    /// Requests all batches starting with a number.
    async fn request_from(&mut self, from: u64);
    /// Waits for the next reply to the last request.
    async fn next_reply(&mut self) -> ReplayReply;
    /// Ends the request.
    fn cancel(&mut self);
}

/// Outcome of one request.
enum ReplayRound {
    Complete,
    /// The engine restarted: request again from zero.
    Restarted,
    /// Batches were left out: request again from the gap.
    Gap,
    Incomplete(ReplayError),
}

/// Applies everything that the engine can replay.
pub(super) async fn catch_up(
    engine: &mut impl ReplaySource,
    applier: &mut EventApplier,
) -> Result<(), ReplayError> {
    let mut skipped = None;
    let mut gap_error = ReplayError::StartedAfterRequested;
    for _ in 0..MAX_ROUNDS {
        engine
            .request_from(applier.sequencer().replay_start())
            .await;
        let round = run_round(engine, applier, gap_error, &mut skipped).await;
        engine.cancel();
        match round {
            ReplayRound::Complete => return skipped.map_or(Ok(()), Err),
            ReplayRound::Restarted => gap_error = ReplayError::StartedAfterRequested,
            ReplayRound::Gap => gap_error = ReplayError::NonContiguous,
            ReplayRound::Incomplete(error) => return Err(error),
        }
    }
    Err(ReplayError::NonContiguous)
}

/// Runs one request. A gap at its start is skipped, because another request would return the same
/// gap.
async fn run_round(
    engine: &mut impl ReplaySource,
    applier: &mut EventApplier,
    gap_error: ReplayError,
    skipped: &mut Option<ReplayError>,
) -> ReplayRound {
    let requested = applier.sequencer().replay_start();
    let start = applier.sequencer().next_seq();
    let mut replies = 0_usize;
    let mut is_first = true;
    loop {
        let (seq, payload) = match engine.next_reply().await {
            ReplayReply::Batch(seq, payload) => (seq, payload),
            // The next batch reveals the gap.
            ReplayReply::Oversize(limit) => {
                replies += 1;
                applier.update(|batches| batches.record_too_large(limit.as_str()));
                *skipped = Some(ReplayError::NonContiguous);
                continue;
            }
            ReplayReply::End if replies > 0 => return ReplayRound::Complete,
            ReplayReply::End if applier.update(BatchApplier::accept_empty_replay) => {
                return ReplayRound::Restarted;
            }
            ReplayReply::End => return ReplayRound::Incomplete(ReplayError::Empty),
            ReplayReply::Unanswered => {
                return ReplayRound::Incomplete(ReplayError::EndedBeforeTarget);
            }
        };
        replies += 1;
        if std::mem::take(&mut is_first) && requested < seq && seq == start {
            // The engine did not send the last applied batch again, so it may have restarted.
            applier.update(BatchApplier::record_loss);
        }
        match applier.update(|batches| batches.apply_replayed(seq, &payload)) {
            ReplayAction::Apply | ReplayAction::Duplicate => {}
            ReplayAction::Restart => return ReplayRound::Restarted,
            ReplayAction::Gap(_) if applier.sequencer().next_seq() > start => {
                return ReplayRound::Gap;
            }
            ReplayAction::Gap(gap) => {
                *skipped = Some(gap_error);
                applier.update(|batches| batches.skip_gap(gap, &payload));
            }
        }
        if replies.is_multiple_of(BURST) {
            tokio::task::yield_now().await;
        }
    }
}

#[cfg(test)]
mod tests;
