//! Tests that replicas agree on the load after any sequence of events.

use super::*;

proptest! {
    #![proptest_config(warmroute_property_tests::property_config(2_000))]

    #[test]
    fn replicas_converge_after_network_recovers(
        steps in prop::collection::vec((0..3_usize, step()), 1..80),
        seed in any::<u64>(),
        lossy in any::<bool>(),
    ) {
        let mut network = ReplicaNetwork::new(3, seed);
        network.lossy = lossy;
        for (replica, step) in &steps {
            perform_step(&mut network, *replica, step);
        }
        network.converge();
        let expected = network.expected_loads();
        let targets = |replica: &Replica, id: u64| {
            let id = format!("s{id}");
            replica.sessions.target(SessionName { id: &id, parent: None, model: Some("m"), tenant: None })
        };
        // A fraction applies only to blocks that no other request holds at that moment, so the
        // number of active blocks can differ between replicas.
        let has_fractions = steps.iter().any(|(_, step)| matches!(step, Step::Output(_, _, Some(_))));
        let loads = |mut loads: Vec<RankLoad>| {
            loads.iter_mut().filter(|_| has_fractions).for_each(|load| load.active_blocks = 0);
            loads
        };
        for replica in &network.replicas {
            prop_assert!(replica.peers.are_synced());
            prop_assert_eq!(loads(replica.loads()), loads(expected.clone()));
            // If a replica terminates before its session update reaches all replicas, the others
            // may not know the binding.
            let all_updates_arrive = !lossy || !steps.iter().any(|(_, step)| matches!(step, Step::Restart));
            for id in (0..5).filter(|_| all_updates_arrive) {
                prop_assert_eq!(targets(replica, id), targets(&network.replicas[0], id), "session {}", id);
            }
        }
        for id in (0..5).filter(|_| !lossy || !steps.iter().any(|(_, step)| matches!(step, Step::Restart))) {
            let target = targets(&network.replicas[0], id);
            let owners = network.replicas.iter().filter_map(|replica| replica.owned_sessions.get(&format!("s{id}")));
            prop_assert_eq!(owners.copied().collect::<Vec<_>>(), target.into_iter().collect::<Vec<_>>(), "session {}", id);
        }
        // After all reservations end, no load remains.
        network.replicas.iter_mut().for_each(|replica| replica.held.clear());
        network.converge();
        for replica in &network.replicas {
            prop_assert!(replica.loads().iter().all(|load| (load.active_blocks, load.active_requests) == (0, 0)));
            prop_assert_eq!(replica.peers.reservations(), 0);
        }
    }
}

#[test]
fn lossless_network_needs_one_snapshot_per_peer() {
    let mut network = ReplicaNetwork::new(3, 1);
    network.converge();
    network.changes.clear();
    for index in 0..200_usize {
        perform_step(
            &mut network,
            index % 3,
            &Step::Book {
                worker: index as u64 % RANKS,
                prompt: 1,
                blocks: 3,
            },
        );
        network.publish_pending(index % 3);
    }
    assert_eq!(network.changes, []);
    assert_eq!(
        network.replicas[0].peers.reservations() + network.replicas[0].held.len(),
        200
    );
}

#[test]
fn timed_out_peer_regains_reservations_on_return() {
    let mut network = ReplicaNetwork::new(2, 1);
    network.replicas[1].book(2, &[1, 2, 3]);
    network.converge();
    let id = network.replicas[1].id;
    let timed_out = PeerChange::TimedOut(id, "r2".to_owned(), 1);
    let active = |network: &ReplicaNetwork| network.replicas[0].loads()[2].active_blocks;
    assert_eq!(active(&network), 3);
    for _ in 0..6 {
        network.advance(LEASE / 5);
        network.deliver(0, &Sent::Tick);
    }
    assert_eq!(
        (active(&network), network.changes.last()),
        (0, Some(&timed_out))
    );
    let heartbeat = network.replicas[1].outbox.heartbeat();
    network.deliver(0, &Sent::Batch(heartbeat));
    assert_eq!(
        (active(&network), network.changes.last()),
        (3, Some(&PeerChange::Synced(id, 1)))
    );
    // The reservations of a leaving replica are dropped immediately.
    let leaving = Batch {
        leaving: true,
        ..network.replicas[1].outbox.heartbeat()
    };
    network.deliver(0, &Sent::Batch(leaving));
    assert_eq!(
        (active(&network), network.changes.last()),
        (0, Some(&PeerChange::Left(id, "r2".to_owned())))
    );
}

#[test]
fn booking_on_unknown_worker_counts_once_known() {
    let clock = Arc::new(Mutex::new(Instant::now()));
    let mut network = ReplicaNetwork::new(2, 1);
    network.clock = clock.clone();
    let replica = Replica {
        known: 0,
        ..Replica::new(9, &clock)
    };
    (0..RANKS).for_each(|worker| replica.load.leave(&Replica::member(replica.first, worker)));
    network.replicas[1] = replica;
    network.replicas[0].book(3, &[1, 2]);
    network.replicas[0].held[0].add_output_blocks(2, None);
    network.converge();
    assert_eq!(network.replicas[1].loads(), []);
    network.replicas[1].open_ranks(RANKS);
    network.deliver(1, &Sent::Tick);
    assert_eq!(network.replicas[1].loads(), network.expected_loads());
}

#[test]
fn bookings_follow_slot_changes_and_moves() {
    let mut network = ReplicaNetwork::new(2, 1);
    network.replicas[0].book(2, &[1, 2, 3]);
    network.converge();
    network.replicas[1].move_slots();
    assert_eq!(network.replicas[1].loads(), network.expected_loads());
    let with_gap = Batch {
        sequence: 99,
        ..network.replicas[0].outbox.heartbeat()
    };
    network.deliver(1, &Sent::Batch(with_gap));
    assert_eq!(network.replicas[1].loads(), network.expected_loads());
    // A reservation is moved to a worker that is still unknown.
    let mut replica = Replica {
        known: 0,
        ..Replica::new(9, &network.clock)
    };
    (0..RANKS).for_each(|worker| replica.load.leave(&Replica::member(replica.first, worker)));
    replica.open_ranks(3);
    network.replicas[1] = replica;
    network.converge();
    network.replicas[0].move_reservation(0, 3);
    network.converge();
    assert!(
        network.replicas[1]
            .loads()
            .iter()
            .all(|load| load.active_requests == 0)
    );
    network.replicas[1].open_ranks(RANKS);
    network.deliver(1, &Sent::Tick);
    assert_eq!(network.replicas[1].loads(), network.expected_loads());
}

#[test]
fn suspended_replica_times_out_no_peer() {
    let mut network = ReplicaNetwork::new(2, 1);
    network.replicas[1].book(2, &[1]);
    network.converge();
    network.advance(LEASE * 3);
    network.deliver(0, &Sent::Tick);
    assert_eq!(network.replicas[0].loads()[2].active_blocks, 1);
}
