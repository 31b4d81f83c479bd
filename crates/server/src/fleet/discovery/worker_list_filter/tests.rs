use std::num::NonZeroU32;

use warmroute_core::worker::{BlockSize, RankRange};

use super::*;

const CONFIRMATION: Duration = Duration::from_secs(30);

fn worker(id: u64, model: &str, role: WorkerRole) -> Worker {
    let endpoint = WorkerEndpoint(([10, 0, (id >> 8) as u8, id as u8], 8000).into());
    Worker {
        role,
        ..Worker::new(
            WorkerId(id),
            endpoint,
            model.into(),
            BlockSize::new(16).unwrap(),
        )
    }
}

fn decode(id: u64) -> Worker {
    worker(id, "m", WorkerRole::Decode)
}

fn prefill(id: u64) -> Worker {
    worker(id, "m", WorkerRole::Prefill)
}

fn models(names: &[&str]) -> Vec<WorkerModel> {
    let model = |name: &&str| WorkerModel {
        name: (*name).into(),
        block_size: BlockSize::new(16).unwrap(),
        uses_bootstrap: false,
    };
    names.iter().map(model).collect()
}

fn ids(workers: &[Worker]) -> Vec<u64> {
    let mut ids: Vec<u64> = workers.iter().map(|worker| worker.id.0).collect();
    ids.sort_unstable();
    ids
}

/// A guard with a clock, for the models `m` and `n`.
struct Fixture {
    guard: WorkerListFilter,
    start: Instant,
}

impl Fixture {
    fn new(workers: Vec<Worker>) -> Self {
        let mut fixture = Self {
            guard: WorkerListFilter::default(),
            start: Instant::now(),
        };
        let expected = ids(&workers);
        assert_eq!(fixture.update(workers, 0), expected);
        fixture
    }

    fn update(&mut self, workers: Vec<Worker>, seconds: u64) -> Vec<u64> {
        let now = self.start + Duration::from_secs(seconds);
        let models = models(&["m", "n"]);
        ids(&self.guard.update(workers, &models, CONFIRMATION, now))
    }

    fn remove_expired(&mut self, seconds: u64) -> Vec<u64> {
        ids(&self
            .guard
            .remove_expired(self.start + Duration::from_secs(seconds)))
    }

    fn due_in(&self) -> Option<u64> {
        Some((self.guard.next_due()? - self.start).as_secs())
    }
}

#[test]
fn empty_list_keeps_workers_during_grace_period() {
    let mut fixture = Fixture::new(vec![decode(1), decode(2)]);
    assert_eq!(fixture.update(vec![], 5), [1, 2]);
    assert_eq!(fixture.due_in(), Some(35));
    assert_eq!(
        fixture.update(vec![], 20),
        [1, 2],
        "the time does not start again"
    );
    assert_eq!(fixture.due_in(), Some(35));
    assert_eq!(fixture.remove_expired(34), [1, 2]);
    assert_eq!(fixture.remove_expired(35), [0; 0]);
    assert_eq!(fixture.due_in(), None);
    assert_eq!(fixture.update(vec![decode(3)], 40), [3]);
}

#[test]
fn relisted_workers_end_grace_period() {
    let mut fixture = Fixture::new(vec![decode(1), decode(2)]);
    assert_eq!(fixture.update(vec![], 5), [1, 2]);
    assert_eq!(fixture.update(vec![decode(2)], 6), [2]);
    assert_eq!(fixture.due_in(), None);
}

#[test]
fn each_role_and_model_has_grace_period() {
    let other = worker(9, "n", WorkerRole::Decode);
    let mut fixture = Fixture::new(vec![decode(1), prefill(2), prefill(3), other.clone()]);
    assert_eq!(fixture.update(vec![decode(4)], 0), [2, 3, 4, 9]);
    assert_eq!(fixture.update(vec![decode(4), prefill(5)], 1), [4, 5, 9]);
    assert_eq!(fixture.remove_expired(30), [4, 5]);
    assert_eq!(fixture.update(vec![decode(4)], 31), [4, 5]);
    assert_eq!(
        fixture.update(vec![decode(4), prefill(5), other], 32),
        [4, 5, 9]
    );
}

#[test]
fn draining_workers_are_removed_at_once() {
    let mut last = decode(1);
    last.draining = true;
    let mut fixture = Fixture::new(vec![last]);
    assert_eq!(fixture.update(vec![], 1), [0; 0]);
    assert_eq!(fixture.due_in(), None);
}

#[test]
fn replaced_and_unserved_workers_are_removed_at_once() {
    let mut fixture = Fixture::new(vec![decode(1), prefill(2)]);
    let renamed = Worker {
        id: WorkerId(7),
        ..worker(1, "n", WorkerRole::Decode)
    };
    let changed = Worker {
        role: WorkerRole::Decode,
        ..prefill(2)
    };
    let changed = Worker {
        model: "n".into(),
        ..changed
    };
    assert_eq!(fixture.update(vec![renamed, changed], 1), [2, 7]);
    assert_eq!(fixture.due_in(), None);
    let now = fixture.start;
    assert!(
        fixture
            .guard
            .update(vec![], &models(&["m"]), CONFIRMATION, now)
            .is_empty()
    );
}

#[test]
fn ranks_beyond_the_limit_are_not_used() {
    let ranks = |worker, size| Worker {
        ranks: RankRange {
            start: 0,
            size: NonZeroU32::new(size).unwrap(),
        },
        ..worker
    };
    let big: Vec<Worker> = (100..108).map(|id| ranks(decode(id), 1024)).collect();
    let mut fixture = Fixture::new(big.clone());
    // The workers in use stay, although others have lower ids.
    let mut all = big.clone();
    all.extend((1..9).map(decode));
    assert_eq!(
        fixture.update(all.clone(), 1),
        (100..108).collect::<Vec<_>>()
    );
    all.remove(7);
    let mut expected: Vec<u64> = (1..9).collect();
    expected.extend(100..107);
    assert_eq!(fixture.update(all, 2), expected);
}
