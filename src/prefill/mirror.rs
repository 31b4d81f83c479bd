//! A prefill that Envoy has done by sending a copy of the request to the prefill worker. Envoy never takes a copy back and
//! shows nothing of its answer, so what is known is what the decode worker says: until its first token the prefill is under
//! way, and if that never comes the engine has to be told that nobody waits for it any longer.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::de::IgnoredAny;
use serde_json::json;
use tokio::runtime::Handle;
use tokio::time::Instant;
use tracing::debug;

use crate::engine_client::config::EnginesConfig;
use crate::engine_client::{EngineClient, EngineError};
use crate::metrics::{Metrics, OutcomeLabel};
use crate::worker::Endpoint;

/// How prefills of one model are mirrored.
#[derive(Clone)]
pub struct Mirror {
    /// Envoy's cluster of prefill workers.
    pub cluster: Arc<str>,
    /// How long the first token may take.
    pub deadline: Duration,
    /// The way to engines that have to be told that nobody waits.
    pub aborts: Arc<Aborts>,
}

/// The way to engines that have to be told that nobody waits.
pub struct Aborts {
    client: EngineClient,
    engines: EnginesConfig,
    metrics: Arc<Metrics>,
}

impl Aborts {
    /// The way to engines; it connects with the first word.
    pub fn new(engines: &EnginesConfig, metrics: Arc<Metrics>) -> Result<Arc<Self>, EngineError> {
        Ok(Arc::new(Self { client: EngineClient::new(engines)?, engines: engines.clone(), metrics }))
    }

    async fn abort(self: Arc<Self>, worker: Endpoint, request: Option<Arc<str>>) {
        let outcome = match request {
            // A name that a client chose may be the beginning of other requests' names, which would be aborted as well.
            None => "not_ours",
            Some(request) => {
                let body = Bytes::from(json!({"rid": &*request, "abort_all": false}).to_string());
                let (engine, deadline) = (self.engines.url(worker), self.client.deadline());
                match self.client.post::<IgnoredAny>(&engine, "abort_request", body, deadline).await {
                    // SGLang answers with an empty body.
                    Ok(_) | Err(EngineError::Unreadable(_)) => "told",
                    Err(error) => {
                        debug!(%worker, %error, "a prefill could not be aborted");
                        error.label()
                    }
                }
            }
        };
        self.metrics.prefill_aborts.get_or_create(&OutcomeLabel { outcome }).inc();
    }
}

/// A mirrored prefill under way; dropped before it is over, its engine is told.
#[must_use = "dropping it aborts the prefill"]
pub struct Mirrored {
    aborts: Arc<Aborts>,
    /// Who was told to compute.
    worker: Endpoint,
    /// What both engines call the request, where we gave it that name.
    request: Option<Arc<str>>,
    /// When the first token has to be there.
    due: Instant,
    over: bool,
}

impl Mirrored {
    /// A prefill that is about to begin.
    pub fn new(mirror: &Mirror, worker: Endpoint, request: Option<Arc<str>>) -> Self {
        let due = Instant::now() + mirror.deadline;
        Self { aborts: mirror.aborts.clone(), worker, request, due, over: false }
    }

    /// When the first token has to be there.
    pub fn due(&self) -> Instant {
        self.due
    }

    /// The decode worker has what it needs.
    pub fn over(mut self) {
        self.over = true;
    }

    /// Tells whoever decodes, too, that nobody waits.
    pub fn abort_decode(&self, worker: Endpoint) {
        self.tell(worker);
    }

    fn tell(&self, worker: Endpoint) {
        // Where the process ends there is nobody left to tell by.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(self.aborts.clone().abort(worker, self.request.clone()));
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
