//! Checks the documentation: links, the summary of the book, sentence lengths, and pages that are
//! generated or must be complete.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::key_table::key_tables;
use warmroute_core::router::Reason;
use warmroute_server::config::config_schema;
use warmroute_server::dispatch::audit::MissCause;

/// Maximum words of a sentence.
const MAX_SENTENCE_WORDS: usize = 35;
/// Limits of the front page.
const MAX_README_WORDS: usize = 500;
const MAX_README_LINES: usize = 100;
/// Text before the tables of the configuration reference.
const CONFIGURATION_HEAD: &str = "# Configuration reference

This page is generated from the types in the code. [examples/warmroute.yaml](../examples/warmroute.yaml) has every key in a
file with comments, and lists the keys that need a restart. `warmroute check` finds mistakes, and `warmroute config init`
writes a first file. Top-level keys that begin with `x-` are ignored and may hold YAML anchors.

`[]` stands for each element of a list, and `NAME` for each name in a map. Durations are written 250ms, 30s or 5m, sizes
16KiB or 32MiB. An optional key without a default is unset.

## Environment variables
A value may contain environment variables: `${NAME}`, or `${NAME:-default}`. `$${` stands for the characters `${`. The
result has the type of its key, quoted or not: with `block_size: ${BLOCK_SIZE}`, it must be a whole number. Inside `{}`
and `[]`, YAML requires the quotes. An empty result leaves an optional key unset. Errors name the variable, not its
value.

## Completion in editors
`warmroute config schema` prints a JSON Schema of this file, and `warmroute config schema --workers` that of the
workers file. The repository has both: [warmroute.json](schema/warmroute.json) and
[workers.json](schema/workers.json). Editors with the
[YAML language server](https://github.com/redhat-developer/yaml-language-server) complete and check a file whose first
line names the schema, as a URL or as a path relative to the file:

```yaml
# yaml-language-server: $schema=warmroute.schema.json
```

`warmroute config init` writes this line. `warmroute config schema > warmroute.schema.json` creates the schema that
belongs to the installed version.
";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

/// Returns the Markdown files of a directory and its subdirectories, relative to the root.
fn markdown_files(directory: &str) -> Vec<String> {
    let mut files = Vec::new();
    for entry in fs::read_dir(root().join(directory)).unwrap() {
        let entry = entry.unwrap();
        let path = format!("{directory}/{}", entry.file_name().to_str().unwrap());
        if entry.path().is_dir() {
            files.extend(markdown_files(&path));
        } else if path.ends_with(".md") {
            files.push(path);
        }
    }
    files.sort();
    files
}

fn pages() -> Vec<String> {
    let mut pages = markdown_files("docs");
    pages.extend(markdown_files("envoy"));
    pages.extend(["README.md", "SECURITY.md", "deploy/README.md"].map(str::to_owned));
    pages
}

/// Returns the lines outside fenced code blocks.
fn prose(text: &str) -> Vec<&str> {
    let mut is_code = false;
    let mut lines = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
            lines.push("");
        } else if !is_code {
            lines.push(line);
        }
    }
    lines
}

/// Returns the anchor of a heading.
fn anchor(heading: &str) -> String {
    let kept = |letter: &char| letter.is_alphanumeric() || matches!(letter, '-' | '_' | ' ');
    let text: String = heading.to_lowercase().chars().filter(kept).collect();
    text.trim().replace(' ', "-")
}

fn anchors(text: &str) -> BTreeSet<String> {
    let lines = prose(text);
    let headings = lines.iter().filter(|line| line.starts_with('#'));
    headings
        .map(|line| anchor(line.trim_start_matches('#')))
        .collect()
}

/// Returns the targets of the links of a page: inline links, and definitions of reference links.
fn link_targets(text: &str) -> Vec<String> {
    let lines = prose(text);
    let definitions = lines.iter().filter_map(|line| {
        let (_, target) = line.strip_prefix('[')?.split_once("]: ")?;
        Some(target.trim().to_owned())
    });
    let joined = lines.join("\n");
    let inline = joined.split("](").skip(1);
    let inline = inline
        .filter_map(|part| part.split_once(')'))
        .map(|(target, _)| target.to_owned());
    inline.chain(definitions).collect()
}

#[test]
fn relative_links_resolve() {
    let mut broken = Vec::new();
    for page in pages() {
        let text = read(&page);
        for target in link_targets(&text) {
            if target.contains("://") {
                continue;
            }
            let (file, fragment) = target.split_once('#').unwrap_or((&target, ""));
            let path = if file.is_empty() {
                root().join(&page)
            } else {
                root().join(&page).parent().unwrap().join(file)
            };
            let has_anchor =
                || fs::read_to_string(&path).is_ok_and(|text| anchors(&text).contains(fragment));
            let is_markdown = path.extension().is_some_and(|kind| kind == "md");
            if !path.exists() || (is_markdown && !fragment.is_empty() && !has_anchor()) {
                broken.push(format!("{page}: {target}"));
            }
        }
    }
    assert!(broken.is_empty(), "broken links:\n{}", broken.join("\n"));
}

#[test]
fn summary_lists_every_page() {
    let listed: BTreeSet<String> = link_targets(&read("docs/SUMMARY.md")).into_iter().collect();
    let pages: BTreeSet<String> = markdown_files("docs")
        .into_iter()
        .map(|path| path.trim_start_matches("docs/").to_owned())
        .filter(|path| path != "SUMMARY.md")
        .collect();
    assert_eq!(listed, pages);
}

/// Returns the sentences of a text. A sentence ends with one of `ends`, and with its list item, table
/// cell or heading.
fn sentences(text: &str, ends: &[&str]) -> Vec<String> {
    let mut blocks: Vec<String> = vec![String::new()];
    for line in prose(text) {
        let trimmed = line.trim();
        if trimmed.starts_with('|') {
            blocks.extend(trimmed.split(" | ").map(str::to_owned));
            blocks.push(String::new());
            continue;
        }
        let starts_item = trimmed.starts_with("- ")
            || trimmed.starts_with("* ")
            || trimmed
                .split_once(". ")
                .is_some_and(|(number, _)| number.parse::<u32>().is_ok());
        if trimmed.is_empty() || trimmed.starts_with('#') || starts_item {
            blocks.push(String::new());
        }
        let block = blocks.last_mut().unwrap();
        block.push(' ');
        block.push_str(trimmed);
        if trimmed.starts_with('#') {
            blocks.push(String::new());
        }
    }
    let split = |block: String| -> Vec<String> {
        let mut parts = vec![block];
        for end in ends {
            parts = parts
                .iter()
                .flat_map(|part| part.split(*end))
                .map(str::to_owned)
                .collect();
        }
        parts
    };
    blocks.into_iter().flat_map(split).collect()
}

#[test]
fn sentences_are_short() {
    let mut long = Vec::new();
    for page in pages() {
        let ends = match page.as_str() {
            // Its cells list the values of labels.
            "docs/metrics.md" => &[". ", "? ", "! ", ": ", "; "][..],
            _ => &[". ", "? ", "! "],
        };
        for sentence in sentences(&read(&page), ends) {
            let is_word = |word: &&str| word.contains(char::is_alphanumeric);
            let words = sentence.split_whitespace().filter(is_word).count();
            if words > MAX_SENTENCE_WORDS {
                long.push(format!("{page}: {words} words: {}", sentence.trim()));
            }
        }
    }
    assert!(long.is_empty(), "{}", long.join("\n"));
}

#[test]
fn front_page_is_short() {
    let text = read("README.md");
    assert!(text.lines().count() <= MAX_README_LINES);
    assert!(text.split_whitespace().count() <= MAX_README_WORDS);
}

#[test]
fn quickstart_figures_match_recorded_run() {
    let run: serde_json::Value = serde_json::from_str(&read("docs/quickstart.json")).unwrap();
    let readme = read("README.md");
    let words: Vec<&str> = readme.split_whitespace().collect();
    let text = words.join(" ");
    for policy in ["round_robin", "default"] {
        let share = run[policy]["hit_rate"].as_f64().unwrap();
        let figure = format!("{:.0} %", share * 100.0);
        assert!(text.contains(&figure), "no {figure} of {policy}");
    }
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "the environment enables rewriting of the page"
)]
fn configuration_page_is_up_to_date() {
    let page = "docs/configuration.md";
    let expected = format!("{CONFIGURATION_HEAD}{}", key_tables(&config_schema()));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(root().join(page), &expected).unwrap();
    }
    let found = fs::read_to_string(root().join(page)).unwrap_or_default();
    assert!(
        found == expected,
        "{page} is out of date; UPDATE_GOLDEN=1 cargo test --test repository rewrites it"
    );
}

#[test]
fn modules_name_their_decisions() {
    let mut text = read("envoy/disaggregated-call.yaml") + &read("envoy/disaggregated-mirror.yaml");
    for file in ["crates", "src"].map(|directory| source_files(&root().join(directory))) {
        text.extend(file.iter().map(|path| fs::read_to_string(path).unwrap()));
    }
    let pages = markdown_files("docs/decisions").into_iter();
    let numbers =
        pages.filter_map(|page| Some(page.rsplit_once('/')?.1.split_once('-')?.0.to_owned()));
    let unnamed: Vec<String> = numbers
        .filter(|number| !text.contains(&format!("Decision {number}")))
        .collect();
    assert!(unnamed.is_empty(), "no module names {unnamed:?}");
}

/// Sections of `doctor`. The name of a check begins with one of them.
const DOCTOR_SECTIONS: [&str; 8] = [
    "config",
    "host",
    "warmroute",
    "kubernetes",
    "engine",
    "events",
    "canary",
    "envoy",
];
/// Check whose name is a section.
const SKIPPED_ENGINE: &str = "engine";
/// Texts with the form of a check's name that are no checks.
const NO_CHECKS: [&str; 2] = ["envoy.transport_socket_match", "warmroute.yaml"];

/// Returns the names of the checks of `doctor`: texts of the form `section.check` in its source.
fn doctor_checks() -> BTreeSet<String> {
    let is_check = |text: &&str| {
        let is_name = |letter: char| letter.is_ascii_lowercase() || "_0123456789".contains(letter);
        text.split_once('.').is_some_and(|(section, check)| {
            DOCTOR_SECTIONS.contains(&section) && !check.is_empty() && check.chars().all(is_name)
        })
    };
    let mut checks = BTreeSet::from([SKIPPED_ENGINE.to_owned()]);
    for directory in ["crates/doctor/src", "src/cmd"] {
        for file in source_files(&root().join(directory)) {
            let source = fs::read_to_string(file).unwrap();
            let texts = source.split('"').filter(is_check);
            checks.extend(texts.map(str::to_owned));
        }
    }
    checks.retain(|check| !NO_CHECKS.contains(&check.as_str()));
    assert!(checks.len() > 70, "{checks:?}");
    checks
}

fn source_files(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "tests" {
            files.extend(source_files(&path));
        } else if name.ends_with(".rs") && name != "tests.rs" && name != "table.rs" {
            files.push(path);
        }
    }
    files
}

#[test]
fn troubleshooting_has_an_entry_per_name() {
    let text = read("docs/troubleshooting.md");
    let entries: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("### "))
        .collect();
    let reasons = Reason::ALL.iter().map(|reason| reason.as_str().to_owned());
    let causes = MissCause::ALL.iter().map(|cause| cause.as_str().to_owned());
    let names = reasons.chain(causes).chain(doctor_checks());
    let names: BTreeSet<String> = names.collect();
    let missing: Vec<&String> = names
        .iter()
        .filter(|name| !entries.contains(name.as_str()))
        .collect();
    assert!(missing.is_empty(), "no entry for {missing:?}");
    let is_name = |entry: &&&str| !entry.contains(' ') && !names.contains(**entry);
    let outdated: Vec<&&str> = entries.iter().filter(is_name).collect();
    assert!(
        outdated.is_empty(),
        "entries for unknown names: {outdated:?}"
    );
}
