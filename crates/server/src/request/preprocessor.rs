//! The preprocessor, its components, and its limits of concurrent encoding.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use tokio::sync::Semaphore;
use warmroute_core::parity::ParityStatus;
use warmroute_core::worker::ModelName;
use warmroute_tokens::openai::{ApiKind, ApiPaths, MessageCache};

use super::cluster_rules::SharedClusterRules;
use super::config::ClientsConfig;
use super::encode_time::EncodeTimeEstimator;
use super::encoder_pool;
use super::engine_tokens::TokenSources;
use super::large_bodies::LargeBodies;
use super::models::ModelRegistry;
use super::pool_routes::{PoolAuthorities, PoolRoutesConfig};
use super::rewrite::RewriteRules;
use super::routing_hints::HeaderLookup;
use super::sessions::SessionFields;
use super::shared_cache::SharedCacheLookup;
use crate::cluster::remote_index::RemoteIndexClient;
use crate::tracking_hash::TrackingHash;

/// Limits of concurrent encoding.
#[derive(Clone, Copy, Debug)]
pub struct EncodeLimits {
    /// Maximum size of a body that is encoded on the caller's thread, in bytes.
    pub inline: usize,
    /// Maximum number of bodies that wait for an encoder thread.
    pub queue: usize,
    /// Timeout of waiting and encoding.
    pub deadline: Duration,
}

/// Fields of `nvext` in request bodies that apply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NvExtScope {
    /// None: the engines do not read it, and clients are not trusted.
    #[default]
    Nothing,
    /// Those that change the prompt or its blocks, because front ends of Dynamo read them from every
    /// client.
    Content,
    /// Also the hints of trusted clients.
    All,
}

impl NvExtScope {
    /// Returns the scope for clients. `is_dynamo`: front ends of Dynamo receive the requests.
    pub fn new(clients: &ClientsConfig, is_dynamo: bool) -> Self {
        match (clients.trusted, is_dynamo) {
            (true, _) => NvExtScope::All,
            (false, true) => NvExtScope::Content,
            (false, false) => NvExtScope::Nothing,
        }
    }
}

/// Components of a preprocessor.
pub struct PreprocessorParts {
    /// The configured models.
    pub models: ModelRegistry,
    /// Cache of the messages of earlier bodies; `None` if every body is parsed completely.
    pub message_cache: Option<Arc<MessageCache>>,
    /// APIs by path.
    pub paths: ApiPaths,
    /// Trust in clients, and the headers they may use.
    pub clients: ClientsConfig,
    /// Fields of `nvext` that apply.
    pub nvext: NvExtScope,
    /// Rules that restrict requests to one pool.
    pub pool_routes: PoolRoutesConfig,
    /// Rules that send requests to other models. They precede the rules of the cluster.
    pub rewrites: RewriteRules,
    /// Headers that name the model and override the rules.
    pub rewrite_headers: Vec<String>,
    /// Objectives and rewrite rules of the cluster.
    pub cluster: SharedClusterRules,
    /// Limits of concurrent encoding.
    pub limits: EncodeLimits,
    /// Hash that identifies blocks in load tracking.
    pub tracking_hash: TrackingHash,
    /// Fields with the session id; `None` without sessions.
    pub session_fields: Option<SessionFields>,
    /// The cache that all workers share.
    pub shared_cache: Option<SharedCacheLookup>,
    /// Client of a remote index.
    pub index_client: Option<Arc<RemoteIndexClient>>,
    /// Token sources by model. Other models use the configured tokenizer.
    pub token_sources: TokenSources,
}

/// Turns requests into the input of the router.
pub struct RequestPreprocessor {
    pub(super) parts: PreprocessorParts,
    pub(super) pool_authorities: PoolAuthorities,
    pub(super) encoders: Arc<Semaphore>,
    pub(super) queued_bodies: AtomicUsize,
    pub(super) large_bodies: LargeBodies,
    pub(super) encode_time: EncodeTimeEstimator,
}

impl RequestPreprocessor {
    /// Creates a preprocessor.
    pub fn new(parts: PreprocessorParts) -> Arc<Self> {
        // One encoder per core. More would share the same cores and delay the async threads.
        let encoders = Arc::new(Semaphore::new(encoder_pool::thread_count()));
        let large = LargeBodies::new(encoder_pool::thread_count(), parts.limits.queue);
        let pool_authorities = PoolAuthorities::from(&parts.pool_routes);
        Arc::new(Self {
            parts,
            pool_authorities,
            encoders,
            queued_bodies: AtomicUsize::new(0),
            large_bodies: large,
            encode_time: EncodeTimeEstimator::default(),
        })
    }

    /// Returns the parity status of each model's tokens.
    pub fn parity_statuses(&self) -> impl Iterator<Item = (ModelName, Arc<ParityStatus>)> + '_ {
        self.parts
            .token_sources
            .iter()
            .map(|(model, source)| (model.clone(), source.parity.clone()))
    }

    /// Returns the API of a request.
    pub fn api(&self, path: &str, headers: HeaderLookup<'_>) -> Option<ApiKind> {
        self.parts.paths.api_of_request(path, headers)
    }

    /// Returns whether the body of a request is read at all. Envoy does not have to send other
    /// bodies.
    pub fn wants_body(&self, path: &str, headers: HeaderLookup<'_>) -> bool {
        self.api(path, headers).is_some_and(ApiKind::wants_body)
    }
}
