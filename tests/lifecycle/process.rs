//! A running warmroute, and the ways to it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Message;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::support::child::Child;
use crate::support::ports::{FreePort, until};

/// Far more than anything takes; a failing test ends here.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// One process with a folder of its own.
pub(crate) struct Process {
    pub(crate) child: Child,
    pub(crate) dir: tempfile::TempDir,
    pub(crate) grpc: u16,
    pub(crate) health: u16,
    admin: u16,
    http: reqwest::Client,
}

/// An exchange as Envoy would hold it.
pub(crate) struct Exchange {
    tell: mpsc::UnboundedSender<ProcessingRequest>,
    answers: Streaming<ProcessingResponse>,
}

impl Process {
    /// Starts it with `more` laid over the least configuration, and waits until it is ready.
    pub(crate) async fn start(more: Value, args: &[&str]) -> Self {
        let process = Self::spawn(&more, args);
        let ready = async || {
            process
                .try_get("/readyz")
                .await
                .is_some_and(|(status, _)| status == 200)
        };
        assert!(until(SOON, ready).await, "not ready:\n{}", process.log());
        process
    }

    /// The same without waiting.
    pub(crate) fn spawn(more: &Value, args: &[&str]) -> Self {
        let ports = [
            FreePort::find().unwrap(),
            FreePort::find().unwrap(),
            FreePort::find().unwrap(),
        ];
        let [grpc, health, admin] = ports.map(FreePort::release);
        let dir = tempfile::tempdir().unwrap();
        let mut config = json!({
            "listen": {"tcp": format!("127.0.0.1:{grpc}"), "health": format!("127.0.0.1:{health}")},
            "admin": {"listen": format!("127.0.0.1:{admin}")},
            "models": [{"name": "m", "block_size": 16}],
            "workers": [{"id": 1, "endpoint": "10.0.0.1:8000"}],
            "drain": {"grace": "0s"},
            "approximate": {"policy": "off"},
        });
        config
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let path = dir.path().join("warmroute.yaml");
        std::fs::write(&path, config.to_string()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
        command.arg("serve").arg("--config").arg(&path).args(args);
        let child = Child::spawn("warmroute", &command, dir.path()).unwrap();
        let http = warmroute::tls::client().build().unwrap();
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

    /// The configuration as it lies there.
    pub(crate) fn config(&self) -> Value {
        serde_json::from_slice(&std::fs::read(self.path("warmroute.yaml")).unwrap()).unwrap()
    }

    /// Writes the configuration by a rename.
    pub(crate) fn configure(&self, text: &str) {
        let new = self.path("warmroute.new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, self.path("warmroute.yaml")).unwrap();
    }

    /// Lays `more` over the configuration.
    pub(crate) fn reconfigure(&self, more: &Value) {
        let mut config = self.config();
        config
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
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

    /// `/debug/config`.
    pub(crate) async fn shown(&self) -> Value {
        serde_json::from_str(&self.get("/debug/config").await.1).unwrap()
    }

    /// A number of the metrics page, 0 where it is not there.
    pub(crate) async fn metric(&self, series: &str) -> f64 {
        let (_, page) = self.get("/metrics").await;
        let line = page
            .lines()
            .find_map(|line| line.strip_prefix(&format!("warmroute_{series} ")));
        line.map_or(0.0, |value| value.trim().parse().unwrap())
    }

    pub(crate) async fn shows(&self, series: &str, wanted: f64) {
        let reached = until(SOON, async || self.metric(series).await == wanted).await;
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

    /// What gRPC health says of a name; none: it knows none such.
    pub(crate) async fn health(
        &self,
        port: u16,
        name: &str,
    ) -> Result<Option<ServingStatus>, Status> {
        let channel = Endpoint::from_shared(format!("http://127.0.0.1:{port}"))
            .unwrap()
            .connect()
            .await;
        let channel = channel.map_err(|error| Status::unavailable(error.to_string()))?;
        match HealthClient::new(channel)
            .check(HealthCheckRequest {
                service: name.to_owned(),
            })
            .await
        {
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

    /// Waits for the end and insists that it was a good one.
    pub(crate) async fn ends_well(&self) {
        assert!(
            until(SOON, async || !self.child.is_running()).await,
            "still running:\n{}",
            self.log()
        );
        let status = self.child.wait_exit(Instant::now()).unwrap();
        assert!(status.success(), "{status}:\n{}", self.log());
    }

    /// Opens an exchange for a completion of the model and reads where it is sent.
    pub(crate) async fn open(&self, channel: Channel, model: &str) -> (Exchange, String) {
        let head = [
            (":method", "POST"),
            (":path", "/v1/completions"),
            ("content-type", "application/json"),
        ];
        let body = json!({"model": model, "prompt": "x"}).to_string();
        let (tell, told) = mpsc::unbounded_channel();
        let headers = HttpHeaders {
            headers: Some(map(&head)),
            ..HttpHeaders::default()
        };
        let body = HttpBody {
            body: body.into_bytes(),
            end_of_stream: true,
            ..HttpBody::default()
        };
        for message in [Message::RequestHeaders(headers), Message::RequestBody(body)] {
            tell.send(ProcessingRequest {
                request: Some(message),
                ..ProcessingRequest::default()
            })
            .unwrap();
        }
        let mut client = ExternalProcessorClient::new(channel);
        let mut answers = client
            .process(UnboundedReceiverStream::new(told))
            .await
            .unwrap()
            .into_inner();
        let mut seen = String::new();
        for _ in 0..2 {
            seen.push_str(&format!("{:?}", answers.message().await.unwrap().unwrap()));
        }
        (Exchange { tell, answers }, seen)
    }
}

impl Exchange {
    /// Shows the answer's headers and insists on a reply: the exchange lives.
    pub(crate) async fn answers(&mut self) {
        let headers = HttpHeaders {
            headers: Some(map(&[(":status", "200")])),
            ..HttpHeaders::default()
        };
        let message = Message::ResponseHeaders(headers);
        self.tell
            .send(ProcessingRequest {
                request: Some(message),
                ..ProcessingRequest::default()
            })
            .unwrap();
        self.answers.message().await.unwrap().unwrap();
    }
}

fn map(headers: &[(&str, &str)]) -> HeaderMap {
    let value = |(key, value): &(&str, &str)| HeaderValue {
        key: (*key).to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..HeaderValue::default()
    };
    HeaderMap {
        headers: headers.iter().map(value).collect(),
    }
}

/// A file of the simulated engines' model.
pub(crate) fn model_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("examples/models/qwen2.5")
        .join(name)
}
