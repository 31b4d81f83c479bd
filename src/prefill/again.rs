//! A request that Envoy sends once more, to the next decode worker, because the first try has failed. What was prepared for
//! the first is of no use to the second: nobody is in its room, or its KV may have been fetched, so that the prefill worker
//! has given the blocks to somebody else. It is prefilled anew, which takes little where the prompt is still cached.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::HeaderMap;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tracing::{debug, info};

use super::call::{Asked, Failure};
use super::handover::{Cleaned, HandedOver, Handing, Question, clean};
use super::ladder::{Call, Wanted, note};
use super::mirror::{Given, Met, Mirror, Mirrored};
use super::report;
use crate::entrance::{Admitted, Entrance};
use crate::health::Outcome;
use crate::openai::Api;
use crate::router::{Answer, AnswerFrom, Booked, RouteError, RouteRequest, Step};
use crate::worker::{Endpoint, WorkerId};

/// How long a worker that runs may take to accept a connection.
const ACCEPTS_WITHIN: Duration = Duration::from_millis(250);

/// A request as Envoy sends it once more.
#[derive(Debug)]
pub struct Retried {
    /// To whom.
    pub to: Endpoint,
    /// Its path.
    pub path: String,
    /// Its headers, as workers get them.
    pub headers: HeaderMap,
    /// Its body, as the try before had it.
    pub body: Bytes,
}

/// A request whose prefill was called for, for the case that it is sent once more.
pub struct Called {
    call: Arc<Call>,
    api: Option<Api>,
    request: RouteRequest,
}

impl Called {
    /// A request whose prefill is called for.
    pub fn new(call: &Arc<Call>, api: Option<Api>, request: RouteRequest) -> Self {
        Self {
            call: call.clone(),
            api,
            request,
        }
    }

    /// How long another try may take.
    pub fn longest(&self) -> Duration {
        self.call.longest()
    }

    /// Has the request prefilled anew for the decode worker that gets it now; what it holds then, and its body.
    pub async fn again(
        &self,
        entrance: &Entrance,
        mut admitted: Admitted,
        Retried {
            to, headers, body, ..
        }: Retried,
    ) -> Result<(Admitted, Bytes), RouteError> {
        blame(entrance, &mut admitted).await;
        // Whatever becomes of it: what the first try was to take over must not be taken over now.
        let body = match clean(&body) {
            Cleaned::Clean => body,
            Cleaned::Changed(body) => body,
            Cleaned::Unreadable => return Err(RouteError::NoCandidate),
        };
        let request = self.request.clone();
        let anew = RouteRequest {
            step: Step::PrefillFirst { failed: Vec::new() },
            ..request.clone()
        };
        entrance.place_anew(&mut admitted, anew, Some(to))?;
        let Ok(handing) = Handing::new(self.api, self.call.protocol, &body) else {
            return Ok((admitted, body));
        };
        let wanted = Wanted {
            request,
            handing,
            headers,
            at: Some(to),
        };
        let carried = self.call.carry(entrance, wanted, admitted).await?;
        Ok((carried.admitted, carried.body.unwrap_or(body)))
    }
}

/// What a copy of a request is sent with.
#[derive(Debug)]
pub struct Copy {
    /// Its path.
    pub path: String,
    /// Its headers, as workers get them.
    pub headers: HeaderMap,
    /// Who decodes, where that is decided already.
    pub at: Option<Endpoint>,
}

impl Mirror {
    /// Has the two workers of a route meet where the copy is ours to make, and finds another prefill worker where the
    /// chosen one cannot be told.
    pub async fn meet_by_us(
        self: &Arc<Self>,
        entrance: &Entrance,
        admitted: &mut Admitted,
        (given, body, copy): (Given, &[u8], &Copy),
    ) -> Result<Met, RouteError> {
        let router = entrance.router();
        let mut failed = given.failed.clone();
        let place = |admitted: &mut Admitted, failed: &[WorkerId]| {
            let anew = RouteRequest {
                step: Step::Anew {
                    failed: failed.to_vec(),
                },
                ..given.request.clone()
            };
            entrance.place_anew(admitted, anew, copy.at)
        };
        let mut once_more = true;
        loop {
            let met = self.meet(
                Given {
                    failed: failed.clone(),
                    ..given.clone()
                },
                body,
                &admitted.booked.route,
                router,
            );
            let mut met = met.ok_or(RouteError::NoPrefill)?;
            let (path, headers) = (copy.path.clone(), copy.headers.clone());
            let question = Question::alone(met.body.clone());
            let read = self.on_prefill_response(&admitted.booked);
            let failure = match self
                .caller
                .begin(
                    Asked {
                        worker: met.prefill,
                        path,
                        headers,
                        question,
                    },
                    read,
                )
                .await
            {
                Ok(begun) => {
                    met.mirrored.carries(begun);
                    return Ok(met);
                }
                Err(failure) => failure,
            };
            debug!(worker = %met.prefill, %failure, "a prefill could not begin");
            // Nothing of it has reached the worker.
            met.mirrored.unbegun();
            if matches!(failure, Failure::Full) {
                return Err(RouteError::NoPrefill);
            }
            failed.extend(
                admitted
                    .booked
                    .route
                    .prefill()
                    .map(|prefill| prefill.to.rank.worker),
            );
            if let Some(outcome) = failure.outcome(|| false) {
                note(router, admitted, outcome);
            }
            if place(admitted, &failed).is_err() {
                // All of them have failed. A connection that was left from before its worker's restart is no proof, though,
                // and who was dead may be back.
                if !std::mem::take(&mut once_more) {
                    return Err(RouteError::NoPrefill);
                }
                failed.clear();
                place(admitted, &failed)?;
            }
        }
    }
}

impl Mirror {
    /// Reads the cache report in the response of the prefill worker that a request is booked at.
    fn on_prefill_response(&self, booked: &Booked) -> impl FnOnce(&HandedOver) + Send + 'static {
        let (audit, foreseen) = (self.audit.clone(), self.audit.foresee(&booked.route));
        let prompts = booked.prompts().to_vec();
        move |handed: &HandedOver| {
            report::audit_prefill_response(&audit, foreseen, prompts, handed.usage())
        }
    }
}

impl Mirrored {
    /// Has the decode worker that the request goes to now meet a prefill worker; this prefill is over. What the request
    /// holds is held of these two workers afterwards.
    pub async fn again(
        self,
        entrance: &Entrance,
        admitted: &mut Admitted,
        retried: Retried,
    ) -> Result<Met, RouteError> {
        let (given, mirror) = (self.given.clone(), self.mirror.clone());
        let Retried {
            to,
            path,
            headers,
            body,
        } = retried;
        let mut failed = given.failed.clone();
        failed.extend(who_failed(entrance, admitted).await);
        drop(self);
        let anew = |failed| RouteRequest {
            step: Step::Anew { failed },
            ..given.request.clone()
        };
        let placed = entrance.place_anew(admitted, anew(failed.clone()), Some(to));
        // Better one that failed than none.
        placed.or_else(|_| entrance.place_anew(admitted, anew(Vec::new()), Some(to)))?;
        let copy = Copy {
            path,
            headers,
            at: Some(to),
        };
        mirror
            .meet_by_us(
                entrance,
                admitted,
                (Given { failed, ..given }, &body, &copy),
            )
            .await
    }
}

/// Which prefill worker is to be spared: one that accepts no connection, or one that got on with its decode worker so badly
/// that both still live.
async fn who_failed(entrance: &Entrance, admitted: &mut Admitted) -> Option<WorkerId> {
    let prefill = admitted.booked.route.prefill()?.to;
    let (decode_lives, prefill_lives) =
        tokio::join!(blame(entrance, admitted), accepts(prefill.endpoint));
    if !prefill_lives {
        note(entrance.router(), admitted, Outcome::Failure);
    }
    (decode_lives || !prefill_lives).then_some(prefill.rank.worker)
}

/// Whether the decode worker of a try that failed accepts connections; it is noted if it does not.
async fn blame(entrance: &Entrance, admitted: &mut Admitted) -> bool {
    let lives = accepts(admitted.booked.route.to.endpoint).await;
    if !lives {
        let gone = Answer {
            status: 503,
            from: AnswerFrom::Gateway,
        };
        for (worker, change) in entrance.router().answered(&mut admitted.booked, gone) {
            info!(%worker, ?change, "the health of a worker changed");
        }
    }
    lives
}

/// Whether anybody accepts connections there.
pub(super) async fn accepts(Endpoint(address): Endpoint) -> bool {
    matches!(
        timeout(ACCEPTS_WITHIN, TcpStream::connect(address)).await,
        Ok(Ok(_))
    )
}
