//! Derives the settings of an engine from its responses.

use std::collections::{BTreeMap, BTreeSet};

use warmroute_core::engine_settings::EngineSettings;
use warmroute_core::worker::{EventSource, ModelName, SocketAttach, WorkerEndpoint};
use warmroute_engines::engine_client::{
    CacheConfig, EngineError, EngineModel, RankEventSource, cache_settings,
};
use warmroute_tokens::openai::MAX_MODEL_NAME_BYTES;

use crate::fleet::discovery::zmq::ZmqEndpoint;

/// Responses of an engine's endpoints, or their errors.
pub(super) struct EngineResponses {
    pub(super) caches: Result<Vec<CacheConfig>, EngineError>,
    pub(super) sources: Result<Vec<RankEventSource>, EngineError>,
    pub(super) models: Result<ListedModels, EngineError>,
}

/// Maximum number of adapters of one engine.
const MAX_ADAPTERS: usize = 4096;

/// Models that an engine lists. The default is an engine without a list.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ListedModels {
    /// The base model with the name of the worker's model, or else the first base model.
    base: Option<EngineModel>,
    /// Whether the list contains the name of the worker's model.
    has_model: bool,
    /// Names of the adapters; `None` without a list.
    adapters: Option<BTreeSet<String>>,
}

impl ListedModels {
    /// Reads the list of an engine that serves this model.
    pub(super) fn new(models: Vec<EngineModel>, name: &ModelName) -> Self {
        let adapters = models
            .iter()
            .filter(|model| model.parent.is_some() && model.id.len() <= MAX_MODEL_NAME_BYTES)
            .map(|model| model.id.clone());
        Self {
            adapters: Some(adapters.take(MAX_ADAPTERS).collect()),
            has_model: models.iter().any(|model| model.id == name.as_str()),
            base: base_model(models, name),
        }
    }

    /// Returns whether the engine has listed its model before and does not list it any more.
    /// Updates `has_listed`, which is initially false.
    pub(super) fn lost_model(&self, has_listed: &mut bool) -> bool {
        *has_listed |= self.has_model;
        *has_listed && self.adapters.is_some() && !self.has_model
    }
}

impl EngineResponses {
    /// Returns whether a failed response may succeed soon: the engine is starting or overloaded.
    pub(super) fn is_retryable(&self) -> bool {
        let errors = [
            self.caches.as_ref().err(),
            self.sources.as_ref().err(),
            self.models.as_ref().err(),
        ];
        errors.into_iter().flatten().any(EngineError::is_transient)
    }

    /// Returns the settings according to the responses. If an endpoint failed, its previous
    /// settings are kept.
    pub(super) fn merge(
        self,
        endpoint: WorkerEndpoint,
        before: Option<&EngineSettings>,
    ) -> EngineSettings {
        let before = before.cloned().unwrap_or_default();
        let now = parse_engine_settings(
            endpoint,
            self.caches.as_deref().unwrap_or_default(),
            self.sources.as_deref().unwrap_or_default(),
        );
        let cached = if self.caches.is_ok() { &now } else { &before };
        let event_sources = if self.sources.is_ok() {
            now.event_sources.clone()
        } else {
            before.event_sources.clone()
        };
        let (root, max_model_len, adapters) = match self.models {
            Ok(ListedModels { base, adapters, .. }) => {
                let (root, max_model_len) =
                    base.map_or((None, None), |model| (model.root, model.max_model_len));
                (root, max_model_len, adapters)
            }
            Err(_) => (
                before.root.clone(),
                before.max_model_len,
                before.adapters.clone(),
            ),
        };
        EngineSettings {
            block_size: cached.block_size,
            total_kv_blocks: cached.total_kv_blocks,
            ranks: cached.ranks,
            event_sources,
            root,
            max_model_len,
            adapters,
        }
    }
}

/// Derives the settings from the cache configurations and event sources of an engine.
pub fn parse_engine_settings(
    endpoint: WorkerEndpoint,
    caches: &[CacheConfig],
    sources: &[RankEventSource],
) -> EngineSettings {
    let published = sources.iter().filter(|source| source.enabled);
    let event_sources: BTreeMap<u32, EventSource> = published
        .filter_map(|source| Some((source.rank, event_source_of_rank(endpoint, source)?)))
        .collect();
    EngineSettings {
        event_sources,
        ..cache_settings(caches)
    }
}

/// Returns the base model with this name, or else the first base model.
fn base_model(models: Vec<EngineModel>, name: &ModelName) -> Option<EngineModel> {
    let mut base_models = models.into_iter().filter(|model| model.parent.is_none());
    let first = base_models.next()?;
    if first.id == name.as_str() {
        Some(first)
    } else {
        base_models
            .find(|model| model.id == name.as_str())
            .or(Some(first))
    }
}

/// Returns the event source of a rank, or `None` if this process cannot connect to it. vLLM binds
/// only if the endpoint is a wildcard or a path. Otherwise it connects to a subscriber, which is
/// not this process unless configured.
fn event_source_of_rank(worker: WorkerEndpoint, source: &RankEventSource) -> Option<EventSource> {
    let binds = ["*", "::"]
        .iter()
        .any(|mark| source.endpoint.contains(mark))
        || source.endpoint.starts_with("ipc:");
    if !binds {
        return None;
    }
    let replay = source
        .replay_endpoint
        .as_deref()
        .and_then(|replay| reachable_endpoint(worker, replay));
    let endpoint = reachable_endpoint(worker, &source.endpoint)?;
    Some(EventSource {
        endpoint,
        topic: source.topic.clone(),
        attach: SocketAttach::Connect,
        replay,
    })
}

/// Returns an endpoint as this process reaches it: with the worker's address as host. Returns
/// `None` for an endpoint at another host.
fn reachable_endpoint(worker: WorkerEndpoint, endpoint: &str) -> Option<String> {
    let endpoint: ZmqEndpoint = endpoint.parse().ok()?;
    let ZmqEndpoint::Tcp { host, port } = &endpoint else {
        // A path can only be used on the same machine.
        return worker.0.ip().is_loopback().then(|| endpoint.to_string());
    };
    let own = worker.0.ip();
    let address = host.parse::<std::net::IpAddr>();
    let is_local = host == "localhost" || address.is_ok_and(|ip| ip.is_loopback() || ip == own);
    let reachable = ZmqEndpoint::Tcp {
        host: own.to_string(),
        port: *port,
    };
    (*port != 0 && (endpoint.is_wildcard() || is_local)).then(|| reachable.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmroute_core::worker::BlockSize;
    use warmroute_engines::engine_client::MetricsPage;

    #[test]
    fn engine_host_is_replaced_by_worker_address() {
        let worker: WorkerEndpoint = "10.0.0.7:8000".parse().unwrap();
        let cases = [
            ("tcp://*:5557", Some("tcp://10.0.0.7:5557")),
            ("tcp://0.0.0.0:5557", Some("tcp://10.0.0.7:5557")),
            ("tcp://[::]:5557", Some("tcp://10.0.0.7:5557")),
            ("tcp://127.0.0.1:5557", Some("tcp://10.0.0.7:5557")),
            ("tcp://localhost:5557", Some("tcp://10.0.0.7:5557")),
            ("tcp://10.0.0.7:5557", Some("tcp://10.0.0.7:5557")),
            ("tcp://10.0.0.9:5557", None),
            ("tcp://*:0", None),
            ("ipc:///run/events", None),
            ("nonsense", None),
        ];
        for (given, expected) in cases {
            assert_eq!(
                reachable_endpoint(worker, given).as_deref(),
                expected,
                "{given}"
            );
        }
        let local: WorkerEndpoint = "127.0.0.1:8000".parse().unwrap();
        assert_eq!(
            reachable_endpoint(local, "ipc:///run/events").as_deref(),
            Some("ipc:///run/events")
        );
    }

    fn event_source(endpoint: &str) -> RankEventSource {
        RankEventSource {
            rank: 0,
            enabled: true,
            endpoint: endpoint.to_owned(),
            replay_endpoint: None,
            topic: String::new(),
        }
    }

    fn complete_responses() -> EngineResponses {
        let cache = CacheConfig {
            engine: "0".to_owned(),
            block_size: Some(16),
            num_gpu_blocks: Some(90),
            size_tokens: None,
            prefix_caching: None,
            hash_algorithm: None,
        };
        let model = EngineModel {
            id: "m".to_owned(),
            root: Some("org/m".to_owned()),
            parent: None,
            max_model_len: Some(4096),
        };
        let adapter = EngineModel {
            id: "a".to_owned(),
            root: None,
            parent: Some("m".to_owned()),
            max_model_len: None,
        };
        EngineResponses {
            caches: Ok(vec![cache]),
            sources: Ok(vec![event_source("tcp://*:5557")]),
            models: Ok(ListedModels::new(vec![model, adapter], &"m".into())),
        }
    }

    #[test]
    fn failed_response_keeps_previous_settings() {
        let worker: WorkerEndpoint = "10.0.0.7:8000".parse().unwrap();
        let timeout = || EngineError::Timeout;
        let complete = complete_responses();
        assert!(!complete.is_retryable());
        let first = complete.merge(worker, None);
        assert_eq!(
            (first.total_kv_blocks, first.event_sources.len()),
            (Some(90), 1)
        );
        assert_eq!(
            (first.root.as_deref(), first.max_model_len),
            (Some("org/m"), Some(4096))
        );
        assert_eq!(first.adapters, Some(["a".to_owned()].into()));
        for sources in [Err(timeout()), Ok(vec![event_source("tcp://*:5557")])] {
            let partial = EngineResponses {
                caches: Err(timeout()),
                sources,
                models: Err(timeout()),
            };
            assert!(partial.is_retryable());
            assert_eq!(partial.merge(worker, Some(&first)), first);
        }
        // The endpoint no longer exists, so the engine is not queried again soon.
        let no_events = EngineResponses {
            caches: Err(EngineError::Unreadable("")),
            sources: Ok(Vec::new()),
            models: Ok(ListedModels::default()),
        };
        assert!(!no_events.is_retryable());
        let no_events = no_events.merge(worker, Some(&first));
        assert_eq!(
            (no_events.total_kv_blocks, no_events.event_sources.len()),
            (Some(90), 0)
        );
        assert_eq!((no_events.root, no_events.adapters), (None, None));
        // The engine connects, so it is not a source to connect to.
        assert!(
            parse_engine_settings(worker, &[], &[event_source("tcp://127.0.0.1:5557")]).is_empty()
        );
    }

    #[test]
    fn adapter_is_not_the_base_model() {
        let model = |id: &str, parent: Option<&str>| EngineModel {
            id: id.to_owned(),
            root: Some(format!("root of {id}")),
            parent: parent.map(str::to_owned),
            max_model_len: None,
        };
        let served = || {
            vec![
                model("m-lora", Some("m")),
                model("alias", None),
                model("m", None),
            ]
        };
        for (name, expected) in [
            ("m", "m"),
            ("alias", "alias"),
            ("other", "alias"),
            ("m-lora", "alias"),
        ] {
            assert_eq!(
                base_model(served(), &name.into()).unwrap().id,
                expected,
                "{name}"
            );
        }
        assert_eq!(base_model(Vec::new(), &"m".into()), None);
        let listed = ListedModels::new(served(), &"m".into());
        assert!(listed.has_model);
        assert_eq!(listed.adapters, Some(["m-lora".to_owned()].into()));
    }

    #[test]
    fn model_is_lost_only_after_it_was_listed() {
        let listed = |id: &str| {
            let model = EngineModel {
                id: id.to_owned(),
                root: None,
                parent: None,
                max_model_len: None,
            };
            ListedModels::new(vec![model], &"m".into())
        };
        let steps = [
            (listed("other"), false),
            (listed("m"), false),
            (ListedModels::default(), false),
            (listed("other"), true),
            (listed("m"), false),
        ];
        let mut has_listed = false;
        for (at, (models, is_lost)) in steps.into_iter().enumerate() {
            assert_eq!(models.lost_model(&mut has_listed), is_lost, "{at}");
        }
    }

    #[test]
    fn responses_become_settings_if_ranks_agree() {
        let cache = |engine: &str, size, blocks| CacheConfig {
            engine: engine.to_owned(),
            block_size: Some(size),
            num_gpu_blocks: Some(blocks),
            size_tokens: None,
            prefix_caching: None,
            hash_algorithm: None,
        };
        let events = |rank, enabled| RankEventSource {
            rank,
            enabled,
            endpoint: format!("tcp://*:{}", 5557 + rank),
            replay_endpoint: None,
            topic: String::new(),
        };
        let worker: WorkerEndpoint = "10.0.0.7:8000".parse().unwrap();
        let caches = [cache("1", 16, 100), cache("0", 16, 90)];
        let found = parse_engine_settings(worker, &caches, &[events(0, true), events(1, false)]);
        assert_eq!(
            (found.block_size, found.total_kv_blocks),
            (BlockSize::new(16), Some(90))
        );
        assert_eq!(
            found.ranks.map(|ranks| (ranks.start, ranks.size.get())),
            Some((0, 2))
        );
        assert_eq!(found.event_sources.keys().collect::<Vec<_>>(), [&0]);
        // Each metric line of vLLM has the blocks of all ranks and the tokens of one rank.
        let sum = [cache("0", 32, 6000), cache("1", 32, 6000)];
        assert_eq!(
            parse_engine_settings(worker, &sum, &[]).total_kv_blocks,
            Some(3000)
        );
        let exact = sum.clone().map(|cache| CacheConfig {
            size_tokens: Some(64_000),
            ..cache
        });
        assert_eq!(
            parse_engine_settings(worker, &exact, &[]).total_kv_blocks,
            Some(2000)
        );
        assert_eq!(
            parse_engine_settings(worker, &exact[..1], &[]).total_kv_blocks,
            Some(6000),
            "a page of one rank"
        );
        let page = MetricsPage::parse(include_str!(
            "../../../../../tests/data/engines/metrics-vllm-dp2.txt"
        ));
        assert_eq!(
            parse_engine_settings(worker, &page.caches(), &[]).total_kv_blocks,
            Some(256),
            "a captured page"
        );
        let inconsistent =
            parse_engine_settings(worker, &[cache("0", 16, 1), cache("2", 32, 1)], &[]);
        assert_eq!((inconsistent.block_size, inconsistent.ranks), (None, None));
        assert!(parse_engine_settings(worker, &[], &[]).is_empty());
    }
}
