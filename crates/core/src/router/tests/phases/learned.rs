//! Local prefills by predicted cost.

use super::*;
use crate::policy::{ConditionalPrefillPolicy, PolicyName, PolicySettings, Weights};

fn learned(policy: PolicyName) -> RouterSettings {
    let conditional = ConditionalPrefillConfig {
        policy: ConditionalPrefillPolicy::Learned,
        ..ConditionalPrefillConfig::default()
    };
    RouterSettings {
        policy: PolicySettings::named(policy, &Weights::default()),
        disaggregation: DisaggregationConfig {
            enforce: false,
            conditional: Some(conditional),
        },
        ..RouterSettings::default()
    }
}

fn prompt(first: u64) -> Vec<u64> {
    (first..first + 1_000).collect()
}

/// Stores a prompt on a worker.
fn store(router: &Router, id: u64, prompt: &[u64]) {
    let fleet = router.fleet();
    let mut members = fleet.members();
    let member = members.find(|member| member.rank.worker == WorkerId(id));
    let mut writer = router.index().create_writer(member.unwrap().slot);
    let stored = |local: &u64| StoredBlock {
        engine: EngineHash(*local),
        local: LocalHash(*local),
    };
    writer.apply(&KvEvent::Stored {
        parent: None,
        blocks: prompt.iter().map(stored).collect(),
        tier: StorageTier::Device,
    });
}

#[test]
fn cached_prompt_is_prefilled_locally_by_cost() {
    for policy in [PolicyName::Seconds, PolicyName::LinearTuned] {
        let router = router_of(pools(), learned(policy));
        store(&router, 12, &prompt(0));
        let local = router.route(request(&[prompt(0)])).unwrap();
        let expected = PhaseAssignment::Local(LocalPrefillReason::LowerCost);
        assert_eq!(local.route.phases, expected, "{policy:?}");
        assert_eq!(local.route.to.rank.worker, WorkerId(12), "{policy:?}");
        let explanation = router.explain(request(&[prompt(0)]));
        let summary = &explanation.summary;
        assert!(
            summary.contains("a local prefill costs less time"),
            "{summary}"
        );
        let mut workers = explanation.phases[1].workers.iter();
        assert!(workers.any(|worker| worker.timing.is_some()), "{policy:?}");
    }
}

#[test]
fn running_requests_of_decode_workers_make_prefill_remote() {
    for policy in [PolicyName::Seconds, PolicyName::LinearTuned] {
        let router = router_of(pools(), learned(policy));
        let decoding: Vec<_> = (0..20)
            .map(|number| {
                let mut local = request(&[prompt(10_000 * (number + 1))]);
                local.phases = PhaseSelection::Local(LocalPrefillReason::NotSplittable);
                let mut placement = router.route(local).unwrap();
                placement.reservation.on_first_token();
                placement
            })
            .collect();
        let remote = router.route(request(&[prompt(0)])).unwrap();
        assert!(remote.route.prefill().is_some(), "{policy:?}");
        drop(decoding);
    }
}

#[test]
fn backlog_of_prefill_workers_makes_prefill_local() {
    let router = router_of(pools(), learned(PolicyName::Seconds));
    let mut prefilling = Vec::new();
    let has_local = (1..100).any(|number| {
        let placement = router.route(request(&[prompt(10_000 * number)])).unwrap();
        let is_local = placement.route.prefill().is_none();
        prefilling.push(placement);
        is_local
    });
    assert!(has_local);
}

#[test]
fn pinned_prefill_worker_is_used_despite_cost() {
    let router = router_of(pools(), learned(PolicyName::Seconds));
    store(&router, 12, &prompt(0));
    let mut request = request(&[prompt(0)]);
    request.prefill_pin = pinned(1);
    let placement = router.route(request).unwrap();
    assert!(placement.route.prefill().is_some());
}
