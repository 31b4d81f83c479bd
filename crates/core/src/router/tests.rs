use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use proptest::collection::vec;
use proptest::prelude::*;
use warmroute_property_tests::property_config;

mod evictions;
mod explain;
mod external;
mod freshness;
mod gateway;
mod herd;
mod overload;
mod parity;
mod phases;
mod policies;
mod recovery;
mod rejected;

use super::*;
use crate::block::{BlockHashes, LocalHash};
use crate::index::PrefixIndex;
use crate::load::LoadTracker;
use crate::predict::Predictor;
use crate::queue::{BusyThreshold, PlaceOutcome};
use crate::worker::{
    BlockSize, RankRange, Worker, WorkerCapacity, WorkerEndpoint, WorkerId, WorkerRank, WorkerRole,
};

fn worker(id: u64) -> Worker {
    Worker::new(
        WorkerId(id),
        "127.0.0.1:8000".parse().unwrap(),
        "m".into(),
        BlockSize::new(4).unwrap(),
    )
}

/// Returns the active blocks, prefill tokens and requests of a worker.
fn load_of(router: &Router, id: u64) -> (u64, u64, u64) {
    let load = router
        .load()
        .snapshot()
        .into_iter()
        .find(|load| load.rank.worker == WorkerId(id))
        .unwrap();
    (
        load.active_blocks,
        load.active_prefill_tokens,
        load.active_requests,
    )
}

/// Creates a router with one worker rank.
fn router() -> Router {
    router_of([worker(1)], RouterSettings::default())
}

fn router_of(workers: impl IntoIterator<Item = Worker>, settings: RouterSettings) -> Router {
    clocked(workers, settings, &Clock::default())
}

fn clocked(
    workers: impl IntoIterator<Item = Worker>,
    settings: RouterSettings,
    clock: &Clock,
) -> Router {
    let clock = clock.clone();
    let load = LoadTracker::new(move || clock.now());
    let router = Router::new(PrefixIndex::new(), load, settings, 1);
    router.set_workers(workers);
    router
}

/// Adds a predictor for all workers, which publish no events.
fn with_predictor(router: Router, predictor: Arc<Predictor>) -> Router {
    let router = router.with_predictors(PredictorSet {
        without_events: Some(predictor),
        ..PredictorSet::default()
    });
    let fleet = router.fleet();
    fleet
        .members()
        .for_each(|member| router.predictors().open_rank(member));
    router
}

/// Manual clock.
#[derive(Clone)]
struct Clock(Arc<Mutex<Instant>>);

impl Default for Clock {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }
}

impl Clock {
    fn now(&self) -> Instant {
        *self.0.lock()
    }

    fn advance(&self, by: Duration) {
        *self.0.lock() += by;
    }

    fn set(&self, to: Instant) {
        *self.0.lock() = to;
    }
}

fn request(prompts: &[Vec<u64>]) -> RouteRequest {
    let hashed = |locals: &Vec<u64>| {
        let locals: Vec<_> = locals.iter().copied().map(LocalHash).collect();
        BlockHashes::from_locals(locals.len() * 4 + 1, BlockSize::new(4).unwrap(), locals)
    };
    RouteRequest::new(
        None,
        RoutePrompt::Hashed(prompts.iter().map(hashed).collect()),
    )
}

proptest! {
    #![proptest_config(property_config(256))]

    #[test]
    fn decode_block_forecast_matches_load(
        requests in vec(vec(vec(0..3u64, 0..6), 0..5), 1..8),
        leaves in vec(any::<bool>(), 8),
    ) {
        let router = router();
        let mut live = Vec::new();
        for (prompts, leaves) in requests.iter().zip(leaves) {
            let Placement { route, reservation, .. } = router.route(request(prompts)).unwrap();
            let busy = router.load().snapshot()[0].active_blocks;
            prop_assert_eq!(route.choice.cost.terms.get("decode"), Some(busy as f64));
            let complete: usize = prompts.iter().map(Vec::len).sum();
            prop_assert_eq!(route.prompt_blocks, complete as u64);
            live.push(reservation);
            if leaves {
                drop(live.remove(0));
            }
        }
        live.clear();
        let idle = router.load().snapshot()[0];
        prop_assert_eq!((idle.active_blocks, idle.active_prefill_tokens, idle.active_requests), (0, 0, 0));
    }
}

#[test]
fn overlaps_cover_very_many_prompts() {
    let router = router();
    let prompts: Vec<_> = (0..1000).map(|prompt| vec![prompt]).collect();
    let first = router.route(request(&prompts)).unwrap();
    assert_eq!(first.route.choice.cost.terms.get("decode"), Some(1000.0));
    let second = router.route(request(&prompts)).unwrap();
    assert_eq!(second.route.choice.cost.terms.get("decode"), Some(1000.0));
    assert_eq!(router.load().snapshot()[0].active_blocks, 1000);
}

#[test]
fn index_limits_follow_capacity_and_settings() {
    let settings = |most| RouterSettings {
        max_blocks_per_tier: most,
        ..RouterSettings::default()
    };
    let mut sized = worker(2);
    sized.capacity.total_kv_blocks = Some(100);
    let router = router_of([worker(1), sized], settings(Some(50)));
    let fleet = router.fleet();
    let _writers: Vec<_> = fleet
        .members()
        .map(|member| router.index().create_writer(member.slot))
        .collect();
    let limits = || {
        router
            .index()
            .stats()
            .slots
            .iter()
            .map(|slot| (slot.limits.device, slot.limits.lower_tier))
            .collect::<Vec<_>>()
    };
    fleet
        .members()
        .for_each(|member| router.set_block_limits(member));
    assert_eq!(limits(), [(50, 50), (400, 400)]);
    router.set_settings(settings(Some(1_000)));
    assert_eq!(limits(), [(1_000, 1_000), (400, 1_000)]);
}
