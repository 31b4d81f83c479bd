//! A whole process with the configuration of a transcript, and its pages.

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
use warmroute::app::App;
use warmroute::config::Config;

/// Far more than anything takes; a failing test ends here.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// A running process.
pub(crate) struct Site {
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

impl Site {
    /// Starts with the configuration as it is written, and waits until it is ready; without workers it never is.
    pub(crate) async fn start(written: &Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = written.clone();
        let workers = config
            .as_object_mut()
            .unwrap()
            .remove("workers")
            .unwrap_or_else(|| json!([]));
        config["listen"] = json!({ "tcp": "127.0.0.1:0" });
        config["admin"] = json!({ "listen": "127.0.0.1:0" });
        config["workers_file"] = json!("workers.yaml");
        config["drain"] = json!({ "grace": "0s" });
        config["discovery"] = json!({ "poll": "1s", "debounce": "10ms" });
        write_workers(dir.path(), &workers);
        let path = dir.path().join("warmroute.yaml");
        // Every JSON is YAML.
        std::fs::write(
            &path,
            config
                .to_string()
                .replace("${root}", env!("CARGO_MANIFEST_DIR")),
        )
        .unwrap();
        let config = Config::load(&path).unwrap_or_else(|errors| panic!("{errors:?}"));
        let app = App::start(config).await.unwrap();
        let (admin, tcp) = (app.admin_address, app.ext_proc_address.unwrap());
        let shutdown = CancellationToken::new();
        let running = tokio::spawn(app.run_until(shutdown.clone().cancelled_owned()));
        let endpoint = Channel::from_shared(format!("http://{tcp}")).unwrap();
        let channel = endpoint.connect().await.unwrap();
        let health = HealthClient::new(channel.clone());
        let gateway =
            ExternalProcessorClient::new(channel.clone()).max_decoding_message_size(usize::MAX);
        let pages = warmroute::tls::client().build().unwrap();
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

    /// A gateway whose calls have this authority.
    pub(crate) async fn gateway_with(&self, authority: &str) -> ExternalProcessorClient<Channel> {
        let endpoint = self
            .endpoint
            .clone()
            .origin(format!("http://{authority}").parse().unwrap());
        ExternalProcessorClient::new(endpoint.connect().await.unwrap())
    }

    /// Puts another list of workers in place, and waits until it is in use.
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

    /// A page, as JSON or as text.
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

    /// Looks at a page until it pleases, or patience ends; how it was at last.
    pub(crate) async fn until(&self, page: &str, pleases: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = self.page(page).await;
            if pleases(&found) || Instant::now() > deadline {
                return found;
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// What is told of the health of a service, at last.
    pub(crate) async fn health(&self, service: &str, expected: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let asked = HealthCheckRequest {
                service: service.to_owned(),
            };
            let found = match self.health.clone().check(asked).await {
                Ok(answer) => answer.into_inner().status().as_str_name().to_owned(),
                Err(status) => format!("{:?}", status.code()),
            };
            if found == expected || Instant::now() > deadline {
                return found;
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Ends, and waits for it.
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
