use std::num::NonZeroU32;

use proptest::prelude::*;

use super::*;
use crate::fleet::Fleet;
use crate::worker::{BlockSize, DpRank, Endpoint, Ranks, Worker};

const SECOND: Duration = Duration::from_secs(1);

fn fleet(ranks: &[u32], capacity: Capacity) -> Fleet {
    let worker = |(id, ranks): (usize, &u32)| Worker {
        ranks: Ranks {
            start: 0,
            size: NonZeroU32::new(*ranks).unwrap(),
        },
        capacity,
        ..Worker::new(
            WorkerId(id as u64),
            Endpoint(([10, 0, 0, 1], 8000 + id as u16).into()),
            "m".into(),
            BlockSize::new(16).unwrap(),
        )
    };
    Fleet::empty()
        .reconcile(ranks.iter().enumerate().map(worker).collect())
        .fleet
}

fn known() -> Capacity {
    Capacity {
        max_num_batched_tokens: Some(1000),
        total_kv_blocks: Some(100),
    }
}

fn ids(
    overload: &Overload,
    fleet: &Fleet,
    now: Instant,
    occupancy: impl Fn(&Member) -> Occupancy,
) -> Vec<u64> {
    let members: Vec<_> = fleet.members().collect();
    overload
        .overloaded(&members, now, occupancy)
        .workers()
        .iter()
        .map(|worker| worker.0)
        .collect()
}

fn blocks(active_blocks: u64) -> Occupancy {
    Occupancy {
        load: Load {
            active_blocks,
            ..Load::default()
        },
        reported_usage: None,
    }
}

fn prefill(active_prefill_tokens: u64) -> Occupancy {
    Occupancy {
        load: Load {
            active_prefill_tokens,
            ..Load::default()
        },
        reported_usage: None,
    }
}

#[test]
fn without_thresholds_no_load_is_asked_for() {
    let overload = Overload::new(Thresholds::default());
    let now = Instant::now();
    let fleet = fleet(&[1, 1], known());
    assert!(ids(&overload, &fleet, now, |_| panic!("asked for a load")).is_empty());
    overload.mark(WorkerId(1), now);
    assert_eq!(
        ids(&overload, &fleet, now, |_| panic!("asked for a load")),
        [1]
    );
}

#[test]
fn a_mark_ends_by_itself_and_lasts_from_the_last_refusal() {
    let overload = Overload::new(Thresholds::default());
    let (start, fleet) = (Instant::now(), fleet(&[1, 1], known()));
    let at = |time: Duration| ids(&overload, &fleet, start + time, |_| Occupancy::default());
    overload.mark(WorkerId(0), start);
    assert_eq!(at(SECOND / 2), [0]);
    overload.mark(WorkerId(0), start + SECOND / 2);
    // A report that comes late must not shorten it.
    overload.mark(WorkerId(0), start);
    assert_eq!(at(SECOND), [0]);
    assert!(at(SECOND * 3 / 2).is_empty());
    assert_eq!(overload.marked.load(Ordering::Relaxed), 0);
}

#[test]
fn workers_that_left_are_forgotten() {
    let overload = Overload::new(Thresholds {
        decode_blocks: Some(0.5),
        ..Thresholds::default()
    });
    let (now, fleet) = (Instant::now(), fleet(&[1, 1], known()));
    overload.mark(WorkerId(0), now);
    assert_eq!(ids(&overload, &fleet, now, |_| blocks(51)), [0, 1]);
    overload.retain(|worker| worker == WorkerId(1));
    assert_eq!(
        ids(&overload, &fleet, now, |_| blocks(50)),
        [1],
        "the mark and the latch of 0 are gone"
    );
}

#[test]
fn each_threshold_has_its_own_measure_and_none_is_reached_by_equality() {
    let of = |thresholds: Thresholds, capacity, occupancy: Occupancy| {
        !ids(
            &Overload::new(thresholds),
            &fleet(&[1], capacity),
            Instant::now(),
            |_| occupancy,
        )
        .is_empty()
    };
    let decode = Thresholds {
        decode_blocks: Some(0.5),
        ..Thresholds::default()
    };
    let unknown = Capacity::default();
    let reported = |usage| Occupancy {
        reported_usage: Some(usage),
        ..blocks(0)
    };
    for (capacity, occupancy, expected) in [
        (known(), blocks(50), false),
        (known(), blocks(51), true),
        (unknown, blocks(1_000_000), false),
        (unknown, reported(0.51), true),
        (known(), reported(0.51), true),
        (known(), reported(0.49), false),
        (known(), reported(f64::NAN), false),
    ] {
        assert_eq!(
            of(decode, capacity, occupancy),
            expected,
            "{capacity:?} {occupancy:?}"
        );
    }
    let tokens = Thresholds {
        prefill_tokens: Some(100),
        ..Thresholds::default()
    };
    assert_eq!(
        (
            of(tokens, known(), prefill(100)),
            of(tokens, known(), prefill(101))
        ),
        (false, true)
    );
    let fraction = Thresholds {
        prefill_tokens_fraction: Some(0.5),
        ..Thresholds::default()
    };
    assert_eq!(
        (
            of(fraction, known(), prefill(500)),
            of(fraction, known(), prefill(501))
        ),
        (false, true)
    );
    assert_eq!(
        (
            of(fraction, unknown, prefill(5_000_000)),
            of(fraction, unknown, prefill(5_000_001))
        ),
        (false, true)
    );
}

#[test]
fn thresholds_outside_their_range_are_refused_by_name() {
    let decode = Thresholds {
        decode_blocks: Some(1.1),
        ..Thresholds::default()
    };
    let fraction = Thresholds {
        prefill_tokens_fraction: Some(-0.1),
        ..Thresholds::default()
    };
    for (name, thresholds) in [
        ("decode_blocks", decode),
        ("prefill_tokens_fraction", fraction),
    ] {
        assert_eq!(thresholds.validate().unwrap_err().0, name);
    }
    assert_eq!(Thresholds::default().validate(), Ok(()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Worker 0 has two ranks and worker 1 has one. Blocks are 49, 50 or 51 of 100, or as little off by report.
    #[test]
    fn a_rank_stays_over_until_it_was_below_and_a_worker_needs_all_its_ranks(
        steps in prop::collection::vec(prop::array::uniform3((49u64..=51, prop::option::of(49u64..=51))), 1..12),
    ) {
        let overload = Overload::new(Thresholds { decode_blocks: Some(0.5), ..Thresholds::default() });
        let (now, fleet) = (Instant::now(), fleet(&[2, 1], known()));
        let mut over = [false; 3];
        for step in steps {
            let at = |member: &Member| if member.rank.worker == WorkerId(1) { 2 } else { member.rank.rank.0 as usize };
            for (over, (counted, reported)) in over.iter_mut().zip(step) {
                let values = [Some(counted), reported];
                if values.into_iter().flatten().any(|value| value > 50) {
                    *over = true;
                } else if values.into_iter().flatten().all(|value| value < 50) {
                    *over = false;
                }
            }
            let found = ids(&overload, &fleet, now, |member| {
                let (counted, reported) = step[at(member)];
                Occupancy { reported_usage: reported.map(|value| value as f64 / 100.0), ..blocks(counted) }
            });
            let expected: Vec<u64> =
                [(over[0] && over[1], 0), (over[2], 1)].into_iter().filter(|(over, _)| *over).map(|(_, id)| id).collect();
            prop_assert_eq!(found, expected);
            let latched: Vec<WorkerRank> = overload.latched.lock().iter().copied().collect();
            prop_assert_eq!(latched.len(), over.iter().filter(|over| **over).count());
            prop_assert!(latched.iter().all(|rank| rank.rank <= DpRank(1)));
        }
    }
}
