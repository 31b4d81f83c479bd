//! Another try of a request whose workers were to meet and did not, because one of them failed: Envoy has sent it to the next
//! decode worker, in whose room nobody is. A prefill worker is chosen anew, both get a new room, and the copy is ours to
//! make, because Envoy makes it once.

use std::time::Duration;

use bytes::Bytes;
use reqwest::header::HeaderMap;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tracing::{debug, info};

use super::call::{Asked, Failure};
use super::mirror::{Given, Met, Mirrored};
use crate::entrance::{Admitted, Entrance};
use crate::health::Outcome;
use crate::router::{Answer, AnswerFrom, RouteError, RouteRequest, Step};
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
    /// Its body, with the room of the try before.
    pub body: Bytes,
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
        let router = entrance.router();
        let Given { request, mut failed, name } = self.given.clone();
        let mirror = self.mirror.clone();
        self.blame(entrance, admitted, &mut failed).await;
        drop(self);
        loop {
            let anew = |failed| RouteRequest { step: Step::Anew { failed }, ..request.clone() };
            let placed = entrance.follow_to(admitted, anew(failed.clone()), retried.to);
            // Better one that failed than none.
            placed.or_else(|_| entrance.follow_to(admitted, anew(Vec::new()), retried.to))?;
            let given = Given { request: request.clone(), failed: failed.clone(), name: name.clone() };
            let met = mirror.meet_as(given, &retried.body, &admitted.booked.route, router);
            let mut met = met.ok_or(RouteError::NoPrefill)?;
            let (path, headers) = (retried.path.clone(), retried.headers.clone());
            let asked = Asked { worker: met.prefill, path, headers, body: met.body.clone() };
            match mirror.caller.begin(asked).await {
                Ok(begun) => {
                    met.mirrored.begun = Some(begun);
                    return Ok(met);
                }
                Err(failure) => {
                    debug!(worker = %met.prefill, %failure, "a prefill could not begin");
                    met.mirrored.over();
                    let worker = admitted.booked.route.prefill().map(|prefill| prefill.to.rank.worker);
                    let again = worker.filter(|worker| !failed.contains(worker) && !matches!(failure, Failure::Full));
                    failed.push(again.ok_or(RouteError::NoPrefill)?);
                    note(entrance, admitted);
                }
            }
        }
    }

    /// Finds out who of the two has failed: whoever accepts no connection, or else something between them, so that another
    /// prefill worker may fare better.
    async fn blame(&self, entrance: &Entrance, admitted: &mut Admitted, failed: &mut Vec<WorkerId>) {
        let route = &admitted.booked.route;
        let Some(prefill) = route.prefill().map(|prefill| prefill.to) else { return };
        let (decode_accepts, prefill_accepts) = tokio::join!(accepts(route.to.endpoint), accepts(prefill.endpoint));
        if !decode_accepts {
            let gone = Answer { status: 503, from: AnswerFrom::Gateway };
            for (worker, change) in entrance.router().answered(&mut admitted.booked, gone) {
                info!(%worker, ?change, "the health of a worker changed");
            }
        }
        if !prefill_accepts {
            note(entrance, admitted);
        }
        if decode_accepts || !prefill_accepts {
            failed.push(prefill.rank.worker);
        }
    }
}

/// The prefill worker of a request has failed.
fn note(entrance: &Entrance, admitted: &mut Admitted) {
    let changed = entrance.router().prefill_answered(&mut admitted.booked, Outcome::Failure, Duration::ZERO);
    if let Some((worker, change)) = changed {
        info!(%worker, ?change, "the health of a prefill worker changed");
    }
}

async fn accepts(Endpoint(address): Endpoint) -> bool {
    matches!(timeout(ACCEPTS_WITHIN, TcpStream::connect(address)).await, Ok(Ok(_)))
}
