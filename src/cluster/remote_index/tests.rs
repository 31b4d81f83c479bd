//! Round trip of the remote index: a router with a response decides as the server's router does,
//! invalid messages are rejected, and slow, dead or incompatible servers cost a request at most its
//! deadline.

mod messages;
mod server_pool;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;
use warmroute_core::block::{BlockHashes, EngineHash, LocalHash, StorageTier};
use warmroute_core::freshness::{IndexFreshness, SourceStatus, StaleReason};
use warmroute_core::index::event::GroupNeed;
use warmroute_core::index::{KvEvent, PrefixIndex, RankWriter, StoredBlock, TierBlocks};
use warmroute_core::load::LoadTracker;
use warmroute_core::predict::{EvictionPolicy, Predictor, TtlPolicy};
use warmroute_core::router::{
    Mode, PredictorSet, Reason, RemoteAnswer, RemoteOverlaps, RemoteRank, RemoteRanks, RoutePrompt,
    RouteRequest, Router, RouterSettings,
};
use warmroute_core::worker::{
    BlockSize, DpRank, EventSource, ModelName, SocketAttach, Worker, WorkerId, WorkerRank,
};
use warmroute_metrics::{Metrics, OutcomeLabel};
use warmroute_runtime::lifecycle::Readiness;
use warmroute_settings::Period;

use super::config::RemoteIndexConfig;
use super::*;

const HASHING: u64 = 99;
const MODEL: &str = "m";

fn size() -> BlockSize {
    BlockSize::new(4).unwrap()
}

fn rank(id: u64) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(id),
        rank: DpRank(0),
    }
}

/// The last worker publishes no events.
fn workers(count: u64) -> Vec<Worker> {
    let source = || EventSource {
        endpoint: "tcp://127.0.0.1:1".to_owned(),
        topic: String::new(),
        attach: SocketAttach::Connect,
        replay: None,
    };
    let worker = |id: u64| {
        let mut worker = Worker::new(
            WorkerId(id),
            "127.0.0.1:8000".parse().unwrap(),
            MODEL.into(),
            size(),
        );
        worker.endpoint.0.set_port(8000 + id as u16);
        worker.event_sources = if id < count {
            vec![source()]
        } else {
            Vec::new()
        };
        worker
    };
    (1..=count).map(worker).collect()
}

/// A router with predictions of both kinds.
fn router(count: u64, seed: u64) -> Router {
    let load = LoadTracker::new(std::time::Instant::now);
    let predictor = || {
        let ttl = TtlPolicy {
            ttl: Duration::from_secs(3600),
            most_blocks_per_rank: 1000,
        };
        Some(Predictor::new(
            EvictionPolicy::Ttl(ttl),
            std::time::Instant::now,
        ))
    };
    let predictions = PredictorSet {
        without_events: predictor(),
        beside_events: predictor(),
        ..PredictorSet::default()
    };
    Router::new(PrefixIndex::new(), load, RouterSettings::default(), seed)
        .with_predictors(predictions)
        .with_fleet(count)
}

trait WithFleet {
    fn with_fleet(self, count: u64) -> Self;
}

impl WithFleet for Router {
    fn with_fleet(self, count: u64) -> Self {
        let change = self.fleet().reconcile(workers(count));
        for member in &change.added {
            self.load().open_slot(member.slot, member.rank);
            self.predictors().open_rank(member);
        }
        self.set_fleet(Arc::new(change.fleet));
        self
    }
}

/// The same router without an index, with predictions for all workers.
fn remote_router(count: u64, seed: u64) -> Router {
    let bare = router(0, seed).with_remote_index();
    bare.with_fleet(count)
}

fn hashes(locals: &[u64]) -> BlockHashes {
    BlockHashes::from_locals(
        locals.len() * 4 + 1,
        size(),
        locals.iter().copied().map(LocalHash).collect(),
    )
}

fn request(prompts: &[Vec<u64>]) -> RouteRequest {
    let prompts = prompts.iter().map(|locals| hashes(locals)).collect();
    RouteRequest::new(Some(MODEL.into()), RoutePrompt::Hashed(prompts))
}

fn standing(number: u8) -> SourceStatus {
    let (trust, because) = match number % 6 {
        0 | 1 => (IndexFreshness::Exact, None),
        2 => (
            IndexFreshness::Incomplete,
            Some(StaleReason::UnreportedBlocks),
        ),
        3 => (IndexFreshness::CatchingUp, Some(StaleReason::Replaying)),
        4 => (IndexFreshness::Stale, Some(StaleReason::LostBatches)),
        _ => (IndexFreshness::Absent, Some(StaleReason::BlockSizeMismatch)),
    };
    // An engine's blocks may be twice as large.
    let engine_block_size = (number % 4 == 3).then(|| BlockSize(NonZeroU32::new(8).unwrap()));
    SourceStatus {
        freshness: trust,
        reason: because,
        engine_block_size,
    }
}

/// An event before a request.
#[derive(Clone, Debug)]
enum Step {
    Stored {
        id: u64,
        locals: Vec<u64>,
        tier: StorageTier,
    },
    Grouped {
        id: u64,
    },
    Cleared {
        id: u64,
    },
    Stands {
        id: u64,
        number: u8,
    },
    Asked {
        prompts: Vec<Vec<u64>>,
        sent: bool,
    },
}

const WORKERS: u64 = 4;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let tier = prop_oneof![4 => Just(StorageTier::Device), 2 => Just(StorageTier::HostPinned), 1 => Just(StorageTier::External)];
    let step = prop_oneof![
        5 => (1..WORKERS, vec(0..2u64, 1..6), tier).prop_map(|(id, locals, tier)| Step::Stored { id, locals, tier }),
        1 => (1..WORKERS).prop_map(|id| Step::Grouped { id }),
        1 => (1..WORKERS).prop_map(|id| Step::Cleared { id }),
        2 => (1..WORKERS, any::<u8>()).prop_map(|(id, number)| Step::Stands { id, number }),
        6 => (vec(vec(0..2u64, 0..7), 1..3), any::<bool>()).prop_map(|(prompts, sent)| Step::Asked { prompts, sent }),
    ];
    vec(step, 1..40)
}

/// Engine hashes cover a block and all before it.
fn stored(locals: &[u64], tier: StorageTier) -> KvEvent {
    let names = hashes(locals);
    let blocks = names.locals().iter().zip(names.sequences());
    let blocks = blocks
        .map(|(local, name)| StoredBlock {
            engine: EngineHash(name.0),
            local: *local,
        })
        .collect();
    KvEvent::Stored {
        parent: None,
        blocks,
        tier,
    }
}

/// The response after encoding and decoding.
fn over_the_wire(answer: &RemoteAnswer, asked: &[BlockHashes]) -> RemoteAnswer {
    let prompts: Vec<_> = answer
        .prompts
        .iter()
        .map(|found| wire::encode_held(found))
        .collect();
    let ranks = wire::decode_ranks(&wire::encode_ranks(&answer.ranks)).unwrap();
    RemoteAnswer {
        ranks: Arc::new(ranks),
        prompts: wire::decode_held(&prompts, asked).unwrap(),
    }
}

/// Everything of a decision except its duration.
fn decision(route: &warmroute_core::router::Route) -> String {
    serde_json::to_string(route).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn remote_overlaps_give_the_local_decision(steps in steps(), seed in any::<u64>()) {
        let own = router(WORKERS, seed);
        let remote = remote_router(WORKERS, seed);
        let join = |id: u64| own.index().create_writer(own.fleet().slot(rank(id)).unwrap());
        let mut writers: Vec<RankWriter> = (1..WORKERS).map(join).collect();
        (1..WORKERS).for_each(|id| own.set_source_status(rank(id), SourceStatus::EXACT));
        let mut live = Vec::new();
        for step in steps {
            match step {
                Step::Stored { id, locals, tier } => _ = writers[id as usize - 1].apply(&stored(&locals, tier)),
                Step::Grouped { id } => {
                    let need = GroupNeed::Trailing { blocks: 1, stride: NonZeroU32::MIN };
                    writers[id as usize - 1].apply(&KvEvent::GroupStored { group: 1, need, blocks: Vec::new() });
                }
                Step::Cleared { id } => _ = writers[id as usize - 1].apply(&KvEvent::Cleared),
                Step::Stands { id, number } => own.set_source_status(rank(id), standing(number)),
                Step::Asked { prompts, sent } => {
                    let asked = request(&prompts);
                    let answer = over_the_wire(&own.query_index(asked.model.as_ref(), asked.prompt.blocks()), asked.prompt.blocks());
                    let mut there = asked.clone();
                    there.remote_overlaps = RemoteOverlaps::Received(Arc::new(answer));
                    let explained = [own.explain(asked.clone()), remote.explain(there.clone())];
                    let [ours, theirs] = explained.map(|explained| serde_json::to_string(&explained).unwrap());
                    prop_assert_eq!(ours, theirs);
                    if sent {
                        let ours = own.route(asked).unwrap();
                        let theirs = remote.route(there).unwrap();
                        prop_assert_eq!(decision(&ours.route), decision(&theirs.route));
                        live.push((ours, theirs));
                    } else {
                        prop_assert_eq!(decision(&own.preview(asked).unwrap()), decision(&remote.preview(there).unwrap()));
                    }
                }
            }
        }
        prop_assert_eq!(own.load().snapshot(), remote.load().snapshot());
        prop_assert_eq!(remote.index().stats().distinct_blocks, 0);
    }
}

#[test]
fn missing_answer_falls_back_to_predictions() {
    let remote = remote_router(3, 1);
    let asked = || request(&[vec![1, 2, 3, 4]]);
    let mut first = remote.route(asked()).unwrap();
    assert_eq!(
        (first.route.mode, first.route.reason),
        (Mode::Approximate, Some(Reason::IndexUnreachable))
    );
    assert_eq!(first.route.overlap, TierBlocks::default());
    let at = first.route.to.rank;
    remote.resolve_predictions(&mut first, 200);
    drop(first);
    let again = remote.preview(asked()).unwrap();
    assert_eq!(
        (again.to.rank, again.overlap.device, again.mode),
        (at, 4, Mode::Approximate)
    );
    // The engine's block size stays, and its status does not.
    let standing = SourceStatus {
        engine_block_size: BlockSize::new(12),
        ..SourceStatus::EXACT
    };
    let rows = (1..=3)
        .map(|id| RemoteRank {
            rank: rank(id),
            status: standing,
            has_cache_groups: false,
        })
        .collect();
    let away = RouteRequest {
        remote_overlaps: RemoteOverlaps::Unavailable(Arc::new(RemoteRanks::new(rows))),
        ..asked()
    };
    let again = remote.preview(away).unwrap();
    assert_eq!(
        (again.to.rank, again.overlap.device, again.freshness),
        (at, 3, IndexFreshness::Absent)
    );
    // A response that a worker with events holds nothing outweighs predictions, except for the time
    // until its events arrive.
    let rows = (1..=3)
        .map(|id| RemoteRank {
            rank: rank(id),
            status: SourceStatus::EXACT,
            has_cache_groups: true,
        })
        .collect();
    let answer = RemoteAnswer {
        ranks: Arc::new(RemoteRanks::new(rows)),
        prompts: vec![Vec::new()],
    };
    let route = remote
        .preview(RouteRequest {
            remote_overlaps: RemoteOverlaps::Received(Arc::new(answer)),
            ..asked()
        })
        .unwrap();
    assert_eq!(
        (route.mode, route.reason, route.overlap.device),
        (Mode::Exact, None, 0)
    );
}

#[test]
fn missing_predictions_fall_back_to_load() {
    let load = LoadTracker::new(std::time::Instant::now);
    let remote = Router::new(PrefixIndex::new(), load, RouterSettings::default(), 1)
        .with_remote_index()
        .with_fleet(2);
    let route = remote.preview(request(&[vec![1, 2]])).unwrap();
    assert_eq!(
        (route.mode, route.reason),
        (Mode::LoadOnly, Some(Reason::IndexUnreachable))
    );
}

#[test]
fn diverted_request_is_audited_by_the_same_answer() {
    let remote = remote_router(3, 1);
    let rows = (1..=3)
        .map(|id| RemoteRank {
            rank: rank(id),
            status: SourceStatus::EXACT,
            has_cache_groups: false,
        })
        .collect();
    let held = |id, device| {
        (
            rank(id),
            TierBlocks {
                device,
                ..TierBlocks::default()
            },
        )
    };
    let answer = RemoteAnswer {
        ranks: Arc::new(RemoteRanks::new(rows)),
        prompts: vec![vec![held(1, 4), held(2, 2)]],
    };
    let asked = RouteRequest {
        remote_overlaps: RemoteOverlaps::Received(Arc::new(answer)),
        ..request(&[vec![1, 2, 3, 4]])
    };
    let mut booked = remote.route(asked).unwrap();
    assert_eq!(booked.route.to.rank, rank(1));
    assert_eq!(
        remote.on_served_by(&mut booked, "127.0.0.1:8002".parse().unwrap()),
        warmroute_core::router::RelocationOutcome::Moved(rank(2))
    );
    let loads = remote.load().snapshot();
    let tokens = |id| {
        loads
            .iter()
            .find(|load| load.rank == rank(id))
            .unwrap()
            .active_prefill_tokens
    };
    assert_eq!((tokens(1), tokens(2)), (0, 17 - 8));
}
