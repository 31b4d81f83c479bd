//! A server with the gRPC service, and engines that only publish events.

use std::ops::Deref;

use bytes::Bytes;
use serde_json::{Value, json};
use tonic::Status;
use tonic::transport::Channel;
use warmroute_server::proto::router as pb;
use warmroute_server::proto::router::router_client::RouterClient;
use warmroute_testbed::merge_config;
use warmroute_testbed::ports::{PATIENCE, until};
use zeromq::{PubSocket, Socket, SocketSend};

use crate::site::{ServerSite, replace_file};

/// A running server with a client.
pub(crate) struct ApiSite {
    pub(crate) client: RouterClient<Channel>,
    server: ServerSite,
}

impl Deref for ApiSite {
    type Target = ServerSite;

    fn deref(&self) -> &ServerSite {
        &self.server
    }
}

impl ApiSite {
    /// Starts a server with two workers without events, and blocks of 4 tokens.
    pub(crate) async fn plain() -> Self {
        Self::start("", &[worker(1, ""), worker(2, "")]).await
    }

    /// Starts a server and waits until it is ready. `more` is merged into the configuration.
    pub(crate) async fn start(more: &str, workers: &[String]) -> Self {
        let site = Self::begin(more, workers).await;
        // Before the first fleet is published, calls report an empty fleet.
        site.until("ready", |page| page["ready"] == true, "readyz")
            .await;
        site
    }

    /// Starts a server without waiting until it is ready.
    pub(crate) async fn begin(more: &str, workers: &[String]) -> Self {
        let mut config = json!({
            "listeners": {"api": {"address": "127.0.0.1:0"}},
            "models": [{"name": "m", "aliases": ["alias"], "adapters": ["tuned"], "block_size": 4}],
            "workers": {"file": "workers.yaml"},
        });
        if !more.trim().is_empty() {
            merge_config(&mut config, &serde_saphyr::from_str(more).unwrap());
        }
        let server = ServerSite::start(&config, |directory| {
            replace_file(directory, "workers.yaml", &workers.concat())
        })
        .await;
        let api = server.api.unwrap();
        let client = RouterClient::connect(format!("http://{api}"))
            .await
            .unwrap();
        Self { client, server }
    }

    /// Replaces the list of workers.
    pub(crate) fn set_workers(&self, workers: &[String]) {
        self.replace_file("workers.yaml", &workers.concat());
    }

    /// Waits until a page satisfies a condition. The page is parsed as JSON, or passed as a string.
    pub(crate) async fn until(&self, what: &str, is_met: impl Fn(&Value) -> bool, page: &str) {
        let found = self.server.until(page, &is_met).await;
        assert!(is_met(&found), "timeout: {what}: {found}");
    }

    /// Waits until the metrics page contains a line.
    pub(crate) async fn wait_line(&self, line: &str) {
        let has_line = |page: &Value| page.as_str().unwrap().lines().any(|found| found == line);
        self.until(line, has_line, "metrics").await;
    }

    /// Waits until this number of requests is queued.
    pub(crate) async fn wait_queued(&self, requests: u32) {
        let line = |page: &Value| {
            let line = page
                .as_str()?
                .lines()
                .find(|line| line.starts_with("warmroute_queue_requests{"))?;
            line.rsplit(' ').next()?.parse::<u32>().ok()
        };
        self.until(
            &format!("{requests} wait"),
            |page| line(page).unwrap_or(0) == requests,
            "metrics",
        )
        .await;
    }

    /// Returns prefill tokens, blocks and requests, summed over all workers.
    pub(crate) async fn load(&self) -> (u64, u64, u64) {
        let answer = self
            .client
            .clone()
            .potential_loads(pb::PotentialLoadsRequest::default())
            .await
            .unwrap();
        let add = |sum: (u64, u64, u64), load: &pb::PotentialLoad| {
            (
                sum.0 + load.active_prefill_tokens,
                sum.1 + load.active_decode_blocks,
                sum.2 + load.active_requests,
            )
        };
        answer.into_inner().ranks.iter().fold((0, 0, 0), add)
    }

    /// Waits until the load of all workers has the expected sum.
    pub(crate) async fn wait_load(&self, expected: (u64, u64, u64)) {
        let mut load = (0, 0, 0);
        let reached = until(PATIENCE, async || {
            load = self.load().await;
            load == expected
        });
        assert!(reached.await, "the load is {load:?}, not {expected:?}");
    }

    pub(crate) async fn route(
        &self,
        call_request: pb::RouteRequest,
    ) -> Result<pb::RouteResponse, Status> {
        self.client
            .clone()
            .route(call_request)
            .await
            .map(tonic::Response::into_inner)
    }

    pub(crate) async fn free(&self, id: &str, number: u64) -> bool {
        let call_request = pb::FreeRequest {
            attempt: attempt(id, number),
            status: None,
        };
        self.client
            .clone()
            .free(call_request)
            .await
            .unwrap()
            .into_inner()
            .changed
    }

    pub(crate) async fn overlaps(&self, query: pb::PromptQuery) -> Vec<pb::OverlapScore> {
        let call_request = pb::OverlapScoresRequest {
            query: Some(query),
            ..Default::default()
        };
        self.client
            .clone()
            .overlap_scores(call_request)
            .await
            .unwrap()
            .into_inner()
            .ranks
    }

    /// Stops the server and waits until it has ended.
    pub(crate) async fn end(self) {
        self.server.end().await;
    }
}

/// Returns an entry for the list of workers.
pub(crate) fn worker(id: u32, more: &str) -> String {
    format!("- {{id: {id}, endpoint: '10.0.0.{id}:8000'{more}}}\n")
}

pub(crate) fn attempt(id: &str, number: u64) -> Option<pb::Attempt> {
    Some(pb::Attempt {
        id: id.to_owned(),
        number,
    })
}

pub(crate) fn rank(worker_id: u64) -> Option<pb::WorkerRank> {
    Some(pb::WorkerRank {
        worker_id,
        dp_rank: 0,
    })
}

/// Returns a query for the first `count` token ids.
pub(crate) fn tokens(count: u32) -> pb::PromptQuery {
    token_range(0..count)
}

/// Returns a query for a prompt of consecutive token ids.
pub(crate) fn token_range(ids: std::ops::Range<u32>) -> pb::PromptQuery {
    let prompt = pb::prompt_query::Prompt::Tokens(pb::Tokens { ids: ids.collect() });
    pb::PromptQuery {
        prompt: Some(prompt),
        ..pb::PromptQuery::default()
    }
}

/// Returns a request that routes and books a prompt of the first `count` token ids under this id.
pub(crate) fn book(id: &str, number: u64, count: u32) -> pb::RouteRequest {
    pb::RouteRequest {
        query: Some(tokens(count)),
        book: attempt(id, number),
        ..pb::RouteRequest::default()
    }
}

/// Returns a request like [`book`], whose prompt shares no block with those of `book`.
pub(crate) fn book_unshared(id: &str, number: u64, count: u32) -> pb::RouteRequest {
    pb::RouteRequest {
        query: Some(token_range(500..500 + count)),
        ..book(id, number, count)
    }
}

/// An engine that publishes KV events and serves no requests.
pub(crate) struct StubEngine {
    socket: PubSocket,
    pub(crate) endpoint: String,
    sent: u64,
}

impl StubEngine {
    pub(crate) async fn start() -> Self {
        let mut socket = PubSocket::new();
        let endpoint = socket.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        Self {
            socket,
            endpoint,
            sent: 0,
        }
    }

    /// Returns its fields in the list of workers.
    pub(crate) fn worker_fields(&self) -> String {
        format!(", kv_events: {{endpoint: '{}'}}", self.endpoint)
    }

    /// Returns the sequence number of the last published batch.
    pub(crate) fn last(&self) -> u64 {
        self.sent - 1
    }

    /// Publishes the blocks of the first `count` token ids, with engine hashes from `first` on.
    pub(crate) async fn store(&mut self, first: u64, count: u32) {
        let names: Vec<u64> = (first..first + u64::from(count / 4)).collect();
        let ids: Vec<u32> = (0..count).collect();
        let batch = (1.5, [("BlockStored", names, None::<u64>, ids, 4_u32)], 0);
        let payload = rmp_serde::to_vec(&batch).unwrap();
        let frames = vec![
            Bytes::new(),
            Bytes::copy_from_slice(&self.sent.to_be_bytes()),
            Bytes::from(payload),
        ];
        self.sent += 1;
        self.socket.send(frames.try_into().unwrap()).await.unwrap();
    }
}
