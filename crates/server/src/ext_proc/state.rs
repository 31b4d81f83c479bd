//! Shared state of all streams of the service: the configuration of exchanges, and the state of the
//! process.

use std::collections::BTreeSet;
use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tonic::{Status, Streaming};
use tracing::{debug, trace, warn};
use warmroute_metrics::Metrics;

use super::body_budget::BodyBudget;
use super::exchange::ExchangeOptions;
use super::first_tokens::FirstTokenRegistry;
use super::message::BodyMode;
use super::pipeline::RequestPipeline;
use super::response_content::ContentReport;
use super::retries::RetryRegistry;
use super::wire::RawProcessingRequest;
use crate::dispatch::audit::CacheAudit;

/// Maximum number of logged unknown authorities.
const MAX_LOGGED_AUTHORITIES: usize = 32;

/// Configuration of exchanges. An open exchange keeps the configuration that it began with.
pub struct ExchangeConfig {
    /// The request path.
    pub pipeline: Arc<RequestPipeline>,
    /// Options of exchanges.
    pub options: Arc<ExchangeOptions>,
    /// Timeout of a request body in full-duplex mode, in which Envoy has none.
    pub upload_timeout: Duration,
    /// Maximum bytes of bodies that all exchanges hold together.
    pub held_body_limit: usize,
}

/// State that outlives a configuration.
pub struct ExtProcState {
    /// Metrics.
    pub metrics: Arc<Metrics>,
    pub(super) first_tokens: Arc<FirstTokenRegistry>,
    pub(super) retries: Arc<RetryRegistry>,
    pub(super) body_budget: Arc<BodyBudget>,
    /// Audit, which compares the cache reports of engines with the predictions.
    pub audit: Arc<CacheAudit>,
    warned_of_streamed_bodies: AtomicBool,
    warned_of_unreadable: AtomicBool,
    warned_of_undecided: AtomicBool,
    /// Logged authorities without a pool.
    unknown_authorities: Mutex<BTreeSet<String>>,
}

impl ExtProcState {
    /// Creates the state of a process.
    pub fn new(metrics: Arc<Metrics>, audit: Arc<CacheAudit>) -> Arc<Self> {
        let body_budget = BodyBudget::new(metrics.clone());
        Arc::new(Self {
            metrics,
            first_tokens: Arc::default(),
            retries: Arc::default(),
            body_budget,
            audit,
            warned_of_streamed_bodies: AtomicBool::new(false),
            warned_of_unreadable: AtomicBool::new(false),
            warned_of_undecided: AtomicBool::new(false),
            unknown_authorities: Mutex::default(),
        })
    }

    /// Registers the listener that receives the keys of exchanges of other replicas after this
    /// process has observed their first tokens. Only the first registration takes effect.
    pub fn on_foreign_first_token(&self, on_foreign: impl Fn(&str) + Send + Sync + 'static) {
        self.first_tokens.on_foreign(on_foreign);
    }

    /// Records the first token of an exchange, which another replica has observed.
    pub fn record_first_token(&self, exchange_key: &str) {
        self.first_tokens
            .notify(exchange_key, ContentReport::Content);
    }

    /// Returns the next message, or `None` after the half-close. An error status ends the stream:
    /// Envoy has sent an unreadable message, or has closed the connection and reads no status.
    pub(super) async fn receive(
        &self,
        incoming: &mut Streaming<RawProcessingRequest>,
    ) -> Result<Option<RawProcessingRequest>, Status> {
        incoming.message().await.inspect_err(|status| {
            // A connection error has a source. Envoy ends many streams in this way.
            if status.source().is_some() {
                return trace!(%status, "stream closed");
            }
            self.metrics.ext_proc.invalid_messages.inc();
            if self.warned_of_unreadable.swap(true, Ordering::Relaxed) {
                return debug!(%status, "ext_proc message unreadable");
            }
            warn!(%status, "ext_proc message unreadable; see warmroute_invalid_messages_total for further ones");
        })
    }

    /// Returns the next message of a stream. Without a stream it never completes.
    pub(super) async fn receive_from(
        &self,
        incoming: Option<&mut Streaming<RawProcessingRequest>>,
    ) -> Result<Option<RawProcessingRequest>, Status> {
        match incoming {
            Some(incoming) => self.receive(incoming).await,
            None => std::future::pending().await,
        }
    }

    /// Logs once that the gateway does not show whether it or a worker has sent a 503.
    pub(super) fn warn_of_undecided_source(&self) {
        if self.warned_of_undecided.swap(true, Ordering::Relaxed) {
            return debug!("source of a 503 unknown");
        }
        warn!(
            "source of a 503 unknown: the response has neither ext_proc attributes nor \
            x-envoy-upstream-service-time. warmroute marks the worker as overloaded and does not \
            eject it. Set `response_attributes: [upstream.address, response.flags]` of the \
            ext_proc filter, or `headers.enableEnvoyHeaders: true` of Envoy Gateway's \
            ClientTrafficPolicy"
        );
    }

    /// Logs once for each authority that it has no pool.
    pub(super) fn warn_of_unknown_authority(&self, authority: &str) {
        let mut logged = self.unknown_authorities.lock();
        if logged.len() >= MAX_LOGGED_AUTHORITIES || !logged.insert(authority.to_owned()) {
            return debug!(authority, "ext_proc authority without pool");
        }
        drop(logged);
        warn!(
            authority,
            "ext_proc authority without pool in `routing.pool_routes.authorities`: its requests \
            may go to workers of every pool. Add the authority, or send the pool's calls through \
            the Service that is configured for it"
        );
    }

    /// Logs once that the gateway chooses its route before it sends the body.
    pub(super) fn warn_of_streamed_bodies(&self, mode: BodyMode) {
        if mode == BodyMode::Streamed
            && !self.warned_of_streamed_bodies.swap(true, Ordering::Relaxed)
        {
            warn!(
                "Envoy streams request bodies (request_body_mode: STREAMED), so it chooses its \
                route before it sends them: requests go by load only. Use BUFFERED or \
                FULL_DUPLEX_STREAMED"
            );
        }
    }
}
