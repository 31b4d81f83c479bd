use super::*;

fn digest(life: u8) -> Digest {
    Digest::of(&[life])
}

/// A sequencer that has seen live batches up to `live` and applied up to `applied` in life 1.
fn at(applied: Option<u64>, live: Option<u64>) -> Sequencer {
    let applied = applied.map(|seq| Mark {
        seq,
        digest: digest(1),
    });
    Sequencer {
        applied,
        last_live: live,
    }
}

#[test]
fn a_live_batch_is_judged_by_both_marks() {
    let cases = [
        (None, None, 0, Live::Apply),
        (None, None, 5, Live::Gap { from: 0, to: 5 }),
        (Some(4), Some(4), 5, Live::Apply),
        (Some(4), Some(4), 7, Live::Gap { from: 5, to: 7 }),
        (Some(9), Some(4), 7, Live::Stale),
        (Some(9), Some(4), 9, Live::Stale),
        (Some(9), Some(4), 10, Live::Apply),
        (Some(4), Some(4), 4, Live::Restart),
        (Some(4), Some(4), 0, Live::Restart),
        (Some(9), Some(7), 7, Live::Restart),
        (Some(4), None, 3, Live::Stale),
        // A batch that could not be read was seen but not applied.
        (Some(4), Some(5), 6, Live::Gap { from: 5, to: 6 }),
    ];
    for (applied, live, seq, expected) in cases {
        assert_eq!(
            at(applied, live).live(seq, || digest(2)),
            expected,
            "{applied:?} {live:?} {seq}"
        );
    }
}

#[test]
fn the_last_batch_again_is_no_restart() {
    assert_eq!(at(Some(4), Some(4)).live(4, || digest(1)), Live::Stale);
    assert_eq!(
        at(Some(9), Some(7)).live(7, || digest(1)),
        Live::Restart,
        "an older number is"
    );
}

#[test]
fn a_repeated_batch_is_judged_by_number_and_content() {
    let cases = [
        (None, 0, 1, Repeated::Apply),
        (None, 3, 1, Repeated::Hole { from: 0, to: 3 }),
        (Some(4), 4, 1, Repeated::Known),
        (Some(4), 4, 2, Repeated::Restart),
        (Some(4), 2, 2, Repeated::Known),
        (Some(4), 5, 2, Repeated::Apply),
        (Some(4), 6, 2, Repeated::Hole { from: 5, to: 6 }),
    ];
    for (applied, seq, life, expected) in cases {
        assert_eq!(
            at(applied, None).repeated(seq, digest(life)),
            expected,
            "{applied:?} {seq} {life}"
        );
    }
}

#[test]
fn a_new_life_starts_without_marks() {
    let mut sequencer = at(Some(4), Some(4));
    assert_eq!(sequencer.repeated(4, digest(2)), Repeated::Restart);
    assert_eq!(
        (
            sequencer.ask_from(),
            sequencer.expected(),
            sequencer.is_fresh()
        ),
        (0, 0, true)
    );
    sequencer.advance(0, digest(2));
    assert_eq!(
        sequencer.live(1, || digest(2)),
        Live::Apply,
        "its numbers are not compared with the old life's"
    );
}

#[test]
fn an_engine_without_the_batch_last_applied_has_started_over() {
    let mut sequencer = at(Some(4), Some(4));
    assert!(sequencer.repeated_nothing());
    assert!(
        !sequencer.repeated_nothing(),
        "there is nothing left to forget"
    );
}
