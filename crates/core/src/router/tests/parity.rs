//! Routing if one worker is known to compute other tokens than warmroute.

use super::freshness::{holds, rank};
use super::*;
use crate::block::{EngineHash, StorageTier};
use crate::freshness::{IndexFreshness, SourceStatus, StaleReason};
use crate::index::{KvEvent, StoredBlock};
use crate::parity::{BlockEvidence, ParityChange, ParityExpectation};

fn hashed(expectation: ParityExpectation) -> RouteRequest {
    RouteRequest {
        model: Some("m".into()),
        parity: expectation,
        ..request(&[(0..10).collect()])
    }
}

/// Creates a router of two workers. The first holds more blocks, and its events prove that its
/// tokens differ.
fn router_with_one_that_differs() -> (Router, [crate::index::RankWriter; 2]) {
    let router = router_of([worker(1), worker(2)], RouterSettings::default());
    let writers = [holds(&router, 1, 8), holds(&router, 2, 6)];
    [1, 2]
        .into_iter()
        .for_each(|id| router.set_source_status(rank(id), SourceStatus::EXACT));
    router.parity().configure([("m".into(), Arc::default())]);
    let status = router.parity().model_status(&"m".into()).unwrap();
    for _ in 0..8 {
        status.record_evidence(WorkerId(1), BlockEvidence::Unconfirmed { block: 0 });
        status.record_evidence(WorkerId(2), BlockEvidence::Confirmed);
    }
    assert!(!status.are_tokens_disabled());
    (router, writers)
}

#[test]
fn mismatched_worker_gets_no_cache_credit() {
    let (router, _writers) = router_with_one_that_differs();
    for expectation in [ParityExpectation::Prompt, ParityExpectation::Multimodal] {
        let route = router.preview(hashed(expectation)).unwrap();
        assert_eq!(
            (route.to.rank, route.mode, route.reason),
            (rank(2), Mode::Exact, None)
        );
        assert_eq!(
            (route.predicted_cached_tokens, route.best_cached_tokens),
            (24, 24)
        );
    }
    // Tokens of engines and clients are not compared.
    let route = router
        .preview(hashed(ParityExpectation::NotPredicted))
        .unwrap();
    assert_eq!(
        (route.to.rank, route.mode, route.predicted_cached_tokens),
        (rank(1), Mode::Exact, 32)
    );
}

#[test]
fn route_to_mismatched_worker_is_load_only() {
    let (router, _writers) = router_with_one_that_differs();
    router.set_workers([worker(1)]);
    for model in [Some("m".into()), None] {
        let route = router
            .preview(RouteRequest {
                model,
                ..hashed(ParityExpectation::Prompt)
            })
            .unwrap();
        assert_eq!(
            (route.mode, route.reason),
            (Mode::LoadOnly, Some(Reason::ParityMismatch))
        );
        assert_eq!(
            (route.predicted_cached_tokens, route.overlap.total()),
            (0, 0)
        );
    }
    // Checks continue, so agreement is detected again.
    let status = router.parity().model_status(&"m".into()).unwrap();
    (0..3).for_each(|_| _ = status.record_evidence(WorkerId(1), BlockEvidence::Confirmed));
    assert_eq!(
        router
            .preview(hashed(ParityExpectation::Prompt))
            .unwrap()
            .mode,
        Mode::Exact
    );
}

#[test]
fn after_lost_batches_only_new_blocks_are_evidence() {
    let router = router_of([worker(1)], RouterSettings::default());
    router.parity().configure([("m".into(), Arc::default())]);
    let parity = router.parity().model_status(&"m".into()).unwrap();
    let blocks = (0..10)
        .map(|local| StoredBlock {
            engine: EngineHash(local),
            local: LocalHash(local),
        })
        .collect();
    let stored = KvEvent::Stored {
        parent: None,
        blocks,
        tier: StorageTier::Device,
    };
    let take_check = || {
        let mut booked = router.route(hashed(ParityExpectation::Prompt)).unwrap();
        router.start_parity_check(&mut booked);
        parity.take_ready_checks().pop()
    };
    let lost = [
        (IndexFreshness::Stale, StaleReason::LostBatches),
        (IndexFreshness::Incomplete, StaleReason::UnreportedBlocks),
    ];
    for (at, (freshness, reason)) in lost.into_iter().enumerate() {
        router.set_source_status(rank(1), SourceStatus::new(freshness, Some(reason)));
        let mut writer = router
            .index()
            .create_writer(router.fleet().slot(rank(1)).unwrap());
        assert_eq!(
            router.evaluate_parity_check(take_check().unwrap()),
            None,
            "it may hold them: {freshness:?}"
        );
        assert_eq!(
            parity.parity().workers[&WorkerId(1)].events.undecided,
            at as u64 + 1
        );
        let check = take_check().unwrap();
        writer.apply(&stored);
        assert_eq!(
            router.evaluate_parity_check(check),
            Some((BlockEvidence::Confirmed, ParityChange::None)),
            "{freshness:?}"
        );
        assert!(
            take_check().is_none(),
            "an earlier incarnation may have reported them: {freshness:?}"
        );
    }
    router.set_source_status(
        rank(1),
        SourceStatus::new(IndexFreshness::Stale, Some(StaleReason::Silent)),
    );
    assert!(take_check().is_none(), "no event arrived");
}

#[test]
fn blocks_evicted_before_the_check_confirm_the_tokens() {
    let router = router_of([worker(1)], RouterSettings::default());
    router.parity().configure([("m".into(), Arc::default())]);
    router.set_source_status(rank(1), SourceStatus::EXACT);
    let parity = router.parity().model_status(&"m".into()).unwrap();
    let mut writer = router
        .index()
        .create_writer(router.fleet().slot(rank(1)).unwrap());
    let block = |local| StoredBlock {
        engine: EngineHash(local),
        local: LocalHash(local),
    };
    let store = |blocks: std::ops::Range<u64>| {
        let parent = blocks
            .start
            .checked_sub(1)
            .filter(|before| *before < 10)
            .map(EngineHash);
        KvEvent::Stored {
            parent,
            blocks: blocks.map(block).collect(),
            tier: StorageTier::Device,
        }
    };
    let remove = |blocks: std::ops::Range<u64>| KvEvent::Removed {
        blocks: blocks.map(EngineHash).collect(),
        tier: StorageTier::Device,
    };
    // A sequential prefill, then another prompt that evicts this one.
    let turnover = [store(0..6), store(6..10), store(100..110), remove(0..10)];
    for round in 0..20 {
        let mut booked = router.route(hashed(ParityExpectation::Prompt)).unwrap();
        turnover.iter().for_each(|event| _ = writer.apply(event));
        router.start_parity_check(&mut booked);
        let checked = router.evaluate_parity_check(parity.take_ready_checks().pop().unwrap());
        assert_eq!(
            checked,
            Some((BlockEvidence::Confirmed, ParityChange::None)),
            "round {round}"
        );
        writer.apply(&remove(100..110));
    }
    // The same turnover of other tokens is still a proof.
    let mut changes = Vec::new();
    for _ in 0..8 {
        let mut booked = router.route(hashed(ParityExpectation::Prompt)).unwrap();
        [store(100..110), remove(100..110)]
            .iter()
            .for_each(|event| _ = writer.apply(event));
        router.start_parity_check(&mut booked);
        changes.extend(router.evaluate_parity_check(parity.take_ready_checks().pop().unwrap()));
    }
    assert_eq!(
        changes.last(),
        Some(&(
            BlockEvidence::Unconfirmed { block: 0 },
            ParityChange::TokensDisabled
        ))
    );
}
