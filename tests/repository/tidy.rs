//! Checks the architecture rules: the layer table, dependencies that are restricted to some
//! modules, and the limits of source files.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Layer of each module of the server. A module may use lower layers and its own directory. Cargo
/// enforces the dependencies between crates.
const LAYERS: &[(&str, u8)] = &[
    ("dispatch", 1),
    ("proto", 1),
    ("tracking_hash", 1),
    ("version", 1),
    ("cluster", 2),
    ("request", 3),
    ("prefill", 4),
    ("admin", 5),
    ("api", 5),
    ("ext_proc", 5),
    ("fleet", 5),
    ("self_test", 5),
    ("app", PROCESS),
    ("config", PROCESS),
    ("serve", PROCESS),
    ("lib", PROCESS),
];

/// The only layer whose modules may use each other.
const PROCESS: u8 = 6;

/// Texts that may appear only in the listed modules of the server.
const CONFINED: &[(&str, &[&str])] = &[
    ("envoy_types", &["ext_proc", "fleet", "app"]),
    (
        "tonic",
        &["api", "app", "cluster", "ext_proc", "fleet", "proto"],
    ),
    ("async_nats::", &["cluster"]),
    ("std::env", &["app"]),
    ("env::var", &["app"]),
];

/// Texts that may not appear in `warmroute-core`, because clocks, randomness and I/O are arguments.
const NOT_IN_CORE: &[&str] = &[
    "Instant::now",
    "rand::random",
    "rand::rng()",
    "std::fs",
    "std::net::Tcp",
];

const MOST_LINES: usize = 500;

struct SourceFile {
    path: PathBuf,
    module: String,
    /// Lines of the file without its test items.
    production: Vec<SourceLine>,
}

struct SourceLine {
    /// Line number, from 1.
    number: usize,
    text: String,
}

/// Returns the sources of all crates except the tools.
fn sources() -> Vec<SourceFile> {
    let crates = fs::read_dir(package().join("crates")).unwrap();
    let roots = crates.map(|entry| entry.unwrap().path().join("src"));
    let mut found = sources_of("src");
    found.extend(roots.flat_map(|root| sources_below(&root)));
    found
}

/// Returns the sources of the server.
fn server_sources() -> Vec<SourceFile> {
    sources_of("crates/server/src")
}

/// Returns the sources below a directory. Panics if there are only few.
fn sources_of(directory: &str) -> Vec<SourceFile> {
    let found = sources_below(&package().join(directory));
    assert!(found.len() > 20, "only {} source files found", found.len());
    found
}

fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn sources_below(root: &Path) -> Vec<SourceFile> {
    let mut found = Vec::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs")
                && !is_test_file(path.strip_prefix(root).unwrap())
            {
                found.push(source(root, path));
            }
        }
    }
    found
}

fn is_test_file(path: &Path) -> bool {
    path.file_stem().is_some_and(|stem| stem == "tests")
        || path.components().any(|part| part.as_os_str() == "tests")
}

fn source(root: &Path, path: PathBuf) -> SourceFile {
    let text = fs::read_to_string(&path).unwrap();
    let relative = path.strip_prefix(root).unwrap();
    let first = relative
        .components()
        .next()
        .unwrap()
        .as_os_str()
        .to_string_lossy();
    let module = first.trim_end_matches(".rs").to_owned();
    SourceFile {
        path,
        module,
        production: production_lines(&text),
    }
}

/// Returns the lines of a formatted file without the items below `#[cfg(test)]`. Such an item ends
/// with the next line of the same indentation that closes a brace or a statement.
fn production_lines(text: &str) -> Vec<SourceLine> {
    let mut lines = text.lines().enumerate();
    let mut production = Vec::new();
    while let Some((index, line)) = lines.next() {
        if line.trim() == "#[cfg(test)]" {
            let indentation = line.len() - line.trim_start().len();
            lines.find(|(_, line)| ends_item(line, indentation));
        } else {
            production.push(SourceLine {
                number: index + 1,
                text: line.to_owned(),
            });
        }
    }
    production
}

fn ends_item(line: &str, indentation: usize) -> bool {
    let text = line.trim_start();
    line.len() - text.len() == indentation && (text.ends_with(';') || text.ends_with('}'))
}

/// Returns the lines that are neither comments nor documentation.
fn code(source: &SourceFile) -> impl Iterator<Item = &SourceLine> {
    let lines = source.production.iter();
    lines.filter(|line| !line.text.trim_start().starts_with("//"))
}

fn layer(module: &str) -> u8 {
    let found = LAYERS
        .iter()
        .find(|(name, _)| *name == module)
        .map(|(_, layer)| *layer);
    found.unwrap_or_else(|| {
        panic!("module `{module}` has no layer: add it to the table in tests/repository/tidy.rs")
    })
}

fn may_use(from: &str, to: &str) -> bool {
    let user = layer(from);
    from == to || user == PROCESS || layer(to) < user
}

/// Files in which files are opened without the helper: it itself, directories, devices, kernel files,
/// and a file that a command reads once.
const OWN_READERS: [&str; 5] = [
    "crates/settings/src/files.rs",
    "crates/runtime/src/descriptors.rs",
    "crates/runtime/src/tls/certificate.rs",
    "crates/server/src/app/unix_socket.rs",
    "src/cmd/explain.rs",
];

#[test]
fn files_are_read_by_the_helper() {
    const READS: [&str; 3] = ["fs::read(", "fs::read_to_string(", "File::open("];
    let mut found = Vec::new();
    for source in sources() {
        if OWN_READERS.iter().any(|name| source.path.ends_with(name)) {
            continue;
        }
        for line in code(&source) {
            if READS.iter().any(|read| line.text.contains(read)) {
                let path = source.path.display();
                found.push(format!("{path}:{}: use `read_regular_file`", line.number));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn imports_follow_the_layer_table() {
    let mut broken = Vec::new();
    let mut users = BTreeSet::new();
    for source in server_sources() {
        for line in code(&source) {
            for used in used_modules(&line.text) {
                users.insert(source.module.clone());
                if !may_use(&source.module, &used) {
                    broken.push(format!(
                        "{}:{}: `{}` may not use `{used}`",
                        source.path.display(),
                        line.number,
                        source.module
                    ));
                }
            }
        }
    }
    assert!(
        users.len() > 8,
        "the import scan found almost nothing: {users:?}"
    );
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// Returns the modules in the `crate::` paths of a line.
fn used_modules(line: &str) -> Vec<String> {
    let paths = line.split("crate::").skip(1);
    let targets = paths.flat_map(|path| match path.strip_prefix('{') {
        Some(list) => list.split([',', '}']).map(str::trim).collect(),
        None => vec![path],
    });
    targets
        .map(|target| {
            let in_name = |c: &char| c.is_ascii_alphanumeric() || *c == '_';
            target.chars().take_while(in_name).collect::<String>()
        })
        .filter(|name| !name.is_empty())
        .collect()
}

#[test]
fn restricted_text_stays_in_allowed_modules() {
    let mut broken = Vec::new();
    for source in server_sources() {
        for line in code(&source) {
            for (text, modules) in CONFINED {
                if line.text.contains(text) && !modules.contains(&source.module.as_str()) {
                    broken.push(format!(
                        "{}:{}: `{text}` is allowed only in {modules:?}",
                        source.path.display(),
                        line.number
                    ));
                }
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn core_has_no_clock_randomness_or_io() {
    let mut broken = Vec::new();
    for source in sources_of("crates/core/src") {
        for line in code(&source) {
            for text in NOT_IN_CORE.iter().filter(|text| line.text.contains(**text)) {
                broken.push(format!(
                    "{}:{}: `{text}` may not appear in warmroute-core",
                    source.path.display(),
                    line.number
                ));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn source_files_are_short_documented_and_finished() {
    let mut broken = Vec::new();
    for source in sources() {
        let name = source.path.display();
        let lines = source.production.len();
        if lines > MOST_LINES {
            broken.push(format!(
                "{name}: {lines} lines, more than {MOST_LINES}: split the module"
            ));
        }
        let documented = source.production.first();
        if !documented.is_some_and(|line| line.text.starts_with("//!")) {
            broken.push(format!("{name}: has no module documentation"));
        }
        for SourceLine { number, text } in &source.production {
            let marks = ["TODO", "FIXME", "XXX", "unimplemented!", "todo!"];
            if marks.iter().any(|mark| text.contains(mark)) {
                broken.push(format!("{name}:{number}: unfinished: {}", text.trim()));
            }
            if text.contains(".unwrap()") {
                broken.push(format!("{name}:{number}: unwrap outside tests"));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn logs_have_no_debug_forms() {
    let mut broken = Vec::new();
    for source in sources() {
        for SourceLine { number, text } in code(&source) {
            let text = text.trim();
            // `?` in a log macro writes the Debug form. Lines of debug and trace, and regular
            // expressions, may contain it.
            let has_marker = ["= ?", ", ?", "(?"].iter().any(|mark| text.contains(mark));
            let is_exempt = ["debug!(", "trace!(", "r\"", "r##\""]
                .iter()
                .any(|mark| text.contains(mark));
            if (has_marker || text.starts_with('?')) && !is_exempt {
                broken.push(format!(
                    "{}:{number}: write the value with Display: {text}",
                    source.path.display()
                ));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}
