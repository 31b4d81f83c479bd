//! Replicas agree on the load after any sequence of events.

use super::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn replicas_converge_after_network_recovers(
        steps in prop::collection::vec((0..3_usize, step()), 1..80),
        seed in any::<u64>(),
        lossy in any::<bool>(),
    ) {
        let mut site = Site::new(3, seed);
        site.lossy = lossy;
        for (at, step) in &steps {
            perform(&mut site, *at, step);
        }
        site.heal();
        let truth = site.truth();
        let targets = |replica: &Replica, id: u64| {
            let id = format!("s{id}");
            replica.sessions.target(SessionName { id: &id, parent: None, model: Some("m"), tenant: None })
        };
        // The fraction of shared output blocks depends on the other holders at that moment.
        let partly = steps.iter().any(|(_, step)| matches!(step, Step::Output(_, _, Some(_))));
        let loads = |mut loads: Vec<RankLoad>| {
            loads.iter_mut().filter(|_| partly).for_each(|load| load.active_blocks = 0);
            loads
        };
        for replica in &site.replicas {
            prop_assert!(replica.peers.are_synced());
            prop_assert_eq!(loads(replica.loads()), loads(truth.clone()));
            // If a replica died before its session update reached all, some replicas learn of it
            // only at the next use.
            let certain = !lossy || !steps.iter().any(|(_, step)| matches!(step, Step::Restart));
            for id in (0..5).filter(|_| certain) {
                prop_assert_eq!(targets(replica, id), targets(&site.replicas[0], id), "session {}", id);
            }
        }
        for id in (0..5).filter(|_| !lossy || !steps.iter().any(|(_, step)| matches!(step, Step::Restart))) {
            let there = targets(&site.replicas[0], id);
            let seen = site.replicas.iter().filter_map(|replica| replica.sees_to.get(&format!("s{id}")));
            prop_assert_eq!(seen.copied().collect::<Vec<_>>(), there.into_iter().collect::<Vec<_>>(), "session {}", id);
        }
        // After all reservations end, no load remains.
        site.replicas.iter_mut().for_each(|replica| replica.held.clear());
        site.heal();
        for replica in &site.replicas {
            prop_assert!(replica.loads().iter().all(|load| (load.active_blocks, load.active_requests) == (0, 0)));
            prop_assert_eq!(replica.peers.reservations(), 0);
        }
    }
}

#[test]
fn lossless_network_needs_one_snapshot_per_peer() {
    let mut site = Site::new(3, 1);
    site.heal();
    site.noted.clear();
    for turn in 0..200_usize {
        perform(
            &mut site,
            turn,
            &Step::Book {
                worker: turn as u64 % RANKS,
                prompt: 1,
                blocks: 3,
            },
        );
        site.tell(turn % 3);
    }
    assert_eq!(site.noted, []);
    assert_eq!(
        site.replicas[0].peers.reservations() + site.replicas[0].held.len(),
        200
    );
}

#[test]
fn timed_out_peer_regains_reservations_on_return() {
    let mut site = Site::new(2, 1);
    site.replicas[1].book(2, &[1, 2, 3]);
    site.heal();
    let of = site.replicas[1].id;
    let silent = PeerChange::TimedOut(site.replicas[1].id, "r2".to_owned(), 1);
    let active = |site: &Site| site.replicas[0].loads()[2].active_blocks;
    assert_eq!(active(&site), 3);
    for _ in 0..6 {
        site.pass(LEASE / 5);
        site.deliver(0, &Sent::Look);
    }
    assert_eq!((active(&site), site.noted.last()), (0, Some(&silent)));
    let sign = site.replicas[1].own.heartbeat();
    site.deliver(0, &Sent::Batch(sign));
    assert_eq!(
        (active(&site), site.noted.last()),
        (3, Some(&PeerChange::Synced(of, 1)))
    );
    // A leaving replica loses its reservations immediately.
    let leaving = Batch {
        leaving: true,
        ..site.replicas[1].own.heartbeat()
    };
    site.deliver(0, &Sent::Batch(leaving));
    assert_eq!(
        (active(&site), site.noted.last()),
        (0, Some(&PeerChange::Left(of, "r2".to_owned())))
    );
}

#[test]
fn booking_on_unknown_worker_counts_once_known() {
    let clock = Arc::new(Mutex::new(Instant::now()));
    let mut site = Site::new(2, 1);
    site.clock = clock.clone();
    let late = Replica {
        known: 0,
        ..Replica::new(9, &clock)
    };
    (0..RANKS).for_each(|worker| late.load.close_slot(Replica::slot(late.first, worker)));
    site.replicas[1] = late;
    site.replicas[0].book(3, &[1, 2]);
    site.replicas[0].held[0].add_output_blocks(2, None);
    site.heal();
    assert_eq!(site.replicas[1].loads(), []);
    site.replicas[1].learn(RANKS);
    site.deliver(1, &Sent::Look);
    assert_eq!(site.replicas[1].loads(), site.truth());
}

#[test]
fn bookings_follow_slot_changes_and_moves() {
    let mut site = Site::new(2, 1);
    site.replicas[0].book(2, &[1, 2, 3]);
    site.heal();
    site.replicas[1].rearrange();
    assert_eq!(site.replicas[1].loads()[2].active_requests, 0);
    site.deliver(1, &Sent::Look);
    assert_eq!(site.replicas[1].loads(), site.truth());
    // Also by a snapshot.
    site.replicas[1].rearrange();
    let behind = Batch {
        sequence: 99,
        ..site.replicas[0].own.heartbeat()
    };
    site.deliver(1, &Sent::Batch(behind));
    assert_eq!(site.replicas[1].loads(), site.truth());
    // To a worker that is still unknown.
    let mut late = Replica {
        known: 0,
        ..Replica::new(9, &site.clock)
    };
    (0..RANKS).for_each(|worker| late.load.close_slot(Replica::slot(late.first, worker)));
    late.learn(3);
    site.replicas[1] = late;
    site.heal();
    site.replicas[0].moved(0, 3);
    site.heal();
    assert!(
        site.replicas[1]
            .loads()
            .iter()
            .all(|load| load.active_requests == 0)
    );
    site.replicas[1].learn(RANKS);
    site.deliver(1, &Sent::Look);
    assert_eq!(site.replicas[1].loads(), site.truth());
}

#[test]
fn suspended_replica_times_out_no_peer() {
    let mut site = Site::new(2, 1);
    site.replicas[1].book(2, &[1]);
    site.heal();
    site.pass(LEASE * 3);
    site.deliver(0, &Sent::Look);
    assert_eq!(site.replicas[0].loads()[2].active_blocks, 1);
}
