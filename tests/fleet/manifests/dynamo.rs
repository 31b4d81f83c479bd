//! Command lines of Dynamo's programs, compared with the options of the package `ai-dynamo`: of the
//! installed one, or of the recorded version.

use std::fs;
use std::process::Command;
use std::sync::LazyLock;

use serde_json::{Value, json};

use super::{ROOT, sets};

const VERSION: &str = "1.6.1";

/// Options of vLLM that `dynamo.vllm` passes on, without those of Dynamo. Each has one value, or
/// none if it enables something.
const VLLM_OPTIONS: [&str; 6] = [
    "--model",
    "--served-model-name",
    "--block-size",
    "--enable-prefix-caching",
    "--kv-events-config",
    "--kv-transfer-config",
];

/// Returns the options of each program.
fn known_options() -> &'static Value {
    static OPTIONS: LazyLock<Value> = LazyLock::new(|| {
        let data = format!("{ROOT}/tests/data/dynamo");
        let installed = Command::new("python3")
            .arg(format!("{data}/record_arguments.py"))
            .output()
            .ok()
            .filter(|output| output.status.success());
        let text = match installed {
            Some(output) => output.stdout,
            None => fs::read(format!("{data}/arguments-{VERSION}.json")).unwrap(),
        };
        serde_json::from_slice(&text).unwrap()
    });
    &OPTIONS
}

/// Returns the options and values of a command line, or the first error.
fn parse_options(program: &str, arguments: &[&str]) -> Result<Vec<(String, String)>, String> {
    let mut arguments = arguments.iter();
    let mut parsed = Vec::new();
    while let Some(argument) = arguments.next() {
        let (name, attached) = match argument.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (*argument, None),
        };
        let known = &known_options()[program][name];
        let is_vllm = program == "dynamo.vllm" && VLLM_OPTIONS.contains(&name);
        let takes_value = match (known.is_object(), is_vllm) {
            (true, _) => known["values"] != json!(0),
            (false, true) => name != "--enable-prefix-caching",
            (false, false) => return Err(format!("unrecognized arguments: {argument}")),
        };
        let value = match (takes_value, attached) {
            (true, Some(value)) => value,
            (true, None) => arguments
                .next()
                .ok_or_else(|| format!("{name}: expected one argument"))?,
            (false, None) => "",
            (false, Some(value)) => {
                return Err(format!("{name}: ignored explicit argument {value}"));
            }
        };
        if let Some(choices) = known["choices"].as_array()
            && !choices.contains(&json!(value))
        {
            return Err(format!("{name}: invalid choice: {value}"));
        }
        parsed.push((name.to_owned(), value.to_owned()));
    }
    Ok(parsed)
}

fn value_of<'o>(options: &'o [(String, String)], name: &str) -> Option<&'o str> {
    let (_, value) = options.iter().find(|(option, _)| option == name)?;
    Some(value)
}

/// Returns the program and the options of each container that runs one of Dynamo's programs.
fn command_lines() -> Vec<(String, Vec<(String, String)>)> {
    let mut found = Vec::new();
    for set in sets() {
        for pod in set.pods() {
            for container in pod.containers() {
                let words = ["command", "args"].map(|key| container[key].as_array());
                let words: Vec<&str> = words
                    .into_iter()
                    .flatten()
                    .flatten()
                    .map(|word| word.as_str().unwrap())
                    .collect();
                let Some(at) = words.iter().position(|word| word.starts_with("dynamo.")) else {
                    continue;
                };
                let image = container["image"].as_str().unwrap();
                assert!(image.ends_with(&format!(":{VERSION}")), "{image}");
                let options = parse_options(words[at], &words[at + 1..]);
                let options = options.unwrap_or_else(|error| panic!("{}: {error}", set.name));
                found.push((words[at].to_owned(), options));
            }
        }
    }
    found
}

#[test]
fn dynamo_accepts_the_arguments_of_manifests() {
    let mut modes = Vec::new();
    for (program, options) in command_lines() {
        if program == "dynamo.frontend" {
            // Front ends in direct mode reject requests without pins, so they cannot fail open.
            assert_eq!(value_of(&options, "--router-mode"), Some("least-loaded"));
            continue;
        }
        let transfer = value_of(&options, "--kv-transfer-config").unwrap();
        let transfer: Value = serde_json::from_str(transfer).unwrap();
        let expected = json!({"kv_connector": "NixlConnector", "kv_role": "kv_both"});
        assert_eq!(transfer, expected);
        modes.extend(value_of(&options, "--disaggregation-mode").map(str::to_owned));
    }
    assert_eq!(modes, ["decode", "prefill"]);
}

#[test]
fn invalid_arguments_of_dynamo_are_reported() {
    let cases = [
        ("dynamo.vllm", vec!["--is-prefill-worker"], "unrecognized"),
        (
            "dynamo.vllm",
            vec!["--disaggregation-mode=both"],
            "invalid choice",
        ),
        ("dynamo.vllm", vec!["--model"], "expected one argument"),
        (
            "dynamo.frontend",
            vec!["--router-mode", "pinned"],
            "invalid choice",
        ),
        ("dynamo.frontend", vec!["--block-size=16"], "unrecognized"),
    ];
    for (program, arguments, expected) in cases {
        let error = parse_options(program, &arguments).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn migration_page_names_existing_options() {
    let page = fs::read_to_string(format!("{ROOT}/docs/migration.md")).unwrap();
    let (_, section) = page.split_once("## From the KV router of Dynamo").unwrap();
    let (_, table) = section.split_once("### Options").unwrap();
    let (table, _) = table.split_once("###").unwrap();
    let first_cells = table.lines().filter_map(|line| line.split('|').nth(1));
    // Options of earlier versions are in parentheses.
    let current = first_cells.map(|cell| cell.split('(').next().unwrap());
    let names: Vec<&str> = current
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .filter(|word| word.starts_with("--"))
        .map(|word| word.split(' ').next().unwrap())
        .collect();
    assert!(names.len() > 20, "{names:?}");
    for name in names {
        let known = &known_options()["dynamo.frontend"][name];
        assert!(
            known.is_object(),
            "{name} is not an option of dynamo.frontend"
        );
    }
}
