//! A complete decision in process, from a request body to a booked worker. It is compared with the
//! sum of its stages run alone: JSON parsed into borrowed strings, a hand-written template,
//! tokenization and hashing of the new part only, and the route of an already hashed prompt.

use std::borrow::Cow;
use std::collections::HashMap;

use bytes::Bytes;
use fastokens::Tokenizer;
use serde::Deserialize;
use warmroute_core::block::{BlockHashes, CacheSalt};
use xxhash_rust::xxh3::xxh3_128;

use super::LimitRun;
use super::bed::{BLOCK, DecisionPipeline};
use super::chats::{body, encoder, fast_library, messages, render_by_hand};
use warmroute_testbed::comparison::{ComparedMeasure, measure_cpu};

const RANKS: u32 = 64;
/// Marks the end of a part of a prompt that can be tokenized separately.
const END: &str = "<|im_end|>";

/// The minimal parsed request.
#[derive(Deserialize)]
struct MinimalChat<'b> {
    #[serde(borrow)]
    messages: Vec<MinimalMessage<'b>>,
}

#[derive(Deserialize)]
struct MinimalMessage<'b> {
    role: &'b str,
    #[serde(borrow)]
    content: Cow<'b, str>,
}

pub(super) fn measure(run: &mut LimitRun) {
    for (name, count, bytes) in [("4k tokens", 20, 800), ("32k tokens", 50, 2600)] {
        let names = ["cold", "warm"].map(|state| format!("whole decision, {name}, {state}"));
        if names.iter().any(|name| run.wants(name)) {
            let mut staged = StagedDecision::new();
            let rounds: Vec<_> = (0..=run.rounds)
                .map(|chat| staged.measure_chat(chat, count, bytes))
                .collect();
            let column =
                |of: fn(&DecisionTimes) -> f64| rounds[1..].iter().map(of).collect::<Vec<_>>();
            run.add(
                ComparedMeasure::new(&names[0], "µs", Some(1.15)),
                &column(|round| round.cold.stages),
                &column(|round| round.cold.warmroute),
            );
            run.add(
                ComparedMeasure::new(&names[1], "µs", Some(1.15)),
                &column(|round| round.warm.stages),
                &column(|round| round.warm.warmroute),
            );
        }
    }
}

/// Measurements of one chat: new, and with its next turn.
struct DecisionTimes {
    cold: SideTimes,
    warm: SideTimes,
}

/// Microseconds of one decision.
#[derive(Clone, Copy, Default)]
struct SideTimes {
    /// The separate stages.
    stages: f64,
    warmroute: f64,
}

/// Warmroute and the state of the separate stages.
struct StagedDecision {
    pipeline: DecisionPipeline,
    library: Tokenizer,
    /// Tokens of each message, which is the minimum to cache.
    known: HashMap<u128, Vec<u32>>,
}

impl StagedDecision {
    fn new() -> Self {
        Self {
            pipeline: DecisionPipeline::new(encoder(1 << 30), RANKS),
            library: fast_library(),
            known: HashMap::new(),
        }
    }

    /// Measures a new chat and then its next turn.
    fn measure_chat(&mut self, chat: usize, count: usize, bytes: usize) -> DecisionTimes {
        let messages = messages(chat, count, bytes);
        let mut known = 0;
        let [cold, warm] = [count - 2, count].map(|end| {
            let body = Bytes::from(body(&messages[..end]));
            let decision = self.pipeline.decide(&body);
            let micros = decision.micros;
            let hashes = decision.into_hashes();
            let stages = self.measure_stages(&body, &hashes, known);
            self.pipeline.store(chat % RANKS as usize, &hashes);
            known = hashes.len();
            SideTimes {
                stages,
                warmroute: micros,
            }
        });
        DecisionTimes { cold, warm }
    }

    /// Returns the microseconds of all stages, each run alone, for the same request with `known`
    /// cached blocks.
    fn measure_stages(&mut self, body: &Bytes, hashes: &BlockHashes, known: usize) -> f64 {
        let mut chat = None;
        let json = measure_cpu(|| chat = serde_json::from_slice::<MinimalChat<'_>>(body).ok());
        let chat = chat.expect("a chat");
        let messages = || {
            chat.messages
                .iter()
                .map(|message| (message.role, &*message.content))
        };
        let mut text = String::new();
        let template = measure_cpu(|| text = render_by_hand(messages(), body.len()));
        let mut tokens = Vec::new();
        let tokenizer = measure_cpu(|| tokens = self.tokens(&text));
        assert_eq!(
            BlockHashes::from_tokens(&tokens, BLOCK, &CacheSalt::default()),
            *hashes,
            "the stages produce the same prompt"
        );
        let hash = measure_cpu(|| {
            BlockHashes::from_tokens(
                &tokens[known * BLOCK.tokens()..],
                BLOCK,
                &CacheSalt::default(),
            )
        });
        let mut placement = None;
        let route = measure_cpu(|| placement = Some(self.pipeline.route(hashes)));
        drop(placement);
        (json + template + tokenizer + hash + route) / 1e3
    }

    /// Returns the tokens of a prompt. Those of earlier messages are copied.
    fn tokens(&mut self, text: &str) -> Vec<u32> {
        let mut all = Vec::with_capacity(text.len() / 3);
        for piece in text.split_inclusive(END) {
            let key = xxh3_128(piece.as_bytes());
            match self.known.get(&key) {
                Some(ids) => all.extend_from_slice(ids),
                None => {
                    let ids = self.library.encode(piece).expect("its tokens");
                    all.extend_from_slice(&ids);
                    self.known.insert(key, ids);
                }
            }
        }
        all
    }
}
