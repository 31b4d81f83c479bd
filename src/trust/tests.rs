use super::*;

fn heard(at: Instant, number: u64) -> Heard {
    Heard {
        at,
        unix: 100.0,
        written: Some(99.5),
        number,
    }
}

fn attached() -> Source {
    let mut source = Source::new(1.0);
    source.linked(Link::Attached);
    source
}

fn stands(source: &Source) -> (Trust, Option<Because>) {
    let standing = source.standing();
    (standing.trust, standing.because)
}

type Case = (&'static str, fn(&mut Source), Trust, Option<Because>);

fn check(cases: &[Case]) {
    for (name, happens, trust, because) in cases {
        let mut source = attached();
        happens(&mut source);
        assert_eq!(stands(&source), (*trust, *because), "{name}");
    }
}

#[test]
fn what_happens_decides_how_a_source_stands() {
    let mismatch =
        |source: &mut Source| source.unusable(Because::BlockSizeMismatch, BlockSize::new(24));
    check(&[
        ("new", |_| {}, Trust::Exact, None),
        (
            "replaying",
            |source| source.linked(Link::Replaying),
            Trust::CatchingUp,
            Some(Because::Replaying),
        ),
        (
            "detached",
            |source| source.linked(Link::Connecting),
            Trust::Stale,
            Some(Because::Detached),
        ),
        (
            "undecodable",
            Source::undecodable,
            Trust::Stale,
            Some(Because::Undecodable),
        ),
        (
            "unusable",
            mismatch,
            Trust::Absent,
            Some(Because::BlockSizeMismatch),
        ),
        (
            "a new engine with other blocks",
            |source| {
                source.unusable(Because::BlockSizeMismatch, BlockSize::new(24));
                source.restarted();
            },
            Trust::Exact,
            None,
        ),
    ]);
    assert_eq!(
        stands(&Source::new(0.0)),
        (Trust::CatchingUp, Some(Because::Connecting))
    );
}

#[test]
fn what_is_lost_may_be_gone_and_may_be_missing() {
    fn lost(source: &mut Source) {
        source.lost(3);
        source.missed();
        source.doubted(7);
    }
    check(&[
        ("lost", lost, Trust::Stale, Some(Because::LostBatches)),
        // Where nothing was held nothing can be out of date, but what was stored meanwhile is not known.
        (
            "lost before anything was held",
            Source::missed,
            Trust::Incomplete,
            Some(Because::UntoldBlocks),
        ),
        (
            "confirmed",
            |source| {
                lost(source);
                source.doubted(0);
            },
            Trust::Incomplete,
            Some(Because::UntoldBlocks),
        ),
        (
            "forgotten",
            |source| {
                lost(source);
                source.emptied();
            },
            Trust::Incomplete,
            Some(Because::UntoldBlocks),
        ),
        (
            "evicted",
            |source| {
                lost(source);
                source.doubted(0);
                source.untold(false);
            },
            Trust::Exact,
            None,
        ),
        (
            "cleared",
            |source| {
                lost(source);
                source.cleared();
            },
            Trust::Exact,
            None,
        ),
    ]);
}

#[test]
fn who_says_nothing_after_several_answers_is_silent_until_the_next_batch() {
    let rules = TrustRules {
        silence_requests: 2,
        silence_after: Duration::from_secs(5),
        ..TrustRules::default()
    };
    let (mut source, start) = (attached(), Instant::now());
    let at = |seconds: u64| start + Duration::from_secs(seconds);
    source.answered(at(0), at(1));
    source.look(at(60), &rules);
    assert!(!source.is_silent(), "one request proves nothing");
    source.answered(at(2), at(60));
    assert_eq!(source.facts().unheard_requests, 2);
    source.look(at(5), &rules);
    assert!(!source.is_silent(), "its batch may still be on its way");
    source.look(at(6), &rules);
    assert_eq!(stands(&source), (Trust::Stale, Some(Because::Silent)));
    source.heard(heard(at(7), 4));
    assert_eq!(
        (stands(&source).0, source.facts().unheard_requests),
        (Trust::Exact, 0)
    );
    // Routed before the batch came, which may have been its own.
    (0..5).for_each(|_| source.answered(at(6), at(8)));
    source.look(at(60), &rules);
    assert!(!source.is_silent());
}

#[test]
fn who_hears_two_ranks_is_not_believed_in_turns() {
    let mut source = attached();
    for _ in 0..10 {
        source.named(false);
        for _ in 0..OWN_IN_A_ROW - 1 {
            source.sized(BlockSize::new(16).unwrap());
            source.named(true);
            assert_eq!(stands(&source), (Trust::Absent, Some(Because::OtherRank)));
        }
    }
    source.named(true);
    assert_eq!(stands(&source), (Trust::Exact, None), "the other has gone");
    source.named(false);
    source.restarted();
    assert_eq!(stands(&source), (Trust::Exact, None), "a new engine");
}

#[test]
fn facts_tell_of_the_last_batch_and_of_clocks_that_differ() {
    let mut source = attached();
    source.heard(heard(Instant::now(), 9));
    let facts = source.facts();
    assert_eq!((facts.lag_seconds, facts.clock_skew), (Some(0.5), false));
    assert_eq!(
        (facts.last_number, facts.last_event, facts.batches),
        (Some(9), Some(100.0), 1)
    );
    source.heard(Heard {
        written: Some(101.0),
        ..heard(Instant::now(), 10)
    });
    assert_eq!(
        (source.facts().lag_seconds, source.facts().clock_skew),
        (Some(-1.0), true)
    );
}

#[test]
fn since_when_it_stands_so_changes_with_the_standing_only() {
    let mut source = attached();
    assert!(!source.change(5.0, Source::gap));
    assert_eq!(source.facts().since, 1.0);
    assert!(source.change(6.0, Source::undecodable));
    assert_eq!((source.facts().since, source.facts().gaps), (6.0, 1));
}

#[test]
fn only_what_may_be_out_of_date_is_discounted() {
    let rules = TrustRules {
        stale_credit: 0.25,
        ..TrustRules::default()
    };
    let credit = Trust::ALL.map(|trust| rules.credit(Standing::new(trust, None)));
    assert_eq!(
        credit,
        [1.0, 1.0, 0.25, 0.25, 1.0],
        "what an incomplete one told is true"
    );
    let absent = |because| rules.credit(Standing::new(Trust::Absent, Some(because)));
    assert_eq!(
        (
            absent(Because::NoSource),
            absent(Because::BlockSizeMismatch),
            absent(Because::OtherRank)
        ),
        (1.0, 0.0, 0.0)
    );
}
