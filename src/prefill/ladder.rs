//! A prefill by call, with every step down that it may take: the next prefill worker, then the decode worker itself, or a
//! refusal where the operator wants one. At each moment exactly the worker that has the request is booked for it.

use std::time::Instant;

use bytes::Bytes;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use tracing::{debug, info};

use super::call::{Asked, Caller, Failure};
use super::config::Protocol;
use super::handover::Handing;
use crate::disagg::Bypass;
use crate::entrance::{Admitted, Entrance};
use crate::health::Outcome;
use crate::router::{Destination, RouteError, RouteRequest, Step};
use crate::worker::WorkerId;

/// Which of its ranks a worker shall use, as vLLM's front end reads it.
const RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// How prefills of one model are called for.
#[derive(Clone)]
pub struct Call {
    /// The way to prefill workers.
    pub caller: Caller,
    /// What engines want to hear.
    pub protocol: Protocol,
    /// How many prefill workers are asked.
    pub tries: u32,
}

/// A request whose prefill is wanted.
#[derive(Debug)]
pub struct Wanted {
    /// As it was routed.
    pub request: RouteRequest,
    /// As it is handed over.
    pub handing: Handing,
    /// Its path.
    pub path: String,
    /// Its headers, as workers get them.
    pub headers: HeaderMap,
}

/// A request that can go to whoever decodes.
#[derive(Debug)]
pub struct Carried {
    /// What it holds.
    pub admitted: Admitted,
    /// Its body, where it takes something over.
    pub body: Option<Bytes>,
}

impl Call {
    /// Has the prefill of a request done that was let in, and finds who takes over. Whatever fails on the way is a step
    /// down; an error only where nobody is left who may decode, or where the operator wants no decode worker to prefill.
    pub async fn carry(
        &self,
        entrance: &Entrance,
        wanted: Wanted,
        mut admitted: Admitted,
    ) -> Result<Carried, RouteError> {
        let router = entrance.router();
        let Wanted { request, handing, path, headers } = wanted;
        let anew = |step| RouteRequest { step, ..request.clone() };
        let mut failed: Vec<WorkerId> = Vec::new();
        while let Some(to) = admitted.booked.route.prefill().map(|prefill| prefill.to) {
            let done = router.prefilled_by(&admitted.booked.route);
            let Some(body) = handing.prefill_body() else { break };
            let asked = Asked { worker: to.endpoint, path: path.clone(), headers: headers_for(&headers, to), body };
            let started = Instant::now();
            let (back, answer) = self.caller.prefill(asked, admitted).await;
            admitted = back;
            if let Some(outcome) = outcome_of(&answer)
                && let Some((worker, change)) =
                    router.prefill_answered(&mut admitted.booked, outcome, started.elapsed())
            {
                info!(%worker, ?change, "the health of a prefill worker changed");
            }
            match answer {
                Ok(answer) => {
                    let body = handing.decode_body(&answer).inspect_err(|why| debug!(%why, "prefilled in vain"));
                    let Some((done, body)) = done.zip(body.ok()) else { break };
                    if entrance.follow_up(&mut admitted, anew(Step::Decode(Box::new(done)))).is_err() {
                        break;
                    }
                    return Ok(Carried { admitted, body: Some(body) });
                }
                // Whoever decodes says the same, and the client hears it from there.
                Err(Failure::Refused(_) | Failure::Full) => break,
                Err(failure) => {
                    debug!(worker = %to.rank, %failure, "a prefill failed");
                    failed.push(to.rank.worker);
                    // Who named its prefill worker wants no other.
                    if failed.len() >= self.tries as usize || request.prefill_pin.is_some() {
                        if router.settings().disaggregation.enforce {
                            return Err(RouteError::NoPrefill);
                        }
                        break;
                    }
                    entrance.follow_up(&mut admitted, anew(Step::PrefillFirst { failed: failed.clone() }))?;
                }
            }
        }
        if admitted.booked.route.prefill().is_some() {
            entrance.follow_up(&mut admitted, anew(Step::Together(Bypass::PrefillFailed)))?;
        }
        Ok(Carried { admitted, body: None })
    }
}

/// What an answer says of the worker; none where it was never asked.
fn outcome_of(answer: &Result<Bytes, Failure>) -> Option<Outcome> {
    match answer {
        Ok(_) | Err(Failure::Refused(_)) => Some(Outcome::Success),
        Err(Failure::Busy(_)) => Some(Outcome::Overloaded),
        Err(Failure::Failed(_)) => Some(Outcome::Failure),
        Err(Failure::Full) => None,
    }
}

fn headers_for(headers: &HeaderMap, to: Destination) -> HeaderMap {
    let mut headers = headers.clone();
    if to.several_ranks {
        headers.insert(RANK, HeaderValue::from(to.rank.rank.0));
    }
    headers
}
