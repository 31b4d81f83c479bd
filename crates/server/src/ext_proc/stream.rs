//! One HTTP exchange over its gRPC stream: the task that feeds the state machine and applies its
//! effects.
//!
//! Decision 0005.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tonic::{Code, Status, Streaming};
use warmroute_tokens::openai;

use super::body_budget::BodyBudgetShare;
use super::exchange::{Effect, Exchange, ExchangeStart, InboundRequest};
use super::first_tokens::FirstTokenWaiter;
use super::gateway::GatewayTraits;
use super::guard::ExchangeGuard;
use super::message::{ExchangeMessage, IncomingMessage};
use super::pipeline::RoutingOutcome;
use super::reject;
use super::response_content::ContentReport;
use super::response_stream::ResponseSink;
use super::retries::{RetryAttempt, RetryDecision, RetryListener};
use super::state::{ExchangeConfig, ExtProcState};
use super::wire::{ProcessingPart, RawProcessingRequest};
use crate::prefill::{PrefillEvent, PrefillInput};
use crate::request::RequestBody;

/// Maximum number of messages read while a route is chosen. Further messages wait in Envoy.
const MAX_READ_AHEAD: usize = 64;

/// Maximum bytes of bodies read while a route is chosen.
const MAX_READ_AHEAD_BYTES: usize = 256 << 10;

/// Margin of the extended message timeout over the maximum wait, so that the reply precedes the
/// timeout.
const TIMEOUT_MARGIN: Duration = Duration::from_millis(500);

/// The gRPC call of an exchange.
pub(super) struct ExchangeCall {
    pub(super) incoming: Streaming<RawProcessingRequest>,
    pub(super) replies: ResponseSink,
    pub(super) gateway: GatewayTraits,
}

/// One HTTP exchange.
pub(super) struct ExchangeStream {
    state: Arc<ExtProcState>,
    config: Arc<ExchangeConfig>,
    gateway: GatewayTraits,
    /// The messages of Envoy; `None` after a message that exceeds the size limit, after which no
    /// message can be read.
    incoming: Option<Streaming<RawProcessingRequest>>,
    replies: ResponseSink,
    exchange: Exchange,
    guard: ExchangeGuard,
    first_token: Option<FirstTokenWaiter>,
    /// Key by which other filters identify the exchange.
    exchange_key: Option<String>,
    retry_listener: Option<RetryListener>,
    /// Whether the prefill of the current attempt failed, so that its decode worker received an
    /// abort.
    prefill_aborted: bool,
    body_share: BodyBudgetShare,
    /// Deadline of the request body.
    upload_deadline: Instant,
}

/// The reason why a stream closes before the exchange has ended.
enum StreamEnd {
    /// Envoy has half-closed the stream, and all its messages were handled.
    HalfClosed,
    /// No further message can be read.
    Failed(Status),
}

impl StreamEnd {
    fn into_status(self) -> Result<(), Status> {
        match self {
            StreamEnd::HalfClosed => Ok(()),
            StreamEnd::Failed(status) => Err(status),
        }
    }
}

impl From<Status> for StreamEnd {
    fn from(status: Status) -> Self {
        StreamEnd::Failed(status)
    }
}

/// Next input of the exchange.
enum StreamEvent {
    Message(Box<RawProcessingRequest>),
    /// Another filter has observed the response body.
    Content(ContentReport),
    /// The request body is late.
    Deadline,
    /// The mirrored prefill has made progress.
    Prefill(PrefillEvent),
    /// Envoy sends the request to another worker.
    Retry(Box<RetryAttempt>),
}

impl ExchangeStream {
    pub(super) fn new(
        state: Arc<ExtProcState>,
        config: Arc<ExchangeConfig>,
        call: ExchangeCall,
        start: ExchangeStart,
    ) -> Self {
        let exchange_key = start.exchange_key.clone();
        let first_token = exchange_key
            .clone()
            .map(|key| state.first_tokens.register(key));
        Self {
            incoming: Some(call.incoming),
            replies: call.replies,
            exchange: Exchange::new(config.options.clone(), start),
            guard: ExchangeGuard::open(
                state.metrics.clone(),
                config.pipeline.router().clone(),
                state.audit.clone(),
            ),
            first_token,
            exchange_key,
            retry_listener: None,
            prefill_aborted: false,
            body_share: state.body_budget.share(),
            upload_deadline: Instant::now() + config.upload_timeout,
            config,
            state,
            gateway: call.gateway,
        }
    }

    /// Runs until the end of the stream, and returns its status.
    pub(super) async fn run(mut self, first: IncomingMessage) -> Result<(), Status> {
        // Messages received while a route was chosen.
        let mut early = VecDeque::new();
        if let Err(end) = self.accept_message(first, &mut early).await {
            return end.into_status();
        }
        loop {
            // Yields to other streams if many messages are available at once.
            tokio::task::consume_budget().await;
            let next = match early.pop_front() {
                Some(message) => Ok(StreamEvent::Message(Box::new(message))),
                None => self.next_event().await,
            };
            let done = match next {
                Ok(StreamEvent::Message(message)) => {
                    self.accept_message(IncomingMessage::parse(*message), &mut early)
                        .await
                }
                Ok(StreamEvent::Content(report)) => {
                    self.first_token = None;
                    let effects = self.exchange.on_content_report(report);
                    self.apply_effects(effects, &mut early).await
                }
                Ok(StreamEvent::Deadline) => {
                    let effects = self.exchange.on_deadline();
                    let done = self.apply_effects(effects, &mut early).await;
                    self.body_share
                        .set(self.exchange.buffered_bytes(), usize::MAX);
                    done
                }
                Ok(StreamEvent::Prefill(event)) => {
                    self.prefill_aborted = matches!(event, PrefillEvent::Failed(_));
                    let is_content_missing = self.exchange.observes_no_content();
                    if self.guard.on_prefill_event(&event, is_content_missing) {
                        self.abort(&mut early).await
                    } else {
                        Ok(())
                    }
                }
                Ok(StreamEvent::Retry(attempt)) => {
                    if self.prefill_retry(*attempt).await {
                        Ok(())
                    } else {
                        self.abort(&mut early).await
                    }
                }
                Err(end) => Err(end),
            };
            match done {
                Ok(()) => {}
                // The code of a message that exceeds the size limit.
                Err(StreamEnd::Failed(status)) if status.code() == Code::OutOfRange => {
                    return self.end_at_oversize_message(status, &mut early).await;
                }
                Err(end) => return end.into_status(),
            }
        }
    }

    /// Replies to a message that exceeds the size limit. The stream ends, because no further
    /// message can be read. Envoy continues the request without the stream, and its load is no
    /// longer tracked.
    async fn end_at_oversize_message(
        &mut self,
        status: Status,
        early: &mut VecDeque<RawProcessingRequest>,
    ) -> Result<(), Status> {
        // The rest of the message would be read as the next one. Without a reader, its bytes are
        // discarded.
        self.incoming = None;
        let effects = self.exchange.on_oversize_message().ok_or(status)?;
        self.apply_effects(effects, early)
            .await
            .or_else(StreamEnd::into_status)
    }

    async fn next_event(&mut self) -> Result<StreamEvent, StreamEnd> {
        let first_token = async {
            match &mut self.first_token {
                Some(waiter) => waiter.reported().await,
                None => std::future::pending().await,
            }
        };
        let attempts = async {
            match &mut self.retry_listener {
                Some(listener) => listener.next().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            // Polled before the end of the stream, because a stream that Envoy has reset is polled
            // only once more.
            report = first_token => Ok(StreamEvent::Content(report)),
            message = self.state.receive_from(self.incoming.as_mut()) => match message? {
                Some(message) => Ok(StreamEvent::Message(Box::new(message))),
                None => Err(StreamEnd::HalfClosed),
            },
            () = tokio::time::sleep_until(self.upload_deadline), if self.exchange.is_gathering() => Ok(StreamEvent::Deadline),
            attempt = attempts => Ok(StreamEvent::Retry(Box::new(attempt))),
            event = self.guard.next_prefill_event() => Ok(StreamEvent::Prefill(event)),
        }
    }

    async fn accept_message(
        &mut self,
        incoming: IncomingMessage,
        early: &mut VecDeque<RawProcessingRequest>,
    ) -> Result<(), StreamEnd> {
        if let Some(modes) = incoming.modes {
            self.exchange.configure(modes);
            self.state.warn_of_streamed_bodies(modes.request);
        }
        self.exchange.apply_metadata(incoming.metadata);
        let Some(mut message) = incoming.message else {
            return Ok(());
        };
        if let ExchangeMessage::ResponseHeaders { head, .. } = &mut message
            && !self.gateway.decide_source(head)
        {
            self.state.warn_of_undecided_source();
        }
        // Envoy has no attempt left, and the response only shows that the engine received the
        // abort.
        if let ExchangeMessage::ResponseHeaders { head, .. } = &message
            && self.prefill_aborted
            && head.status >= 500
        {
            return self.abort(early).await;
        }
        if let ExchangeMessage::ResponseHeaders { head, .. } = &message
            && let Some(serving_worker) = self.guard.other_serving_worker(head)
        {
            self.exchange.on_served_elsewhere(serving_worker);
        }
        let effects = self.exchange.on_message(message);
        self.apply_effects(effects, early).await?;
        if self
            .body_share
            .set(self.exchange.buffered_bytes(), self.config.held_body_limit)
        {
            let effects = self.exchange.on_deadline();
            self.apply_effects(effects, early).await?;
            self.body_share
                .set(self.exchange.buffered_bytes(), usize::MAX);
        }
        Ok(())
    }

    async fn apply_effects(
        &mut self,
        effects: Vec<Effect>,
        early: &mut VecDeque<RawProcessingRequest>,
    ) -> Result<(), StreamEnd> {
        let mut effects = VecDeque::from(effects);
        while let Some(effect) = effects.pop_front() {
            match effect {
                Effect::Reply(reply) => self.replies.send(reply).await,
                // Boxed, so that the exchange does not contain this large future for its whole time.
                Effect::Route(inbound) => match Box::pin(self.route(inbound, early)).await? {
                    None => {}
                    Some(RoutingOutcome::Immediate(answer)) => {
                        effects.extend(self.exchange.on_immediate(&answer));
                        self.guard.on_immediate(answer.status);
                    }
                    Some(RoutingOutcome::Routed {
                        reply,
                        active,
                        remote_prefill,
                    }) => {
                        if let (Some(remote_prefill), Some(exchange_key)) =
                            (&remote_prefill, &self.exchange_key)
                        {
                            self.retry_listener = Some(
                                self.state
                                    .retries
                                    .listen(exchange_key.clone(), remote_prefill.max_duration()),
                            );
                        }
                        effects.extend(self.exchange.on_route(*reply));
                        self.guard.on_route(active, remote_prefill);
                    }
                },
                Effect::ResponseStarted(head) => self.guard.on_response_headers(head),
                Effect::FirstToken { observed } => self.guard.on_first_token(observed),
                Effect::ContentMissing(missing) => self.guard.on_content_missing(missing),
                Effect::ResponseStored(id) => {
                    self.guard
                        .on_response_stored(self.config.pipeline.dispatcher(), &id);
                }
                Effect::ResponseChunk(chunk) => self.guard.on_response_chunk(&chunk),
                Effect::Completed => self.guard.on_completed(),
            }
        }
        Ok(())
    }

    /// Runs another prefill for a request that Envoy sends to another worker. Returns false if the
    /// request has failed. A disconnect of the client cancels it.
    async fn prefill_retry(
        &mut self,
        RetryAttempt {
            head,
            upstream,
            body,
            decision_tx,
        }: RetryAttempt,
    ) -> bool {
        let prefills = self.config.pipeline.prefill_planner();
        let input = PrefillInput {
            path: head.path.clone(),
            headers: prefills.worker_headers(&head),
            body,
            decode_endpoint: Some(upstream),
        };
        self.prefill_aborted = false;
        let decision = self
            .guard
            .prefill_retry(self.config.pipeline.dispatcher(), input)
            .await;
        let continues = !matches!(decision, RetryDecision::Abandoned);
        // If the attempt has ended by now, its reservations are released by drop.
        _ = decision_tx.send(decision);
        continues
    }

    /// Ends the exchange after its prefill has failed.
    async fn abort(&mut self, early: &mut VecDeque<RawProcessingRequest>) -> Result<(), StreamEnd> {
        let effects = self.exchange.on_abort(&reject::prefill_timeout());
        self.apply_effects(effects, early).await
    }

    /// Counts a body against the budget for as long as a reference to it exists. Bytes that the
    /// exchange buffers are counted already.
    fn retain_body(&mut self, body: RequestBody) -> RequestBody {
        let retain = |bytes: Bytes| {
            self.state
                .body_budget
                .retain(bytes, self.config.held_body_limit)
        };
        self.body_share
            .set(self.exchange.buffered_bytes(), usize::MAX);
        match body {
            body if self.exchange.buffered_bytes() > 0 => body,
            RequestBody::Whole(bytes) => {
                retain(bytes.clone()).map_or_else(|| over_budget_body(&bytes), RequestBody::Whole)
            }
            RequestBody::Truncated { received, length } => retain(received.clone()).map_or_else(
                || over_budget_body(&received),
                |received| RequestBody::Truncated { received, length },
            ),
            RequestBody::TooLarge { received, bytes } => retain(received.clone()).map_or_else(
                || over_budget_body(&received),
                |received| RequestBody::TooLarge { received, bytes },
            ),
            body => body,
        }
    }

    /// Chooses a route while reading the stream, so that a disconnect of the client cancels it.
    /// Returns `None` if Envoy began to respond itself.
    async fn route(
        &mut self,
        inbound: InboundRequest,
        early: &mut VecDeque<RawProcessingRequest>,
    ) -> Result<Option<RoutingOutcome>, StreamEnd> {
        let inbound = InboundRequest {
            body: self.retain_body(inbound.body),
            ..inbound
        };
        let pipeline = self.config.pipeline.clone();
        let (wait_tx, mut wait_rx) = oneshot::channel();
        let route = pipeline.route(inbound, move |wait| _ = wait_tx.send(wait));
        tokio::pin!(route);
        let mut has_extended_timeout = false;
        let mut early_bytes = 0;
        let mut half_closed = false;
        loop {
            let can_read_ahead =
                early.len() < MAX_READ_AHEAD && early_bytes < MAX_READ_AHEAD_BYTES && !half_closed;
            tokio::select! {
                biased;
                routed = &mut route => return Ok(Some(routed)),
                Ok(wait) = &mut wait_rx, if !has_extended_timeout => {
                    has_extended_timeout = true;
                    self.extend_timeout(wait).await;
                }
                message = self.state.receive_from(self.incoming.as_mut()), if can_read_ahead => {
                    // The replies to earlier messages are still due. If the client has
                    // disconnected, Envoy resets the stream afterwards, which drops the exchange.
                    let Some(message) = message? else {
                        half_closed = true;
                        continue;
                    };
                    early_bytes += body_bytes(&message);
                    early.push_back(message);
                    if early.back().is_some_and(is_response_start) {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Asks Envoy, once, to extend its message timeout beyond the maximum wait in the queue.
    async fn extend_timeout(&self, wait: Duration) {
        if let Some(Effect::Reply(reply)) = self.exchange.extend_timeout(wait + TIMEOUT_MARGIN) {
            self.replies.send(reply).await;
        }
    }
}

/// Returns the length and the model of a body that does not fit into the budget.
fn over_budget_body(body: &[u8]) -> RequestBody {
    RequestBody::OverBudget {
        bytes: body.len(),
        model: openai::read_model_from_prefix(body),
    }
}

fn body_bytes(wire: &RawProcessingRequest) -> usize {
    match &wire.part {
        Some(ProcessingPart::RequestBody(piece) | ProcessingPart::ResponseBody(piece)) => {
            piece.body.len()
        }
        _ => 0,
    }
}

fn is_response_start(wire: &RawProcessingRequest) -> bool {
    matches!(wire.part, Some(ProcessingPart::ResponseHeaders(_)))
}
