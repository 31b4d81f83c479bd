//! The prefix index, event by event.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use warmroute::block::{BlockHashes, EngineHash, LocalHash};
use warmroute::index::{KvEvent, Outcome, Overlaps, PrefixIndex, RankWriter, StoredBlock, TierBlocks};
use warmroute::tier::Tier;
use warmroute::worker::{BlockSize, Slot};

/// Where we differ on purpose, by case. The steps before the difference are run, the rest of the case is in the index's
/// own tests.
const DIFFERENT: &[(&str, &str)] = &[
    (
        "remove middle block truncates the rest of that run",
        "exactly the named block is removed; what lies behind it is still held, though not reported",
    ),
    (
        "lower-tier store with unknown parent is accepted (edge keyed by parent)",
        "a store whose parent is unknown is dropped in every tier",
    ),
    (
        "lower-tier conflicting child hash keeps the first mapping",
        "ranks with other engine hashes for the same content are addressable in every tier",
    ),
];

/// Queries of the original that have no counterpart here.
const NO_COUNTERPART: &[(&str, &str)] = &[
    ("dump_as_store_events", "the index is not dumped to peers"),
    ("known_workers", "the fleet knows the workers, the index only holds their blocks"),
    ("query_early_exit", "routing never stops a query early; run as a plain query"),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    description: String,
    #[serde(rename = "implementation_specific")]
    _implementation_specific: Option<String>,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Step {
    step: Op,
    result: Value,
    /// What the original's other index said; where the two differ it is the wrong one.
    #[serde(rename = "overlap_concurrent_index")]
    _concurrent: Option<Value>,
}

#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
enum Op {
    Stored {
        worker_id: u64,
        dp_rank: u32,
        parent_block_hash: Option<u64>,
        blocks: Vec<Block>,
        tier: Tier,
    },
    Removed {
        worker_id: u64,
        dp_rank: u32,
        block_hashes: Vec<u64>,
        tier: Tier,
    },
    Cleared {
        worker_id: u64,
        dp_rank: u32,
        #[serde(rename = "applied_to")]
        _applied_to: String,
    },
    RemoveWorker {
        worker_id: u64,
    },
    RemoveWorkerDpRank {
        worker_id: u64,
        dp_rank: u32,
    },
    ClearAllBlocks {
        worker_id: u64,
        #[serde(rename = "note")]
        _note: String,
    },
    Query {
        local_hashes: Vec<u64>,
    },
    QueryEarlyExit {
        local_hashes: Vec<u64>,
    },
    QueryAllTiers {
        local_hashes: Vec<u64>,
    },
    Size {
        #[serde(rename = "note")]
        _note: String,
    },
    DumpAsStoreEvents {
        #[serde(rename = "note")]
        _note: String,
    },
    KnownWorkers {},
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Block {
    local_hash: u64,
    block_hash: u64,
}

type Rank = (u64, u32);
type OfTier = fn(&TierBlocks) -> u32;

/// Rows of an expected answer, by rank; ranks with nothing are the same as absent ones.
fn by_rank(rows: &Value, key: &str) -> BTreeMap<Rank, f64> {
    let rank = |row: &Value| (row["worker_id"].as_u64().unwrap(), row["dp_rank"].as_u64().unwrap() as u32);
    let rows = rows.as_array().into_iter().flatten();
    rows.map(|row| (rank(row), row[key].as_f64().unwrap())).filter(|(_, value)| *value > 0.0).collect()
}

struct Bench {
    index: Arc<PrefixIndex>,
    slots: Vec<Rank>,
    writers: BTreeMap<Rank, RankWriter>,
}

impl Bench {
    fn apply(&mut self, rank: Rank, event: &KvEvent) -> Outcome {
        let slot = self.slots.iter().position(|known| *known == rank).unwrap_or_else(|| {
            self.slots.push(rank);
            self.slots.len() - 1
        });
        let index = &self.index;
        self.writers.entry(rank).or_insert_with(|| index.join(Slot(slot as u32))).apply(event)
    }

    fn query(&self, locals: &[u64]) -> BTreeMap<Rank, TierBlocks> {
        let locals: Vec<_> = locals.iter().copied().map(LocalHash).collect();
        let hashes = BlockHashes::chain(locals.len() * 16, BlockSize::new(16).unwrap(), locals);
        let mut overlaps = Overlaps::new();
        self.index.overlaps(&hashes, &mut overlaps);
        overlaps.iter().map(|(slot, blocks)| (self.slots[slot.at()], blocks)).collect()
    }

    fn run(&mut self, step: &Step, case: &str) {
        match &step.step {
            Op::Stored { worker_id, dp_rank, parent_block_hash, blocks, tier } => {
                let block = |block: &Block| StoredBlock {
                    engine: EngineHash(block.block_hash),
                    local: LocalHash(block.local_hash),
                };
                let event = KvEvent::Stored {
                    parent: parent_block_hash.map(EngineHash),
                    blocks: blocks.iter().map(block).collect(),
                    tier: *tier,
                };
                check_outcome(self.apply((*worker_id, *dp_rank), &event), &step.result, case);
            }
            Op::Removed { worker_id, dp_rank, block_hashes, tier } => {
                let blocks = block_hashes.iter().copied().map(EngineHash).collect();
                let event = KvEvent::Removed { blocks, tier: *tier };
                check_outcome(self.apply((*worker_id, *dp_rank), &event), &step.result, case);
            }
            Op::Cleared { worker_id, dp_rank, .. } => {
                check_outcome(self.apply((*worker_id, *dp_rank), &KvEvent::Cleared), &step.result, case);
            }
            Op::RemoveWorker { worker_id } => self.writers.retain(|rank, _| rank.0 != *worker_id),
            Op::RemoveWorkerDpRank { worker_id, dp_rank } => {
                self.writers.remove(&(*worker_id, *dp_rank));
            }
            Op::ClearAllBlocks { worker_id, .. } => {
                let writers = self.writers.iter_mut().filter(|(rank, _)| rank.0 == *worker_id);
                writers.for_each(|(_, writer)| assert_eq!(writer.apply(&KvEvent::Cleared), Outcome::Ok));
            }
            Op::Query { local_hashes } | Op::QueryEarlyExit { local_hashes } => {
                let ours = self.query(local_hashes).into_iter().map(|(rank, blocks)| (rank, f64::from(blocks.device)));
                let ours: BTreeMap<_, _> = ours.filter(|(_, blocks)| *blocks > 0.0).collect();
                assert_eq!(ours, by_rank(&step.result["overlap"], "blocks"), "{case}");
            }
            Op::QueryAllTiers { local_hashes } => self.check_tiers(local_hashes, &step.result, case),
            Op::Size { .. } => assert_eq!(self.index.stats().total.device, step.result.as_u64().unwrap(), "{case}"),
            Op::DumpAsStoreEvents { .. } => assert!(super::excused(NO_COUNTERPART, "dump_as_store_events").is_some()),
            Op::KnownWorkers {} => assert!(super::excused(NO_COUNTERPART, "known_workers").is_some()),
        }
    }
}

impl Bench {
    fn check_tiers(&self, local_hashes: &[u64], expected: &Value, case: &str) {
        let ours = self.query(local_hashes);
        let lower = &expected["lower_tiers"];
        let tiers: [(&Value, &str, OfTier); 4] = [
            (&expected["device"], "blocks", |blocks| blocks.device),
            (&lower["host_pinned"], "extension_blocks", |blocks| blocks.host),
            (&lower["disk"], "extension_blocks", |blocks| blocks.disk),
            (&lower["external"], "extension_blocks", |blocks| blocks.external),
        ];
        for (rows, key, of_tier) in tiers {
            let mine = ours.iter().map(|(rank, blocks)| (*rank, f64::from(of_tier(blocks))));
            let mine: BTreeMap<_, _> = mine.filter(|(_, blocks)| *blocks > 0.0).collect();
            assert_eq!(mine, by_rank(rows, key), "{case}");
        }
        let effective = &expected["effective_overlap_blocks_default_weights"];
        let mine: BTreeMap<_, _> = ours.iter().map(|(rank, blocks)| (*rank, blocks.effective(0.75, 0.25))).collect();
        assert_eq!(mine, by_rank(effective, "effective_blocks"), "{case}");
    }
}

/// `submitted` means that the original applied the event later and told nobody what became of it.
fn check_outcome(ours: Outcome, expected: &Value, case: &str) {
    let matches = match (expected.as_str(), expected["error"].as_str()) {
        (Some("ok"), _) => matches!(ours, Outcome::Ok | Outcome::DuplicateStore),
        (Some("submitted"), _) => true,
        (_, Some("ParentBlockNotFound")) => ours == Outcome::ParentNotFound,
        (_, Some("BlockNotFound")) => ours == Outcome::BlockNotFound,
        _ => false,
    };
    assert!(matches, "{case}: {ours:?} against {expected}");
}

#[test]
fn the_index_answers_as_the_field_does() {
    let cases = super::cases::<Case>(include_str!("index_ops.json"));
    super::check_table(DIFFERENT, cases.iter().map(|case| case.description.as_str()));
    for case in cases {
        let mut bench = Bench { index: PrefixIndex::new(), slots: vec![], writers: BTreeMap::new() };
        let mut run = || case.steps.iter().for_each(|step| bench.run(step, &case.description));
        match super::excused(DIFFERENT, &case.description) {
            None => run(),
            Some(reason) => {
                let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
                assert!(outcome.is_err(), "{} does not differ any more: {reason}", case.description);
            }
        }
    }
}
