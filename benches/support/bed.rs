//! All components of a decision in one process without a network: preprocessor, router, workers and
//! index.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::FutureExt;
use warmroute_core::block::{BlockHashes, BlockWindows, EngineHash, MediaTokens, StorageTier};
use warmroute_core::fleet::Fleet;
use warmroute_core::index::{KvEvent, PrefixIndex, RankWriter, StoredBlock};
use warmroute_core::load::LoadTracker;
use warmroute_core::router::{Placement, RoutePrompt, RouteRequest, Router, RouterSettings};
use warmroute_core::worker::{BlockSize, RankSlot, Worker, WorkerEndpoint, WorkerId};
use warmroute_server::request::config::ClientsConfig;
use warmroute_server::request::{
    ConfiguredModel, EncodeLimits, ModelRegistry, PreprocessorParts, RequestBody,
    RequestPreprocessor,
};
use warmroute_server::tracking_hash::TrackingHash;
use warmroute_tokens::openai::ApiPaths;
use warmroute_tokens::openai::MessageCache;
use warmroute_tokens::prompt::{Encoder, PromptCache};

use warmroute_testbed::comparison::measure_cpu;

/// Tokens per block.
pub(crate) const BLOCK: BlockSize = BlockSize(NonZeroU32::new(16).expect("16 is not zero"));
/// Maximum bytes of cached messages.
const MESSAGE_CACHE_BYTES: usize = 1 << 30;
const PATH: &str = "/v1/chat/completions";

/// A measured decision. Dropping it releases the worker.
pub(crate) struct BenchDecision {
    /// CPU time from the body to the booked worker.
    pub(crate) micros: f64,
    /// Blocks of the prompt.
    pub(crate) hashes: BlockHashes,
    placement: Placement,
}

impl BenchDecision {
    /// Releases the worker.
    pub(crate) fn into_hashes(self) -> BlockHashes {
        drop(self.placement);
        self.hashes
    }
}

/// The pipeline from request bodies to workers.
pub(crate) struct DecisionPipeline {
    preprocessor: Arc<RequestPreprocessor>,
    router: Router,
    writers: Vec<RankWriter>,
}

impl DecisionPipeline {
    /// Creates `workers` workers with empty caches.
    pub(crate) fn new(encoder: Encoder, workers: u32) -> Self {
        let mut models = ModelRegistry::default();
        let model = ConfiguredModel {
            name: "m".into(),
            block_size: BLOCK,
            windows: BlockWindows::Plain,
            media: MediaTokens::default(),
            encoder: Some(Arc::new(encoder)),
        };
        models.add(model, &[], &[]);
        let message_cache = PromptCache::new(MESSAGE_CACHE_BYTES, Arc::default());
        let preprocessor = RequestPreprocessor::new(PreprocessorParts {
            models,
            message_cache: Some(Arc::new(MessageCache::new(message_cache))),
            paths: ApiPaths::default(),
            clients: ClientsConfig::default(),
            nvext: Default::default(),
            pool_routes: Default::default(),
            rewrites: warmroute_server::request::RewriteRules::default(),
            rewrite_headers: Vec::new(),
            cluster: Default::default(),
            limits: EncodeLimits {
                inline: usize::MAX,
                queue: 1,
                deadline: Duration::from_secs(10),
            },
            tracking_hash: TrackingHash::Public,
            sessions: None,
            shared_cache: None,
            index_client: None,
            token_sources: HashMap::new(),
        });
        let index = PrefixIndex::new();
        let load = LoadTracker::new(Instant::now);
        let router = Router::new(index.clone(), load.clone(), RouterSettings::default(), 7);
        let worker = |id: u32| {
            let [_, a, b, c] = id.to_be_bytes();
            Worker::new(
                WorkerId(u64::from(id)),
                WorkerEndpoint(([10, a, b, c], 8000).into()),
                "m".into(),
                BLOCK,
            )
        };
        let change = Fleet::empty().reconcile((0..workers).map(worker).collect());
        change.added.iter().for_each(|member| load.join(member));
        router.set_fleet(change.fleet.into());
        let writers = (0..workers)
            .map(|slot| index.create_writer(RankSlot(slot)))
            .collect();
        Self {
            preprocessor,
            router,
            writers,
        }
    }

    /// Routes a request body.
    pub(crate) fn decide(&self, body: &Bytes) -> BenchDecision {
        let mut result = None;
        let nanos = measure_cpu(|| {
            let preprocessed = self
                .preprocessor
                .preprocess(PATH, &|_| None, &RequestBody::Whole(body.clone()))
                .now_or_never();
            let request = preprocessed.expect("nothing to wait for").route_request;
            let RoutePrompt::Hashed(hashes) = &request.prompt else {
                panic!("the prompt is not hashed")
            };
            let hashes = hashes[0].clone();
            result = Some((hashes, self.router.route(request).expect("a worker")));
        });
        let (hashes, placement) = result.expect("the request was routed");
        BenchDecision {
            micros: nanos / 1e3,
            hashes,
            placement,
        }
    }

    /// Books a worker for an already hashed prompt.
    pub(crate) fn route(&self, hashes: &BlockHashes) -> Placement {
        let request =
            RouteRequest::new(Some("m".into()), RoutePrompt::Hashed(vec![hashes.clone()]));
        self.router.route(request).expect("a worker")
    }

    /// Stores a prompt in the index for a worker.
    pub(crate) fn store(&mut self, worker: usize, hashes: &BlockHashes) {
        let blocks = hashes.locals().iter().zip(hashes.sequences());
        let blocks = blocks
            .map(|(&local, sequence)| StoredBlock {
                engine: EngineHash(sequence.0),
                local,
            })
            .collect();
        let writer = &mut self.writers[worker];
        writer.apply(&KvEvent::Stored {
            parent: None,
            blocks,
            tier: StorageTier::Device,
        });
    }
}
