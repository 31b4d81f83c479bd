//! Telling engines that nobody waits for a request any longer: SGLang's `abort_request`. Envoy never takes a copy back, so
//! the engine would compute, and keep what it has computed, until its own patience ends.

use std::sync::Arc;

use bytes::Bytes;
use serde::de::IgnoredAny;
use serde_json::json;
use tracing::debug;

use crate::engine_client::config::EnginesConfig;
use crate::engine_client::{EngineClient, EngineError};
use crate::metrics::{Metrics, OutcomeLabel};
use crate::worker::Endpoint;

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

    /// Tells one engine that nobody waits for a request any longer.
    pub(super) async fn abort(self: Arc<Self>, worker: Endpoint, request: Option<Arc<str>>) {
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
