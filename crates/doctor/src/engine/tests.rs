//! Findings for facts that no simulated engine produces, and for complete responses of real
//! engines.

mod canary;
mod settings;

use std::time::{Duration, SystemTime};

use warmroute_core::parity::{CanaryVerdict, ComparedItem, TokenDifference};
use warmroute_core::worker::{
    BlockSize, DpRank, EventSource, SocketAttach, Worker, WorkerEndpoint, WorkerId,
};
use warmroute_engines::engine_client::{EngineError, EngineModel, MetricsPage, RankEventSource};
use warmroute_engines::kv_events::event_probe::ProbedBatch;
use warmroute_engines::kv_events::wire::{EngineEvent, EventBatch, EventTokens, StoredEvent};

use super::facts::*;
use super::*;
use crate::finding::FindingLevel;

const METRICS: &str = include_str!("../../../../tests/data/engines/metrics-vllm.txt");

fn tokens() -> Vec<u32> {
    (0..100).collect()
}

fn message(stored: StoredEvent, topic: &str, rank: Option<u32>) -> ProbedBatch {
    let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
    let batch = EventBatch {
        timestamp: 1_800_000_000.0,
        events: vec![EngineEvent::Stored(Box::new(stored))],
        rank,
        unknown_fields: 0,
    };
    ProbedBatch {
        topic: topic.to_owned(),
        seq: 0,
        batch: Ok(batch),
        received_at: at,
    }
}

fn stored(tokens: &[u32], block_size: u32) -> StoredEvent {
    let names =
        (0..tokens.len() as u64 / u64::from(block_size)).map(warmroute_core::block::EngineHash);
    StoredEvent {
        hashes: names.collect(),
        tokens: EventTokens {
            ids: tokens.to_vec(),
            bigrams: false,
        },
        block_size,
        ..StoredEvent::default()
    }
}

fn event_source() -> EventSource {
    EventSource {
        endpoint: "tcp://10.0.0.7:5557".to_owned(),
        topic: "kv@".to_owned(),
        attach: SocketAttach::Connect,
        replay: Some("tcp://10.0.0.7:5558".to_owned()),
    }
}

/// Returns the facts of a healthy rank: the blocks of the canary arrived.
fn healthy_rank() -> RankFacts {
    RankFacts {
        rank: DpRank(0),
        source: Some(event_source()),
        attachment: Some(AttachOutcome::Attached(SocketAttach::Connect)),
        messages: vec![message(stored(&tokens()[..96], 32), "kv@a", Some(0))],
        canary: Some(Ok(CanaryReply {
            tokens: Some(tokens()),
            prompt_tokens: Some(100),
            cached: Some(96),
        })),
        replay: Some(Some(0)),
        listen_timeout: Duration::from_secs(5),
    }
}

/// Returns the facts of a healthy worker, with the metrics page of a real engine.
fn healthy_worker() -> WorkerFacts {
    let endpoint = WorkerEndpoint(([10, 0, 0, 7], 8000).into());
    let mut worker = Worker::new(
        WorkerId(1),
        endpoint,
        "m".into(),
        BlockSize::new(32).unwrap(),
    );
    worker.event_sources = vec![event_source()];
    let publisher = RankEventSource {
        rank: 0,
        enabled: true,
        endpoint: "tcp://*:5557".to_owned(),
        replay_endpoint: Some("tcp://*:5558".to_owned()),
        topic: "kv@a".to_owned(),
    };
    WorkerFacts {
        origin: WorkerOrigin::Listed,
        configured: ConfiguredCache {
            block_size: Some(worker.block_size),
            total_kv_blocks: None,
        },
        worker,
        has_discovered_sources: false,
        adapters: Vec::new(),
        has_discovery: true,
        image_model: None,
        needs_capacity: false,
        health: Ok(()),
        clock: None,
        models: Ok(vec![EngineModel {
            id: "m".to_owned(),
            root: None,
            parent: None,
            max_model_len: None,
        }]),
        metrics: Ok(MetricsPage::parse(METRICS)),
        publishers: Ok(vec![publisher]),
        parity: CanaryVerdict::Agrees {
            compared: 8,
            skipped: Default::default(),
        },
        has_agreeing_worker: false,
        bootstrap: None,
        kv_handoff: None,
        has_remote_decoders: false,
        ranks: vec![healthy_rank()],
        overdue_step: None,
    }
}

/// Returns the errors and warnings about a healthy worker after one change to its facts.
fn problems(change: impl FnOnce(&mut WorkerFacts)) -> Vec<(FindingLevel, &'static str, String)> {
    let mut facts = healthy_worker();
    change(&mut facts);
    let found = check_worker(&facts)
        .into_iter()
        .filter(|one| matches!(one.level, FindingLevel::Error | FindingLevel::Warning));
    found
        .map(|one| {
            (
                one.level,
                one.check,
                format!("{} | {}", one.message, one.fix.unwrap_or_default()),
            )
        })
        .collect()
}

/// Asserts that there is exactly one problem and that its text contains these words.
fn assert_problem(
    level: FindingLevel,
    check: &str,
    words: &[&str],
    change: impl FnOnce(&mut WorkerFacts),
) {
    let found = problems(change);
    let [(found_level, found_check, text)] = &found[..] else {
        panic!("{check}: {found:#?}")
    };
    assert_eq!((*found_level, *found_check), (level, check), "{text}");
    for word in words {
        assert!(text.contains(word), "{check}: no {word:?} in {text}");
    }
}

#[test]
fn healthy_worker_has_no_problems() {
    assert_eq!(problems(|_| {}), []);
    assert!(
        check_worker(&healthy_worker())
            .iter()
            .all(|one| one.level == FindingLevel::Ok)
    );
}

/// A pool describes its pods by ports, without endpoints.
#[test]
fn pods_are_named_with_section_of_their_pool() {
    let of_pod = |facts: &mut WorkerFacts| {
        facts.origin = WorkerOrigin::Pod {
            pod: "inference/p1".to_owned(),
            pool: "p".to_owned(),
        };
    };
    let mut facts = healthy_worker();
    of_pod(&mut facts);
    facts.health = Err(EngineError::Timeout);
    let finding = check_worker(&facts)
        .into_iter()
        .find(|one| one.level == FindingLevel::Error)
        .unwrap();
    assert_eq!(finding.subject, "pod inference/p1 at 10.0.0.7:8000");
    assert!(finding.fix.unwrap().contains("the ports of the pool p"));
    let section = "`worker` of the pool p (it describes pod inference/p1)";
    assert_problem(
        FindingLevel::Warning,
        "events.configured",
        &["write `kv_events: {port: 5557, ", section],
        |facts| {
            of_pod(facts);
            facts.ranks[0].source = None;
        },
    );
    assert_problem(
        FindingLevel::Warning,
        "events.replay",
        &["write `replay_port: 5558` in the `kv_events`", section],
        |facts| {
            of_pod(facts);
            facts.ranks[0].source.as_mut().unwrap().replay = None;
        },
    );
    assert_problem(
        FindingLevel::Error,
        "events.attached",
        &["publishes at tcp://*:6000", "write `port: 6000`", section],
        |facts| {
            of_pod(facts);
            facts.ranks[0].attachment = Some(AttachOutcome::ConnectRefused(
                "connection refused".to_owned(),
            ));
            facts.publishers.as_mut().unwrap()[0].endpoint = "tcp://*:6000".to_owned();
        },
    );
}

#[test]
fn clock_skew_uses_events_before_date_header() {
    let far = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_600);
    assert_problem(
        FindingLevel::Warning,
        "engine.clock",
        &["600 s behind the local one", "time server"],
        |facts| {
            facts.ranks[0].messages[0].received_at = far;
        },
    );
    assert_problem(
        FindingLevel::Warning,
        "engine.clock",
        &["600 s ahead of the local one"],
        |facts| {
            facts.ranks[0].messages[0].batch.as_mut().unwrap().timestamp += 600.0;
        },
    );
    let without = |facts: &mut WorkerFacts| facts.ranks[0].canary = None;
    assert_problem(
        FindingLevel::Warning,
        "engine.clock",
        &["600 s behind the local one"],
        |facts| {
            without(facts);
            facts.ranks[0].messages.clear();
            facts.clock = Some((
                SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000),
                far,
            ));
        },
    );
}

#[test]
fn unreachable_engine_skips_further_checks() {
    let found = problems(|facts| {
        facts.health = Err(EngineError::Unreachable("connection refused".to_owned()))
    });
    assert_eq!(
        found.iter().map(|(_, check, _)| *check).collect::<Vec<_>>(),
        ["engine.reachable"]
    );
    let found = problems(|facts| {
        facts.health = Err(EngineError::Status {
            status: 503,
            message: None,
        })
    });
    assert_eq!(
        found.iter().map(|(_, check, _)| *check).collect::<Vec<_>>(),
        ["engine.reachable"]
    );
}

#[test]
fn unreachable_kv_handoff_host_is_an_error() {
    let params = |host: &str| serde_json::json!({"kv_transfer_params": {"remote_host": host, "remote_port": 5600}});
    let another = serde_json::json!({"kv_transfer_params": {"of": "another connector"}});
    for (answer, has_remote_decoders) in [
        (params("10.0.0.7"), true),
        (params("localhost"), false),
        (another, true),
    ] {
        let with_answer = |facts: &mut WorkerFacts| {
            (facts.kv_handoff, facts.has_remote_decoders) =
                (Some(Ok(answer.clone())), has_remote_decoders)
        };
        assert_eq!(problems(with_answer), [], "{answer}");
    }
    for host in ["localhost", "127.0.0.1", "::1"] {
        assert_problem(
            FindingLevel::Error,
            "engine.kv_handoff",
            &[host, "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.7"],
            |facts| {
                (facts.kv_handoff, facts.has_remote_decoders) = (Some(Ok(params(host))), true);
            },
        );
    }
    assert_problem(
        FindingLevel::Error,
        "engine.kv_handoff",
        &["has no kv_transfer_params", "--kv-transfer-config"],
        |facts| {
            facts.kv_handoff = Some(Ok(
                serde_json::json!({"kv_transfer_params": null, "choices": []}),
            ));
        },
    );
    assert_problem(
        FindingLevel::Error,
        "engine.kv_handoff",
        &["status 500"],
        |facts| {
            facts.kv_handoff = Some(Err(EngineError::Status {
                status: 500,
                message: None,
            }));
        },
    );
    assert_eq!(
        problems(|facts| facts.kv_handoff = Some(Err(EngineError::Timeout))),
        []
    );
}

#[test]
fn unreachable_bootstrap_port_is_an_error() {
    assert_eq!(
        problems(|facts| facts.bootstrap = Some(BootstrapReachability::Listening)),
        []
    );
    let words = [
        "port 8998 at 10.0.0.7",
        "--disaggregation-bootstrap-port 8998",
    ];
    assert_problem(FindingLevel::Error, "engine.bootstrap", &words, |facts| {
        facts.bootstrap = Some(BootstrapReachability::Refused)
    });
    assert_problem(
        FindingLevel::Warning,
        "engine.bootstrap",
        &["no route"],
        |facts| {
            facts.bootstrap = Some(BootstrapReachability::Unknown("no route".to_owned()));
        },
    );
}
