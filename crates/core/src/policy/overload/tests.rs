use std::num::NonZeroU32;

use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::*;
use crate::fleet::Fleet;
use crate::worker::{BlockSize, DpRank, RankRange, Worker, WorkerEndpoint};

const SECOND: Duration = Duration::from_secs(1);

fn fleet(ranks: &[u32], capacity: WorkerCapacity) -> Fleet {
    let worker = |(id, ranks): (usize, &u32)| Worker {
        ranks: RankRange {
            start: 0,
            size: NonZeroU32::new(*ranks).unwrap(),
        },
        capacity,
        ..Worker::new(
            WorkerId(id as u64),
            WorkerEndpoint(([10, 0, 0, 1], 8000 + id as u16).into()),
            "m".into(),
            BlockSize::new(16).unwrap(),
        )
    };
    Fleet::empty()
        .reconcile(ranks.iter().enumerate().map(worker).collect())
        .fleet
}

fn known() -> WorkerCapacity {
    WorkerCapacity {
        max_num_batched_tokens: Some(1000),
        total_kv_blocks: Some(100),
    }
}

fn ids(
    overload: &OverloadTracker,
    fleet: &Fleet,
    now: Instant,
    occupancy: impl Fn(&FleetMember) -> RankOccupancy,
) -> Vec<u64> {
    let members: Vec<_> = fleet.members().collect();
    overload
        .overloaded_workers(&members, now, LatchMode::Update, occupancy)
        .workers()
        .iter()
        .map(|worker| worker.0)
        .collect()
}

fn blocks(active_blocks: u64) -> RankOccupancy {
    RankOccupancy {
        load: ActiveLoad {
            active_blocks,
            ..ActiveLoad::default()
        },
        reported_usage: None,
    }
}

fn prefill(active_prefill_tokens: u64) -> RankOccupancy {
    RankOccupancy {
        load: ActiveLoad {
            active_prefill_tokens,
            ..ActiveLoad::default()
        },
        reported_usage: None,
    }
}

#[test]
fn load_is_not_read_without_thresholds() {
    let overload = OverloadTracker::new(OverloadThresholds::default());
    let now = Instant::now();
    let fleet = fleet(&[1, 1], known());
    assert!(ids(&overload, &fleet, now, |_| panic!("the load was read")).is_empty());
    overload.mark(WorkerId(1), now);
    assert_eq!(
        ids(&overload, &fleet, now, |_| panic!("the load was read")),
        [1]
    );
}

#[test]
fn overload_mark_expires_after_last_rejection() {
    let overload = OverloadTracker::new(OverloadThresholds::default());
    let start = Instant::now();
    let fleet = fleet(&[1, 1], known());
    let at = |time: Duration| {
        ids(&overload, &fleet, start + time, |_| {
            RankOccupancy::default()
        })
    };
    overload.mark(WorkerId(0), start);
    assert_eq!(at(SECOND / 2), [0]);
    overload.mark(WorkerId(0), start + SECOND / 2);
    // A late report must not shorten the mark.
    overload.mark(WorkerId(0), start);
    assert_eq!(at(SECOND), [0]);
    assert!(at(SECOND * 3 / 2).is_empty());
    assert_eq!(overload.mark_count.load(Ordering::Relaxed), 0);
}

#[test]
fn workers_that_left_are_forgotten() {
    let overload = OverloadTracker::new(OverloadThresholds {
        decode_blocks: Some(0.5),
        ..OverloadThresholds::default()
    });
    let now = Instant::now();
    let fleet = fleet(&[1, 1], known());
    overload.mark(WorkerId(0), now);
    assert_eq!(ids(&overload, &fleet, now, |_| blocks(51)), [0, 1]);
    overload.retain(|worker| worker == WorkerId(1));
    assert_eq!(
        ids(&overload, &fleet, now, |_| blocks(50)),
        [1],
        "mark and latch of worker 0 are removed"
    );
}

fn is_overloaded(
    thresholds: OverloadThresholds,
    capacity: WorkerCapacity,
    occupancy: RankOccupancy,
) -> bool {
    let tracker = OverloadTracker::new(thresholds);
    let fleet = fleet(&[1], capacity);
    !ids(&tracker, &fleet, Instant::now(), |_| occupancy).is_empty()
}

#[test]
fn decode_threshold_is_exceeded_by_more_blocks_only() {
    let decode = OverloadThresholds {
        decode_blocks: Some(0.5),
        ..OverloadThresholds::default()
    };
    let unknown = WorkerCapacity::default();
    let reported = |usage| RankOccupancy {
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
            is_overloaded(decode, capacity, occupancy),
            expected,
            "{capacity:?} {occupancy:?}"
        );
    }
}

#[test]
fn prefill_thresholds_are_exceeded_by_more_tokens_only() {
    let of = is_overloaded;
    let unknown = WorkerCapacity::default();
    let tokens = OverloadThresholds {
        prefill: BusyThreshold {
            prefill_tokens: Some(100),
            prefill_fraction: None,
        },
        ..OverloadThresholds::default()
    };
    assert_eq!(
        (
            of(tokens, known(), prefill(100)),
            of(tokens, known(), prefill(101))
        ),
        (false, true)
    );
    let fraction = OverloadThresholds {
        prefill: BusyThreshold {
            prefill_tokens: None,
            prefill_fraction: Some(0.5),
        },
        ..OverloadThresholds::default()
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
fn invalid_thresholds_are_rejected_by_name() {
    let decode = OverloadThresholds {
        decode_blocks: Some(1.1),
        ..OverloadThresholds::default()
    };
    let fraction = OverloadThresholds {
        prefill: BusyThreshold {
            prefill_tokens: None,
            prefill_fraction: Some(-0.1),
        },
        ..OverloadThresholds::default()
    };
    for (name, thresholds) in [
        ("decode_blocks_threshold", decode),
        ("prefill_tokens_threshold_frac", fraction),
    ] {
        assert_eq!(thresholds.validate().unwrap_err().0, name);
    }
    assert_eq!(OverloadThresholds::default().validate(), Ok(()));
}

proptest! {
    #![proptest_config(property_config(10_000))]

    /// Worker 0 has two ranks and worker 1 has one. Blocks are 49, 50 or 51 of 100, or as little
    /// off by report.
    #[test]
    fn overload_latches_per_rank_and_needs_all_ranks(
        steps in prop::collection::vec(prop::array::uniform3((49u64..=51, prop::option::of(49u64..=51))), 1..12),
    ) {
        let overload = OverloadTracker::new(OverloadThresholds { decode_blocks: Some(0.5), ..OverloadThresholds::default() });
        let now = Instant::now();
        let fleet = fleet(&[2, 1], known());
        let mut over = [false; 3];
        for step in steps {
            let at = |member: &FleetMember| if member.rank.worker == WorkerId(1) { 2 } else { member.rank.rank.0 as usize };
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
                RankOccupancy { reported_usage: reported.map(|value| value as f64 / 100.0), ..blocks(counted) }
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
