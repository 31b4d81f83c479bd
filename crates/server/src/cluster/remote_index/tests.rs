//! Tests of the remote index with client and server. With a response, a router decides as the
//! server's router does. Invalid messages are rejected. A slow, unreachable or incompatible server
//! delays a request at most until its deadline.

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
    BlockSize, EventSource, ModelName, SocketAttach, Worker, WorkerId, WorkerRank,
};
use warmroute_metrics::{Metrics, OutcomeLabel};
use warmroute_property_tests::property_config;
use warmroute_runtime::lifecycle::Readiness;
use warmroute_settings::DurationSetting;

use super::config::RemoteIndexConfig;
use super::*;

const HASHING: u64 = 99;
const MODEL: &str = "m";

fn size() -> BlockSize {
    BlockSize::new(4).unwrap()
}

fn rank(id: u64) -> WorkerRank {
    WorkerRank::new(id, 0)
}

/// Returns workers, of which the last one publishes no events.
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

/// Returns a router with predictors for workers with and without events.
fn router(count: u64, seed: u64) -> Router {
    let load = LoadTracker::new(std::time::Instant::now);
    let predictor = || {
        let ttl = TtlPolicy {
            ttl: Duration::from_secs(3600),
            max_blocks_per_rank: 1000,
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
    let router = Router::new(PrefixIndex::new(), load, RouterSettings::default(), seed)
        .with_predictors(predictions);
    router.set_workers(workers(count));
    router
}

/// Returns the same router with a remote index instead of a local one.
fn remote_router(count: u64, seed: u64) -> Router {
    let router = router(0, seed).with_remote_index();
    router.set_workers(workers(count));
    router
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

fn source_status(number: u8) -> SourceStatus {
    let (freshness, reason) = match number % 6 {
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
        freshness,
        reason,
        engine_block_size,
        windows: None,
    }
}

/// A step of the round-trip test.
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
    SetStatus {
        id: u64,
        number: u8,
    },
    Request {
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
        2 => (1..WORKERS, any::<u8>()).prop_map(|(id, number)| Step::SetStatus { id, number }),
        6 => (vec(vec(0..2u64, 0..7), 1..3), any::<bool>()).prop_map(|(prompts, sent)| Step::Request { prompts, sent }),
    ];
    vec(step, 1..40)
}

/// Returns a `Stored` event. The engine hashes cover a block and all blocks before it.
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

/// Encodes and decodes a response.
fn encode_and_decode(answer: &RemoteAnswer, queried: &[BlockHashes]) -> RemoteAnswer {
    let prompts: Vec<_> = answer
        .prompts
        .iter()
        .map(|found| wire::encode_overlaps(found))
        .collect();
    let ranks = wire::decode_ranks(&wire::encode_ranks(&answer.ranks)).unwrap();
    RemoteAnswer {
        ranks: Arc::new(ranks),
        prompts: wire::decode_overlaps(&prompts, queried).unwrap(),
    }
}

/// Returns all serialized fields of a decision.
fn decision(route: &warmroute_core::router::Route) -> String {
    serde_json::to_string(route).unwrap()
}

proptest! {
    #![proptest_config(property_config(256))]

    #[test]
    fn remote_overlaps_give_the_local_decision(steps in steps(), seed in any::<u64>()) {
        let local = router(WORKERS, seed);
        let remote = remote_router(WORKERS, seed);
        let create_writer = |id: u64| local.index().create_writer(local.fleet().slot(rank(id)).unwrap());
        let mut writers: Vec<RankWriter> = (1..WORKERS).map(create_writer).collect();
        (1..WORKERS).for_each(|id| local.set_source_status(rank(id), SourceStatus::EXACT));
        let mut booked = Vec::new();
        for step in steps {
            match step {
                Step::Stored { id, locals, tier } => _ = writers[id as usize - 1].apply(&stored(&locals, tier)),
                Step::Grouped { id } => {
                    let need = GroupNeed::Trailing { blocks: 1, stride: NonZeroU32::MIN };
                    writers[id as usize - 1].apply(&KvEvent::GroupStored { group: 1, need, blocks: Vec::new() });
                }
                Step::Cleared { id } => _ = writers[id as usize - 1].apply(&KvEvent::Cleared),
                Step::SetStatus { id, number } => local.set_source_status(rank(id), source_status(number)),
                Step::Request { prompts, sent } => {
                    let request = request(&prompts);
                    let answer = encode_and_decode(&local.query_index(request.model.as_ref(), request.prompt.blocks()), request.prompt.blocks());
                    let mut remote_request = request.clone();
                    remote_request.remote_overlaps = RemoteOverlaps::Received(Arc::new(answer));
                    let explained = [local.explain(request.clone()), remote.explain(remote_request.clone())];
                    let [local_result, remote_result] = explained.map(|explained| serde_json::to_string(&explained).unwrap());
                    prop_assert_eq!(local_result, remote_result);
                    if sent {
                        let local_result = local.route(request).unwrap();
                        let remote_result = remote.route(remote_request).unwrap();
                        prop_assert_eq!(decision(&local_result.route), decision(&remote_result.route));
                        booked.push((local_result, remote_result));
                    } else {
                        prop_assert_eq!(decision(&local.preview(request).unwrap()), decision(&remote.preview(remote_request).unwrap()));
                    }
                }
            }
        }
        prop_assert_eq!(local.load().snapshot(), remote.load().snapshot());
        prop_assert_eq!(remote.index().stats().distinct_blocks, 0);
    }
}

#[test]
fn missing_answer_falls_back_to_predictions() {
    let remote = remote_router(3, 1);
    let new_request = || request(&[vec![1, 2, 3, 4]]);
    let mut first = remote.route(new_request()).unwrap();
    assert_eq!(
        (first.route.mode, first.route.reason),
        (Mode::Approximate, Some(Reason::IndexUnreachable))
    );
    assert_eq!(first.route.overlap, TierBlocks::default());
    let chosen = first.route.to.rank;
    remote.resolve_predictions(&mut first, 200);
    drop(first);
    let again = remote.preview(new_request()).unwrap();
    assert_eq!(
        (again.to.rank, again.overlap.device, again.mode),
        (chosen, 4, Mode::Approximate)
    );
    // Of an earlier response, only the engine's block size is used, not its status.
    let status = SourceStatus {
        engine_block_size: BlockSize::new(12),
        ..SourceStatus::EXACT
    };
    let rows = (1..=3)
        .map(|id| RemoteRank {
            rank: rank(id),
            status,
            has_cache_groups: false,
        })
        .collect();
    let unavailable = RouteRequest {
        remote_overlaps: RemoteOverlaps::Unavailable(Arc::new(RemoteRanks::new(rows))),
        ..new_request()
    };
    let again = remote.preview(unavailable).unwrap();
    assert_eq!(
        (again.to.rank, again.overlap.device, again.freshness),
        (chosen, 3, IndexFreshness::Absent)
    );
    // The router uses a response about workers with events instead of their predictions, even if
    // they hold no blocks.
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
            ..new_request()
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
    let remote =
        Router::new(PrefixIndex::new(), load, RouterSettings::default(), 1).with_remote_index();
    remote.set_workers(workers(2));
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
    let request = RouteRequest {
        remote_overlaps: RemoteOverlaps::Received(Arc::new(answer)),
        ..request(&[vec![1, 2, 3, 4]])
    };
    let mut booked = remote.route(request).unwrap();
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
