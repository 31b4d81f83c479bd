//! The rules of the house, as a program: the layer table, what may appear where, and the sizes that keep the code
//! liveable. A rule that is only written down is forgotten; this one fails the build.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read the source has failed"
)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Module → layer. A module may use lower layers and its own folder; adapters (4) never use one another.
const LAYERS: &[(&str, u8)] = &[
    ("worker", 1),
    ("tier", 1),
    ("trust", 1),
    ("block", 1),
    ("disagg", 2),
    ("fleet", 2),
    ("health", 2),
    ("index", 2),
    ("learned", 2),
    ("load", 2),
    ("parity", 2),
    ("predict", 2),
    ("schedule", 2),
    ("predict", 2),
    ("sessions", 2),
    ("admission", 3),
    ("audit", 3),
    ("entrance", 3),
    ("router", 3),
    ("intake", 4),
    ("openai", 4),
    ("prefill", 4),
    ("prompt", 4),
    ("ext_proc", 4),
    ("kv_events", 4),
    ("self_test", 4),
    ("shared_cache", 4),
    ("discovery", 4),
    ("engine_client", 4),
    ("engine_sessions", 4),
    ("remote_index", 4),
    ("replica", 4),
    ("takeover", 4),
    ("xds", 4),
    ("admin", 4),
    ("api", 4),
    ("app", 5),
    ("config", 5),
    ("cmd", 5),
    ("cli", 5),
    ("telemetry", 5),
    ("main", 5),
    ("lib", 5),
];

/// Usable from layers 3 to 5; may use layer 1.
const SIDE: &[&str] = &["metrics", "lifecycle", "settings", "tls"];

/// Adapter → adapter, the declared exceptions.
const EXCEPTIONS: &[(&str, &str)] = &[
    ("admin", "intake"),
    ("api", "intake"),
    ("ext_proc", "intake"),
    ("ext_proc", "openai"),
    ("ext_proc", "prefill"),
    ("engine_sessions", "engine_client"),
    ("intake", "engine_client"),
    ("intake", "openai"),
    ("intake", "prompt"),
    ("intake", "remote_index"),
    ("intake", "shared_cache"),
    ("prefill", "engine_client"),
    ("prefill", "openai"),
    ("prompt", "openai"),
    ("takeover", "api"),
    ("self_test", "engine_client"),
    ("self_test", "intake"),
    ("self_test", "openai"),
    ("self_test", "prompt"),
];

/// Text that may appear only in these modules.
const CONFINED: &[(&str, &[&str])] = &[
    ("envoy_types", &["ext_proc", "xds", "app"]),
    (
        "tonic",
        &[
            "api",
            "ext_proc",
            "remote_index",
            "takeover",
            "tls",
            "xds",
            "app",
        ],
    ),
    ("kube::", &["discovery"]),
    ("warmroute_zmtp", &["kv_events"]),
    ("async_nats", &["replica"]),
    ("std::env", &["cli"]),
    ("env::var", &["cli"]),
];

/// Text that may not appear in layers 1 and 2.
const NOT_IN_CORE: &[&str] = &[
    "tokio",
    "tracing::",
    "Instant::now",
    "rand::random",
    "rand::rng()",
    "std::fs",
    "std::net::Tcp",
];

const MOST_LINES: usize = 500;

struct Source {
    path: PathBuf,
    module: String,
    /// Without the tests at the end of the file.
    production: String,
}

fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs")
                && !is_test_file(&path)
            {
                found.push(source(&root, path));
            }
        }
    }
    assert!(found.len() > 20, "only {} source files found", found.len());
    found
}

fn is_test_file(path: &Path) -> bool {
    path.file_stem().is_some_and(|stem| stem == "tests")
        || path.components().any(|part| part.as_os_str() == "tests")
}

fn source(root: &Path, path: PathBuf) -> Source {
    let text = fs::read_to_string(&path).unwrap();
    let production = text
        .split("#[cfg(test)]")
        .next()
        .unwrap_or_default()
        .to_owned();
    let relative = path.strip_prefix(root).unwrap();
    let first = relative
        .components()
        .next()
        .unwrap()
        .as_os_str()
        .to_string_lossy();
    let module = first.trim_end_matches(".rs").to_owned();
    Source {
        path,
        module,
        production,
    }
}

/// Lines that are neither comments nor documentation.
fn code(source: &Source) -> impl Iterator<Item = (usize, &str)> {
    let numbered = source
        .production
        .lines()
        .enumerate()
        .map(|(at, line)| (at + 1, line));
    numbered.filter(|(_, line)| !line.trim_start().starts_with("//"))
}

fn layer(module: &str) -> u8 {
    let found = LAYERS
        .iter()
        .find(|(name, _)| *name == module)
        .map(|(_, layer)| *layer);
    found.unwrap_or_else(|| {
        panic!("module `{module}` has no layer: add it to the table in tests/tidy.rs")
    })
}

fn may_use(from: &str, to: &str) -> bool {
    if from == to || from == "lib" || from == "main" {
        return true;
    }
    match (SIDE.contains(&from), SIDE.contains(&to)) {
        (true, true) => true,
        (true, false) => layer(to) == 1,
        (false, true) => layer(from) >= 3,
        (false, false) if layer(from) == 4 && layer(to) == 4 => EXCEPTIONS.contains(&(from, to)),
        // The reasons of layer 5 are its own; every other layer looks down, or sideways inside layers 1 and 2.
        (false, false) => layer(to) <= layer(from),
    }
}

#[test]
fn imports_follow_the_layer_table() {
    let mut broken = Vec::new();
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for source in sources() {
        for (at, line) in code(&source) {
            for (_, rest) in line
                .match_indices("crate::")
                .map(|(i, found)| (i, &line[i + found.len()..]))
            {
                let targets: Vec<&str> = match rest.strip_prefix('{') {
                    Some(list) => list
                        .split([',', '}'])
                        .map(str::trim)
                        .filter(|name| !name.is_empty())
                        .collect(),
                    None => vec![rest],
                };
                for target in targets {
                    let to: String = target
                        .chars()
                        .take_while(|c| c.is_ascii_alphanumeric() || *c == '_')
                        .collect();
                    *seen.entry(source.module.clone()).or_default() += 1;
                    if !may_use(&source.module, &to) {
                        broken.push(format!(
                            "{}:{at}: `{}` may not use `{to}`",
                            source.path.display(),
                            source.module
                        ));
                    }
                }
            }
        }
    }
    assert!(
        seen.len() > 8,
        "the import scan sees almost nothing: {seen:?}"
    );
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn what_is_confined_stays_where_it_belongs() {
    let mut broken = Vec::new();
    for source in sources() {
        let core = LAYERS
            .iter()
            .any(|(name, layer)| *name == source.module && *layer <= 2);
        for (at, line) in code(&source) {
            let strayed = CONFINED.iter().filter(|(text, homes)| {
                line.contains(text)
                    && !homes.contains(&source.module.as_str())
                    && !SIDE.contains(&source.module.as_str())
            });
            for (text, homes) in strayed {
                broken.push(format!(
                    "{}:{at}: `{text}` belongs in {homes:?}",
                    source.path.display()
                ));
            }
            for text in NOT_IN_CORE
                .iter()
                .filter(|text| core && line.contains(**text))
            {
                broken.push(format!(
                    "{}:{at}: `{text}` may not appear in layers 1 and 2",
                    source.path.display()
                ));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn files_are_short_open_with_a_paragraph_and_leave_nothing_unfinished() {
    let mut broken = Vec::new();
    for source in sources() {
        let name = source.path.display();
        let lines = source.production.lines().count();
        if lines > MOST_LINES {
            broken.push(format!(
                "{name}: {lines} lines, more than {MOST_LINES}: a missing concept?"
            ));
        }
        if !source.production.starts_with("//!") {
            broken.push(format!(
                "{name}: opens without a paragraph that says what it is for"
            ));
        }
        for (at, line) in source.production.lines().enumerate() {
            let marks = ["TODO", "FIXME", "XXX", "unimplemented!", "todo!"];
            if marks.iter().any(|mark| line.contains(mark)) {
                broken.push(format!("{name}:{}: unfinished: {}", at + 1, line.trim()));
            }
            if line.contains(".unwrap()") {
                broken.push(format!("{name}:{}: unwrap outside tests", at + 1));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}
