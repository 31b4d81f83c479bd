//! Retries by Envoy. An upstream HTTP filter reports each attempt after the first. If another
//! worker did the prefill, the body of the first attempt is useless for the second, so the exchange
//! provides a new body. All other attempts continue unchanged and without delay.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dashmap::DashMap;
use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;
use tokio::sync::{mpsc, oneshot};
use warmroute_core::worker::WorkerEndpoint;

use super::header_changes::HeaderChanges;
use super::headers::RequestHead;
use super::message::{BodyMode, ExchangeMessage, IncomingMessage};
use super::mutation::{self, MessageKind};
use super::wire::BodyPiece;
use crate::prefill::{StrippedBody, strip_kv_fields};

/// Margin of the extended message timeout over the maximum duration of another prefill.
const TIMEOUT_MARGIN: Duration = Duration::from_secs(1);

/// One attempt after the first.
#[derive(Debug)]
pub(super) struct RetryAttempt {
    /// The request head.
    pub(super) head: RequestHead,
    /// The endpoint that receives the attempt.
    pub(super) upstream: WorkerEndpoint,
    /// The request body.
    pub(super) body: Bytes,
    /// Channel for the decision.
    pub(super) decision_tx: oneshot::Sender<RetryDecision>,
}

/// Decision about an attempt.
#[derive(Debug)]
pub(super) enum RetryDecision {
    /// The attempt continues unchanged.
    Unchanged,
    /// The attempt continues with this body.
    ReplaceBody(Bytes),
    /// The request has failed, and the client has received an error.
    Abandoned,
}

/// The exchanges that handle their retries.
#[derive(Debug, Default)]
pub(super) struct RetryRegistry {
    listeners: DashMap<String, (Duration, mpsc::Sender<RetryAttempt>)>,
}

/// One registered exchange. Deregistered by drop.
#[derive(Debug)]
pub(super) struct RetryListener {
    exchange_key: String,
    attempts: mpsc::Receiver<RetryAttempt>,
    registry: Arc<RetryRegistry>,
}

impl RetryRegistry {
    /// Registers an exchange under a unique key. `max_prefill_time` is the maximum duration of its
    /// decisions.
    pub(super) fn listen(
        self: &Arc<Self>,
        exchange_key: String,
        max_prefill_time: Duration,
    ) -> RetryListener {
        // Envoy makes one attempt at a time.
        let (attempt_tx, attempts) = mpsc::channel(1);
        self.listeners
            .insert(exchange_key.clone(), (max_prefill_time, attempt_tx));
        RetryListener {
            exchange_key,
            attempts,
            registry: self.clone(),
        }
    }

    /// Returns the maximum duration of a decision; `None` if no exchange is registered under this
    /// key.
    pub(super) fn max_prefill_time(&self, exchange_key: &str) -> Option<Duration> {
        Some(self.listeners.get(exchange_key)?.0)
    }

    /// Returns the decision of the exchange about an attempt.
    async fn decide(
        &self,
        exchange_key: &str,
        head: RequestHead,
        upstream: WorkerEndpoint,
        body: Bytes,
    ) -> RetryDecision {
        let listener = self.listeners.get(exchange_key);
        let Some(attempt_tx) = listener.map(|entry| entry.1.clone()) else {
            return RetryDecision::Unchanged;
        };
        let (decision_tx, decision_rx) = oneshot::channel();
        let attempt = RetryAttempt {
            head,
            upstream,
            body,
            decision_tx,
        };
        match attempt_tx.send(attempt).await {
            // A dropped channel means that the exchange has ended.
            Ok(()) => decision_rx.await.unwrap_or(RetryDecision::Abandoned),
            Err(_) => RetryDecision::Unchanged,
        }
    }
}

impl RetryListener {
    /// Returns the next attempt.
    pub(super) async fn next(&mut self) -> RetryAttempt {
        match self.attempts.recv().await {
            Some(next) => next,
            None => std::future::pending().await,
        }
    }
}

impl Drop for RetryListener {
    fn drop(&mut self) {
        self.registry.listeners.remove(&self.exchange_key);
    }
}

/// One stream of the filter.
#[derive(Debug)]
pub(super) struct RetryFilter {
    /// Whether clients may set KV transfer fields.
    trusts_clients: bool,
    owner: RetryOwner,
    max_prefill_time: Duration,
}

/// Exchange to which an attempt belongs.
#[derive(Debug)]
enum RetryOwner {
    /// No request headers with an exchange key were received.
    Unknown,
    /// A registered exchange, with the request head and the endpoint of the attempt.
    Registered(String, RequestHead, WorkerEndpoint),
    /// An exchange that has ended or was never registered.
    Unregistered,
}

/// The reply to Envoy. The reply to the last message of an attempt has an outcome.
pub(super) struct RetryReply {
    pub(super) reply: Option<ProcessingResponse>,
    pub(super) outcome: Option<&'static str>,
}

impl RetryFilter {
    pub(super) fn new(trusts_clients: bool) -> Self {
        Self {
            trusts_clients,
            owner: RetryOwner::Unknown,
            max_prefill_time: Duration::ZERO,
        }
    }

    /// Returns the reply that extends Envoy's message timeout, if the handling of the message may
    /// take long.
    pub(super) fn extend_timeout(&self, incoming: &IncomingMessage) -> Option<ProcessingResponse> {
        let is_registered = matches!(incoming.message, Some(ExchangeMessage::RequestBody(_)))
            && matches!(self.owner, RetryOwner::Registered(..));
        (is_registered && !self.max_prefill_time.is_zero())
            .then(|| mutation::extend_timeout(self.max_prefill_time + TIMEOUT_MARGIN))
    }

    /// Handles one message.
    pub(super) async fn on_message(
        &mut self,
        retries: &RetryRegistry,
        incoming: IncomingMessage,
    ) -> RetryReply {
        let IncomingMessage {
            modes,
            metadata,
            message,
        } = incoming;
        match message {
            Some(ExchangeMessage::RequestHeaders {
                head,
                end_of_stream,
            }) => {
                let mode = modes.map_or(BodyMode::Buffered, |modes| modes.request);
                let has_whole_body = mode == BodyMode::Buffered && !end_of_stream;
                let Some(exchange_key) = metadata.exchange_key.filter(|_| has_whole_body) else {
                    return RetryReply::unchanged(MessageKind::RequestHeaders);
                };
                self.owner = match (retries.max_prefill_time(&exchange_key), metadata.upstream) {
                    (Some(max_prefill_time), Some(upstream)) => {
                        self.max_prefill_time = max_prefill_time;
                        RetryOwner::Registered(exchange_key, head, upstream)
                    }
                    _ => RetryOwner::Unregistered,
                };
                RetryReply {
                    outcome: None,
                    ..RetryReply::unchanged(MessageKind::RequestHeaders)
                }
            }
            Some(ExchangeMessage::RequestBody(BodyPiece { body, .. })) => {
                self.on_body(retries, body).await
            }
            Some(ExchangeMessage::RequestTrailers) => RetryReply {
                reply: Some(mutation::request_trailers()),
                outcome: Some("unchanged"),
            },
            Some(_) => RetryReply {
                reply: None,
                outcome: Some("unchanged"),
            },
            None => RetryReply {
                reply: None,
                outcome: None,
            },
        }
    }

    async fn on_body(&mut self, retries: &RetryRegistry, body: Bytes) -> RetryReply {
        let decision = match std::mem::replace(&mut self.owner, RetryOwner::Unknown) {
            RetryOwner::Unknown => return RetryReply::unchanged(MessageKind::RequestBody),
            RetryOwner::Registered(exchange_key, head, upstream) => {
                retries
                    .decide(&exchange_key, head, upstream, body.clone())
                    .await
            }
            RetryOwner::Unregistered => RetryDecision::Unchanged,
        };
        let (body, outcome) = match decision {
            // KV transfer fields of an exchange that has ended must not be used again.
            RetryDecision::Unchanged => match strip_kv_fields(&body) {
                StrippedBody::Changed(body) if !self.trusts_clients => (body, "handoff_removed"),
                _ => return RetryReply::unchanged(MessageKind::RequestBody),
            },
            // No engine accepts this body, so the KV of another request is not transferred.
            RetryDecision::Abandoned => (Bytes::from_static(b"{}"), "no_worker"),
            RetryDecision::ReplaceBody(body) => (body, "prefilled_again"),
        };
        let mut changes = HeaderChanges::default();
        changes.set("content-length", body.len().to_string());
        let reply = mutation::continue_with(MessageKind::RequestBody, changes);
        RetryReply {
            reply: Some(mutation::with_body(reply, body.into())),
            outcome: Some(outcome),
        }
    }
}

impl RetryReply {
    /// Returns the reply that lets the attempt continue unchanged.
    fn unchanged(to: MessageKind) -> Self {
        Self {
            reply: Some(mutation::continue_with(to, HeaderChanges::default())),
            outcome: Some("unchanged"),
        }
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
    use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;

    use super::*;
    use crate::ext_proc::metadata::GatewayMetadata;

    fn incoming(message: ExchangeMessage, exchange: Option<&str>) -> IncomingMessage {
        let to = Some(WorkerEndpoint("127.0.0.1:1".parse().unwrap()));
        IncomingMessage {
            modes: None,
            metadata: GatewayMetadata {
                exchange_key: exchange.map(str::to_owned),
                upstream: to,
                ..GatewayMetadata::default()
            },
            message: Some(message),
        }
    }

    fn sent_body(reply: &RetryReply) -> Option<&[u8]> {
        let Some(Response::RequestBody(body)) = reply.reply.as_ref()?.response.as_ref() else {
            return None;
        };
        match body
            .response
            .as_ref()?
            .body_mutation
            .as_ref()?
            .mutation
            .as_ref()?
        {
            Mutation::Body(body) => Some(body),
            _ => None,
        }
    }

    const BODY_WITH_KV_FIELDS: &str = r#"{"kv_transfer_params":{"remote_host":"x"},"prompt":"y"}"#;

    /// Returns the outcome for an attempt whose body has KV transfer fields.
    async fn outcome_of_attempt(
        retries: &RetryRegistry,
        exchange: Option<&str>,
        trusts_clients: bool,
    ) -> (Option<Vec<u8>>, Option<&'static str>) {
        let mut retry = RetryFilter::new(trusts_clients);
        let head = ExchangeMessage::RequestHeaders {
            head: RequestHead::default(),
            end_of_stream: false,
        };
        let first = retry.on_message(retries, incoming(head, exchange)).await;
        if first.outcome.is_some() {
            return (None, first.outcome);
        }
        let body = ExchangeMessage::RequestBody(BodyPiece::new(BODY_WITH_KV_FIELDS, true));
        let reply = retry.on_message(retries, incoming(body, exchange)).await;
        (sent_body(&reply).map(<[u8]>::to_vec), reply.outcome)
    }

    #[tokio::test]
    async fn kv_fields_of_ended_exchange_are_removed() {
        let retries = Arc::new(RetryRegistry::default());
        let stripped = br#"{"kv_transfer_params":null,"prompt":"y"}"#.to_vec();
        assert_eq!(
            outcome_of_attempt(&retries, Some("gone"), false).await,
            (Some(stripped), Some("handoff_removed"))
        );
        assert_eq!(
            outcome_of_attempt(&retries, Some("gone"), true).await,
            (None, Some("unchanged"))
        );
        assert_eq!(
            outcome_of_attempt(&retries, None, false).await,
            (None, Some("unchanged"))
        );
    }

    #[tokio::test]
    async fn exchange_decides_about_its_retry() {
        let retries = Arc::new(RetryRegistry::default());
        for (decision, expected) in [
            (
                RetryDecision::ReplaceBody("{\"new\":1}".into()),
                (Some(b"{\"new\":1}".to_vec()), Some("prefilled_again")),
            ),
            (
                RetryDecision::Abandoned,
                (Some(b"{}".to_vec()), Some("no_worker")),
            ),
        ] {
            let mut listener = retries.listen("a".to_owned(), Duration::ZERO);
            let decides = async {
                let RetryAttempt {
                    body, decision_tx, ..
                } = listener.next().await;
                assert_eq!(&body[..], BODY_WITH_KV_FIELDS.as_bytes());
                decision_tx.send(decision).unwrap();
            };
            let (outcome, ()) =
                tokio::join!(outcome_of_attempt(&retries, Some("a"), false), decides);
            assert_eq!(outcome, expected);
        }
        let dropped = retries.listen("b".to_owned(), Duration::ZERO);
        drop(dropped);
        assert!(retries.max_prefill_time("b").is_none());
    }
}
