//! The scheduler and the cache against a real engine: prompts that were sent to vLLM 0.32 (block size 32, data in
//! `tests/data/engine_sim`) are computed again, with the tokens that engine answered, and every event must come out the
//! same, in the same order. Only the hashes differ, so they must map one to one. This proves the hits, the copies, the
//! chunks, the order of eviction and the extra keys.

use std::collections::HashMap;
use std::sync::Arc;

use serde::Deserialize;

use super::cache::{Cache, CacheEvent, Keys, Lora, Sequence, Stored};
use super::scheduler::{Job, JobId, Limits, Scheduler};

#[derive(Deserialize)]
struct Series {
    blocks: usize,
    scenarios: Vec<Scenario>,
}

#[derive(Deserialize)]
struct Scenario {
    name: String,
    ops: Vec<Op>,
    events: Vec<Captured>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Op {
    Reset(()),
    /// Sent at once.
    Jobs(Vec<Asked>),
}

#[derive(Deserialize)]
struct Asked {
    prompt: Vec<u32>,
    answer: Vec<u32>,
    cached: Option<usize>,
    lora: Option<Arc<str>>,
    salt: Option<Arc<str>>,
    session: Option<Arc<str>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Captured {
    Cleared,
    Removed(u64),
    Stored(CapturedStored),
}

#[derive(Debug, Deserialize)]
struct CapturedStored {
    hashes: Vec<u64>,
    parent: Option<u64>,
    /// How many, the first and the last.
    tokens: (usize, u32, u32),
    extra_keys: Vec<Option<Vec<Arc<str>>>>,
    lora: (Option<u32>, Option<Arc<str>>),
    session: Option<Arc<str>>,
}

/// vLLM's name of a block to ours, and back.
#[derive(Default)]
struct Names(HashMap<u64, u64>, HashMap<u64, u64>);

impl Names {
    fn check(&mut self, theirs: u64, ours: u64) {
        assert_eq!(
            *self.0.entry(theirs).or_insert(ours),
            ours,
            "another block than {theirs}"
        );
        assert_eq!(
            *self.1.entry(ours).or_insert(theirs),
            theirs,
            "another block than {theirs}"
        );
    }

    fn check_stored(&mut self, theirs: &CapturedStored, ours: &Stored) {
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

fn lora(name: Arc<str>) -> Lora {
    Lora {
        id: if &*name == "lora-x" { 1 } else { 2 },
        name,
    }
}

/// Computes what was asked; checks what was cached.
fn run(scheduler: &mut Scheduler, asked: Vec<Asked>, next: &mut u64) -> Vec<CacheEvent> {
    let mut expected = HashMap::new();
    for Asked {
        prompt,
        answer,
        cached,
        lora: name,
        salt,
        session,
    } in asked
    {
        let keys = Keys {
            lora: name.map(lora),
            salt,
            session,
        };
        let id = JobId(*next);
        *next += 1;
        expected.insert(id, cached);
        scheduler.submit(Job::new(id, Sequence::new(prompt, keys), answer));
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
fn every_event_of_a_real_engine_comes_out_the_same_in_the_same_order() {
    let data = include_str!("../../../tests/data/engine_sim/vllm-0.32.json");
    let mut events_seen = 0;
    for Series { blocks, scenarios } in serde_json::from_str::<Vec<Series>>(data).unwrap() {
        let limits = Limits {
            max_num_batched_tokens: 2048,
            max_num_seqs: 8,
        };
        let mut scheduler = Scheduler::new(Cache::new(32, blocks), limits);
        let (mut names, mut next) = (Names::default(), 0);
        for Scenario { name, ops, events } in scenarios {
            let mut ours = Vec::new();
            for op in ops {
                match op {
                    Op::Reset(()) => assert!(scheduler.cache.reset(), "{name}"),
                    Op::Jobs(asked) => ours.extend(run(&mut scheduler, asked, &mut next)),
                }
            }
            assert_eq!(ours.len(), events.len(), "{name}");
            for (at, (theirs, ours)) in events.iter().zip(&ours).enumerate() {
                match (theirs, ours) {
                    (Captured::Cleared, CacheEvent::Cleared) => names = Names::default(),
                    (Captured::Removed(theirs), CacheEvent::Removed(ours)) => {
                        names.check(*theirs, *ours)
                    }
                    (Captured::Stored(theirs), CacheEvent::Stored(ours)) => {
                        names.check_stored(theirs, ours)
                    }
                    _ => panic!("{name}, event {at}: {theirs:?} against {ours:?}"),
                }
            }
            events_seen += events.len();
        }
    }
    assert!(events_seen > 100, "{events_seen} events");
}
