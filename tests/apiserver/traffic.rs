//! Steady stream of ext_proc exchanges, as Envoy would open them.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response as Reply;
use parking_lot::Mutex;
use serde_json::json;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::{Channel, Endpoint};

use crate::ext_proc;
use crate::router::RouterProcess;

const PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
struct TrafficCounters {
    routed: usize,
    failures: Vec<String>,
}

impl TrafficCounters {
    fn add(&mut self, failure: Option<String>) {
        match failure {
            None => self.routed += 1,
            Some(failure) => self.failures.push(failure),
        }
    }
}

/// Background task that opens exchanges until it is dropped.
pub(crate) struct SteadyTraffic {
    counters: Arc<Mutex<TrafficCounters>>,
    _task: AbortOnDropHandle<()>,
}

impl SteadyTraffic {
    /// Starts the traffic. Every exchange must be routed to one of the endpoints.
    pub(crate) async fn start(router: &RouterProcess, endpoints: &[&str]) -> anyhow::Result<Self> {
        let channel = channel(router).await?;
        let endpoints: Vec<String> = endpoints
            .iter()
            .map(|endpoint| (*endpoint).to_owned())
            .collect();
        let counters: Arc<Mutex<TrafficCounters>> = Arc::default();
        let shared = counters.clone();
        let task = tokio::spawn(async move {
            loop {
                let result =
                    tokio::time::timeout(Duration::from_secs(5), exchange(&channel, "qwen2.5"))
                        .await;
                let failure = match result {
                    Ok(Ok(reply)) if endpoints.iter().any(|endpoint| reply.contains(endpoint)) => {
                        None
                    }
                    Ok(Ok(reply)) => Some(reply),
                    Ok(Err(error)) => Some(format!("{error:?}")),
                    Err(_) => Some("no reply within 5 s".to_owned()),
                };
                shared.lock().add(failure);
                tokio::time::sleep(PAUSE).await;
            }
        });
        Ok(Self {
            counters,
            _task: AbortOnDropHandle::new(task),
        })
    }

    /// Returns the number of exchanges so far. Fails if one was not routed.
    pub(crate) fn routed(&self) -> anyhow::Result<usize> {
        let counters = self.counters.lock();
        ensure!(
            counters.failures.is_empty(),
            "{} exchanges failed: {:?}",
            counters.failures.len(),
            counters.failures.first()
        );
        Ok(counters.routed)
    }
}

/// Returns the request body that the engine would receive, or an empty string if the reply has
/// none.
fn sent_body(reply: &ProcessingResponse) -> String {
    let Some(Reply::RequestBody(body)) = &reply.response else {
        return String::new();
    };
    let mutation = body
        .response
        .as_ref()
        .and_then(|response| response.body_mutation.as_ref());
    let bytes = match mutation.and_then(|mutation| mutation.mutation.as_ref()) {
        Some(Mutation::Body(bytes)) => bytes.as_slice(),
        Some(Mutation::StreamedResponse(part)) => part.body.as_slice(),
        _ => &[],
    };
    String::from_utf8_lossy(bytes).into_owned()
}

async fn channel(router: &RouterProcess) -> anyhow::Result<Channel> {
    Ok(
        Endpoint::from_shared(format!("http://127.0.0.1:{}", router.ext_proc))?
            .connect()
            .await?,
    )
}

/// Routes one completion. Returns the replies of warmroute as text.
pub(crate) async fn route(router: &RouterProcess, model: &str) -> anyhow::Result<String> {
    exchange(&channel(router).await?, model).await
}

async fn exchange(channel: &Channel, model: &str) -> anyhow::Result<String> {
    let body = json!({"model": model, "prompt": "hello"}).to_string();
    let messages = ext_proc::post("/v1/completions", &[], &body);
    let mut client = ExternalProcessorClient::new(channel.clone());
    let mut replies = client
        .process(tokio_stream::iter(messages))
        .await?
        .into_inner();
    let mut text = String::new();
    for _ in 0..2 {
        let reply = replies
            .message()
            .await?
            .context("the stream ended without a reply")?;
        text.push_str(&format!("{reply:?}\n{}\n", sent_body(&reply)));
    }
    Ok(text)
}
