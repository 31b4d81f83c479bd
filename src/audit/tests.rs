use std::num::NonZeroU32;

use super::*;
use crate::block::{EngineHash, LocalHash};
use crate::fleet::Fleet;
use crate::index::{KvEvent, PrefixIndex, RankWriter, StoredBlock};
use crate::load::LoadTracker;
use crate::metrics::ModelTokensLabels;
use crate::router::{Mode, Prompt, RouteRequest, RouterSettings};
use crate::tier::Tier;
use crate::worker::{BlockSize, DpRank, Role, Worker, WorkerId, WorkerRank};

const SIZE: BlockSize = BlockSize(NonZeroU32::new(16).unwrap());
const RANK: WorkerRank = WorkerRank {
    worker: WorkerId(1),
    rank: DpRank(0),
};

/// An audit of one worker rank with its writer.
fn audit() -> (Arc<Audit>, RankWriter, Arc<Metrics>) {
    let load = LoadTracker::new(Instant::now);
    let router = Arc::new(Router::new(
        PrefixIndex::new(),
        load,
        RouterSettings::default(),
        1,
    ));
    let worker = Worker::new(
        RANK.worker,
        "127.0.0.1:8000".parse().unwrap(),
        "m".into(),
        SIZE,
    );
    let fleet = Arc::new(Fleet::empty().reconcile(vec![worker]).fleet);
    let writer = router.index().join(fleet.slot(RANK).unwrap());
    router.publish(fleet);
    let metrics = Arc::new(Metrics::new());
    (Audit::new(router, metrics.clone()), writer, metrics)
}

/// The prompt of every request here: six blocks and a rest.
fn prompt() -> BlockHashes {
    BlockHashes::chain(100, SIZE, (1..=6).map(LocalHash).collect())
}

/// Blocks of the prompt from one on, after those before it.
fn stored(from: u64, to: u64) -> KvEvent {
    let blocks = (from..=to).map(|block| StoredBlock {
        engine: EngineHash(block),
        local: LocalHash(block),
    });
    KvEvent::Stored {
        parent: (from > 1).then(|| EngineHash(from - 1)),
        blocks: blocks.collect(),
        tier: Tier::Device,
    }
}

fn removed(from: u64, to: u64) -> KvEvent {
    KvEvent::Removed {
        blocks: (from..=to).map(EngineHash).collect(),
        tier: Tier::Device,
    }
}

fn answered(audit: &Audit, captured: u64, cached: u64) -> Answered {
    let slot = audit.router.fleet().slot(RANK).unwrap();
    let foreseen = Foreseen {
        model: "m".into(),
        chosen: RANK,
        role: Some(Role::Aggregated),
        mode: Mode::Exact,
        reason: None,
        since: audit.router.index().moment(slot),
        prompt: 100,
        reusable: 96,
        available: captured,
        captured,
        by_chance: 0,
        block_size: SIZE,
    };
    Answered::new(
        foreseen,
        Said {
            prompt: 100,
            cached,
        },
        vec![prompt()],
    )
}

#[test]
fn prediction_describes_the_prefill_worker() {
    let load = LoadTracker::new(Instant::now);
    let router = Arc::new(Router::new(
        PrefixIndex::new(),
        load,
        RouterSettings::default(),
        1,
    ));
    let worker = |id, role| Worker {
        role,
        ..Worker::new(
            WorkerId(id),
            format!("127.0.0.1:{}", 8000 + id).parse().unwrap(),
            "m".into(),
            SIZE,
        )
    };
    let change = router
        .fleet()
        .reconcile(vec![worker(1, Role::Prefill), worker(2, Role::Decode)]);
    change
        .added
        .iter()
        .for_each(|member| router.load().open(member.slot, member.rank));
    router.publish(Arc::new(change.fleet));
    let decode = WorkerRank {
        worker: WorkerId(2),
        rank: DpRank(0),
    };
    let slot = |rank| router.fleet().slot(rank).unwrap();
    let mut of_prefill = router.index().join(slot(RANK));
    let mut of_decode = router.index().join(slot(decode));
    of_prefill.apply(&stored(1, 2));
    of_decode.apply(&stored(1, 5));
    let request = RouteRequest::new(Some("m".into()), Prompt::Hashed(vec![prompt()]));
    let route = router.route(request).unwrap().route;
    assert_eq!(route.to.rank, decode);
    let foreseen = Audit::new(router.clone(), Arc::new(Metrics::new())).foresee(&route);
    assert_eq!(
        (foreseen.chosen, foreseen.role),
        (RANK, Some(Role::Prefill))
    );
    assert_eq!(
        (foreseen.captured, foreseen.available),
        (32, 32),
        "the blocks of the decode worker do not count"
    );
}

#[test]
fn what_came_as_foreseen_counts_at_once_and_the_rest_when_its_events_are_there() {
    let (audit, mut writer, metrics) = audit();
    writer.apply(&stored(1, 2));
    let begin = Instant::now();
    audit.answered(answered(&audit, 32, 32), begin);
    audit.answered(answered(&audit, 32, 16), begin);
    let totals = audit.totals();
    assert_eq!(
        (
            totals.models["m"].answers,
            totals.models["m"].equal,
            totals.waiting
        ),
        (1, 1, 1)
    );
    // The events that explain it come after the answer: what was gone was computed again.
    writer.apply(&removed(2, 2));
    writer.apply(&stored(2, 6));
    audit.look(begin + GRACE / 2);
    assert_eq!(audit.totals().waiting, 1, "it is not due");
    audit.look(begin + GRACE);
    let totals = audit.totals();
    let sums = &totals.models["m"];
    assert_eq!((sums.answers, sums.less, totals.waiting), (2, 1, 0));
    assert_eq!(
        (
            sums.errors[&Cause::Evicted],
            sums.missed_tokens[&Cause::Evicted]
        ),
        (1, 16)
    );
    assert_eq!(sums.missed_tokens.values().sum::<u64>(), sums.missed());
    assert_eq!(sums.error_blocks, [(-1, 1), (0, 1)].into());
    let delivered = ModelTokensLabels {
        model: "m".into(),
        kind: "delivered",
    };
    assert_eq!(metrics.audit_tokens.get_or_create(&delivered).get(), 48);
}

#[test]
fn a_difference_is_explained_by_what_was_told_of_the_prompts_own_blocks_alone() {
    use Cause::{Evicted, StaleIndex, StoredMeanwhile};
    type Case = (&'static str, u64, u64, Vec<KvEvent>, Cause);
    // A busy rank stores and evicts all the time.
    let others = || {
        let block = |name| {
            vec![StoredBlock {
                engine: EngineHash(name),
                local: LocalHash(name),
            }]
        };
        let store = |name| KvEvent::Stored {
            parent: None,
            blocks: block(name),
            tier: Tier::Device,
        };
        vec![store(70), store(71), removed(70, 70), store(72)]
    };
    let with_others =
        |more: Vec<KvEvent>| others().into_iter().chain(more).chain(others()).collect();
    let cases: [Case; 7] = [
        ("nothing of it", 32, 16, with_others(vec![]), StaleIndex),
        (
            "stored again without having left",
            32,
            0,
            with_others(vec![stored(1, 6)]),
            StaleIndex,
        ),
        ("gone", 32, 16, with_others(vec![removed(2, 2)]), Evicted),
        (
            "gone and there again",
            32,
            0,
            with_others(vec![removed(1, 2), stored(1, 6)]),
            Evicted,
        ),
        (
            "nobody told of more",
            32,
            48,
            with_others(vec![stored(4, 6)]),
            StaleIndex,
        ),
        (
            "told of more",
            32,
            48,
            with_others(vec![stored(3, 3)]),
            StoredMeanwhile,
        ),
        (
            "told of some",
            32,
            64,
            with_others(vec![stored(3, 3)]),
            StaleIndex,
        ),
    ];
    for (name, captured, cached, events, cause) in cases {
        let (audit, mut writer, _) = audit();
        writer.apply(&stored(1, 2));
        let begin = Instant::now();
        audit.answered(answered(&audit, captured, cached), begin);
        for event in &events {
            writer.apply(event);
        }
        audit.look(begin + GRACE);
        let errors = &audit.totals().models["m"].errors;
        assert_eq!(errors.keys().collect::<Vec<_>>(), [&cause], "{name}");
    }
}

#[test]
fn what_a_busy_rank_stores_meanwhile_does_not_make_a_miss_an_eviction() {
    let store = |name| {
        let blocks = vec![StoredBlock {
            engine: EngineHash(name),
            local: LocalHash(name),
        }];
        KvEvent::Stored {
            parent: None,
            blocks,
            tier: Tier::Device,
        }
    };
    for (stores, removals, cause) in [
        (5_000, 1_000, Cause::StaleIndex),
        (5_000, 4_000, Cause::Unknown),
    ] {
        let (audit, mut writer, _) = audit();
        writer.apply(&stored(1, 2));
        let begin = Instant::now();
        audit.answered(answered(&audit, 32, 16), begin);
        (100..100 + stores).for_each(|name| _ = writer.apply(&store(name)));
        (100..100 + removals).for_each(|name| _ = writer.apply(&removed(name, name)));
        audit.look(begin + GRACE);
        let errors = &audit.totals().models["m"].errors;
        assert_eq!(
            errors.keys().collect::<Vec<_>>(),
            [&cause],
            "{stores} {removals}"
        );
    }
}

#[test]
fn changes_before_the_request_came_explain_nothing() {
    let (audit, mut writer, _) = audit();
    writer.apply(&stored(1, 2));
    let begin = Instant::now();
    audit.answered(answered(&audit, 32, 16), begin);
    audit.look(begin + GRACE);
    assert_eq!(audit.totals().models["m"].errors[&Cause::StaleIndex], 1);
}

#[test]
fn what_an_engine_found_cached_is_not_doubted_any_longer() {
    let (audit, mut writer, _) = audit();
    writer.apply(&stored(1, 6));
    writer.doubt();
    audit.answered(answered(&audit, 96, 48), Instant::now());
    assert_eq!(writer.settle().doubted, 3);
}

#[test]
fn answers_that_no_event_can_explain_do_not_wait() {
    let (audit, _, _) = audit();
    let begin = Instant::now();
    for change in [
        |answered: &mut Answered| answered.foreseen.mode = Mode::LoadOnly,
        |answered: &mut Answered| answered.foreseen.mode = Mode::Approximate,
        |answered: &mut Answered| answered.said.prompt = 101,
        |answered: &mut Answered| answered.moved = true,
    ] {
        let mut answered = answered(&audit, 32, 16);
        change(&mut answered);
        audit.answered(answered, begin);
    }
    let totals = audit.totals();
    assert_eq!((totals.waiting, totals.models["m"].answers), (0, 4));
}

#[test]
fn of_too_many_that_wait_the_newest_are_judged_by_what_is_known() {
    let (audit, _writer, _) = audit();
    let begin = Instant::now();
    for _ in 0..MOST_WAITING + 3 {
        audit.answered(answered(&audit, 32, 16), begin);
    }
    let totals = audit.totals();
    assert_eq!(
        (totals.waiting, totals.models["m"].answers),
        (MOST_WAITING as u64, 3)
    );
    audit.look(begin + GRACE);
    // Nor do they keep blocks without end.
    let mut long = answered(&audit, 32, 16);
    long.prompts = vec![BlockHashes::chain(
        16 * MOST_BLOCKS,
        SIZE,
        vec![LocalHash(1); MOST_BLOCKS],
    )];
    for answered in [long.clone(), long, answered(&audit, 32, 16)] {
        audit.answered(answered, begin);
    }
    assert_eq!(audit.totals().waiting, 1);
    audit.look(begin + GRACE);
    assert_eq!(audit.waiting.lock().blocks, 0);
}

#[test]
fn the_silent_are_counted_by_what_they_lack() {
    let (audit, _, _) = audit();
    let model = ModelName::from("m");
    audit.silent(&model, true);
    audit.silent(&model, false);
    audit.silent(&model, false);
    let totals = audit.totals();
    assert_eq!(
        (totals.models["m"].no_details, totals.models["m"].no_usage),
        (1, 2)
    );
}

#[test]
fn models_beyond_what_is_told_apart_are_counted_together() {
    let mut totals = Totals::default();
    for number in 0..2000 {
        totals
            .of(&ModelName::from(format!("m{number}").as_str()))
            .silent(true);
    }
    assert_eq!(
        (totals.models.len(), totals.models[""].no_details),
        (1025, 2000 - 1024)
    );
}

#[test]
fn evicted_blocks_of_concurrent_request_explain_surplus() {
    let (audit, mut writer, _) = audit();
    writer.apply(&stored(1, 2));
    let begin = Instant::now();
    let answered = answered(&audit, 32, 64);
    writer.apply(&stored(3, 6));
    audit.answered(answered, begin);
    writer.apply(&removed(1, 6));
    audit.look(begin + GRACE);
    assert_eq!(
        audit.totals().models["m"].errors,
        [(Cause::StoredMeanwhile, 1)].into()
    );
}

#[test]
fn partial_block_surplus_of_smaller_blocks_is_rounding() {
    let (audit, mut writer, _) = audit();
    writer.apply(&stored(1, 2));
    for (engine, cached, cause) in [
        (8, 40, Cause::BlockRounding),
        (8, 44, Cause::StaleIndex),
        (4, 44, Cause::BlockRounding),
    ] {
        let standing = crate::trust::Standing::EXACT;
        audit.router.set_trust(
            RANK,
            crate::trust::Standing {
                engine_block_size: BlockSize::new(engine),
                ..standing
            },
        );
        let before = audit
            .totals()
            .models
            .get("m")
            .and_then(|sums| sums.errors.get(&cause).copied());
        let begin = Instant::now();
        audit.answered(answered(&audit, 32, cached), begin);
        audit.look(begin + GRACE);
        let after = audit.totals().models["m"].errors.get(&cause).copied();
        assert_eq!(after, Some(before.unwrap_or(0) + 1), "{engine} {cached}");
    }
}
