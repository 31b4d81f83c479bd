use super::*;

fn digest(content: u8) -> PayloadDigest {
    PayloadDigest::of(&[content])
}

/// Returns a sequencer that received live batches up to `live` and applied batches up to `applied`.
fn sequencer_at(applied: Option<u64>, live: Option<u64>) -> Sequencer {
    let applied = applied.map(|seq| AppliedBatch {
        seq,
        digest: digest(1),
    });
    Sequencer {
        applied,
        last_live: live,
    }
}

#[test]
fn live_batch_is_classified_by_both_positions() {
    let gap = |from, to| LiveAction::Gap(SequenceGap { from, to });
    let cases = [
        (None, None, 0, LiveAction::Apply),
        (None, None, 5, gap(0, 5)),
        (Some(4), Some(4), 5, LiveAction::Apply),
        (Some(4), Some(4), 7, gap(5, 7)),
        (Some(9), Some(4), 7, LiveAction::Stale),
        (Some(9), Some(4), 9, LiveAction::Stale),
        (Some(9), Some(4), 10, LiveAction::Apply),
        (Some(4), Some(4), 4, LiveAction::Restart),
        (Some(4), Some(4), 0, LiveAction::Restart),
        (Some(9), Some(7), 7, LiveAction::Restart),
        (Some(4), None, 3, LiveAction::Stale),
        // An undecodable batch was received but not applied.
        (Some(4), Some(5), 6, gap(5, 6)),
    ];
    for (applied, live, seq, expected) in cases {
        assert_eq!(
            sequencer_at(applied, live).accept_live(seq, || digest(2)),
            expected,
            "{applied:?} {live:?} {seq}"
        );
    }
}

#[test]
fn repeated_last_batch_is_no_restart() {
    assert_eq!(
        sequencer_at(Some(4), Some(4)).accept_live(4, || digest(1)),
        LiveAction::Stale
    );
    assert_eq!(
        sequencer_at(Some(9), Some(7)).accept_live(7, || digest(1)),
        LiveAction::Restart,
        "an older number is a restart"
    );
}

#[test]
fn replayed_batch_is_classified_by_number_and_content() {
    let gap = |from, to| ReplayAction::Gap(SequenceGap { from, to });
    let cases = [
        (None, 0, 1, ReplayAction::Apply),
        (None, 3, 1, gap(0, 3)),
        (Some(4), 4, 1, ReplayAction::Duplicate),
        (Some(4), 4, 2, ReplayAction::Restart),
        (Some(4), 2, 2, ReplayAction::Duplicate),
        (Some(4), 5, 2, ReplayAction::Apply),
        (Some(4), 6, 2, gap(5, 6)),
    ];
    for (applied, seq, content, expected) in cases {
        assert_eq!(
            sequencer_at(applied, None).accept_replayed(seq, digest(content)),
            expected,
            "{applied:?} {seq} {content}"
        );
    }
}

#[test]
fn restart_clears_both_positions() {
    let mut sequencer = sequencer_at(Some(4), Some(4));
    assert_eq!(
        sequencer.accept_replayed(4, digest(2)),
        ReplayAction::Restart
    );
    assert_eq!(
        (
            sequencer.replay_start(),
            sequencer.next_seq(),
            sequencer.is_fresh()
        ),
        (0, 0, true)
    );
    sequencer.advance(0, digest(2));
    assert_eq!(
        sequencer.accept_live(1, || digest(2)),
        LiveAction::Apply,
        "its number is not compared with those before the restart"
    );
}

#[test]
fn empty_replay_after_applied_batch_is_restart() {
    let mut sequencer = sequencer_at(Some(4), Some(4));
    assert!(sequencer.accept_empty_replay());
    assert!(
        !sequencer.accept_empty_replay(),
        "the state is already clear"
    );
}
