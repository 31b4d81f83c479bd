//! The parts of one process, made from its configuration and not yet running: the same for the server and for commands
//! that only look.

use std::sync::Arc;
use std::time::Instant;

use crate::admission::{Admission, Prefill};
use crate::config::{self, Config, ModelConfig};
use crate::engine_client::EngineClient;
use crate::entrance::{Affinities, Affinity, Entrance};
use crate::index::PrefixIndex;
use crate::intake::engine_tokens::config::EngineTokensConfig;
use crate::intake::engine_tokens::{EngineTokens, TokenSource, TokenSources};
use crate::intake::{self, Intake, Limits, Models, Rewrites, SessionSigns, Shared, SharedCluster};
use crate::load::LoadTracker;
use crate::metrics::Metrics;
use crate::openai::Paths;
use crate::predict::Predictor;
use crate::remote_index::Asker;
use crate::router::{Predictions, Router};
use crate::sessions::Sessions;
use crate::shared_cache::HttpSharedCache;
use crate::xds::Envoys;

/// The way to a router with an empty fleet. `seed` makes the choice between ties repeatable.
pub(super) fn entrance(config: &Config, seed: u64) -> Arc<Entrance> {
    let load = LoadTracker::new(Instant::now);
    let predictor = |policy| Predictor::new(policy, Instant::now);
    let predictions = Predictions {
        without_events: config.approximate.without_events().map(predictor),
        beside_events: config
            .approximate
            .beside_events()
            .map(|policy| Predictor::beside_events(policy, Instant::now)),
        everywhere: false,
    };
    let router = Router::new(
        PrefixIndex::new(),
        load.clone(),
        config.router_settings(),
        seed,
    );
    let router = router.predicting(predictions);
    let router = Arc::new(if config.use_remote_index.is_some() {
        router.without_index()
    } else {
        router
    });
    let prefill = if config.load.prefill_durations {
        Prefill::Shrinks
    } else {
        Prefill::Steady
    };
    let admission = Admission::new(router.clone(), &config.queue, prefill);
    let nudged = Arc::downgrade(&admission);
    load.on_relief(move || {
        if let Some(admission) = nudged.upgrade() {
            admission.nudge();
        }
    });
    let affinities = config.sessions.as_ref().map(|sessions| Affinities {
        sessions: Sessions::new(sessions.rules(), Instant::now),
        affinity: match sessions.affinity {
            config::Affinity::Hard => Affinity::Hard,
            config::Affinity::Soft => Affinity::Soft,
        },
        wait: sessions.wait.get(),
    });
    Entrance::new(router, admission, affinities, config.queue.deadline.get())
}

/// Those who are told of the fleet by xDS, if anybody is.
pub(super) fn envoys(config: &Config, metrics: &Arc<Metrics>) -> Option<Arc<Envoys>> {
    let envoy = config.envoy.as_ref().filter(|envoy| envoy.xds.is_some())?;
    Some(Envoys::new(envoy.clusters(), metrics.clone()))
}

/// Those who are asked for the index, where it is kept elsewhere.
pub(super) fn asker(config: &Config, metrics: &Arc<Metrics>) -> anyhow::Result<Option<Arc<Asker>>> {
    let asker = config
        .use_remote_index
        .as_ref()
        .map(|settings| Asker::new(settings, metrics.clone()));
    Ok(asker.transpose()?.map(Arc::new))
}

/// The way from a body to a question.
pub(super) fn intake(
    config: &Config,
    (models, cluster): (Models, &SharedCluster),
    client: &EngineClient,
    router: &Arc<Router>,
    (metrics, remote): (&Arc<Metrics>, Option<Arc<Asker>>),
) -> anyhow::Result<Arc<Intake>> {
    let shared = config
        .shared_cache
        .as_ref()
        .map(HttpSharedCache::new)
        .transpose()?;
    let signs = config.sessions.as_ref().map(|sessions| SessionSigns {
        headers: sessions.headers.clone(),
        body_field: sessions.body_field.clone(),
        parent_headers: sessions.parent_headers.clone(),
        final_headers: sessions.final_headers.clone(),
    });
    let tokens = token_sources(config, client, router, metrics);
    let tracking = config
        .tracking_hash
        .load()
        .map_err(|problem| anyhow::anyhow!("{}", problem.text))?;
    Ok(Intake::new(intake::Parts {
        models,
        paths: Paths::new(&config.paths),
        clients: config.clients.clone(),
        confine: config.confine.clone(),
        rewrites: Rewrites::from(&config.rewrites),
        rewrite_headers: config.rewrites.headers.clone(),
        cluster: cluster.clone(),
        limits: Limits {
            inline: config.limits.tokenize_inline.bytes(),
            queue: config.limits.tokenize_queue as usize,
            deadline: config.limits.exchange_deadline.get(),
        },
        tracking,
        sessions: signs,
        tokens,
        remote,
        shared: shared.map(|cache| Shared {
            cache: Arc::new(cache),
            metrics: metrics.clone(),
        }),
    }))
}

/// Where the tokens of each model come from. What is known of models that stay is kept.
fn token_sources(
    config: &Config,
    client: &EngineClient,
    router: &Arc<Router>,
    metrics: &Arc<Metrics>,
) -> TokenSources {
    let engine = |tokens: &EngineTokensConfig| {
        EngineTokens::new(
            tokens,
            &config.engines,
            client,
            router.clone(),
            metrics.clone(),
        )
    };
    let source = |model: &ModelConfig| TokenSource {
        standing: router.parity().of(&model.name).unwrap_or_default(),
        engine: model.engine_tokens.as_ref().map(&engine),
        agreed: router.sources().agreed().clone(),
    };
    config
        .models
        .iter()
        .map(|model| (model.name.clone(), source(model)))
        .collect()
}
