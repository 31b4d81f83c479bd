//! Memory of predictions, sessions, bookings and the prompt cache.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use warmroute_core::block::{BlockHashes, LocalHash, SequenceHash};
use warmroute_core::load::ledger::{BookingLedger, LedgerError, LedgerRules, RequestAttempt};
use warmroute_core::load::{BookingEnd, LoadBooking, PromptSequences};
use warmroute_core::predict::{EvictionPolicy, Predictor, TtlPolicy};
use warmroute_core::sessions::{
    SessionEntry, SessionError as SessionRefused, SessionLease, SessionName, SessionRecording,
    SessionRules, SessionStore,
};
use warmroute_core::worker::{BlockSize, RankSlot, WorkerId, WorkerRank};
use warmroute_metrics::Metrics;
use warmroute_tokens::openai::{self, ApiKind};
use warmroute_tokens::prompt::{Config, Encoder, PromptCache};

use crate::{MIB, RANK, load_tracker, measure, measure_after, mix};

/// Default of `index.approximate.max_blocks_per_rank`.
const PREDICTED: u64 = 1 << 20;
/// Maximum number of blocks of all bookings of API clients.
const BOOKED_BLOCKS: u64 = 1 << 25;
/// Maximum number of bookings of API clients.
const BOOKINGS: u64 = 1 << 20;

fn predictor(max_blocks_per_rank: u64) -> Arc<Predictor> {
    let ttl = TtlPolicy {
        ttl: Duration::from_secs(3600),
        max_blocks_per_rank,
    };
    let predictor = Predictor::new(EvictionPolicy::Ttl(ttl), Instant::now);
    predictor.open(RankSlot(0), RANK, None);
    predictor
}

/// Returns a prompt that shares no block with others.
fn prompt(number: u64, blocks: u64) -> BlockHashes {
    let locals: Vec<_> = (number * blocks..(number + 1) * blocks)
        .map(|at| LocalHash(mix(at)))
        .collect();
    BlockHashes::from_locals(locals.len() * 16, BlockSize::new(16).unwrap(), locals)
}

/// Records the maximum number of confirmed blocks of a rank, in prompts of `blocks` blocks.
fn confirmed(blocks: u64) -> (u64, Arc<Predictor>) {
    let limit = PREDICTED;
    let predictor = predictor(limit);
    (0..limit / blocks + 10)
        .for_each(|number| drop(predictor.record(RankSlot(0), RANK, &prompt(number, blocks))));
    let stats = predictor.stats();
    assert_eq!((stats[0].blocks, stats[0].evicted), (limit, 10 * blocks));
    (limit, predictor)
}

/// Like [`confirmed`], for prompts in flight.
fn in_flight(blocks: u64) -> (u64, impl Sized) {
    let limit = PREDICTED;
    let predictor = predictor(limit);
    let send = |number| predictor.record_in_flight(RankSlot(0), RANK, &prompt(number, blocks));
    let prompts: Vec<_> = (0..limit / blocks + 10).map(send).collect();
    let stats = predictor.stats();
    assert_eq!((stats[0].in_flight, stats[0].refused), (limit, 10 * blocks));
    (limit, (predictor, prompts))
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn predicted_blocks_of_long_prompts() {
    measure("tables::predicted_blocks_of_long_prompts", 40, || {
        confirmed(512)
    });
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn predicted_blocks_of_short_prompts() {
    measure("tables::predicted_blocks_of_short_prompts", 896, || {
        confirmed(1)
    });
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn blocks_of_long_prompts_in_flight() {
    measure("tables::blocks_of_long_prompts_in_flight", 40, || {
        in_flight(512)
    });
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn blocks_of_short_prompts_in_flight() {
    measure("tables::blocks_of_short_prompts_in_flight", 896, || {
        in_flight(1)
    });
}

/// Opens idle sessions with the longest ids, each of another tenant.
#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn idle_sessions() {
    measure("tables::idle_sessions", 2560, || {
        let rules = SessionRules::default();
        let sessions = SessionStore::new(rules, Instant::now);
        for number in 0..rules.max_sessions + 100 {
            drop(first(&sessions, number));
        }
        assert_eq!(sessions.counts().sessions, rules.max_sessions);
        (rules.max_sessions as u64, sessions)
    });
}

/// Opens sessions with requests, and creates the maximum number of unread session updates.
#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn sessions_with_unread_updates() {
    measure("tables::sessions_with_unread_updates", 4096, || {
        let rules = SessionRules::default();
        let recording = SessionRecording {
            moves: true,
            updates_by: Some(1),
        };
        let sessions = SessionStore::with_listener(rules, Instant::now, recording, Arc::new(()));
        let mut holds: Vec<_> = (0..rules.max_sessions)
            .map(|number| first(&sessions, number))
            .collect();
        let [id, tenant] = [&"x".repeat(256), &"y".repeat(256)];
        let name = SessionName {
            id,
            parent: None,
            model: Some("m"),
            tenant: Some(tenant),
        };
        let full = SessionRefused::Full {
            limit: rules.max_sessions,
        };
        assert_eq!(sessions.enter(name).unwrap_err(), full);
        for worker in 2..6 {
            let to = WorkerRank {
                worker: WorkerId(worker),
                ..RANK
            };
            holds.iter_mut().for_each(|hold| hold.rebind(to));
        }
        (rules.max_sessions as u64, (sessions, holds))
    });
}

/// Opens the first request of a session, each of another tenant.
fn first(sessions: &Arc<SessionStore>, number: usize) -> SessionLease {
    let [id, tenant] = ["s", "t"].map(|kind| format!("{kind}{number:0>255}"));
    let name = SessionName {
        id: &id,
        parent: None,
        model: Some("m"),
        tenant: Some(&tenant),
    };
    match sessions.enter(name).unwrap() {
        SessionEntry::First(binding) => binding.bind(RANK),
        other => panic!("{other:?}"),
    }
}

fn ledger(limit: u64, blocks: u64) -> BookingLedger {
    let rules = LedgerRules {
        max_bookings: limit as usize,
        max_blocks: blocks as usize,
        max_ended: limit as usize / 8,
        ..LedgerRules::default()
    };
    BookingLedger::new(load_tracker(), rules)
}

fn book(ledger: &mut BookingLedger, number: u64, blocks: u64) -> Result<(), LedgerError> {
    let hashes = (number * blocks..(number + 1) * blocks).map(|at| SequenceHash(mix(at)));
    let booking = LoadBooking {
        slot: RankSlot(0),
        rank: RANK,
        sequences: hashes.collect::<PromptSequences>(),
        prompt_tokens: blocks * 16,
        cached_tokens: 0,
        track_prefill: true,
        prefill_time: None,
        content_time: None,
        end: BookingEnd::RequestEnd,
    };
    // Ids may have up to 512 bytes.
    ledger
        .add(
            RequestAttempt {
                request: &format!("{number:0>512}"),
                number: 0,
            },
            vec![booking],
        )
        .map(|_| ())
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn booked_blocks() {
    measure("tables::booked_blocks", 32, || {
        // A thirty-second of the default suffices, because all blocks take the same memory.
        let limit = BOOKED_BLOCKS / 32;
        let mut ledger = ledger(BOOKINGS, limit);
        (0..limit / 512).for_each(|number| book(&mut ledger, number, 512).unwrap());
        assert_eq!(
            book(&mut ledger, limit, 512),
            Err(LedgerError::TooManyBlocks {
                limit: limit as usize
            })
        );
        (limit, ledger)
    });
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn bookings_of_short_prompts() {
    measure("tables::bookings_of_short_prompts", 2048, || {
        let limit = BOOKINGS;
        let mut ledger = ledger(limit, BOOKED_BLOCKS);
        (0..limit).for_each(|number| book(&mut ledger, number, 1).unwrap());
        assert_eq!(
            book(&mut ledger, limit, 1),
            Err(LedgerError::Full {
                limit: limit as usize
            })
        );
        (limit, ledger)
    });
}

/// Returns an encoder that has tokenized a text, so that its own tables exist.
fn fast_encoder() -> Encoder {
    let file = "examples/models/qwen2.5/tokenizer.json.gz";
    let config = Config {
        tokenizer: file.into(),
        tokenizer_config: None,
        chat_template: None,
    };
    let encoder = Encoder::load(&config).unwrap();
    encoder.enable_fast_path().unwrap();
    encoder
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn prompt_cache() {
    measure_after("tables::prompt_cache", 1, fast_encoder, |encoder| {
        // Default of `requests.limits.prompt_cache_size`.
        let limit = 256 * MIB;
        let metrics = Arc::new(Metrics::new());
        let cache = PromptCache::new(limit as usize, metrics.clone());
        let (encoder, resumes) = encoder.with_prompt_cache(cache.clone());
        assert_eq!(resumes, Ok(()));
        let mut chat = 0_u64;
        while metrics.tokens.prompt_cache_evictions.get() < 100 {
            let messages: Vec<_> = (0..20_u64)
                .map(|number| {
                    let words = (0..40).map(|word| mix(chat * 1000 + number * 50 + word) % 100_000);
                    let content = words.map(|word| word.to_string()).collect::<Vec<_>>().join(" ");
                    json!({"role": if number % 2 == 0 { "user" } else { "assistant" }, "content": content})
                })
                .collect();
            let body = json!({"model": "m", "messages": messages}).to_string();
            let request = openai::parse(ApiKind::ChatCompletions, body.as_bytes()).unwrap();
            encoder
                .tokenize_cached(&encoder.render(&request).unwrap(), None)
                .unwrap();
            chat += 1;
        }
        assert!(cache.bytes() as u64 <= limit && cache.bytes() as u64 > limit - 8192);
        (limit, (encoder, cache))
    });
}
