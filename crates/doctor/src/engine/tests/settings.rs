//! Findings about settings that differ between the engine and the configuration.

use super::*;

#[test]
fn both_sides_binding_or_connecting_is_an_error() {
    let listens_elsewhere = |theirs: &'static str| {
        move |facts: &mut WorkerFacts| {
            facts.ranks[0].attachment = Some(AttachOutcome::ConnectRefused(
                "connection refused".to_owned(),
            ));
            facts.publishers.as_mut().unwrap()[0].endpoint = theirs.to_owned();
        }
    };
    let words = [
        "vLLM connects unless",
        "\"endpoint\": \"tcp://*:5557\"",
        "write `attach: bind` in the `kv_events` of worker 1",
    ];
    assert_problem(
        FindingLevel::Error,
        "events.attached",
        &words,
        listens_elsewhere("tcp://10.0.0.7:5557"),
    );
    let words = [
        "the engine publishes at tcp://*:6000",
        "write `endpoint: \"tcp://10.0.0.7:6000\"` in the `kv_events` of worker 1",
    ];
    assert_problem(
        FindingLevel::Error,
        "events.attached",
        &words,
        listens_elsewhere("tcp://*:6000"),
    );
    let words = [
        "`kv_events: {endpoint: \"tcp://10.0.0.7:5557\", topic: \"kv@\", attach: bind}` of worker \
        1",
    ];
    assert_problem(FindingLevel::Error, "events.attached", &words, |facts| {
        listens_elsewhere("tcp://10.0.0.7:5557")(facts);
        facts.has_discovered_sources = true;
    });
    assert_problem(
        FindingLevel::Error,
        "events.attached",
        &["no engine connected", "so that it connects"],
        |facts| {
            facts.ranks[0].attachment = Some(AttachOutcome::NoPeer);
        },
    );
    let words = [
        "both sides bind",
        "write `attach: connect` and `endpoint: \"tcp://10.0.0.7:5557\"`",
    ];
    assert_problem(FindingLevel::Error, "events.attached", &words, |facts| {
        facts.ranks[0].attachment =
            Some(AttachOutcome::EngineBinds("tcp://10.0.0.7:5557".to_owned()));
    });
    let found = problems(|facts| {
        facts.ranks[0].attachment = Some(AttachOutcome::BindRefused("in use".to_owned()))
    });
    assert_eq!(found, [], "another process may use the port");
}

#[test]
fn disabled_publisher_fix_names_the_flag() {
    let words = [
        "publishes no KV events",
        "\"replay_endpoint\": \"tcp://*:5558\"",
        "\"topic\": \"kv@\"",
    ];
    assert_problem(FindingLevel::Error, "events.published", &words, |facts| {
        facts.publishers = Ok(Vec::new())
    });
    assert_problem(FindingLevel::Error, "events.published", &words, |facts| {
        facts.publishers.as_mut().unwrap()[0].enabled = false
    });
}

/// Builds a metrics page with one line per tuple of rank, tokens per block, and blocks.
fn page_of(ranks: &[(u32, u32, u64)]) -> Result<MetricsPage, EngineError> {
    let line = |(rank, size, blocks): &(u32, u32, u64)| {
        format!(
            "vllm:cache_config_info{{block_size=\"{size}\",engine=\"{rank}\",num_gpu_blocks=\"{blocks}\"}} 1.0\n"
        )
    };
    Ok(MetricsPage::parse(
        &ranks.iter().map(line).collect::<String>(),
    ))
}

#[test]
fn mismatch_of_any_rank_is_reported() {
    let sized = |facts: &mut WorkerFacts, count: u32| {
        facts.worker.ranks.size = std::num::NonZeroU32::new(count).unwrap();
        facts.publishers = Err(EngineError::NotOffered(404));
    };
    let words = [
        "the data-parallel ranks 1 by /metrics, configured are 1 from 0",
        "`data_parallel: {start: 1, size: 1}`",
    ];
    assert_problem(FindingLevel::Error, "engine.ranks", &words, |facts| {
        facts.metrics = page_of(&[(1, 32, 9)])
    });
    let words = ["blocks have 16 tokens by /metrics, configured are 32"];
    assert_problem(
        FindingLevel::Warning,
        "engine.block_size",
        &words,
        |facts| {
            sized(facts, 2);
            facts.metrics = page_of(&[(0, 32, 9), (1, 16, 18)]);
        },
    );
    // The capacity is converted to the configured block size: 64 blocks of 16 tokens are 32 blocks
    // of 32.
    for (configured, expected_text) in [
        (32, None),
        (
            64,
            Some("the engine has 32 blocks of 32 tokens per rank, configured are 64"),
        ),
    ] {
        let found = problems(|facts| {
            sized(facts, 2);
            facts.configured.total_kv_blocks = Some(configured);
            facts.metrics = page_of(&[(0, 16, 80), (1, 16, 64)]);
        });
        let of_capacity = found
            .iter()
            .find(|(_, check, _)| *check == "engine.capacity");
        assert_eq!(of_capacity.is_some(), expected_text.is_some(), "{found:?}");
        assert!(
            of_capacity.is_none_or(|(.., text)| text.contains(expected_text.unwrap_or_default())),
            "{found:?}"
        );
    }
}

#[test]
fn discovered_settings_are_not_called_configured() {
    let words = [
        "the model m has the default of 32",
        "| write `block_size: 16` for the model m",
    ];
    assert_problem(
        FindingLevel::Warning,
        "engine.block_size",
        &words,
        |facts| {
            facts.configured.block_size = None;
            facts.metrics = page_of(&[(0, 16, 18)]);
        },
    );
    let mut facts = healthy_worker();
    // This value was filled in from the metrics of the engine.
    facts.worker.capacity.total_kv_blocks = Some(9);
    facts.metrics = page_of(&[(0, 32, 9)]);
    let capacity = check_worker(&facts)
        .into_iter()
        .find(|one| one.check == "engine.capacity")
        .unwrap();
    assert_eq!(
        (capacity.level, &capacity.message[..]),
        (
            FindingLevel::Ok,
            "9 blocks per rank, reported by the engine"
        )
    );
    // A page of two ranks with 3000 blocks each, in the format of vLLM 0.32.
    let page = "vllm:cache_config_info{block_size=\"32\",engine=\"0\",kv_cache_size_tokens=\"96000\",num_gpu_blocks=\"6000\"} 1
vllm:cache_config_info{block_size=\"32\",engine=\"1\",kv_cache_size_tokens=\"96000\",num_gpu_blocks=\"6000\"} 1";
    let found = problems(|facts| {
        facts.worker.ranks.size = std::num::NonZeroU32::new(2).unwrap();
        facts.publishers = Err(EngineError::NotOffered(404));
        facts.configured.total_kv_blocks = Some(3000);
        facts.metrics = Ok(MetricsPage::parse(page));
    });
    assert!(
        found
            .iter()
            .all(|(_, check, _)| *check != "engine.capacity"),
        "{found:?}"
    );
}

#[test]
fn image_model_mismatch_is_an_error() {
    let with_model = |ours: &'static str| {
        move |facts: &mut WorkerFacts| {
            facts.image_model = Some(ours.to_owned());
            facts.models.as_mut().unwrap()[0].root = Some("/models/qwen".to_owned());
        }
    };
    assert_eq!(problems(with_model("/models/qwen")), []);
    let words = [
        "images with the model name /models/qwen, warmroute with m",
        "write `multimodal: {model: /models/qwen, ..}`",
    ];
    assert_problem(
        FindingLevel::Error,
        "engine.image_names",
        &words,
        with_model("m"),
    );
}

#[test]
fn adapters_of_other_workers_are_a_note() {
    let serves_adapter = |facts: &mut WorkerFacts| {
        let Ok(models) = &mut facts.models else {
            panic!("no models")
        };
        let base = models[0].clone();
        models.push(EngineModel {
            id: "sql".to_owned(),
            parent: Some(base.id.clone()),
            ..base
        });
    };
    let discovered = problems(serves_adapter);
    assert!(discovered.is_empty(), "{discovered:?}");
    let undiscovered = problems(|facts| {
        serves_adapter(facts);
        facts.has_discovery = false;
    });
    assert_eq!(undiscovered.len(), 1, "{undiscovered:?}");
    let mut facts = healthy_worker();
    serves_adapter(&mut facts);
    facts.adapters = vec!["sql".into(), "law".into()];
    let mut elsewhere = check_worker(&facts);
    elsewhere.retain(|finding| finding.check == "engine.adapters");
    assert_eq!(elsewhere.len(), 1, "{elsewhere:?}");
    assert_eq!(elsewhere[0].level, FindingLevel::Note, "{elsewhere:?}");
    assert!(elsewhere[0].message.contains("law"), "{elsewhere:?}");
}
