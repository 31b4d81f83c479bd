//! A server process with the configuration of a transcript, and its pages.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use warmroute_server::config::Config;

use crate::start_app;

/// Timeout of waits, far longer than any step takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// A running process.
pub(crate) struct ExchangeSite {
    pub(crate) gateway: ExternalProcessorClient<Channel>,
    pub(crate) channel: Channel,
    endpoint: Endpoint,
    health: HealthClient<Channel>,
    admin: SocketAddr,
    pages: reqwest::Client,
    dir: TempDir,
    shutdown: CancellationToken,
    running: JoinHandle<anyhow::Result<()>>,
}

impl ExchangeSite {
    /// Starts the process and waits until it is ready. A process without workers never becomes
    /// ready.
    pub(crate) async fn start(written: &Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = written.clone();
        let workers = config["workers"]
            .as_object_mut()
            .and_then(|workers| workers.remove("list"))
            .unwrap_or_else(|| json!([]));
        config["listeners"]["ext_proc"] = json!({ "address": "127.0.0.1:0" });
        config["listeners"]["admin"] = json!({"address": "127.0.0.1:0"});
        config["workers"]["file"] = json!("workers.yaml");
        config["process"]["drain"] = json!({ "grace_period": "0s" });
        if config["engines"]["load"].is_null() {
            // No engines exist. A failed scrape would be evidence against a worker, after a time.
            config["engines"]["load"] = json!({ "enabled": false });
        }
        if config["gateway"]["observe"].is_null() {
            // The default observes a random sample of responses completely. Transcripts need the same
            // replies every time.
            config["gateway"]["observe"] = json!("first_token");
        }
        write_workers(dir.path(), &workers);
        let path = dir.path().join("warmroute.yaml");
        // JSON is valid YAML.
        std::fs::write(
            &path,
            config
                .to_string()
                .replace("${root}", env!("CARGO_MANIFEST_DIR")),
        )
        .unwrap();
        let config = Config::load(&path).unwrap_or_else(|errors| panic!("{errors:?}"));
        let app = start_app(config).await;
        let admin = app.admin_address;
        let tcp = app.ext_proc_address.unwrap();
        let shutdown = CancellationToken::new();
        let running = tokio::spawn(app.run_until(shutdown.clone().cancelled_owned()));
        let endpoint = Channel::from_shared(format!("http://{tcp}")).unwrap();
        let channel = endpoint.connect().await.unwrap();
        let health = HealthClient::new(channel.clone());
        let gateway =
            ExternalProcessorClient::new(channel.clone()).max_decoding_message_size(usize::MAX);
        let pages = warmroute_runtime::tls::http_client_builder()
            .build()
            .unwrap();
        let site = Self {
            gateway,
            channel,
            endpoint,
            health,
            admin,
            pages,
            dir,
            shutdown,
            running,
        };
        if workers != json!([]) {
            site.until("readyz", |page| page["ready"] == true).await;
        }
        site.until("debug/fleet", |page| page.is_object()).await;
        site
    }

    /// Returns a gateway client whose calls have this authority.
    pub(crate) async fn gateway_with(&self, authority: &str) -> ExternalProcessorClient<Channel> {
        let endpoint = self
            .endpoint
            .clone()
            .origin(format!("http://{authority}").parse().unwrap());
        ExternalProcessorClient::new(endpoint.connect().await.unwrap())
    }

    /// Returns a gateway client on a connection with these receive windows, in bytes.
    pub(crate) async fn gateway_with_windows(
        &self,
        stream: u32,
        connection: u32,
    ) -> ExternalProcessorClient<Channel> {
        let endpoint = self.endpoint.clone().initial_stream_window_size(stream);
        let endpoint = endpoint.initial_connection_window_size(connection);
        ExternalProcessorClient::new(endpoint.connect().await.unwrap())
    }

    /// Replaces the list of workers, and waits until the new list is in use.
    pub(crate) async fn workers(&self, workers: &[Value]) {
        write_workers(self.dir.path(), &Value::from(workers));
        let count = workers.len();
        self.until("debug/fleet", |page| {
            page["members"]
                .as_array()
                .is_some_and(|found| found.len() == count)
        })
        .await;
    }

    /// Returns a page as JSON, or as a string if it is not JSON.
    pub(crate) async fn page(&self, page: &str) -> Value {
        let answer = self
            .pages
            .get(format!("http://{}/{page}", self.admin))
            .send()
            .await
            .unwrap();
        let text = answer.text().await.unwrap();
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

    /// Polls the health of a service until it is as expected or the timeout expires. Returns its
    /// last status.
    pub(crate) async fn health(&self, service: &str, expected: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let health_request = HealthCheckRequest {
                service: service.to_owned(),
            };
            let found = match self.health.clone().check(health_request).await {
                Ok(answer) => answer.into_inner().status().as_str_name().to_owned(),
                Err(status) => format!("{:?}", status.code()),
            };
            if found == expected || Instant::now() > deadline {
                return found;
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Stops the process and waits until it has ended.
    pub(crate) async fn stop(self) {
        drop((self.gateway, self.channel, self.health, self.pages));
        self.shutdown.cancel();
        timeout(PATIENCE, self.running)
            .await
            .unwrap()
            .unwrap()
            .unwrap();
    }
}

fn write_workers(dir: &Path, workers: &Value) {
    let new: PathBuf = dir.join("workers.new");
    std::fs::write(&new, workers.to_string()).unwrap();
    std::fs::rename(new, dir.join("workers.yaml")).unwrap();
}
