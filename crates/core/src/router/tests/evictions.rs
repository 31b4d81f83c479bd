//! Sessions that fit into the caches of the fleet, but not into that of one worker.

use std::collections::HashSet;

use super::freshness::rank;
use super::*;
use crate::block::{EngineHash, StorageTier};
use crate::freshness::SourceStatus;
use crate::index::{KvEvent, RankWriter, StoredBlock};
use crate::policy::{PolicyName, PolicySettings, Weights};
use crate::predict::{EvictionPolicy, Predictor, TtlPolicy};

/// Blocks of each cache. Two sessions fit.
const CAPACITY: u64 = 1_500;
const SESSION_BLOCKS: u64 = 620;
const BLOCKS_PER_TURN: u64 = 10;
const TURNS: u64 = 8;
const SESSIONS: u64 = 4;
/// Blocks that all sessions have in common.
const SHARED_PREFIX_BLOCKS: u64 = 4;

/// Source of the cache contents.
#[derive(Clone, Copy, Debug, PartialEq)]
enum SessionCacheSource {
    Events,
    Predictions,
}

/// Workers of the first turn of each session.
#[derive(Clone, Copy, Debug, PartialEq)]
enum FirstTurnPlacement {
    Chosen,
    /// The first worker serves three sessions, which do not fit.
    ThreeOnFirst,
    /// The same, after the second worker lost a full cache that was last used long ago.
    ThreeOnFirstSecondStale,
}

/// Cache of one engine, which evicts the least recently used blocks.
struct EngineCache {
    writer: Option<RankWriter>,
    /// Blocks of each session beyond the common ones, the least recently used session first.
    sessions: Vec<(u64, u64)>,
}

fn block(session: u64, at: u64) -> u64 {
    if at < SHARED_PREFIX_BLOCKS {
        at
    } else {
        session * 10_000 + at
    }
}

impl EngineCache {
    /// Computes a prompt of a session. Returns the number of cached blocks.
    fn serve(&mut self, session: u64, blocks: u64) -> u64 {
        let known = self
            .sessions
            .iter()
            .position(|(other, _)| *other == session);
        let had_any = !self.sessions.is_empty();
        let own = known.map_or(0, |at| self.sessions.remove(at).1);
        let cached = if had_any {
            SHARED_PREFIX_BLOCKS + own
        } else {
            0
        };
        self.sessions.push((session, blocks - SHARED_PREFIX_BLOCKS));
        let used = |sessions: &[(u64, u64)]| {
            SHARED_PREFIX_BLOCKS + sessions.iter().map(|(_, n)| n).sum::<u64>()
        };
        let mut excess = used(&self.sessions).saturating_sub(CAPACITY);
        while excess > 0 {
            let (oldest, held) = self.sessions[0];
            let evicted = excess.min(held);
            self.report_evicted(
                oldest,
                SHARED_PREFIX_BLOCKS + held - evicted..SHARED_PREFIX_BLOCKS + held,
            );
            self.sessions[0].1 -= evicted;
            self.sessions.retain(|(_, held)| *held > 0);
            excess -= evicted;
        }
        self.report_stored(session, cached..blocks);
        cached
    }

    fn report_evicted(&mut self, session: u64, range: std::ops::Range<u64>) {
        let blocks = range.map(|at| EngineHash(block(session, at))).collect();
        let tier = StorageTier::Device;
        if let Some(writer) = &mut self.writer {
            writer.apply(&KvEvent::Removed { blocks, tier });
        }
    }

    fn report_stored(&mut self, session: u64, range: std::ops::Range<u64>) {
        let before = range.start.checked_sub(1);
        let parent = before.map(|at| EngineHash(block(session, at)));
        let stored = |hash| StoredBlock {
            engine: EngineHash(hash),
            local: LocalHash(hash),
        };
        let blocks = range.map(|at| stored(block(session, at))).collect();
        let tier = StorageTier::Device;
        if let Some(writer) = &mut self.writer {
            writer.apply(&KvEvent::Stored {
                parent,
                blocks,
                tier,
            });
        }
    }
}

fn two_small_workers(clock: &Clock, source: SessionCacheSource) -> (Router, [EngineCache; 2]) {
    let settings = RouterSettings {
        policy: PolicySettings::named(PolicyName::Seconds, &Weights::default()),
        ..RouterSettings::default()
    };
    let small = |id| Worker {
        capacity: WorkerCapacity {
            total_kv_blocks: Some(CAPACITY),
            ..WorkerCapacity::default()
        },
        ..worker(id)
    };
    let mut router = clocked((0..2).map(small), settings, clock);
    if source == SessionCacheSource::Predictions {
        let fallback = TtlPolicy {
            ttl: Duration::from_secs(60),
            max_blocks_per_rank: CAPACITY,
        };
        let policy = EvictionPolicy::Lru {
            default_blocks: None,
            fallback,
        };
        let clock = clock.clone();
        router = router.with_predictors(PredictorSet {
            without_events: Some(Predictor::new(policy, move || clock.now())),
            ..PredictorSet::default()
        });
    }
    let fleet = router.fleet();
    let caches = [0, 1].map(|id| {
        let member = fleet.member(fleet.slot(rank(id)).unwrap()).unwrap();
        router.predictors().open_rank(member);
        let writer = (source == SessionCacheSource::Events).then(|| {
            router.set_source_status(member.rank, SourceStatus::EXACT);
            router.index().create_writer(member.slot)
        });
        EngineCache {
            writer,
            sessions: Vec::new(),
        }
    });
    (router, caches)
}

/// Completes a request for this number of blocks, of which the engine found some cached.
fn complete(router: &Router, clock: &Clock, mut placement: Placement, blocks: u64, found: u64) {
    router.resolve_predictions(&mut placement, 200);
    clock.advance(Duration::from_millis(20 + (blocks - found)));
    placement.reservation.on_first_token();
    router.learn_first_token(&mut placement);
    router.apply_reported_cached_tokens(&mut placement, found * 4);
    router.finish(placement);
}

/// Fills the predicted cache of the second worker with blocks of other prompts, which are not used
/// for some time. The engine does not have them any more.
fn fill_second_cache(router: &Router, clock: &Clock) {
    const PROMPT_BLOCKS: u64 = 50;
    for session in 0..CAPACITY / PROMPT_BLOCKS {
        let prompt = (0..PROMPT_BLOCKS).map(|at| block(100 + session, at));
        let mut request = request(&[prompt.collect()]);
        request.constraints.allowed = Some([WorkerId(1)].into());
        let placement = router.route(request).unwrap();
        complete(router, clock, placement, PROMPT_BLOCKS, 0);
    }
    clock.advance(Duration::from_secs(60));
}

/// Returns the share of cached blocks in the second half of the turns, and the worker of the last turn
/// of each session.
fn serve_sessions(source: SessionCacheSource, first_turn: FirstTurnPlacement) -> (f64, Vec<u64>) {
    let clock = Clock::default();
    let (router, mut caches) = two_small_workers(&clock, source);
    if first_turn == FirstTurnPlacement::ThreeOnFirstSecondStale {
        fill_second_cache(&router, &clock);
    }
    let (mut cached, mut total) = (0, 0);
    let mut workers = vec![0; SESSIONS as usize];
    for turn in 0..TURNS {
        for session in 0..SESSIONS {
            let blocks = SESSION_BLOCKS + turn * BLOCKS_PER_TURN;
            let prompt = (0..blocks).map(|at| block(session, at)).collect();
            let mut request = request(&[prompt]);
            if turn == 0 && first_turn != FirstTurnPlacement::Chosen {
                request.constraints.allowed = Some([WorkerId(session / 3)].into());
            }
            let placement = router.route(request).unwrap();
            let WorkerId(worker) = placement.route.to.rank.worker;
            let found = caches[worker as usize].serve(session, blocks);
            complete(&router, &clock, placement, blocks, found);
            workers[session as usize] = worker;
            if turn >= TURNS / 2 {
                cached += found;
                total += blocks;
            }
        }
    }
    (cached as f64 / total as f64, workers)
}

#[test]
fn sessions_spread_evenly_when_one_cache_is_full() {
    use {FirstTurnPlacement::*, SessionCacheSource::*};
    for (source, first_turn) in [
        (Events, Chosen),
        (Events, ThreeOnFirst),
        (Predictions, Chosen),
        (Predictions, ThreeOnFirst),
        (Predictions, ThreeOnFirstSecondStale),
    ] {
        let (share, workers) = serve_sessions(source, first_turn);
        let on_first = workers.iter().filter(|worker| **worker == 0).count();
        assert_eq!(on_first, 2, "{source:?}, {first_turn:?}: {workers:?}");
        assert!(share > 0.9, "{source:?}, {first_turn:?}: {share}");
    }
}

/// Serves session 0, then session 1 twice. The first token of the second request of session 1 arrives
/// after `first_token`. Returns the predicted cached tokens of session 0.
fn cached_tokens_after_delay(first_token: Duration) -> u64 {
    let clock = Clock::default();
    let (router, _caches) = two_small_workers(&clock, SessionCacheSource::Predictions);
    let serve = |worker, session, elapsed| {
        let prompt = (0..SESSION_BLOCKS).map(|at| block(session, at)).collect();
        let mut request = request(&[prompt]);
        request.constraints.allowed = Some([WorkerId(worker)].into());
        let mut placement = router.route(request).unwrap();
        let cached_tokens = placement.route.computed_by().cached_tokens;
        router.resolve_predictions(&mut placement, 200);
        clock.advance(elapsed);
        placement.reservation.on_first_token();
        router.learn_first_token(&mut placement);
        router.finish(placement);
        cached_tokens
    };
    // The prefill times are learned on the other worker.
    for session in 10..20 {
        serve(1, session, Duration::from_millis(300));
    }
    serve(0, 0, Duration::from_millis(300));
    serve(0, 1, Duration::from_millis(300));
    serve(0, 1, first_token);
    serve(0, 0, Duration::from_millis(20))
}

#[test]
fn late_first_token_corrects_predicted_cache() {
    let all = SESSION_BLOCKS * 4;
    assert_eq!(cached_tokens_after_delay(Duration::from_millis(60)), all);
    assert!(cached_tokens_after_delay(Duration::from_millis(300)) < all);
}

#[test]
fn free_blocks_decide_between_almost_equal_costs() {
    for source in [SessionCacheSource::Events, SessionCacheSource::Predictions] {
        let clock = Clock::default();
        let (router, mut caches) = two_small_workers(&clock, source);
        let mut requests = [0, 0];
        // Both prompts begin with the same few blocks, and each cache has room for both.
        for session in 0..2 {
            let blocks = SESSION_BLOCKS;
            let prompt = (0..blocks).map(|at| block(session, at)).collect();
            let placement = router.route(request(&[prompt])).unwrap();
            let WorkerId(worker) = placement.route.to.rank.worker;
            let found = caches[worker as usize].serve(session, blocks);
            complete(&router, &clock, placement, blocks, found);
            requests[worker as usize] += 1;
        }
        assert_eq!(requests, [1, 1], "{source:?}");
    }
}

/// The incomplete last block of a prompt is empty after the request. The engine reuses it in the order
/// of its last use.
#[test]
fn empty_blocks_of_full_caches_do_not_matter() {
    let clock = Clock::default();
    let (router, mut caches) = two_small_workers(&clock, SessionCacheSource::Events);
    for (cache, empty) in caches.iter_mut().zip([100, 10]) {
        cache.report_stored(0, 0..CAPACITY);
        cache.report_evicted(0, CAPACITY - empty..CAPACITY);
    }
    let prompt: Vec<u64> = (0..SESSION_BLOCKS).map(|at| block(1, at + 100)).collect();
    let chosen: HashSet<WorkerId> = (0..64)
        .map(|_| {
            router
                .preview(request(std::slice::from_ref(&prompt)))
                .unwrap()
        })
        .map(|route| route.to.rank.worker)
        .collect();
    assert_eq!(chosen.len(), 2, "only {chosen:?} are chosen");
}
