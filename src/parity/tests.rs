use std::collections::BTreeMap;

use super::*;
use crate::block::{BlockHashes, Salt};
use crate::index::{Moment, PrefixIndex};
use crate::worker::{BlockSize, DpRank, Slot};

const ONE: WorkerId = WorkerId(1);
const TWO: WorkerId = WorkerId(2);

fn agrees() -> Verdict {
    Verdict::Agrees {
        compared: 10,
        skipped: BTreeMap::new(),
    }
}

fn differs() -> Verdict {
    let difference = Difference {
        what: What::Tokens,
        canary: Some("plain".into()),
        at: 3,
        block: 0,
        ours: Some(1),
        theirs: Some(2),
        our_text: None,
        their_text: None,
    };
    Verdict::Differs {
        difference: Box::new(difference),
    }
}

fn silent() -> Verdict {
    Verdict::CannotTest {
        why: "timeout".into(),
        passes: true,
    }
}

#[test]
fn a_model_is_believed_as_long_as_somebody_agrees() {
    // Who was tested with what, and whether our tokens are believed after it.
    let cases: &[(WorkerId, Verdict, bool, Change)] = &[
        (ONE, silent(), true, Change::None),
        (ONE, differs(), false, Change::Mistrusted),
        (ONE, differs(), false, Change::None),
        // Silence after a proof is no proof to the contrary.
        (ONE, silent(), false, Change::None),
        (TWO, silent(), false, Change::None),
        (TWO, agrees(), true, Change::Trusted),
        (TWO, silent(), true, Change::None),
        (TWO, differs(), false, Change::Mistrusted),
        (ONE, agrees(), true, Change::Trusted),
    ];
    let standing = Standing::default();
    for (at, (worker, verdict, believed, change)) in cases.iter().enumerate() {
        assert_eq!(
            standing.tested(*worker, verdict.clone()),
            *change,
            "step {at}"
        );
        assert_eq!(!standing.is_mistrusted(), *believed, "step {at}");
    }
    assert_eq!(standing.parity().state(), "some_differ");
    assert_eq!(
        standing.retain(|worker| worker == TWO),
        Change::Mistrusted,
        "who agreed has left"
    );
    assert_eq!(
        standing.retain(|_| false),
        Change::Trusted,
        "nobody is left who differs"
    );
    assert_eq!(standing.parity().state(), "untested");
}

#[test]
fn a_restarted_engine_that_cannot_be_asked_is_as_wrong_as_before_and_no_longer_right() {
    let standing = Standing::default();
    standing.tested(ONE, differs());
    standing.restarted(ONE);
    assert!(standing.is_mistrusted(), "not before it was asked again");
    assert_eq!(
        standing.tested(ONE, silent()),
        Change::None,
        "no test is passed by silence"
    );
    assert_eq!(standing.tested(ONE, agrees()), Change::Trusted);
    standing.restarted(ONE);
    standing.tested(ONE, silent());
    assert_eq!(standing.parity().state(), "cannot_test");
}

#[test]
fn events_prove_a_difference_only_in_a_row_and_heal_it_in_a_row() {
    let standing = Standing::default();
    let missing = Evidence::Unconfirmed { block: 2 };
    for round in 0..5 {
        for _ in 0..7 {
            assert_eq!(standing.seen(ONE, missing), Change::None, "{round}");
        }
        assert_eq!(standing.seen(ONE, Evidence::Confirmed), Change::None);
    }
    let changes: Vec<_> = (0..9).map(|_| standing.seen(ONE, missing)).collect();
    assert_eq!(changes[7], Change::Mistrusted);
    assert_eq!(
        changes
            .iter()
            .filter(|change| **change != Change::None)
            .count(),
        1
    );
    let found = standing.parity().workers[&ONE]
        .events
        .differs
        .clone()
        .unwrap();
    assert_eq!(
        (found.what, found.block, found.our_text),
        (What::Events, 2, None)
    );
    // That it agrees to canaries does not outweigh what its events prove.
    assert_eq!(standing.tested(ONE, agrees()), Change::None);
    let healing = [
        Evidence::Confirmed,
        Evidence::Confirmed,
        missing,
        Evidence::Confirmed,
        Evidence::Confirmed,
    ];
    assert!(
        healing
            .into_iter()
            .all(|evidence| standing.seen(ONE, evidence) == Change::None)
    );
    assert_eq!(standing.seen(ONE, Evidence::Confirmed), Change::Trusted);
}

#[test]
fn a_round_that_a_new_life_passes_outweighs_what_the_events_of_the_old_one_proved() {
    let standing = Standing::default();
    (0..8).for_each(|_| _ = standing.seen(ONE, Evidence::Unconfirmed { block: 0 }));
    standing.restarted(ONE);
    assert_eq!(
        standing.tested(ONE, silent()),
        Change::None,
        "no test is passed by silence"
    );
    assert_eq!(standing.tested(ONE, agrees()), Change::Trusted);
    let again: Vec<_> = (0..8)
        .map(|_| standing.seen(ONE, Evidence::Unconfirmed { block: 0 }))
        .collect();
    assert_eq!(
        again
            .iter()
            .position(|change| *change == Change::Mistrusted),
        Some(7),
        "it begins at nothing"
    );
    assert_eq!(
        standing.tested(ONE, agrees()),
        Change::None,
        "the same life"
    );
}

#[test]
fn what_the_events_of_one_worker_prove_is_proven_of_that_worker_only() {
    let standing = Standing::default();
    let missing = Evidence::Unconfirmed { block: 0 };
    // Nobody can be asked; both compute requests in turn, and only one of them as we foretell.
    let mut changes = Vec::new();
    for _ in 0..20 {
        changes.push(standing.seen(ONE, missing));
        changes.push(standing.seen(TWO, Evidence::Confirmed));
    }
    changes.retain(|change| *change != Change::None);
    assert_eq!(
        changes,
        [Change::Differs],
        "neither the model, nor to and fro"
    );
    assert_eq!(
        (standing.is_mistrusted(), standing.parity().state()),
        (false, "some_differ")
    );
    assert_eq!(standing.differing().iter().collect::<Vec<_>>(), [&ONE]);
    // Where nobody is left who makes our tokens, there is nobody to compare.
    assert_eq!(standing.tested(TWO, differs()), Change::Mistrusted);
    assert_eq!(
        (0..3)
            .map(|_| standing.seen(ONE, Evidence::Confirmed))
            .last(),
        Some(Change::Trusted)
    );
    assert_eq!(standing.differing().iter().collect::<Vec<_>>(), [&TWO]);
    assert_eq!(standing.tested(TWO, agrees()), Change::Agrees);
}

#[test]
fn what_is_looked_after_has_a_limit_and_needs_news_to_say_anything() {
    let standing = Arc::new(Standing::default());
    let rank = WorkerRank {
        worker: ONE,
        rank: DpRank(0),
    };
    let (block_size, index) = (BlockSize::new(8).unwrap(), PrefixIndex::new());
    let _writer = index.join(Slot(0));
    let hashes = BlockHashes::of(&[7; 40], block_size, &Salt::default());
    let since = Moment { stores: 5, gaps: 1 };
    let watch = || {
        Some(WatchedPrompt {
            watch: index.watch(&hashes, Slot(0))?,
            blocks: 5,
            block_size,
            since,
        })
    };
    let mut held: Vec<_> = (0..MOST_SIGHTINGS)
        .map(|_| standing.sighting(rank, watch).unwrap())
        .collect();
    assert!(standing.sighting(rank, watch).is_none());
    // Answered by somebody else, it is forgotten.
    held.pop().unwrap().answered(WorkerRank {
        worker: TWO,
        rank: DpRank(0),
    });
    assert!(standing.take_ready().is_empty());
    assert!(
        standing.sighting(rank, || None).is_none(),
        "there is nothing to check"
    );
    for (held, stores, gaps, told, expected) in [
        (5, 5, 1, Told::All, Some(Evidence::Confirmed)),
        (0, 5, 1, Told::All, None),
        (0, 6, 1, Told::All, Some(Evidence::Unconfirmed { block: 0 })),
        (4, 6, 1, Told::All, Some(Evidence::Unconfirmed { block: 4 })),
        // It may hold what it never told; but what it told it holds.
        (0, 6, 1, Told::Some, None),
        (5, 6, 1, Told::Some, Some(Evidence::Confirmed)),
        // Events were lost since the choice, and the source is exact again.
        (0, 6, 2, Told::All, None),
        (5, 6, 2, Told::All, Some(Evidence::Confirmed)),
    ] {
        standing.sighting(rank, watch).unwrap().answered(rank);
        let check = PromptCheck {
            held,
            expected: 5,
            now: Moment { stores, gaps },
            told,
        };
        let found = standing.take_ready().pop().unwrap().found(check);
        assert_eq!(found.map(|(evidence, _)| evidence), expected, "{check:?}");
    }
    assert_eq!(standing.parity().workers[&ONE].events.undecided, 2);
    drop(held);
    assert_eq!(standing.sightings.load(Ordering::Relaxed), 0);
}
