//! The real warmroute program as in a pod, with a service account mounted as a kubelet mounts it.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};
use warmroute_server::fleet::discovery::worker_list_filter::REMOVAL_GRACE_PERIOD;
use warmroute_testbed::child_process::ChildProcess;
use warmroute_testbed::ports::{FreePort, until};

/// Timeout of waits, much longer than any reaction without an intended delay.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// Unit of the CPU times in `/proc`, the same on every Linux system.
const USER_HZ: u64 = 100;
const POLL: Duration = Duration::from_millis(20);
const CONFIG: &str = include_str!("../../deploy/overlays/istio/warmroute.yaml");
/// Runs in a separate mount namespace. Hides the service account of the machine, if any, and mounts
/// the directory `$0` in its place unless `$0` is empty.
const MOUNT_SCRIPT: &str = r#"set -e
mount -t tmpfs tmpfs /var/run
if [ -n "$0" ]; then
  mkdir -p /var/run/secrets/kubernetes.io/serviceaccount
  mount --bind "$0" /var/run/secrets/kubernetes.io/serviceaccount
fi
exec "$@""#;

fn in_mount_namespace(directory: &str) -> Command {
    let mut command = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        command.arg("--map-root-user");
    }
    command.args(["--mount", "--", "sh", "-c", MOUNT_SCRIPT, directory]);
    command
}

/// Checks that this machine allows mounting a service account.
pub(crate) fn try_mount() -> Result<(), String> {
    let output = in_mount_namespace("/")
        .arg("true")
        .output()
        .map_err(|error| error.to_string())?;
    let errors = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        Ok(())
    } else {
        Err(errors.trim().replace('\n', "; "))
    }
}

/// Files in the directory of a service account.
#[derive(Clone, Debug)]
pub(crate) struct MountedAccount {
    pub(crate) token: String,
    pub(crate) ca: String,
    pub(crate) namespace: String,
}

/// Service account directory, written as a kubelet writes it: files are links into `..data`, which
/// a rename replaces.
struct AccountVolume {
    directory: PathBuf,
    versions: u32,
}

impl AccountVolume {
    fn create(directory: PathBuf, account: &MountedAccount) -> anyhow::Result<Self> {
        fs::create_dir_all(&directory)?;
        let mut volume = Self {
            directory,
            versions: 0,
        };
        volume.write(account)?;
        for name in ["token", "ca.crt", "namespace"] {
            symlink(format!("..data/{name}"), volume.directory.join(name))?;
        }
        Ok(volume)
    }

    fn write(&mut self, account: &MountedAccount) -> anyhow::Result<()> {
        self.versions += 1;
        let version = format!("..version_{}", self.versions);
        let directory = self.directory.join(&version);
        fs::create_dir(&directory)?;
        fs::write(directory.join("token"), &account.token)?;
        fs::write(directory.join("ca.crt"), &account.ca)?;
        fs::write(directory.join("namespace"), &account.namespace)?;
        symlink(version, self.directory.join("..data_new"))?;
        fs::rename(
            self.directory.join("..data_new"),
            self.directory.join("..data"),
        )?;
        Ok(())
    }
}

/// Environment and configuration of a warmroute process.
pub(crate) struct RouterOptions {
    pub(crate) api_server: SocketAddr,
    /// Service account to mount, if any.
    pub(crate) account: Option<MountedAccount>,
    /// Merged into the shipped configuration. A null value removes its key.
    pub(crate) config: Value,
    pub(crate) dir: PathBuf,
}

/// A running warmroute process.
pub(crate) struct RouterProcess {
    child: ChildProcess,
    command: Command,
    volume: Option<AccountVolume>,
    dir: tempfile::TempDir,
    http: reqwest::Client,
    admin: u16,
    pub(crate) ext_proc: u16,
}

impl RouterProcess {
    /// Starts the process and waits for its admin listener.
    pub(crate) async fn start(options: RouterOptions) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("router-")
            .tempdir_in(&options.dir)?;
        let [ext_proc, admin] = [FreePort::find()?, FreePort::find()?].map(FreePort::release);
        let volume = match &options.account {
            Some(account) => Some(AccountVolume::create(
                dir.path().join("serviceaccount"),
                account,
            )?),
            None => None,
        };
        let mut config = shipped_config()?;
        let own = json!({
            "listeners": {"ext_proc": null, "admin": null},
            "replicas": null,
            "process": {"drain": {"grace_period": "0s", "timeout": "1s"}},
            // No engines listen at the addresses of the pods.
            "engines": {"discovery": {"enabled": false}, "parity_check": {"enabled": false}},
        });
        merge(&mut config, &own);
        config["listeners"]["ext_proc"] = json!({"address": format!("127.0.0.1:{ext_proc}")});
        config["listeners"]["admin"] = json!({"address": format!("127.0.0.1:{admin}")});
        merge(&mut config, &options.config);
        let path = dir.path().join("warmroute.yaml");
        fs::write(&path, config.to_string())?;
        let command = pod_command(&volume, &options, dir.path());
        let mut serve = clone_command(&command);
        serve.arg("serve").arg("--config").arg(&path);
        let child = ChildProcess::spawn("warmroute", &serve, dir.path())?;
        let http = warmroute_runtime::tls::http_client_builder()
            .timeout(Duration::from_secs(5))
            .build()?;
        let router = Self {
            child,
            command,
            volume,
            dir,
            http,
            admin,
            ext_proc,
        };
        router.wait_admin().await?;
        Ok(router)
    }

    async fn wait_admin(&self) -> anyhow::Result<()> {
        let answers = async || self.page("healthz").await.is_ok() || !self.child.is_running();
        let answered = until(PATIENCE, answers).await && self.child.is_running();
        ensure!(
            answered,
            "warmroute did not start:\n{}",
            self.child.log_tail()
        );
        Ok(())
    }

    /// Kills the process with SIGKILL and starts it again with the same configuration.
    pub(crate) async fn restart(&mut self) -> anyhow::Result<()> {
        self.child.kill9();
        ensure!(
            until(PATIENCE, async || !self.child.is_running()).await,
            "warmroute did not end"
        );
        let mut serve = clone_command(&self.command);
        serve
            .arg("serve")
            .arg("--config")
            .arg(self.dir.path().join("warmroute.yaml"));
        self.child = ChildProcess::spawn("warmroute", &serve, self.dir.path())?;
        self.wait_admin().await
    }

    /// Runs another command of warmroute in the same pod. Returns its exit code and output.
    pub(crate) async fn run(&self, arguments: &[&str]) -> anyhow::Result<(i32, String)> {
        let mut command = tokio::process::Command::from(clone_command(&self.command));
        command
            .args(arguments)
            .arg("--config")
            .arg(self.dir.path().join("warmroute.yaml"))
            .kill_on_drop(true);
        let output = command.output().await?;
        let text = [output.stdout, output.stderr].concat();
        Ok((
            output.status.code().unwrap_or(-1),
            String::from_utf8_lossy(&text).into_owned(),
        ))
    }

    /// Replaces the files of the service account.
    pub(crate) fn mount(&mut self, account: &MountedAccount) -> anyhow::Result<()> {
        self.volume
            .as_mut()
            .context("no service account is mounted")?
            .write(account)
    }

    pub(crate) fn is_running(&self) -> bool {
        self.child.is_running()
    }

    /// Returns the CPU time of the process so far.
    pub(crate) fn cpu(&self) -> anyhow::Result<Duration> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.pid()))?;
        // The fields follow the name of the program, which may contain spaces.
        let fields: Vec<&str> = stat
            .rsplit(") ")
            .next()
            .unwrap_or_default()
            .split(' ')
            .collect();
        let ticks: u64 = fields.get(11).context("utime")?.parse::<u64>()?
            + fields.get(12).context("stime")?.parse::<u64>()?;
        Ok(Duration::from_millis(ticks * 1000 / USER_HZ))
    }

    /// Returns the resident memory in MiB.
    pub(crate) fn resident(&self) -> anyhow::Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.pid()))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .context("VmRSS")?;
        Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? / 1024)
    }

    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.child.log()).unwrap_or_default()).into_owned()
    }

    /// Returns the number of log lines that contain a text.
    pub(crate) fn log_lines(&self, text: &str) -> usize {
        self.log()
            .lines()
            .filter(|line| line.contains(text))
            .count()
    }

    pub(crate) async fn page(&self, page: &str) -> anyhow::Result<String> {
        let url = format!("http://127.0.0.1:{}/{page}", self.admin);
        Ok(self.http.get(url).send().await?.text().await?)
    }

    pub(crate) async fn debug(&self, page: &str) -> anyhow::Result<Value> {
        Ok(serde_json::from_str(
            &self.page(&format!("debug/{page}")).await?,
        )?)
    }

    /// Sends `POST /debug/explain` for a completion of a model.
    pub(crate) async fn explain(&self, model: &str) -> anyhow::Result<Value> {
        let query = json!({"path": "/v1/completions", "headers": {}, "body": {"model": model, "prompt": "hello"}});
        let url = format!(
            "http://127.0.0.1:{}{}",
            self.admin,
            warmroute_server::admin::explain::EXPLAIN_PATH
        );
        Ok(self
            .http
            .post(url)
            .json(&query)
            .send()
            .await?
            .json()
            .await?)
    }

    /// Returns name and endpoint of each worker, followed by `-` if it is draining.
    pub(crate) async fn fleet(&self) -> anyhow::Result<Vec<String>> {
        self.fleet_by(|worker| {
            let mark = if worker["draining"] == true { " -" } else { "" };
            format!(
                "{} {}{mark}",
                pod_name(worker),
                worker["endpoint"].as_str().unwrap_or_default()
            )
        })
        .await
    }

    /// Formats each worker with `text` and sorts the results.
    pub(crate) async fn fleet_by(
        &self,
        text: impl Fn(&Value) -> String,
    ) -> anyhow::Result<Vec<String>> {
        let page = self.debug("fleet").await?;
        let members = page["members"].as_array().context("no members")?;
        let mut fleet: Vec<String> = members
            .iter()
            .map(|member| text(&member["worker"]))
            .collect();
        fleet.sort();
        Ok(fleet)
    }

    /// Waits until the fleet is as expected. Returns the elapsed time.
    pub(crate) async fn wait_fleet(&self, expected: &[&str]) -> anyhow::Result<Duration> {
        self.wait_fleet_within(PATIENCE, expected).await
    }

    pub(crate) async fn wait_fleet_within(
        &self,
        limit: Duration,
        expected: &[&str],
    ) -> anyhow::Result<Duration> {
        let mut expected: Vec<&str> = expected.to_vec();
        expected.sort_unstable();
        let began = Instant::now();
        loop {
            let found = self.fleet().await?;
            if found == expected {
                return Ok(began.elapsed());
            }
            if began.elapsed() > limit {
                bail!(
                    "the fleet is {found:?}, not {expected:?}, after {limit:?}\n{}",
                    self.child.log_tail()
                );
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Waits until the grace period has expired and all workers are removed. Returns the elapsed time.
    pub(crate) async fn wait_removal(&self) -> anyhow::Result<Duration> {
        self.wait_fleet_within(REMOVAL_GRACE_PERIOD + PATIENCE, &[])
            .await
    }

    /// Asserts that the fleet stays as expected for a period.
    pub(crate) async fn keeps_fleet(
        &self,
        period: Duration,
        expected: &[&str],
    ) -> anyhow::Result<()> {
        let end = Instant::now() + period;
        while Instant::now() < end {
            let found = self.fleet().await?;
            ensure!(
                found == expected,
                "the fleet became {found:?}, not {expected:?}\n{}",
                self.child.log_tail()
            );
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// Waits until the log contains a text. Returns the elapsed time.
    pub(crate) async fn wait_log(&self, text: &str) -> anyhow::Result<Duration> {
        self.wait_log_within(PATIENCE, text).await
    }

    pub(crate) async fn wait_log_within(
        &self,
        limit: Duration,
        text: &str,
    ) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let found = until(limit, async || self.log().contains(text)).await;
        ensure!(
            found,
            "the log does not contain {text:?}; its last lines:\n{}",
            self.child.log_tail()
        );
        Ok(began.elapsed())
    }

    /// Returns the value of a series, or `None` if it does not exist.
    pub(crate) async fn metric(&self, series: &str) -> anyhow::Result<Option<f64>> {
        let page = self.page("metrics").await?;
        let line = page
            .lines()
            .find_map(|line| line.strip_prefix(&format!("warmroute_{series} ")));
        Ok(line.map(|value| value.trim().parse()).transpose()?)
    }

    /// Returns true if `discovery_up` of a pool is 1.
    pub(crate) async fn is_up(&self, pool: &str) -> anyhow::Result<bool> {
        let value = self
            .metric(&format!("discovery_up{{source=\"kubernetes {pool}\"}}"))
            .await?;
        Ok(value.context("no such source")? == 1.0)
    }

    /// Waits until `discovery_up` of a pool has a value. Returns the elapsed time.
    pub(crate) async fn wait_up(
        &self,
        pool: &str,
        is_up: bool,
        limit: Duration,
    ) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let reached = until(limit, async || {
            self.is_up(pool).await.is_ok_and(|found| found == is_up)
        })
        .await;
        ensure!(
            reached,
            "discovery_up of {pool} is not {is_up} after {limit:?}\n{}",
            self.child.log_tail()
        );
        Ok(began.elapsed())
    }

    pub(crate) async fn is_ready(&self) -> bool {
        let url = format!("http://127.0.0.1:{}/readyz", self.admin);
        self.http
            .get(url)
            .send()
            .await
            .is_ok_and(|answer| answer.status().is_success())
    }

    /// Waits until `/debug/cluster` contains a text. Returns the elapsed time.
    pub(crate) async fn wait_cluster(&self, text: &str) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let page = async || self.page("debug/cluster").await.unwrap_or_default();
        let found = until(PATIENCE, async || page().await.contains(text)).await;
        ensure!(
            found,
            "/debug/cluster does not contain {text}: {}\n{}",
            page().await,
            self.child.log_tail()
        );
        Ok(began.elapsed())
    }
}

impl Drop for RouterProcess {
    fn drop(&mut self) {
        // A drain would take time and is not needed.
        self.child.kill9();
    }
}

/// Returns the name of a worker's pod, without the namespace.
pub(crate) fn pod_name(worker: &Value) -> &str {
    worker["name"]
        .as_str()
        .unwrap_or_default()
        .rsplit('/')
        .next()
        .unwrap_or_default()
}

fn pod_command(volume: &Option<AccountVolume>, options: &RouterOptions, home: &Path) -> Command {
    let directory = volume
        .as_ref()
        .map(|volume| volume.directory.to_string_lossy().into_owned())
        .unwrap_or_default();
    let mut command = in_mount_namespace(&directory);
    command.arg(env!("CARGO_BIN_EXE_warmroute"));
    command.env("HOME", home).env_remove("KUBECONFIG");
    command.env(
        "KUBERNETES_SERVICE_HOST",
        options.api_server.ip().to_string(),
    );
    command.env(
        "KUBERNETES_SERVICE_PORT",
        options.api_server.port().to_string(),
    );
    command
}

fn clone_command(command: &Command) -> Command {
    let mut clone = Command::new(command.get_program());
    clone.args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => clone.env(name, value),
            None => clone.env_remove(name),
        };
    }
    clone
}

/// Returns the configuration of the shipped ConfigMap without the parts that do not work on the
/// loopback interface.
fn shipped_config() -> anyhow::Result<Value> {
    let mut config: Value = serde_saphyr::from_str(CONFIG)?;
    let worker = config
        .pointer_mut("/workers/kubernetes/pools/0/worker")
        .context("the configuration has no worker")?;
    merge(worker, &json!({"kv_events": null}));
    let model = config
        .pointer_mut("/models/0")
        .context("the configuration has no model")?;
    // Loading the tokenizer takes seconds. Cases that need it configure its files.
    merge(model, &json!({"tokenizer": null, "tokenizer_config": null}));
    Ok(config)
}

/// Merges two JSON values as RFC 7396 does.
fn merge(into: &mut Value, change: &Value) {
    let Some(change) = change.as_object() else {
        *into = change.clone();
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    for (key, value) in change {
        match into.as_object_mut() {
            Some(object) if value.is_null() => drop(object.shift_remove(key)),
            Some(object) => merge(object.entry(key.clone()).or_insert(Value::Null), value),
            None => {}
        }
    }
}
