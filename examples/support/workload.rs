//! A multi-turn chat workload that is the same for the same seed: groups of sessions share a long system prompt each, and
//! every turn repeats the conversation so far. That is where prefix caching pays and where routing decides whether it
//! does, so benchmarks and demonstrations replay it instead of unrelated prompts.

use std::ops::RangeInclusive;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom as _, SliceRandom as _};
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

const WORDS: &str = include_str!("../engine_sim/engine/words.txt");

/// What a workload looks like; ranges are drawn from evenly.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    /// Groups, each with a system prompt of its own.
    pub(crate) groups: usize,
    pub(crate) sessions_per_group: usize,
    pub(crate) turns: RangeInclusive<usize>,
    /// Length of a group's system prompt.
    pub(crate) system_words: RangeInclusive<usize>,
    /// Length of what a user says in one turn.
    pub(crate) user_words: RangeInclusive<usize>,
    /// Length of an answer.
    pub(crate) max_tokens: RangeInclusive<u32>,
    /// Pause between an answer and the next turn.
    pub(crate) think: RangeInclusive<Duration>,
    /// Sessions that begin per second, at random moments.
    pub(crate) sessions_per_second: f64,
}

impl Default for Shape {
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
pub(crate) struct Workload {
    pub(crate) sessions: Vec<Session>,
}

/// One user's conversation. Its turns are sent one after the other, each once the answer before it is complete.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Session {
    pub(crate) group: usize,
    /// When it begins, from the start of the workload.
    pub(crate) arrives: Duration,
    pub(crate) system: String,
    pub(crate) turns: Vec<Turn>,
}

/// One question.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Turn {
    pub(crate) user: String,
    pub(crate) max_tokens: u32,
    /// Pause before it.
    pub(crate) think: Duration,
}

impl Workload {
    pub(crate) fn new(seed: u64, shape: &Shape) -> Self {
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
            // Exponential gaps: users do not wait for one another.
            let gap = -(1.0 - rng.random::<f64>()).ln() / shape.sessions_per_second;
            arrives += Duration::from_secs_f64(gap);
            let turns = (0..rng.random_range(shape.turns.clone()))
                .map(|_| turn(&mut rng, &words, shape))
                .collect();
            Session {
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

impl Session {
    /// The chat request of turn number `answers.len()`, given the answers so far.
    pub(crate) fn request(&self, model: &str, answers: &[String]) -> Value {
        let turn = &self.turns[answers.len()];
        let mut messages = vec![json!({"role": "system", "content": self.system})];
        for (asked, answer) in self.turns.iter().zip(answers) {
            messages.push(json!({"role": "user", "content": asked.user}));
            messages.push(json!({"role": "assistant", "content": answer}));
        }
        messages.push(json!({"role": "user", "content": turn.user}));
        json!({"model": model, "messages": messages, "max_tokens": turn.max_tokens})
    }
}

fn turn(rng: &mut StdRng, words: &[&str], shape: &Shape) -> Turn {
    let len = rng.random_range(shape.user_words.clone());
    Turn {
        user: text(rng, words, len),
        max_tokens: rng.random_range(shape.max_tokens.clone()),
        think: rng.random_range(shape.think.clone()),
    }
}

/// Sentences of `len` words.
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

    fn shape() -> Shape {
        Shape {
            groups: 3,
            sessions_per_group: 4,
            turns: 2..=3,
            ..Shape::default()
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_workload_and_another_seed_another() {
        assert_eq!(Workload::new(7, &shape()), Workload::new(7, &shape()));
        assert_ne!(Workload::new(7, &shape()), Workload::new(8, &shape()));
    }

    #[test]
    fn the_shape_is_respected() {
        let shape = shape();
        let workload = Workload::new(1, &shape);
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
    fn sessions_begin_one_after_the_other_at_about_the_asked_rate() {
        let shape = Shape {
            groups: 10,
            sessions_per_group: 100,
            sessions_per_second: 50.0,
            ..shape()
        };
        let workload = Workload::new(1, &shape);
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
    fn a_request_carries_the_conversation_so_far() {
        let workload = Workload::new(1, &shape());
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
