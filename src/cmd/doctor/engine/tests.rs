//! What is said of facts that no simulated engine can be brought to, and of whole answers of real ones.

use std::time::{Duration, SystemTime};

use super::facts::*;
use super::*;
use crate::block::Windows;
use crate::cmd::doctor::finding::Level;
use crate::engine_client::{EngineError, EngineModel, EventsOfRank, MetricsPage};
use crate::kv_events::listen::Heard;
use crate::kv_events::wire::{Batch, Event, Stored, Tokens};
use crate::parity::{Difference, Verdict, What};
use crate::worker::{Attach, BlockSize, DpRank, Endpoint, EventSource, Worker, WorkerId};

const METRICS: &str = include_str!("../../../../tests/data/engines/metrics-vllm.txt");

fn tokens() -> Vec<u32> {
    (0..100).collect()
}

fn heard(stored: Stored, topic: &str, rank: Option<u32>) -> Heard {
    let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
    let batch = Batch {
        timestamp: 1_800_000_000.0,
        events: vec![Event::Stored(Box::new(stored))],
        rank,
    };
    Heard {
        topic: topic.to_owned(),
        seq: 0,
        batch: Ok(batch),
        at,
    }
}

fn stored(tokens: &[u32], block_size: u32) -> Stored {
    let names = (0..tokens.len() as u64 / u64::from(block_size)).map(crate::block::EngineHash);
    Stored {
        hashes: names.collect(),
        tokens: Tokens {
            ids: tokens.to_vec(),
            bigrams: false,
        },
        block_size,
        ..Stored::default()
    }
}

/// A worker that is well: a real engine's measures, and a canary whose blocks came.
fn well() -> WorkerFacts {
    let endpoint = Endpoint(([10, 0, 0, 7], 8000).into());
    let mut worker = Worker::new(
        WorkerId(1),
        endpoint,
        "m".into(),
        BlockSize::new(32).unwrap(),
    );
    let source = EventSource {
        endpoint: "tcp://10.0.0.7:5557".to_owned(),
        topic: "kv@".to_owned(),
        attach: Attach::Connect,
        replay: Some("tcp://10.0.0.7:5558".to_owned()),
    };
    worker.event_sources = vec![source.clone()];
    let publisher = EventsOfRank {
        rank: 0,
        enabled: true,
        endpoint: "tcp://*:5557".to_owned(),
        replay_endpoint: Some("tcp://*:5558".to_owned()),
        topic: "kv@a".to_owned(),
    };
    let rank = RankFacts {
        rank: DpRank(0),
        source: Some(source),
        attached: Some(Attached::As(Attach::Connect)),
        heard: vec![heard(stored(&tokens()[..96], 32), "kv@a", Some(0))],
        canary: Some(Ok(Canary {
            tokens: Some(tokens()),
            prompt_tokens: Some(100),
            cached: Some(96),
        })),
        replay: Some(Some(0)),
        patience: Duration::from_secs(5),
    };
    WorkerFacts {
        origin: WorkerOrigin::Listed,
        configured: ConfiguredCache {
            block_size: Some(worker.block_size),
            total_kv_blocks: None,
        },
        worker,
        sources_learned: false,
        windows: Windows::Plain,
        adapters: Vec::new(),
        images_of: None,
        blocks_wanted: false,
        health: Ok(()),
        date: None,
        models: Ok(vec![EngineModel {
            id: "m".to_owned(),
            root: None,
            parent: None,
            max_model_len: None,
        }]),
        metrics: Ok(MetricsPage::read(METRICS)),
        publishers: Ok(vec![publisher]),
        tokens: Verdict::Agrees {
            compared: 8,
            skipped: Default::default(),
        },
        met: None,
        handed_over: None,
        fetched_from_afar: false,
        ranks: vec![rank],
        overdue: None,
    }
}

/// What is wrong with a worker that was well before something was changed.
fn wrong(change: impl FnOnce(&mut WorkerFacts)) -> Vec<(Level, &'static str, String)> {
    let mut facts = well();
    change(&mut facts);
    let found = examine(&facts)
        .into_iter()
        .filter(|one| matches!(one.level, Level::Error | Level::Warning));
    found
        .map(|one| {
            (
                one.level,
                one.check,
                format!("{} | {}", one.seen, one.mend.unwrap_or_default()),
            )
        })
        .collect()
}

/// Exactly one thing is wrong, and these words say so.
fn only(level: Level, check: &str, words: &[&str], change: impl FnOnce(&mut WorkerFacts)) {
    let found = wrong(change);
    let [(found_level, found_check, text)] = &found[..] else {
        panic!("{check}: {found:#?}")
    };
    assert_eq!((*found_level, *found_check), (level, check), "{text}");
    for word in words {
        assert!(text.contains(word), "{check}: no {word:?} in {text}");
    }
}

#[test]
fn of_a_worker_that_is_well_nothing_is_wrong() {
    assert_eq!(wrong(|_| {}), []);
    assert!(examine(&well()).iter().all(|one| one.level == Level::Ok));
}

/// A pod is described by its pool, which knows ports and no endpoints.
#[test]
fn pods_are_named_with_section_of_their_pool() {
    let of_pod = |facts: &mut WorkerFacts| {
        facts.origin = WorkerOrigin::Pod {
            pod: "inference/p1".to_owned(),
            pool: "p".to_owned(),
        };
    };
    let mut facts = well();
    of_pod(&mut facts);
    facts.health = Err(EngineError::Timeout);
    let finding = examine(&facts)
        .into_iter()
        .find(|one| one.level == Level::Error)
        .unwrap();
    assert_eq!(finding.subject, "pod inference/p1");
    assert!(finding.mend.unwrap().contains("the ports of the pool p"));
    let section = "`worker` of the pool p (it describes pod inference/p1)";
    only(
        Level::Warning,
        "events.configured",
        &["write `kv_events: {port: 5557, ", section],
        |facts| {
            of_pod(facts);
            facts.ranks[0].source = None;
        },
    );
    only(
        Level::Warning,
        "events.replay",
        &["write `replay_port: 5558` in the `kv_events`", section],
        |facts| {
            of_pod(facts);
            facts.ranks[0].source.as_mut().unwrap().replay = None;
        },
    );
    only(
        Level::Error,
        "events.attached",
        &["publishes at tcp://*:6000", "write `port: 6000`", section],
        |facts| {
            of_pod(facts);
            facts.ranks[0].attached = Some(Attached::Refused("connection refused".to_owned()));
            facts.publishers.as_mut().unwrap()[0].endpoint = "tcp://*:6000".to_owned();
        },
    );
}

#[test]
fn both_sides_of_a_connection_must_not_do_the_same() {
    let listens_elsewhere = |theirs: &'static str| {
        move |facts: &mut WorkerFacts| {
            facts.ranks[0].attached = Some(Attached::Refused("connection refused".to_owned()));
            facts.publishers.as_mut().unwrap()[0].endpoint = theirs.to_owned();
        }
    };
    let words = [
        "vLLM connects unless",
        "\"endpoint\": \"tcp://*:5557\"",
        "write `attach: bind` in the `kv_events` of worker 1",
    ];
    only(
        Level::Error,
        "events.attached",
        &words,
        listens_elsewhere("tcp://10.0.0.7:5557"),
    );
    let words = [
        "the engine publishes at tcp://*:6000",
        "write `endpoint: \"tcp://10.0.0.7:6000\"` in the `kv_events` of worker 1",
    ];
    only(
        Level::Error,
        "events.attached",
        &words,
        listens_elsewhere("tcp://*:6000"),
    );
    let words = [
        "`kv_events: {endpoint: \"tcp://10.0.0.7:5557\", topic: \"kv@\", attach: bind}` of worker 1",
    ];
    only(Level::Error, "events.attached", &words, |facts| {
        listens_elsewhere("tcp://10.0.0.7:5557")(facts);
        facts.sources_learned = true;
    });
    only(
        Level::Error,
        "events.attached",
        &["no engine connected", "so that it connects"],
        |facts| {
            facts.ranks[0].attached = Some(Attached::Nobody);
        },
    );
    let words = [
        "both sides bind",
        "write `attach: connect` and `endpoint: \"tcp://10.0.0.7:5557\"`",
    ];
    only(Level::Error, "events.attached", &words, |facts| {
        facts.ranks[0].attached = Some(Attached::Elsewhere("tcp://10.0.0.7:5557".to_owned()));
    });
    let taken = wrong(|facts| facts.ranks[0].attached = Some(Attached::Taken("in use".to_owned())));
    assert_eq!(taken, [], "somebody else has it, who may be us");
}

#[test]
fn an_engine_that_says_it_is_silent_is_told_how_to_speak() {
    let words = [
        "publishes no KV events",
        "\"replay_endpoint\": \"tcp://*:5558\"",
        "\"topic\": \"kv@\"",
    ];
    only(Level::Error, "events.published", &words, |facts| {
        facts.publishers = Ok(Vec::new())
    });
    only(Level::Error, "events.published", &words, |facts| {
        facts.publishers.as_mut().unwrap()[0].enabled = false
    });
}

#[test]
fn what_came_of_the_canary_is_compared() {
    let with = |message: Heard| move |facts: &mut WorkerFacts| facts.ranks[0].heard = vec![message];
    let ours = tokens();
    let words = ["under the topic \"other\"", "write `topic: \"other\"`"];
    only(
        Level::Error,
        "events.topic",
        &words,
        with(heard(stored(&ours[..96], 32), "other", Some(0))),
    );
    let words = [
        "those of rank 3",
        "write `data_parallel: {start: 3, size: 1}` for worker 1",
    ];
    only(
        Level::Error,
        "events.rank",
        &words,
        with(heard(stored(&ours[..96], 32), "kv@a", Some(3))),
    );
    let mut theirs = ours[..96].to_vec();
    theirs[40] = 7;
    let words = ["token 40 of the canary is 40 for us and 7 in the event"];
    only(
        Level::Error,
        "events.tokens",
        &words,
        with(heard(stored(&theirs, 32), "kv@a", None)),
    );
    let words = ["1 other messages did", "start it with `--kv-events-config"];
    only(
        Level::Error,
        "events.arrive",
        &words,
        with(heard(stored(&[9, 9], 1), "kv@a", None)),
    );
    let mut bigrams = stored(&ours[..96], 32);
    bigrams.tokens = Tokens {
        ids: ours[..97].to_vec(),
        bigrams: true,
    };
    let words = ["pairs of tokens", "write `eagle: true` for the model m"];
    only(
        Level::Error,
        "events.hashes",
        &words,
        with(heard(bigrams, "kv@a", None)),
    );
    let salted = Stored {
        cache_salt: Some("s".to_owned()),
        ..stored(&ours[..96], 32)
    };
    only(
        Level::Error,
        "events.hashes",
        &["0 of 3 blocks"],
        with(heard(salted, "kv@a", None)),
    );
    let garbage = Heard {
        batch: Err("not a batch".to_owned()),
        ..heard(Stored::default(), "kv@a", None)
    };
    only(
        Level::Error,
        "events.arrive",
        &["messages come that cannot be read: not a batch"],
        with(garbage),
    );
    // Where the engine has no page of measures, the events tell.
    only(
        Level::Warning,
        "engine.block_size",
        &["16 tokens by its events", "write `block_size: 16`"],
        |facts| {
            facts.metrics = Err(EngineError::NotOffered(404));
            facts.ranks[0].heard = vec![heard(stored(&ours[..96], 16), "kv@a", None)];
        },
    );
}

#[test]
fn reuse_is_as_much_as_was_to_be_expected() {
    let cached = |cached: usize| {
        move |facts: &mut WorkerFacts| {
            let Some(Ok(canary)) = &mut facts.ranks[0].canary else {
                panic!("no canary")
            };
            canary.cached = Some(cached);
        }
    };
    only(
        Level::Error,
        "canary.reused",
        &["found 0 cached; 96 were"],
        cached(0),
    );
    only(
        Level::Warning,
        "canary.reused",
        &["found 64 cached; 96 were"],
        cached(64),
    );
    only(
        Level::Error,
        "canary.counted",
        &["has 100 tokens for us, and 99 for the engine"],
        |facts| {
            let Some(Ok(canary)) = &mut facts.ranks[0].canary else {
                panic!("no canary")
            };
            canary.prompt_tokens = Some(99);
        },
    );
}

/// A page of measures with one line per rank: number, tokens per block, blocks.
fn page_of(ranks: &[(u32, u32, u64)]) -> Result<MetricsPage, EngineError> {
    let line = |(rank, size, blocks): &(u32, u32, u64)| {
        format!(
            "vllm:cache_config_info{{block_size=\"{size}\",engine=\"{rank}\",num_gpu_blocks=\"{blocks}\"}} 1.0\n"
        )
    };
    Ok(MetricsPage::read(
        &ranks.iter().map(line).collect::<String>(),
    ))
}

#[test]
fn what_any_rank_has_otherwise_is_told() {
    let sized = |facts: &mut WorkerFacts, count: u32| {
        facts.worker.ranks.size = std::num::NonZeroU32::new(count).unwrap();
        facts.publishers = Err(EngineError::NotOffered(404));
    };
    let words = [
        "the data-parallel ranks 1 by /metrics, configured are 1 from 0",
        "`data_parallel: {start: 1, size: 1}`",
    ];
    only(Level::Error, "engine.ranks", &words, |facts| {
        facts.metrics = page_of(&[(1, 32, 9)])
    });
    let words = ["blocks have 16 tokens by /metrics, configured are 32"];
    only(Level::Warning, "engine.block_size", &words, |facts| {
        sized(facts, 2);
        facts.metrics = page_of(&[(0, 32, 9), (1, 16, 18)]);
    });
    // In blocks of ours: 64 of 16 tokens are 32 of 32.
    for (configured, wrong_by) in [
        (32, None),
        (
            64,
            Some("the engine has 32 blocks of 32 tokens per rank, configured are 64"),
        ),
    ] {
        let found = wrong(|facts| {
            sized(facts, 2);
            facts.configured.total_kv_blocks = Some(configured);
            facts.metrics = page_of(&[(0, 16, 80), (1, 16, 64)]);
        });
        let of_capacity = found
            .iter()
            .find(|(_, check, _)| *check == "engine.capacity");
        assert_eq!(of_capacity.is_some(), wrong_by.is_some(), "{found:?}");
        assert!(
            of_capacity.is_none_or(|(.., text)| text.contains(wrong_by.unwrap_or_default())),
            "{found:?}"
        );
    }
}

#[test]
fn learned_settings_are_not_called_configured() {
    let words = [
        "the model m has the default of 32",
        "| write `block_size: 16` for the model m",
    ];
    only(Level::Warning, "engine.block_size", &words, |facts| {
        facts.configured.block_size = None;
        facts.metrics = page_of(&[(0, 16, 18)]);
    });
    let mut facts = well();
    // Filled in from the engine's own page.
    facts.worker.capacity.total_kv_blocks = Some(9);
    facts.metrics = page_of(&[(0, 32, 9)]);
    let capacity = examine(&facts)
        .into_iter()
        .find(|one| one.check == "engine.capacity")
        .unwrap();
    assert_eq!(
        (capacity.level, &capacity.seen[..]),
        (Level::Ok, "9 blocks per rank, learned from the engine")
    );
    // Two ranks of 3000 blocks, as vLLM 0.32 shows them.
    let page = "vllm:cache_config_info{block_size=\"32\",engine=\"0\",kv_cache_size_tokens=\"96000\",num_gpu_blocks=\"6000\"} 1
vllm:cache_config_info{block_size=\"32\",engine=\"1\",kv_cache_size_tokens=\"96000\",num_gpu_blocks=\"6000\"} 1";
    let found = wrong(|facts| {
        facts.worker.ranks.size = std::num::NonZeroU32::new(2).unwrap();
        facts.publishers = Err(EngineError::NotOffered(404));
        facts.configured.total_kv_blocks = Some(3000);
        facts.metrics = Ok(MetricsPage::read(page));
    });
    assert!(
        found
            .iter()
            .all(|(_, check, _)| *check != "engine.capacity"),
        "{found:?}"
    );
}

#[test]
fn images_have_to_be_of_the_same_model_on_both_sides() {
    let of = |ours: &'static str| {
        move |facts: &mut WorkerFacts| {
            facts.images_of = Some(ours.to_owned());
            facts.models.as_mut().unwrap()[0].root = Some("/models/qwen".to_owned());
        }
    };
    assert_eq!(wrong(of("/models/qwen")), []);
    let words = [
        "its images are those of /models/qwen, and for us of m",
        "write `media: {model: /models/qwen, ..}`",
    ];
    only(Level::Error, "engine.image_names", &words, of("m"));
}

#[test]
fn clocks_are_compared_by_events_and_else_by_the_second() {
    let far = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_600);
    only(
        Level::Warning,
        "engine.clock",
        &["600 s behind ours", "time server"],
        |facts| {
            facts.ranks[0].heard[0].at = far;
        },
    );
    only(
        Level::Warning,
        "engine.clock",
        &["600 s ahead of ours"],
        |facts| {
            facts.ranks[0].heard[0].batch.as_mut().unwrap().timestamp += 600.0;
        },
    );
    let without = |facts: &mut WorkerFacts| facts.ranks[0].canary = None;
    only(
        Level::Warning,
        "engine.clock",
        &["600 s behind ours"],
        |facts| {
            without(facts);
            facts.ranks[0].heard.clear();
            facts.date = Some((
                SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000),
                far,
            ));
        },
    );
}

#[test]
fn first_differing_tokens_are_named_on_both_sides() {
    let words = [
        "canary tools: token 17 is 4 for us and nothing for the engine",
        "we have \"b\", the engine \"c\"",
    ];
    only(Level::Error, "engine.tokenizer", &words, |facts| {
        let difference = Difference {
            what: What::Length,
            canary: Some("tools".to_owned()),
            at: 17,
            block: 1,
            ours: Some(4),
            theirs: None,
            our_text: Some("b".to_owned()),
            their_text: Some("c".to_owned()),
        };
        facts.tokens = Verdict::Differs {
            difference: Box::new(difference),
        };
    });
}

#[test]
fn of_an_engine_that_does_not_answer_nothing_else_is_said() {
    let found = wrong(|facts| {
        facts.health = Err(EngineError::Unreachable("connection refused".to_owned()))
    });
    assert_eq!(
        found.iter().map(|(_, check, _)| *check).collect::<Vec<_>>(),
        ["engine.reachable"]
    );
    let found = wrong(|facts| {
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
fn a_worker_that_nobody_can_take_over_from_is_found() {
    let params = |host: &str| serde_json::json!({"kv_transfer_params": {"remote_host": host, "remote_port": 5600}});
    let another = serde_json::json!({"kv_transfer_params": {"of": "another connector"}});
    for (answer, afar) in [
        (params("10.0.0.7"), true),
        (params("localhost"), false),
        (another, true),
    ] {
        let told = |facts: &mut WorkerFacts| {
            (facts.handed_over, facts.fetched_from_afar) = (Some(Ok(answer.clone())), afar)
        };
        assert_eq!(wrong(told), [], "{answer}");
    }
    for host in ["localhost", "127.0.0.1", "::1"] {
        only(
            Level::Error,
            "engine.handover",
            &[host, "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.7"],
            |facts| {
                (facts.handed_over, facts.fetched_from_afar) = (Some(Ok(params(host))), true);
            },
        );
    }
    only(
        Level::Error,
        "engine.handover",
        &["says nothing of it", "--kv-transfer-config"],
        |facts| {
            facts.handed_over = Some(Ok(
                serde_json::json!({"kv_transfer_params": null, "choices": []}),
            ));
        },
    );
    only(Level::Error, "engine.handover", &["status 500"], |facts| {
        facts.handed_over = Some(Err(EngineError::Status {
            status: 500,
            message: None,
        }));
    });
    assert_eq!(
        wrong(|facts| facts.handed_over = Some(Err(EngineError::Timeout))),
        []
    );
}

#[test]
fn a_worker_that_nobody_can_meet_is_found() {
    assert_eq!(wrong(|facts| facts.met = Some(Met::Somebody)), []);
    let words = [
        "port 8998 of 10.0.0.7",
        "--disaggregation-bootstrap-port 8998",
    ];
    only(Level::Error, "engine.bootstrap", &words, |facts| {
        facts.met = Some(Met::Nobody)
    });
    only(Level::Warning, "engine.bootstrap", &["no route"], |facts| {
        facts.met = Some(Met::Unknown("no route".to_owned()));
    });
}
