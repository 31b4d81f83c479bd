use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::prelude::*;

mod explain;
mod gateway;
mod herd;
mod outside;
mod parity;
mod phases;
mod refused;
mod standing;
mod trust;

use super::*;
use crate::block::BlockHashes;
use crate::block::LocalHash;
use crate::worker::{BlockSize, Capacity, Endpoint, Ranks, Role, Worker, WorkerId};

fn worker(id: u64) -> Worker {
    Worker::new(
        WorkerId(id),
        "127.0.0.1:8000".parse().unwrap(),
        "m".into(),
        BlockSize::new(4).unwrap(),
    )
}

/// A router with one worker rank.
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
    publish(&router, workers);
    router
}

/// What the keeper does, as far as the router sees it.
fn publish(router: &Router, workers: impl IntoIterator<Item = Worker>) {
    let change = router.fleet().reconcile(workers.into_iter().collect());
    change
        .added
        .iter()
        .for_each(|member| router.load().open(member.slot, member.rank));
    router.publish(Arc::new(change.fleet));
    change
        .removed
        .iter()
        .for_each(|member| router.load().close(member.slot));
}

/// A clock that goes only when it is told.
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
}

fn request(prompts: &[Vec<u64>]) -> RouteRequest {
    let hashed = |locals: &Vec<u64>| {
        let locals: Vec<_> = locals.iter().copied().map(LocalHash).collect();
        BlockHashes::chain(locals.len() * 4 + 1, BlockSize::new(4).unwrap(), locals)
    };
    RouteRequest::new(None, Prompt::Hashed(prompts.iter().map(hashed).collect()))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_forecast_of_busy_blocks_comes_true(
        requests in vec(vec(vec(0..3u64, 0..6), 0..5), 1..8),
        leaves in vec(any::<bool>(), 8),
    ) {
        let router = router();
        let mut live = Vec::new();
        for (prompts, leaves) in requests.iter().zip(leaves) {
            let Booked { route, reservation, .. } = router.route(request(prompts)).unwrap();
            let busy = router.load().snapshot()[0].active_blocks;
            prop_assert_eq!(route.choice.cost.decode_cost, busy as f64);
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
fn of_very_many_prompts_all_are_searched_for() {
    let router = router();
    let prompts: Vec<_> = (0..1000).map(|prompt| vec![prompt]).collect();
    let first = router.route(request(&prompts)).unwrap();
    assert_eq!(first.route.choice.cost.decode_cost, 1000.0);
    let second = router.route(request(&prompts)).unwrap();
    assert_eq!(second.route.choice.cost.decode_cost, 1000.0);
    assert_eq!(router.load().snapshot()[0].active_blocks, 1000);
}

#[test]
fn index_limits_follow_capacity_and_settings() {
    let settings = |most| RouterSettings {
        most_blocks_per_tier: most,
        ..RouterSettings::default()
    };
    let mut sized = worker(2);
    sized.capacity.total_kv_blocks = Some(100);
    let router = router_of([worker(1), sized], settings(Some(50)));
    let fleet = router.fleet();
    let _writers: Vec<_> = fleet
        .members()
        .map(|member| router.index().join(member.slot))
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
        .for_each(|member| router.limit_blocks(member));
    assert_eq!(limits(), [(50, 50), (400, 400)]);
    router.set_settings(settings(Some(1_000)));
    assert_eq!(limits(), [(1_000, 1_000), (400, 1_000)]);
}
