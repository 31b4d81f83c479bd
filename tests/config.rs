//! The configuration as its author meets it: broken files and what is said about them, the examples, the command, and a
//! workers file that changes on a real file system.

#![expect(
    clippy::unwrap_used,
    reason = "a step that fails while setting the scene fails the test"
)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use warmroute::config::{Config, SessionsConfig, WorkerSource};
use warmroute::disagg::Conditional;
use warmroute::discovery::ServedModel;
use warmroute::discovery::config::DiscoveryConfig;
use warmroute::discovery::file::{self, WorkersFile};
use warmroute::engine_sessions::config::{EngineKind, EngineSessionsConfig};
use warmroute::intake::engine_tokens::config::EngineTokensConfig;
use warmroute::metrics::{Metrics, OutcomeLabel};
use warmroute::remote_index::config::RemoteIndexConfig;
use warmroute::settings::Period;
use warmroute::shared_cache::SharedCacheConfig;
use warmroute::worker::{Attach, BlockSize, DpRank, Role};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// Far more than any of the waits below takes; a failing test ends here.
const DEADLINE: Duration = Duration::from_secs(20);

fn data(name: &str) -> PathBuf {
    Path::new(ROOT).join("tests/data/config").join(name)
}

fn yaml_files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "yaml")
    });
    files.sort();
    assert!(!files.is_empty(), "{} holds no cases", folder.display());
    files
}

/// One line per mistake, without the part of the path that differs from machine to machine.
fn mistakes(path: &Path) -> String {
    let errors = Config::load(path).expect_err(&format!("{} is accepted", path.display()));
    let data = format!("{}/", data("broken").display());
    errors
        .iter()
        .map(|error| error.to_string().replace(&data, "").replace(ROOT, "$ROOT") + "\n")
        .collect()
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "the switch that rewrites the expected texts"
)]
fn every_broken_file_is_refused_with_the_line_at_fault() {
    let rewrite = std::env::var_os("UPDATE_GOLDEN").is_some();
    for path in yaml_files(&data("broken")) {
        let golden = path.with_extension("txt");
        let found = mistakes(&path);
        if rewrite {
            fs::write(&golden, &found).unwrap();
        }
        let expected = fs::read_to_string(&golden).unwrap_or_default();
        assert_eq!(
            found,
            expected,
            "{}; UPDATE_GOLDEN=1 rewrites the expectation",
            path.display()
        );
    }
}

#[test]
fn a_resolved_configuration_reads_back_as_itself() {
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

/// Sections that go with anything but one another.
const EITHER: [&str; 2] = ["takeover", "use_remote_index"];

/// The example with everything switched on that is off by default, but for one section.
fn example_with_all_but(without: &str) -> (PathBuf, String) {
    let (path, text) = example_with_all();
    let (before, rest) = text.split_once(&format!("\n{without}:\n")).unwrap();
    let rest = rest
        .split_inclusive('\n')
        .skip_while(|line| line.starts_with(' '));
    (path, format!("{before}\n{}", rest.collect::<String>()))
}

/// The example with everything switched on that is off by default.
fn example_with_all() -> (PathBuf, String) {
    let (path, text) = example();
    let on = |line: &str| match line.split_once('#') {
        Some((indent, rest)) if indent.trim().is_empty() && !rest.starts_with(' ') => {
            format!("{indent}{rest}\n")
        }
        // Inside a setting that is switched on.
        Some((indent, rest)) if indent.trim().is_empty() && rest.starts_with("  ") => {
            format!("{indent}{rest}\n")
        }
        _ => format!("{line}\n"),
    };
    // A shared cache whose blocks are worth nothing is refused.
    (
        path,
        text.lines().map(on).collect::<String>().replace(
            "shared_cache_multiplier: 0.0",
            "shared_cache_multiplier: 0.5",
        ),
    )
}

#[test]
fn the_example_says_the_defaults() {
    let (path, text) = example();
    let mut example = Config::parse(&path, text.as_bytes()).unwrap();
    assert_eq!(example.envoy.take().unwrap().cluster, "workers");
    assert!(example.listen.unix.take().is_some());
    let least = Config::load(&data("valid/least.yaml")).unwrap();
    let (model, usual) = (&example.models[0], &least.models[0]);
    assert_eq!(
        (model.block_size, model.eagle, &model.adapters),
        (usual.block_size, usual.eagle, &usual.adapters)
    );
    // Everything else, whatever is added later.
    let workers = least.workers.clone();
    assert_eq!(
        Config {
            models: least.models.clone(),
            workers_file: None,
            workers,
            ..example
        },
        least
    );
}

#[test]
fn what_is_off_in_the_example_says_its_defaults_as_well() {
    let (path, text) = example_with_all_but("use_remote_index");
    let takeover = Config::parse(&path, text.as_bytes())
        .unwrap()
        .takeover
        .unwrap();
    let least = json!({"from": takeover.from});
    assert_eq!(takeover, serde_json::from_value(least).unwrap());
    let (path, text) = example_with_all_but("takeover");
    let config =
        Config::parse(&path, text.as_bytes()).unwrap_or_else(|errors| panic!("{errors:?}\n{text}"));
    let sessions = config.sessions.unwrap();
    assert_eq!(
        sessions.engine,
        Some(EngineSessionsConfig::of(EngineKind::Sglang))
    );
    assert_eq!(
        config.models[0].engine_tokens,
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
        config.disaggregation.conditional,
        Some(Conditional::default())
    );
    let cache = config.shared_cache.unwrap();
    assert_eq!(cache, SharedCacheConfig::at(cache.url.clone()));
    let remote = config.use_remote_index.unwrap();
    assert_eq!(remote, RemoteIndexConfig::of(remote.servers.clone()));
    let [class] = &config.queue.classes[..] else {
        panic!("{:?}", config.queue)
    };
    assert_eq!(
        (class.policy, class.quantum),
        (Some(config.queue.policy), 1)
    );
}

/// The keys of a map and of the maps in it, each with its way from the root; lists count by their first element.
fn keys(value: &Value, way: &str) -> Vec<String> {
    match value {
        Value::Object(fields) => {
            let inner = |(key, value): (&String, &Value)| {
                let way = format!("{way}.{key}");
                let deeper = keys(value, &way);
                [vec![way], deeper].concat()
            };
            fields.iter().flat_map(inner).collect()
        }
        Value::Array(items) => items
            .first()
            .map(|item| keys(item, way))
            .unwrap_or_default(),
        _ => Vec::new(),
    }
}

/// The leaves of a map and of the maps in it, each with its way from the root.
fn leaves(value: &Value, way: &str, found: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(fields) => fields
            .iter()
            .for_each(|(key, value)| leaves(value, &format!("{way}.{key}"), found)),
        leaf => found.push((way.to_owned(), leaf.clone())),
    }
}

#[test]
fn the_valid_files_set_every_key_to_something_else() {
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
    for (way, default) in resolved(&data("valid/least.yaml")) {
        let set = |file: &Vec<(String, Value)>| !file.contains(&(way.clone(), default.clone()));
        assert!(
            files.iter().any(set),
            "{way} reads back as itself only because it is the default"
        );
    }
}

#[test]
fn every_key_is_written_in_the_example() {
    for without in EITHER {
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
                "examples/warmroute.yaml says nothing of {key}"
            );
        }
    }
}

#[test]
fn the_example_fleet_is_read_with_one_source_per_rank() {
    let path = Path::new(ROOT).join("examples/workers.yaml");
    let models = Config::load(&path.with_file_name("warmroute.yaml"))
        .unwrap()
        .served_models();
    let workers = warmroute::discovery::parse(&path, &fs::read(&path).unwrap(), &models).unwrap();
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
            vec!["tcp://127.0.0.1:6001", "tcp://127.0.0.1:6002"]
        ]
    );
    assert_eq!(
        workers[1].event_sources[1].replay.as_deref(),
        Some("tcp://127.0.0.1:5668")
    );
}

#[test]
fn workers_come_out_as_they_were_written() {
    let config = Config::load(&data("valid/full.yaml")).unwrap();
    let WorkerSource::Fixed(workers) = config.worker_source() else {
        panic!("a fixed list was given")
    };
    let [prefill, decode] = &workers[..] else {
        panic!("{workers:?}")
    };
    assert_eq!(
        (prefill.id.0, prefill.role, prefill.block_size),
        (u64::MAX, Role::Prefill, BlockSize::new(16).unwrap())
    );
    assert_eq!(
        (
            prefill.capacity.max_num_batched_tokens,
            prefill.capacity.total_kv_blocks
        ),
        (Some(8192), Some(1000))
    );
    assert_eq!((prefill.draining, decode.draining), (true, false));
    // Rank r uses port + r, also where the ranks of the process do not start at 0.
    let source = prefill.event_source(DpRank(3)).unwrap();
    assert_eq!(source.endpoint, "tcp://engine-0.engines:5560");
    assert_eq!(
        source.replay.as_deref(),
        Some("tcp://engine-0.engines:5660")
    );
    assert_eq!(
        (source.topic.as_str(), source.attach),
        ("kv@", Attach::Connect)
    );
    assert_eq!(decode.block_size, BlockSize::new(32).unwrap());
    assert_eq!(
        decode.event_sources[0].endpoint, "tcp://0.0.0.0:7001",
        "what we bind is an address"
    );
    assert_eq!(decode.event_sources[1].endpoint, "ipc:///run/events.sock");
    assert_eq!(
        decode.event_sources[1].replay.as_deref(),
        Some("tcp://[2001:db8::2]:7100")
    );
}

fn check(path: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_warmroute"))
        .args(["check", "--config"])
        .arg(path)
        .output()
        .unwrap()
}

#[test]
fn the_check_command_prints_the_resolved_configuration() {
    let path = data("valid/least.yaml");
    // Its tokenizer is an empty object, which cannot be loaded.
    let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
    let output = command
        .args(["check", "--fast", "--config"])
        .arg(&path)
        .output()
        .unwrap();
    assert_eq!(
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).as_ref()
        ),
        (Some(0), "")
    );
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        Config::load(&path).unwrap().to_yaml().unwrap()
    );
}

#[test]
fn check_accepts_the_flags_of_serve() {
    let check = |flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
        command
            .args(["check", "--fast"])
            .args(flags)
            .output()
            .unwrap()
    };
    let output = check(&[
        "--pool-name",
        "qwen",
        "--pool-namespace",
        "inference",
        "--grpc-port",
        "9008",
    ]);
    assert_eq!(
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).as_ref()
        ),
        (Some(0), "")
    );
    let resolved = String::from_utf8(output.stdout).unwrap();
    for line in ["name: qwen", "namespace: inference", "tcp: 0.0.0.0:9008"] {
        assert!(resolved.contains(line), "{line}: {resolved}");
    }
    let output = check(&["--pool-name", ""]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

#[test]
fn the_check_command_warns_of_what_is_hardly_meant() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("warmroute.yaml");
    let prefill = "- {id: 1, endpoint: '10.0.0.1:80', role: prefill}\n- {id: 2, endpoint: '10.0.0.2:80', role: decode}\n";
    fs::write(dir.path().join("workers.yaml"), prefill).unwrap();
    for (prefill, warning) in [("", "nobody prefills there"), (", prefill: {by: call}", "")] {
        fs::write(
            &file,
            format!("models: [{{name: m{prefill}}}]\nworkers_file: workers.yaml\n"),
        )
        .unwrap();
        let output = check(&file);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(
            (output.status.code(), said.lines().count()),
            (Some(0), usize::from(!warning.is_empty())),
            "{said}"
        );
        assert!(
            said.contains(warning) && (said.is_empty() || said.starts_with("warning: model m: ")),
            "{said}"
        );
    }
}

fn model_file(name: &str) -> PathBuf {
    Path::new(ROOT).join("examples/models/qwen2.5").join(name)
}

/// A configuration in a folder with copies of some files of a model.
fn configured_with(dir: &Path, files: &[&str], tokenizer: &str) -> PathBuf {
    for name in files {
        fs::copy(model_file(name), dir.join(name)).unwrap();
    }
    let file = dir.join("w.yaml");
    let workers = "workers: [{id: 1, endpoint: '10.0.0.1:8000'}]";
    fs::write(
        &file,
        format!("models:\n  - name: m\n    tokenizer: {tokenizer}\n{workers}\n"),
    )
    .unwrap();
    file
}

#[test]
fn check_refuses_tokenizers_that_serve_refuses() {
    type Damage = fn(&Path);
    let all = ["tokenizer.json.gz", "tokenizer_config.json", "config.json"];
    let cases: [(&[&str], &str, Damage, &str); 4] = [
        (
            &all,
            "tokenizer_config.json",
            |_| (),
            "is not a tokenizer.json: it has no `model`; did you mean",
        ),
        (
            &all,
            "tokenizer.json.gz",
            |dir| fs::write(dir.join("tokenizer.json.gz"), "").unwrap(),
            "the file is empty",
        ),
        (
            &all[..2],
            "tokenizer.json.gz",
            |_| (),
            "copy the model's config.json beside",
        ),
        (
            &all,
            "tokenizer.json.gz",
            |dir| fs::write(dir.join("chat_template.jinja"), "{% if %}").unwrap(),
            "chat template `default`",
        ),
    ];
    for (files, tokenizer, damage, expected) in cases {
        let dir = tempfile::tempdir().unwrap();
        let file = configured_with(dir.path(), files, tokenizer);
        damage(dir.path());
        let output = check(&file);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(
            (output.status.code(), said.lines().count()),
            (Some(2), 1),
            "{said}"
        );
        assert!(
            said.starts_with(&format!("{}:3:16: ", file.display())) && said.contains(expected),
            "{said}"
        );
        assert!(output.stdout.is_empty());
        let mut fast = Command::new(env!("CARGO_BIN_EXE_warmroute"));
        fast.args(["check", "--fast", "--config"]).arg(&file);
        assert_eq!(
            fast.output().unwrap().status.code(),
            Some(0),
            "--fast does not load tokenizers"
        );
    }
}

#[test]
fn check_warns_of_a_missing_chat_template() {
    let dir = tempfile::tempdir().unwrap();
    let file = configured_with(
        dir.path(),
        &["tokenizer.json.gz", "config.json"],
        "tokenizer.json.gz",
    );
    let settings: Value =
        serde_json::from_slice(&fs::read(model_file("tokenizer_config.json")).unwrap()).unwrap();
    let write = |settings: &Value| {
        fs::write(
            dir.path().join("tokenizer_config.json"),
            settings.to_string(),
        )
        .unwrap()
    };
    write(&settings);
    let output = check(&file);
    assert_eq!(
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).as_ref()
        ),
        (Some(0), "")
    );
    let mut without = settings;
    without
        .as_object_mut()
        .unwrap()
        .remove("chat_template")
        .unwrap();
    write(&without);
    let output = check(&file);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(
        said.starts_with("warning: model m: it has no chat template") && said.lines().count() == 1,
        "{said}"
    );
}

#[test]
fn the_check_command_ends_with_two_and_one_line_per_mistake() {
    for name in ["unknown_keys", "workers", "workers_file_broken", "not_yaml"] {
        let path = data("broken").join(name).with_extension("yaml");
        let output = check(&path);
        let lines: String = Config::load(&path)
            .unwrap_err()
            .iter()
            .map(|error| format!("{error}\n"))
            .collect();
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(String::from_utf8(output.stderr).unwrap(), lines);
        assert!(output.stdout.is_empty());
    }
    let output = check(Path::new("/no/such/warmroute.yaml"));
    assert_eq!(output.status.code(), Some(2));
    assert!(
        String::from_utf8(output.stderr)
            .unwrap()
            .starts_with("/no/such/warmroute.yaml: the file cannot be read")
    );
}

/// A workers file in a folder of its own, being followed. Ends by drop.
struct Followed {
    folder: tempfile::TempDir,
    fleet: watch::Receiver<Vec<u64>>,
    metrics: Arc<Metrics>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

const NEVER: Period = Period::seconds(3600);

impl Followed {
    /// Follows `workers.yaml`, which `lay` has put into the folder.
    fn start(poll: Period, lay: impl FnOnce(&Path)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        lay(folder.path());
        let (report, fleet) = watch::channel(Vec::new());
        let metrics = Arc::new(Metrics::new());
        let model = ServedModel {
            name: "m".into(),
            block_size: BlockSize::new(16).unwrap(),
            meets: false,
        };
        let followed = WorkersFile {
            path: folder.path().join("workers.yaml"),
            models: vec![model],
            follow: DiscoveryConfig {
                poll,
                debounce: Period::millis(10),
            },
        };
        let watching = file::watch(followed, Arc::clone(&metrics), move |workers| {
            report.send_replace(workers.iter().map(|worker| worker.id.0).collect());
        });
        let task = tokio::spawn(async move {
            watching.await;
        });
        Self {
            folder,
            fleet,
            metrics,
            task,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn rename_into_place(&self, text: &str) {
        fs::write(self.path("next"), text).unwrap();
        fs::rename(self.path("next"), self.path("workers.yaml")).unwrap();
    }

    async fn fleet_is(&mut self, ids: &[u64]) {
        let waiting = tokio::time::timeout(DEADLINE, self.fleet.wait_for(|fleet| fleet == ids));
        let reached = matches!(waiting.await, Ok(Ok(_)));
        assert!(
            reached,
            "the fleet is {:?}, not {ids:?}",
            *self.fleet.borrow()
        );
    }

    fn reloads(&self, outcome: &'static str) -> u64 {
        self.metrics
            .workers_file_reloads
            .get_or_create(&OutcomeLabel { outcome })
            .get()
    }

    async fn valid_is(&self, valid: i64) {
        let reached = async {
            while self.metrics.workers_file_valid.get() != valid {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(DEADLINE, reached)
            .await
            .expect("the file's validity does not change");
    }
}

fn list(ids: &[u64]) -> String {
    ids.iter()
        .map(|id| format!("- {{id: {id}, endpoint: '10.0.0.{id}:8000'}}\n"))
        .collect()
}

#[tokio::test]
async fn a_rename_and_a_write_in_place_are_seen_without_polling() {
    let mut followed = Followed::start(NEVER, |folder| {
        fs::write(folder.join("workers.yaml"), list(&[1])).unwrap()
    });
    followed.fleet_is(&[1]).await;
    followed.rename_into_place(&list(&[1, 2]));
    followed.fleet_is(&[1, 2]).await;
    fs::write(followed.path("workers.yaml"), list(&[3])).unwrap();
    followed.fleet_is(&[3]).await;
    assert_eq!(followed.reloads("invalid"), 0);
}

#[tokio::test]
async fn a_broken_and_a_deleted_file_keep_the_fleet_and_a_mended_one_replaces_it() {
    let mut followed = Followed::start(NEVER, |folder| {
        fs::write(folder.join("workers.yaml"), list(&[1, 2])).unwrap()
    });
    followed.fleet_is(&[1, 2]).await;
    followed.rename_into_place("- {id: 3, endpoint: '10.0.0.3:8000'}\n- {id: 4, endpoin");
    followed.valid_is(0).await;
    assert_eq!(*followed.fleet.borrow(), [1, 2]);
    followed.rename_into_place(&list(&[3, 4]));
    followed.fleet_is(&[3, 4]).await;
    followed.valid_is(1).await;
    fs::remove_file(followed.path("workers.yaml")).unwrap();
    followed.valid_is(0).await;
    assert_eq!(*followed.fleet.borrow(), [3, 4]);
    followed.rename_into_place(&list(&[5]));
    followed.fleet_is(&[5]).await;
    assert_eq!(followed.reloads("applied"), 3);
}

#[tokio::test]
async fn a_file_that_comes_later_is_found() {
    let mut followed = Followed::start(NEVER, |_| ());
    followed.valid_is(0).await;
    followed.rename_into_place(&list(&[1]));
    followed.fleet_is(&[1]).await;
}

#[tokio::test]
async fn the_symlink_swap_of_a_config_map_is_seen() {
    let version = |folder: &Path, name: &str, ids: &[u64]| {
        fs::create_dir(folder.join(name)).unwrap();
        fs::write(folder.join(name).join("workers.yaml"), list(ids)).unwrap();
    };
    let mut followed = Followed::start(NEVER, |folder| {
        version(folder, "..v1", &[1]);
        symlink("..v1", folder.join("..data")).unwrap();
        symlink("..data/workers.yaml", folder.join("workers.yaml")).unwrap();
    });
    followed.fleet_is(&[1]).await;
    version(followed.folder.path(), "..v2", &[2, 3]);
    symlink("..v2", followed.path("..data_tmp")).unwrap();
    fs::rename(followed.path("..data_tmp"), followed.path("..data")).unwrap();
    fs::remove_dir_all(followed.path("..v1")).unwrap();
    followed.fleet_is(&[2, 3]).await;
}

#[tokio::test]
async fn a_change_that_nobody_tells_of_is_found_by_polling() {
    let elsewhere = tempfile::tempdir().unwrap();
    let target = elsewhere.path().join("list.yaml");
    fs::write(&target, list(&[1])).unwrap();
    let mut followed = Followed::start(Period::millis(20), |folder| {
        symlink(&target, folder.join("workers.yaml")).unwrap()
    });
    followed.fleet_is(&[1]).await;
    fs::write(elsewhere.path().join("next"), list(&[2])).unwrap();
    fs::rename(elsewhere.path().join("next"), &target).unwrap();
    followed.fleet_is(&[2]).await;
}
