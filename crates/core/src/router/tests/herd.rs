//! Simultaneous requests must not all choose the same idle worker.

use std::sync::Barrier;
use std::thread;

use super::*;

/// Routes one request per thread at the same time. Returns the number of choices per rank and
/// phase.
fn route_concurrently(router: &Router, threads: usize) -> (Vec<WorkerRank>, Vec<WorkerRank>) {
    let barrier = Barrier::new(threads);
    let booked: Vec<Placement> = thread::scope(|scope| {
        let route = |at: usize| {
            let barrier = &barrier;
            move || {
                let request = request(&[vec![at as u64, 1, 2, 3]]);
                barrier.wait();
                router.route(request).unwrap()
            }
        };
        let running: Vec<_> = (0..threads).map(|at| scope.spawn(route(at))).collect();
        running
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    let decode = booked.iter().map(|booked| booked.route.to.rank);
    let prefill = booked
        .iter()
        .filter_map(|booked| Some(booked.route.prefill()?.to.rank));
    (sorted(decode), sorted(prefill))
}

fn sorted(ranks: impl Iterator<Item = WorkerRank>) -> Vec<WorkerRank> {
    let mut ranks: Vec<_> = ranks.collect();
    ranks.sort_unstable();
    ranks
}

fn each(ids: std::ops::Range<u64>) -> Vec<WorkerRank> {
    ids.map(|id| WorkerRank {
        worker: WorkerId(id),
        rank: crate::worker::DpRank(0),
    })
    .collect()
}

#[test]
fn simultaneous_requests_spread_over_idle_workers() {
    for workers in [2, 3, 8, 16] {
        let router = router_of((0..workers).map(worker), RouterSettings::default());
        for round in 0..100 {
            let (chosen, _) = route_concurrently(&router, workers as usize);
            assert_eq!(chosen, each(0..workers), "round {round}");
        }
        assert!(
            router
                .load()
                .snapshot()
                .iter()
                .all(|load| load.active_requests == 0)
        );
    }
}

#[test]
fn both_phases_are_booked_in_one_step() {
    let workers = || {
        let prefill = (0..8).map(|id| Worker {
            role: WorkerRole::Prefill,
            ..worker(id)
        });
        prefill.chain((8..16).map(|id| Worker {
            role: WorkerRole::Decode,
            ..worker(id)
        }))
    };
    let router = router_of(workers(), RouterSettings::default());
    for round in 0..100 {
        let (decode, prefill) = route_concurrently(&router, 8);
        assert_eq!(
            (prefill, decode),
            (each(0..8), each(8..16)),
            "round {round}"
        );
    }
    assert!(
        router
            .load()
            .snapshot()
            .iter()
            .all(|load| load.active_requests == 0)
    );
}

#[test]
fn ticks_and_decisions_do_not_wait_for_each_other() {
    const ROUNDS: usize = 20_000;
    let router = Arc::new(router_of((0..4).map(worker), RouterSettings::default()));
    let (done, ended) = std::sync::mpsc::channel();
    for is_tick in [true, false] {
        let (router, done) = (router.clone(), done.clone());
        // Not joined: threads that wait for each other would never end.
        thread::spawn(move || {
            for _ in 0..ROUNDS {
                if is_tick {
                    router.on_tick();
                } else {
                    drop(router.route(request(&[vec![1, 2, 3, 4]])).unwrap());
                }
            }
            done.send(()).unwrap();
        });
    }
    for _ in 0..2 {
        ended
            .recv_timeout(Duration::from_secs(120))
            .expect("a tick and a decision wait for each other");
    }
}
