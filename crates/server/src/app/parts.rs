//! Construction of the components of a process, shared by the server and the offline commands.

use std::sync::Arc;
use std::time::Instant;

use warmroute_core::index::PrefixIndex;
use warmroute_core::load::LoadTracker;
use warmroute_core::predict::Predictor;
use warmroute_core::router::{PredictorSet, Router};
use warmroute_core::sessions::{SessionRecording, SessionStore};
use warmroute_engines::engine_client::EngineClient;
use warmroute_engines::shared_cache::SharedCacheClient;
use warmroute_metrics::Metrics;
use warmroute_tokens::openai::MessageCache;

use super::core_listener::CoreListener;
use crate::cluster::remote_index::RemoteIndexClient;
use crate::config::{Config, ModelConfig};
use crate::dispatch::queue::{AdmissionQueue, PrefillBacklog};
use crate::dispatch::{Dispatcher, RESPONSE_RULES, SessionRouting, TimedRouter};
use crate::fleet::xds::XdsClients;
use crate::request::engine_tokens::config::EngineTokensConfig;
use crate::request::engine_tokens::{EngineTokensClient, TokenSource, TokenSources};
use crate::request::{
    self, EncodeLimits, ModelRegistry, NvExtScope, RequestPreprocessor, RewriteRules,
    SharedCacheLookup, SharedClusterRules,
};

/// Creates the dispatcher and a router with an empty fleet. `seed` makes tie-breaking reproducible.
pub(super) fn dispatcher(
    config: &Config,
    seed: u64,
    listener: &Arc<CoreListener>,
) -> Arc<Dispatcher> {
    let load = LoadTracker::with_listener(Instant::now, listener.clone());
    let predictor = |policy| Predictor::new(policy, Instant::now);
    let predictions = PredictorSet {
        without_events: config.index.approximate.without_events().map(predictor),
        beside_events: config
            .index
            .approximate
            .beside_events()
            .map(|policy| Predictor::beside_events(policy, Instant::now)),
        covers_all_ranks: false,
    };
    let router = Router::new(PrefixIndex::new(), load, config.router_settings(), seed)
        .with_predictors(predictions)
        .with_listener(listener.clone());
    let router = Arc::new(if config.index.remote.is_some() {
        router.with_remote_index()
    } else {
        router
    });
    let prefill = if config.routing.load.prefill_decay {
        PrefillBacklog::Decaying
    } else {
        PrefillBacklog::Fixed
    };
    let admission = AdmissionQueue::new(TimedRouter::new(router.clone()), &config.queue, prefill);
    listener.set_queue(&admission);
    let session_routing = config.sessions.as_ref().map(|sessions| SessionRouting {
        sessions: SessionStore::with_listener(
            sessions.rules(),
            Instant::now,
            listener.session_recording(),
            listener.clone(),
        ),
        affinity: sessions.affinity,
        max_wait: sessions.wait_timeout.get(),
    });
    let stored_responses = SessionStore::with_listener(
        RESPONSE_RULES,
        Instant::now,
        SessionRecording {
            // Engines are not notified of stored responses.
            moves: false,
            ..listener.session_recording()
        },
        listener.clone(),
    );
    Dispatcher::new(
        router,
        admission,
        session_routing,
        stored_responses,
        config.queue.timeout.get(),
    )
}

/// Creates the registry of xDS clients, if xDS is configured.
pub(super) fn xds_clients(config: &Config, metrics: &Arc<Metrics>) -> Option<Arc<XdsClients>> {
    let envoy = config.envoy.as_ref().filter(|envoy| envoy.xds.is_some())?;
    Some(XdsClients::new(envoy.clusters(), metrics.clone()))
}

/// Creates the client of the remote index, if configured.
pub(super) fn index_client(
    config: &Config,
    metrics: &Arc<Metrics>,
) -> anyhow::Result<Option<Arc<RemoteIndexClient>>> {
    let index_client = config
        .index
        .remote
        .as_ref()
        .map(|settings| RemoteIndexClient::new(settings, metrics.clone()));
    Ok(index_client.transpose()?.map(Arc::new))
}

/// Dependencies of the preprocessor.
pub(super) struct PreprocessorDeps<'a> {
    pub(super) cluster: &'a SharedClusterRules,
    pub(super) client: &'a EngineClient,
    pub(super) router: &'a Arc<Router>,
    pub(super) metrics: &'a Arc<Metrics>,
    pub(super) message_cache: Option<Arc<MessageCache>>,
    /// Client of the remote index, if configured.
    pub(super) remote_index: Option<Arc<RemoteIndexClient>>,
}

/// Creates the preprocessor.
pub(super) fn preprocessor(
    config: &Config,
    models: ModelRegistry,
    deps: PreprocessorDeps<'_>,
) -> anyhow::Result<Arc<RequestPreprocessor>> {
    let PreprocessorDeps {
        cluster,
        client,
        router,
        metrics,
        message_cache,
        remote_index: remote,
    } = deps;
    let shared = config
        .index
        .shared_cache
        .as_ref()
        .map(SharedCacheClient::new)
        .transpose()?;
    let tokens = token_sources(config, client, router, metrics);
    let tracking_hash = config
        .routing
        .block_hash
        .load()
        .map_err(|problem| anyhow::anyhow!("{}", problem.text))?;
    Ok(RequestPreprocessor::new(request::PreprocessorParts {
        models: models
            .with_adapters(router.sources().adapters.clone())
            .with_windows(router.sources().windows.clone()),
        message_cache,
        paths: config.requests.api_paths(),
        clients: config.requests.clients.clone(),
        nvext: NvExtScope::new(&config.requests.clients, config.gateway.is_dynamo()),
        pool_routes: config.routing.pool_routes.clone(),
        rewrites: RewriteRules::from(&config.routing.model_rewrites),
        rewrite_headers: config.routing.model_rewrites.headers.clone(),
        cluster: cluster.clone(),
        limits: EncodeLimits {
            inline: config.requests.limits.tokenize_inline_size.bytes(),
            queue: config.requests.limits.tokenize_queue_length as usize,
            deadline: config.requests.limits.decision_timeout.get(),
        },
        tracking_hash,
        sessions: config.sessions.clone(),
        token_sources: tokens,
        index_client: remote,
        shared_cache: shared.map(|cache| SharedCacheLookup {
            cache,
            metrics: metrics.clone(),
        }),
    }))
}

/// Returns the token source of each model. The parity status of unchanged models is reused.
fn token_sources(
    config: &Config,
    client: &EngineClient,
    router: &Arc<Router>,
    metrics: &Arc<Metrics>,
) -> TokenSources {
    let engine = |tokens: &EngineTokensConfig| {
        Arc::new(EngineTokensClient::new(
            tokens,
            &config.engines.http,
            client,
            router.clone(),
            metrics.clone(),
        ))
    };
    let source = |model: &ModelConfig| TokenSource {
        parity: router
            .parity()
            .model_status(&model.name)
            .unwrap_or_default(),
        engine_tokens: model.remote_tokenizer.as_ref().map(&engine),
        engine_settings: router.sources().common_settings.clone(),
    };
    config
        .models
        .iter()
        .map(|model| (model.name.clone(), source(model)))
        .collect()
}
