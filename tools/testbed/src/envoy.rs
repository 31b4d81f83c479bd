//! A real Envoy: finds it, prepares one of the shipped configurations, and starts it.

mod install;

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::child_process::{ChildProcess, last_lines};
use crate::ports::{self, PATIENCE, ReadyCheck};

pub use install::{EnvoyLocation, VERSION, binary, locate};

/// Returns the directory of the shipped configurations.
fn shipped_dir() -> PathBuf {
    crate::repository().join("envoy")
}

/// Returns the version that an executable reports, such as `1.40.0`.
pub fn version(envoy: &Path) -> anyhow::Result<String> {
    let output = Command::new(envoy).arg("--version").output();
    let output = output.with_context(|| format!("cannot run {}", envoy.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    // The output is: envoy  version: <commit>/1.40.0/Clean/RELEASE/BoringSSL
    let version = text
        .split("version:")
        .nth(1)
        .and_then(|build| build.split('/').nth(1));
    version
        .map(str::to_owned)
        .with_context(|| format!("{} --version prints {text:?}", envoy.display()))
}

/// Validates a configuration with Envoy. The error contains Envoy's message.
pub fn validate(config: &Path) -> anyhow::Result<()> {
    let checked = Command::new(binary()?)
        .args(["--mode", "validate", "-c"])
        .arg(config)
        .output()?;
    let errors = last_lines(&String::from_utf8_lossy(&checked.stderr));
    ensure!(
        checked.status.success(),
        "Envoy rejects {}:\n{errors}",
        config.display()
    );
    Ok(())
}

/// Returns the shipped Envoy configurations, without warmroute's counterparts
/// `<name>.warmroute.yaml`.
pub fn shipped_configs() -> anyhow::Result<Vec<PathBuf>> {
    let files = fs::read_dir(shipped_dir())?
        .map(|entry| Ok(entry?.path()))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let name = |file: &PathBuf| {
        file.file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    };
    let mut files: Vec<_> = files
        .into_iter()
        .filter(|file| name(file).ends_with(".yaml"))
        .collect();
    files.retain(|file| !name(file).ends_with(".warmroute.yaml"));
    files.sort();
    Ok(files)
}

/// Returns the settings that warmroute needs for a shipped configuration in addition to its
/// addresses.
pub fn warmroute_settings(name: &str) -> anyhow::Result<Option<serde_json::Value>> {
    let file = shipped_dir().join(format!("{name}.warmroute.yaml"));
    if !file.exists() {
        return Ok(None);
    }
    let text = fs::read_to_string(&file)?;
    Ok(Some(serde_saphyr::from_str(&text).with_context(|| {
        format!("cannot read {}", file.display())
    })?))
}

/// Ports and directory of one Envoy. They replace those of a shipped configuration.
#[derive(Debug, Clone, Copy)]
pub struct EnvoySetup<'a> {
    /// Directory of the ext_proc socket and the endpoint file.
    pub run_dir: &'a Path,
    /// Port for clients.
    pub port: u16,
    /// Port of Envoy's admin pages.
    pub admin_port: u16,
}

impl EnvoySetup<'_> {
    /// Returns `envoy/standalone.yaml` with only the ports and the directory replaced. Fails if the
    /// file lacks one of them.
    pub fn standalone_config(&self) -> anyhow::Result<String> {
        self.shipped_config("standalone", &[])
    }

    /// Returns another shipped configuration with the same replacements. `workers` replace its
    /// static workers, which have the ports from 8001 on.
    pub fn shipped_config(&self, name: &str, workers: &[SocketAddr]) -> anyhow::Result<String> {
        let file = shipped_dir().join(format!("{name}.yaml"));
        let mut text =
            fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let run_dir = self
            .run_dir
            .to_str()
            .context("the run directory is not valid UTF-8")?;
        let ports = [
            ("port_value: 10000}", self.port),
            ("port_value: 9900}", self.admin_port),
        ];
        for (shipped, port) in ports {
            let found = text.matches(shipped).count();
            ensure!(
                found == 1,
                "{} has {shipped:?} {found} times, not once",
                file.display()
            );
            text = text.replace(shipped, &format!("port_value: {port}}}"));
        }
        ensure!(
            text.contains("/tmp/warmroute/ext_proc.sock"),
            "{} has no socket of ext_proc",
            file.display()
        );
        let static_worker = |number: usize| format!("port_value: {}}}", 8000 + number);
        for (number, worker) in (1..).zip(workers) {
            text = text.replace(
                &static_worker(number),
                &format!("port_value: {}}}", worker.port()),
            );
        }
        let remaining = static_worker(workers.len() + 1);
        ensure!(
            !text.contains(&remaining),
            "{} has more static workers than `workers`: {remaining:?}",
            file.display()
        );
        Ok(text.replace("/tmp/warmroute", run_dir))
    }

    /// Returns the ext_proc socket that Envoy connects to.
    pub fn ext_proc_socket(&self) -> PathBuf {
        self.run_dir.join("ext_proc.sock")
    }

    /// Returns the file from which Envoy reads its workers. It must exist before Envoy starts.
    pub fn endpoint_file(&self) -> PathBuf {
        self.run_dir.join("eds_workers.yaml")
    }

    /// Returns the URL of a path at the client port.
    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    /// Returns the URL of one of Envoy's admin pages.
    pub fn admin_url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.admin_port)
    }
}

/// Returns the shipped configuration without warmroute: no external processor, and round robin over
/// the workers.
pub fn round_robin_config(standalone: &str) -> anyhow::Result<String> {
    let mut config: Value = serde_saphyr::from_str(standalone)?;
    let manager =
        config.pointer_mut("/static_resources/listeners/0/filter_chains/0/filters/0/typed_config");
    let manager = manager.context("the shipped configuration has no connection manager")?;
    let filters = manager["http_filters"]
        .as_array_mut()
        .context("the shipped configuration has no HTTP filters")?;
    filters.retain(|filter| filter["name"] == "envoy.filters.http.router");
    ensure!(
        filters.len() == 1,
        "only the router filter should be left: {filters:?}"
    );
    let hosts = manager["route_config"]["virtual_hosts"]
        .as_array_mut()
        .into_iter()
        .flatten();
    for route in hosts.flat_map(|host| host["routes"].as_array_mut().into_iter().flatten()) {
        route
            .as_object_mut()
            .map(|route| route.remove("typed_per_filter_config"));
    }
    let policy =
        "type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin";
    let policies = json!([{"typed_extension_config": {
        "name": "envoy.load_balancing_policies.round_robin",
        "typed_config": {"@type": policy},
    }}]);
    let clusters = config["static_resources"]["clusters"]
        .as_array_mut()
        .into_iter()
        .flatten();
    for cluster in clusters.filter(|cluster| cluster["name"] == "workers") {
        cluster["load_balancing_policy"]["policies"] = policies.clone();
    }
    Ok(config.to_string())
}

/// Replaces the endpoint file of the cluster `workers` by a rename, the only kind of change that
/// Envoy detects.
pub fn write_endpoints(file: &Path, endpoints: &[SocketAddr]) -> anyhow::Result<()> {
    let socket = |at: &SocketAddr| json!({"address": at.ip(), "port_value": at.port()});
    let endpoint = |at| json!({"endpoint": {"address": {"socket_address": socket(at)}}});
    // JSON is YAML.
    let resources = json!({"resources": [{
        "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": "workers",
        "endpoints": [{"lb_endpoints": endpoints.iter().map(endpoint).collect::<Vec<_>>()}],
    }]});
    let dir = file
        .parent()
        .context("the endpoint file has no directory")?;
    let new = tempfile::NamedTempFile::new_in(dir)?;
    fs::write(&new, resources.to_string())?;
    new.persist(file)?;
    Ok(())
}

/// Starts Envoy with a configuration and `concurrency` worker threads, and waits until it is ready.
///
/// The configuration and the log stay in `run_dir`. Hot restart is disabled, so that several Envoys
/// can run at the same time.
pub async fn start(config: &str, run_dir: &Path, concurrency: u32) -> anyhow::Result<ChildProcess> {
    let deadline = Instant::now() + PATIENCE;
    let envoy = tokio::task::spawn_blocking(binary).await??;
    let file = run_dir.join("envoy.yaml");
    let admin = run_dir.join("envoy-admin");
    fs::write(&file, config)?;
    // Removes the address file of an earlier Envoy, so that it is not read.
    _ = fs::remove_file(&admin);
    let mut command = Command::new(envoy);
    command
        .arg("-c")
        .arg(&file)
        .arg("--admin-address-path")
        .arg(&admin);
    command.args([
        "--disable-hot-restart",
        "--log-level",
        "info",
        "--concurrency",
        &concurrency.to_string(),
    ]);
    let child = ChildProcess::spawn("envoy", &command, run_dir)?;

    let remaining = || deadline.saturating_duration_since(Instant::now());
    // Envoy writes its admin address to a file once it listens, so the address need not be parsed
    // from the configuration.
    let has_address = async || {
        !child.is_running() || fs::read_to_string(&admin).is_ok_and(|text| !text.is_empty())
    };
    ports::until(remaining(), has_address).await;
    let address = fs::read_to_string(&admin).unwrap_or_default();
    ports::wait_ready(
        ReadyCheck::Http(&format!("http://{address}/ready")),
        remaining(),
        &child,
    )
    .await?;
    Ok(child)
}
