//! Shared cache of all workers, from the configuration to the choice: an HTTP server with the
//! documented protocol, and a started warmroute that queries it.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use axum::{Json, Router as Routes};
use envoy_types::pb::envoy::service::ext_proc::v3 as proto;
use parking_lot::Mutex;
use proto::external_processor_client::ExternalProcessorClient;
use proto::processing_response::Response as Reply;
use serde_json::{Value, json};
use tonic::transport::Channel;
use warmroute_server::proto::router as pb;
use warmroute_server::proto::router::router_client::RouterClient;

use crate::api::site::{attempt, rank, token_range};
use crate::site::ServerSite;
use crate::support::ext_proc;
use crate::support::local_server::LocalServer;

/// Received queries, and the response. `None` means status 500.
#[derive(Default)]
struct CacheServer {
    ranges: Mutex<Option<Vec<(u64, u64)>>>,
    queries: Mutex<Vec<Value>>,
}

async fn lookup(State(cache): State<Arc<CacheServer>>, Json(query): Json<Value>) -> Response {
    cache.queries.lock().push(query);
    match &*cache.ranges.lock() {
        Some(ranges) => Json(json!({ "ranges": ranges })).into_response(),
        None => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// A started warmroute with two workers without events, and the shared cache. Blocks have 4 tokens.
struct SharedCacheBed {
    cache: Arc<CacheServer>,
    router: RouterClient<Channel>,
    server: ServerSite,
    _cache_server: LocalServer,
}

impl SharedCacheBed {
    async fn start() -> Self {
        let cache = Arc::new(CacheServer::default());
        let routes = Routes::new()
            .route("/lookup", post(lookup))
            .with_state(cache.clone());
        let cache_server = LocalServer::start(routes).await;
        let url = format!("http://{}/lookup", cache_server.address);
        let config = json!({
            "listeners": {"api": {"address": "127.0.0.1:0"}},
            "models": [{"name": "m", "block_size": 4}],
            "workers": {
                "list": [{"id": 1, "endpoint": "10.0.0.1:8000"}, {"id": 2, "endpoint": "10.0.0.2:8000"}],
            },
            "requests": {"clients": {"trusted": true}, "limits": {"decision_timeout": "10s"}},
            "index": {"shared_cache": {"url": url, "timeout": "5s"}},
            "routing": {
                "weights": {
                    "overlap_score_credit": 1,
                    "prefill_load_scale": 1,
                    "decode_active_request_weight": 0,
                    "shared_cache_multiplier": 1,
                },
            },
        });
        let server = ServerSite::start(&config, |_| ()).await;
        let api = server.api.unwrap();
        let router = RouterClient::connect(format!("http://{api}"))
            .await
            .unwrap();
        Self {
            cache,
            router,
            server,
            _cache_server: cache_server,
        }
    }

    fn holds(&self, ranges: &[(u64, u64)]) {
        *self.cache.ranges.lock() = Some(ranges.to_vec());
    }

    async fn book(&self, id: &str, worker: u64, query: pb::PromptQuery) {
        let request = pb::AddRequestRequest {
            attempt: attempt(id, 0),
            worker: rank(worker),
            query: Some(query),
            ..pb::AddRequestRequest::default()
        };
        self.router.clone().add_request(request).await.unwrap();
    }

    async fn free(&self, id: &str) {
        let request = pb::FreeRequest {
            attempt: attempt(id, 0),
            status: None,
        };
        self.router.clone().free(request).await.unwrap();
    }

    async fn overlaps(&self, request: pb::OverlapScoresRequest) -> pb::OverlapScoresResponse {
        self.router
            .clone()
            .overlap_scores(request)
            .await
            .unwrap()
            .into_inner()
    }

    /// Returns the worker to which Envoy would send a request with these tokens.
    async fn worker_of(&self, tokens: std::ops::Range<u32>) -> u64 {
        let tokens: Vec<u32> = tokens.collect();
        let body = json!({ "model": "m", "prompt": "x", "nvext": { "token_data": tokens } });
        let messages = ext_proc::post("/v1/completions", &[], &body.to_string());
        let mut client = ExternalProcessorClient::new(self.server.channel().await);
        let replies = client.process(tokio_stream::iter(messages)).await;
        let mut replies = replies.unwrap().into_inner();
        let mut worker = None;
        while let Some(reply) = replies.message().await.unwrap() {
            let response = match reply.response.unwrap() {
                Reply::RequestHeaders(reply) => reply.response,
                Reply::RequestBody(reply) => reply.response,
                other => panic!("{other:?}"),
            };
            let set = response
                .and_then(|response| response.header_mutation)
                .unwrap_or_default()
                .set_headers;
            let mut named = set.into_iter().filter_map(|option| option.header);
            let named = named.rfind(|header| header.key == "x-worker-instance-id");
            worker = named
                .map(|header| {
                    String::from_utf8(header.raw_value)
                        .unwrap()
                        .parse()
                        .unwrap()
                })
                .or(worker);
        }
        worker.expect("a worker")
    }

    async fn metric(&self, line: &str) -> f64 {
        let page = self.server.text("metrics").await;
        let mut found = page
            .lines()
            .filter_map(|found| found.strip_prefix(line)?.strip_prefix(' '));
        found
            .next_back()
            .map_or(0.0, |value| value.parse().unwrap())
    }

    async fn stop(self) {
        drop(self.router);
        self.server.end().await;
    }
}

/// Makes worker 1 cache the prompt and run a small request.
async fn warm(bed: &SharedCacheBed) {
    bed.book("warm", 1, token_range(0..17)).await;
    bed.free("warm").await;
    bed.book("busy", 1, token_range(100..104)).await;
}

#[tokio::test]
async fn blocks_of_the_shared_cache_change_the_choice() {
    let bed = SharedCacheBed::start().await;
    warm(&bed).await;
    // The cache responds with an error, so only the cached blocks of worker 1 count.
    assert_eq!(bed.worker_of(0..17).await, 1);
    assert_eq!(
        bed.metric("warmroute_shared_cache_lookup_errors_total{reason=\"status\"}")
            .await,
        1.0
    );
    assert_eq!(
        bed.metric("warmroute_shared_cache_hit_ratio_count{model=\"m\"}")
            .await,
        0.0
    );
    // Every worker can load these blocks, so the load decides.
    bed.holds(&[(2, 4), (0, 2)]);
    assert_eq!(bed.worker_of(0..17).await, 2);
    assert_eq!(
        bed.metric("warmroute_shared_cache_hit_ratio_count{model=\"m\"}")
            .await,
        1.0
    );
    assert_eq!(
        bed.metric("warmroute_shared_cache_hit_ratio_sum{model=\"m\"}")
            .await,
        1.0
    );
    assert_eq!(
        bed.metric("warmroute_shared_cache_additional_blocks_total{model=\"m\"}")
            .await,
        4.0
    );
    assert!(
        bed.metric("warmroute_shared_cache_lookup_duration_seconds_count")
            .await
            >= 2.0
    );
    bed.stop().await;
}

#[tokio::test]
async fn shared_cache_query_contains_prompt_hashes() {
    let bed = SharedCacheBed::start().await;
    warm(&bed).await;
    bed.holds(&[(2, 4), (0, 2)]);
    let request = pb::RouteRequest {
        query: Some(token_range(0..17)),
        ..pb::RouteRequest::default()
    };
    let response = bed
        .router
        .clone()
        .route(request)
        .await
        .unwrap()
        .into_inner();
    let hex = |hashes: &[u64]| {
        hashes
            .iter()
            .map(|hash| format!("{hash:016x}"))
            .collect::<Vec<_>>()
    };
    let prompt = &response.prompts[0];
    let expected = json!({
        "model": "m",
        "block_size": 4,
        "block_hashes": hex(&prompt.local_hashes),
        "sequence_hashes": hex(&prompt.sequence_hashes),
    });
    assert_eq!(prompt.local_hashes.len(), 4);
    assert_eq!(bed.cache.queries.lock().last(), Some(&expected));
    bed.stop().await;
}

#[tokio::test]
async fn overlap_scores_summarize_the_shared_cache() {
    let bed = SharedCacheBed::start().await;
    warm(&bed).await;
    let request = |include_shared| pb::OverlapScoresRequest {
        query: Some(token_range(0..17)),
        include_shared,
        ..pb::OverlapScoresRequest::default()
    };
    let failed = pb::SharedCacheHits {
        enabled: true,
        error: "status".to_owned(),
        ..pb::SharedCacheHits::default()
    };
    assert_eq!(bed.overlaps(request(None)).await.shared_cache, Some(failed));
    bed.holds(&[(0, 1), (2, 9)]);
    let response = bed.overlaps(request(Some(true))).await;
    let ranges = [(0, 1), (2, 4)]
        .map(|(start, end)| pb::BlockRange { start, end })
        .to_vec();
    let hits = pb::SharedCacheHits {
        enabled: true,
        total_hit_blocks: 3,
        ranges,
        error: String::new(),
    };
    assert_eq!(response.shared_cache, Some(hits));
    let beyond: Vec<_> = response
        .ranks
        .iter()
        .map(|score| score.shared_blocks_beyond_device)
        .collect();
    assert_eq!(beyond, [0, 3]);
    let before = bed.cache.queries.lock().len();
    let response = bed.overlaps(request(Some(false))).await;
    assert_eq!(response.shared_cache, None);
    assert!(
        response
            .ranks
            .iter()
            .all(|score| score.shared_blocks_beyond_device == 0)
    );
    assert_eq!(
        bed.cache.queries.lock().len(),
        before,
        "the cache was queried"
    );
    bed.stop().await;
}

#[tokio::test]
async fn overrides_apply_to_scores() {
    let bed = SharedCacheBed::start().await;
    warm(&bed).await;
    let credit = |credit| {
        Some(pb::Overrides {
            overlap_score_credit: Some(credit),
            ..pb::Overrides::default()
        })
    };
    let request = |overrides| pb::OverlapScoresRequest {
        query: Some(token_range(0..17)),
        overrides,
        ..pb::OverlapScoresRequest::default()
    };
    assert_eq!(
        bed.overlaps(request(None)).await.ranks[0].credit_blocks,
        4.0
    );
    assert_eq!(
        bed.overlaps(request(credit(0.0))).await.ranks[0].credit_blocks,
        0.0
    );
    let refused = bed
        .router
        .clone()
        .overlap_scores(request(credit(-1.0)))
        .await
        .unwrap_err();
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    bed.stop().await;
}

#[tokio::test]
async fn overrides_apply_to_loads_and_bookings() {
    let bed = SharedCacheBed::start().await;
    warm(&bed).await;
    let untracked = || {
        Some(pb::Overrides {
            track_prefill_tokens: Some(false),
            ..pb::Overrides::default()
        })
    };
    let request = |overrides| pb::PotentialLoadsRequest {
        query: Some(token_range(200..208)),
        overrides,
    };
    let loads = async |overrides| {
        let ranks = bed
            .router
            .clone()
            .potential_loads(request(overrides))
            .await
            .unwrap()
            .into_inner()
            .ranks;
        ranks
            .iter()
            .map(|load| load.potential_prefill_tokens)
            .collect::<Vec<_>>()
    };
    assert_eq!(loads(None).await, [12, 8]);
    assert_eq!(loads(untracked()).await, [4, 0]);
    let request = pb::AddRequestRequest {
        attempt: attempt("r", 0),
        worker: rank(2),
        query: Some(token_range(200..208)),
        overrides: untracked(),
        ..pb::AddRequestRequest::default()
    };
    assert_eq!(
        bed.router
            .clone()
            .add_request(request)
            .await
            .unwrap()
            .into_inner()
            .prefill_tokens,
        0
    );
    bed.stop().await;
}
