//! Ranks that leave the fleet and return while requests run on them.

use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::vec;
use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::*;

#[test]
fn returning_rank_has_its_running_requests() {
    let tracker = LoadTracker::new(Instant::now);
    tracker.join(&member(0, 1, 1));
    let mut running = book(&tracker, booking(0, 1, &[1, 2], 32));
    tracker.leave(&member(0, 1, 1));
    assert_eq!(loads(&tracker), []);
    assert!(running.is_active());
    // Another rank takes the slot, and shares a block with the request.
    tracker.join(&member(0, 2, 2));
    let other = book(&tracker, booking(0, 2, &[1], 16));
    tracker.join(&member(3, 1, 1));
    assert_eq!(loads(&tracker), [(0, 1, 16, 1), (3, 2, 32, 1)]);
    running.add_output_block(None);
    running.on_first_token();
    assert_eq!(loads(&tracker), [(0, 1, 16, 1), (3, 3, 0, 1)]);
    drop(running);
    assert_eq!(loads(&tracker), [(0, 1, 16, 1), (3, 0, 0, 0)]);
    drop(other);
}

/// Running request of the model.
struct RunningRequest {
    reservation: Reservation,
    /// Worker and port, if the request was booked.
    at: Option<(u64, u16)>,
    blocks: Vec<u64>,
    tokens: u64,
}

proptest! {
    #![proptest_config(property_config(10_000))]

    #[test]
    fn load_equals_that_of_running_requests(
        script in vec((0..9u8, 0..2u64, 1..3u16, (0..2u64, 0..4u64), any::<u16>()), 1..50),
    ) {
        let tracker = LoadTracker::new(Instant::now);
        let mut open = BTreeMap::<u64, FleetMember>::new();
        let mut running = Vec::<RunningRequest>::new();
        for (kind, id, port, (topic, length), pick) in script {
            let at = usize::from(pick) % running.len().max(1);
            match kind {
                0..4 => {
                    let tokens = u64::from(pick % 50);
                    // Prompts of one topic are prefixes of each other.
                    let blocks: Vec<u64> = (0..length).map(|block| 10 * topic + block).collect();
                    let slot = open.get(&id).map_or(RankSlot(77), |member| member.slot);
                    let booking = booking(slot.0, id, &blocks, tokens);
                    running.push(RunningRequest {
                        blocks,
                        reservation: book(&tracker, booking),
                        at: open.get(&id).map(|member| (id, member.worker.endpoint.0.port())),
                        tokens,
                    });
                }
                4 if !running.is_empty() => drop(running.swap_remove(at)),
                5 if !running.is_empty() => {
                    running[at].reservation.on_first_token();
                    running[at].tokens = 0;
                }
                6 | 7 => {
                    if let Some(member) = open.remove(&id) {
                        tracker.leave(&member);
                    }
                }
                8 if !open.contains_key(&id) => {
                    let is_free = |slot: &u32| open.values().all(|member| member.slot.0 != *slot);
                    let slot = (u32::from(pick % 2)..9).find(is_free).unwrap();
                    let member = member(slot, id, port);
                    tracker.join(&member);
                    open.insert(id, member);
                }
                _ => {}
            }
            let expected: BTreeMap<_, _> = open.iter().map(|(id, member)| {
                let key = Some((*id, member.worker.endpoint.0.port()));
                let booked = || running.iter().filter(|request| request.at == key);
                let blocks: BTreeSet<_> = booked().flat_map(|request| &request.blocks).collect();
                let tokens: u64 = booked().map(|request| request.tokens).sum();
                (member.slot.0, (blocks.len() as u64, tokens, booked().count() as u64))
            }).collect();
            let found: BTreeMap<_, _> = loads(&tracker).into_iter().map(|(slot, blocks, tokens, requests)| (slot, (blocks, tokens, requests))).collect();
            prop_assert_eq!(found, expected);
        }
        running.clear();
        prop_assert!(loads(&tracker).iter().all(|load| (load.1, load.2, load.3) == (0, 0, 0)));
        let table = tracker.table.lock();
        prop_assert!(table.rows.departed.is_empty());
        prop_assert!(table.rows.moved.len() <= open.len());
    }
}
