//! A prefill by call, with every step down that it may take: the next prefill worker, then the decode worker itself, or a
//! refusal where the operator wants one. At each moment exactly the worker that has the request is booked for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use tracing::{debug, info};

use super::call::{Asked, Caller, Failure};
use super::config::Protocol;
use super::handover::{HandedOver, Handing};
use super::report;
use crate::audit::Audit;
use crate::disagg::Bypass;
use crate::entrance::{Admitted, Entrance};
use crate::health::Outcome;
use crate::router::{Destination, RouteError, RouteRequest, Router, Step};
use crate::worker::{Endpoint, WorkerId};

/// Which of its ranks a worker shall use, as vLLM's front end reads it.
const RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// How prefills of one model are called for.
pub struct Call {
    /// The way to prefill workers.
    pub caller: Caller,
    /// What engines want to hear.
    pub protocol: Protocol,
    /// How many prefill workers are asked.
    pub tries: u32,
    /// Where the cache reports of prefill workers are compared with the predictions.
    pub audit: Arc<Audit>,
}

/// A request whose prefill is wanted.
#[derive(Debug)]
pub struct Wanted {
    /// As it was routed.
    pub request: RouteRequest,
    /// As it is handed over.
    pub handing: Handing,
    /// Its headers, as workers get them.
    pub headers: HeaderMap,
    /// Who decodes, where that is decided already.
    pub at: Option<Endpoint>,
}

/// A request that can go to whoever decodes.
#[derive(Debug)]
pub struct Carried {
    /// What it holds.
    pub admitted: Admitted,
    /// Its body, where it takes something over.
    pub body: Option<Bytes>,
}

/// What a prefill worker's answer leads to.
enum Rung {
    /// The decode worker takes something over.
    Over(Bytes),
    /// Another prefill worker may fare better.
    Next,
    /// The decode worker does all of it, even where the operator wants it to do no prefill.
    Together(Bypass),
    /// The decode worker does all of it, unless the operator wants it to do no prefill.
    Instead(Bypass),
}

/// What stays the same on every step.
struct Way<'a> {
    entrance: &'a Entrance,
    request: RouteRequest,
    headers: HeaderMap,
    path: &'static str,
    at: Option<Endpoint>,
}

impl Way<'_> {
    fn place(&self, admitted: &mut Admitted, step: Step) -> Result<(), RouteError> {
        self.entrance.place_anew(
            admitted,
            RouteRequest {
                step,
                ..self.request.clone()
            },
            self.at,
        )
    }

    fn may_decoders_prefill(&self) -> bool {
        !self.entrance.router().settings().disaggregation.enforce
    }
}

impl Call {
    /// How long it may take.
    pub fn longest(&self) -> Duration {
        self.caller.deadline().saturating_mul(self.tries)
    }

    /// Has the prefill of a request done that was let in, and finds who takes over. Whatever fails on the way is a step
    /// down; an error only where nobody is left who may decode, or where the operator wants no decode worker to prefill.
    pub async fn carry(
        &self,
        entrance: &Entrance,
        wanted: Wanted,
        mut admitted: Admitted,
    ) -> Result<Carried, RouteError> {
        let Wanted {
            request,
            handing,
            headers,
            at,
        } = wanted;
        let way = Way {
            entrance,
            request,
            headers,
            path: handing.path(),
            at,
        };
        let mut handing = Some(handing);
        let mut failed: Vec<WorkerId> = Vec::new();
        while let Some(to) = admitted.booked.route.prefill().map(|prefill| prefill.to) {
            let rung;
            (admitted, rung) = self.step(&way, to, admitted, &mut handing).await;
            let because = match rung {
                Rung::Over(body) => {
                    return Ok(Carried {
                        admitted,
                        body: Some(body),
                    });
                }
                Rung::Next => {
                    failed.push(to.rank.worker);
                    // Who named its prefill worker wants no other.
                    if failed.len() < self.tries as usize && way.request.prefill_pin.is_none() {
                        way.place(
                            &mut admitted,
                            Step::PrefillFirst {
                                failed: failed.clone(),
                            },
                        )?;
                        continue;
                    }
                    Rung::Instead(Bypass::PrefillFailed)
                }
                rung => rung,
            };
            match because {
                Rung::Together(bypass) => way.place(&mut admitted, Step::Together(bypass))?,
                Rung::Instead(bypass) if way.may_decoders_prefill() => {
                    way.place(&mut admitted, Step::Together(bypass))?;
                }
                _ => return Err(RouteError::NoPrefill),
            }
        }
        Ok(Carried {
            admitted,
            body: None,
        })
    }

    /// Asks the prefill worker that is booked, and places the request with whoever takes over.
    async fn step(
        &self,
        way: &Way<'_>,
        to: Destination,
        admitted: Admitted,
        handing: &mut Option<Handing>,
    ) -> (Admitted, Rung) {
        let router = way.entrance.router();
        // Who has left is not asked.
        let Some(done) = router.prefilled_by(&admitted.booked.route) else {
            return (admitted, Rung::Next);
        };
        let Some(question) = handing.as_ref().and_then(Handing::question) else {
            return (admitted, Rung::Together(Bypass::NotHandedOver));
        };
        let begun = Instant::now();
        let headers = headers_for(&way.headers, to);
        let asked = Asked {
            worker: to.endpoint,
            path: way.path.to_owned(),
            headers,
            question,
        };
        let (mut admitted, answer) = self.ask(router, asked, admitted).await;
        let mut rung = self.rung(to.endpoint, handing, answer);
        if let Rung::Over(_) = rung {
            router.prefill_done(&admitted.booked, begun.elapsed());
            if way
                .place(&mut admitted, Step::Decode(Box::new(done)))
                .is_err()
            {
                // Nobody stands where it could be taken over.
                rung = Rung::Instead(Bypass::OutOfReach);
            }
        }
        (admitted, rung)
    }

    async fn ask(
        &self,
        router: &Arc<Router>,
        asked: Asked,
        admitted: Admitted,
    ) -> (Admitted, Result<HandedOver, Failure>) {
        let (router, caller, worker) = (router.clone(), self.caller.clone(), asked.worker);
        let (audit, foreseen) = (
            self.audit.clone(),
            self.audit.foresee(&admitted.booked.route),
        );
        // Heard of its end also where the client has left.
        let judge = move |admitted: &mut Admitted, answer: &Result<HandedOver, Failure>, since| {
            let outcome = answer.as_ref().map_or_else(
                |failure| failure.outcome(|| caller.lives(worker, since)),
                |_| Some(Outcome::Success),
            );
            if let Ok(handed) = answer {
                router.confirm_prefill(&mut admitted.booked);
                let usage = handed.usage();
                if usage.is_some() {
                    router.on_prompt_computed(&mut admitted.booked);
                }
                report::audit_prefill_response(
                    &audit,
                    foreseen,
                    admitted.booked.take_prompts(),
                    usage,
                );
            }
            if let Some(outcome) = outcome {
                note(&router, admitted, outcome);
            }
        };
        self.caller.prefill(asked, admitted, judge).await
    }

    /// What an answer leads to; the request is used up by what it takes over.
    fn rung(
        &self,
        worker: Endpoint,
        handing: &mut Option<Handing>,
        answer: Result<HandedOver, Failure>,
    ) -> Rung {
        let handed = match answer {
            Ok(handed) => handed,
            Err(failure) => {
                debug!(%worker, %failure, "a prefill failed");
                return match failure {
                    // Whoever decodes says the same, and the client hears it from there.
                    Failure::Refused(_) => Rung::Together(Bypass::PrefillRefused),
                    Failure::Full => Rung::Instead(Bypass::PrefillsFull),
                    Failure::Useless(_) => Rung::Instead(Bypass::NothingHandedOver),
                    Failure::NotOffered(error) => {
                        self.caller.warn_of(worker, &error);
                        Rung::Next
                    }
                    Failure::Busy(_) | Failure::Failed(_) => Rung::Next,
                };
            }
        };
        match handing.take().map(|handing| handing.decode_body(handed)) {
            Some(Ok(body)) => Rung::Over(body),
            Some(Err(why)) => {
                self.caller.in_vain(worker, why);
                Rung::Together(Bypass::NothingHandedOver)
            }
            None => Rung::Together(Bypass::NotHandedOver),
        }
    }
}

/// Notes what became of a prefill worker.
pub(crate) fn note(router: &Router, admitted: &mut Admitted, outcome: Outcome) {
    if let Some((worker, change)) = router.prefill_answered(&mut admitted.booked, outcome) {
        info!(%worker, ?change, "the health of a prefill worker changed");
    }
}

fn headers_for(headers: &HeaderMap, to: Destination) -> HeaderMap {
    let mut headers = headers.clone();
    if to.several_ranks {
        headers.insert(RANK, HeaderValue::from(to.rank.rank.0));
    }
    headers
}
