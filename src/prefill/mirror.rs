//! A prefill that Envoy has done by sending a copy of the request to the prefill worker. Envoy never takes a copy back and
//! shows nothing of its answer, so what is known is what the decode worker says: until its first token the prefill is under
//! way, and if that never comes the engine has to be told that nobody waits for it any longer.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rand::RngExt as _;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep_until};
use tracing::debug;

use super::aborts::Aborts;
use super::call::{Begun, Caller};
use super::meeting::{Meeting, Room};
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
    /// Has the two workers of a route meet; none where there is nobody to meet.
    pub fn meet(self: &Arc<Self>, request: RouteRequest, body: &[u8], route: &Route, router: &Router) -> Option<Met> {
        self.meet_as(Given { request, failed: Vec::new(), name: None }, body, route, router)
    }

    pub(super) fn meet_as(self: &Arc<Self>, given: Given, body: &[u8], route: &Route, router: &Router) -> Option<Met> {
        let to = route.prefill()?.to;
        let worker = router.fleet().worker(to.rank.worker)?.clone();
        let mut random = rand::rng();
        let room = Room::draw(worker.ranks, to.rank.rank, &mut random);
        let request = format!("warmroute-{:032x}", random.random::<u128>()).into();
        let (host, port) = worker.meeting_place();
        let meeting = Meeting { host, port, room, request };
        let invited = meeting.invite(body, given.name.as_deref())?;
        let name = invited.named_by_us.then_some(meeting.request);
        let mirrored = Mirrored {
            mirror: self.clone(),
            worker: to.endpoint,
            due: Instant::now() + self.deadline,
            begun: None,
            given: Given { name, ..given },
            over: false,
        };
        Some(Met { body: invited.body, prefill: to.endpoint, mirrored })
    }
}

/// What is known of a request whose workers meet, for the case that they have to meet anew.
#[derive(Clone, Debug)]
pub(super) struct Given {
    /// As it was routed.
    pub(super) request: RouteRequest,
    /// Prefill workers that had it and failed.
    pub(super) failed: Vec<WorkerId>,
    /// What both engines call it, where we gave it that name.
    pub(super) name: Option<Arc<str>>,
}

/// A mirrored prefill under way; dropped before it is over, its engine is told.
#[must_use = "dropping it aborts the prefill"]
pub struct Mirrored {
    pub(super) mirror: Arc<Mirror>,
    /// Who was told to compute.
    worker: Endpoint,
    /// When the first token has to be there.
    due: Instant,
    /// The copy, where it is ours.
    pub(super) begun: Option<Begun>,
    pub(super) given: Given,
    over: bool,
}

impl Mirrored {
    /// Envoy's cluster of prefill workers.
    pub fn cluster(&self) -> Arc<str> {
        self.mirror.cluster.clone()
    }

    /// Completes when the first token should have been there, or when it is known that it will not come.
    pub async fn overdue(&mut self) {
        let failed = async {
            match &mut self.begun {
                Some(begun) => begun.failed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            failure = failed => debug!(worker = %self.worker, %failure, "a prefill failed"),
            () = sleep_until(self.due) => {}
        }
    }

    /// The decode worker has what it needs.
    pub fn over(mut self) {
        self.over = true;
        if let Some(begun) = self.begun.take() {
            begun.over();
        }
    }

    /// Tells whoever decodes, too, that nobody waits.
    pub fn abort_decode(&self, worker: Endpoint) {
        self.tell(worker);
    }

    fn tell(&self, worker: Endpoint) {
        // Where the process ends there is nobody left to tell by.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(self.mirror.aborts.clone().abort(worker, self.given.name.clone(), None));
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
