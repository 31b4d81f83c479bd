//! What one configuration makes of exchanges with Envoy: the request path and the rules it follows, to be put in place of
//! another's as a whole.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::Context as _;

use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::ExternalProcessorServer;

use crate::config::{Config, FirstToken};
use crate::engine_client::config::EnginesConfig;
use crate::entrance::Entrance;
use crate::ext_proc::carrying::{Prefills, Way};
use crate::ext_proc::config::AssumedBodies;
use crate::ext_proc::exchange::{Answers, Options};
use crate::ext_proc::message::{BodyMode, Modes};
use crate::ext_proc::pipeline::{Pipeline, Policy};
use crate::ext_proc::service::{Kept, Live, Service};
use crate::intake::{Intake, Rewrites};
use crate::metrics::Metrics;
use crate::openai::paths::Paths;
use crate::prefill::{Aborts, By, Call, Caller, Mirror, PrefillConfig};

/// The ext_proc service of one configuration. What has to outlive a reload is shared with the one before.
pub(super) fn service(
    config: &Config,
    intake: Arc<Intake>,
    entrance: Arc<Entrance>,
    kept: &Arc<Kept>,
) -> anyhow::Result<ExternalProcessorServer<Service>> {
    let (metrics, prefills) = (kept.metrics().clone(), prefills(config, kept.metrics())?);
    let live = Live {
        pipeline: Pipeline::new(intake, entrance, metrics, policy(config), prefills),
        options: Arc::new(options(config)),
        upload: config.limits.upload.get(),
        held: config.limits.held_bodies.bytes(),
    };
    // tonic's own limit of 4 MiB would refuse bodies that the configuration allows, and with failure_mode_allow the
    // request would then silently go to a random worker.
    Ok(ExternalProcessorServer::new(Service::new(live, kept.clone()))
        .max_decoding_message_size(super::most_bytes(config))
        .max_encoding_message_size(usize::MAX))
}

/// How prefills are carried out; each model that has them called for has a pool of its own.
fn prefills(config: &Config, metrics: &Arc<Metrics>) -> anyhow::Result<Prefills> {
    let mut ways = HashMap::new();
    for model in &config.models {
        let Some(prefill) = &model.prefill else { continue };
        let way = way(prefill, &config.engines, metrics).with_context(|| format!("the prefills of {}", model.name))?;
        ways.extend(way.map(|way| (model.name.clone(), way)));
    }
    Ok(Prefills { ways, contract: config.gateway.contract(), trusting: config.clients.trusted })
}

fn way(prefill: &PrefillConfig, engines: &EnginesConfig, metrics: &Arc<Metrics>) -> anyhow::Result<Option<Way>> {
    let deadline = prefill.deadline.get();
    Ok(match prefill.by {
        By::Header => None,
        By::Call => {
            let engines = EnginesConfig { in_flight: prefill.in_flight, ..engines.clone() };
            let caller = Caller::new(engines, deadline, metrics.clone())?;
            Some(Way::Call(Arc::new(Call { caller, protocol: prefill.protocol, tries: prefill.tries })))
        }
        By::Mirror => {
            let aborts = Aborts::new(engines, metrics.clone())?;
            let caller = Caller::new(engines.clone(), deadline, metrics.clone())?;
            Some(Way::Mirror(Arc::new(Mirror { cluster: prefill.cluster.as_str().into(), deadline, aborts, caller })))
        }
    })
}

fn policy(config: &Config) -> Policy {
    let with_headers = config.models.iter().filter(|model| model.first_token == FirstToken::Headers);
    let failure = config.models.iter().filter_map(|model| Some((model.name.clone(), model.failure_mode?)));
    Policy {
        failure: config.failure,
        failure_of: failure.collect(),
        first_token_with_headers: with_headers.map(|model| model.name.clone()).collect(),
        rewrites: Rewrites::from(&config.rewrites),
        rewrite_headers: config.rewrites.headers.clone(),
        why: config.response.why_header,
        conformance: config.gateway.conformance,
        says_why_dropped: config.gateway.contract().says_why_dropped(),
        says_mode: config.response.mode_header,
    }
}

fn options(config: &Config) -> Options {
    let assumed = match config.gateway.assume {
        AssumedBodies::Buffered => Modes::default(),
        AssumedBodies::FullDuplex => Modes { request: BodyMode::FullDuplex, response: BodyMode::FullDuplex },
    };
    Options {
        paths: Arc::new(Paths::new(&config.paths)),
        body_limit: config.limits.body.bytes(),
        contract: config.gateway.contract(),
        clear_route_cache: config.gateway.clear_route_cache,
        assumed,
        observe: config.observe,
        output_blocks: config.load.output_blocks,
        conformance: config.gateway.conformance,
        answers: Answers {
            mode: config.response.mode_header,
            worker: config.response.worker_header,
            prediction: config.response.prediction_header,
            why: config.response.why_header,
        },
    }
}
