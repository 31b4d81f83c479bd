//! Sessions of a coding-agent trace, scaled down. A recorded block of 64 tokens becomes a text of
//! about 16 tokens, so that equal blocks have equal texts, and prompts share the prefixes of the
//! recorded ones. Sessions whose tool definitions and system prompts have the same lengths share
//! the text of their first blocks.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use warmroute_testbed::deployment::MODEL;
use warmroute_testbed::workload::WORDS;
use warmroute_traces::{BLOCK_TOKENS, RecordedRequest, RecordedSession, SessionHeader};

/// Words of a block. Most words of the list are one token.
const BLOCK_WORDS: usize = 16;
/// Recorded tokens that one word stands for.
const WORD_TOKENS: usize = BLOCK_TOKENS / BLOCK_WORDS;

/// Selection and scale of the sessions.
#[derive(Clone, Debug)]
pub struct TraceScale {
    /// Number of sessions, the first ones of the trace that are long enough.
    pub sessions: usize,
    /// Maximum number of requests of a session.
    pub max_turns: usize,
    /// Sessions with fewer requests are skipped.
    pub min_turns: usize,
    /// A session ends before its first prompt with more recorded tokens.
    pub max_recorded_tokens: usize,
    /// Factor on the recorded think time.
    pub pause_factor: f64,
    /// Maximum pause after scaling.
    pub max_pause: Duration,
    /// Time between the starts of two sessions.
    pub start_interval: Duration,
    /// Length of every answer.
    pub answer_tokens: u32,
}

/// Session to replay.
#[derive(Clone, Debug)]
pub struct TraceSession {
    /// Start time, from the start of the replay.
    pub start_offset: Duration,
    /// Requests, in order.
    pub turns: Vec<TraceTurn>,
}

/// Request to replay.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceTurn {
    /// Pause before it.
    pub pause: Duration,
    /// Seed of the text of each block.
    block_seeds: Vec<u64>,
    /// Seed of the text after the last block.
    rest_seed: u64,
    /// Number of words after the last block.
    rest_words: usize,
    answer_tokens: u32,
}

impl TraceTurn {
    /// Returns the chat request.
    pub fn request(&self) -> Value {
        let words: Vec<&str> = WORDS.lines().collect();
        let mut text = String::new();
        for &seed in &self.block_seeds {
            append_words(&mut text, &words, seed, BLOCK_WORDS);
        }
        append_words(&mut text, &words, self.rest_seed, self.rest_words);
        json!({
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.answer_tokens,
            "stream": true,
            "stream_options": {"include_usage": true},
        })
    }
}

fn append_words(text: &mut String, words: &[&str], seed: u64, count: usize) {
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..count {
        *text += words.choose(&mut rng).copied().unwrap_or_default();
        text.push(' ');
    }
}

/// Reads a trace and selects its sessions.
pub fn load(path: &Path, scale: &TraceScale) -> Result<Vec<TraceSession>> {
    let recorded = warmroute_traces::parse_sessions(&warmroute_traces::read_lines(path)?)?;
    let sessions = scale_sessions(&recorded, scale);
    ensure!(
        sessions.len() == scale.sessions,
        "the trace has only {} sessions of {} requests",
        sessions.len(),
        scale.min_turns
    );
    Ok(sessions)
}

fn scale_sessions(recorded: &[RecordedSession], scale: &TraceScale) -> Vec<TraceSession> {
    let mut seeds = BlockSeeds::default();
    let scaled = recorded
        .iter()
        .map(|session| scale_session(session, seeds.for_session(&session.header), scale));
    let selected = scaled
        .filter(|turns| turns.len() >= scale.min_turns)
        .take(scale.sessions)
        .enumerate();
    selected
        .map(|(number, turns)| TraceSession {
            start_offset: scale.start_interval * number as u32,
            turns,
        })
        .collect()
}

fn scale_session(
    session: &RecordedSession,
    seeds: SessionSeeds,
    scale: &TraceScale,
) -> Vec<TraceTurn> {
    let mut turns: Vec<TraceTurn> = Vec::new();
    session.for_each_request(|request, blocks| {
        let exceeds_limit =
            turns.len() >= scale.max_turns || request.input > scale.max_recorded_tokens;
        if !exceeds_limit {
            let number = turns.len() as u64;
            turns.push(scale_turn(request, blocks, number, seeds, scale));
        }
        !exceeds_limit
    });
    turns
}

fn scale_turn(
    request: &RecordedRequest,
    blocks: &[u32],
    number: u64,
    seeds: SessionSeeds,
    scale: &TraceScale,
) -> TraceTurn {
    let used = blocks.len().min(request.input / BLOCK_TOKENS);
    let think = Duration::try_from_secs_f64(request.think * scale.pause_factor).unwrap_or_default();
    TraceTurn {
        pause: think.min(scale.max_pause),
        block_seeds: blocks[..used].iter().map(|&id| seeds.block(id)).collect(),
        rest_seed: seeds.rest(number),
        rest_words: (request.input - used * BLOCK_TOKENS).div_ceil(WORD_TOKENS),
        answer_tokens: scale.answer_tokens,
    }
}

/// Seeds of the texts of one session.
#[derive(Clone, Copy, Debug)]
struct SessionSeeds {
    common_blocks: u64,
    common: u64,
    own: u64,
}

impl SessionSeeds {
    fn block(self, id: u32) -> u64 {
        let id = u64::from(id);
        let base = if id < self.common_blocks {
            self.common
        } else {
            self.own
        };
        base.wrapping_add(id)
    }

    /// Returns the seed of the text after the last block of a request.
    fn rest(self, request: u64) -> u64 {
        self.own.wrapping_sub(1 + request)
    }
}

/// Assigns seeds to sessions.
#[derive(Debug, Default)]
struct BlockSeeds {
    /// First seed of each pair of lengths of tool definitions and system prompt.
    common: HashMap<[u64; 2], u64>,
    sessions: u64,
}

impl BlockSeeds {
    fn for_session(&mut self, header: &SessionHeader) -> SessionSeeds {
        let first_seed = |number: u64| StdRng::seed_from_u64(number).random::<u64>();
        let pairs = self.common.len() as u64;
        let common = self.common.entry([header.tool, header.system]);
        let common = *common.or_insert_with(|| first_seed(2 * pairs));
        self.sessions += 1;
        SessionSeeds {
            common_blocks: header.common_blocks(),
            common,
            own: first_seed(2 * self.sessions + 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = r#"{"session":"a","tool":64,"system":64,"requests":3,"blocks":8}
{"a":0,"t":0.0,"think":0.0,"api":0.0,"in":200,"out":5000,"keep":0,"new":[[0,3]]}
{"a":0,"t":9.0,"think":5.0,"api":1.0,"in":320,"out":7,"keep":2,"new":[[3,2],[6,1]]}
{"a":0,"t":99.0,"think":90.0,"api":1.0,"in":3200,"out":7,"keep":5,"new":[]}
{"session":"b","tool":64,"system":64,"requests":2,"blocks":4}
{"a":0,"t":0.0,"think":0.0,"api":0.0,"in":256,"out":3,"keep":0,"new":[[0,4]]}
{"a":0,"t":0.0,"think":400.0,"api":0.0,"in":256,"out":3,"keep":4,"new":[]}
{"session":"c","tool":64,"system":64,"requests":1,"blocks":4}
{"a":0,"t":0.0,"think":0.0,"api":0.0,"in":256,"out":3,"keep":0,"new":[[0,4]]}
"#;

    fn sessions() -> Vec<TraceSession> {
        let lines: Vec<String> = TRACE.lines().map(str::to_owned).collect();
        let recorded = warmroute_traces::parse_sessions(&lines).unwrap();
        let scale = TraceScale {
            sessions: 2,
            max_turns: 20,
            min_turns: 2,
            max_recorded_tokens: 1000,
            pause_factor: 0.03,
            max_pause: Duration::from_secs(2),
            start_interval: Duration::from_millis(100),
            answer_tokens: 8,
        };
        scale_sessions(&recorded, &scale)
    }

    fn text(turn: &TraceTurn) -> String {
        turn.request()["messages"][0]["content"]
            .as_str()
            .unwrap()
            .to_owned()
    }

    /// Returns the number of equal words at the start of two prompts.
    fn common_words(left: &TraceTurn, right: &TraceTurn) -> usize {
        let (left, right) = (text(left), text(right));
        let pairs = left.split(' ').zip(right.split(' '));
        pairs.take_while(|(left, right)| left == right).count()
    }

    #[test]
    fn prompts_have_recorded_lengths_and_prefixes() {
        let sessions = sessions();
        let [first, second] = &sessions[0].turns[..] else {
            panic!("the long prompt ends the session: {sessions:?}")
        };
        assert_eq!(text(first).split_whitespace().count(), 200 / 4);
        assert_eq!(text(second).split_whitespace().count(), 320 / 4);
        assert!((32..40).contains(&common_words(first, second)));
        let other = &sessions[1].turns;
        assert_eq!(text(&other[0]), text(&other[1]), "equal recorded prompts");
        assert!((32..40).contains(&common_words(first, &other[0])));
    }

    #[test]
    fn short_sessions_are_skipped_and_pauses_limited() {
        let sessions = sessions();
        assert_eq!(sessions.len(), 2);
        assert_eq!(sessions[1].start_offset, Duration::from_millis(100));
        assert_eq!(sessions[0].turns[1].pause, Duration::from_millis(150));
        assert_eq!(sessions[1].turns[1].pause, Duration::from_secs(2));
    }
}
