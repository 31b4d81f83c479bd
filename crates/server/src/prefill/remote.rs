//! A prefill on another worker, as long as the request may need it.

use std::time::Duration;

use warmroute_core::router::RouteError;

use super::mirror::{MirroredPrefill, PrefillEvent};
use super::plan::PrefillOutcome;
use super::retry::{CopiedRequest, PrefillRecord};
use crate::dispatch::{ActiveRequest, Dispatcher};

/// A prefill on another worker.
pub enum RemotePrefill {
    /// warmroute called the prefill worker.
    Call(Box<PrefillRecord>),
    /// Both workers received the request.
    Mirror(Box<MirroredPrefill>),
}

impl RemotePrefill {
    /// Returns the maximum duration of another attempt.
    pub fn max_duration(&self) -> Duration {
        match self {
            RemotePrefill::Call(record) => record.max_duration(),
            RemotePrefill::Mirror(_) => Duration::ZERO,
        }
    }

    /// Returns whether warmroute receives the response of the prefill worker.
    pub fn receives_response(&self) -> bool {
        match self {
            RemotePrefill::Call(_) => true,
            RemotePrefill::Mirror(mirrored) => mirrored.receives_response(),
        }
    }

    /// Completes at the next event of a mirrored prefill. A called prefill has no events.
    pub async fn next_event(&mut self) -> PrefillEvent {
        match self {
            RemotePrefill::Mirror(mirrored) => mirrored.next_event().await,
            RemotePrefill::Call(_) => std::future::pending().await,
        }
    }

    /// Prefills the request again for its new decode worker.
    pub(crate) async fn retry(
        self,
        dispatcher: &Dispatcher,
        mut active: ActiveRequest,
        retried: CopiedRequest,
    ) -> Result<PrefillOutcome, RouteError> {
        match self {
            RemotePrefill::Mirror(mirrored) => {
                let pair = mirrored.retry(dispatcher, &mut active, &retried).await?;
                Ok(pair.into_outcome(active))
            }
            RemotePrefill::Call(record) => record.retry(dispatcher, active, retried).await,
        }
    }
}
