use std::collections::BTreeMap;

use super::*;
use crate::block::{BlockHashes, CacheSalt};
use crate::index::{EventCursor, PrefixIndex};
use crate::worker::{BlockSize, DpRank, RankSlot};

const ONE: WorkerId = WorkerId(1);
const TWO: WorkerId = WorkerId(2);

fn agrees() -> CanaryVerdict {
    CanaryVerdict::Agrees {
        compared: 10,
        skipped: BTreeMap::new(),
    }
}

fn differs() -> CanaryVerdict {
    let difference = TokenDifference {
        compared: ComparedItem::Tokens,
        canary: Some("plain".into()),
        position: 3,
        block: 0,
        warmroute_token: Some(1),
        engine_token: Some(2),
        warmroute_text: None,
        engine_text: None,
        matching_settings: None,
    };
    CanaryVerdict::Differs {
        difference: Box::new(difference),
    }
}

fn generation_prompt_differs(end_tokens: usize) -> CanaryVerdict {
    match differs() {
        CanaryVerdict::Differs { difference } => CanaryVerdict::GenerationPromptDiffers {
            difference,
            end_tokens,
        },
        other => other,
    }
}

fn silent() -> CanaryVerdict {
    CanaryVerdict::CannotTest {
        reason: "timeout".into(),
        is_transient: true,
    }
}

#[test]
fn tokens_are_used_while_any_worker_agrees() {
    // Worker, canary result, parity status afterwards, and the change.
    let cases: &[(WorkerId, CanaryVerdict, bool, ParityChange)] = &[
        (ONE, silent(), true, ParityChange::None),
        (ONE, differs(), false, ParityChange::TokensDisabled),
        (ONE, differs(), false, ParityChange::None),
        // Silence does not refute a proven difference.
        (ONE, silent(), false, ParityChange::None),
        (TWO, silent(), false, ParityChange::None),
        (TWO, agrees(), true, ParityChange::TokensEnabled),
        (TWO, silent(), true, ParityChange::None),
        (TWO, differs(), false, ParityChange::TokensDisabled),
        (ONE, agrees(), true, ParityChange::TokensEnabled),
    ];
    let status = ParityStatus::default();
    for (at, (worker, verdict, believed, change)) in cases.iter().enumerate() {
        assert_eq!(
            status.record_canaries(*worker, verdict.clone()),
            *change,
            "step {at}"
        );
        assert_eq!(!status.are_tokens_disabled(), *believed, "step {at}");
    }
    assert_eq!(status.parity().state(), "some_differ");
    assert_eq!(
        status.retain(|worker| worker == TWO),
        ParityChange::TokensDisabled,
        "the agreeing worker has left"
    );
    assert_eq!(
        status.retain(|_| false),
        ParityChange::TokensEnabled,
        "no differing worker is left"
    );
    assert_eq!(status.parity().state(), "untested");
}

#[test]
fn differing_end_keeps_tokens_before_it() {
    let status = ParityStatus::default();
    assert_eq!(
        status.record_canaries(ONE, generation_prompt_differs(3)),
        ParityChange::None
    );
    status.record_canaries(TWO, generation_prompt_differs(5));
    assert_eq!(
        (status.are_tokens_disabled(), status.differing_end_tokens()),
        (false, 5)
    );
    assert!(status.differing_workers().is_empty());
    assert_eq!(status.parity().state(), "generation_prompt_differs");
    // Silence does not refute a proven difference.
    status.record_canaries(TWO, silent());
    assert_eq!(status.differing_end_tokens(), 5);
    status.record_canaries(TWO, agrees());
    assert_eq!(status.differing_end_tokens(), 3);
    status.clear_canaries();
    assert_eq!(status.differing_end_tokens(), 0);
}

#[test]
fn untestable_restarted_worker_keeps_only_differences() {
    let status = ParityStatus::default();
    status.record_canaries(ONE, differs());
    status.mark_restarted(ONE);
    assert!(status.are_tokens_disabled(), "only after the next canary");
    assert_eq!(
        status.record_canaries(ONE, silent()),
        ParityChange::None,
        "missing evidence proves no agreement"
    );
    assert_eq!(
        status.record_canaries(ONE, agrees()),
        ParityChange::TokensEnabled
    );
    status.mark_restarted(ONE);
    status.record_canaries(ONE, silent());
    assert_eq!(status.parity().state(), "cannot_test");
}

#[test]
fn event_verdict_changes_only_after_consecutive_evidence() {
    let status = ParityStatus::default();
    let missing = BlockEvidence::Unconfirmed { block: 2 };
    for round in 0..5 {
        for _ in 0..7 {
            assert_eq!(
                status.record_evidence(ONE, missing),
                ParityChange::None,
                "{round}"
            );
        }
        assert_eq!(
            status.record_evidence(ONE, BlockEvidence::Confirmed),
            ParityChange::None
        );
    }
    let changes: Vec<_> = (0..9)
        .map(|_| status.record_evidence(ONE, missing))
        .collect();
    assert_eq!(changes[7], ParityChange::TokensDisabled);
    assert_eq!(
        changes
            .iter()
            .filter(|change| **change != ParityChange::None)
            .count(),
        1
    );
    let found = status.parity().workers[&ONE]
        .events
        .differs
        .clone()
        .unwrap();
    assert_eq!(
        (found.compared, found.block, found.warmroute_text),
        (ComparedItem::Events, 2, None)
    );
    // Agreeing canaries do not outweigh the events.
    assert_eq!(status.record_canaries(ONE, agrees()), ParityChange::None);
    let recovery = [
        BlockEvidence::Confirmed,
        BlockEvidence::Confirmed,
        missing,
        BlockEvidence::Confirmed,
        BlockEvidence::Confirmed,
    ];
    assert!(
        recovery
            .into_iter()
            .all(|evidence| status.record_evidence(ONE, evidence) == ParityChange::None)
    );
    assert_eq!(
        status.record_evidence(ONE, BlockEvidence::Confirmed),
        ParityChange::TokensEnabled
    );
}

#[test]
fn passed_round_after_restart_clears_event_verdict() {
    let status = ParityStatus::default();
    (0..8).for_each(|_| _ = status.record_evidence(ONE, BlockEvidence::Unconfirmed { block: 0 }));
    status.mark_restarted(ONE);
    assert_eq!(
        status.record_canaries(ONE, silent()),
        ParityChange::None,
        "missing evidence proves no agreement"
    );
    assert_eq!(
        status.record_canaries(ONE, agrees()),
        ParityChange::TokensEnabled
    );
    let again: Vec<_> = (0..8)
        .map(|_| status.record_evidence(ONE, BlockEvidence::Unconfirmed { block: 0 }))
        .collect();
    assert_eq!(
        again
            .iter()
            .position(|change| *change == ParityChange::TokensDisabled),
        Some(7),
        "the count starts at zero"
    );
    assert_eq!(
        status.record_canaries(ONE, agrees()),
        ParityChange::None,
        "the same incarnation"
    );
}

#[test]
fn event_evidence_applies_to_one_worker() {
    let status = ParityStatus::default();
    let missing = BlockEvidence::Unconfirmed { block: 0 };
    // Neither worker can be tested. Both compute requests in turn, and only one of them as
    // predicted.
    let mut changes = Vec::new();
    for _ in 0..20 {
        changes.push(status.record_evidence(ONE, missing));
        changes.push(status.record_evidence(TWO, BlockEvidence::Confirmed));
    }
    changes.retain(|change| *change != ParityChange::None);
    assert_eq!(
        changes,
        [ParityChange::WorkerDiffers],
        "the model does not change"
    );
    assert_eq!(
        (status.are_tokens_disabled(), status.parity().state()),
        (false, "some_differ")
    );
    assert_eq!(
        status.differing_workers().iter().collect::<Vec<_>>(),
        [&ONE]
    );
    // Without a worker that agrees, nothing can be compared.
    assert_eq!(
        status.record_canaries(TWO, differs()),
        ParityChange::TokensDisabled
    );
    assert_eq!(
        (0..3)
            .map(|_| status.record_evidence(ONE, BlockEvidence::Confirmed))
            .last(),
        Some(ParityChange::TokensEnabled)
    );
    assert_eq!(
        status.differing_workers().iter().collect::<Vec<_>>(),
        [&TWO]
    );
    assert_eq!(
        status.record_canaries(TWO, agrees()),
        ParityChange::WorkerAgrees
    );
}

#[test]
fn running_checks_are_limited_and_need_new_events() {
    let status = Arc::new(ParityStatus::default());
    let rank = WorkerRank {
        worker: ONE,
        rank: DpRank(0),
    };
    let block_size = BlockSize::new(8).unwrap();
    let index = PrefixIndex::new();
    let _writer = index.create_writer(RankSlot(0));
    let hashes = BlockHashes::from_tokens(&[7; 40], block_size, &CacheSalt::default());
    let since = EventCursor { stores: 5, gaps: 1 };
    let watch = || {
        Some(WatchedPrompt {
            watch: index.watch(&hashes, RankSlot(0))?,
            blocks: 5,
            block_size,
            since,
        })
    };
    let mut held: Vec<_> = (0..MAX_RUNNING_CHECKS)
        .map(|_| status.start_check(rank, watch).unwrap())
        .collect();
    assert!(status.start_check(rank, watch).is_none());
    // Another worker responded, so the check is dropped.
    held.pop().unwrap().complete(WorkerRank {
        worker: TWO,
        rank: DpRank(0),
    });
    assert!(status.take_ready_checks().is_empty());
    assert!(
        status.start_check(rank, || None).is_none(),
        "no prompt can be checked"
    );
    let confirmed = Some(BlockEvidence::Confirmed);
    let unconfirmed = |block| Some(BlockEvidence::Unconfirmed { block });
    for (held, stores, gaps, coverage, expected) in [
        (5, 5, 1, EventCoverage::Complete, confirmed),
        (0, 5, 1, EventCoverage::Complete, None),
        (0, 6, 1, EventCoverage::Complete, unconfirmed(0)),
        (4, 6, 1, EventCoverage::Complete, unconfirmed(4)),
        // The engine may hold unreported blocks, but it holds all reported ones.
        (0, 6, 1, EventCoverage::Partial, None),
        (5, 6, 1, EventCoverage::Partial, confirmed),
        // Events were lost since the choice, and the source is exact again.
        (0, 6, 2, EventCoverage::Complete, None),
        (5, 6, 2, EventCoverage::Complete, confirmed),
    ] {
        status.start_check(rank, watch).unwrap().complete(rank);
        let check = PromptObservation {
            held,
            expected: 5,
            now: EventCursor { stores, gaps },
            coverage,
        };
        let found = status.take_ready_checks().pop().unwrap().evaluate(check);
        assert_eq!(found.map(|(evidence, _)| evidence), expected, "{check:?}");
    }
    assert_eq!(status.parity().workers[&ONE].events.undecided, 2);
    drop(held);
    assert_eq!(status.running_checks.load(Ordering::Relaxed), 0);
}
