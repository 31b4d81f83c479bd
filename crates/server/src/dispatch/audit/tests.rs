use std::num::NonZeroU32;

use warmroute_core::block::{EngineHash, LocalHash, StorageTier};
use warmroute_core::index::{KvEvent, PrefixIndex, RankWriter, StoredBlock};
use warmroute_core::load::LoadTracker;
use warmroute_core::router::{Mode, RoutePrompt, RouteRequest, RouterSettings};
use warmroute_core::worker::{BlockSize, Worker, WorkerId, WorkerRank, WorkerRole};
use warmroute_metrics::ModelTokensLabels;

use super::*;

const SIZE: BlockSize = BlockSize(NonZeroU32::new(16).unwrap());
const RANK: WorkerRank = WorkerRank::new(1, 0);

fn empty_router() -> Arc<Router> {
    let load = LoadTracker::new(Instant::now);
    let settings = RouterSettings::default();
    Arc::new(Router::new(PrefixIndex::new(), load, settings, 1))
}

/// Returns an audit of one worker rank, and the writer of its index entries.
fn audit() -> (Arc<CacheAudit>, RankWriter, Arc<Metrics>) {
    let router = empty_router();
    let worker = Worker::new(
        RANK.worker,
        "127.0.0.1:8000".parse().unwrap(),
        "m".into(),
        SIZE,
    );
    let members = router.set_workers([worker]);
    let writer = router.index().create_writer(members[0].slot);
    let metrics = Arc::new(Metrics::new());
    (CacheAudit::new(router, metrics.clone()), writer, metrics)
}

/// Returns the prompt of all requests: six blocks and a remainder.
fn prompt() -> BlockHashes {
    BlockHashes::from_locals(100, SIZE, (1..=6).map(LocalHash).collect())
}

/// Returns the event that stores these blocks of the prompt after their predecessors.
fn stored(from: u64, to: u64) -> KvEvent {
    let blocks = (from..=to).map(|block| StoredBlock {
        engine: EngineHash(block),
        local: LocalHash(block),
    });
    KvEvent::Stored {
        parent: (from > 1).then(|| EngineHash(from - 1)),
        blocks: blocks.collect(),
        tier: StorageTier::Device,
    }
}

fn removed(from: u64, to: u64) -> KvEvent {
    KvEvent::Removed {
        blocks: (from..=to).map(EngineHash).collect(),
        tier: StorageTier::Device,
    }
}

fn response(audit: &CacheAudit, captured: u64, cached: u64) -> AuditedResponse {
    let slot = audit.router.fleet().slot(RANK).unwrap();
    let forecast = HitForecast {
        model: "m".into(),
        rank: RANK,
        role: Some(WorkerRole::Aggregated),
        mode: Mode::Exact,
        reason: None,
        event_cursor: audit.router.index().event_cursor(slot),
        prompt_tokens: 100,
        reusable_tokens: 96,
        available_tokens: captured,
        captured_tokens: captured,
        chance_tokens: 0,
        block_size: SIZE,
        recomputes_last_block: audit.router.recomputes_last_block(RANK.worker),
    };
    AuditedResponse::new(
        forecast,
        ReportedUsage {
            prompt_tokens: 100,
            cached_tokens: cached,
        },
        vec![prompt()],
    )
}

#[test]
fn prediction_describes_the_prefill_worker() {
    let router = empty_router();
    let worker = |id, role| Worker {
        role,
        ..Worker::new(
            WorkerId(id),
            format!("127.0.0.1:{}", 8000 + id).parse().unwrap(),
            "m".into(),
            SIZE,
        )
    };
    router.set_workers([
        worker(1, WorkerRole::Prefill),
        worker(2, WorkerRole::Decode),
    ]);
    let decode = WorkerRank::new(2, 0);
    let slot = |rank| router.fleet().slot(rank).unwrap();
    let mut prefill_writer = router.index().create_writer(slot(RANK));
    let mut decode_writer = router.index().create_writer(slot(decode));
    prefill_writer.apply(&stored(1, 2));
    decode_writer.apply(&stored(1, 5));
    let request = RouteRequest::new(Some("m".into()), RoutePrompt::Hashed(vec![prompt()]));
    let route = router.route(request).unwrap().route;
    assert_eq!(route.to.rank, decode);
    let forecast = CacheAudit::new(router.clone(), Arc::new(Metrics::new())).forecast(&route);
    assert_eq!(
        (forecast.rank, forecast.role),
        (RANK, Some(WorkerRole::Prefill))
    );
    assert_eq!(
        (forecast.captured_tokens, forecast.available_tokens),
        (32, 32),
        "blocks of the decode worker do not count"
    );
}

#[test]
fn match_counts_at_once_and_difference_after_events() {
    let (audit, mut writer, metrics) = audit();
    writer.apply(&stored(1, 2));
    let start = Instant::now();
    audit.record_response(response(&audit, 32, 32), start);
    audit.record_response(response(&audit, 32, 16), start);
    let totals = audit.totals();
    assert_eq!(
        (
            totals.models["m"].responses,
            totals.models["m"].equal,
            totals.waiting
        ),
        (1, 1, 1)
    );
    // The events that explain the difference arrive after the response: the evicted block was
    // computed again.
    writer.apply(&removed(2, 2));
    writer.apply(&stored(2, 6));
    audit.resolve_due(start + EVENT_GRACE / 2);
    assert_eq!(audit.totals().waiting, 1, "the response is not due");
    audit.resolve_due(start + EVENT_GRACE);
    let totals = audit.totals();
    let sums = &totals.models["m"];
    assert_eq!((sums.responses, sums.fewer, totals.waiting), (2, 1, 0));
    assert_eq!(
        (
            sums.errors[&MissCause::Evicted],
            sums.missed_tokens[&MissCause::Evicted]
        ),
        (1, 16)
    );
    assert_eq!(sums.missed_tokens.values().sum::<u64>(), sums.missed());
    assert_eq!(sums.error_blocks, [(-1, 1), (0, 1)].into());
    let delivered = ModelTokensLabels {
        model: "m".into(),
        kind: "delivered",
    };
    assert_eq!(metrics.audit.tokens.get_or_create(&delivered).get(), 48);
}

/// Adds events of other blocks before and after `events`, because a busy rank stores and evicts
/// blocks all the time.
fn with_others(events: &[KvEvent]) -> Vec<KvEvent> {
    let store = |number| KvEvent::Stored {
        parent: None,
        blocks: vec![StoredBlock {
            engine: EngineHash(number),
            local: LocalHash(number),
        }],
        tier: StorageTier::Device,
    };
    let others = [store(70), store(71), removed(70, 70), store(72)];
    [&others[..], events, &others].concat()
}

#[test]
fn only_events_of_prompt_blocks_explain_a_difference() {
    use MissCause::{Evicted, StaleIndex, StoredMeanwhile};
    type Case = (&'static str, u64, u64, Vec<KvEvent>, MissCause);
    let cases: [Case; 7] = [
        ("only other blocks", 32, 0, with_others(&[]), StaleIndex),
        (
            "stored again without eviction",
            32,
            0,
            with_others(&[stored(1, 6)]),
            StaleIndex,
        ),
        ("evicted", 32, 16, with_others(&[removed(2, 2)]), Evicted),
        (
            "evicted and stored again",
            32,
            0,
            with_others(&[removed(1, 2), stored(1, 6)]),
            Evicted,
        ),
        (
            "surplus blocks not stored",
            32,
            48,
            with_others(&[stored(4, 6)]),
            StaleIndex,
        ),
        (
            "surplus blocks stored",
            32,
            48,
            with_others(&[stored(3, 3)]),
            StoredMeanwhile,
        ),
        (
            "some surplus blocks stored",
            32,
            64,
            with_others(&[stored(3, 3)]),
            StaleIndex,
        ),
    ];
    for (name, captured, cached, events, cause) in cases {
        let (audit, mut writer, _) = audit();
        writer.apply(&stored(1, 2));
        let start = Instant::now();
        audit.record_response(response(&audit, captured, cached), start);
        for event in &events {
            writer.apply(event);
        }
        audit.resolve_due(start + EVENT_GRACE);
        let errors = &audit.totals().models["m"].errors;
        assert_eq!(errors.keys().collect::<Vec<_>>(), [&cause], "{name}");
    }
}

#[test]
fn stores_of_busy_rank_are_no_eviction_evidence() {
    let store = |name| {
        let blocks = vec![StoredBlock {
            engine: EngineHash(name),
            local: LocalHash(name),
        }];
        KvEvent::Stored {
            parent: None,
            blocks,
            tier: StorageTier::Device,
        }
    };
    for (stores, removals, cause) in [
        // The log of evicted blocks holds 65,536 to 131,072 entries.
        (320_000, 64_000, MissCause::StaleIndex),
        (320_000, 256_000, MissCause::Unknown),
    ] {
        let (audit, mut writer, _) = audit();
        writer.apply(&stored(1, 2));
        let start = Instant::now();
        audit.record_response(response(&audit, 32, 0), start);
        (100..100 + stores).for_each(|name| _ = writer.apply(&store(name)));
        (100..100 + removals).for_each(|name| _ = writer.apply(&removed(name, name)));
        audit.resolve_due(start + EVENT_GRACE);
        let errors = &audit.totals().models["m"].errors;
        assert_eq!(
            errors.keys().collect::<Vec<_>>(),
            [&cause],
            "{stores} {removals}"
        );
    }
}

#[test]
fn reported_cached_blocks_are_confirmed() {
    let (audit, mut writer, _) = audit();
    writer.apply(&stored(1, 6));
    writer.record_gap();
    audit.record_response(response(&audit, 96, 48), Instant::now());
    assert_eq!(writer.reconcile().stale_blocks, 3);
}

#[test]
fn unexplainable_responses_do_not_wait_for_events() {
    let (audit, _, _) = audit();
    let start = Instant::now();
    for change in [
        |response: &mut AuditedResponse| response.forecast.mode = Mode::LoadOnly,
        |response: &mut AuditedResponse| response.forecast.mode = Mode::Approximate,
        |response: &mut AuditedResponse| response.usage.prompt_tokens = 101,
        |response: &mut AuditedResponse| response.served_elsewhere = true,
    ] {
        let mut response = response(&audit, 32, 16);
        change(&mut response);
        audit.record_response(response, start);
    }
    let totals = audit.totals();
    assert_eq!((totals.waiting, totals.models["m"].responses), (0, 4));
}

#[test]
fn full_backlog_attributes_new_responses_at_once() {
    let (audit, _writer, _) = audit();
    let start = Instant::now();
    for _ in 0..MAX_PENDING_RESPONSES + 3 {
        audit.record_response(response(&audit, 32, 16), start);
    }
    let totals = audit.totals();
    assert_eq!(
        (totals.waiting, totals.models["m"].responses),
        (MAX_PENDING_RESPONSES as u64, 3)
    );
    audit.resolve_due(start + EVENT_GRACE);
    // The blocks of the backlog are bounded as well.
    let mut long = response(&audit, 32, 16);
    long.prompts = vec![BlockHashes::from_locals(
        16 * MAX_PENDING_BLOCKS,
        SIZE,
        vec![LocalHash(1); MAX_PENDING_BLOCKS],
    )];
    for response in [long.clone(), long, response(&audit, 32, 16)] {
        audit.record_response(response, start);
    }
    assert_eq!(audit.totals().waiting, 1);
    audit.resolve_due(start + EVENT_GRACE);
    assert_eq!(audit.backlog.lock().blocks, 0);
}

#[test]
fn responses_without_report_are_counted_by_reason() {
    let (audit, _, _) = audit();
    let model = ModelName::from("m");
    audit.record_without_report(&model, true);
    audit.record_without_report(&model, false);
    audit.record_without_report(&model, false);
    let totals = audit.totals();
    assert_eq!(
        (
            totals.models["m"].no_cached_tokens,
            totals.models["m"].no_usage
        ),
        (1, 2)
    );
}

#[test]
fn models_beyond_the_limit_share_one_entry() {
    let mut totals = AuditTotals::default();
    for number in 0..2000 {
        totals
            .model_mut(&ModelName::from(format!("m{number}").as_str()))
            .record_without_report(true);
    }
    assert_eq!(
        (totals.models.len(), totals.models[""].no_cached_tokens),
        (1025, 2000 - 1024)
    );
}

#[test]
fn evicted_blocks_of_concurrent_request_explain_surplus() {
    let (audit, mut writer, _) = audit();
    writer.apply(&stored(1, 2));
    let start = Instant::now();
    let response = response(&audit, 32, 64);
    writer.apply(&stored(3, 6));
    audit.record_response(response, start);
    writer.apply(&removed(1, 6));
    audit.resolve_due(start + EVENT_GRACE);
    assert_eq!(
        audit.totals().models["m"].errors,
        [(MissCause::StoredMeanwhile, 1)].into()
    );
}

#[test]
fn dropped_last_block_is_learned_from_responses() {
    use MissCause::{DroppedBlock, StaleIndex};
    let (audit, mut writer, _) = audit();
    writer.apply(&stored(1, 4));
    let mut now = Instant::now();
    let mut respond = |captured: u64, cached: u64| {
        audit.record_response(response(&audit, captured, cached), now);
        now += EVENT_GRACE;
        audit.resolve_due(now);
        let errors = audit.totals().models["m"].errors.clone();
        (audit.router.recomputes_last_block(RANK.worker), errors)
    };
    // A response without cached tokens may belong to a request that reads no cache.
    assert_eq!(respond(16, 0), (false, [(StaleIndex, 1)].into()));
    let dropped = |count| [(StaleIndex, 1), (DroppedBlock, count)].into();
    assert_eq!(respond(64, 48), (false, dropped(1)));
    assert_eq!(respond(64, 48), (true, dropped(2)));
    assert_eq!(respond(48, 48), (true, dropped(2)));
    // Another engine reuses all blocks.
    assert_eq!(respond(48, 64), (false, dropped(3)));
    // After that, a single difference is more likely an error of the index.
    let (drops, errors) = respond(64, 48);
    assert!(!drops);
    assert_eq!(errors, [(StaleIndex, 2), (DroppedBlock, 3)].into());
}

#[test]
fn partial_block_surplus_of_smaller_blocks_is_rounding() {
    let (audit, mut writer, _) = audit();
    writer.apply(&stored(1, 2));
    for (engine, cached, cause) in [
        (8, 40, MissCause::BlockRounding),
        (8, 44, MissCause::StaleIndex),
        (4, 44, MissCause::BlockRounding),
    ] {
        let status = warmroute_core::freshness::SourceStatus::EXACT;
        audit.router.set_source_status(
            RANK,
            warmroute_core::freshness::SourceStatus {
                engine_block_size: BlockSize::new(engine),
                ..status
            },
        );
        let before = audit
            .totals()
            .models
            .get("m")
            .and_then(|sums| sums.errors.get(&cause).copied());
        let start = Instant::now();
        audit.record_response(response(&audit, 32, cached), start);
        audit.resolve_due(start + EVENT_GRACE);
        let after = audit.totals().models["m"].errors.get(&cause).copied();
        assert_eq!(after, Some(before.unwrap_or(0) + 1), "{engine} {cached}");
    }
}
