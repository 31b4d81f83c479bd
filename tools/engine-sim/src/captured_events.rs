//! Compares the scheduler and the cache with a real engine. Prompts that were sent to vLLM 0.32
//! (block size 32, data in `tests/data/engine_sim`) are computed again with the answers of that
//! engine. The events and their order must be the same. Only the hashes differ, and they must map
//! one-to-one. This verifies hits, copies, chunks, eviction order and extra keys.

use std::collections::HashMap;
use std::sync::Arc;

use serde::Deserialize;

use super::cache::{BlockCache, BlockKeys, CacheEvent, LoraAdapter, StoredBlocks, TokenSequence};
use super::scheduler::{JobId, SchedulerJob, SchedulerLimits, StepScheduler};

#[derive(Deserialize)]
struct CapturedSeries {
    blocks: usize,
    scenarios: Vec<CapturedScenario>,
}

#[derive(Deserialize)]
struct CapturedScenario {
    name: String,
    ops: Vec<CapturedOp>,
    events: Vec<CapturedEvent>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum CapturedOp {
    Reset(()),
    /// Requests sent at the same time.
    Jobs(Vec<CapturedRequest>),
}

#[derive(Deserialize)]
struct CapturedRequest {
    prompt: Vec<u32>,
    answer: Vec<u32>,
    cached: Option<usize>,
    lora: Option<Arc<str>>,
    salt: Option<Arc<str>>,
    session: Option<Arc<str>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum CapturedEvent {
    Cleared,
    Removed(u64),
    Stored(CapturedStored),
}

#[derive(Debug, Deserialize)]
struct CapturedStored {
    hashes: Vec<u64>,
    parent: Option<u64>,
    /// Number of tokens, the first token and the last token.
    tokens: (usize, u32, u32),
    extra_keys: Vec<Option<Vec<Arc<str>>>>,
    lora: (Option<u32>, Option<Arc<str>>),
    session: Option<Arc<str>>,
}

/// Maps vLLM's block hashes to the simulator's, and back.
#[derive(Default)]
struct HashMapping(HashMap<u64, u64>, HashMap<u64, u64>);

impl HashMapping {
    fn check(&mut self, theirs: u64, ours: u64) {
        assert_eq!(
            *self.0.entry(theirs).or_insert(ours),
            ours,
            "the mapping of {theirs} is not one-to-one"
        );
        assert_eq!(
            *self.1.entry(ours).or_insert(theirs),
            theirs,
            "the mapping of {theirs} is not one-to-one"
        );
    }

    fn check_stored(&mut self, theirs: &CapturedStored, ours: &StoredBlocks) {
        assert_eq!(theirs.hashes.len(), ours.hashes.len());
        theirs
            .hashes
            .iter()
            .zip(&ours.hashes)
            .for_each(|(&theirs, &ours)| self.check(theirs, ours));
        assert_eq!(theirs.parent.is_some(), ours.parent.is_some());
        theirs
            .parent
            .into_iter()
            .zip(ours.parent)
            .for_each(|(theirs, ours)| self.check(theirs, ours));
        let ends = (
            ours.tokens.len(),
            ours.tokens[0],
            ours.tokens[ours.tokens.len() - 1],
        );
        assert_eq!(theirs.tokens, ends);
        assert_eq!(theirs.extra_keys, ours.extra_keys);
        let lora = ours.lora.clone().map(|lora| (lora.id, lora.name)).unzip();
        assert_eq!((&theirs.lora, &theirs.session), (&lora, &ours.session));
    }
}

fn lora(name: Arc<str>) -> LoraAdapter {
    LoraAdapter {
        id: if &*name == "lora-x" { 1 } else { 2 },
        name,
    }
}

/// Computes the requests and checks their cached tokens.
fn run(
    scheduler: &mut StepScheduler,
    requests: Vec<CapturedRequest>,
    next: &mut u64,
) -> Vec<CacheEvent> {
    let mut expected = HashMap::new();
    for CapturedRequest {
        prompt,
        answer,
        cached,
        lora: name,
        salt,
        session,
    } in requests
    {
        let keys = BlockKeys {
            lora: name.map(lora),
            salt,
            session,
        };
        let id = JobId(*next);
        *next += 1;
        expected.insert(id, cached);
        scheduler.submit(SchedulerJob::new(
            id,
            TokenSequence::new(prompt, keys),
            answer,
        ));
    }
    let mut events = Vec::new();
    while let Some(step) = scheduler.plan() {
        for output in scheduler.complete(&step) {
            if let Some(cached) = expected[&output.job] {
                assert_eq!(output.cached, cached, "cached tokens");
            }
        }
        events.extend(scheduler.cache.take_events());
    }
    events
}

#[test]
fn events_match_captured_vllm_events() {
    let data = include_str!("../../../tests/data/engine_sim/vllm-0.32.json");
    let mut events_seen = 0;
    for CapturedSeries { blocks, scenarios } in
        serde_json::from_str::<Vec<CapturedSeries>>(data).unwrap()
    {
        let limits = SchedulerLimits {
            max_num_batched_tokens: 2048,
            max_num_seqs: 8,
        };
        let mut scheduler = StepScheduler::new(BlockCache::new(32, blocks), limits);
        let mut mapping = HashMapping::default();
        let mut next = 0;
        for CapturedScenario { name, ops, events } in scenarios {
            let mut ours = Vec::new();
            for op in ops {
                match op {
                    CapturedOp::Reset(()) => assert!(scheduler.cache.reset(), "{name}"),
                    CapturedOp::Jobs(requests) => {
                        ours.extend(run(&mut scheduler, requests, &mut next))
                    }
                }
            }
            assert_eq!(ours.len(), events.len(), "{name}");
            for (at, (theirs, ours)) in events.iter().zip(&ours).enumerate() {
                match (theirs, ours) {
                    (CapturedEvent::Cleared, CacheEvent::Cleared) => {
                        mapping = HashMapping::default()
                    }
                    (CapturedEvent::Removed(theirs), CacheEvent::Removed(ours)) => {
                        mapping.check(*theirs, *ours)
                    }
                    (CapturedEvent::Stored(theirs), CacheEvent::Stored(ours)) => {
                        mapping.check_stored(theirs, ours)
                    }
                    _ => panic!("{name}, event {at}: {theirs:?} against {ours:?}"),
                }
            }
            events_seen += events.len();
        }
    }
    assert!(events_seen > 100, "{events_seen} events");
}
