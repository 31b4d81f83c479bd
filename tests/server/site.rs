//! A server in the process of a test.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use warmroute_runtime::tls::ReloadableFiles;
use warmroute_server::app::{App, NoExternalDiscovery, ProcessOrigin};
use warmroute_server::config::Config;
use warmroute_testbed::merge_config;
use warmroute_testbed::ports::PATIENCE;

/// A running server without discovery by DNS or Kubernetes, in its own directory.
pub(crate) struct ServerSite {
    pub(crate) ext_proc: SocketAddr,
    pub(crate) api: Option<SocketAddr>,
    pub(crate) admin: SocketAddr,
    pub(crate) health: Option<SocketAddr>,
    pub(crate) xds: Option<SocketAddr>,
    pub(crate) secrets: ReloadableFiles,
    dir: TempDir,
    http: reqwest::Client,
    shutdown: CancellationToken,
    running: JoinHandle<anyhow::Result<()>>,
}

impl ServerSite {
    /// Starts a server with `more` merged into a configuration of its listeners. `write_files`
    /// writes files into the directory of the configuration file, to which `more` can refer.
    pub(crate) async fn start(more: &Value, write_files: impl FnOnce(&Path)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        write_files(dir.path());
        let mut config = json!({
            "listeners": {
                "ext_proc": {"address": "127.0.0.1:0"},
                "admin": {"address": "127.0.0.1:0"},
            },
            "process": {"drain": {"grace_period": "0s"}},
        });
        merge_config(&mut config, more);
        let path = dir.path().join("warmroute.yaml");
        std::fs::write(&path, config.to_string()).unwrap();
        let config = Config::load(&path).unwrap_or_else(|errors| panic!("{errors:?}"));
        let discovery = Arc::new(NoExternalDiscovery);
        let start = App::start(config, discovery, ProcessOrigin::default());
        let app = Box::pin(start).await.unwrap();
        let shutdown = CancellationToken::new();
        Self {
            ext_proc: app.ext_proc_address.unwrap(),
            api: app.api_address,
            admin: app.admin_address,
            health: app.health_address,
            xds: app.xds_address,
            secrets: app.reloadable_files.clone(),
            dir,
            http: warmroute_runtime::tls::http_client_builder()
                .build()
                .unwrap(),
            running: tokio::spawn(app.run_until(shutdown.clone().cancelled_owned())),
            shutdown,
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Replaces a file by a rename.
    pub(crate) fn replace_file(&self, name: &str, text: &str) {
        replace_file(self.dir.path(), name, text);
    }

    pub(crate) async fn text(&self, page: &str) -> String {
        let url = format!("http://{}/{page}", self.admin);
        let response = self.http.get(url).send().await.unwrap();
        response.text().await.unwrap()
    }

    /// Returns a page as JSON, or as a string if it is not JSON.
    pub(crate) async fn page(&self, page: &str) -> Value {
        let text = self.text(page).await;
        serde_json::from_str(&text).unwrap_or(Value::String(text))
    }

    /// Polls a page until a condition holds or the timeout expires. Returns its last content.
    pub(crate) async fn until(&self, page: &str, is_met: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = self.page(page).await;
            if is_met(&found) || Instant::now() > deadline {
                return found;
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Connects to the ext_proc listener.
    pub(crate) async fn channel(&self) -> Channel {
        self.endpoint().connect().await.unwrap()
    }

    pub(crate) fn endpoint(&self) -> Endpoint {
        Channel::from_shared(format!("http://{}", self.ext_proc)).unwrap()
    }

    /// Requests the shutdown of the server.
    pub(crate) fn stop(&self) {
        self.shutdown.cancel();
    }

    /// Stops the server and waits until it has ended. Clients must be dropped before.
    pub(crate) async fn end(self) {
        self.stop();
        drop(self.http);
        let ended = timeout(PATIENCE, self.running).await;
        ended.unwrap().unwrap().unwrap();
    }
}

/// Replaces a file by a rename.
pub(crate) fn replace_file(directory: &Path, name: &str, text: &str) {
    let new = directory.join(format!("{name}.new"));
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, directory.join(name)).unwrap();
}
