//! Closing gaps by asking the engine to repeat its recent batches. Replies are applied one by one as they come, so the
//! memory they take does not depend on how much is repeated. Where batches were left out the question is asked again
//! from the hole, as long as that brings anything; what is still missing then is gone.

use super::feed::{Feed, Gap};
use super::sequencer::{Incomplete, Repeated};

/// How often one replay is asked for again because of holes or a restart.
const ROUNDS: usize = 16;
/// Batches applied before other tasks get a turn.
pub(super) const BURST: usize = 32;

/// One message of an engine that repeats its batches.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// A batch.
    Batch(u64, bytes::Bytes),
    /// A message that exceeds a limit and was skipped.
    Oversize(warmroute_zmtp::ExceededLimit),
    /// All it had.
    End,
    /// It does not answer, or stopped half-way.
    Silence,
}

/// Whoever repeats batches: an engine's socket, or the model of one in tests.
pub(super) trait Repeater {
    /// Asks for everything from a number on.
    async fn ask(&mut self, from: u64);
    /// The next reply to the question asked last.
    async fn next(&mut self) -> Reply;
    /// No further reply is wanted.
    fn hang_up(&mut self);
}

/// How one question and its answers ended.
enum Round {
    Complete,
    /// The engine is a new one: ask again, from zero.
    Restarted,
    /// Batches were left out: ask again from there.
    Hole,
    Incomplete(Incomplete),
}

/// Brings the feed up to what the engine can repeat.
pub(super) async fn catch_up(
    engine: &mut impl Repeater,
    feed: &mut Feed,
) -> Result<(), Incomplete> {
    let mut given_up = None;
    let mut at_hole = Incomplete::StartedAfterRequested;
    for _ in 0..ROUNDS {
        engine.ask(feed.ask_from()).await;
        let round = round(engine, feed, at_hole, &mut given_up).await;
        engine.hang_up();
        match round {
            Round::Complete => return given_up.map_or(Ok(()), Err),
            Round::Restarted => at_hole = Incomplete::StartedAfterRequested,
            Round::Hole => at_hole = Incomplete::NonContiguous,
            Round::Incomplete(why) => return Err(why),
        }
    }
    Err(Incomplete::NonContiguous)
}

/// Hears one answer. A hole right at its start is given up: asking again would show it again.
async fn round(
    engine: &mut impl Repeater,
    feed: &mut Feed,
    at_hole: Incomplete,
    given_up: &mut Option<Incomplete>,
) -> Round {
    let asked = feed.ask_from();
    let start = feed.expected();
    let mut replies = 0_usize;
    let mut is_first = true;
    loop {
        let (seq, payload) = match engine.next().await {
            Reply::Batch(seq, payload) => (seq, payload),
            // The gap shows at the next batch, if there is one.
            Reply::Oversize(limit) => {
                replies += 1;
                feed.skipped_message(limit.as_str());
                *given_up = Some(Incomplete::NonContiguous);
                continue;
            }
            Reply::End if replies > 0 => return Round::Complete,
            Reply::End if feed.repeated_nothing() => return Round::Restarted,
            Reply::End => return Round::Incomplete(Incomplete::Empty),
            Reply::Silence => return Round::Incomplete(Incomplete::EndedBeforeTarget),
        };
        replies += 1;
        if std::mem::take(&mut is_first) && asked < seq && seq == start {
            // The batch last applied did not come back, so nothing says that this is still the same life of the engine.
            feed.doubt();
        }
        match feed.repeated(seq, &payload) {
            Repeated::Apply | Repeated::Known => {}
            Repeated::Restart => return Round::Restarted,
            Repeated::Hole { .. } if feed.expected() > start => return Round::Hole,
            Repeated::Hole { from, to } => {
                *given_up = Some(at_hole);
                feed.jump(Gap { from, to }, &payload);
            }
        }
        if replies.is_multiple_of(BURST) {
            tokio::task::yield_now().await;
        }
    }
}

#[cfg(test)]
mod tests;
