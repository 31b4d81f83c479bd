//! A request that waits, as a value. Whoever holds it may stop waiting at any time by dropping it; nothing remains then.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use super::answer::{Placing, Rejected};
use super::queue::Ticket;
use super::{Admission, Outcome};

/// What came of entering.
pub enum Entered<P: Placing> {
    /// It is decided.
    Done(Outcome<P>),
    /// It has to wait.
    Waiting(Waiting<P>),
}

/// A request that waits. Dropping it takes it out of the queue.
#[must_use = "dropping it gives the wait up"]
pub struct Waiting<P: Placing> {
    pub(super) admission: Arc<Admission<P>>,
    pub(super) ticket: Ticket,
    pub(super) since: Instant,
    pub(super) until: Instant,
    pub(super) result: oneshot::Receiver<Outcome<P>>,
}

impl<P: Placing> Waiting<P> {
    /// How long it may still wait. Whoever is called by Envoy asks it for all of that at once, because Envoy extends a timeout
    /// only once.
    pub fn deadline(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// Waits for its place. Meanwhile it may also look for the places of others: see [`Admission::nudge`].
    pub async fn placed(mut self) -> Outcome<P> {
        let deadline = sleep_until(self.until);
        tokio::pin!(deadline);
        loop {
            tokio::select! {
                biased;
                result = &mut self.result => return result.unwrap_or(Err(Rejected::Failed)),
                () = &mut deadline => break,
                () = self.admission.for_waiting.notified() => self.admission.look(),
            }
        }
        match self.admission.expire(self.ticket, self.since) {
            Some(rejected) => Err(rejected),
            // It left the queue at this very moment, and what came of it is on its way.
            None => (&mut self.result).await.unwrap_or(Err(Rejected::Failed)),
        }
    }
}

impl<P: Placing> Drop for Waiting<P> {
    fn drop(&mut self) {
        self.admission.leave(self.ticket);
    }
}
