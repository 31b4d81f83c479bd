//! A prefill that Envoy has done by sending a copy of the request to the prefill worker. Envoy never takes a copy back and
//! shows nothing of its answer, so what is known is what the decode worker says: until its first token the prefill is under
//! way, and if that never comes the engine has to be told that nobody waits for it any longer.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rand::RngExt as _;
use reqwest::header::HeaderValue;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep_until};
use tracing::debug;

use super::aborts::Aborts;
use super::call::{Begun, Caller, Failure};
use super::meeting::{Meeting, Room, names};
use crate::audit::Audit;
use crate::router::{Route, RouteRequest, Router};
use crate::worker::{Endpoint, WorkerId};

/// How prefills of one model are mirrored.
pub struct Mirror {
    /// Envoy's cluster of prefill workers.
    pub cluster: Arc<str>,
    /// How long the first token may take.
    pub deadline: Duration,
    /// The way to engines that have to be told that nobody waits.
    pub aborts: Arc<Aborts>,
    /// The way to prefill workers whose copy Envoy does not make.
    pub caller: Caller,
    /// Where the cache reports of these workers are compared with the predictions.
    pub audit: Arc<Audit>,
}

/// Two workers that are about to meet.
pub struct Met {
    /// The body that both of them get.
    pub body: Bytes,
    /// Who does the prefill.
    pub prefill: Endpoint,
    /// The prefill under way.
    pub mirrored: Mirrored,
}

impl Mirror {
    /// Has the two workers of a route meet, where the gateway makes the copy; none where there is nobody to meet.
    pub fn meet(
        self: &Arc<Self>,
        given: Given,
        body: &[u8],
        route: &Route,
        router: &Router,
    ) -> Option<Met> {
        let to = route.prefill()?.to;
        let worker = router.fleet().worker(to.rank.worker)?.clone();
        let mut random = rand::rng();
        let room = Room::draw(worker.ranks, to.rank.rank, &mut random);
        let request = format!("warmroute-{:032x}", random.random::<u128>()).into();
        let (host, port) = worker.meeting_place();
        let meeting = Meeting {
            host,
            port,
            room,
            request,
        };
        let invited = meeting.invite(body, given.name.as_deref())?;
        let name = invited.named_by_us.then_some(meeting.request);
        // Another try needs some time, too.
        let now = Instant::now();
        let due = given
            .due
            .map_or(now + self.deadline, |due| due.max(now + self.deadline / 2));
        let mirrored = Mirrored {
            mirror: self.clone(),
            worker: to.endpoint,
            since: std::time::Instant::now(),
            due: Some(due),
            names: name.as_ref().map(|name| names(name, body)),
            begun: None,
            given: Given {
                name,
                due: Some(due),
                ..given
            },
            over: false,
        };
        Some(Met {
            body: invited.body,
            prefill: to.endpoint,
            mirrored,
        })
    }
}

/// What is known of a request whose workers meet, for the case that they have to meet anew.
#[derive(Clone, Debug)]
pub struct Given {
    /// As it was routed.
    pub(super) request: RouteRequest,
    /// Prefill workers that had it and failed.
    pub(super) failed: Vec<WorkerId>,
    /// What both engines call it, where we gave it that name.
    pub(super) name: Option<Arc<str>>,
    /// The client's own, for where warmroute has none for engines.
    pub(super) credentials: Option<HeaderValue>,
    /// When its first token has to be there, whatever was tried.
    pub(super) due: Option<Instant>,
}

impl Given {
    /// A request that has not been tried yet.
    pub fn new(request: RouteRequest, credentials: Option<HeaderValue>) -> Self {
        Self {
            request,
            failed: Vec::new(),
            name: None,
            credentials,
            due: None,
        }
    }
}

/// A mirrored prefill under way; dropped before it is over, its engine is told.
#[must_use = "dropping it aborts the prefill"]
pub struct Mirrored {
    pub(super) mirror: Arc<Mirror>,
    /// Who was told to compute, and when.
    worker: Endpoint,
    since: std::time::Instant,
    /// When it has to be over.
    due: Option<Instant>,
    /// What engines call it; none where the client gave it its name.
    names: Option<Arc<[Arc<str>]>>,
    /// The copy, where it is ours.
    begun: Option<Begun>,
    pub(super) given: Given,
    over: bool,
}

/// What is known of a mirrored prefill.
#[derive(Debug)]
pub enum Turn {
    /// It is done.
    Done,
    /// It has failed; whoever decodes waits in vain, and has been told.
    Failed(Failure),
    /// Nothing came of it in time.
    Late,
}

impl Mirrored {
    /// Envoy's cluster of prefill workers; none where the copy is ours.
    pub fn cluster(&self) -> Option<Arc<str>> {
        self.begun.is_none().then(|| self.mirror.cluster.clone())
    }

    /// Whether warmroute sent the copy and receives the response. Otherwise Envoy discards it.
    pub fn receives_response(&self) -> bool {
        self.begun.is_some()
    }

    /// The copy is ours.
    pub(super) fn carries(&mut self, begun: Begun) {
        self.begun = Some(begun);
    }

    /// Completes when something is known of it.
    pub async fn turn(&mut self) -> Turn {
        let (due, begun) = (self.due, &mut self.begun);
        let late = async {
            match due {
                Some(due) => sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        let ended = async {
            match begun {
                Some(begun) => begun.ended().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = late => {
                self.due = None;
                Turn::Late
            }
            ended = ended => {
                self.over = true;
                match ended {
                    Ok(()) => {
                        // How long the answer takes is not to be limited, and another try has its own time.
                        (self.due, self.given.due) = (None, None);
                        Turn::Done
                    }
                    Err(failure) => {
                        debug!(worker = %self.worker, %failure, "a prefill failed");
                        Turn::Failed(failure)
                    }
                }
            }
        }
    }

    /// The decode worker has what it needs.
    pub fn over(mut self) {
        self.mirror.caller.did(self.worker);
        self.end();
    }

    /// It never began.
    pub(super) fn unbegun(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.over = true;
        if let Some(begun) = self.begun.take() {
            begun.over();
        }
    }

    /// Whether its worker does nothing any longer, as far as we see: it has done nothing for others either.
    pub fn is_dead(&self) -> bool {
        !self.mirror.caller.lives(self.worker, self.since)
    }

    /// Tells whoever decodes, too, that nobody waits.
    pub fn abort_decode(&self, worker: Endpoint) {
        self.tell(worker);
    }

    fn tell(&self, worker: Endpoint) {
        // Where the process ends there is nobody left to tell by.
        if let Ok(runtime) = Handle::try_current() {
            let aborts = &self.mirror.aborts;
            match &self.names {
                None => drop(runtime.spawn(aborts.clone().abort(worker, None, None))),
                Some(names) => {
                    for name in names.iter() {
                        runtime.spawn(aborts.clone().abort(
                            worker,
                            Some(name.clone()),
                            self.given.credentials.clone(),
                        ));
                    }
                }
            }
        }
    }
}

impl Drop for Mirrored {
    fn drop(&mut self) {
        if !self.over {
            self.tell(self.worker);
        }
    }
}
