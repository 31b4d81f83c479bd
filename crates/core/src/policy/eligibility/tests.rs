use std::num::NonZeroU32;

use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::*;
use crate::fleet::Fleet;
use crate::worker::{BlockSize, KvTransferRule, RankRange, WorkerEndpoint};

fn worker(id: u64) -> Worker {
    Worker::new(
        WorkerId(id),
        WorkerEndpoint(([10, 0, 0, 1], 8000 + id as u16).into()),
        "m".into(),
        BlockSize::new(16).unwrap(),
    )
}

fn with_ranks(worker: Worker, ranks: u32) -> Worker {
    Worker {
        ranks: RankRange {
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

fn subset(of: &[u64]) -> EndpointSubset {
    of.iter().map(|id| worker(*id).endpoint).collect()
}

fn strings<const N: usize>(of: [&str; N]) -> BTreeSet<String> {
    set(of.map(str::to_owned))
}

/// Ids of the eligible workers, given the availability of some; all others are ready.
fn ids(
    fleet: &Fleet,
    constraints: &Constraints,
    availabilities: &[(u64, WorkerAvailability)],
) -> Result<Vec<(u64, u32)>, EligibilityError> {
    let members: Vec<_> = fleet.members().collect();
    let availability = |member: &FleetMember| {
        let found = availabilities
            .iter()
            .find(|(id, _)| WorkerId(*id) == member.rank.worker);
        found.map_or(WorkerAvailability::Ready, |(_, availability)| *availability)
    };
    let found = eligible_members(&members, constraints, availability)?;
    Ok(found
        .into_iter()
        .map(|member| (member.rank.worker.0, member.rank.rank.0))
        .collect())
}

fn pin(worker: u64, rank: Option<u32>) -> Constraints {
    Constraints {
        pin: Some(WorkerPin {
            worker: WorkerId(worker),
            rank: rank.map(DpRank),
        }),
        ..Constraints::default()
    }
}

/// Returns workers for pins: 1, 2 with two ranks, 3 with a taint, and 4 for prefills.
fn pinned_fleet() -> Fleet {
    let prefill = Worker {
        role: WorkerRole::Prefill,
        ..worker(4)
    };
    let tainted = Worker {
        taints: strings(["a"]),
        ..worker(3)
    };
    fleet([worker(1), with_ranks(worker(2), 2), tainted, prefill])
}

#[test]
fn pin_selects_its_rank_or_reports_error() {
    let fleet = pinned_fleet();
    let availability = [(3, WorkerAvailability::Overloaded)];
    let of = |constraints: Constraints| ids(&fleet, &constraints, &availability);
    assert_eq!(of(pin(1, None)), Ok(vec![(1, 0)]));
    assert_eq!(of(pin(1, Some(0))), Ok(vec![(1, 0)]));
    assert_eq!(of(pin(2, Some(3))), Ok(vec![(2, 3)]));
    assert_eq!(
        of(pin(9, None)),
        Err(EligibilityError::PinUnknown(WorkerId(9)))
    );
    assert_eq!(
        of(pin(4, None)),
        Err(EligibilityError::PinUnknown(WorkerId(4)))
    );
    assert_eq!(
        of(Constraints {
            role: WorkerRole::Prefill,
            ..pin(4, None)
        }),
        Ok(vec![(4, 0)])
    );
    let rank = DpRank(0);
    assert_eq!(
        of(pin(2, Some(0))),
        Err(EligibilityError::PinRankUnknown {
            worker: WorkerId(2),
            rank
        })
    );
    assert_eq!(
        of(pin(2, None)),
        Err(EligibilityError::PinRankMissing {
            worker: WorkerId(2),
            ranks: 2
        })
    );
    assert_eq!(
        of(pin(3, None)),
        Err(EligibilityError::PinnedWorkerOverloaded(WorkerId(3)))
    );
    let other_constraints = Constraints {
        allowed: Some(set([WorkerId(2)])),
        ..pin(1, None)
    };
    assert_eq!(
        of(other_constraints),
        Err(EligibilityError::PinnedWorkerNotAllowed(WorkerId(1)))
    );
    let tainted = Constraints {
        required_taints: strings(["a"]),
        ..pin(1, None)
    };
    assert_eq!(of(tainted), Err(EligibilityError::NoEndpoints));
}

#[test]
fn pin_outside_gateway_subset_is_rejected() {
    let fleet = fleet([worker(1), with_ranks(worker(2), 2)]);
    let within = |constraints, ids: &[u64]| Constraints {
        endpoints: Some(subset(ids)),
        ..constraints
    };
    let of = |constraints: Constraints| ids(&fleet, &constraints, &[]);
    let unknown = Err(EligibilityError::PinUnknown(WorkerId(9)));
    let missing = Err(EligibilityError::PinRankMissing {
        worker: WorkerId(2),
        ranks: 2,
    });
    let no_endpoints = Err(EligibilityError::NoEndpoints);
    let cases = [
        (within(pin(1, None), &[1, 2]), Ok(vec![(1, 0)])),
        (within(pin(1, None), &[2]), no_endpoints.clone()),
        (within(pin(2, None), &[1]), no_endpoints.clone()),
        (within(pin(2, None), &[2]), missing),
        (within(pin(9, None), &[2]), unknown),
        (within(pin(9, None), &[]), no_endpoints.clone()),
        (within(Constraints::default(), &[7]), no_endpoints),
    ];
    for (constraints, expected) in cases {
        assert_eq!(of(constraints.clone()), expected, "{constraints:?}");
    }
    let address = Constraints {
        endpoints: Some(EndpointSubset::parse(["10.0.0.1"])),
        ..Constraints::default()
    };
    assert_eq!(of(address).unwrap().len(), 3, "every port of an address");
    let pinned = within(pin(1, None), &[1]);
    assert_eq!(
        ids(&fleet, &pinned, &[(1, WorkerAvailability::Unavailable)]),
        Err(EligibilityError::NoEndpoints)
    );
}

#[test]
fn decode_follows_prefill_topology() {
    let place = |worker: Worker, value: &str| {
        let topology = [("rack".to_owned(), value.to_owned())].into();
        Worker { topology, ..worker }
    };
    let prefill = |enforcement| Worker {
        role: WorkerRole::Prefill,
        kv_transfer: Some(KvTransferRule {
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
        .add_transfer_demands(&place(prefill(TransferEnforcement::Required), "b"))
        .unwrap();
    assert_eq!(ids(&fleet, &required, &[]), Ok(vec![(2, 0), (3, 0)]));

    let taint = topology_taint("rack", "b");
    let mut preferred = Constraints {
        preferred_taints: [(taint, 1.0)].into(),
        ..Constraints::default()
    };
    preferred
        .add_transfer_demands(&place(prefill(TransferEnforcement::Preferred(0.5)), "b"))
        .unwrap();
    let preferences: Vec<f64> = fleet
        .workers()
        .map(|worker| taint_preference(&preferred, worker))
        .collect();
    assert_eq!(preferences, [0.0, 1.5, 1.5]);

    let mut unchanged = Constraints::default();
    let unknown = unchanged
        .add_transfer_demands(&prefill(TransferEnforcement::Required))
        .unwrap_err();
    assert_eq!(
        unknown,
        MissingTopologyError {
            worker: WorkerId(9),
            domain: "rack".to_owned()
        }
    );
    unchanged.add_transfer_demands(&worker(9)).unwrap();
    assert_eq!(unchanged, Constraints::default());
}

#[test]
fn explanation_reports_first_exclusion_reason() {
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
    let found = exclusion_reasons(&members, &constraints, |_| WorkerAvailability::Overloaded);
    assert_eq!(
        found,
        [
            Some(ExclusionReason::MissingTaint("a")),
            Some(ExclusionReason::Overloaded)
        ]
    );
    assert_eq!(
        found[0].unwrap().to_string(),
        "lacks the required taint `a`"
    );
    let pool_constraints = Constraints {
        pool: Some("ns/p".into()),
        ..constraints
    };
    let found = exclusion_reasons(&members, &pool_constraints, |_| WorkerAvailability::Ready);
    assert_eq!(found, [Some(ExclusionReason::OtherPool("ns/p")); 2]);
    assert_eq!(found[0].unwrap().to_string(), "is not of the pool `ns/p`");
}

fn any_availability() -> impl Strategy<Value = WorkerAvailability> {
    prop_oneof![
        4 => Just(WorkerAvailability::Ready),
        1 => Just(WorkerAvailability::Overloaded),
        2 => Just(WorkerAvailability::Unhealthy),
        1 => Just(WorkerAvailability::Unavailable),
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
        .prop_map(move |(ranks, prefill, labels, in_rack, pool)| Worker {
            role: if prefill {
                WorkerRole::Prefill
            } else {
                WorkerRole::Decode
            },
            taints: labels.0.into_iter().chain(pool).collect(),
            adapters: labels.1,
            topology: in_rack
                .then(|| ("rack".to_owned(), "r".to_owned()))
                .into_iter()
                .collect(),
            ..with_ranks(worker(id), ranks)
        })
}

fn any_constraints() -> impl Strategy<Value = Constraints> {
    let id = || (0u64..5).prop_map(WorkerId);
    let pin = (id(), prop::option::of((0u32..5).prop_map(DpRank)))
        .prop_map(|(worker, rank)| WorkerPin { worker, rank });
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
        prop::option::weighted(0.3, (id(), 2u32..4)),
        prop::option::weighted(0.4, "[xyz]"),
        prop::option::weighted(0.4, "[pqr]"),
    )
        .prop_map(
            |(
                prefill,
                pin,
                allowed,
                endpoints,
                required_taints,
                exclusive,
                stored,
                adapter,
                pool,
            )| {
                let rank = |(worker, rank)| WorkerRank {
                    worker,
                    rank: DpRank(rank),
                };
                Constraints {
                    role: if prefill {
                        WorkerRole::Prefill
                    } else {
                        WorkerRole::Aggregated
                    },
                    pin,
                    pool: pool.map(Into::into),
                    allowed,
                    endpoints,
                    required_taints,
                    preferred_taints: BTreeMap::new(),
                    bound_rank: exclusive.map(rank),
                    storing_rank: stored.map(rank),
                    adapter,
                }
            },
        )
}

/// Returns whether a member breaks any rule, by an independent definition of the rules.
fn violates_constraints(constraints: &Constraints, member: &FleetMember) -> bool {
    let worker = &member.worker;
    let rank = constraints.pin.and_then(|pin| pin.rank);
    let in_rack = worker.topology.get("rack").map(String::as_str) == Some("r");
    let has = |taint: &String| {
        worker.taints.contains(taint) || (in_rack && taint == "dynamo.topology/rack=r")
    };
    (constraints.role == WorkerRole::Prefill) != (worker.role == WorkerRole::Prefill)
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
    #![proptest_config(property_config(10_000))]

    #[test]
    fn exclusion_reasons_match_eligibility(
        workers in (any_worker(0), any_worker(1), any_worker(2), any_worker(3)),
        availabilities in prop::collection::vec(any_availability(), 4),
        constraints in any_constraints(),
    ) {
        let fleet = fleet([workers.0, workers.1, workers.2, workers.3]);
        let members: Vec<_> = fleet.members().collect();
        let availability = |member: &FleetMember| availabilities[member.rank.worker.0 as usize];
        let found = eligible_members(&members, &constraints, availability);
        let candidates = found.as_deref().unwrap_or_default();

        let fitting: Vec<_> = members.iter().copied().filter(|member| !violates_constraints(&constraints, member)).collect();
        let with_availability = |wanted: WorkerAvailability| fitting.iter().copied().filter(move |member| availability(member) == wanted);
        let mut expected: Vec<_> = with_availability(WorkerAvailability::Ready).collect();
        if expected.is_empty() && with_availability(WorkerAvailability::Overloaded).next().is_none() {
            expected = with_availability(WorkerAvailability::Unhealthy).collect();
        }
        let may_store = |member: &&FleetMember| {
            expected.contains(member) || availability(member) == WorkerAvailability::Overloaded
        };
        let stored = fitting.iter().copied().filter(may_store).find(|member| Some(member.rank) == constraints.storing_rank);
        if let Some(stored) = stored {
            expected = vec![stored];
        }
        let has = |member: &&FleetMember| constraints.adapter.as_ref().is_some_and(|a| member.worker.adapters.contains(a));
        let holders = |wanted: WorkerAvailability| -> Vec<_> { with_availability(wanted).filter(|member| has(member)).collect() };
        let fallbacks = [WorkerAvailability::Overloaded, WorkerAvailability::Unhealthy].map(holders);
        if stored.is_some() {
            // Other engines do not know the response.
        } else if expected.iter().any(has) {
            expected.retain(has);
        } else if let Some(holders) = fallbacks.into_iter().find(|holders| !holders.is_empty()) {
            expected = holders;
        }
        if let Some(bound) = expected.iter().copied().find(|member| Some(member.rank) == constraints.bound_rank) {
            expected = vec![bound];
        }
        prop_assert_eq!(candidates, &expected[..]);

        let verdicts = exclusion_reasons(&members, &constraints, availability);
        for (member, verdict) in members.iter().zip(verdicts) {
            prop_assert_eq!(verdict.is_none(), expected.contains(member), "{:?}", verdict);
        }
        if let Err(why) = found {
            let overloaded = with_availability(WorkerAvailability::Overloaded).next().is_some();
            let reports_overload =
                matches!(why, EligibilityError::AllEligibleWorkersOverloaded | EligibilityError::PinnedWorkerOverloaded(_));
            prop_assert_eq!(reports_overload, overloaded, "{:?}", why);
            let pins = matches!(why, EligibilityError::AllEligibleWorkersOverloaded | EligibilityError::NoEndpoints);
            prop_assert!(pins || constraints.pin.is_some(), "{:?}", why);
        }
    }
}
