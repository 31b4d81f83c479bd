//! Traces of coding agents: sessions whose prompts grow from request to request. A session is one
//! line with its name and the lengths of its tool definitions and system prompt, followed by one
//! line per request. A request keeps the first blocks of the previous prompt and appends runs of
//! new ones.

use std::collections::HashMap;

use anyhow::Result;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use warmroute_traces::{RecordedSession, SessionHeader};
use xxhash_rust::xxh3::xxh3_64;

use super::{ReplayWorkload, ReplayedRequest, TraceHalf};

/// Maximum number of requests per session.
const MAX_TURNS: usize = 40;
/// Sessions with fewer usable requests are skipped.
const MIN_TURNS: usize = 3;
/// Maximum length of an answer.
const MAX_OUTPUT_TOKENS: usize = 2000;
/// Maximum think time, in seconds.
const MAX_THINK_SECONDS: f64 = 30.0;
/// Sessions in a workload per active session.
const SESSIONS_PER_SLOT: usize = 4;

/// First token of blocks that only one session has.
const FIRST_OWN_TOKEN: u32 = 0x1000_0000;
/// Unused tokens between two sessions.
const SESSION_TOKEN_GAP: u32 = 64;
/// Maximum number of blocks that sessions share whose tool definitions and system prompts have the
/// same lengths.
const MAX_COMMON_BLOCKS: u32 = 4096;
/// First token of partial last blocks.
const FIRST_LAST_TOKEN: u32 = 0x8000_0000;

/// Returns the number of blocks that the session shares with others.
fn common_blocks(header: &SessionHeader) -> u32 {
    header.common_blocks().min(u64::from(MAX_COMMON_BLOCKS)) as u32
}

fn is_in(header: &SessionHeader, half: TraceHalf) -> bool {
    let is_odd = xxh3_64(header.session.as_bytes()) & 1 == 1;
    match half {
        TraceHalf::First => !is_odd,
        TraceHalf::Second => is_odd,
        TraceHalf::All => true,
    }
}

/// Trace of sessions.
pub(crate) struct CodingAgentTrace {
    sessions: Vec<RecordedSession>,
}

/// Selection of the sessions of a workload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionSelection {
    /// Part of the trace.
    pub(crate) half: TraceHalf,
    /// Sessions that are active at any time.
    pub(crate) concurrency: usize,
    /// Maximum length of prompt and answer. Longer requests are skipped.
    pub(crate) max_tokens: usize,
    /// Seed of the order of the sessions.
    pub(crate) seed: u64,
}

impl CodingAgentTrace {
    pub(super) fn parse(lines: &[String]) -> Result<Self> {
        Ok(Self {
            sessions: warmroute_traces::parse_sessions(lines)?,
        })
    }

    /// Creates a workload of sessions in random order.
    pub(crate) fn workload(&self, selection: &SessionSelection) -> ReplayWorkload {
        let selected = self.sessions.iter();
        let mut recorded: Vec<&RecordedSession> = selected
            .filter(|session| is_in(&session.header, selection.half))
            .collect();
        recorded.shuffle(&mut StdRng::seed_from_u64(selection.seed));
        let mut allocator = TokenAllocator::default();
        let mut sessions = Vec::new();
        for session in recorded {
            let tokens = allocator.allocate(&session.header);
            let turns = decode_turns(session, &tokens, selection.max_tokens);
            if turns.len() >= MIN_TURNS {
                sessions.push(turns);
            }
            if sessions.len() >= SESSIONS_PER_SLOT * selection.concurrency {
                break;
            }
        }
        ReplayWorkload::Sessions {
            sessions,
            concurrency: selection.concurrency,
        }
    }
}

/// Decodes the requests of a session, without those that are empty or too long.
fn decode_turns(
    session: &RecordedSession,
    tokens: &SessionTokens,
    max_tokens: usize,
) -> Vec<ReplayedRequest> {
    let mut turns = Vec::new();
    let mut number = 0;
    session.for_each_request(|request, blocks| {
        let output = request.output.clamp(1, MAX_OUTPUT_TOKENS);
        if request.input > 0 && request.input + output <= max_tokens {
            turns.push(ReplayedRequest::new(
                request.think.clamp(0.0, MAX_THINK_SECONDS) * 1e3,
                request.input,
                output,
                blocks.iter().map(|&block| tokens.token(block)).collect(),
                FIRST_LAST_TOKEN + tokens.first_own + number,
            ));
        }
        number += 1;
        turns.len() < MAX_TURNS
    });
    turns
}

/// Tokens that represent the blocks of one session.
struct SessionTokens {
    common_blocks: u32,
    first_common: u32,
    first_own: u32,
}

impl SessionTokens {
    fn token(&self, block: u32) -> u32 {
        if block < self.common_blocks {
            self.first_common + block
        } else {
            self.first_own + block
        }
    }
}

/// Assigns tokens to sessions. Sessions whose tool definitions and system prompts have the same
/// lengths share the tokens of their first blocks.
struct TokenAllocator {
    /// Number of each pair of lengths of tool definitions and system prompt.
    prefixes: HashMap<[u64; 2], u32>,
    next_own: u32,
}

impl Default for TokenAllocator {
    fn default() -> Self {
        Self {
            prefixes: HashMap::new(),
            next_own: FIRST_OWN_TOKEN,
        }
    }
}

impl TokenAllocator {
    fn allocate(&mut self, header: &SessionHeader) -> SessionTokens {
        let next_prefix = self.prefixes.len() as u32;
        let key = [header.tool, header.system];
        let prefix = *self.prefixes.entry(key).or_insert(next_prefix);
        let first_own = self.next_own;
        self.next_own += header.blocks + SESSION_TOKEN_GAP;
        SessionTokens {
            common_blocks: common_blocks(header),
            first_common: 1 + prefix * MAX_COMMON_BLOCKS,
            first_own,
        }
    }
}
