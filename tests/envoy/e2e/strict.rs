//! The metrics page of a running process, parsed by the strict parsers of Prometheus' Python
//! client.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use warmroute_testbed::programs::{install_once, target_dir};
use warmroute_testbed::pypi::{self, PypiPackages};
use xxhash_rust::xxh3::xxh3_64;

const REQUIREMENTS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/envoy/e2e/requirements.txt"
);
const SCRIPT: &[u8] = include_bytes!("parse_metrics.py");

/// Format of a page. Its text is the name of the parser.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PageFormat {
    OpenMetrics,
    Prometheus,
}

/// Returns the type and the number of samples of each family. Panics if the parser rejects the
/// page.
pub(crate) fn parse(page: &str, format: PageFormat) -> BTreeMap<String, (String, usize)> {
    let script = script();
    let parser = match format {
        PageFormat::OpenMetrics => "openmetrics",
        PageFormat::Prometheus => "prometheus",
    };
    let mut command = Command::new("python3");
    command
        .arg("-B")
        .arg(&script)
        .arg(parser)
        .env("PYTHONPATH", script.parent().unwrap());
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(page.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "the page is not valid in {format:?}: {errors}\n{page}"
    );
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns the path of the script in a directory with its packages, which are installed on first
/// use.
fn script() -> PathBuf {
    let requirements = fs::read(REQUIREMENTS).unwrap();
    let name = format!(
        "prometheus-client-{:016x}",
        xxh3_64(&[&requirements, SCRIPT].concat())
    );
    let installed = install_once(
        &target_dir().unwrap(),
        &name,
        "parse_metrics.py",
        |scratch| {
            let packages = scratch.join("packages");
            pypi::install(
                PypiPackages::Hashed(Path::new(REQUIREMENTS)),
                scratch,
                &packages,
            )?;
            let script = packages.join("parse_metrics.py");
            fs::write(&script, SCRIPT)?;
            fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
            Ok(packages)
        },
    );
    installed.unwrap_or_else(|error| panic!("{error:#}"))
}
