//! Configuration files: the example, the `check` command, and a workers
//! file that changes on a real file system.

mod check;
mod file_watch;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::watch;
use warmroute_core::policy::ConditionalPrefillConfig;
use warmroute_core::worker::{BlockSize, DpRank, SocketAttach, WorkerRole};
use warmroute_metrics::{Metrics, OutcomeLabel};
use warmroute_runtime::lifecycle::file_watcher::FileWatchTiming;
use warmroute_server::cluster::remote_index::config::RemoteIndexConfig;
use warmroute_server::config::{Config, WorkerSource};
use warmroute_server::fleet::discovery::WorkerModel;
use warmroute_server::fleet::discovery::file::{self, WorkersFile};
use warmroute_server::request::SessionsConfig;
use warmroute_server::request::engine_tokens::config::EngineTokensConfig;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn data(name: &str) -> PathBuf {
    Path::new(ROOT).join("tests/data/config").join(name)
}

fn yaml_files(directory: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "yaml")
    });
    files.sort();
    assert!(!files.is_empty(), "{} holds no cases", directory.display());
    files
}

/// Compares a text with the expected one, which is in the `.txt` file beside `path`.
#[expect(
    clippy::disallowed_methods,
    reason = "the environment enables rewriting of the expected texts"
)]
fn assert_expected_text(path: &Path, found: &str) {
    let golden = path.with_extension("txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&golden, found).unwrap();
    }
    let expected = fs::read_to_string(&golden).unwrap_or_default();
    assert_eq!(
        found,
        expected,
        "{}; UPDATE_GOLDEN=1 rewrites the expectation",
        path.display()
    );
}

#[test]
fn resolved_configuration_round_trips() {
    let examples = [Path::new(ROOT).join("examples/warmroute.yaml")];
    for path in yaml_files(&data("valid")).iter().chain(&examples) {
        let config = Config::load(path).unwrap_or_else(|errors| panic!("{errors:?}"));
        let yaml = config.to_yaml().unwrap();
        let again = Config::parse(path, yaml.as_bytes())
            .unwrap_or_else(|errors| panic!("{errors:?}\n{yaml}"));
        assert_eq!(again, config, "{yaml}");
        assert_eq!(again.to_yaml().unwrap(), yaml);
    }
}

fn example() -> (PathBuf, String) {
    let path = Path::new(ROOT).join("examples/warmroute.yaml");
    let text = fs::read_to_string(&path).unwrap();
    (path, text)
}

/// Sections of `index` that exclude each other.
const EXCLUSIVE_SECTIONS: [&str; 2] = ["warm_start", "remote"];

/// Returns the example with every optional setting enabled, except one section of `index`.
fn example_with_all_but(without: &str) -> (PathBuf, String) {
    let (path, text) = example_with_all();
    let (before, rest) = text.split_once(&format!("\n  {without}:\n")).unwrap();
    let rest = rest
        .split_inclusive('\n')
        .skip_while(|line| line.starts_with("    "));
    (path, format!("{before}\n{}", rest.collect::<String>()))
}

/// Returns the example with every optional setting enabled.
fn example_with_all() -> (PathBuf, String) {
    let (path, text) = example();
    let on = |line: &str| match line.split_once('#') {
        Some((indent, rest)) if indent.trim().is_empty() && !rest.starts_with(' ') => {
            format!("{indent}{rest}\n")
        }
        // Comment of an enabled setting.
        Some((indent, rest)) if indent.trim().is_empty() && rest.starts_with("  ") => {
            format!("{indent}{rest}\n")
        }
        _ => format!("{line}\n"),
    };
    // A shared cache is rejected if its blocks have no weight.
    (
        path,
        text.lines().map(on).collect::<String>().replace(
            "shared_cache_multiplier: 0.0",
            "shared_cache_multiplier: 0.5",
        ),
    )
}

#[test]
fn example_has_the_defaults() {
    let (path, text) = example();
    let mut example = Config::parse(&path, text.as_bytes()).unwrap();
    assert_eq!(example.envoy.take().unwrap().cluster, "workers");
    assert!(example.listeners.ext_proc.unix_socket.take().is_some());
    let minimal = Config::load(&data("valid/least.yaml")).unwrap();
    let model = &example.models[0];
    let usual = &minimal.models[0];
    assert_eq!(
        (model.block_size, model.eagle, &model.adapters),
        (usual.block_size, usual.eagle, &usual.adapters)
    );
    // The example spells out the policy and its weights.
    assert_eq!(
        example.router_settings().policy,
        minimal.router_settings().policy
    );
    example.routing.policy = minimal.routing.policy;
    example.routing.weights = minimal.routing.weights;
    // All other settings, including keys that are added later.
    let workers = minimal.workers.clone();
    assert_eq!(
        Config {
            models: minimal.models.clone(),
            workers,
            ..example
        },
        minimal
    );
}

#[test]
fn disabled_sections_of_example_have_the_defaults() {
    let (path, text) = example_with_all_but("remote");
    let warm_start = Config::parse(&path, text.as_bytes())
        .unwrap()
        .index
        .warm_start
        .unwrap();
    let minimal = json!({"url": warm_start.url});
    assert_eq!(warm_start, serde_json::from_value(minimal).unwrap());
    let (path, text) = example_with_all_but("warm_start");
    let config =
        Config::parse(&path, text.as_bytes()).unwrap_or_else(|errors| panic!("{errors:?}\n{text}"));
    let sessions = config.sessions.unwrap();
    let sglang = serde_json::from_value(json!({"kind": "sglang"})).unwrap();
    assert_eq!(sessions.engine, Some(sglang));
    assert_eq!(
        config.models[0].remote_tokenizer,
        Some(EngineTokensConfig::default())
    );
    assert_eq!(
        SessionsConfig {
            engine: None,
            ..sessions
        },
        SessionsConfig::default()
    );
    assert_eq!(
        config.routing.disaggregation.conditional,
        Some(ConditionalPrefillConfig::default())
    );
    let cache = config.index.shared_cache.unwrap();
    let minimal = json!({"url": cache.url});
    assert_eq!(cache, serde_json::from_value(minimal).unwrap());
    let remote = config.index.remote.unwrap();
    assert_eq!(
        remote,
        RemoteIndexConfig::with_servers(remote.servers.clone())
    );
    let [class] = &config.queue.classes[..] else {
        panic!("{:?}", config.queue)
    };
    assert_eq!(
        (class.policy, class.quantum),
        (Some(config.queue.policy), 1)
    );
}

/// Returns the paths of all keys of nested maps. The first element represents a list.
fn keys(value: &Value, path: &str) -> Vec<String> {
    match value {
        Value::Object(fields) => {
            let inner = |(key, value): (&String, &Value)| {
                let path = format!("{path}.{key}");
                let deeper = keys(value, &path);
                [vec![path], deeper].concat()
            };
            fields.iter().flat_map(inner).collect()
        }
        Value::Array(items) => items
            .first()
            .map(|item| keys(item, path))
            .unwrap_or_default(),
        _ => Vec::new(),
    }
}

/// Collects the leaves of nested maps with their paths.
fn leaves(value: &Value, path: &str, found: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(fields) => fields
            .iter()
            .for_each(|(key, value)| leaves(value, &format!("{path}.{key}"), found)),
        leaf => found.push((path.to_owned(), leaf.clone())),
    }
}

#[test]
fn valid_files_override_every_default() {
    let resolved = |path: &Path| {
        let value: Value =
            serde_saphyr::from_str(&Config::load(path).unwrap().to_yaml().unwrap()).unwrap();
        let mut found = Vec::new();
        leaves(&value, "", &mut found);
        found
    };
    let files: Vec<_> = yaml_files(&data("valid"))
        .iter()
        .map(|path| resolved(path))
        .collect();
    for (path, default) in resolved(&data("valid/least.yaml")) {
        let set = |file: &Vec<(String, Value)>| !file.contains(&(path.clone(), default.clone()));
        assert!(
            files.iter().any(set),
            "{path} has its default in every file, so its round trip is not tested"
        );
    }
}

#[test]
fn example_contains_every_key() {
    for without in EXCLUSIVE_SECTIONS {
        let (path, text) = example_with_all_but(without);
        let written: Value = serde_saphyr::from_str(&text).unwrap();
        let resolved = Config::parse(&path, text.as_bytes())
            .unwrap()
            .to_yaml()
            .unwrap();
        let resolved: Value = serde_saphyr::from_str(&resolved).unwrap();
        let written = keys(&written, "");
        assert!(written.len() > 100, "{written:?}");
        for key in keys(&resolved, "") {
            assert!(
                written.contains(&key),
                "examples/warmroute.yaml lacks {key}"
            );
        }
    }
}

#[test]
fn example_fleet_has_one_source_per_rank() {
    let path = Path::new(ROOT).join("examples/workers.yaml");
    let models = Config::load(&path.with_file_name("warmroute.yaml"))
        .unwrap()
        .served_models();
    let workers =
        warmroute_server::fleet::discovery::parse(&path, &fs::read(&path).unwrap(), &models)
            .unwrap();
    let endpoints: Vec<Vec<_>> = workers
        .iter()
        .map(|worker| {
            worker
                .event_sources
                .iter()
                .map(|source| source.endpoint.as_str())
                .collect()
        })
        .collect();
    assert_eq!(
        endpoints,
        [
            vec!["tcp://127.0.0.1:5557"],
            vec!["tcp://127.0.0.1:5567", "tcp://127.0.0.1:5568"],
            vec!["tcp://127.0.0.1:6001", "tcp://127.0.0.1:6002"],
            // Behind a shared front end.
            vec![],
            vec![]
        ]
    );
    assert_eq!(
        workers[1].event_sources[1].replay.as_deref(),
        Some("tcp://127.0.0.1:5668")
    );
}

#[test]
fn workers_are_parsed_completely() {
    let config = Config::load(&data("valid/full.yaml")).unwrap();
    let WorkerSource::Fixed(workers) = config.worker_source() else {
        panic!("a fixed list was given")
    };
    let [prefill, decode] = &workers[..] else {
        panic!("{workers:?}")
    };
    assert_eq!(
        (prefill.id.0, prefill.role, prefill.block_size),
        (u64::MAX, WorkerRole::Prefill, BlockSize::new(16).unwrap())
    );
    assert_eq!(
        (
            prefill.capacity.max_num_batched_tokens,
            prefill.capacity.total_kv_blocks
        ),
        (Some(8192), Some(1000))
    );
    assert_eq!((prefill.draining, decode.draining), (true, false));
    // The endpoint of rank r has the configured port + r, even if the ranks of the process do not
    // start at 0.
    let source = prefill.event_source(DpRank(3)).unwrap();
    assert_eq!(source.endpoint, "tcp://engine-0.engines:5560");
    assert_eq!(
        source.replay.as_deref(),
        Some("tcp://engine-0.engines:5660")
    );
    assert_eq!(
        (source.topic.as_str(), source.attach),
        ("kv@", SocketAttach::Connect)
    );
    assert_eq!(decode.block_size, BlockSize::new(32).unwrap());
    assert_eq!(
        decode.event_sources[0].endpoint, "tcp://0.0.0.0:7001",
        "a bound endpoint is an address"
    );
    assert_eq!(decode.event_sources[1].endpoint, "ipc:///run/events.sock");
    assert_eq!(
        decode.event_sources[1].replay.as_deref(),
        Some("tcp://[2001:db8::2]:7100")
    );
}
