//! Fetching a prompt's blocks from the engine that computed them: the listener where a rank lends, and the decode side
//! that comes, compares, waits as long as the transfer takes, and lets go. The real engines read one another's memory.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::Engine;
use super::cache::Keys;
use super::handover::{Source, count};
use super::http::Refusal;
use super::leases::Content;
use super::line::Line;
use super::rank::{Rank, Ticket};

/// How many signs of life go to the lender within a lease, as vLLM has it.
const SIGNS_PER_LEASE: u32 = 6;

/// Lends what a rank holds, for ever.
pub(crate) async fn lend(engine_id: String, rank: Arc<Rank>, listener: TcpListener) -> io::Result<()> {
    let mut talks = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await?;
        while talks.try_join_next().is_some() {}
        talks.spawn(talk(engine_id.clone(), rank.clone(), Line::new(stream)));
    }
}

async fn talk(engine_id: String, rank: Arc<Rank>, mut line: Line) {
    while let Ok(word) = line.hear().await {
        let answer = answer(&engine_id, &rank, &word);
        if line.say(&answer).await.is_err() {
            return;
        }
    }
}

fn answer(engine_id: &str, rank: &Rank, word: &Value) -> Value {
    let text = |key: &str| word[key].as_str().unwrap_or_default();
    if text("engine") != engine_id {
        return json!({"error": "another engine, or started anew"});
    }
    let request = text("request");
    match text("op") {
        "read" => {
            rank.prolong_lease(request);
            let Some(Content { blocks, tokens, keys }) = rank.leased(request) else {
                return json!({"error": "no such lease, or expired"});
            };
            json!({"blocks": blocks, "tokens": tokens, "keys": keys_told(&keys)})
        }
        "alive" => {
            rank.prolong_lease(request);
            json!({})
        }
        "done" if rank.end_lease(request) => json!({}),
        "done" => json!({"error": "the lease expired meanwhile"}),
        _ => json!({"error": "what?"}),
    }
}

fn keys_told(keys: &Keys) -> Value {
    json!({"lora": keys.lora.as_ref().map(|lora| &lora.name), "salt": keys.salt})
}

fn word(op: &str, source: &Source) -> Value {
    json!({"op": op, "engine": source.engine, "request": source.request})
}

/// Why there are no blocks.
#[derive(Clone, Debug, PartialEq)]
enum Failure {
    /// They belong to another prompt.
    Mismatch(String),
    /// They cannot be had.
    Lost(String),
}

/// A prompt and what separates its blocks from others with the same tokens.
#[derive(Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
    pub(crate) keys: Keys,
    /// What this engine would answer first, where the lender's answer can be compared with it.
    pub(crate) first: Option<u32>,
}

/// Waits for room, fetches what is missing, and lets the ticket go on. When the client leaves before, the lender is told
/// that nobody comes; afterwards the transfer goes on to its end, as on a real engine, and only then the lender is free.
pub(crate) async fn fetch(
    engine: Arc<Engine>,
    rank: Arc<Rank>,
    source: Source,
    prompt: Prompt,
    mut ticket: Ticket,
) -> Result<Ticket, Refusal> {
    let handover = &engine.config.handover;
    let mut unclaimed = Unclaimed(Some(source));
    let blocks = tokio::select! {
        blocks = ticket.room() => blocks,
        () = unclaimed.show_life(handover.kv_lease / SIGNS_PER_LEASE) => 0,
    };
    let Some(source) = unclaimed.0.take() else { return Ok(ticket) };
    let begun = Instant::now();
    let (patience, takes) = (handover.kv_load_timeout, rank.pace.transfer(blocks));
    let pulling = {
        let (engine, source) = (engine.clone(), source.clone());
        async move {
            let pulled = pull(&source, &prompt, patience, takes).await;
            let counts = &engine.counts;
            match pulled {
                Ok(()) => count(&counts.kv_transfers),
                Err(Failure::Mismatch(_)) => count(&counts.kv_mismatches),
                Err(Failure::Lost(_)) => {}
            }
            pulled
        }
    };
    let pulled = tokio::spawn(pulling).await.unwrap_or_else(|error| Err(Failure::Lost(error.to_string())));
    match pulled {
        Ok(()) => {
            ticket.received();
            Ok(ticket)
        }
        Err(Failure::Mismatch(why)) => Err(Refusal::failed(format!("KV mismatch of {}: {why}", source.request))),
        Err(Failure::Lost(why)) => {
            sleep_until(begun + patience).await;
            Err(Refusal::failed(format!("KV load of {} failed: {why}", source.request)))
        }
    }
}

async fn pull(source: &Source, prompt: &Prompt, patience: Duration, takes: Duration) -> Result<(), Failure> {
    let lost = |error: io::Error| Failure::Lost(error.to_string());
    let late = |_| Failure::Lost("no answer in time".into());
    let begin = async {
        let mut line = Line::connect(&format!("{}:{}", source.host, source.port)).await?;
        line.say(&word("read", source)).await?;
        let content = line.hear().await?;
        io::Result::Ok((line, content))
    };
    let (mut line, content) = timeout(patience, begin).await.map_err(late)?.map_err(lost)?;
    if let Some(error) = content["error"].as_str() {
        return Err(Failure::Lost(error.to_owned()));
    }
    let compared = compare(source, prompt, &content);
    if compared.is_ok() {
        sleep(takes).await;
    }
    let end = async {
        line.say(&word("done", source)).await?;
        line.hear().await
    };
    let answer = timeout(patience, end).await.map_err(late)?.map_err(lost)?;
    compared?;
    match answer["error"].as_str() {
        Some(error) => Err(Failure::Lost(error.to_owned())),
        None => Ok(()),
    }
}

/// Whether the blocks are this prompt's: what no real engine asks.
fn compare(source: &Source, prompt: &Prompt, content: &Value) -> Result<(), Failure> {
    let mismatch = |why: String| Err(Failure::Mismatch(why));
    if content["blocks"] != json!(source.blocks) {
        return mismatch("the lease is of other blocks".into());
    }
    if content["keys"] != keys_told(&prompt.keys) {
        return mismatch("the blocks are of another adapter or cache salt".into());
    }
    if source.first.zip(prompt.first).is_some_and(|(theirs, ours)| theirs != ours) {
        return mismatch("first_gen_tokens are another answer's".into());
    }
    let Some(theirs) = content["tokens"].as_array() else { return mismatch("no tokens".into()) };
    let same = theirs.iter().zip(&prompt.tokens).take_while(|(theirs, ours)| **theirs == json!(ours)).count();
    match same == prompt.tokens.len() {
        true => Ok(()),
        false => mismatch(format!(
            "only the first {same} of {} tokens are those of the blocks, which hold {}",
            prompt.tokens.len(),
            theirs.len()
        )),
    }
}

/// A prompt that nobody came for yet. Dropped, it tells the lender that nobody will.
struct Unclaimed(Option<Source>);

impl Unclaimed {
    async fn show_life(&self, every: Duration) {
        loop {
            sleep(every).await;
            if let Some(source) = &self.0 {
                // One sign that does not arrive is what there are several for.
                timeout(every, send("alive", source)).await.ok();
            }
        }
    }
}

async fn send(op: &str, source: &Source) -> io::Result<Value> {
    let mut line = Line::connect(&format!("{}:{}", source.host, source.port)).await?;
    line.say(&word(op, source)).await?;
    line.hear().await
}

impl Drop for Unclaimed {
    fn drop(&mut self) {
        let Some(source) = self.0.take() else { return };
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { send("done", &source).await });
        }
    }
}
