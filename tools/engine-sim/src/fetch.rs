//! Transfer of a prompt's blocks from the engine that computed them. This module has the listener
//! that serves the leased blocks of a rank. It also has the decode side, which connects, waits for
//! the simulated transfer and reads the current contents. Real engines read remote memory, and vLLM
//! reads by block number. Neither side checks whether the blocks are still leased to this request
//! and still have its contents. The simulator does not reject such reads either. It checks and
//! counts them, and generates different text for wrong contents. It is more lenient in one respect.
//! A real decode engine also caches wrong blocks under the prompt's hashes, and later prompts with
//! the same prefix hit them. Here only the request that fetched them gets a wrong answer.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::SimEngine;
use super::cache::{BlockContent, BlockKeys};
use super::disaggregation::{KvLoadFailurePolicy, KvSource, TransferCounters, increment};
use super::error::OpenAiError;
use super::json_connection::{self, JsonConnection};
use super::kv_origin::{KvOrigin, WorstOrigin};
use super::rank::{EngineRank, SequenceHandle};

/// Number of heartbeats to the prefill engine within one lease, as in vLLM.
const HEARTBEATS_PER_LEASE: u32 = 6;

/// A token outside every vocabulary. Text generated from it matches no real prompt.
const INVALID_TOKEN: u32 = u32::MAX;

/// Serves the blocks of a rank until the task is dropped.
pub(crate) async fn serve_blocks(
    engine_id: String,
    rank: Arc<EngineRank>,
    listener: TcpListener,
) -> io::Result<()> {
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await?;
        while connections.try_join_next().is_some() {}
        let connection = JsonConnection::new(stream);
        connections.spawn(serve_connection(
            engine_id.clone(),
            rank.clone(),
            connection,
        ));
    }
}

async fn serve_connection(
    engine_id: String,
    rank: Arc<EngineRank>,
    mut connection: JsonConnection,
) {
    while let Ok(message) = connection.receive().await {
        let reply = handle_message(&engine_id, &rank, &message);
        if connection.send(&reply).await.is_err() {
            return;
        }
    }
}

fn handle_message(engine_id: &str, rank: &EngineRank, message: &Value) -> Value {
    let text = |key: &str| message[key].as_str().unwrap_or_default();
    if text("engine") != engine_id {
        return json!({"error": "engine id mismatch: another engine, or a restart"});
    }
    let request = text("request");
    // Without block numbers, the rank resolves the blocks by the lease name.
    let blocks: Option<Vec<usize>> = serde_json::from_value(message["blocks"].clone()).ok();
    match text("op") {
        "begin" | "take" if blocks.is_none() && !rank.has_lease(request) => {
            json!({"error": "no such request, or expired"})
        }
        "begin" | "alive" => {
            rank.extend_lease(request);
            json!({})
        }
        "take" => {
            let written = rank.read_blocks(request, blocks);
            let was_kept = rank.end_lease(request);
            json!({"written": written, "was_kept": was_kept})
        }
        "done" => json!({"was_kept": rank.end_lease(request)}),
        _ => json!({"error": "unknown op"}),
    }
}

fn side_channel_message(op: &str, source: &KvSource) -> Value {
    json!({"op": op, "engine": source.engine, "request": source.request, "blocks": source.blocks})
}

/// A prompt and the keys that separate its blocks from others with the same tokens.
#[derive(Debug)]
pub(crate) struct ExpectedPrompt {
    pub(crate) tokens: Vec<u32>,
    pub(crate) keys: BlockKeys,
    /// First token that this engine would generate, if it can be compared with that of the prefill
    /// engine.
    pub(crate) first: Option<u32>,
    /// Index of the choice and the length of its answer.
    pub(crate) choice: usize,
    pub(crate) answer_len: usize,
}

/// Result of a transfer.
#[derive(Debug)]
struct FetchedBlocks {
    /// The tokens of the received keys and values, if they belong to another prompt.
    wrong_tokens: Option<Vec<u32>>,
    /// True if the prefill engine still held the lease for this request.
    was_leased: bool,
}

/// Waits for free blocks, fetches the missing ones and resumes the sequence. If the client
/// disconnects before the transfer begins, the prefill engine is notified that the blocks are not
/// needed. A transfer that has begun runs to its end, as on a real engine, and then the lease ends.
pub(crate) async fn fetch(
    engine: Arc<SimEngine>,
    source: KvSource,
    prompt: ExpectedPrompt,
    mut handle: SequenceHandle,
    worst_origin: WorstOrigin,
) -> Result<SequenceHandle, OpenAiError> {
    let disaggregation = &engine.config.disaggregation;
    let mut pending = PendingFetch(Some(source));
    let blocks = tokio::select! {
        blocks = handle.allocated_blocks() => blocks,
        () = pending.send_heartbeats(disaggregation.kv_lease / HEARTBEATS_PER_LEASE) => 0,
    };
    let Some(source) = pending.0.take() else {
        return Ok(handle);
    };
    let started_at = Instant::now();
    let load_timeout = disaggregation.kv_load_timeout;
    let transfer = BlockTransfer {
        duration: handle.transfer_time(blocks),
        load_timeout,
        source: source.clone(),
        blocks,
        block_size: engine.config.capacity.block_size,
    };
    let choice = prompt.choice;
    let len = prompt.answer_len;
    let pull = {
        let engine = engine.clone();
        async move {
            let pulled = transfer.pull(&prompt).await;
            if let Ok(fetched) = &pulled {
                fetched.count(&engine.transfer_counters);
            }
            pulled
        }
    };
    let pulled = tokio::spawn(pull)
        .await
        .unwrap_or_else(|error| Err(error.to_string()));
    match pulled {
        Ok(fetched) => {
            worst_origin.record(fetched.origin());
            match fetched.wrong_tokens {
                None => handle.received(),
                Some(tokens) => handle.received_wrong(engine.tokenizer.answer(
                    &[tokens, vec![INVALID_TOKEN]].concat(),
                    choice,
                    len,
                )),
            }
            Ok(handle)
        }
        Err(reason) => {
            sleep_until(started_at + load_timeout).await;
            if disaggregation.load_failure_policy() == KvLoadFailurePolicy::Fail {
                return Err(OpenAiError::internal(format!(
                    "KV load of {} failed: {reason}",
                    source.request
                )));
            }
            handle.recompute();
            Ok(handle)
        }
    }
}

/// Fetches by a request id that collides with another prompt's id. The expected number of blocks
/// arrives, but with wrong contents. The intended blocks stay leased until the lease expires.
pub(crate) async fn fetch_collided(
    engine: Arc<SimEngine>,
    prompt: ExpectedPrompt,
    mut handle: SequenceHandle,
    worst_origin: WorstOrigin,
) -> Result<SequenceHandle, OpenAiError> {
    let blocks = handle.allocated_blocks().await;
    sleep(handle.transfer_time(blocks)).await;
    let fetched = FetchedBlocks {
        wrong_tokens: Some(Vec::new()),
        was_leased: true,
    };
    fetched.count(&engine.transfer_counters);
    worst_origin.record(fetched.origin());
    handle.received_wrong(engine.tokenizer.answer(
        &[INVALID_TOKEN],
        prompt.choice,
        prompt.answer_len,
    ));
    Ok(handle)
}

impl FetchedBlocks {
    fn origin(&self) -> KvOrigin {
        match (&self.wrong_tokens, self.was_leased) {
            (Some(_), _) => KvOrigin::Mismatch,
            (None, false) => KvOrigin::Stale,
            (None, true) => KvOrigin::Fetched,
        }
    }

    fn count(&self, counters: &TransferCounters) {
        increment(if self.wrong_tokens.is_some() {
            &counters.kv_mismatches
        } else {
            &counters.kv_transfers
        });
        if !self.was_leased {
            increment(&counters.kv_stale_reads);
        }
    }
}

/// Parameters of one transfer.
struct BlockTransfer {
    source: KvSource,
    /// Number of missing blocks; they are the last ones of the prompt.
    blocks: usize,
    block_size: usize,
    /// Simulated duration of the transfer.
    duration: Duration,
    /// Limit for each reply of the prefill engine.
    load_timeout: Duration,
}

impl BlockTransfer {
    /// Returns the received contents, or the reason why the transfer failed.
    async fn pull(&self, prompt: &ExpectedPrompt) -> Result<FetchedBlocks, String> {
        let source = self.missing_blocks()?;
        let timed_out = |_| "no answer in time".to_owned();
        let begin = async {
            let address = json_connection::host_port(&source.host, source.port);
            let mut connection = JsonConnection::connect(&address).await?;
            connection
                .call(&side_channel_message("begin", &source))
                .await?;
            io::Result::Ok(connection)
        };
        let mut connection = timeout(self.load_timeout, begin)
            .await
            .map_err(timed_out)?
            .map_err(|error| error.to_string())?;
        sleep(self.duration).await;
        let take = side_channel_message("take", &source);
        let reply = timeout(self.load_timeout, connection.call(&take))
            .await
            .map_err(timed_out)?
            .map_err(|error| error.to_string())?;
        self.verify(prompt, &reply)
    }

    /// Restricts the source to the missing blocks. As in vLLM, they are the last ones of the lease.
    fn missing_blocks(&self) -> Result<KvSource, String> {
        let Some(numbers) = &self.source.blocks else {
            return Ok(self.source.clone());
        };
        let cached = numbers
            .len()
            .checked_sub(self.blocks)
            .ok_or("the lease has fewer blocks than needed")?;
        Ok(KvSource {
            blocks: Some(numbers[cached..].to_vec()),
            ..self.source.clone()
        })
    }

    /// Checks whether the blocks belong to this prompt. Real engines do not check it.
    fn verify(&self, prompt: &ExpectedPrompt, reply: &Value) -> Result<FetchedBlocks, String> {
        let found: Vec<Option<BlockContent>> =
            serde_json::from_value(reply["written"].clone()).map_err(|error| error.to_string())?;
        let found = &found[found.len().saturating_sub(self.blocks)..];
        if self.source.blocks.is_some() && found.contains(&None) {
            return Err("the prefill engine has no such blocks".into());
        }
        let needed = BlockContent::of_prompt(&prompt.tokens, &prompt.keys, self.block_size);
        let needed = &needed[needed.len() - self.blocks.min(needed.len())..];
        let has_right_blocks = found.len() == needed.len()
            && found
                .iter()
                .zip(needed)
                .all(|(found, needed)| found.as_ref().is_some_and(|found| found.can_serve(needed)));
        let has_right_first_token = self
            .source
            .first
            .zip(prompt.first)
            .is_none_or(|(theirs, ours)| theirs == ours);
        let tokens = || {
            found
                .iter()
                .flatten()
                .flat_map(BlockContent::tokens)
                .copied()
                .collect()
        };
        Ok(FetchedBlocks {
            wrong_tokens: (!(has_right_blocks && has_right_first_token)).then(tokens),
            was_leased: reply["was_kept"] == json!(true),
        })
    }
}

/// A prompt that has not been fetched yet. Dropping it ends the lease on the prefill engine.
struct PendingFetch(Option<KvSource>);

impl PendingFetch {
    async fn send_heartbeats(&self, interval: Duration) {
        loop {
            sleep(interval).await;
            if let Some(source) = &self.0 {
                // A lost heartbeat is tolerated, because several are sent per lease.
                timeout(interval, send("alive", source)).await.ok();
            }
        }
    }
}

async fn send(op: &str, source: &KvSource) -> io::Result<Value> {
    JsonConnection::connect(&json_connection::host_port(&source.host, source.port))
        .await?
        .call(&side_channel_message(op, source))
        .await
}

impl Drop for PendingFetch {
    fn drop(&mut self) {
        let Some(source) = self.0.take() else { return };
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { send("done", &source).await });
        }
    }
}
