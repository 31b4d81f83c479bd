//! Operations on the prefix index, event by event.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Value, json};
use warmroute_core::block::{BlockHashes, EngineHash, LocalHash, StorageTier};
use warmroute_core::index::{
    ApplyOutcome, KvEvent, Overlaps, PrefixIndex, RankWriter, StoredBlock, TierBlocks,
};
use warmroute_core::worker::{BlockSize, DpRank, RankSlot, WorkerId, WorkerRank};

use super::frame::{CaseCheck, CheckReport, GoldenDeviation, run_cases};

/// Intended differences. All other steps of these cases match the reference.
const DEVIATIONS: &[GoldenDeviation] = &[
    GoldenDeviation {
        case: "remove middle block truncates the rest of that run",
        at: "step 3",
        ours: "3",
        theirs: "1",
        reason: "only the named block is removed; the blocks after it stay in the index, but are not part of an overlap",
    },
    GoldenDeviation {
        case: "remove middle block truncates the rest of that run",
        at: "step 4",
        ours: r#""ok""#,
        theirs: r#"{"error":"BlockNotFound"}"#,
        reason: "blocks after a gap stay in the index, so their removal succeeds",
    },
    GoldenDeviation {
        case: "lower-tier conflicting child hash keeps the first mapping",
        at: "step 2",
        ours: r#"{"device":[],"host_pinned":[[1,0,2.0],[2,0,2.0]],"disk":[],"external":[],"effective":[[1,0,1.5],[2,0,1.5]]}"#,
        theirs: r#"{"device":[],"host_pinned":[[1,0,2.0]],"disk":[],"external":[],"effective":[[1,0,1.5]]}"#,
        reason: "ranks with other engine hashes for the same content are addressable in every tier",
    },
];

/// Output of the reference that this index does not produce.
const NOT_KEPT: &[(&str, &str)] = &[
    ("frequencies", "always empty in the reference"),
    (
        "device_last_matched_block_hash",
        "all tiers are in one trie, so no query starts at a block hash",
    ),
    (
        "next_last_hash",
        "all tiers are in one trie, so no query starts at a block hash",
    ),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct IndexCase {
    description: String,
    implementation_specific: Option<String>,
    steps: Vec<IndexStep>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct IndexStep {
    step: IndexOp,
    result: Value,
    /// Answer of the reference's other index, which is wrong where the two differ.
    #[serde(rename = "overlap_concurrent_index")]
    _concurrent: Option<Value>,
}

#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
enum IndexOp {
    Stored {
        worker_id: u64,
        dp_rank: u32,
        parent_block_hash: Option<u64>,
        blocks: Vec<GoldenBlock>,
        tier: StorageTier,
    },
    Removed {
        worker_id: u64,
        dp_rank: u32,
        block_hashes: Vec<u64>,
        tier: StorageTier,
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
struct GoldenBlock {
    local_hash: u64,
    block_hash: u64,
}

impl GoldenBlock {
    fn stored(&self) -> StoredBlock {
        StoredBlock {
            engine: EngineHash(self.block_hash),
            local: LocalHash(self.local_hash),
        }
    }
}

type RankKey = (u64, u32);

fn rows(value: &Value) -> impl Iterator<Item = &serde_json::Map<String, Value>> {
    value
        .as_array()
        .into_iter()
        .flatten()
        .map(|row| row.as_object().unwrap())
}

fn rank(row: &serde_json::Map<String, Value>) -> RankKey {
    (
        row["worker_id"].as_u64().unwrap(),
        u32::try_from(row["dp_rank"].as_u64().unwrap()).unwrap(),
    )
}

/// Returns the rows of an expected answer by rank. Empty rows equal absent ones.
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

/// Panics on an unknown field.
fn only(row: &serde_json::Map<String, Value>, fields: &[&str]) {
    for field in row.keys() {
        let kept = !NOT_KEPT.iter().any(|(name, _)| name == field);
        assert!(
            !kept || fields.contains(&field.as_str()),
            "unknown field {field:?} in {row:?}"
        );
    }
}

struct IndexHarness {
    index: Arc<PrefixIndex>,
    slots: Vec<RankKey>,
    writers: BTreeMap<RankKey, RankWriter>,
}

impl IndexHarness {
    fn apply(&mut self, rank: RankKey, event: &KvEvent) -> ApplyOutcome {
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
            .or_insert_with(|| index.create_writer(RankSlot(slot as u32)))
            .apply(event)
    }

    fn query(&self, locals: &[u64]) -> BTreeMap<RankKey, TierBlocks> {
        let locals: Vec<_> = locals.iter().copied().map(LocalHash).collect();
        let hashes =
            BlockHashes::from_locals(locals.len() * 16, BlockSize::new(16).unwrap(), locals);
        let mut overlaps = Overlaps::new();
        self.index.query_overlaps(&hashes, &mut overlaps);
        overlaps
            .iter()
            .map(|(slot, blocks)| (self.slots[slot.index()], blocks))
            .collect()
    }

    /// Returns the answer to a step and the expected answer in the same format.
    fn run(&mut self, step: &IndexStep) -> (Value, Value) {
        let expected = &step.result;
        match &step.step {
            IndexOp::Stored {
                worker_id,
                dp_rank,
                parent_block_hash,
                blocks,
                tier,
            } => {
                let event = KvEvent::Stored {
                    parent: parent_block_hash.map(EngineHash),
                    blocks: blocks.iter().map(GoldenBlock::stored).collect(),
                    tier: *tier,
                };
                outcomes(self.apply((*worker_id, *dp_rank), &event), expected)
            }
            IndexOp::Removed {
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
            IndexOp::Cleared {
                worker_id, dp_rank, ..
            } => outcomes(
                self.apply((*worker_id, *dp_rank), &KvEvent::Cleared),
                expected,
            ),
            IndexOp::RemoveWorker { worker_id } => {
                self.writers.retain(|rank, _| rank.0 != *worker_id);
                (Value::Null, expected.clone())
            }
            IndexOp::RemoveWorkerDpRank { worker_id, dp_rank } => {
                self.writers.remove(&(*worker_id, *dp_rank));
                (Value::Null, expected.clone())
            }
            IndexOp::ClearAllBlocks { worker_id, .. } => {
                self.clear_worker(*worker_id);
                (Value::Null, expected.clone())
            }
            // This router never stops a query early. The cases in which the reference does have the
            // same answer.
            IndexOp::Query { local_hashes } | IndexOp::QueryEarlyExit { local_hashes } => {
                only(expected.as_object().unwrap(), &["overlap"]);
                let ours = per_rank(&self.query(local_hashes), |blocks| f64::from(blocks.device));
                (json!(ours), json!(by_rank(&expected["overlap"], "blocks")))
            }
            IndexOp::QueryAllTiers { local_hashes } => self.all_tiers(local_hashes, expected),
            IndexOp::Size { .. } => (json!(self.index.stats().total.device), expected.clone()),
            IndexOp::DumpAsStoreEvents { .. } => (json!(self.edges()), json!(edges(expected))),
            IndexOp::KnownWorkers {} => (json!(self.known_workers()), expected.clone()),
        }
    }

    fn clear_worker(&mut self, worker_id: u64) {
        for (rank, writer) in &mut self.writers {
            if rank.0 == worker_id {
                assert_eq!(writer.apply(&KvEvent::Cleared), ApplyOutcome::Ok);
            }
        }
    }

    fn known_workers(&self) -> BTreeSet<u64> {
        let slots = self.index.stats().slots;
        slots
            .iter()
            .map(|known| self.slots[known.slot.index()].0)
            .collect()
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
        let effective = |blocks: &TierBlocks| blocks.weighted_total(0.75, 0.25);
        for row in rows(&expected["effective_overlap_blocks_default_weights"]) {
            // The reference rounds half away from zero, as `round` does.
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

    /// Returns the blocks of all ranks, read from the events of their dumps.
    fn edges(&self) -> BTreeSet<BlockEdge> {
        let mut edges = BTreeSet::new();
        for (rank, writer) in &self.writers {
            let of = WorkerRank {
                worker: WorkerId(rank.0),
                rank: DpRank(rank.1),
            };
            for event in writer.snapshot(of).events() {
                let KvEvent::Stored {
                    mut parent,
                    blocks,
                    tier: StorageTier::Device,
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

/// Rank, parent, local hash and engine hash of a block.
type BlockEdge = (RankKey, Option<u64>, u64, u64);

fn per_rank(
    ours: &BTreeMap<RankKey, TierBlocks>,
    value: impl Fn(&TierBlocks) -> f64,
) -> Vec<(u64, u32, f64)> {
    let rows = ours
        .iter()
        .map(|(rank, blocks)| (rank.0, rank.1, value(blocks)));
    rows.filter(|(_, _, value)| *value > 0.0).collect()
}

/// Returns the expected blocks one by one, because the reference splits runs at other positions.
fn edges(expected: &Value) -> BTreeSet<BlockEdge> {
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

/// Returns both outcomes in the same format. `submitted` means that the reference applied the event
/// asynchronously without reporting a result.
fn outcomes(ours: ApplyOutcome, expected: &Value) -> (Value, Value) {
    if expected == "submitted" {
        return (json!("submitted"), expected.clone());
    }
    let ours = match ours {
        ApplyOutcome::Ok | ApplyOutcome::DuplicateStore => json!("ok"),
        ApplyOutcome::ParentNotFound => json!({ "error": "ParentBlockNotFound" }),
        ApplyOutcome::BlockNotFound => json!({ "error": "BlockNotFound" }),
        other => json!(other.as_str()),
    };
    (ours, expected.clone())
}

pub(crate) fn run(text: &str) -> CheckReport {
    run_cases(
        text,
        DEVIATIONS,
        |case: &IndexCase| case.description.clone(),
        |case, comparisons| check(&case, comparisons),
    )
}

fn check(case: &IndexCase, check: &mut CaseCheck) {
    let name = case.description.as_str();
    let mut harness = IndexHarness {
        index: PrefixIndex::new(),
        slots: vec![],
        writers: BTreeMap::new(),
    };
    for (at, step) in case.steps.iter().enumerate() {
        let (ours, theirs) = harness.run(step);
        check.same(format_args!("step {at}"), ours, theirs);
    }
    let differs = DEVIATIONS.iter().any(|deviation| deviation.case == name);
    assert!(
        case.implementation_specific.is_none() || differs,
        "the case is implementation-specific, but no deviation is listed"
    );
}
