//! Facts from the configuration of a worker.

use warmroute_core::engine_settings::ConfiguredSettings;
use warmroute_core::worker::{ModelName, Worker, WorkerRole};
use warmroute_doctor::engine::facts::WorkerOrigin;
use warmroute_engines::engine_client::{MetricsPage, RankEventSource};
use warmroute_server::app;
use warmroute_server::config::{ApproximatePolicy, ModelConfig, WorkerSource};

use super::FactCollector;

impl FactCollector<'_> {
    /// Returns the origin of a worker: the configured list, or a pod and its pool.
    pub(super) fn worker_origin(&self, worker: &Worker, workers: &[Worker]) -> WorkerOrigin {
        let (WorkerSource::Kubernetes(_), Some(name)) = (self.config.worker_source(), &worker.name)
        else {
            return WorkerOrigin::Listed;
        };
        let same_pod = workers.iter().filter(|other| other.name == worker.name);
        let port = if same_pod.count() > 1 {
            format!(":{}", worker.endpoint.0.port())
        } else {
            String::new()
        };
        let pool = worker.pools().next().unwrap_or_default();
        WorkerOrigin::Pod {
            pod: format!("{name}{port}"),
            pool: pool.to_owned(),
        }
    }

    /// Returns the configuration of a model.
    pub(super) fn model_config(&self, name: &ModelName) -> Option<&ModelConfig> {
        let mut models = self.config.models.iter();
        models.find(|model| model.name == *name)
    }

    /// Returns the worker, completed by the settings that a running warmroute would query from the
    /// engine, and whether its event sources are among these.
    pub(super) fn with_discovered_settings(
        &self,
        worker: &Worker,
        metrics: Option<&MetricsPage>,
        publishers: Option<&Vec<RankEventSource>>,
    ) -> (Worker, bool) {
        let mut completed = worker.clone();
        if self.config.engines.discovery.enabled {
            let caches = metrics.map(MetricsPage::caches).unwrap_or_default();
            let publishers = publishers.map(Vec::as_slice).unwrap_or_default();
            app::parse_engine_settings(worker.endpoint, &caches, publishers)
                .fill_missing(&mut completed, &ConfiguredSettings::default());
        }
        let has_discovered_sources =
            worker.event_sources.is_empty() && !completed.event_sources.is_empty();
        (completed, has_discovered_sources)
    }

    /// Returns the model name in the cache keys of images; `None` without image support, or if the
    /// engines report it.
    pub(super) fn image_model(&self, model: &ModelName) -> Option<String> {
        let media = self.model_config(model)?.multimodal.as_ref()?;
        media.image.as_ref()?;
        let served = (!self.config.engines.discovery.enabled).then(|| model.to_string());
        media.model.clone().or(served)
    }

    /// Returns whether a setting needs the number of KV blocks of a worker.
    pub(super) fn needs_capacity(&self) -> bool {
        let approximate = &self.config.index.approximate;
        let by_blocks =
            approximate.policy == ApproximatePolicy::Lru && approximate.default_kv_blocks.is_none();
        by_blocks
            || self
                .config
                .routing
                .overload
                .decode_blocks_threshold
                .is_some()
    }
}

/// Returns whether a worker on another machine may fetch the KV of a prefill worker.
pub(super) fn has_remote_decoders(prefill: &Worker, workers: &[Worker]) -> bool {
    let is_decoder =
        |other: &&Worker| other.model == prefill.model && other.role != WorkerRole::Prefill;
    workers
        .iter()
        .filter(is_decoder)
        .any(|other| other.endpoint.0.ip() != prefill.endpoint.0.ip())
}
