//! A running warmroute process and its clients.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Message;
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use warmroute_testbed::child_process::ChildProcess;
use warmroute_testbed::merge_config;
use warmroute_testbed::ports::{FreePort, PATIENCE, until};

use crate::support::ext_proc;

/// A warmroute process with a temporary directory.
pub(crate) struct WarmrouteProcess {
    pub(crate) child: ChildProcess,
    pub(crate) dir: tempfile::TempDir,
    pub(crate) grpc: u16,
    pub(crate) health: u16,
    admin: u16,
    http: reqwest::Client,
}

/// An open exchange.
pub(crate) struct OpenExchange {
    request_tx: mpsc::UnboundedSender<ProcessingRequest>,
    answers: Streaming<ProcessingResponse>,
}

impl WarmrouteProcess {
    /// Starts the process with `more` merged into the minimal configuration, and waits until it is
    /// ready.
    pub(crate) async fn start(more: Value, args: &[&str]) -> Self {
        let process = Self::spawn(&more, args);
        let ready = async || {
            process
                .try_get("/readyz")
                .await
                .is_some_and(|(status, _)| status == 200)
        };
        assert!(
            until(PATIENCE, ready).await,
            "not ready:\n{}",
            process.log()
        );
        process
    }

    /// Starts the process without waiting.
    pub(crate) fn spawn(more: &Value, args: &[&str]) -> Self {
        let ports = [(); 3].map(|()| FreePort::find().unwrap());
        let [grpc, health, admin] = ports.map(FreePort::release);
        let dir = tempfile::tempdir().unwrap();
        let mut config = json!({
            "listeners": {
                "ext_proc": {
                    "address": format!("127.0.0.1:{grpc}"),
                    "health_address": format!("127.0.0.1:{health}"),
                },
                "admin": {"address": format!("127.0.0.1:{admin}")},
            },
            "models": [{"name": "m", "block_size": 16}],
            "workers": {"list": [{"id": 1, "endpoint": "10.0.0.1:8000"}]},
            "process": {"drain": {"grace_period": "0s"}},
            "index": {"approximate": {"policy": "off"}},
            // The default observes a random sample of responses completely. Tests need the same
            // observation for all.
            "gateway": {"observe": "first_token"},
        });
        merge_config(&mut config, more);
        let path = dir.path().join("warmroute.yaml");
        std::fs::write(&path, config.to_string()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
        command.arg("serve").arg("--config").arg(&path).args(args);
        let child = ChildProcess::spawn("warmroute", &command, dir.path()).unwrap();
        let http = warmroute_runtime::tls::http_client_builder()
            .build()
            .unwrap();
        Self {
            child,
            dir,
            grpc,
            health,
            admin,
            http,
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the content of the configuration file.
    pub(crate) fn config(&self) -> Value {
        serde_json::from_slice(&std::fs::read(self.path("warmroute.yaml")).unwrap()).unwrap()
    }

    /// Replaces the configuration file by a rename.
    pub(crate) fn configure(&self, text: &str) {
        let new = self.path("warmroute.new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, self.path("warmroute.yaml")).unwrap();
    }

    /// Merges `more` into the configuration file.
    pub(crate) fn reconfigure(&self, more: &Value) {
        let mut config = self.config();
        merge_config(&mut config, more);
        self.configure(&config.to_string());
    }

    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.child.log()).unwrap()).into_owned()
    }

    async fn try_get(&self, page: &str) -> Option<(u16, String)> {
        let answer = self
            .http
            .get(format!("http://127.0.0.1:{}{page}", self.admin))
            .send()
            .await
            .ok()?;
        Some((answer.status().as_u16(), answer.text().await.ok()?))
    }

    pub(crate) async fn get(&self, page: &str) -> (u16, String) {
        self.try_get(page)
            .await
            .unwrap_or_else(|| panic!("no {page}:\n{}", self.log()))
    }

    /// Returns the page `/debug/config`.
    pub(crate) async fn config_page(&self) -> Value {
        serde_json::from_str(&self.get("/debug/config").await.1).unwrap()
    }

    /// Returns the value of a series, or 0 if it does not exist.
    pub(crate) async fn metric(&self, series: &str) -> f64 {
        let (_, page) = self.get("/metrics").await;
        let line = page
            .lines()
            .find_map(|line| line.strip_prefix(&format!("warmroute_{series} ")));
        line.map_or(0.0, |value| value.trim().parse().unwrap())
    }

    pub(crate) async fn wait_metric(&self, series: &str, wanted: f64) {
        let reached = until(PATIENCE, async || self.metric(series).await == wanted).await;
        assert!(
            reached,
            "{series} is {}, not {wanted}:\n{}",
            self.metric(series).await,
            self.log()
        );
    }

    pub(crate) async fn channel(&self, port: u16) -> Channel {
        Endpoint::from_shared(format!("http://127.0.0.1:{port}"))
            .unwrap()
            .connect()
            .await
            .unwrap()
    }

    /// Returns the health of a service, or `None` if the service is unknown.
    pub(crate) async fn health(
        &self,
        port: u16,
        name: &str,
    ) -> Result<Option<ServingStatus>, Status> {
        let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}")).unwrap();
        let channel = endpoint.connect().await;
        let channel = channel.map_err(|error| Status::unavailable(error.to_string()))?;
        let request = HealthCheckRequest {
            service: name.to_owned(),
        };
        match HealthClient::new(channel).check(request).await {
            Ok(answer) => Ok(Some(answer.into_inner().status())),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(status),
        }
    }

    pub(crate) fn terminate(&self) {
        self.child.terminate();
    }

    pub(crate) fn hangup(&self) {
        self.child.signal(Signal::HUP);
    }

    /// Waits for the exit and asserts success.
    pub(crate) async fn assert_exit_success(&self) {
        assert!(
            until(PATIENCE, async || !self.child.is_running()).await,
            "still running:\n{}",
            self.log()
        );
        let status = self.child.wait_exit(Instant::now()).unwrap();
        assert!(status.success(), "{status}:\n{}", self.log());
    }

    /// Opens an exchange for a completion of the model. Returns its route.
    pub(crate) async fn open(&self, channel: Channel, model: &str) -> (OpenExchange, String) {
        let body = json!({"model": model, "prompt": "x"}).to_string();
        let (request_tx, request_rx) = mpsc::unbounded_channel();
        for message in ext_proc::post("/v1/completions", &[], &body) {
            request_tx.send(message).unwrap();
        }
        let mut client = ExternalProcessorClient::new(channel);
        let mut answers = client
            .process(UnboundedReceiverStream::new(request_rx))
            .await
            .unwrap()
            .into_inner();
        let mut seen = String::new();
        for _ in 0..2 {
            seen.push_str(&format!("{:?}", answers.message().await.unwrap().unwrap()));
        }
        (
            OpenExchange {
                request_tx,
                answers,
            },
            seen,
        )
    }
}

impl OpenExchange {
    /// Sends response headers and asserts a reply, which shows that the exchange is alive.
    pub(crate) async fn assert_reply(&mut self) {
        let headers = Message::ResponseHeaders(ext_proc::headers(&[(":status", "200")]));
        self.request_tx.send(ext_proc::message(headers)).unwrap();
        self.answers.message().await.unwrap().unwrap();
    }
}
