//! The configuration file. Each section is defined in the module of the code that it configures.
//! This module combines the sections, fills in defaults and checks sections against each other. An
//! invalid file is rejected; all errors are reported at once, each with its line and fix.

mod advice;
mod canary_headers;
mod check;
mod engines;
mod flags;
mod index;
mod model;
mod policy;
mod predict;
mod process;
mod reload;
mod routing;
mod tracking;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use warmroute_core::policy::{DisaggregationConfig, PolicySettings};
use warmroute_core::router::RouterSettings;
use warmroute_core::worker::{ModelName, Worker};
use warmroute_settings::{
    ConfigError, MAX_SETTINGS_FILE, Problem, SettingsDocument, all_within, escape_references,
    header_name_problems, read_regular_file, settings_schema,
};
use warmroute_tokens::openai::paths::{ApiPaths, ApiPathsConfig, suffix_problems};

use crate::admin::config::AdminConfig;
use crate::api::ApiConfig;
use crate::cluster::replica::config::ReplicasConfig;
use crate::dispatch::queue::config::QueueConfig;
use crate::ext_proc::config::{GatewayConfig, LimitsConfig, ListenConfig, ListenerLimitsConfig};
use crate::fleet::discovery::config::WorkerConfig;
use crate::fleet::discovery::dns::DnsConfig;
use crate::fleet::discovery::kubernetes::{KubernetesConfig, PodsConfig};
use crate::fleet::discovery::{self, WorkerModel};
use crate::fleet::xds::config::EnvoyConfig;
use crate::prefill::PrefillMode;
use crate::request::SessionsConfig;
use crate::request::config::ClientsConfig;

pub use advice::Advice;
pub use canary_headers::CanaryHeaders;
pub use engines::{EngineDiscoveryConfig, EngineLoadConfig, EnginesSection, KvEventsLimits};
pub use flags::ServeFlags;
pub use index::{FreshnessConfig, IndexSection, SilenceConfig};
pub use model::{FirstToken, ModelConfig};
pub use predict::{ApproximateConfig, ApproximatePolicy};
pub use process::{LogConfig, LogFormat, LogLevel, PoolConfig, ProcessSection};
pub use reload::ReloadedConfig;
pub use routing::{OverloadConfig, RoutingSection};
pub use tracking::{TrackingFamily, TrackingHashConfig};

/// Name that errors show for a configuration without a file.
pub const COMMAND_LINE: &str = "the command line";

/// Configuration of one process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Servers of this process.
    #[serde(default)]
    pub listeners: ListenersSection,
    /// Served models.
    pub models: Vec<ModelConfig>,
    /// Sources of the fleet.
    #[serde(default)]
    pub workers: WorkersSection,
    /// Communication with the engines.
    #[serde(default)]
    pub engines: EnginesSection,
    /// Index of the workers' caches.
    #[serde(default)]
    pub index: IndexSection,
    /// Selection of the worker for a request.
    #[serde(default)]
    pub routing: RoutingSection,
    /// Queue of the requests that wait for capacity.
    #[serde(default)]
    pub queue: QueueConfig,
    /// Session affinity. `None`: requests have no sessions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sessions: Option<SessionsConfig>,
    /// Other replicas of this router. `None`: there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<ReplicasConfig>,
    /// Interpretation and limits of requests.
    #[serde(default)]
    pub requests: RequestsSection,
    /// Contract with the gateway.
    #[serde(default)]
    pub gateway: GatewayConfig,
    /// Publication of endpoints to Envoy. `None`: no endpoints are published.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envoy: Option<EnvoyConfig>,
    /// Readiness, shutdown, reload and log of the process.
    #[serde(default)]
    pub process: ProcessSection,
}

/// The `listeners:` section.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ListenersSection {
    /// ext_proc gRPC server.
    pub ext_proc: ListenConfig,
    /// HTTP server of the metrics, health and status pages.
    pub admin: AdminConfig,
    /// gRPC server of the router API for callers other than Envoy. `None`: no such server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api: Option<ApiConfig>,
    /// Limits of each listener.
    pub limits: ListenerLimitsConfig,
}

/// The `workers:` section. Exactly one source of workers is configured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct WorkersSection {
    /// File that lists the workers. It is reloaded when it changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// Fixed list of workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub list: Option<Vec<WorkerConfig>>,
    /// DNS names whose addresses are the workers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub dns: Vec<DnsConfig>,
    /// Pods that are the workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubernetes: Option<KubernetesConfig>,
}

/// The `requests:` section.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RequestsSection {
    /// APIs by the end of the path, which extend or override the defaults. Null: requests are
    /// handled like those of an unknown path.
    pub paths: ApiPathsConfig,
    /// Headers that carry the original path, for gateways that rewrite paths. They are read in this
    /// order if the path itself is unknown. Empty by default, because clients can set headers too.
    pub path_headers: Vec<String>,
    /// Routing hints that clients may give.
    pub clients: ClientsConfig,
    /// Limits of request processing.
    pub limits: LimitsConfig,
}

impl RequestsSection {
    /// Returns the mapping of request paths to APIs.
    pub fn api_paths(&self) -> ApiPaths {
        ApiPaths::new(&self.paths, &self.path_headers)
    }

    /// Returns the invalid path suffixes and header names.
    pub fn path_problems(&self) -> Vec<Problem> {
        let suffixes = all_within("paths", suffix_problems(&self.paths));
        let headers = header_name_problems("path_headers", &self.path_headers, "x-original-path");
        suffixes.chain(headers).collect()
    }
}

/// Source of the fleet.
#[derive(Clone, Debug, PartialEq)]
pub enum WorkerSource {
    /// A workers file that is watched.
    File(PathBuf),
    /// A fixed list.
    Fixed(Vec<Worker>),
    /// DNS names that are resolved.
    Dns(Vec<DnsConfig>),
    /// Pods that are watched.
    Kubernetes(KubernetesConfig),
}

impl Config {
    /// Reads and checks a configuration file and its workers file. Returns the errors of both.
    pub fn load(path: &Path) -> Result<Self, Vec<ConfigError>> {
        Self::load_with(path, &ServeFlags::default())
    }

    /// Like [`Self::load`], with command-line flags that override the file.
    pub fn load_with(path: &Path, flags: &ServeFlags) -> Result<Self, Vec<ConfigError>> {
        Self::parse_all(path, &Self::read_file(path)?, flags)
    }

    /// Reads a configuration file.
    pub fn read_file(path: &Path) -> Result<Vec<u8>, Vec<ConfigError>> {
        read_regular_file(path, MAX_SETTINGS_FILE).map_err(|error| {
            let text = format!("the file cannot be read: {error}");
            vec![ConfigError::of_file(path, text)]
        })
    }

    /// Parses and checks the text of a configuration file and its workers file.
    pub fn parse_all(
        path: &Path,
        bytes: &[u8],
        flags: &ServeFlags,
    ) -> Result<Self, Vec<ConfigError>> {
        let config = Self::parse_with(path, bytes, flags)?;
        match &config.workers.file {
            Some(file) => config.check_workers_file(file).map(|()| config),
            None => Ok(config),
        }
    }

    /// Builds a configuration from flags alone, without a file.
    pub fn of_flags(flags: &ServeFlags) -> Result<Self, Vec<ConfigError>> {
        Self::parse_with(Path::new(COMMAND_LINE), &flags.default_document(), flags)
    }

    /// Parses and checks the text of a configuration file. Relative paths are resolved against the
    /// directory of `path`.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, Vec<ConfigError>> {
        Self::parse_with(path, bytes, &ServeFlags::default())
    }

    fn parse_with(path: &Path, bytes: &[u8], flags: &ServeFlags) -> Result<Self, Vec<ConfigError>> {
        let document = SettingsDocument::parse(path, bytes)?;
        let mut config: Self = document.read()?;
        let served = config.served_models();
        for worker in config.workers.list.iter_mut().flatten() {
            worker.fill_defaults(&served);
        }
        flags.override_config(&mut config);
        // Reloads and status pages write the configuration as JSON.
        if serde_json::to_value(&config).is_err() {
            let problem = "a path on the command line is not valid UTF-8; relative paths begin in \
                the working directory, so rename that directory, or write absolute paths";
            return Err(vec![ConfigError::of_file(path, problem)]);
        }
        let mut problems = check::problems(&config);
        model::add_download_hints(&mut problems, &config.models, &document.directory());
        if problems.is_empty() {
            Ok(config)
        } else {
            Err(document.locate(problems))
        }
    }

    /// Adds file and line to problems that were found in a loaded configuration.
    pub fn locate(path: &Path, bytes: &[u8], problems: Vec<Problem>) -> Vec<ConfigError> {
        SettingsDocument::parse(path, bytes)
            .map_or_else(|errors| errors, |document| document.locate(problems))
    }

    /// Returns the resolved configuration with all defaults, as YAML that can be loaded again.
    pub fn to_yaml(&self) -> anyhow::Result<String> {
        let options = serde_saphyr::ser_options! { no_lang_directive: true };
        let mut value = serde_json::to_value(self)?;
        escape_texts(&mut value);
        Ok(serde_saphyr::to_string_with_options(&value, options)?)
    }

    /// Returns the properties of the models that discovery uses.
    pub fn served_models(&self) -> Vec<WorkerModel> {
        let served = |model: &ModelConfig| WorkerModel {
            name: model.name.clone(),
            block_size: model.blocks(),
            uses_bootstrap: model
                .prefill
                .as_ref()
                .is_some_and(|prefill| prefill.mode == PrefillMode::Mirror),
        };
        self.models.iter().map(served).collect()
    }

    /// Returns the settings of the router.
    pub fn router_settings(&self) -> RouterSettings {
        RouterSettings {
            policy: self.routing.policy_settings(&self.routing.default_policy()),
            model_policies: Arc::new(self.model_policies()),
            tracking: self.routing.load,
            disaggregation: self.disaggregation(),
            prefill_required_models: Arc::new(self.enforced_models()),
            overload: self.routing.overload.thresholds(),
            when_all_overloaded: self.routing.overload.when_all,
            health: self.routing.outlier_detection,
            freshness: self.index.freshness.rules(),
            max_blocks_per_tier: Some(self.index.max_blocks_per_tier),
            max_fallbacks: self.gateway.fallback_endpoints as usize,
            reports_scores: self.gateway.candidate_scores,
        }
    }

    /// Returns whether front ends of Dynamo carry out the prefills. They reject a request that names
    /// a decode worker alone if its model has prefill workers.
    pub fn has_dynamo_prefills(&self) -> bool {
        let is_by_header = |model: &ModelConfig| {
            model
                .prefill
                .as_ref()
                .is_none_or(|prefill| prefill.mode == PrefillMode::Header)
        };
        self.gateway.is_dynamo() && self.models.iter().all(is_by_header)
    }

    /// Returns the settings of disaggregation. With front ends of Dynamo, no decode worker computes
    /// prompts.
    pub fn disaggregation(&self) -> DisaggregationConfig {
        let configured = self.routing.disaggregation;
        DisaggregationConfig {
            enforce: configured.enforce || self.has_dynamo_prefills(),
            ..configured
        }
    }

    /// Returns the policies of the models that configure one.
    fn model_policies(&self) -> BTreeMap<ModelName, PolicySettings> {
        let models = self.models.iter();
        models
            .filter_map(|model| {
                let settings = self.routing.policy_settings(&model.policy?);
                Some((model.name.clone(), settings))
            })
            .collect()
    }

    /// Returns the models whose prompts only prefill workers may compute: with
    /// `routing.disaggregation.enforce`, the models with `prefill`, and the model if there is only
    /// one.
    fn enforced_models(&self) -> BTreeSet<ModelName> {
        let applies = |model: &&ModelConfig| model.prefill.is_some() || self.models.len() == 1;
        let models = self
            .models
            .iter()
            .filter(|_| self.routing.disaggregation.enforce);
        models
            .filter(applies)
            .map(|model| model.name.clone())
            .collect()
    }

    /// Returns the source of the fleet.
    pub fn worker_source(&self) -> WorkerSource {
        match (&self.workers.file, &self.workers.kubernetes) {
            (Some(file), _) => WorkerSource::File(file.clone()),
            (None, Some(kubernetes)) => WorkerSource::Kubernetes(kubernetes.clone()),
            (None, None) if !self.workers.dns.is_empty() => {
                WorkerSource::Dns(self.workers.dns.clone())
            }
            // The same workers were resolved when the configuration was checked, so this cannot
            // fail.
            (None, None) => WorkerSource::Fixed(self.fixed_workers().unwrap_or_default()),
        }
    }

    fn fixed_workers(&self) -> Result<Vec<Worker>, Vec<Problem>> {
        discovery::resolve(
            self.workers.list.as_deref().unwrap_or_default(),
            &self.served_models(),
        )
    }

    /// Returns one sample worker for each entry of the DNS and Kubernetes sources.
    pub fn typical_workers(&self) -> Vec<Worker> {
        let pods = self
            .workers
            .kubernetes
            .iter()
            .flat_map(|kubernetes| kubernetes.pools.iter().map(PodsConfig::sample_worker));
        let samples = self
            .workers
            .dns
            .iter()
            .map(DnsConfig::sample_worker)
            .chain(pods);
        // Resolved one by one, because all samples have the same address.
        samples
            .flat_map(|sample| discovery::resolve_each(vec![sample], &self.served_models()).0)
            .collect()
    }

    fn check_workers_file(&self, file: &Path) -> Result<(), Vec<ConfigError>> {
        let bytes = read_regular_file(file, MAX_SETTINGS_FILE).map_err(|error| {
            let text = format!("the workers file cannot be read: {error}");
            vec![ConfigError::of_file(file, text)]
        })?;
        discovery::parse(file, &bytes, &self.served_models()).map(drop)
    }
}

/// Escapes the texts of a resolved configuration, whose variables are already replaced.
fn escape_texts(value: &mut Value) {
    match value {
        Value::String(text) => *text = escape_references(text),
        Value::Array(items) => items.iter_mut().for_each(escape_texts),
        Value::Object(entries) => entries.values_mut().for_each(escape_texts),
        _ => {}
    }
}

/// Returns the JSON Schema of the configuration file.
pub fn config_schema() -> String {
    settings_schema::<Config>("Configuration of warmroute")
}

/// Returns the JSON Schema of the workers file.
pub fn workers_schema() -> String {
    settings_schema::<Vec<WorkerConfig>>("Workers of warmroute")
}
