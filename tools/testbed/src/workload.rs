//! A multi-turn chat workload, deterministic by seed. Each group of sessions shares a long system
//! prompt, and every turn repeats the conversation so far. Prefix caching saves work if routing
//! keeps a session on its worker, so benchmarks and demonstrations replay this workload.

use std::ops::RangeInclusive;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom as _, SliceRandom as _};
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

/// Frequent English words, one per line.
pub const WORDS: &str = include_str!("../../engine-sim/src/words.txt");

/// KV blocks of each of the four engines that serve [`WorkloadShape::chat_product`]. They hold about
/// 32,000 tokens, which is some ten conversations.
pub const CHAT_PRODUCT_BLOCKS: usize = 2_000;

/// Parameters of a workload; values are drawn uniformly from the ranges.
#[derive(Clone, Debug)]
pub struct WorkloadShape {
    /// Number of groups, each with its own system prompt.
    pub groups: usize,
    /// Number of sessions of each group.
    pub sessions_per_group: usize,
    /// Number of turns of a session.
    pub turns: RangeInclusive<usize>,
    /// Length of a group's system prompt.
    pub system_words: RangeInclusive<usize>,
    /// Length of a user message.
    pub user_words: RangeInclusive<usize>,
    /// Length of an answer.
    pub max_tokens: RangeInclusive<u32>,
    /// Pause between an answer and the next turn.
    pub think: RangeInclusive<Duration>,
    /// Number of sessions that begin per second, at random times.
    pub sessions_per_second: f64,
}

impl WorkloadShape {
    /// Returns the workload of a chat product: assistants with one system prompt each, and
    /// conversations in which users paste text. Its total size is several times the cache of one
    /// engine with [`CHAT_PRODUCT_BLOCKS`].
    pub fn chat_product() -> Self {
        Self {
            groups: 60,
            sessions_per_group: 1,
            turns: 4..=7,
            system_words: 100..=300,
            user_words: 100..=300,
            max_tokens: 8..=32,
            think: Duration::from_millis(300)..=Duration::from_millis(1500),
            sessions_per_second: 3.0,
        }
    }

    /// Returns a short workload with prompts and answers of this shape: 8 conversations of 3 turns
    /// without pauses. Before a measurement, it opens connections and fills the caches of the tokenizer.
    pub fn warm_up(&self) -> Self {
        Self {
            groups: 8,
            sessions_per_group: 1,
            turns: 3..=3,
            think: Duration::ZERO..=Duration::ZERO,
            sessions_per_second: 8.0,
            ..self.clone()
        }
    }
}

impl Default for WorkloadShape {
    fn default() -> Self {
        Self {
            groups: 8,
            sessions_per_group: 12,
            turns: 3..=6,
            system_words: 400..=3000,
            user_words: 10..=120,
            max_tokens: 16..=96,
            think: Duration::from_millis(500)..=Duration::from_secs(3),
            sessions_per_second: 4.0,
        }
    }
}

/// The sessions in the order in which they begin.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatWorkload {
    /// The sessions.
    pub sessions: Vec<ChatSession>,
}

/// One user's conversation. Each turn is sent once the previous answer is complete.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatSession {
    /// Index of its group.
    pub group: usize,
    /// Start time, from the start of the workload.
    pub arrives: Duration,
    /// System prompt of the group.
    pub system: String,
    /// The user messages, in order.
    pub turns: Vec<ChatTurn>,
}

/// One user message.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatTurn {
    /// Text of the message.
    pub user: String,
    /// Length of the answer.
    pub max_tokens: u32,
    /// Pause before it.
    pub think: Duration,
}

impl ChatWorkload {
    /// Generates the workload for a seed.
    pub fn new(seed: u64, shape: &WorkloadShape) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let words: Vec<&str> = WORDS.lines().collect();
        let systems: Vec<String> = (0..shape.groups)
            .map(|_| {
                let len = rng.random_range(shape.system_words.clone());
                text(&mut rng, &words, len)
            })
            .collect();
        let mut groups: Vec<usize> = (0..shape.groups)
            .flat_map(|group| std::iter::repeat_n(group, shape.sessions_per_group))
            .collect();
        groups.shuffle(&mut rng);
        let mut arrives = Duration::ZERO;
        let mut session = |group: usize| {
            // The gaps are exponentially distributed, because users arrive independently.
            let gap = -(1.0 - rng.random::<f64>()).ln() / shape.sessions_per_second;
            arrives += Duration::from_secs_f64(gap);
            let turns = (0..rng.random_range(shape.turns.clone()))
                .map(|_| turn(&mut rng, &words, shape))
                .collect();
            ChatSession {
                group,
                arrives,
                system: systems[group].clone(),
                turns,
            }
        };
        Self {
            sessions: groups.into_iter().map(&mut session).collect(),
        }
    }
}

impl ChatWorkload {
    /// Returns the number of requests.
    pub fn requests(&self) -> usize {
        self.sessions
            .iter()
            .map(|session| session.turns.len())
            .sum()
    }

    /// Returns the duration of a replay with answers that take no time.
    pub fn min_duration(&self) -> Duration {
        let end = |session: &ChatSession| {
            let pauses: Duration = session.turns.iter().map(|turn| turn.think).sum();
            session.arrives + pauses
        };
        self.sessions.iter().map(end).max().unwrap_or_default()
    }
}

impl ChatSession {
    /// Returns the chat request of turn number `answers.len()`, given the previous answers.
    pub fn request(&self, model: &str, answers: &[String]) -> Value {
        let turn = &self.turns[answers.len()];
        let mut messages = vec![json!({"role": "system", "content": self.system})];
        for (question, answer) in self.turns.iter().zip(answers) {
            messages.push(json!({"role": "user", "content": question.user}));
            messages.push(json!({"role": "assistant", "content": answer}));
        }
        messages.push(json!({"role": "user", "content": turn.user}));
        json!({"model": model, "messages": messages, "max_tokens": turn.max_tokens})
    }
}

fn turn(rng: &mut StdRng, words: &[&str], shape: &WorkloadShape) -> ChatTurn {
    let len = rng.random_range(shape.user_words.clone());
    ChatTurn {
        user: text(rng, words, len),
        max_tokens: rng.random_range(shape.max_tokens.clone()),
        think: rng.random_range(shape.think.clone()),
    }
}

/// Returns sentences of `len` words.
fn text(rng: &mut StdRng, words: &[&str], len: usize) -> String {
    let mut text = String::new();
    let mut left_in_sentence = 0;
    for at in 0..len {
        let word = words.choose(rng).copied().unwrap_or_default();
        if left_in_sentence == 0 {
            left_in_sentence = rng.random_range(4..=14);
            text += if at == 0 { "" } else { ". " };
            text += &word[..1].to_uppercase();
            text += &word[1..];
        } else {
            text += " ";
            text += word;
        }
        left_in_sentence -= 1;
    }
    text + "."
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    fn shape() -> WorkloadShape {
        WorkloadShape {
            groups: 3,
            sessions_per_group: 4,
            turns: 2..=3,
            ..WorkloadShape::default()
        }
    }

    #[test]
    fn workload_is_deterministic_by_seed() {
        assert_eq!(
            ChatWorkload::new(7, &shape()),
            ChatWorkload::new(7, &shape())
        );
        assert_ne!(
            ChatWorkload::new(7, &shape()),
            ChatWorkload::new(8, &shape())
        );
    }

    #[test]
    fn workload_respects_its_shape() {
        let shape = shape();
        let workload = ChatWorkload::new(1, &shape);
        let count = |text: &str| text.split(' ').count();
        let mut systems: BTreeMap<usize, BTreeSet<&str>> = BTreeMap::new();
        let mut sessions: BTreeMap<usize, usize> = BTreeMap::new();
        for session in &workload.sessions {
            systems
                .entry(session.group)
                .or_default()
                .insert(&session.system);
            *sessions.entry(session.group).or_default() += 1;
            assert!(shape.system_words.contains(&count(&session.system)));
            assert!(shape.turns.contains(&session.turns.len()));
            for turn in &session.turns {
                assert!(
                    shape.user_words.contains(&count(&turn.user)),
                    "{}",
                    turn.user
                );
                assert!(
                    shape.max_tokens.contains(&turn.max_tokens)
                        && shape.think.contains(&turn.think)
                );
            }
        }
        assert_eq!(sessions.values().copied().collect::<Vec<_>>(), [4, 4, 4]);
        assert!(
            systems.values().all(|texts| texts.len() == 1),
            "a group shares one system prompt"
        );
        let distinct: BTreeSet<_> = systems.values().flatten().collect();
        assert_eq!(distinct.len(), 3);
    }

    #[test]
    fn sessions_begin_in_order_at_configured_rate() {
        let shape = WorkloadShape {
            groups: 10,
            sessions_per_group: 100,
            sessions_per_second: 50.0,
            ..shape()
        };
        let workload = ChatWorkload::new(1, &shape);
        assert!(
            workload
                .sessions
                .is_sorted_by_key(|session| session.arrives)
        );
        let end = workload.sessions.last().unwrap().arrives.as_secs_f64();
        assert!((15.0..25.0).contains(&end), "{end} s");
        let first: BTreeSet<_> = workload.sessions[..20]
            .iter()
            .map(|session| session.group)
            .collect();
        assert!(first.len() > 5, "groups are mixed: {first:?}");
    }

    #[test]
    fn minimum_duration_includes_pauses() {
        let shape = WorkloadShape {
            groups: 1,
            sessions_per_group: 1,
            turns: 3..=3,
            think: Duration::from_secs(2)..=Duration::from_secs(2),
            ..shape()
        };
        let workload = ChatWorkload::new(1, &shape);
        assert_eq!(workload.requests(), 3);
        assert_eq!(
            workload.min_duration(),
            workload.sessions[0].arrives + Duration::from_secs(6)
        );
        let warm_up = ChatWorkload::new(1, &shape.warm_up());
        assert_eq!(warm_up.requests(), 24);
        assert!(warm_up.min_duration() < Duration::from_secs(5));
    }

    #[test]
    fn request_carries_previous_conversation() {
        let workload = ChatWorkload::new(1, &shape());
        let session = &workload.sessions[0];
        let request = session.request("m", &["first answer".into()]);
        let roles: Vec<_> = request["messages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|m| m["role"].clone())
            .collect();
        assert_eq!(roles, ["system", "user", "assistant", "user"]);
        assert_eq!(request["messages"][2]["content"], "first answer");
        assert_eq!(request["messages"][3]["content"], session.turns[1].user);
        assert_eq!(request["max_tokens"], session.turns[1].max_tokens);
    }
}
