use std::time::Duration;

use super::*;

fn wall(seconds: f64) -> WallTime {
    WallTime::from_unix_seconds(seconds)
}

fn batch(at: Instant, number: u64) -> ReceivedBatch {
    ReceivedBatch {
        at,
        received: wall(100.0),
        written: Some(99.5),
        number,
    }
}

fn attached() -> EventSourceState {
    let mut source = EventSourceState::new(wall(1.0));
    source.set_link(SourceLink::Attached);
    source
}

fn status_of(source: &EventSourceState) -> (IndexFreshness, Option<StaleReason>) {
    let status = source.status();
    (status.freshness, status.reason)
}

type Case = (
    &'static str,
    fn(&mut EventSourceState),
    IndexFreshness,
    Option<StaleReason>,
);

fn check(cases: &[Case]) {
    for (name, happens, freshness, reason) in cases {
        let mut source = attached();
        happens(&mut source);
        assert_eq!(status_of(&source), (*freshness, *reason), "{name}");
    }
}

#[test]
fn history_determines_source_status() {
    let mismatch = |source: &mut EventSourceState| {
        source.set_unusable(StaleReason::BlockSizeMismatch, BlockSize::new(24))
    };
    check(&[
        ("new", |_| {}, IndexFreshness::Exact, None),
        (
            "replaying",
            |source| source.set_link(SourceLink::Replaying),
            IndexFreshness::CatchingUp,
            Some(StaleReason::Replaying),
        ),
        (
            "detached",
            |source| source.set_link(SourceLink::Connecting),
            IndexFreshness::Stale,
            Some(StaleReason::Detached),
        ),
        (
            "undecodable",
            EventSourceState::record_undecodable,
            IndexFreshness::Stale,
            Some(StaleReason::Undecodable),
        ),
        (
            "unusable",
            mismatch,
            IndexFreshness::Absent,
            Some(StaleReason::BlockSizeMismatch),
        ),
        (
            "a new engine with other blocks",
            |source| {
                source.set_unusable(StaleReason::BlockSizeMismatch, BlockSize::new(24));
                source.record_restart();
            },
            IndexFreshness::Exact,
            None,
        ),
    ]);
    assert_eq!(
        status_of(&EventSourceState::new(WallTime::default())),
        (IndexFreshness::CatchingUp, Some(StaleReason::Connecting))
    );
}

#[test]
fn lost_batches_make_blocks_stale_or_unreported() {
    fn lost(source: &mut EventSourceState) {
        source.record_lost(3);
        source.mark_unreported();
        source.set_stale_blocks(7);
    }
    check(&[
        (
            "lost",
            lost,
            IndexFreshness::Stale,
            Some(StaleReason::LostBatches),
        ),
        // A rank without blocks has no stale ones, but blocks stored in the meantime are unknown.
        (
            "batches were lost before any block was stored",
            EventSourceState::mark_unreported,
            IndexFreshness::Incomplete,
            Some(StaleReason::UnreportedBlocks),
        ),
        (
            "confirmed",
            |source| {
                lost(source);
                source.set_stale_blocks(0);
            },
            IndexFreshness::Incomplete,
            Some(StaleReason::UnreportedBlocks),
        ),
        (
            "forgotten",
            |source| {
                lost(source);
                source.record_emptied();
            },
            IndexFreshness::Incomplete,
            Some(StaleReason::UnreportedBlocks),
        ),
        (
            "evicted",
            |source| {
                lost(source);
                source.set_stale_blocks(0);
                source.set_unreported(false);
            },
            IndexFreshness::Exact,
            None,
        ),
        (
            "cleared",
            |source| {
                lost(source);
                source.record_cleared();
            },
            IndexFreshness::Exact,
            None,
        ),
    ]);
}

#[test]
fn silent_after_answers_until_next_batch() {
    let rules = FreshnessRules {
        silence_requests: 2,
        silence_after: Duration::from_secs(5),
        ..FreshnessRules::default()
    };
    let mut source = attached();
    let start = Instant::now();
    let at = |seconds: u64| start + Duration::from_secs(seconds);
    source.record_answer(at(0), at(1));
    source.check_silence(at(60), &rules);
    assert!(!source.is_silent(), "one request proves nothing");
    source.record_answer(at(2), at(60));
    assert_eq!(source.facts().requests_without_events, 2);
    source.check_silence(at(5), &rules);
    assert!(!source.is_silent(), "its batch may still be on its way");
    source.check_silence(at(6), &rules);
    assert_eq!(
        status_of(&source),
        (IndexFreshness::Stale, Some(StaleReason::Silent))
    );
    source.record_batch(batch(at(7), 4));
    assert_eq!(
        (status_of(&source).0, source.facts().requests_without_events),
        (IndexFreshness::Exact, 0)
    );
    // Routed before the batch arrived, which may have contained its blocks.
    (0..5).for_each(|_| source.record_answer(at(6), at(8)));
    source.check_silence(at(60), &rules);
    assert!(!source.is_silent());
}

#[test]
fn alternating_batches_of_two_ranks_make_source_unusable() {
    let mut source = attached();
    for _ in 0..10 {
        source.record_batch_rank(false);
        for _ in 0..OWN_IN_A_ROW - 1 {
            source.set_block_size(BlockSize::new(16).unwrap());
            source.record_batch_rank(true);
            assert_eq!(
                status_of(&source),
                (IndexFreshness::Absent, Some(StaleReason::OtherRank))
            );
        }
    }
    source.record_batch_rank(true);
    assert_eq!(
        status_of(&source),
        (IndexFreshness::Exact, None),
        "the previous source is gone"
    );
    source.record_batch_rank(false);
    source.record_restart();
    assert_eq!(
        status_of(&source),
        (IndexFreshness::Exact, None),
        "a new engine"
    );
}

#[test]
fn stats_report_last_batch_and_clock_skew() {
    let mut source = attached();
    source.record_batch(batch(Instant::now(), 9));
    let facts = source.facts();
    assert_eq!((facts.lag_seconds, facts.clock_skew), (Some(0.5), false));
    assert_eq!(
        (facts.last_number, facts.last_event, facts.batches),
        (Some(9), Some(wall(100.0)), 1)
    );
    source.record_batch(ReceivedBatch {
        written: Some(101.0),
        ..batch(Instant::now(), 10)
    });
    assert_eq!(
        (source.facts().lag_seconds, source.facts().clock_skew),
        (Some(-1.0), true)
    );
}

#[test]
fn since_changes_only_with_status() {
    let mut source = attached();
    assert!(!source.update(wall(5.0), EventSourceState::record_gap));
    assert_eq!(source.facts().since, wall(1.0));
    assert!(source.update(wall(6.0), EventSourceState::record_undecodable));
    assert_eq!((source.facts().since, source.facts().gaps), (wall(6.0), 1));
}

#[test]
fn only_stale_sources_reduce_credit() {
    let rules = FreshnessRules {
        stale_credit: 0.25,
        ..FreshnessRules::default()
    };
    let credit = |freshness: &IndexFreshness| rules.credit(SourceStatus::new(*freshness, None));
    let credits: Vec<f64> = IndexFreshness::ALL.iter().map(credit).collect();
    assert_eq!(
        credits,
        [1.0, 0.25, 1.0, 0.25, 1.0],
        "blocks of an incomplete source are correct"
    );
    let absent = |reason| rules.credit(SourceStatus::new(IndexFreshness::Absent, Some(reason)));
    assert_eq!(
        (
            absent(StaleReason::NoSource),
            absent(StaleReason::BlockSizeMismatch),
            absent(StaleReason::OtherRank)
        ),
        (1.0, 0.0, 0.0)
    );
}
