//! A real Envoy: which one, with which of the shipped configurations, started and ready.

mod install;

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::child::{Child, last_lines};
use super::ports::{self, Ready};

pub(crate) use install::binary;

/// How long Envoy may take from start to ready; on a quiet machine it needs a third of a second.
const START: Duration = Duration::from_secs(30);
/// Where the shipped configurations are.
const SHIPPED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/envoy");

/// The version an executable says it has, such as `1.40.0`.
pub(crate) fn version(envoy: &Path) -> anyhow::Result<String> {
    let output = Command::new(envoy).arg("--version").output();
    let output = output.with_context(|| format!("cannot run {}", envoy.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    // envoy  version: <commit>/1.40.0/Clean/RELEASE/BoringSSL
    let version = text
        .split("version:")
        .nth(1)
        .and_then(|build| build.split('/').nth(1));
    version
        .map(str::to_owned)
        .with_context(|| format!("{} --version says {text:?}", envoy.display()))
}

/// Has Envoy check a configuration without running it; the error holds Envoy's own words.
pub(crate) fn validate(config: &Path) -> anyhow::Result<()> {
    let checked = Command::new(binary()?)
        .args(["--mode", "validate", "-c"])
        .arg(config)
        .output()?;
    let errors = last_lines(&String::from_utf8_lossy(&checked.stderr));
    ensure!(
        checked.status.success(),
        "Envoy refuses {}:\n{errors}",
        config.display()
    );
    Ok(())
}

/// The files that are shipped for Envoy. What is beside them for warmroute is called `<name>.warmroute.yaml`.
pub(crate) fn shipped() -> anyhow::Result<Vec<PathBuf>> {
    let files = fs::read_dir(SHIPPED)?
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

/// What warmroute's configuration has to say for one of the shipped files, where that is more than where to listen.
pub(crate) fn counterpart(name: &str) -> anyhow::Result<Option<serde_json::Value>> {
    let file = Path::new(SHIPPED).join(format!("{name}.warmroute.yaml"));
    if !file.exists() {
        return Ok(None);
    }
    let text = fs::read_to_string(&file)?;
    Ok(Some(serde_saphyr::from_str(&text).with_context(|| {
        format!("cannot read {}", file.display())
    })?))
}

/// A shipped configuration, `envoy/standalone.yaml` unless another is named, with ports and places of one's own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Standalone<'a> {
    /// Holds the socket of ext_proc and the endpoint file.
    pub(crate) run_dir: &'a Path,
    /// Where clients connect.
    pub(crate) port: u16,
    /// Where Envoy's own pages are.
    pub(crate) admin_port: u16,
}

impl Standalone<'_> {
    /// The shipped text with nothing but the ports and the directory replaced; an error if it has no such places.
    pub(crate) fn config(&self) -> anyhow::Result<String> {
        self.config_of("standalone", &[])
    }

    /// The same of another file. Workers that stand in it by hand, with the ports from 8001 on, are these.
    pub(crate) fn config_of(&self, name: &str, workers: &[SocketAddr]) -> anyhow::Result<String> {
        let file = Path::new(SHIPPED).join(format!("{name}.yaml"));
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
        for (shipped, own) in ports {
            let found = text.matches(shipped).count();
            ensure!(
                found == 1,
                "{} has {shipped:?} {found} times, not once",
                file.display()
            );
            text = text.replace(shipped, &format!("port_value: {own}}}"));
        }
        ensure!(
            text.contains("/tmp/warmroute/ext_proc.sock"),
            "{} has no socket of ext_proc",
            file.display()
        );
        let by_hand = |number: usize| format!("port_value: {}}}", 8000 + number);
        for (number, worker) in (1..).zip(workers) {
            text = text.replace(
                &by_hand(number),
                &format!("port_value: {}}}", worker.port()),
            );
        }
        let left = by_hand(workers.len() + 1);
        ensure!(
            !text.contains(&left),
            "{} has more workers than were given: {left:?}",
            file.display()
        );
        Ok(text.replace("/tmp/warmroute", run_dir))
    }

    /// Where Envoy expects ext_proc.
    pub(crate) fn ext_proc_socket(&self) -> PathBuf {
        self.run_dir.join("ext_proc.sock")
    }

    /// The file Envoy reads its workers from; it must exist before Envoy starts.
    pub(crate) fn endpoint_file(&self) -> PathBuf {
        self.run_dir.join("eds_workers.yaml")
    }

    /// The URL of a path at the port for clients.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    /// The URL of one of Envoy's own pages.
    pub(crate) fn admin_url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.admin_port)
    }
}

/// The shipped configuration without warmroute: no external processor, and round robin over the workers.
pub(crate) fn round_robin(standalone: &str) -> anyhow::Result<String> {
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

/// Replaces the endpoint file of cluster `workers` by rename, the only change that Envoy notices.
pub(crate) fn write_endpoints(file: &Path, endpoints: &[SocketAddr]) -> anyhow::Result<()> {
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
/// The configuration and the log stay in `run_dir`. Without hot restart, several Envoys do not get in each other's way.
pub(crate) async fn start(config: &str, run_dir: &Path, concurrency: u32) -> anyhow::Result<Child> {
    let deadline = Instant::now() + START;
    let envoy = tokio::task::spawn_blocking(binary).await??;
    let (file, admin) = (run_dir.join("envoy.yaml"), run_dir.join("envoy-admin"));
    fs::write(&file, config)?;
    // That of an Envoy before this one must not be taken for an answer.
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
    let child = Child::spawn("envoy", &command, run_dir)?;

    let left = || deadline.saturating_duration_since(Instant::now());
    // Envoy writes the address down once it listens there; that saves reading it out of any configuration.
    let has_address = async || {
        !child.is_running() || fs::read_to_string(&admin).is_ok_and(|text| !text.is_empty())
    };
    ports::until(left(), has_address).await;
    let address = fs::read_to_string(&admin).unwrap_or_default();
    ports::wait_ready(
        Ready::Http(&format!("http://{address}/ready")),
        left(),
        &child,
    )
    .await?;
    Ok(child)
}
