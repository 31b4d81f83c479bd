//! Canary prompts.

use std::time::Duration;

use bytes::Bytes;
use serde_json::json;
use warmroute_core::worker::{DpRank, Worker};
use warmroute_doctor::engine::facts::{CanaryReply, EngineReply};
use warmroute_engines::engine_client::{EngineError, EngineUrl};
use warmroute_engines::kv_events::event_probe::{EventProbe, ProbedBatch};
use warmroute_engines::kv_events::wire::EngineEvent;
use warmroute_tokens::openai::{self, ApiKind};

use super::FactCollector;

/// Time until a ZeroMQ subscription takes effect.
const SUBSCRIPTION_DELAY: Duration = Duration::from_millis(300);
/// Maximum number of canaries sent until the blocks of one arrive.
const MAX_CANARIES: u32 = 2;
/// Number of blocks of a canary.
const CANARY_BLOCKS: usize = 4;
/// Words of a canary, one token each for most tokenizers.
const CANARY_WORDS: [&str; 16] = [
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "red", "blue",
    "green", "north", "south", "west",
];

impl FactCollector<'_> {
    /// Sends a canary and receives its events. If none arrive, sends another canary. Finally
    /// repeats the last canary to find out whether it is cached.
    pub(super) async fn send_canary(
        &self,
        engine: &EngineUrl,
        worker: &Worker,
        rank: Option<DpRank>,
        mut socket: Option<&mut EventProbe>,
    ) -> (EngineReply<CanaryReply>, Vec<ProbedBatch>) {
        let client = self.client.with_headers(self.canary_headers(worker, rank));
        let mut received = Vec::new();
        let max_attempts = if socket.is_some() { MAX_CANARIES } else { 1 };
        for attempt in 1..=max_attempts {
            let (body, tokens) = self.new_prompt(engine, worker).await;
            if let Some(socket) = socket.as_deref_mut() {
                received.extend(receive_until(socket, SUBSCRIPTION_DELAY, |_| false).await);
            }
            let first = match client.complete(engine, body.clone(), self.timeout).await {
                Ok(usage) => usage,
                Err(error) => return (Err(error), received),
            };
            let mut new_messages = Vec::new();
            if let Some(socket) = socket.as_deref_mut() {
                let is_match = |message: &ProbedBatch| {
                    tokens
                        .as_ref()
                        .is_none_or(|tokens| stores_prefix_of(message, tokens))
                };
                new_messages = receive_until(socket, self.timeout / max_attempts, is_match).await;
            }
            let has_arrived = !new_messages.is_empty();
            received.extend(new_messages);
            if has_arrived || attempt == max_attempts {
                let second = client.complete(engine, body, self.timeout).await;
                let cached = second.as_ref().ok().and_then(|usage| usage.cached_tokens);
                return (
                    Ok(CanaryReply {
                        tokens,
                        prompt_tokens: first.prompt_tokens,
                        cached,
                    }),
                    received,
                );
            }
        }
        (Err(EngineError::Timeout), received)
    }

    /// Returns a new random prompt with its tokens, from warmroute or else from the engine.
    pub(super) async fn new_prompt(
        &self,
        engine: &EngineUrl,
        worker: &Worker,
    ) -> (Bytes, Option<Vec<u32>>) {
        let words: Vec<&str> = (0..worker.block_size.tokens() * CANARY_BLOCKS + 8)
            .map(|_| CANARY_WORDS[rand::random_range(0..CANARY_WORDS.len())])
            .collect();
        let text = format!(
            "A canary of warmroute, {:016x}: {}",
            rand::random::<u64>(),
            words.join(" ")
        );
        let model = worker.model.as_str();
        let body =
            json!({"model": model, "prompt": text, "max_tokens": 1, "temperature": 0}).to_string();
        let encoder = self
            .models
            .get(&worker.model)
            .and_then(|model| model.encoder.as_ref());
        let ours = encoder.and_then(|encoder| {
            let request = openai::parse(ApiKind::Completions, body.as_bytes()).ok()?;
            encoder.encode(&request).ok()?.prompts.into_iter().next()
        });
        let tokens = match ours {
            Some(tokens) => Some(tokens),
            None => {
                let request = json!({"model": model, "prompt": text}).to_string();
                let response = self
                    .client
                    .tokenize(engine, request.into(), self.client.deadline())
                    .await;
                response.ok().map(|response| response.tokens)
            }
        };
        (body.into(), tokens)
    }
}

/// Receives messages until one satisfies `is_match`, or until the timeout.
async fn receive_until(
    socket: &mut EventProbe,
    timeout: Duration,
    is_match: impl Fn(&ProbedBatch) -> bool,
) -> Vec<ProbedBatch> {
    let mut received = Vec::new();
    let receiving = async {
        while let Some(message) = socket.next_message().await {
            let is_last = is_match(&message);
            received.push(message);
            if is_last {
                return;
            }
        }
        // The connection is lost.
    };
    _ = tokio::time::timeout(timeout, receiving).await;
    received
}

/// Returns whether a message stores a prefix of this prompt.
fn stores_prefix_of(received: &ProbedBatch, tokens: &[u32]) -> bool {
    let Ok(batch) = &received.batch else {
        return false;
    };
    batch.events.iter().any(|event| match event {
        EngineEvent::Stored(stored) => {
            !stored.tokens.ids.is_empty() && tokens.starts_with(&stored.tokens.ids)
        }
        _ => false,
    })
}
