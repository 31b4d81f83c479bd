//! etcd and kube-apiserver on the loopback interface, with TLS, RBAC and an audit log, but without
//! kubelet and controllers.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use indexmap::IndexMap;
use parking_lot::Mutex;
use serde_json::{Value, json};
use warmroute_testbed::child_process::ChildProcess;
use warmroute_testbed::ports::{FreePort, ReadyCheck, until, wait_ready};

use crate::admin_client::{AdminClient, collection};
use crate::install::SuitePrograms;
use crate::pki::TestAuthority;

const ADMIN_TOKEN: &str = "admin-token";
/// Timeout for the start of an API server on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Audit policy that logs the requests of service accounts without their bodies.
const AUDIT_POLICY: &str = r#"{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}, {"level": "None"}]}"#;
const CRD_DIRECTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/crds");

/// A custom resource definition of the test data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResourceDefinition {
    pub(crate) api: &'static str,
    pub(crate) plural: &'static str,
}

pub(crate) const INFERENCE_POOLS: ResourceDefinition = ResourceDefinition {
    api: "inference.networking.k8s.io/v1",
    plural: "inferencepools",
};
pub(crate) const OBJECTIVES: ResourceDefinition = ResourceDefinition {
    api: "llm-d.ai/v1alpha2",
    plural: "inferenceobjectives",
};
pub(crate) const REWRITES: ResourceDefinition = ResourceDefinition {
    api: "llm-d.ai/v1alpha2",
    plural: "inferencemodelrewrites",
};
pub(crate) const OLD_OBJECTIVES: ResourceDefinition = ResourceDefinition {
    api: "inference.networking.x-k8s.io/v1alpha2",
    plural: "inferenceobjectives",
};

impl ResourceDefinition {
    fn group(self) -> &'static str {
        self.api.split('/').next().unwrap_or_default()
    }

    fn path(self) -> String {
        format!(
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{}.{}",
            self.plural,
            self.group()
        )
    }
}

/// A request of a service account, from the audit log.
#[derive(Clone, Debug)]
pub(crate) struct AuditRecord {
    pub(crate) verb: String,
    pub(crate) resource: String,
}

/// The two processes, with a client that has all rights.
pub(crate) struct TestControlPlane {
    pub(crate) admin: AdminClient,
    pub(crate) authority: TestAuthority,
    pub(crate) address: SocketAddr,
    pub(crate) programs: SuitePrograms,
    dir: tempfile::TempDir,
    etcd_ports: [u16; 2],
    etcd: Mutex<Option<ChildProcess>>,
    api_server: Mutex<Option<Arc<ChildProcess>>>,
    http: reqwest::Client,
    serial: AtomicU64,
}

impl TestControlPlane {
    /// Starts both processes and waits until the API server is ready. If `install` is set, also
    /// installs all definitions of the test data.
    pub(crate) async fn start(programs: &SuitePrograms, install: bool) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("apiserver-")
            .tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
        let [client, peer, port] =
            [FreePort::find()?, FreePort::find()?, FreePort::find()?].map(FreePort::release);
        let authority = TestAuthority::new("test-cluster");
        let file = |name: &str, text: &str| std::fs::write(dir.path().join(name), text);
        let serving = authority.sign(1);
        let signing = authority.sign(2);
        file("tls.crt", &serving.cert)?;
        file("tls.key", &serving.key)?;
        file("ca.crt", &authority.cert)?;
        file("service-account.crt", &signing.cert)?;
        file("service-account.key", &signing.key)?;
        file(
            "tokens.csv",
            &format!("{ADMIN_TOKEN},admin,admin,\"system:masters\"\n"),
        )?;
        file("audit-policy.json", AUDIT_POLICY)?;
        let plane = Self {
            admin: AdminClient::new(port, &authority.cert, ADMIN_TOKEN)?,
            authority,
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
            programs: programs.clone(),
            dir,
            etcd_ports: [client, peer],
            etcd: Mutex::default(),
            api_server: Mutex::default(),
            http: warmroute_runtime::tls::http_client_builder()
                .timeout(Duration::from_secs(10))
                .build()?,
            serial: AtomicU64::new(10),
        };
        plane.start_etcd().await?;
        plane.start_api_server(&[]).await?;
        if install {
            for entry in std::fs::read_dir(CRD_DIRECTORY)? {
                let path = entry?.path();
                if path
                    .extension()
                    .is_some_and(|extension| extension == "yaml")
                {
                    plane.install_file(&path).await?;
                }
            }
            for definition in [INFERENCE_POOLS, OBJECTIVES, REWRITES, OLD_OBJECTIVES] {
                plane.wait_served(definition).await?;
            }
        }
        Ok(plane)
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns a number that is unique in this control plane.
    pub(crate) fn next_serial(&self) -> u64 {
        self.serial.fetch_add(1, Ordering::Relaxed)
    }

    /// Writes a kubeconfig with all rights.
    pub(crate) fn kubeconfig(&self) -> anyhow::Result<PathBuf> {
        let path = self.dir.path().join("kubeconfig");
        let cluster = json!({
            "server": format!("https://{}", self.address),
            "certificate-authority": self.dir.path().join("ca.crt"),
        });
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": ADMIN_TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        });
        std::fs::write(&path, config.to_string())?;
        Ok(path)
    }

    fn etcd_url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.etcd_ports[0])
    }

    /// Starts etcd with its previous data.
    pub(crate) async fn start_etcd(&self) -> anyhow::Result<()> {
        let client = self.etcd_url("");
        let peer = format!("http://127.0.0.1:{}", self.etcd_ports[1]);
        let mut command = Command::new(&self.programs.etcd);
        command.arg("--data-dir").arg(self.dir.path().join("etcd"));
        command.args(["--name", "test", "--log-level", "warn", "--unsafe-no-fsync"]);
        command.args([
            "--listen-client-urls",
            &client,
            "--advertise-client-urls",
            &client,
        ]);
        command.args([
            "--listen-peer-urls",
            &peer,
            "--initial-advertise-peer-urls",
            &peer,
        ]);
        command.args(["--initial-cluster", &format!("test={peer}")]);
        let child = ChildProcess::spawn("etcd", &command, self.dir.path())?;
        wait_ready(
            ReadyCheck::Http(&self.etcd_url("/health")),
            START_LIMIT,
            &child,
        )
        .await?;
        *self.etcd.lock() = Some(child);
        Ok(())
    }

    /// Kills etcd with SIGKILL.
    pub(crate) fn kill_etcd(&self) {
        if let Some(etcd) = self.etcd.lock().take() {
            etcd.kill9();
        }
    }

    /// Compacts the history. A watch that resumes from an older version gets 410.
    pub(crate) async fn compact(&self) -> anyhow::Result<()> {
        let call = async |path: &str, body: Value| -> anyhow::Result<Value> {
            let response = self
                .http
                .post(self.etcd_url(path))
                .body(body.to_string())
                .send()
                .await?;
            Ok(serde_json::from_str(&response.text().await?)?)
        };
        let range = call("/v3/kv/range", json!({"key": "AA==", "count_only": true})).await?;
        let revision = range["header"]["revision"]
            .as_str()
            .context("etcd reports no revision")?;
        let answer = call(
            "/v3/kv/compaction",
            json!({"revision": revision, "physical": true}),
        )
        .await?;
        let message = answer["message"].as_str().unwrap_or_default();
        ensure!(
            message.is_empty() || message.contains("has been compacted"),
            "etcd does not compact: {answer}"
        );
        Ok(())
    }

    /// Starts the API server at the same address and waits until it is ready.
    pub(crate) async fn start_api_server(&self, flags: &[&str]) -> anyhow::Result<()> {
        let child = Arc::new(self.spawn_api_server(flags)?);
        *self.api_server.lock() = Some(child.clone());
        let ready = async || {
            let ready = self
                .admin
                .try_get("/readyz")
                .await
                .is_ok_and(|(status, _)| status.is_success());
            ready || !child.is_running()
        };
        let answered = until(START_LIMIT, ready).await && child.is_running();
        ensure!(
            answered,
            "kube-apiserver is not ready; its last lines:\n{}",
            child.log_tail()
        );
        Ok(())
    }

    fn spawn_api_server(&self, flags: &[&str]) -> anyhow::Result<ChildProcess> {
        let file = |name: &str| self.dir.path().join(name);
        let mut command = Command::new(&self.programs.api_server);
        let port = self.address.port().to_string();
        command.args(["--etcd-servers", &self.etcd_url("")]);
        command.args([
            "--bind-address",
            "127.0.0.1",
            "--advertise-address",
            "127.0.0.1",
            "--secure-port",
            &port,
        ]);
        command.args([
            "--endpoint-reconciler-type",
            "none",
            "--service-cluster-ip-range",
            "10.96.0.0/24",
        ]);
        command.args(["--authorization-mode", "RBAC"]);
        command.args([
            "--service-account-issuer",
            "https://kubernetes.default.svc.cluster.local",
        ]);
        let files: [(&str, &str); 9] = [
            ("--tls-cert-file", "tls.crt"),
            ("--tls-private-key-file", "tls.key"),
            ("--client-ca-file", "ca.crt"),
            ("--service-account-key-file", "service-account.crt"),
            ("--service-account-signing-key-file", "service-account.key"),
            ("--token-auth-file", "tokens.csv"),
            ("--cert-dir", "certificates"),
            ("--audit-policy-file", "audit-policy.json"),
            ("--audit-log-path", "audit.log"),
        ];
        for (flag, name) in files {
            command.arg(flag).arg(file(name));
        }
        ChildProcess::spawn("kube-apiserver", command.args(flags), self.dir.path())
    }

    fn running(&self) -> anyhow::Result<Arc<ChildProcess>> {
        self.api_server.lock().clone().context("no API server runs")
    }

    /// Kills the API server with SIGKILL.
    pub(crate) async fn kill_api_server(&self) -> anyhow::Result<()> {
        self.stop_api_server(Duration::ZERO).await
    }

    /// Stops the API server with SIGTERM, and with SIGKILL after the grace period, as a kubelet
    /// does.
    pub(crate) async fn stop_api_server(&self, grace: Duration) -> anyhow::Result<()> {
        let Some(child) = self.api_server.lock().take() else {
            bail!("no API server runs")
        };
        let ended = async || !child.is_running();
        if grace > Duration::ZERO {
            child.terminate();
            until(grace, ended).await;
        }
        child.kill9();
        ensure!(
            until(Duration::from_secs(10), ended).await,
            "the API server did not exit"
        );
        Ok(())
    }

    /// Restarts or thaws the processes after a failed case.
    pub(crate) async fn recover(&self) -> anyhow::Result<()> {
        if self.etcd.lock().is_none() {
            self.start_etcd().await?;
        }
        let running = self.api_server.lock().clone();
        match running {
            Some(child) if child.is_running() => child.thaw(),
            _ => self.start_api_server(&[]).await?,
        }
        Ok(())
    }

    pub(crate) fn freeze_api_server(&self) -> anyhow::Result<()> {
        self.running()?.freeze();
        Ok(())
    }

    pub(crate) fn thaw_api_server(&self) -> anyhow::Result<()> {
        self.running()?.thaw();
        Ok(())
    }

    async fn install_file(&self, path: &Path) -> anyhow::Result<()> {
        let yaml = std::fs::read_to_string(path)?;
        let object: Value = serde_saphyr::from_str(&yaml)?;
        let name = object["metadata"]["name"]
            .as_str()
            .context("a definition without a name")?;
        self.admin
            .apply(
                &format!("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"),
                &yaml,
            )
            .await?;
        Ok(())
    }

    /// Installs a definition of the test data and waits until its objects are served.
    pub(crate) async fn install(&self, definition: ResourceDefinition) -> anyhow::Result<()> {
        let name = format!("{}_{}.yaml", definition.group(), definition.plural);
        self.install_file(&PathBuf::from(CRD_DIRECTORY).join(name))
            .await?;
        self.wait_served(definition).await
    }

    /// Deletes a definition with all its objects.
    pub(crate) async fn uninstall(&self, definition: ResourceDefinition) -> anyhow::Result<()> {
        self.admin.delete(&definition.path()).await?;
        Ok(())
    }

    async fn wait_served(&self, definition: ResourceDefinition) -> anyhow::Result<()> {
        let path = collection(definition.api, None, definition.plural);
        let served = async || {
            self.admin
                .try_get(&path)
                .await
                .is_ok_and(|(status, _)| status.is_success())
        };
        ensure!(until(START_LIMIT, served).await, "{path} is not served");
        Ok(())
    }

    /// Returns all requests of the service account `warmroute` of a namespace so far.
    pub(crate) fn audit(&self, namespace: &str) -> anyhow::Result<Vec<AuditRecord>> {
        let user = format!("system:serviceaccount:{namespace}:warmroute");
        let text = std::fs::read_to_string(self.dir.path().join("audit.log"))?;
        let mut records = IndexMap::new();
        for line in text.lines().filter(|line| line.contains(&user)) {
            // The last line may be incomplete.
            let Ok(event) = serde_json::from_str::<Value>(line) else {
                continue;
            };
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            // A watch has two lines, one for its start and one for its end.
            records.insert(
                text(&event["auditID"]),
                AuditRecord {
                    verb: text(&event["verb"]),
                    resource: text(&event["objectRef"]["resource"]),
                },
            );
        }
        Ok(records.into_values().collect())
    }
}

impl Drop for TestControlPlane {
    fn drop(&mut self) {
        // SIGKILL: a graceful shutdown takes seconds, and the data is no longer needed.
        if let Some(child) = self.api_server.get_mut() {
            child.kill9();
        }
        if let Some(child) = self.etcd.get_mut() {
            child.kill9();
        }
    }
}
