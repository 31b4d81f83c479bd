use std::num::NonZeroU32;

use proptest::prelude::*;

use super::*;
use crate::fleet::Fleet;
use crate::worker::{BlockSize, Endpoint, KvTransfer, Ranks};

fn worker(id: u64) -> Worker {
    Worker::new(
        WorkerId(id),
        Endpoint(([10, 0, 0, 1], 8000 + id as u16).into()),
        "m".into(),
        BlockSize::new(16).unwrap(),
    )
}

fn several(worker: Worker, ranks: u32) -> Worker {
    Worker {
        ranks: Ranks {
            start: 2,
            size: NonZeroU32::new(ranks).unwrap(),
        },
        ..worker
    }
}

fn fleet(workers: impl IntoIterator<Item = Worker>) -> Fleet {
    Fleet::empty()
        .reconcile(workers.into_iter().collect())
        .fleet
}

fn set<T: Ord>(of: impl IntoIterator<Item = T>) -> BTreeSet<T> {
    of.into_iter().collect()
}

fn subset(of: &[u64]) -> Subset {
    of.iter().map(|id| worker(*id).endpoint).collect()
}

fn strings<const N: usize>(of: [&str; N]) -> BTreeSet<String> {
    set(of.map(str::to_owned))
}

/// The ids of who is eligible, where the named workers stand as told and all others are ready.
fn ids(
    fleet: &Fleet,
    constraints: &Constraints,
    standings: &[(u64, Standing)],
) -> Result<Vec<(u64, u32)>, Ineligible> {
    let members: Vec<_> = fleet.members().collect();
    let standing = |member: &Member| {
        let found = standings
            .iter()
            .find(|(id, _)| WorkerId(*id) == member.rank.worker);
        found.map_or(Standing::Ready, |(_, standing)| *standing)
    };
    let found = eligible(&members, constraints, standing)?;
    Ok(found
        .into_iter()
        .map(|member| (member.rank.worker.0, member.rank.rank.0))
        .collect())
}

fn pin(worker: u64, rank: Option<u32>) -> Constraints {
    Constraints {
        pin: Some(Pin {
            worker: WorkerId(worker),
            rank: rank.map(DpRank),
        }),
        ..Constraints::default()
    }
}

#[test]
fn a_pin_leads_to_its_rank_or_says_what_is_wrong_with_it() {
    let prefill = Worker {
        role: Role::Prefill,
        ..worker(4)
    };
    let fleet = fleet([
        worker(1),
        several(worker(2), 2),
        Worker {
            taints: strings(["a"]),
            ..worker(3)
        },
        prefill,
    ]);
    let standing = [(3, Standing::Overloaded)];
    let of = |constraints: Constraints| ids(&fleet, &constraints, &standing);
    assert_eq!(of(pin(1, None)), Ok(vec![(1, 0)]));
    assert_eq!(of(pin(1, Some(0))), Ok(vec![(1, 0)]));
    assert_eq!(of(pin(2, Some(3))), Ok(vec![(2, 3)]));
    assert_eq!(of(pin(9, None)), Err(Ineligible::PinUnknown(WorkerId(9))));
    assert_eq!(of(pin(4, None)), Err(Ineligible::PinUnknown(WorkerId(4))));
    assert_eq!(
        of(Constraints {
            role: Role::Prefill,
            ..pin(4, None)
        }),
        Ok(vec![(4, 0)])
    );
    let rank = DpRank(0);
    assert_eq!(
        of(pin(2, Some(0))),
        Err(Ineligible::PinRankUnknown {
            worker: WorkerId(2),
            rank
        })
    );
    assert_eq!(
        of(pin(2, None)),
        Err(Ineligible::PinRankMissing {
            worker: WorkerId(2),
            ranks: 2
        })
    );
    assert_eq!(
        of(pin(3, None)),
        Err(Ineligible::PinnedWorkerOverloaded(WorkerId(3)))
    );
    let elsewhere = Constraints {
        allowed: Some(set([WorkerId(2)])),
        ..pin(1, None)
    };
    assert_eq!(
        of(elsewhere),
        Err(Ineligible::PinnedWorkerNotAllowed(WorkerId(1)))
    );
    let tainted = Constraints {
        required_taints: strings(["a"]),
        ..pin(1, None)
    };
    assert_eq!(of(tainted), Err(Ineligible::NoEndpoints));
}

#[test]
fn a_pinned_worker_that_drains_gets_nothing_and_one_that_only_looks_ill_does() {
    let fleet = fleet([worker(1), worker(2)]);
    assert_eq!(
        ids(&fleet, &pin(1, None), &[(1, Standing::Unavailable)]),
        Err(Ineligible::NoEndpoints)
    );
    assert_eq!(
        ids(&fleet, &pin(1, None), &[(1, Standing::Unhealthy)]),
        Ok(vec![(1, 0)])
    );
}

#[test]
fn an_empty_list_is_nobody_and_no_list_is_everybody() {
    let fleet = fleet([worker(1), worker(2)]);
    let allowed = |allowed| Constraints {
        allowed,
        ..Constraints::default()
    };
    assert_eq!(ids(&fleet, &allowed(None), &[]).unwrap().len(), 2);
    assert_eq!(
        ids(&fleet, &allowed(Some(set([]))), &[]),
        Err(Ineligible::NoEndpoints)
    );
    let subset = |workers: &[u64]| Constraints {
        endpoints: Some(subset(workers)),
        ..Constraints::default()
    };
    assert_eq!(ids(&fleet, &subset(&[2]), &[]), Ok(vec![(2, 0)]));
    assert_eq!(ids(&fleet, &subset(&[]), &[]), Err(Ineligible::NoEndpoints));
}

#[test]
fn outside_of_the_gateways_subset_nobody_serves_whatever_the_pin() {
    let fleet = fleet([worker(1), several(worker(2), 2)]);
    let within = |constraints, ids: &[u64]| Constraints {
        endpoints: Some(subset(ids)),
        ..constraints
    };
    let of = |constraints: Constraints| ids(&fleet, &constraints, &[]);
    let unknown = Err(Ineligible::PinUnknown(WorkerId(9)));
    let missing = Err(Ineligible::PinRankMissing {
        worker: WorkerId(2),
        ranks: 2,
    });
    let nobody = Err(Ineligible::NoEndpoints);
    let cases = [
        (within(pin(1, None), &[1, 2]), Ok(vec![(1, 0)])),
        (within(pin(1, None), &[2]), nobody.clone()),
        (within(pin(2, None), &[1]), nobody.clone()),
        (within(pin(2, None), &[2]), missing),
        (within(pin(9, None), &[2]), unknown),
        (within(pin(9, None), &[]), nobody.clone()),
        (within(Constraints::default(), &[7]), nobody),
    ];
    for (constraints, expected) in cases {
        assert_eq!(of(constraints.clone()), expected, "{constraints:?}");
    }
    let address = Constraints {
        endpoints: Some(Subset::parse(["10.0.0.1"])),
        ..Constraints::default()
    };
    assert_eq!(of(address).unwrap().len(), 3, "every port of an address");
    let pinned = within(pin(1, None), &[1]);
    assert_eq!(
        ids(&fleet, &pinned, &[(1, Standing::Unavailable)]),
        Err(Ineligible::NoEndpoints)
    );
}

#[test]
fn the_unhealthy_serve_only_where_nobody_is_healthy() {
    use Standing::{Overloaded, Unavailable, Unhealthy};
    let fleet = fleet([worker(1), worker(2), worker(3)]);
    let of = |standings: &[(u64, Standing)]| ids(&fleet, &Constraints::default(), standings);
    assert_eq!(of(&[(1, Unhealthy)]), Ok(vec![(2, 0), (3, 0)]));
    assert_eq!(
        of(&[(1, Unhealthy), (2, Unhealthy), (3, Unhealthy)]),
        Ok(vec![(1, 0), (2, 0), (3, 0)])
    );
    assert_eq!(
        of(&[(1, Unhealthy), (2, Unhealthy), (3, Unavailable)]),
        Ok(vec![(1, 0), (2, 0)])
    );
    let waits = Err(Ineligible::AllEligibleWorkersOverloaded);
    assert_eq!(
        of(&[(1, Unhealthy), (2, Overloaded), (3, Overloaded)]),
        waits
    );
}

#[test]
fn affinity_and_adapters_narrow_but_never_leave_nobody() {
    let with = |id| Worker {
        adapters: strings(["lora"]),
        ..worker(id)
    };
    let fleet = fleet([worker(1), with(2), with(3)]);
    let rank = |id| WorkerRank {
        worker: WorkerId(id),
        rank: DpRank(0),
    };
    let bound = |id| Constraints {
        exclusive: Some(rank(id)),
        ..Constraints::default()
    };
    let adapter = |name: &str| Constraints {
        adapter: Some(name.to_owned()),
        ..Constraints::default()
    };
    assert_eq!(ids(&fleet, &bound(1), &[]), Ok(vec![(1, 0)]));
    assert_eq!(ids(&fleet, &bound(9), &[]).unwrap().len(), 3);
    assert_eq!(
        ids(&fleet, &bound(1), &[(1, Standing::Overloaded)]),
        Ok(vec![(2, 0), (3, 0)])
    );
    assert_eq!(ids(&fleet, &adapter("lora"), &[]), Ok(vec![(2, 0), (3, 0)]));
    assert_eq!(
        ids(&fleet, &adapter("lora"), &[(2, Standing::Overloaded)]),
        Ok(vec![(3, 0)])
    );
    assert_eq!(ids(&fleet, &adapter("other"), &[]).unwrap().len(), 3);
    let both = Constraints {
        adapter: Some("lora".to_owned()),
        ..pin(1, None)
    };
    assert_eq!(ids(&fleet, &both, &[]), Ok(vec![(1, 0)]));
    let both = Constraints {
        adapter: Some("lora".to_owned()),
        ..bound(1)
    };
    assert_eq!(ids(&fleet, &both, &[]), Ok(vec![(1, 0)]));
}

#[test]
fn decode_follows_prefill_to_its_place() {
    let place = |worker: Worker, value: &str| {
        let topology = [("rack".to_owned(), value.to_owned())].into();
        Worker { topology, ..worker }
    };
    let prefill = |enforcement| Worker {
        role: Role::Prefill,
        kv_transfer: Some(KvTransfer {
            domain: "rack".to_owned(),
            enforcement,
        }),
        ..worker(9)
    };
    let labelled = Worker {
        taints: strings(["dynamo.topology/rack=b"]),
        ..worker(3)
    };
    let fleet = fleet([place(worker(1), "a"), place(worker(2), "b"), labelled]);

    let mut required = Constraints::default();
    required
        .follow(&place(prefill(Enforcement::Required), "b"))
        .unwrap();
    assert_eq!(ids(&fleet, &required, &[]), Ok(vec![(2, 0), (3, 0)]));

    let taint = topology_taint("rack", "b");
    let mut preferred = Constraints {
        preferred_taints: [(taint, 1.0)].into(),
        ..Constraints::default()
    };
    preferred
        .follow(&place(prefill(Enforcement::Preferred(0.5)), "b"))
        .unwrap();
    let preferences: Vec<f64> = fleet
        .workers()
        .map(|worker| preference(&preferred, worker))
        .collect();
    assert_eq!(preferences, [0.0, 1.5, 1.5]);

    let mut untouched = Constraints::default();
    let unknown = untouched
        .follow(&prefill(Enforcement::Required))
        .unwrap_err();
    assert_eq!(
        unknown,
        PlaceUnknown {
            worker: WorkerId(9),
            domain: "rack".to_owned()
        }
    );
    untouched.follow(&worker(9)).unwrap();
    assert_eq!(untouched, Constraints::default());
}

#[test]
fn an_explanation_names_the_first_reason_of_each() {
    let fleet = fleet([
        worker(1),
        Worker {
            taints: strings(["a"]),
            ..worker(2)
        },
    ]);
    let members: Vec<_> = fleet.members().collect();
    let constraints = Constraints {
        required_taints: strings(["a"]),
        ..Constraints::default()
    };
    let found = verdicts(&members, &constraints, |_| Standing::Overloaded);
    assert_eq!(
        found,
        [
            Some(Excluded::MissingTaint("a")),
            Some(Excluded::Overloaded)
        ]
    );
    assert_eq!(
        found[0].unwrap().to_string(),
        "lacks the required taint `a`"
    );
    let confined = Constraints {
        pool: Some("ns/p".into()),
        ..constraints
    };
    let found = verdicts(&members, &confined, |_| Standing::Ready);
    assert_eq!(found, [Some(Excluded::OtherPool("ns/p")); 2]);
    assert_eq!(found[0].unwrap().to_string(), "is not of the pool `ns/p`");
}

fn any_standing() -> impl Strategy<Value = Standing> {
    prop_oneof![
        4 => Just(Standing::Ready),
        1 => Just(Standing::Overloaded),
        2 => Just(Standing::Unhealthy),
        1 => Just(Standing::Unavailable),
    ]
}

fn any_worker(id: u64) -> impl Strategy<Value = Worker> {
    let labels = (
        prop::collection::btree_set("[ab]", 0..2),
        prop::collection::btree_set("[xy]", 0..2),
    );
    let pool = prop::option::of("pool=[pq]");
    (
        1u32..3,
        prop::bool::weighted(0.2),
        labels,
        prop::bool::ANY,
        pool,
    )
        .prop_map(move |(ranks, prefill, labels, racked, pool)| Worker {
            role: if prefill { Role::Prefill } else { Role::Decode },
            taints: labels.0.into_iter().chain(pool).collect(),
            adapters: labels.1,
            topology: racked
                .then(|| ("rack".to_owned(), "r".to_owned()))
                .into_iter()
                .collect(),
            ..several(worker(id), ranks)
        })
}

fn any_constraints() -> impl Strategy<Value = Constraints> {
    let id = || (0u64..5).prop_map(WorkerId);
    let pin = (id(), prop::option::of((0u32..5).prop_map(DpRank)))
        .prop_map(|(worker, rank)| Pin { worker, rank });
    let required = prop_oneof![Just("a".to_owned()), Just(topology_taint("rack", "r"))];
    (
        prop::bool::weighted(0.2),
        prop::option::weighted(0.3, pin),
        prop::option::weighted(0.3, prop::collection::btree_set(id(), 0..4)),
        prop::option::weighted(
            0.3,
            prop::collection::vec(0u64..5, 0..4).prop_map(|ids| subset(&ids)),
        ),
        prop::collection::btree_set(required, 0..2),
        prop::option::weighted(0.4, (id(), 2u32..4)),
        prop::option::weighted(0.4, "[xyz]"),
        prop::option::weighted(0.4, "[pqr]"),
    )
        .prop_map(
            |(prefill, pin, allowed, endpoints, required_taints, exclusive, adapter, pool)| {
                Constraints {
                    role: if prefill {
                        Role::Prefill
                    } else {
                        Role::Aggregated
                    },
                    pin,
                    pool: pool.map(Into::into),
                    allowed,
                    endpoints,
                    required_taints,
                    preferred_taints: BTreeMap::new(),
                    exclusive: exclusive.map(|(worker, rank)| WorkerRank {
                        worker,
                        rank: DpRank(rank),
                    }),
                    adapter,
                }
            },
        )
}

/// The rules of one member, written down once more and without an order.
fn breaks(constraints: &Constraints, member: &Member) -> bool {
    let worker = &member.worker;
    let rank = constraints.pin.and_then(|pin| pin.rank);
    let racked = worker.topology.get("rack").map(String::as_str) == Some("r");
    let has = |taint: &String| {
        worker.taints.contains(taint) || (racked && taint == "dynamo.topology/rack=r")
    };
    (constraints.role == Role::Prefill) != (worker.role == Role::Prefill)
        || constraints.pin.is_some_and(|pin| pin.worker != worker.id)
        || constraints.pin.is_some() && rank.is_none() && worker.ranks.size.get() > 1
        || rank.is_some_and(|rank| rank != member.rank.rank)
        || constraints
            .allowed
            .as_ref()
            .is_some_and(|allowed| !allowed.contains(&worker.id))
        || constraints
            .pool
            .as_ref()
            .is_some_and(|pool| !worker.taints.contains(&format!("pool={pool}")))
        || constraints
            .endpoints
            .as_ref()
            .is_some_and(|subset| !subset.contains(worker.endpoint))
        || !constraints.required_taints.iter().all(has)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nobody_is_excluded_without_reason_or_let_in_against_one(
        workers in (any_worker(0), any_worker(1), any_worker(2), any_worker(3)),
        standings in prop::collection::vec(any_standing(), 4),
        constraints in any_constraints(),
    ) {
        let fleet = fleet([workers.0, workers.1, workers.2, workers.3]);
        let members: Vec<_> = fleet.members().collect();
        let standing = |member: &Member| standings[member.rank.worker.0 as usize];
        let found = eligible(&members, &constraints, standing);
        let candidates = found.as_deref().unwrap_or_default();

        let fit: Vec<_> = members.iter().copied().filter(|member| !breaks(&constraints, member)).collect();
        let stand = |wanted: Standing| fit.iter().copied().filter(move |member| standing(member) == wanted);
        let mut expected: Vec<_> = stand(Standing::Ready).collect();
        if expected.is_empty() && stand(Standing::Overloaded).next().is_none() {
            expected = stand(Standing::Unhealthy).collect();
        }
        if let Some(bound) = expected.iter().copied().find(|member| Some(member.rank) == constraints.exclusive) {
            expected = vec![bound];
        }
        let has = |member: &&Member| constraints.adapter.as_ref().is_some_and(|a| member.worker.adapters.contains(a));
        if expected.iter().any(has) {
            expected.retain(has);
        }
        prop_assert_eq!(candidates, &expected[..]);

        let verdicts = verdicts(&members, &constraints, standing);
        for (member, verdict) in members.iter().zip(verdicts) {
            prop_assert_eq!(verdict.is_none(), expected.contains(member), "{:?}", verdict);
        }
        if let Err(why) = found {
            let overloaded = stand(Standing::Overloaded).next().is_some();
            let says_so =
                matches!(why, Ineligible::AllEligibleWorkersOverloaded | Ineligible::PinnedWorkerOverloaded(_));
            prop_assert_eq!(says_so, overloaded, "{:?}", why);
            let pins = matches!(why, Ineligible::AllEligibleWorkersOverloaded | Ineligible::NoEndpoints);
            prop_assert!(pins || constraints.pin.is_some(), "{:?}", why);
        }
    }
}
