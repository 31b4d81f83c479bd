use std::num::NonZeroU32;

use super::*;
use crate::worker::{BlockSize, DpRank, EventSource, RankRange, WorkerEndpoint, WorkerRole};

fn worker(id: u64, ranks: u32) -> Worker {
    Worker {
        ranks: RankRange {
            start: 0,
            size: NonZeroU32::new(ranks).unwrap(),
        },
        ..Worker::new(
            WorkerId(id),
            WorkerEndpoint(format!("10.0.0.{id}:8000").parse().unwrap()),
            "m".into(),
            BlockSize::new(16).unwrap(),
        )
    }
}

fn slots(members: &[FleetMember]) -> Vec<(u64, u32, u32)> {
    members
        .iter()
        .map(|m| (m.rank.worker.0, m.rank.rank.0, m.slot.0))
        .collect()
}

#[test]
fn unchanged_set_changes_nothing() {
    let first = Fleet::empty().reconcile(vec![worker(1, 2), worker(2, 1)]);
    assert_eq!(first.fleet.generation(), 1);
    assert_eq!(slots(&first.added), [(1, 0, 0), (1, 1, 1), (2, 0, 2)]);
    let second = first.fleet.reconcile(vec![worker(2, 1), worker(1, 2)]);
    assert_eq!(second.fleet.generation(), 1);
    assert!(second.added.is_empty() && second.removed.is_empty() && second.updated.is_empty());
    assert!(Arc::ptr_eq(
        second.fleet.worker(WorkerId(1)).unwrap(),
        first.fleet.worker(WorkerId(1)).unwrap()
    ));
}

#[test]
fn freed_slot_is_reused_after_one_reconciliation() {
    let fleet = Fleet::empty()
        .reconcile(vec![worker(1, 1), worker(2, 1)])
        .fleet;
    let swap = fleet.reconcile(vec![worker(2, 1), worker(3, 1)]);
    assert_eq!(slots(&swap.removed), [(1, 0, 0)]);
    assert_eq!(slots(&swap.added), [(3, 0, 2)]);
    let later = swap
        .fleet
        .reconcile(vec![worker(2, 1), worker(3, 1), worker(4, 2)]);
    assert_eq!(slots(&later.added), [(4, 0, 0), (4, 1, 3)]);
    assert_eq!(later.fleet.slots(), 4);
    assert_eq!(
        later.fleet.slots_serving(&"m".into()),
        [RankSlot(0), RankSlot(1), RankSlot(2), RankSlot(3)]
    );
}

#[test]
fn changed_identity_moves_worker_to_new_slot() {
    type Change = (&'static str, fn(&mut Worker));
    let source = EventSource {
        endpoint: "tcp://10.0.0.1:5557".into(),
        topic: String::new(),
        attach: crate::worker::SocketAttach::Connect,
        replay: None,
    };
    let moved: [Change; 4] = [
        ("endpoint", |w| {
            w.endpoint = WorkerEndpoint("10.9.9.9:1".parse().unwrap())
        }),
        ("model", |w| w.model = "other".into()),
        ("block size", |w| w.block_size = BlockSize::new(32).unwrap()),
        ("ranks", |w| w.ranks.start = 1),
    ];
    let fleet = Fleet::empty().reconcile(vec![worker(1, 1)]).fleet;
    let check = |name: &str, changed: Worker| {
        let diff = fleet.reconcile(vec![changed.clone()]);
        assert_eq!(slots(&diff.removed), [(1, 0, 0)], "{name}");
        assert_eq!(diff.added.len(), 1, "{name}");
        assert_eq!(diff.added[0].slot, RankSlot(1), "{name}");
        assert!(diff.updated.is_empty(), "{name}");
        assert_eq!(diff.fleet.members().count(), 1, "{name}");
        assert_eq!(**diff.fleet.worker(WorkerId(1)).unwrap(), changed, "{name}");
    };
    for (name, change) in moved {
        let mut changed = worker(1, 1);
        change(&mut changed);
        check(name, changed);
    }
    let mut changed = worker(1, 1);
    changed.event_sources = vec![source];
    check("event sources", changed);
}

#[test]
fn changed_role_capacity_or_taint_keeps_slot() {
    type Change = fn(&mut Worker);
    let changes: [Change; 3] = [
        |w| w.role = WorkerRole::Decode,
        |w| w.capacity.total_kv_blocks = Some(7),
        |w| {
            w.taints.insert("gpu=h100".into());
        },
    ];
    let fleet = Fleet::empty().reconcile(vec![worker(1, 2)]).fleet;
    for change in changes {
        let mut changed = worker(1, 2);
        change(&mut changed);
        let diff = fleet.reconcile(vec![changed.clone()]);
        assert_eq!(slots(&diff.updated), [(1, 0, 0), (1, 1, 1)]);
        assert!(diff.added.is_empty() && diff.removed.is_empty());
        assert_eq!(diff.fleet.generation(), 2);
        assert!(diff.fleet.members().all(|member| *member.worker == changed));
        let rank = WorkerRank {
            worker: WorkerId(1),
            rank: DpRank(1),
        };
        assert_eq!(diff.fleet.slot(rank), Some(RankSlot(1)));
    }
}

#[test]
fn empty_fleet_has_no_slots_and_lists_removed() {
    let fleet = Fleet::empty().reconcile(vec![worker(1, 2)]).fleet;
    let diff = fleet.reconcile(vec![]);
    assert_eq!(slots(&diff.removed), [(1, 0, 0), (1, 1, 1)]);
    assert!(diff.fleet.is_empty());
    assert_eq!(diff.fleet.slots(), 0);
    assert!(diff.fleet.slots_serving(&"m".into()).is_empty());
}

#[test]
fn first_of_two_workers_with_one_id_wins() {
    let mut second = worker(1, 1);
    second.model = "other".into();
    let fleet = Fleet::empty().reconcile(vec![worker(1, 1), second]).fleet;
    assert_eq!(fleet.members().count(), 1);
    assert_eq!(fleet.worker(WorkerId(1)).unwrap().model, "m".into());
}

#[test]
fn serialized_fleet_contains_generation_and_members() {
    let fleet = Fleet::empty().reconcile(vec![worker(1, 1)]).fleet;
    let page = serde_json::to_value(&fleet).unwrap();
    assert_eq!(page["generation"], 1);
    assert_eq!(page["members"][0]["slot"], 0);
    assert_eq!(page["members"][0]["worker"]["model"], "m");
}

#[test]
fn worker_kinds_are_known_per_model() {
    let of = |id, role, draining, model: &str| Worker {
        role,
        draining,
        model: model.into(),
        ..worker(id, 1)
    };
    let both = WorkerRole::Aggregated;
    let decode = WorkerRole::Decode;
    let workers = vec![
        of(1, both, false, "a"),
        of(2, decode, false, "b"),
        of(3, WorkerRole::Prefill, true, "b"),
    ];
    let fleet = Fleet::empty().reconcile(workers.clone()).fleet;
    assert!(fleet.kinds(Some(&"a".into())).is_uniform());
    let all = WorkerKinds {
        prefill: true,
        decode: true,
        draining: true,
    };
    assert_eq!(fleet.kinds(Some(&"b".into())), all);
    assert_eq!(fleet.kinds(None), all);
    assert_eq!(WorkerKinds::from_workers(&workers), all);
    // It follows changes that keep the worker.
    let fleet = fleet
        .reconcile(vec![of(1, both, true, "a"), of(2, both, false, "b")])
        .fleet;
    assert_eq!(
        fleet.kinds(Some(&"a".into())),
        WorkerKinds {
            draining: true,
            ..WorkerKinds::default()
        }
    );
    assert!(fleet.kinds(Some(&"b".into())).is_uniform());
    assert_eq!(
        fleet.kinds(None),
        WorkerKinds {
            draining: true,
            ..WorkerKinds::default()
        }
    );
}
