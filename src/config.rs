//! The configuration file. Each module defines its own section beside the code that the section drives; here they are
//! only put together, checked against one another, and given their defaults. What cannot work is refused at start, with
//! the line and the mend, and all mistakes are told at once.

mod advice;
mod check;
mod flags;
mod health;
mod index;
mod index_trust;
mod kv_events;
mod learn;
mod log;
mod model;
mod overload;
mod pool;
mod predict;
mod reload;
mod sessions;
mod tracking;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::admin::config::AdminConfig;
use crate::admission::config::QueueConfig;
use crate::api::ApiConfig;
use crate::disagg::Disaggregation;
use crate::discovery::config::{DiscoveryConfig, WorkerConfig};
use crate::discovery::dns::DnsConfig;
use crate::discovery::kubernetes::{KubernetesConfig, PodsConfig};
use crate::discovery::{self, ServedModel};
use crate::engine_client::config::EnginesConfig;
use crate::ext_proc::config::{
    FailureConfig, GatewayConfig, LimitsConfig, ListenConfig, Observe, ResponseConfig,
};
use crate::intake::config::ClientsConfig;
use crate::intake::confine::ConfineConfig;
use crate::intake::rewrite::RewritesConfig;
use crate::lifecycle::config::{DrainConfig, ReadinessConfig, ReloadConfig};
use crate::openai::paths::PathsConfig;
use crate::prefill::By;
use crate::remote_index::config::RemoteIndexConfig;
use crate::replica::config::ReplicasConfig;
use crate::router::{RouterSettings, Tracking};
use crate::schedule::Weights;
use crate::self_test::config::SelfTestConfig;
use crate::settings::{ConfigError, Document, Problem};
use crate::shared_cache::SharedCacheConfig;
use crate::takeover::config::TakeoverConfig;
use crate::worker::{ModelName, Worker};
use crate::xds::config::EnvoyConfig;

pub use advice::Advice;
pub use flags::Flags;
pub use health::HealthConfig;
pub use index::IndexConfig;
pub use index_trust::{IndexTrustConfig, SilenceConfig};
pub use kv_events::KvEventsLimits;
pub use learn::LearnConfig;
pub use log::{LogConfig, LogFormat, LogLevel};
pub use model::{FirstToken, ModelConfig};
pub use overload::OverloadConfig;
pub use pool::PoolConfig;
pub use predict::{ApproximateConfig, ApproximatePolicy};
pub use reload::Adopted;
pub use sessions::{Affinity, SessionsConfig};
pub use tracking::{TrackingFamily, TrackingHashConfig};

/// Everything one process is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Where Envoy reaches us.
    #[serde(default)]
    pub listen: ListenConfig,
    /// Where operators reach us.
    #[serde(default)]
    pub admin: AdminConfig,
    /// Where callers that are not Envoy reach us; none: nowhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api: Option<ApiConfig>,
    /// Which pool of workers this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolConfig>,
    /// What is served.
    pub models: Vec<ModelConfig>,
    /// The file that lists the workers, followed while we run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers_file: Option<PathBuf>,
    /// The workers, where there is no such file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<Vec<WorkerConfig>>,
    /// Names that stand for the workers, where these are not listed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dns: Vec<DnsConfig>,
    /// Pods that are the workers, where these are not listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubernetes: Option<KubernetesConfig>,
    /// The coefficients of the cost.
    #[serde(default)]
    pub schedule: Weights,
    /// What counts as load.
    #[serde(default)]
    pub load: Tracking,
    /// Under which names the load counts blocks.
    #[serde(default)]
    pub tracking_hash: TrackingHashConfig,
    /// From when on a worker has too much to do.
    #[serde(default)]
    pub overload: OverloadConfig,
    /// When a worker whose answers are errors is left alone.
    #[serde(default)]
    pub health: HealthConfig,
    /// Limits of the prefix index.
    #[serde(default)]
    pub index: IndexConfig,
    /// What is made of event sources that may be out of date.
    #[serde(default)]
    pub index_trust: IndexTrustConfig,
    /// The connections to event sources.
    #[serde(default)]
    pub kv_events: KvEventsLimits,
    /// Who waits, and in which order.
    #[serde(default)]
    pub queue: QueueConfig,
    /// What happens where prefill workers exist, or ought to.
    #[serde(default)]
    pub disaggregation: Disaggregation,
    /// Of which session a request is, and what follows from it; none: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sessions: Option<SessionsConfig>,
    /// Other replicas of us, and how they are told what this one does; none: this one is alone, or does not know of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<ReplicasConfig>,
    /// Where what is cached is copied from at the start; none: it is learned from the engines alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub takeover: Option<TakeoverConfig>,
    /// Whether those who keep no index of their own may ask ours.
    #[serde(default)]
    pub serve_index: bool,
    /// Those who are asked for what is cached where; none: it is learned from the engines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub use_remote_index: Option<RemoteIndexConfig>,
    /// What is believed of caches that say nothing.
    #[serde(default)]
    pub approximate: ApproximateConfig,
    /// A cache that all workers share, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_cache: Option<SharedCacheConfig>,
    /// Asking engines for what they know best.
    #[serde(default)]
    pub learn: LearnConfig,
    /// How engines are asked over HTTP.
    #[serde(default)]
    pub engines: EnginesConfig,
    /// Whether and how our tokens are compared with the engines'.
    #[serde(default)]
    pub self_test: SelfTestConfig,
    /// Which path is which API.
    #[serde(default)]
    pub paths: PathsConfig,
    /// What clients may say about routing.
    #[serde(default)]
    pub clients: ClientsConfig,
    /// Which requests are for the workers of one pool only.
    #[serde(default)]
    pub confine: ConfineConfig,
    /// Which requests are sent to another model than they name.
    #[serde(default)]
    pub rewrites: RewritesConfig,
    /// What we refuse.
    #[serde(default)]
    pub limits: LimitsConfig,
    /// When we call ourselves ready.
    #[serde(default)]
    pub readiness: ReadinessConfig,
    /// How we stop.
    #[serde(default)]
    pub drain: DrainConfig,
    /// How this file is followed.
    #[serde(default)]
    pub reload: ReloadConfig,
    /// How the workers file is followed.
    #[serde(default)]
    pub discovery: DiscoveryConfig,
    /// How Envoy is told who the workers are, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envoy: Option<EnvoyConfig>,
    /// What is agreed with the gateway.
    #[serde(default)]
    pub gateway: GatewayConfig,
    /// What is seen of answers.
    #[serde(default)]
    pub observe: Observe,
    /// What clients get where nothing can be chosen.
    #[serde(default)]
    pub failure: FailureConfig,
    /// What we add to answers.
    #[serde(default)]
    pub response: ResponseConfig,
    /// How much is said.
    #[serde(default)]
    pub log: LogConfig,
}

/// Where the fleet comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum WorkerSource {
    /// A file to follow.
    File(PathBuf),
    /// A fixed list.
    Fixed(Vec<Worker>),
    /// Names to ask for.
    Dns(Vec<DnsConfig>),
    /// Pods to listen for.
    Kubernetes(KubernetesConfig),
}

impl Config {
    /// Reads and checks a configuration file and the workers file it names; all mistakes of both.
    pub fn load(path: &Path) -> Result<Self, Vec<ConfigError>> {
        Self::load_with(path, &Flags::default())
    }

    /// The same with what the command line says over the file.
    pub fn load_with(path: &Path, flags: &Flags) -> Result<Self, Vec<ConfigError>> {
        let bytes = std::fs::read(path).map_err(|error| {
            vec![ConfigError::of_file(
                path,
                format!("the file cannot be read: {error}"),
            )]
        })?;
        let config = Self::parse_with(path, &bytes, flags)?;
        match &config.workers_file {
            Some(file) => config.check_workers_file(file).map(|()| config),
            None => Ok(config),
        }
    }

    /// What the command line says where there is no file.
    pub fn of_flags(flags: &Flags) -> Result<Self, Vec<ConfigError>> {
        Self::parse_with(
            Path::new("the command line"),
            flags.without_file().to_string().as_bytes(),
            flags,
        )
    }

    /// Checks the text of a configuration file; relative file names start at the folder of `path`.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, Vec<ConfigError>> {
        Self::parse_with(path, bytes, &Flags::default())
    }

    fn parse_with(path: &Path, bytes: &[u8], flags: &Flags) -> Result<Self, Vec<ConfigError>> {
        let document = Document::parse(path, bytes).map_err(|error| vec![error])?;
        let mut config: Self = document.read()?;
        // Where the working directory is gone, relative names stay relative and are reported as missing below.
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        config.resolve(absolute.parent().unwrap_or(Path::new("")));
        flags.lay_over(&mut config);
        let problems = check::problems(&config);
        if problems.is_empty() {
            Ok(config)
        } else {
            Err(document.locate(problems))
        }
    }

    /// Adds file and line to problems that were found after the file was read.
    pub fn locate(path: &Path, problems: Vec<Problem>) -> Vec<ConfigError> {
        let read = |error: std::io::Error| {
            ConfigError::of_file(path, format!("the file cannot be read: {error}"))
        };
        let document = std::fs::read(path)
            .map_err(read)
            .and_then(|bytes| Document::parse(path, &bytes));
        document.map_or_else(|error| vec![error], |document| document.locate(problems))
    }

    /// The configuration in use, every default filled in, as a file that could be loaded again.
    pub fn to_yaml(&self) -> Result<String, serde_saphyr::SerializeError> {
        let options = serde_saphyr::ser_options! { no_lang_directive: true };
        serde_saphyr::to_string_with_options(self, options)
    }

    /// What discovery needs to know of the models.
    pub fn served_models(&self) -> Vec<ServedModel> {
        let served = |model: &ModelConfig| ServedModel {
            name: model.name.clone(),
            block_size: model.blocks(),
            meets: model
                .prefill
                .as_ref()
                .is_some_and(|prefill| prefill.by == By::Mirror),
        };
        self.models.iter().map(served).collect()
    }

    /// How the router decides.
    pub fn router_settings(&self) -> RouterSettings {
        RouterSettings {
            weights: self.schedule,
            tracking: self.load,
            disaggregation: self.disaggregation,
            enforced: Arc::new(self.enforced_models()),
            overload: self.overload.thresholds(),
            when_all_overloaded: self.overload.when_all,
            health: self.health.rules(),
            trust: self.index_trust.rules(),
            most_blocks_per_tier: Some(self.index.most_blocks_per_tier),
            fallbacks: self.gateway.fallbacks as usize,
            scores: self.gateway.scores,
        }
    }

    /// Models whose prompts only prefill workers may compute: those with `prefill`, or the only one.
    fn enforced_models(&self) -> BTreeSet<ModelName> {
        let applies = |model: &&ModelConfig| model.prefill.is_some() || self.models.len() == 1;
        let models = self.models.iter().filter(|_| self.disaggregation.enforce);
        models
            .filter(applies)
            .map(|model| model.name.clone())
            .collect()
    }

    /// Where the fleet comes from.
    pub fn worker_source(&self) -> WorkerSource {
        match (&self.workers_file, &self.kubernetes) {
            (Some(file), _) => WorkerSource::File(file.clone()),
            (None, Some(kubernetes)) => WorkerSource::Kubernetes(kubernetes.clone()),
            (None, None) if !self.dns.is_empty() => WorkerSource::Dns(self.dns.clone()),
            // A loaded configuration has passed the same resolution, so nothing is lost here.
            (None, None) => WorkerSource::Fixed(self.fixed_workers().unwrap_or_default()),
        }
    }

    fn fixed_workers(&self) -> Result<Vec<Worker>, Vec<Problem>> {
        discovery::resolve(
            self.workers.as_deref().unwrap_or_default(),
            &self.served_models(),
        )
    }

    /// Workers as they would be found where they are not listed, one of each kind.
    pub fn typical_workers(&self) -> Vec<Worker> {
        let pods = self
            .kubernetes
            .iter()
            .flat_map(|kubernetes| kubernetes.pools.iter().map(PodsConfig::sample));
        let samples = self.dns.iter().map(DnsConfig::sample).chain(pods);
        // One by one, because all samples have the same address.
        samples
            .flat_map(|sample| discovery::resolve_each(vec![sample], &self.served_models()).0)
            .collect()
    }

    fn resolve(&mut self, folder: &Path) {
        for model in &mut self.models {
            model.resolve(folder);
        }
        if let Some(file) = &mut self.workers_file {
            *file = folder.join(&*file);
        }
        if let Some(envoy) = &mut self.envoy {
            envoy.resolve(folder);
        }
        if let Some(file) = self
            .kubernetes
            .as_mut()
            .and_then(|kubernetes| kubernetes.kubeconfig.as_mut())
        {
            *file = folder.join(&*file);
        }
        if let Some(replicas) = &mut self.replicas {
            replicas.resolve(folder);
        }
        if let Some(takeover) = &mut self.takeover {
            takeover.resolve(folder);
        }
        if let Some(remote) = &mut self.use_remote_index {
            remote.resolve(folder);
        }
        self.listen.resolve(folder);
        self.admin.resolve(folder);
        self.engines.resolve(folder);
        if let Some(tls) = self.api.as_mut().and_then(|api| api.tls.as_mut()) {
            tls.resolve(folder);
        }
        self.tracking_hash.resolve(folder);
        let served = self.served_models();
        for worker in self.workers.iter_mut().flatten() {
            worker.fill(&served);
        }
    }

    fn check_workers_file(&self, file: &Path) -> Result<(), Vec<ConfigError>> {
        let bytes = std::fs::read(file).map_err(|error| {
            vec![ConfigError::of_file(
                file,
                format!("the workers file cannot be read: {error}"),
            )]
        })?;
        discovery::parse(file, &bytes, &self.served_models()).map(drop)
    }
}
