//! The preprocessor, its components, and its limits of concurrent encoding.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use warmroute_core::parity::ParityStatus;
use warmroute_core::worker::ModelName;
use warmroute_tokens::openai::{self, ApiKind, ApiPaths, MessageCache, NvExt};

use super::cluster_rules::{ClusterRules, SharedClusterRules};
use super::config::ClientsConfig;
use super::encode_time::EncodeTimeEstimator;
use super::encoder_pool::{self, EncoderLimiter};
use super::engine_tokens::TokenSources;
use super::large_bodies::LargeBodies;
use super::models::{ModelRegistry, ResolvedModel};
use super::pool_routes::{PoolAuthorities, PoolRoutesConfig};
use super::rewrite::{BodyEdit, ModelRename, RequestedModel, RewriteRules};
use super::routing_hints::HeaderLookup;
use super::sessions::SessionsConfig;
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

    /// Parses the fields that apply.
    pub(super) fn parse(self, raw: &str) -> Option<NvExt> {
        match self {
            NvExtScope::Nothing => None,
            NvExtScope::Content => Some(NvExt::parse(raw).into_content()),
            NvExtScope::All => Some(NvExt::parse(raw)),
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
    /// Source of the session id; `None` without sessions.
    pub sessions: Option<SessionsConfig>,
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
    pub(super) encoders: EncoderLimiter,
    pub(super) large_bodies: LargeBodies,
    pub(super) encode_time: EncodeTimeEstimator,
}

impl RequestPreprocessor {
    /// Creates a preprocessor.
    pub fn new(parts: PreprocessorParts) -> Arc<Self> {
        let queue = parts.limits.queue;
        Arc::new(Self {
            pool_authorities: PoolAuthorities::from(&parts.pool_routes),
            encoders: EncoderLimiter::new(queue),
            large_bodies: LargeBodies::new(encoder_pool::thread_count(), queue),
            encode_time: EncodeTimeEstimator::default(),
            parts,
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

    /// Returns the pools by the authority of a call.
    pub fn pool_authorities(&self) -> &PoolAuthorities {
        &self.pool_authorities
    }

    /// Returns the pool of a request; `None` allows any worker.
    pub fn pool_of(&self, path: &str, headers: HeaderLookup<'_>) -> Option<Arc<str>> {
        self.parts.pool_routes.pool_of(path, headers)
    }

    /// Replaces the model of a body, if a header or a rule requires it. `random` is at least 0 and
    /// below 1, and selects among weighted models.
    pub fn rewrite_model(
        &self,
        pool: Option<&str>,
        headers: HeaderLookup<'_>,
        body: &Bytes,
        random: f64,
    ) -> Option<BodyEdit> {
        let PreprocessorParts {
            rewrites,
            rewrite_headers,
            ..
        } = &self.parts;
        let header = rewrite_headers
            .iter()
            .find_map(|name| headers(name))
            .map(Cow::into_owned);
        let cluster = self.cluster_rules();
        if rewrites.is_empty() && cluster.rewrites().is_empty() && header.is_none() {
            return None;
        }
        let requested = openai::read_model(body);
        // A long name is not rewritten, because the requested name is restored in every piece of
        // the response.
        let is_too_long = |name: &str| name.len() > openai::MAX_MODEL_NAME_BYTES;
        if [&requested, &header]
            .into_iter()
            .flatten()
            .any(|name| is_too_long(name))
        {
            return None;
        }
        let model = RequestedModel {
            name: requested.as_deref(),
            header: header.as_deref(),
            pool,
        };
        let chosen = rewrites.choose_model(cluster.rewrites(), model, random);
        let served = chosen.filter(|name| !is_too_long(name))?.to_owned();
        // A body that is not a JSON object has no model. The engine rejects it.
        Some(BodyEdit {
            body: openai::json_edit::set_model(body, &served)?.into(),
            model_rename: requested.map(|requested| ModelRename { served, requested }),
        })
    }

    /// Returns the current rules of the cluster.
    pub fn cluster_rules(&self) -> Arc<ClusterRules> {
        self.parts.cluster.load_full()
    }

    /// Resolves a model name. Without a name, returns the only configured model.
    pub fn resolve_model(&self, name: Option<&str>) -> Option<ResolvedModel> {
        self.parts.models.resolve(name)
    }

    /// Returns whether the workers share a cache.
    pub fn has_shared_cache(&self) -> bool {
        self.parts.shared_cache.is_some()
    }
}
