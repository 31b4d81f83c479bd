//! Clients of the workers that execute remote prefills, for one configuration. A reload reuses
//! unchanged clients, so that connections and limits persist.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::Context as _;
use tokio_util::task::TaskTracker;
use warmroute_core::worker::ModelName;
use warmroute_engines::engine_client::EngineError;
use warmroute_engines::engine_client::config::EnginesConfig;
use warmroute_metrics::Metrics;

use super::aborts::AbortClient;
use super::client::PrefillClient;
use super::config::{KvTransferProtocol, PrefillConfig, PrefillMode};
use super::fallback::SequentialPrefill;
use super::mirror::PrefillMirror;
use super::plan::PrefillExecutor;
use crate::dispatch::audit::CacheAudit;

/// Clients of the workers for one configuration.
#[derive(Default)]
pub struct PrefillClients {
    /// Prefill clients by model, each with its own limit.
    by_model: HashMap<ModelName, PrefillClient>,
    aborts: Option<Arc<AbortClient>>,
}

impl PrefillClients {
    /// Returns the clients for another configuration, and reuses unchanged clients. Running
    /// prefills and aborts of new clients count in `tasks`.
    pub fn reconfigure<'c>(
        &self,
        models: impl IntoIterator<Item = (&'c ModelName, &'c PrefillConfig)>,
        engines: &EnginesConfig,
        metrics: &Arc<Metrics>,
        tasks: &TaskTracker,
    ) -> anyhow::Result<Self> {
        let mut next = Self::default();
        for (model, config) in models {
            if config.mode == PrefillMode::Header {
                continue;
            }
            let client = self
                .prefill_client(model, config, engines, metrics)
                .with_context(|| format!("the prefills of {model}"))?;
            next.by_model
                .insert(model.clone(), client.with_tracker(tasks.clone()));
            if config.mode == PrefillMode::Mirror && next.aborts.is_none() {
                next.aborts = Some(match &self.aborts {
                    Some(aborts) => aborts.reconfigure(engines)?,
                    None => AbortClient::new(engines, metrics.clone(), tasks.clone())?,
                });
            }
        }
        Ok(next)
    }

    /// Returns the client of one model. An existing client keeps its unchanged parts.
    fn prefill_client(
        &self,
        model: &ModelName,
        config: &PrefillConfig,
        engines: &EnginesConfig,
        metrics: &Arc<Metrics>,
    ) -> Result<PrefillClient, EngineError> {
        let engines = engines_for(config, engines);
        let deadline = config.timeout.get();
        let client = match self.by_model.get(model) {
            Some(client) => client.reconfigure(engines, deadline)?,
            None => PrefillClient::new(engines, deadline, metrics.clone())?,
        };
        // Only sequential vLLM prefills are repeatable: repeating another one would reuse its
        // transfer id or bootstrap room.
        let may_repeat =
            config.mode == PrefillMode::Call && config.protocol == KvTransferProtocol::Vllm;
        Ok(client.with_repeats(may_repeat))
    }

    /// Returns the executor of a model's remote prefills; `None` if only the headers name the
    /// prefill worker.
    pub fn executor(
        &self,
        model: &ModelName,
        config: &PrefillConfig,
        audit: &Arc<CacheAudit>,
    ) -> Option<PrefillExecutor> {
        let client = self.by_model.get(model)?.clone();
        let audit = audit.clone();
        match config.mode {
            PrefillMode::Header => None,
            PrefillMode::Call => Some(PrefillExecutor::Call(Arc::new(SequentialPrefill {
                client,
                protocol: config.protocol,
                tries: config.max_attempts,
                audit,
            }))),
            PrefillMode::Mirror => Some(PrefillExecutor::Mirror(Arc::new(PrefillMirror {
                cluster: config.cluster.as_str().into(),
                deadline: config.timeout.get(),
                aborts: self.aborts.clone()?,
                client,
                audit,
            }))),
        }
    }
}

fn engines_for(prefill: &PrefillConfig, engines: &EnginesConfig) -> EnginesConfig {
    let in_flight = if prefill.mode == PrefillMode::Call {
        prefill.max_concurrency
    } else {
        engines.max_concurrency
    };
    EnginesConfig {
        max_concurrency: in_flight,
        ..engines.clone()
    }
}

#[cfg(test)]
mod tests;
