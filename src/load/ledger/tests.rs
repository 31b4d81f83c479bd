use std::collections::BTreeMap;

use parking_lot::Mutex;
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::block::SequenceHash;
use crate::load::{RankLoad, Until};
use crate::worker::{DpRank, Slot, WorkerId};

fn rank(worker: u32) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(worker.into()),
        rank: DpRank(0),
    }
}

fn booking(worker: u32, blocks: u64) -> Booking {
    Booking {
        slot: Slot(worker),
        rank: rank(worker),
        sequences: (1..=blocks).map(SequenceHash).collect(),
        prompt_tokens: blocks * 16,
        cached_tokens: 0,
        track_prefill: true,
        prefill_time: None,
        until: Until::End,
    }
}

fn named(request: &str, number: u64) -> Attempt<'_> {
    Attempt { request, number }
}

/// A ledger of two workers, and its time.
struct Bench {
    ledger: Ledger,
    load: Arc<LoadTracker>,
    now: Arc<Mutex<Instant>>,
}

impl Bench {
    fn new(rules: Rules) -> Self {
        let now = Arc::new(Mutex::new(Instant::now()));
        let clock = now.clone();
        let load = LoadTracker::new(move || *clock.lock());
        (0..2).for_each(|worker| load.open(Slot(worker), rank(worker)));
        Self {
            ledger: Ledger::new(load.clone(), rules),
            load,
            now,
        }
    }

    fn pass(&self, time: Duration) {
        *self.now.lock() += time;
    }

    fn add(&mut self, request: &str, number: u64, booking: Booking) -> Result<Change, Refused> {
        self.ledger.add(named(request, number), vec![booking])
    }

    /// Blocks, prefill tokens and requests of both workers.
    fn loads(&self) -> Vec<(u64, u64, u64)> {
        let row = |load: &RankLoad| {
            (
                load.active_blocks,
                load.active_prefill_tokens,
                load.active_requests,
            )
        };
        self.load.snapshot().iter().map(row).collect()
    }
}

#[test]
fn the_same_attempt_again_changes_nothing_and_only_a_later_one_takes_its_place() {
    let mut bench = Bench::new(Rules::default());
    assert_eq!(bench.add("a", 1, booking(0, 2)), Ok(Change::Applied));
    assert_eq!(bench.add("a", 1, booking(0, 2)), Ok(Change::None));
    for (number, other) in [(1, booking(1, 2)), (1, booking(0, 3)), (0, booking(0, 2))] {
        assert_eq!(
            bench.add("a", number, other),
            Err(Refused::Booked { attempt: 1 })
        );
    }
    assert_eq!(bench.loads(), [(2, 32, 1), (0, 0, 0)]);
    assert_eq!(
        bench.add("a", 2, booking(7, 1)),
        Err(Refused::NotServing { rank: rank(7) })
    );
    assert_eq!(
        bench.loads(),
        [(2, 32, 1), (0, 0, 0)],
        "nothing has changed"
    );
    assert_eq!(bench.add("a", 2, booking(1, 3)), Ok(Change::Applied));
    assert_eq!(bench.loads(), [(0, 0, 0), (3, 48, 1)]);
    assert_eq!(
        (
            bench.ledger.free(named("a", 1)),
            bench.ledger.counts().bookings
        ),
        (Change::None, 1)
    );
}

#[test]
fn what_has_ended_is_remembered_and_not_booked_again() {
    let rules = Rules {
        ended: 2,
        most: 1,
        ..Rules::default()
    };
    let prefill = || Booking {
        until: Until::FirstToken,
        ..booking(0, 2)
    };
    type End = fn(&mut Ledger, Attempt<'_>) -> Change;
    let ends: [(&str, End); 2] = [
        ("first token", Ledger::mark_prefill_completed),
        ("free", Ledger::free),
    ];
    for (name, end) in ends {
        let mut bench = Bench::new(rules);
        bench.add("a", 1, prefill()).unwrap();
        assert_eq!(
            end(&mut bench.ledger, named("a", 1)),
            Change::Applied,
            "{name}"
        );
        for number in [0, 1] {
            let late = named("a", number);
            assert_eq!(
                bench.add("a", number, prefill()),
                Ok(Change::None),
                "{name}"
            );
            assert_eq!(
                bench.ledger.mark_prefill_completed(late),
                Change::None,
                "{name}"
            );
            assert_eq!(bench.ledger.free(late), Change::None, "{name}");
            assert!(
                matches!(bench.ledger.known(late), Some(Known::Ended(()))),
                "{name}"
            );
        }
        assert_eq!(bench.loads(), [(0, 0, 0), (0, 0, 0)], "{name}");
        assert_eq!(
            bench.ledger.counts(),
            Counts::default(),
            "{name}: what has ended takes no place"
        );
        assert_eq!(
            bench.add("a", 2, booking(1, 1)),
            Ok(Change::Applied),
            "{name}: a later attempt"
        );
        bench.ledger.free(named("a", 2));
        bench.pass(rules.silence + Duration::from_millis(1));
        bench.ledger.expire();
        assert!(
            bench.ledger.entries.is_empty() && bench.ledger.ended.is_empty(),
            "{name}"
        );
        assert_eq!(
            bench.ledger.counts(),
            Counts::default(),
            "{name}: it was not silent"
        );
        assert_eq!(
            bench.add("a", 1, prefill()),
            Ok(Change::Applied),
            "{name}: forgotten"
        );
    }
    // Only so many.
    let mut bench = Bench::new(rules);
    for name in ["a", "b", "c"] {
        bench.add(name, 0, booking(0, 1)).unwrap();
        bench.ledger.free(named(name, 0));
    }
    let known = ["a", "b", "c"].map(|name| bench.ledger.known(named(name, 0)).is_some());
    assert_eq!(known, [false, true, true]);
}

#[test]
fn a_ledger_holds_only_so_many_blocks() {
    let mut bench = Bench::new(Rules {
        blocks: 3,
        ..Rules::default()
    });
    bench.add("a", 0, booking(0, 2)).unwrap();
    assert_eq!(
        bench.add("b", 0, booking(0, 2)),
        Err(Refused::Blocks { most: 3 })
    );
    assert_eq!(bench.add("b", 0, booking(0, 1)), Ok(Change::Applied));
    bench.pass(Rules::default().silence + Duration::from_millis(1));
    assert_eq!(bench.ledger.expire(), 2);
    assert_eq!(bench.add("b", 1, booking(0, 3)), Ok(Change::Applied));
    bench.load.open(Slot(0), rank(0));
    bench.ledger.expire();
    assert_eq!(bench.ledger.blocks, 0);
}

#[test]
fn a_late_word_about_an_earlier_attempt_changes_nothing() {
    let mut bench = Bench::new(Rules::default());
    bench.add("a", 1, booking(0, 2)).unwrap();
    assert_eq!(bench.ledger.free(named("a", 1)), Change::Applied);
    bench.add("a", 2, booking(1, 2)).unwrap();
    let old = named("a", 1);
    let words = [
        bench.ledger.mark_prefill_completed(old),
        bench.ledger.output_block(old, None),
        bench.ledger.touch(old),
        bench.ledger.free(old),
    ];
    assert_eq!(words, [Change::None; 4]);
    assert_eq!(bench.loads(), [(0, 0, 0), (2, 32, 1)]);
    assert!(bench.ledger.get(named("a", 2)).is_some());
    assert!(bench.ledger.get(old).is_none());
}

#[test]
fn only_workers_that_serve_are_booked_and_all_of_them_or_none() {
    let mut bench = Bench::new(Rules::default());
    let gone = booking(7, 1);
    let refused = bench
        .ledger
        .add(named("a", 0), vec![booking(0, 1), gone.clone()]);
    assert_eq!(refused, Err(Refused::NotServing { rank: gone.rank }));
    assert_eq!(bench.loads(), [(0, 0, 0), (0, 0, 0)]);
    assert_eq!(bench.ledger.counts(), Counts::default());
}

#[test]
fn a_booking_ends_with_its_worker() {
    let mut bench = Bench::new(Rules::default());
    bench.add("a", 0, booking(0, 2)).unwrap();
    bench.add("b", 0, booking(0, 2)).unwrap();
    bench.load.open(Slot(0), rank(0));
    assert_eq!(bench.ledger.touch(named("a", 0)), Change::None);
    assert_eq!(bench.ledger.free(named("a", 0)), Change::None);
    assert_eq!(bench.add("a", 0, booking(0, 3)), Ok(Change::Applied));
    assert_eq!(bench.ledger.expire(), 0);
    assert_eq!(
        bench.ledger.counts(),
        Counts {
            bookings: 1,
            expired: 0
        }
    );
    assert_eq!(bench.loads()[0], (3, 48, 1));
}

#[test]
fn a_ledger_holds_only_so_much() {
    let mut bench = Bench::new(Rules {
        most: 1,
        ..Rules::default()
    });
    bench.add("a", 0, booking(0, 1)).unwrap();
    assert_eq!(
        bench.add("b", 0, booking(0, 1)),
        Err(Refused::Full { most: 1 })
    );
    assert_eq!(bench.add("a", 0, booking(0, 1)), Ok(Change::None));
    bench.ledger.free(named("a", 0));
    assert_eq!(bench.add("b", 0, booking(0, 1)), Ok(Change::Applied));
}

#[test]
fn every_sign_of_life_counts_and_silence_has_to_be_longer_than_allowed() {
    type Sign = fn(&mut Ledger, Attempt<'_>) -> Change;
    let signs: [(&str, Sign); 3] = [
        ("touch", Ledger::touch),
        ("mark", Ledger::mark_prefill_completed),
        ("output", |ledger, attempt| {
            ledger.output_block(attempt, Some(0.5))
        }),
    ];
    let allowed = Rules::default().silence;
    for (name, sign) in signs {
        let mut bench = Bench::new(Rules::default());
        bench.add("a", 0, booking(0, 1)).unwrap();
        bench.pass(allowed);
        assert_eq!(bench.ledger.expire(), 0, "{name}");
        assert_eq!(
            sign(&mut bench.ledger, named("a", 0)),
            Change::Applied,
            "{name}"
        );
        bench.pass(allowed);
        assert_eq!(bench.ledger.expire(), 0, "{name}");
        bench.pass(Duration::from_millis(1));
        assert_eq!(bench.ledger.expire(), 1, "{name}");
        assert_eq!(bench.loads(), [(0, 0, 0), (0, 0, 0)], "{name}");
        assert_eq!(
            bench.ledger.counts(),
            Counts {
                bookings: 0,
                expired: 1
            },
            "{name}"
        );
    }
}

#[test]
fn adding_looks_for_the_silent_itself() {
    let mut bench = Bench::new(Rules::default());
    bench.add("a", 0, booking(0, 1)).unwrap();
    bench.pass(Duration::from_secs(301));
    bench.add("b", 0, booking(1, 1)).unwrap();
    assert_eq!(bench.loads(), [(0, 0, 0), (1, 16, 1)]);
    assert_eq!(
        bench.ledger.counts(),
        Counts {
            bookings: 1,
            expired: 1
        }
    );
}

#[test]
fn what_was_booked_elsewhere_is_kept_or_released() {
    let mut bench = Bench::new(Rules::default());
    let book = |booking: Booking| {
        bench
            .load
            .book_with(|_| Ok::<_, ()>(vec![booking]))
            .unwrap()
    };
    let (first, same, other) = (
        book(booking(0, 1)),
        book(booking(0, 1)),
        book(booking(1, 1)),
    );
    assert_eq!(bench.ledger.keep(named("a", 0), first), Ok(Change::Applied));
    assert_eq!(bench.ledger.keep(named("a", 0), same), Ok(Change::None));
    assert_eq!(
        bench.ledger.keep(named("a", 0), other),
        Err(Refused::Booked { attempt: 0 })
    );
    assert_eq!(bench.loads(), [(1, 16, 1), (0, 0, 0)]);
}

/// One booking of the naive ledger.
#[derive(Clone, Debug, PartialEq)]
struct Live {
    attempt: u64,
    worker: u32,
    blocks: u64,
    prefill: bool,
    outputs: u64,
    heard: u64,
}

/// The ledger, kept by the simplest means. Time is in seconds.
#[derive(Default)]
struct Naive {
    live: BTreeMap<u8, Live>,
    now: u64,
    swept: u64,
    expired: u64,
}

impl Naive {
    fn expire(&mut self) {
        let (before, now) = (self.live.len(), self.now);
        self.live.retain(|_, live| now - live.heard <= 300);
        self.expired += (before - self.live.len()) as u64;
        self.swept = now;
    }

    fn add(&mut self, request: u8, new: Live) -> Result<Change, Refused> {
        if self.now - self.swept >= 30 {
            self.expire();
        }
        let now = self.now;
        if self
            .live
            .get(&request)
            .is_some_and(|live| now - live.heard > 300)
        {
            self.live.remove(&request);
            self.expired += 1;
        }
        if let Some(live) = self
            .live
            .get_mut(&request)
            .filter(|live| new.attempt <= live.attempt)
        {
            if (live.attempt, live.worker, live.blocks) != (new.attempt, new.worker, new.blocks) {
                return Err(Refused::Booked {
                    attempt: live.attempt,
                });
            }
            live.heard = now;
            return Ok(Change::None);
        }
        if new.worker > 1 {
            return Err(Refused::NotServing {
                rank: rank(new.worker),
            });
        }
        self.live.insert(request, new);
        Ok(Change::Applied)
    }

    /// A word about an attempt; whether it is live.
    fn hear(&mut self, request: u8, attempt: u64) -> Option<&mut Live> {
        let now = self.now;
        let live = self
            .live
            .get_mut(&request)
            .filter(|live| live.attempt == attempt)?;
        live.heard = now;
        Some(live)
    }

    fn load(&self, worker: u32) -> (u64, u64, u64) {
        let rows: Vec<_> = self
            .live
            .values()
            .filter(|live| live.worker == worker)
            .collect();
        let prompts = rows.iter().map(|live| live.blocks).max().unwrap_or(0);
        let outputs: u64 = rows.iter().map(|live| live.outputs).sum();
        let prefill = rows
            .iter()
            .filter(|live| live.prefill)
            .map(|live| live.blocks * 16)
            .sum();
        (prompts + outputs, prefill, rows.len() as u64)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_ledger_is_that_of_the_live_attempts(
        script in vec((0..10u8, 0..3u8, 0..3u64, 0..3u32, 0..3u64), 1..40),
    ) {
        let mut bench = Bench::new(Rules::default());
        let mut naive = Naive::default();
        for (kind, request, attempt, worker, blocks) in script {
            let name = ["a", "b", "c"][usize::from(request)];
            let meant = named(name, attempt);
            match kind {
                0..3 => {
                    let live = Live { attempt, worker, blocks, prefill: blocks > 0, outputs: 0, heard: naive.now };
                    prop_assert_eq!(bench.add(name, attempt, booking(worker, blocks)), naive.add(request, live));
                }
                3 => {
                    let known = naive.hear(request, attempt);
                    let change = Change::of(known.is_some_and(|live| std::mem::take(&mut live.prefill)));
                    prop_assert_eq!(bench.ledger.mark_prefill_completed(meant), change);
                }
                4 => {
                    let known = naive.hear(request, attempt).map(|live| live.outputs += 1);
                    prop_assert_eq!(bench.ledger.output_block(meant, None), Change::of(known.is_some()));
                }
                5 => prop_assert_eq!(bench.ledger.touch(meant), Change::of(naive.hear(request, attempt).is_some())),
                6 => {
                    let known = naive.live.get(&request).is_some_and(|live| live.attempt == attempt);
                    prop_assert_eq!(bench.ledger.free(meant), Change::of(known));
                    if known {
                        naive.live.remove(&request);
                    }
                }
                7 => {
                    naive.expire();
                    bench.ledger.expire();
                }
                _ => {
                    let seconds = [1, 29, 30, 150, 299, 300, 301][(blocks * 3 + u64::from(request)) as usize % 7];
                    naive.now += seconds;
                    bench.pass(Duration::from_secs(seconds));
                }
            }
            prop_assert_eq!(bench.loads(), [naive.load(0), naive.load(1)]);
            let counts = Counts { bookings: naive.live.len(), expired: naive.expired };
            prop_assert_eq!(bench.ledger.counts(), counts);
        }
        drop(bench.ledger);
        prop_assert!(bench.load.snapshot().iter().all(|load| load.active_blocks + load.active_requests == 0));
    }
}
