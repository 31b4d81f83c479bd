//! Fetching a prompt's blocks from the engine that computed them: the listener where a rank lends, and the decode side
//! that comes, waits as long as the transfer takes, and takes what then lies there. The real engines read one another's
//! memory: vLLM by the numbers of blocks, and nobody asks whether they are still kept for this request, or whose keys and
//! values are in them. So these do not refuse either. But they look, count, and say other words where it went wrong.
//! One thing is kinder here: a real decode engine also keeps wrong blocks under the prompt's name, and later prompts that
//! begin alike hit them; here only the request that fetched them gets a wrong answer.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::Engine;
use super::cache::{Keys, Written};
use super::handover::{Counts, OnLoss, Source, count};
use super::http::Refusal;
use super::line::{self, Line};
use super::origin::{Origin, Worst};
use super::rank::{Rank, Ticket};

/// How many signs of life go to the lender within a lease, as vLLM has it.
const SIGNS_PER_LEASE: u32 = 6;

/// In no prompt: whatever is said to this is said to no prompt.
const NO_TOKEN: u32 = u32::MAX;

/// Lends what a rank holds, for ever.
pub(crate) async fn lend(
    engine_id: String,
    rank: Arc<Rank>,
    listener: TcpListener,
) -> io::Result<()> {
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
    // Without them the lender has to know what is meant by the name.
    let blocks: Option<Vec<usize>> = serde_json::from_value(word["blocks"].clone()).ok();
    match text("op") {
        "begin" | "take" if blocks.is_none() && !rank.lends(request) => {
            json!({"error": "no such request, or expired"})
        }
        "begin" | "alive" => {
            rank.prolong_lease(request);
            json!({})
        }
        "take" => {
            let (written, was_kept) = rank.take(request, blocks);
            json!({"written": written, "was_kept": was_kept})
        }
        "done" => json!({"was_kept": rank.end_lease(request)}),
        _ => json!({"error": "what?"}),
    }
}

fn word(op: &str, source: &Source) -> Value {
    json!({"op": op, "engine": source.engine, "request": source.request, "blocks": source.blocks})
}

/// A prompt and what separates its blocks from others with the same tokens.
#[derive(Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
    pub(crate) keys: Keys,
    /// What this engine would answer first, where the lender's answer can be compared with it.
    pub(crate) first: Option<u32>,
    /// Which of several answers is wanted, and how long.
    pub(crate) choice: usize,
    pub(crate) answer_len: usize,
}

/// What came.
#[derive(Debug)]
struct Loot {
    /// The tokens whose keys and values these are, if it is not the prompt.
    wrong: Option<Vec<u32>>,
    /// Whether the lender still kept them for this.
    was_kept: bool,
}

/// Waits for room, fetches what is missing, and lets the ticket go on. When the client leaves before, the lender is told
/// that nobody comes; afterwards the transfer goes on to its end, as on a real engine, and only then the lender is free.
pub(crate) async fn fetch(
    (engine, rank): (Arc<Engine>, Arc<Rank>),
    source: Source,
    prompt: Prompt,
    mut ticket: Ticket,
    worst: Worst,
) -> Result<Ticket, Refusal> {
    let handover = &engine.config.handover;
    let mut unclaimed = Unclaimed(Some(source));
    let blocks = tokio::select! {
        blocks = ticket.room() => blocks,
        () = unclaimed.show_life(handover.kv_lease / SIGNS_PER_LEASE) => 0,
    };
    let Some(source) = unclaimed.0.take() else {
        return Ok(ticket);
    };
    let begun = Instant::now();
    let (patience, takes) = (handover.kv_load_timeout, rank.pace.transfer(blocks));
    let transfer = Transfer {
        source: source.clone(),
        blocks,
        block_size: engine.config.capacity.block_size,
    };
    let (choice, len) = (prompt.choice, prompt.answer_len);
    let pulling = {
        let engine = engine.clone();
        async move {
            let pulled = transfer.pull(&prompt, patience, takes).await;
            if let Ok(loot) = &pulled {
                loot.count(&engine.counts);
            }
            pulled
        }
    };
    let pulled = tokio::spawn(pulling)
        .await
        .unwrap_or_else(|error| Err(error.to_string()));
    match pulled {
        Ok(loot) => {
            worst.note(loot.origin());
            match loot.wrong {
                None => ticket.received(),
                Some(of) => ticket.received_wrong(engine.tokens.answer(
                    &[of, vec![NO_TOKEN]].concat(),
                    choice,
                    len,
                )),
            }
            Ok(ticket)
        }
        Err(why) => {
            sleep_until(begun + patience).await;
            if handover.on_loss() == OnLoss::Fail {
                return Err(Refusal::failed(format!(
                    "KV load of {} failed: {why}",
                    source.request
                )));
            }
            ticket.recompute();
            Ok(ticket)
        }
    }
}

/// When the number that a prompt's blocks go by means somebody else's blocks: as many as were wanted come, and they are
/// wrong. Those that were meant stay where they are until their time is over.
pub(crate) async fn fetch_in_vain(
    (engine, rank): (Arc<Engine>, Arc<Rank>),
    prompt: Prompt,
    mut ticket: Ticket,
    worst: Worst,
) -> Result<Ticket, Refusal> {
    let blocks = ticket.room().await;
    sleep(rank.pace.transfer(blocks)).await;
    let loot = Loot {
        wrong: Some(Vec::new()),
        was_kept: true,
    };
    loot.count(&engine.counts);
    worst.note(loot.origin());
    ticket.received_wrong(
        engine
            .tokens
            .answer(&[NO_TOKEN], prompt.choice, prompt.answer_len),
    );
    Ok(ticket)
}

impl Loot {
    fn origin(&self) -> Origin {
        match (&self.wrong, self.was_kept) {
            (Some(_), _) => Origin::Mismatch,
            (None, false) => Origin::Stale,
            (None, true) => Origin::Fetched,
        }
    }

    fn count(&self, counts: &Counts) {
        count(if self.wrong.is_some() {
            &counts.kv_mismatches
        } else {
            &counts.kv_transfers
        });
        if !self.was_kept {
            count(&counts.kv_stale_reads);
        }
    }
}

/// What is to be fetched.
struct Transfer {
    source: Source,
    /// How many blocks are missing here: the last ones of the prompt.
    blocks: usize,
    block_size: usize,
}

impl Transfer {
    /// What came, or why nothing could be had.
    async fn pull(
        &self,
        prompt: &Prompt,
        patience: Duration,
        takes: Duration,
    ) -> Result<Loot, String> {
        let source = self.reduced()?;
        let late = |_| "no answer in time".to_owned();
        let begin = async {
            let mut line = Line::connect(&line::address(&source.host, source.port)).await?;
            line.ask(&word("begin", &source)).await?;
            io::Result::Ok(line)
        };
        let mut line = timeout(patience, begin)
            .await
            .map_err(late)?
            .map_err(|error| error.to_string())?;
        sleep(takes).await;
        let taken = timeout(patience, line.ask(&word("take", &source))).await;
        let taken = taken.map_err(late)?.map_err(|error| error.to_string())?;
        self.judge(prompt, &taken)
    }

    /// As vLLM, only the last ones of the lender's blocks are read: the others are here.
    fn reduced(&self) -> Result<Source, String> {
        let Some(numbers) = &self.source.blocks else {
            return Ok(self.source.clone());
        };
        let here = numbers
            .len()
            .checked_sub(self.blocks)
            .ok_or("the lender has fewer blocks than are needed")?;
        Ok(Source {
            blocks: Some(numbers[here..].to_vec()),
            ..self.source.clone()
        })
    }

    /// Whether the blocks are this prompt's: what no real engine asks.
    fn judge(&self, prompt: &Prompt, taken: &Value) -> Result<Loot, String> {
        let found: Vec<Option<Written>> =
            serde_json::from_value(taken["written"].clone()).map_err(|error| error.to_string())?;
        let found = &found[found.len().saturating_sub(self.blocks)..];
        if self.source.blocks.is_some() && found.contains(&None) {
            return Err("the lender has no such blocks".into());
        }
        let needed = Written::of_prompt(&prompt.tokens, &prompt.keys, self.block_size);
        let needed = &needed[needed.len() - self.blocks.min(needed.len())..];
        let serves = |(found, needed): (&Option<Written>, &Written)| {
            found.as_ref().is_some_and(|found| found.serves(needed))
        };
        let is_right = found.len() == needed.len() && found.iter().zip(needed).all(serves);
        let is_first = self
            .source
            .first
            .zip(prompt.first)
            .is_none_or(|(theirs, ours)| theirs == ours);
        let tokens = || {
            found
                .iter()
                .flatten()
                .flat_map(Written::tokens)
                .copied()
                .collect()
        };
        Ok(Loot {
            wrong: (!(is_right && is_first)).then(tokens),
            was_kept: taken["was_kept"] == json!(true),
        })
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
    Line::connect(&line::address(&source.host, source.port))
        .await?
        .ask(&word(op, source))
        .await
}

impl Drop for Unclaimed {
    fn drop(&mut self) {
        let Some(source) = self.0.take() else { return };
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { send("done", &source).await });
        }
    }
}
