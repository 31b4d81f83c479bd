//! The prefix index, event by event.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Value, json};
use warmroute::block::{BlockHashes, EngineHash, LocalHash};
use warmroute::index::{
    KvEvent, Outcome, Overlaps, PrefixIndex, RankWriter, StoredBlock, TierBlocks,
};
use warmroute::tier::Tier;
use warmroute::worker::{BlockSize, DpRank, Slot, WorkerId, WorkerRank};

use super::frame::{Check, Deviation, Report, run_cases};

/// All other steps of these cases answer as the original does.
const DEVIATIONS: &[Deviation] = &[
    Deviation {
        case: "remove middle block truncates the rest of that run",
        at: "step 3",
        ours: "3",
        theirs: "1",
        reason: "exactly the named block is removed; what lies behind it is still held, though not reported",
    },
    Deviation {
        case: "remove middle block truncates the rest of that run",
        at: "step 4",
        ours: r#""ok""#,
        theirs: r#"{"error":"BlockNotFound"}"#,
        reason: "what lies behind a gap is known by name, so its own removal finds it",
    },
    Deviation {
        case: "lower-tier conflicting child hash keeps the first mapping",
        at: "step 2",
        ours: r#"{"device":[],"host_pinned":[[1,0,2.0],[2,0,2.0]],"disk":[],"external":[],"effective":[[1,0,1.5],[2,0,1.5]]}"#,
        theirs: r#"{"device":[],"host_pinned":[[1,0,2.0]],"disk":[],"external":[],"effective":[[1,0,1.5]]}"#,
        reason: "ranks with other engine hashes for the same content are addressable in every tier",
    },
];

/// What the original shows beside the answers we give too.
const NOT_KEPT: &[(&str, &str)] = &[
    ("frequencies", "always empty in the original"),
    (
        "device_last_matched_block_hash",
        "the tiers are walked in one trie, so no query starts at a block's name",
    ),
    ("next_last_hash", "the same"),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    description: String,
    implementation_specific: Option<String>,
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

fn rows(value: &Value) -> impl Iterator<Item = &serde_json::Map<String, Value>> {
    value
        .as_array()
        .into_iter()
        .flatten()
        .map(|row| row.as_object().unwrap())
}

fn rank(row: &serde_json::Map<String, Value>) -> Rank {
    (
        row["worker_id"].as_u64().unwrap(),
        u32::try_from(row["dp_rank"].as_u64().unwrap()).unwrap(),
    )
}

/// Rows of an expected answer, by rank; ranks with nothing are the same as absent ones.
fn by_rank(value: &Value, key: &str) -> Vec<(u64, u32, f64)> {
    let known = [
        "worker_id",
        "dp_rank",
        key,
        "next_position",
        "cached_tokens_block_size_16",
    ];
    let row = |row: &serde_json::Map<String, Value>| {
        only(row, &known);
        (rank(row).0, rank(row).1, row[key].as_f64().unwrap())
    };
    let mut rows: Vec<_> = rows(value)
        .map(row)
        .filter(|(_, _, value)| *value > 0.0)
        .collect();
    rows.sort_by_key(|(worker, rank, _)| (*worker, *rank));
    rows
}

/// Fails on a field that no check knows.
fn only(row: &serde_json::Map<String, Value>, fields: &[&str]) {
    for field in row.keys() {
        let kept = !NOT_KEPT.iter().any(|(name, _)| name == field);
        assert!(
            !kept || fields.contains(&field.as_str()),
            "unknown field {field:?} in {row:?}"
        );
    }
}

struct Bench {
    index: Arc<PrefixIndex>,
    slots: Vec<Rank>,
    writers: BTreeMap<Rank, RankWriter>,
}

impl Bench {
    fn apply(&mut self, rank: Rank, event: &KvEvent) -> Outcome {
        let slot = self
            .slots
            .iter()
            .position(|known| *known == rank)
            .unwrap_or_else(|| {
                self.slots.push(rank);
                self.slots.len() - 1
            });
        let index = &self.index;
        self.writers
            .entry(rank)
            .or_insert_with(|| index.join(Slot(slot as u32)))
            .apply(event)
    }

    fn query(&self, locals: &[u64]) -> BTreeMap<Rank, TierBlocks> {
        let locals: Vec<_> = locals.iter().copied().map(LocalHash).collect();
        let hashes = BlockHashes::chain(locals.len() * 16, BlockSize::new(16).unwrap(), locals);
        let mut overlaps = Overlaps::new();
        self.index.overlaps(&hashes, &mut overlaps);
        overlaps
            .iter()
            .map(|(slot, blocks)| (self.slots[slot.at()], blocks))
            .collect()
    }

    /// Our answer to a step and the original's, in the same words.
    fn run(&mut self, step: &Step) -> (Value, Value) {
        let expected = &step.result;
        match &step.step {
            Op::Stored {
                worker_id,
                dp_rank,
                parent_block_hash,
                blocks,
                tier,
            } => {
                let block = |block: &Block| StoredBlock {
                    engine: EngineHash(block.block_hash),
                    local: LocalHash(block.local_hash),
                };
                let event = KvEvent::Stored {
                    parent: parent_block_hash.map(EngineHash),
                    blocks: blocks.iter().map(block).collect(),
                    tier: *tier,
                };
                outcomes(self.apply((*worker_id, *dp_rank), &event), expected)
            }
            Op::Removed {
                worker_id,
                dp_rank,
                block_hashes,
                tier,
            } => {
                let blocks = block_hashes.iter().copied().map(EngineHash).collect();
                let event = KvEvent::Removed {
                    blocks,
                    tier: *tier,
                };
                outcomes(self.apply((*worker_id, *dp_rank), &event), expected)
            }
            Op::Cleared {
                worker_id, dp_rank, ..
            } => outcomes(
                self.apply((*worker_id, *dp_rank), &KvEvent::Cleared),
                expected,
            ),
            Op::RemoveWorker { worker_id } => {
                self.writers.retain(|rank, _| rank.0 != *worker_id);
                (Value::Null, expected.clone())
            }
            Op::RemoveWorkerDpRank { worker_id, dp_rank } => {
                self.writers.remove(&(*worker_id, *dp_rank));
                (Value::Null, expected.clone())
            }
            Op::ClearAllBlocks { worker_id, .. } => {
                let writers = self
                    .writers
                    .iter_mut()
                    .filter(|(rank, _)| rank.0 == *worker_id);
                writers.for_each(|(_, writer)| {
                    assert_eq!(writer.apply(&KvEvent::Cleared), Outcome::Ok)
                });
                (Value::Null, expected.clone())
            }
            // Routing never stops a query early; where the original does, its cases give the same answer.
            Op::Query { local_hashes } | Op::QueryEarlyExit { local_hashes } => {
                only(expected.as_object().unwrap(), &["overlap"]);
                let ours = per_rank(&self.query(local_hashes), |blocks| f64::from(blocks.device));
                (json!(ours), json!(by_rank(&expected["overlap"], "blocks")))
            }
            Op::QueryAllTiers { local_hashes } => self.all_tiers(local_hashes, expected),
            Op::Size { .. } => (json!(self.index.stats().total.device), expected.clone()),
            Op::DumpAsStoreEvents { .. } => (json!(self.edges()), json!(edges(expected))),
            Op::KnownWorkers {} => {
                let slots = self.index.stats().slots;
                let workers: BTreeSet<u64> = slots
                    .iter()
                    .map(|known| self.slots[known.slot.at()].0)
                    .collect();
                (json!(workers), expected.clone())
            }
        }
    }

    fn all_tiers(&self, local_hashes: &[u64], expected: &Value) -> (Value, Value) {
        only(
            expected.as_object().unwrap(),
            &[
                "device",
                "lower_tiers",
                "effective_overlap_blocks_default_weights",
            ],
        );
        let ours = self.query(local_hashes);
        let effective = |blocks: &TierBlocks| blocks.effective(0.75, 0.25);
        for row in rows(&expected["effective_overlap_blocks_default_weights"]) {
            // The original rounds half away from zero, as `round` does.
            let tokens = (row["effective_blocks"].as_f64().unwrap() * 16.0).round();
            assert_eq!(row["cached_tokens_block_size_16"].as_f64(), Some(tokens));
        }
        let lower = &expected["lower_tiers"];
        only(
            lower.as_object().unwrap(),
            &["host_pinned", "disk", "external"],
        );
        for (tier, depth) in [("host_pinned", 2), ("disk", 3), ("external", 4)] {
            for row in rows(&lower[tier]) {
                let blocks = ours.get(&rank(row)).copied().unwrap_or_default();
                let reached: u32 = [blocks.device, blocks.host, blocks.disk, blocks.external]
                    [..depth]
                    .iter()
                    .sum();
                assert_eq!(row["next_position"], reached, "{tier}");
            }
        }
        let theirs = json!({
            "device": by_rank(&expected["device"], "blocks"),
            "host_pinned": by_rank(&lower["host_pinned"], "extension_blocks"),
            "disk": by_rank(&lower["disk"], "extension_blocks"),
            "external": by_rank(&lower["external"], "extension_blocks"),
            "effective": by_rank(&expected["effective_overlap_blocks_default_weights"], "effective_blocks"),
        });
        let ours = json!({
            "device": per_rank(&ours, |blocks| f64::from(blocks.device)),
            "host_pinned": per_rank(&ours, |blocks| f64::from(blocks.host)),
            "disk": per_rank(&ours, |blocks| f64::from(blocks.disk)),
            "external": per_rank(&ours, |blocks| f64::from(blocks.external)),
            "effective": per_rank(&ours, effective),
        });
        (ours, theirs)
    }

    /// What the ranks hold, told by the events of their dumps.
    fn edges(&self) -> BTreeSet<Edge> {
        let mut edges = BTreeSet::new();
        for (rank, writer) in &self.writers {
            let of = WorkerRank {
                worker: WorkerId(rank.0),
                rank: DpRank(rank.1),
            };
            for event in writer.portrait(of).events() {
                let KvEvent::Stored {
                    mut parent,
                    blocks,
                    tier: Tier::Device,
                } = event
                else {
                    panic!("{event:?}")
                };
                for block in blocks {
                    edges.insert((
                        *rank,
                        parent.map(|parent| parent.0),
                        block.local.0,
                        block.engine.0,
                    ));
                    parent = Some(block.engine);
                }
            }
        }
        edges
    }
}

/// Rank, parent, local hash and name of a block.
type Edge = (Rank, Option<u64>, u64, u64);

fn per_rank(
    ours: &BTreeMap<Rank, TierBlocks>,
    value: impl Fn(&TierBlocks) -> f64,
) -> Vec<(u64, u32, f64)> {
    let rows = ours
        .iter()
        .map(|(rank, blocks)| (rank.0, rank.1, value(blocks)));
    rows.filter(|(_, _, value)| *value > 0.0).collect()
}

/// Runs are cut elsewhere in the original, so they are compared block by block.
fn edges(expected: &Value) -> BTreeSet<Edge> {
    let mut edges = BTreeSet::new();
    for row in rows(expected) {
        only(
            row,
            &["worker_id", "dp_rank", "parent_block_hash", "blocks"],
        );
        let mut parent = row["parent_block_hash"].as_u64();
        for block in row["blocks"].as_array().unwrap() {
            let engine = block[1].as_u64().unwrap();
            edges.insert((rank(row), parent, block[0].as_u64().unwrap(), engine));
            parent = Some(engine);
        }
    }
    edges
}

/// `submitted` means that the original applied the event later and told nobody what became of it.
fn outcomes(ours: Outcome, expected: &Value) -> (Value, Value) {
    if expected == "submitted" {
        return (json!("submitted"), expected.clone());
    }
    let ours = match ours {
        Outcome::Ok | Outcome::DuplicateStore => json!("ok"),
        Outcome::ParentNotFound => json!({ "error": "ParentBlockNotFound" }),
        Outcome::BlockNotFound => json!({ "error": "BlockNotFound" }),
        other => json!(other.as_str()),
    };
    (ours, expected.clone())
}

pub(crate) fn run(text: &str) -> Report {
    run_cases(
        text,
        DEVIATIONS,
        |case: &Case| case.description.clone(),
        |case, comparisons| check(&case, comparisons),
    )
}

fn check(case: &Case, check: &mut Check) {
    let name = case.description.as_str();
    let mut bench = Bench {
        index: PrefixIndex::new(),
        slots: vec![],
        writers: BTreeMap::new(),
    };
    for (at, step) in case.steps.iter().enumerate() {
        let (ours, theirs) = bench.run(step);
        check.same(format_args!("step {at}"), ours, theirs);
    }
    let differs = DEVIATIONS.iter().any(|deviation| deviation.case == name);
    assert!(
        case.implementation_specific.is_none() || differs,
        "is said to be no rule, but we follow it"
    );
}
