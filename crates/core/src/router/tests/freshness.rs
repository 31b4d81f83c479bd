//! Effect of index freshness on decisions, and its report.

use super::*;
use crate::block::{EngineHash, StorageTier};
use crate::freshness::{
    EventSourceState, FreshnessRules, IndexFreshness, SourceLink, SourceStatus, StaleReason,
};
use crate::index::{KvEvent, RankWriter, StoredBlock};
use crate::worker::{DpRank, ModelName};

pub(super) fn rank(id: u64) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(id),
        rank: DpRank(0),
    }
}

pub(super) fn holds(router: &Router, id: u64, count: u64) -> RankWriter {
    let mut writer = router
        .index()
        .create_writer(router.fleet().slot(rank(id)).unwrap());
    let blocks = (0..count)
        .map(|local| StoredBlock {
            engine: EngineHash(local),
            local: LocalHash(local),
        })
        .collect();
    writer.apply(&KvEvent::Stored {
        parent: None,
        blocks,
        tier: StorageTier::Device,
    });
    writer
}

fn stale() -> SourceStatus {
    SourceStatus::new(IndexFreshness::Stale, Some(StaleReason::LostBatches))
}

#[test]
fn windows_follow_most_engines() {
    use crate::block::BlockWindows::{self, Eagle, Plain};
    let router = router_of([1, 2, 3].map(worker), RouterSettings::default());
    let learn = |id, windows: BlockWindows| {
        let status = SourceStatus {
            windows: Some(windows),
            ..SourceStatus::EXACT
        };
        router.set_source_status(rank(id), status);
        let learned = router.sources().windows.load();
        learned.get(&ModelName::from("m")).copied()
    };
    assert_eq!(learn(1, Plain), Some(Plain));
    assert_eq!(learn(2, Eagle), None, "one each");
    assert_eq!(learn(3, Eagle), Some(Eagle));
    assert_eq!(learn(2, Plain), Some(Plain), "another engine");
}

#[test]
fn stale_source_reduces_credit_and_is_reported() {
    let freshness = FreshnessRules {
        stale_credit: 0.5,
        ..FreshnessRules::default()
    };
    let settings = RouterSettings {
        freshness,
        ..RouterSettings::default()
    };
    let router = router_of([worker(1), worker(2)], settings);
    let _writers = [holds(&router, 1, 8), holds(&router, 2, 6)];
    [1, 2]
        .into_iter()
        .for_each(|id| router.set_source_status(rank(id), SourceStatus::EXACT));
    let prompt = || request(&[(0..10).collect()]);
    assert_eq!(router.preview(prompt()).unwrap().to.rank, rank(1));

    router.set_source_status(rank(1), stale());
    let route = router.preview(prompt()).unwrap();
    assert_eq!(
        (route.to.rank, route.freshness, route.mode),
        (rank(2), IndexFreshness::Exact, Mode::Exact),
        "4 blocks count, not 8"
    );
    let explanation = router.explain(prompt());
    let row = explanation.phases[0]
        .workers
        .iter()
        .find(|row| row.rank == rank(1))
        .unwrap();
    let cost = row.cost.unwrap();
    assert_eq!(
        (
            cost.terms.get("freshness_credit"),
            cost.terms.get("device_credit"),
            row.overlap.device
        ),
        (Some(0.5), Some(4.0), 8)
    );
    assert_eq!(row.source, stale());

    router.set_source_status(rank(2), stale());
    let route = router.preview(prompt()).unwrap();
    assert_eq!(
        (route.to.rank, route.freshness, route.mode),
        (rank(1), IndexFreshness::Stale, Mode::Exact),
        "both count half"
    );
    assert!(
        route.summary_line().contains(" freshness=stale"),
        "{}",
        route.summary_line()
    );
    let summary = router.explain(prompt()).summary;
    assert!(
        summary.ends_with("it holds 8 of 10 blocks, which may be out of date (lost_batches)."),
        "{summary}"
    );
    assert_eq!(
        route.predicted_cached_tokens, 32,
        "the forecast uses the reported blocks"
    );
}

#[test]
fn unusable_sources_route_by_load_only() {
    let router = router_of([worker(1), worker(2)], RouterSettings::default());
    let prompt = || request(&[(0..10).collect()]);
    let reported = |router: &Router| {
        let route = router.preview(prompt()).unwrap();
        (route.mode, route.reason)
    };
    assert_eq!(reported(&router), (Mode::LoadOnly, Some(Reason::IndexCold)));
    let catching_up = SourceStatus::new(IndexFreshness::CatchingUp, Some(StaleReason::Replaying));
    router.set_source_status(rank(1), catching_up);
    assert_eq!(
        reported(&router),
        (Mode::LoadOnly, Some(Reason::IndexCold)),
        "it has reported no blocks yet"
    );
    let writer = holds(&router, 1, 8);
    for status in [
        catching_up,
        SourceStatus::new(IndexFreshness::CatchingUp, Some(StaleReason::Connecting)),
    ] {
        router.set_source_status(rank(1), status);
        let route = router.preview(prompt()).unwrap();
        assert_eq!(
            (route.to.rank, route.mode, route.reason),
            (rank(1), Mode::Exact, None),
            "chosen by its reported blocks"
        );
        assert_eq!(
            (
                route.choice.cost.terms.get("freshness_credit"),
                route.freshness
            ),
            (Some(0.5), IndexFreshness::CatchingUp)
        );
    }
    drop(writer);
    router.set_source_status(
        rank(1),
        SourceStatus::new(IndexFreshness::Absent, Some(StaleReason::BlockSizeMismatch)),
    );
    assert_eq!(
        reported(&router),
        (Mode::LoadOnly, Some(Reason::BlockSizeMismatch))
    );
    // Beside a usable source, the mode is load-only if the other worker is chosen.
    router.set_source_status(rank(2), stale());
    let mut chosen = std::collections::BTreeSet::new();
    for _ in 0..64 {
        let route = router.preview(prompt()).unwrap();
        let by_load = (Mode::LoadOnly, Some(Reason::BlockSizeMismatch));
        let expected = if route.to.rank == rank(1) {
            by_load
        } else {
            (Mode::Exact, None)
        };
        assert_eq!((route.mode, route.reason), expected, "{:?}", route.to);
        chosen.insert(route.to.rank);
    }
    assert_eq!(chosen, [rank(1), rank(2)].into());
    router.sources().remove(rank(2));
    assert_eq!(router.source_status(rank(2)), SourceStatus::default());
}

#[test]
fn engine_reuses_only_whole_engine_blocks() {
    // Index blocks have 4 tokens. The prompt has 41 tokens, of which 28 are held.
    let cases = [
        (None, 28, 7),
        (BlockSize::new(8), 24, 6),
        (BlockSize::new(16), 16, 4),
        (BlockSize::new(2), 28, 7),
    ];
    for (engine, cached, blocks) in cases {
        let router = router_of([worker(1)], RouterSettings::default());
        let _writer = holds(&router, 1, 7);
        router.set_source_status(
            rank(1),
            SourceStatus {
                engine_block_size: engine,
                ..SourceStatus::EXACT
            },
        );
        let route = router.preview(request(&[(0..10).collect()])).unwrap();
        let reported = (
            route.predicted_cached_tokens,
            route.best_cached_tokens,
            route.overlap.device,
        );
        assert_eq!(reported, (cached, cached, blocks), "{engine:?}");
    }
    // The engine computes at least the last block of a prompt.
    for (engine, cached) in [
        (None, 28),
        (BlockSize::new(2), 30),
        (BlockSize::new(16), 16),
    ] {
        let router = router_of([worker(1)], RouterSettings::default());
        let _writer = holds(&router, 1, 8);
        router.set_source_status(
            rank(1),
            SourceStatus {
                engine_block_size: engine,
                ..SourceStatus::EXACT
            },
        );
        let hashes = BlockHashes::from_locals(
            32,
            BlockSize::new(4).unwrap(),
            (0..8).map(LocalHash).collect(),
        );
        let route = router
            .preview(RouteRequest::new(None, RoutePrompt::Hashed(vec![hashes])))
            .unwrap();
        assert_eq!(route.predicted_cached_tokens, cached, "{engine:?}");
    }
}

#[test]
fn answers_that_store_blocks_expect_events() {
    let clock = Clock::default();
    let router = clocked([worker(1)], RouterSettings::default(), &clock);
    let mut source = EventSourceState::new(Default::default());
    source.set_link(SourceLink::Attached);
    let source = Arc::new(Mutex::new(source));
    router.sources().register(rank(1), source.clone());
    router.set_source_status(rank(1), SourceStatus::EXACT);
    let answer = |prompt: Vec<u64>, status: u16, origin: ResponseOrigin| {
        let mut booked = router.route(request(&[prompt])).unwrap();
        router.on_response(&mut booked, WorkerResponse { status, origin });
        source.lock().facts().requests_without_events
    };
    assert_eq!(answer(vec![1, 2, 3], 200, ResponseOrigin::Chosen), 1);
    assert_eq!(
        answer(vec![1, 2, 3], 500, ResponseOrigin::Chosen),
        1,
        "no block was computed"
    );
    assert_eq!(
        answer(vec![1, 2, 3], 200, ResponseOrigin::Other(WorkerId(9))),
        1,
        "not there"
    );
    let _writer = holds(&router, 1, 8);
    assert_eq!(
        answer((0..8).collect(), 200, ResponseOrigin::Chosen),
        1,
        "it held the whole prompt"
    );
    assert_eq!(answer((0..9).collect(), 200, ResponseOrigin::Chosen), 2);
    // An engine block covers four index blocks, and the engine already held all blocks that it
    // stores for each prompt.
    router.set_source_status(
        rank(1),
        SourceStatus {
            engine_block_size: BlockSize::new(16),
            ..SourceStatus::EXACT
        },
    );
    let expected_events = |prompts: &[Vec<u64>]| {
        let mut booked = router.route(request(prompts)).unwrap();
        router.on_response(
            &mut booked,
            WorkerResponse {
                status: 200,
                origin: ResponseOrigin::Chosen,
            },
        );
        source.lock().facts().requests_without_events
    };
    let six_block_prompts: Vec<Vec<u64>> = vec![(0..6).collect(); 4];
    assert_eq!(
        expected_events(&six_block_prompts),
        2,
        "the remainders of four prompts contain no whole block"
    );
    assert_eq!(expected_events(&[(0..6).collect(), (0..12).collect()]), 3);
}
