use std::num::NonZeroU32;

use super::*;
use crate::block::{EngineHash, LocalHash};
use crate::fleet::Fleet;
use crate::index::{KvEvent, PrefixIndex, StoredBlock};
use crate::load::LoadTracker;
use crate::metrics::ModelTokensLabels;
use crate::router::{Mode, RouterSettings};
use crate::tier::Tier;
use crate::trust::Standing;
use crate::worker::{BlockSize, DpRank, Worker, WorkerId, WorkerRank};

const RANK: WorkerRank = WorkerRank { worker: WorkerId(1), rank: DpRank(0) };

fn audit() -> (Arc<Audit>, Arc<Router>, Arc<Metrics>) {
    let load = LoadTracker::new(Instant::now);
    let router = Arc::new(Router::new(PrefixIndex::new(), load, RouterSettings::default(), 1));
    let size = BlockSize(NonZeroU32::new(16).unwrap());
    let worker = Worker::new(RANK.worker, "127.0.0.1:8000".parse().unwrap(), "m".into(), size);
    router.publish(Arc::new(Fleet::empty().reconcile(vec![worker]).fleet));
    router.set_trust(RANK, Standing::EXACT);
    let metrics = Arc::new(Metrics::new());
    (Audit::new(router.clone(), metrics.clone()), router, metrics)
}

fn answered(captured: u64, cached: u64, arrived: Instant) -> Answered {
    let foreseen = Foreseen {
        model: "m".into(),
        chosen: RANK,
        mode: Mode::Exact,
        reason: None,
        trust: Trust::Exact,
        prompt: 100,
        reusable: 96,
        available: captured,
        captured,
        by_chance: 0,
        block_size: BlockSize(NonZeroU32::new(16).unwrap()),
    };
    Answered { foreseen, said: Said { prompt: 100, cached }, arrived, moved: false }
}

#[test]
fn what_came_as_foreseen_counts_at_once_and_the_rest_when_its_events_are_there() {
    let (audit, router, metrics) = audit();
    let begin = Instant::now();
    audit.answered(answered(32, 32, begin), begin);
    audit.answered(answered(32, 16, begin), begin);
    let totals = audit.totals();
    assert_eq!((totals.models["m"].answers, totals.models["m"].equal, totals.waiting), (1, 1, 1));
    // The event that explains it comes after the answer.
    let removed = KvEvent::Removed { blocks: vec![EngineHash(7)], tier: Tier::Device };
    router.note_churn(RANK).note(&removed, begin + Duration::from_millis(300));
    audit.look(begin + GRACE / 2);
    assert_eq!(audit.totals().waiting, 1, "it is not due");
    audit.look(begin + GRACE);
    let totals = audit.totals();
    let sums = &totals.models["m"];
    assert_eq!((sums.answers, sums.less, totals.waiting), (2, 1, 0));
    assert_eq!((sums.errors[&Cause::Evicted], sums.missed_tokens[&Cause::Evicted]), (1, 16));
    assert_eq!(sums.missed_tokens.values().sum::<u64>(), sums.missed());
    assert_eq!(sums.error_blocks, [(-1, 1), (0, 1)].into());
    let delivered = ModelTokensLabels { model: "m".into(), kind: "delivered" };
    assert_eq!(metrics.audit_tokens.get_or_create(&delivered).get(), 48);
}

#[test]
fn changes_before_the_request_came_explain_nothing() {
    let (audit, router, _) = audit();
    let begin = Instant::now();
    let stored = KvEvent::Stored {
        parent: None,
        blocks: vec![StoredBlock { engine: EngineHash(7), local: LocalHash(7) }],
        tier: Tier::Device,
    };
    router.note_churn(RANK).note(&stored, begin + Duration::from_millis(10));
    audit.answered(answered(0, 16, begin + Duration::from_millis(20)), begin);
    audit.answered(answered(0, 16, begin), begin);
    audit.look(begin + GRACE);
    let errors = &audit.totals().models["m"].errors;
    assert_eq!((errors[&Cause::StaleIndex], errors[&Cause::StoredMeanwhile]), (1, 1));
}

#[test]
fn of_too_many_that_wait_the_newest_are_judged_by_what_is_known() {
    let (audit, _, _) = audit();
    let begin = Instant::now();
    for _ in 0..MOST_WAITING + 3 {
        audit.answered(answered(32, 16, begin), begin);
    }
    let totals = audit.totals();
    assert_eq!((totals.waiting, totals.models["m"].answers), (MOST_WAITING as u64, 3));
}

#[test]
fn the_silent_are_counted_by_what_they_lack() {
    let (audit, _, _) = audit();
    let model = ModelName::from("m");
    audit.silent(&model, true);
    audit.silent(&model, false);
    audit.silent(&model, false);
    let totals = audit.totals();
    assert_eq!((totals.models["m"].no_details, totals.models["m"].no_usage), (1, 2));
}

#[test]
fn models_beyond_what_is_told_apart_are_counted_together() {
    let mut totals = Totals::default();
    for number in 0..2000 {
        totals.of(&ModelName::from(format!("m{number}").as_str())).silent(true);
    }
    assert_eq!((totals.models.len(), totals.models[""].no_details), (1025, 2000 - 1024));
}
