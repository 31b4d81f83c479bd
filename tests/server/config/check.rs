//! The command `warmroute check`.

use std::io::Write as _;
use std::process::Stdio;

use super::*;

/// Exit code and output of a command.
#[derive(Debug)]
struct CommandRun {
    code: i32,
    stdout: String,
    stderr: String,
}

impl CommandRun {
    fn new(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Returns the output of `--json`.
    fn report(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap()
    }

    /// Expects success with this text on standard error.
    fn expect_verdict(&self, verdict: &str) {
        assert_eq!((self.code, self.stderr.as_str()), (0, verdict));
    }
}

fn warmroute(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
    command.args(args);
    command
}

fn run(args: &[&str]) -> CommandRun {
    CommandRun::new(warmroute(args).output().unwrap())
}

fn check(path: &Path) -> CommandRun {
    run(&["check", "--config", path.to_str().unwrap()])
}

/// Runs `warmroute check` on one file per kind of mistake and compares its whole output.
#[test]
fn mistakes_have_their_verdict() {
    let directory = data("");
    for path in yaml_files(&data("mistakes")) {
        let mut command = warmroute(&["check", "--fast"]);
        command.arg(path.strip_prefix(&directory).unwrap());
        let output = command.current_dir(&directory).output().unwrap();
        let CommandRun {
            code,
            stdout,
            stderr,
        } = CommandRun::new(output);
        let found = format!("{stdout}{stderr}exit code {code}\n");
        let found = found.replace(&directory.display().to_string(), "$DATA/");
        assert_expected_text(&path, &found);
    }
}

#[test]
fn check_prints_the_resolved_configuration() {
    let path = data("valid/least.yaml");
    // The tokenizer of this file is an empty object, which cannot be loaded.
    let checked = run(&["check", "--fast", "--print", path.to_str().unwrap()]);
    checked.expect_verdict(CLEAN_VERDICT);
    let resolved = Config::load(&path).unwrap().to_yaml().unwrap();
    assert_eq!(checked.stdout, resolved);
}

#[test]
fn check_accepts_the_flags_of_serve() {
    let check = |flags: &[&str]| run(&[&["check", "--fast", "--print"], flags].concat());
    let checked = check(&[
        "--pool-name",
        "qwen",
        "--pool-namespace",
        "inference",
        "--grpc-port",
        "9008",
    ]);
    checked.expect_verdict("ok: 1 model, discovered workers, 0 warnings\n");
    let resolved = checked.stdout;
    for line in [
        "name: qwen",
        "namespace: inference",
        "address: 0.0.0.0:9008",
    ] {
        assert!(resolved.contains(line), "{line}: {resolved}");
    }
    let checked = check(&["--pool-name", ""]);
    assert_eq!(checked.code, 2, "{checked:?}");
}

#[test]
fn check_warns_of_probable_mistakes() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("warmroute.yaml");
    let prefill = "- {id: 1, endpoint: '10.0.0.1:80', role: prefill}\n- {id: 2, endpoint: '10.0.0.2:80', role: decode}\n";
    fs::write(dir.path().join("workers.yaml"), prefill).unwrap();
    for (prefill, warning) in [
        ("", "they compute no prefills"),
        (", prefill: {mode: call}", ""),
    ] {
        fs::write(
            &file,
            format!("models: [{{name: m{prefill}}}]\nworkers: {{file: workers.yaml}}\n"),
        )
        .unwrap();
        let CommandRun { code, stderr, .. } = check(&file);
        assert_eq!(
            (code, stderr.lines().count()),
            (0, 1 + usize::from(!warning.is_empty())),
            "{stderr}"
        );
        assert!(
            stderr.contains(warning)
                && (warning.is_empty() || stderr.starts_with("warning: model m: ")),
            "{stderr}"
        );
    }
}

fn model_file(name: &str) -> PathBuf {
    Path::new(ROOT).join("examples/models/qwen2.5").join(name)
}

/// Verdict for one model and one worker without warnings.
const CLEAN_VERDICT: &str = "ok: 1 model, 1 worker, 0 warnings\n";

/// Returns a configuration in a directory with copies of some files of a model.
fn configured_with(dir: &Path, files: &[&str], tokenizer: &str) -> PathBuf {
    for name in files {
        fs::copy(model_file(name), dir.join(name)).unwrap();
    }
    let file = dir.join("w.yaml");
    let workers = "workers: {list: [{id: 1, endpoint: '10.0.0.1:8000'}]}";
    fs::write(
        &file,
        format!("models:\n  - name: m\n    tokenizer: {tokenizer}\n{workers}\n"),
    )
    .unwrap();
    file
}

#[test]
fn check_rejects_tokenizers_that_serve_rejects() {
    type FileDamage = fn(&Path);
    let all = ["tokenizer.json.gz", "tokenizer_config.json", "config.json"];
    let cases: [(&[&str], &str, FileDamage, &str); 4] = [
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
            "copy the model's config.json next to",
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
        let CommandRun {
            code,
            stdout,
            stderr,
        } = check(&file);
        assert_eq!((code, stderr.lines().count()), (2, 2), "{stderr}");
        assert!(stderr.contains("\n1 error in "), "{stderr}");
        assert!(
            stderr.starts_with(&format!("{}:3:16: ", file.display())) && stderr.contains(expected),
            "{stderr}"
        );
        assert!(stdout.is_empty());
        let fast = run(&["check", "--fast", "--config", file.to_str().unwrap()]);
        assert_eq!(fast.code, 0, "--fast does not load tokenizers");
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
    check(&file).expect_verdict(CLEAN_VERDICT);
    let mut without = settings;
    without
        .as_object_mut()
        .unwrap()
        .remove("chat_template")
        .unwrap();
    write(&without);
    let CommandRun { code, stderr, .. } = check(&file);
    assert_eq!(code, 0, "{stderr}");
    assert!(
        stderr.starts_with("warning: model m: it has no chat template")
            && stderr.ends_with("\nok: 1 model, 1 worker, 1 warning\n"),
        "{stderr}"
    );
}

#[test]
fn check_names_a_missing_file() {
    let checked = check(Path::new("/no/such/warmroute.yaml"));
    assert_eq!(checked.code, 2);
    let expected = "/no/such/warmroute.yaml: the file cannot be read";
    assert!(checked.stderr.starts_with(expected), "{checked:?}");
}

/// Runs `check` with a text on standard input.
fn check_text(arguments: &[&str], text: &str) -> CommandRun {
    let mut child = warmroute(&["check", "-", "--fast"])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(text.as_bytes()).unwrap();
    drop(input);
    CommandRun::new(child.wait_with_output().unwrap())
}

#[test]
fn check_reads_standard_input_and_prints_json() {
    let valid = "models: [{name: m}]\nworkers: {list: [{id: 1, endpoint: '10.0.0.1:80'}]}\n";
    let checked = check_text(&["--json"], valid);
    let report = checked.report();
    assert_eq!(checked.code, 0, "{report}");
    assert_eq!(
        (&report["valid"], &report["models"], &report["workers"]),
        (&json!(true), &json!(1), &json!(1))
    );
    let checked = check_text(&["--json"], "models: [{name: m}]\nworkerz: 1\n");
    let report = checked.report();
    assert_eq!(checked.code, 2, "{report}");
    let error = &report["errors"][0];
    assert_eq!(
        (&error["file"], &error["line"], &error["column"]),
        (&json!("<stdin>"), &json!(2), &json!(1))
    );
    let checked = check_text(&["--quiet"], valid);
    let output = [checked.stdout, checked.stderr];
    assert_eq!(output, ["", ""]);
}

#[test]
fn check_without_a_source_names_both_flags() {
    // An empty variable counts as unset.
    let run = |args: &[&str]| {
        let mut command = warmroute(args);
        CommandRun::new(command.env("WARMROUTE_CONFIG", "").output().unwrap())
    };
    let CommandRun { code, stderr, .. } = run(&["check"]);
    assert_eq!(code, 2);
    assert!(
        stderr.contains("configuration FILE") && stderr.contains("--pool-name NAME"),
        "{stderr}"
    );
    let checked = run(&["check", "--json"]);
    let report = checked.report();
    assert_eq!(checked.code, 2, "{report}");
    assert_eq!(report["valid"], json!(false));
    let message = report["errors"][0]["message"].as_str().unwrap();
    assert!(message.contains("configuration FILE"), "{report}");
    let stderr = run(&["doctor"]).stderr;
    assert!(stderr.contains("warmroute.yaml"), "{stderr}");
}

#[test]
fn environment_sets_file_and_admin_address() {
    let run = |variable: &str, value: &str, command: &str| {
        let mut process = warmroute(&[command]);
        CommandRun::new(process.env(variable, value).output().unwrap()).stderr
    };
    let found = run("WARMROUTE_CONFIG", "/nonexistent.yaml", "check");
    assert!(found.starts_with("/nonexistent.yaml:"), "{found}");
    let found = run("WARMROUTE_ADMIN", "127.0.0.1:1", "audit");
    assert!(found.contains("http://127.0.0.1:1"), "{found}");
    let found = run("WARMROUTE_ADMIN", "", "audit");
    assert!(!found.contains("invalid value"), "{found}");
}

#[test]
fn check_prints_json_for_any_file_name() {
    use std::os::unix::ffi::OsStringExt as _;
    let directory = tempfile::tempdir().unwrap();
    let name = std::ffi::OsString::from_vec(b"w\xff.yaml".to_vec());
    let file = directory.path().join(name);
    for text in [
        "models: [{name: m}]\nworkers: {list: [{id: 1, endpoint: '10.0.0.1:80'}]}\n",
        "models: 1\n",
    ] {
        fs::write(&file, text).unwrap();
        let mut command = warmroute(&["check", "--json"]);
        let report = CommandRun::new(command.arg(&file).output().unwrap()).report();
        let name = report["file"].as_str().unwrap();
        assert!(name.ends_with("w\u{fffd}.yaml"), "{report}");
    }
}

#[test]
fn printed_configuration_has_no_variables() {
    let text = "models: [{name: 'a$${HOME}b'}]\nworkers: {list: [{id: 1, endpoint: '${ADDRESS:-10.0.0.1}:80', draining: '${DRAINING:-true}'}]}\n\
                gateway: {fallback_endpoints: '${FALLBACKS:-3}'}\nrequests: {limits: {max_body_size: '${SIZE:-16MiB}'}}\n";
    let checked = check_text(&["--print"], text);
    assert_eq!(checked.code, 0, "{}", checked.stderr);
    let printed = checked.stdout;
    let path = Path::new("w.yaml");
    let config = Config::parse(path, printed.as_bytes()).unwrap();
    assert_eq!(config.models[0].name.as_str(), "a${HOME}b");
    assert_eq!(config, Config::parse(path, text.as_bytes()).unwrap());
    assert_eq!(config.gateway.fallback_endpoints, 3);
    assert!(config.workers.list.as_ref().unwrap()[0].draining);
}

#[test]
fn only_repository_names_get_a_download_hint() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("w.yaml");
    fs::create_dir_all(directory.path().join("owner/existing")).unwrap();
    for (key, path, expected) in [
        ("tokenizer", "Qwen/Qwen2.5-7B-Instruct", true),
        ("tokenizer", "models/qwen/tokenizer.json", false),
        ("tokenizer", "/models/qwen2.5", false),
        ("tokenizer", "./Qwen/Qwen2.5/x", false),
        ("tokenizer", "../Qwen2.5", false),
        ("tokenizer", "qwen", false),
        ("tokenizer", "owner/existing", false),
        ("chat_template", "Qwen/Qwen2.5-7B-Instruct", false),
    ] {
        let text = format!("models: [{{name: m, {key}: '{path}'}}]\nworkers: {{list: []}}\n");
        let errors = Config::parse(&file, text.as_bytes()).unwrap_err();
        let has_hint = errors
            .iter()
            .any(|error| error.problem.contains("hf download"));
        assert_eq!(has_hint, expected, "{key}: {path}: {errors:?}");
        if has_hint {
            assert!(
                errors[0]
                    .problem
                    .contains("hf download Qwen/Qwen2.5-7B-Instruct "),
                "{errors:?}"
            );
        }
    }
}
