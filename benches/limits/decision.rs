//! A whole decision in process, from the bytes of a body to a booked worker, beside the sum of its stages done alone: the
//! JSON parsed into borrowed texts, the template by hand, the tokenizer on what is new, the blocks of what is new, and the
//! route of a prompt that is hashed already.

use std::borrow::Cow;
use std::collections::HashMap;

use bytes::Bytes;
use fastokens::Tokenizer;
use serde::Deserialize;
use warmroute::block::{BlockHashes, Salt};
use xxhash_rust::xxh3::xxh3_128;

use super::Run;
use super::bed::{BLOCK, Bed};
use super::chats::{body, by_hand, encoder, fast_library, messages};
use super::duel::cpu;

const RANKS: u32 = 64;
/// Ends a piece of a prompt that can be tokenised for itself.
const END: &str = "<|im_end|>";

/// A request as the least that has to be read of it.
#[derive(Deserialize)]
struct Least<'b> {
    #[serde(borrow)]
    messages: Vec<LeastMessage<'b>>,
}

#[derive(Deserialize)]
struct LeastMessage<'b> {
    role: &'b str,
    #[serde(borrow)]
    content: Cow<'b, str>,
}

pub(super) fn measure(run: &mut Run) {
    for (name, count, bytes) in [("4k tokens", 20, 800), ("32k tokens", 50, 2600)] {
        let names = ["cold", "warm"].map(|state| format!("whole decision, {name}, {state}"));
        if names.iter().any(|name| run.wants(name)) {
            let mut pair = Pair::new();
            let rounds: Vec<_> = (0..=run.rounds)
                .map(|chat| pair.round(chat, (count, bytes)))
                .collect();
            let column = |of: fn(&Round) -> f64| rounds[1..].iter().map(of).collect::<Vec<_>>();
            run.enter(
                (&names[0], "us", Some(1.15)),
                &column(|round| round.cold.0),
                &column(|round| round.cold.1),
            );
            run.enter(
                (&names[1], "us", Some(1.15)),
                &column(|round| round.warm.0),
                &column(|round| round.warm.1),
            );
        }
    }
}

/// What the sum of the stages took, and what we took.
struct Round {
    cold: (f64, f64),
    warm: (f64, f64),
}

/// Ours, and what the stages need when each is alone.
struct Pair {
    bed: Bed,
    library: Tokenizer,
    /// The tokens of each message, as the least that one can keep.
    known: HashMap<u128, Vec<u32>>,
}

impl Pair {
    fn new() -> Self {
        Self {
            bed: Bed::new(encoder(1 << 30), RANKS),
            library: fast_library(),
            known: HashMap::new(),
        }
    }

    /// A chat that nobody has seen, and then its next turn.
    fn round(&mut self, chat: usize, (count, bytes): (usize, usize)) -> Round {
        let messages = messages(chat, count, bytes);
        let [mut cold, mut warm] = [(0.0, 0.0); 2];
        let mut known = 0;
        for (upto, times) in [(count - 2, &mut cold), (count, &mut warm)] {
            let body = Bytes::from(body(&messages[..upto]));
            let (ours, hashes, booked) = self.bed.decide(&body);
            drop(booked);
            *times = (self.stages(&body, &hashes, known), ours);
            self.bed.store(chat % RANKS as usize, &hashes);
            known = hashes.len();
        }
        Round { cold, warm }
    }

    /// Microseconds of all stages, each alone, for the same request, of which so many blocks came before.
    fn stages(&mut self, body: &Bytes, hashes: &BlockHashes, known: usize) -> f64 {
        let mut least = None;
        let json = cpu(|| least = serde_json::from_slice::<Least<'_>>(body).ok());
        let least = least.expect("a chat");
        let said = || {
            least
                .messages
                .iter()
                .map(|message| (message.role, &*message.content))
        };
        let mut text = String::new();
        let template = cpu(|| text = by_hand(said(), body.len()));
        let mut tokens = Vec::new();
        let tokenizer = cpu(|| tokens = self.tokens(&text));
        assert_eq!(
            BlockHashes::of(&tokens, BLOCK, &Salt::default()),
            *hashes,
            "the stages make the same prompt"
        );
        let hash =
            cpu(|| BlockHashes::of(&tokens[known * BLOCK.tokens()..], BLOCK, &Salt::default()));
        let mut booked = None;
        let route = cpu(|| booked = Some(self.bed.route(hashes)));
        drop(booked);
        (json + template + tokenizer + hash + route) / 1e3
    }

    /// The tokens of a prompt, of which the messages that came before are copied.
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
