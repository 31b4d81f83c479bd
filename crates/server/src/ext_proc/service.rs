//! The gRPC service. The task of each stream feeds the exchange and applies its effects. That task
//! owns the resources of the exchange. Any end of the stream therefore releases the load by drop: a
//! complete response, a disconnected client, or a shutdown of Envoy or warmroute.

use std::future::{Ready, ready};
use std::sync::Arc;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tonic::codegen::http::uri::Authority;
use tonic::metadata::MetadataMap;
use tonic::server::StreamingService;
use tonic::{Request, Response, Status, Streaming};
use warmroute_core::envoy_names::{FILTER_ROLE, PROBE_FILTER, PROBED_FILTER, RETRY_FILTER};
use warmroute_metrics::{OutcomeLabel, count_outcome};

use super::exchange::ExchangeStart;
use super::gateway::GatewayTraits;
use super::message::IncomingMessage;
use super::probe::FirstTokenProbe;
use super::response_content::ContentReport;
use super::response_stream::{ResponseSink, ResponseStream};
use super::retries::RetryFilter;
use super::returned_piece::ExtProcReply;
use super::state::{ExchangeConfig, ExtProcState};
use super::stream::{ExchangeCall, ExchangeStream};
use super::wire::RawProcessingRequest;

/// The ext_proc service.
#[derive(Clone)]
pub struct ExtProcService {
    config: Arc<ExchangeConfig>,
    state: Arc<ExtProcState>,
}

impl ExtProcService {
    /// Creates a service with one configuration.
    pub fn new(config: ExchangeConfig, state: Arc<ExtProcState>) -> Self {
        Self {
            config: Arc::new(config),
            state,
        }
    }

    async fn run(
        self,
        mut incoming: Streaming<RawProcessingRequest>,
        replies: ResponseSink,
        call: CallMetadata,
    ) -> Result<(), Status> {
        let filter = call.filter;
        let Some(first) = self.receive(&mut incoming).await? else {
            return Ok(());
        };
        // The futures are boxed, so that each stream has the size of its role.
        if filter == FilterRole::Retry {
            return Box::pin(self.run_retry_filter(first, incoming, replies)).await;
        }
        if filter == FilterRole::Probe || FirstTokenProbe::is_probe_stream(&first) {
            return Box::pin(self.run_probe_filter(first, incoming, replies)).await;
        }
        let start = ExchangeStart {
            exchange_key: (filter == FilterRole::Probed)
                .then(|| format!("{:016x}", rand::random::<u64>())),
            is_sampled: self.config.options.observe.is_sampled(rand::random()),
            request_id: format!("{:032x}", rand::random::<u128>()),
            pool: self.pool_of(call.authority.as_ref()),
        };
        let call = ExchangeCall {
            incoming,
            replies,
            gateway: call.gateway,
        };
        let stream = ExchangeStream::new(self.state, self.config, call, start);
        Box::pin(stream.run(first)).await
    }

    async fn receive(
        &self,
        incoming: &mut Streaming<RawProcessingRequest>,
    ) -> Result<Option<IncomingMessage>, Status> {
        let message = self.state.receive(incoming).await?;
        Ok(message.map(IncomingMessage::parse))
    }

    /// Returns the pool that the authority of a call selects.
    fn pool_of(&self, authority: Option<&Authority>) -> Option<Arc<str>> {
        let authorities = self.config.pipeline.pool_authorities();
        if authorities.is_empty() {
            return None;
        }
        let authority = authority.map_or("", Authority::as_str);
        let pool = authorities.pool_of(authority);
        if pool.is_none() {
            self.state.warn_of_unknown_authority(authority);
        }
        pool
    }

    async fn run_retry_filter(
        &self,
        first: IncomingMessage,
        mut incoming: Streaming<RawProcessingRequest>,
        replies: ResponseSink,
    ) -> Result<(), Status> {
        let mut retry = RetryFilter::new(self.config.pipeline.prefill_planner().trusts_clients);
        let mut next = Some(first);
        let mut counter = OutcomeCounter {
            family: &self.state.metrics.prefill.retries,
            outcome: "cancelled",
        };
        while let Some(message) = next.take() {
            if let Some(extension) = retry.extend_timeout(&message) {
                replies.send(extension).await;
            }
            let reply = retry.on_message(&self.state.retries, message).await;
            if let Some(wire) = reply.reply {
                replies.send(wire).await;
            }
            match reply.outcome {
                Some(outcome) => counter.outcome = outcome,
                None => next = self.receive(&mut incoming).await?,
            }
        }
        Ok(())
    }

    async fn run_probe_filter(
        &self,
        first: IncomingMessage,
        mut incoming: Streaming<RawProcessingRequest>,
        replies: ResponseSink,
    ) -> Result<(), Status> {
        let mut probe = FirstTokenProbe::default();
        let mut next = Some(first);
        let mut counter = OutcomeCounter {
            family: &self.state.metrics.ext_proc.first_token_streams,
            outcome: "no_token",
        };
        while let Some(message) = next.take() {
            let reply = probe.on_message(message);
            for wire in reply.replies {
                replies.send(wire).await;
            }
            if let Some((exchange_key, report)) = reply.report {
                let first_tokens = &self.state.first_tokens;
                let is_matched = first_tokens.notify_observed(&exchange_key, report);
                if report == ContentReport::Content {
                    counter.outcome = if is_matched { "observed" } else { "unmatched" };
                }
            }
            if !reply.ends_stream {
                next = self.receive(&mut incoming).await?;
            }
        }
        Ok(())
    }
}

/// Counts the outcome of a stream when it ends.
struct OutcomeCounter<'m> {
    family: &'m Family<OutcomeLabel, Counter>,
    outcome: &'static str,
}

impl Drop for OutcomeCounter<'_> {
    fn drop(&mut self) {
        count_outcome(self.family, self.outcome);
    }
}

/// The properties of a call that are known before its first message.
struct CallMetadata {
    filter: FilterRole,
    /// The authority of the call, as the HTTP/2 listener accepts it.
    authority: Option<Authority>,
    gateway: GatewayTraits,
}

impl CallMetadata {
    fn from_request<T>(request: &Request<T>) -> Self {
        Self {
            filter: FilterRole::from_metadata(request.metadata()),
            authority: request.extensions().get().cloned(),
            gateway: request.extensions().get().cloned().unwrap_or_default(),
        }
    }
}

/// The filter that opened a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FilterRole {
    /// The only filter, or one without a role in its metadata.
    Sole,
    /// The main filter beside a probe filter.
    Probed,
    /// The filter that observes the first token.
    Probe,
    /// The filter that reports retries.
    Retry,
}

impl FilterRole {
    fn from_metadata(metadata: &MetadataMap) -> Self {
        match metadata
            .get(FILTER_ROLE)
            .and_then(|value| value.to_str().ok())
        {
            Some(PROBE_FILTER) => FilterRole::Probe,
            Some(PROBED_FILTER) => FilterRole::Probed,
            Some(RETRY_FILTER) => FilterRole::Retry,
            _ => FilterRole::Sole,
        }
    }
}

impl StreamingService<RawProcessingRequest> for ExtProcService {
    type Response = ExtProcReply;
    type ResponseStream = ResponseStream;
    type Future = Ready<Result<Response<ResponseStream>, Status>>;

    fn call(&mut self, request: Request<Streaming<RawProcessingRequest>>) -> Self::Future {
        let call = CallMetadata::from_request(&request);
        let service = self.clone();
        ready(Ok(Response::new(ResponseStream::new(|replies| {
            service.run(request.into_inner(), replies, call)
        }))))
    }
}
