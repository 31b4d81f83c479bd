//! Settings that engines report, compared with the configuration. Missing settings are filled in.
//! If both exist and differ, the configured value wins, because it was set on purpose, and the
//! mismatch is reported with both values. Only the engine's block size overrides the configured
//! one: events are converted to the index's block size on arrival.
//!
//! Decision 0037.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::worker::{BlockSize, EventSource, RankRange, Worker};

/// Settings that an engine reports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EngineSettings {
    /// Tokens per block.
    pub block_size: Option<BlockSize>,
    /// Minimum number of KV blocks per rank, in the engine's block size.
    pub total_kv_blocks: Option<u64>,
    /// Data-parallel ranks.
    pub ranks: Option<RankRange>,
    /// Event sources by rank.
    pub event_sources: BTreeMap<u32, EventSource>,
    /// Model path or repository that the engine was started with (`vllm serve MODEL`).
    pub root: Option<String>,
    /// Maximum context length in tokens.
    pub max_model_len: Option<u64>,
    /// LoRA adapters in its list of models; `None` if it has no list.
    pub adapters: Option<BTreeSet<String>>,
}

/// Configured settings of a model that engines also report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfiguredSettings {
    /// Tokens per block.
    pub block_size: Option<BlockSize>,
    /// `multimodal.model`.
    pub media_model: Option<String>,
}

/// Settings on which all reporting engines of a model agree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommonSettings {
    /// Model path or repository.
    pub root: Option<String>,
    /// True if the engines report different roots.
    pub roots_differ: bool,
    /// Maximum context length in tokens.
    pub max_model_len: Option<u64>,
}

impl CommonSettings {
    /// Computes the common settings.
    pub fn common_to<'l>(all: impl Iterator<Item = &'l EngineSettings> + Clone) -> Self {
        fn common_value<T: PartialEq>(mut values: impl Iterator<Item = T>) -> Option<T> {
            let first = values.next()?;
            values.all(|other| other == first).then_some(first)
        }
        let mut roots = all.clone().filter_map(|reported| reported.root.as_ref());
        let root = common_value(roots.clone()).cloned();
        Self {
            roots_differ: root.is_none() && roots.next().is_some(),
            root,
            max_model_len: common_value(all.filter_map(|reported| reported.max_model_len)),
        }
    }
}

/// Configuration keys that are compared with the engine.
pub const COMPARED_SETTINGS: [&str; 8] = [
    "adapters",
    "block_size",
    "data_parallel",
    "kv_events.endpoint",
    "kv_events.replay",
    "kv_events.topic",
    "multimodal.model",
    "total_kv_blocks",
];

/// A configured setting that differs from the engine's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct SettingMismatch {
    /// Configuration key.
    pub setting: &'static str,
    /// Configured value.
    pub configured: String,
    /// Value that the engine reports.
    pub engine: String,
}

impl SettingMismatch {
    fn of(setting: &'static str, configured: &impl ToString, engine: &impl ToString) -> Self {
        Self {
            setting,
            configured: configured.to_string(),
            engine: engine.to_string(),
        }
    }
}

impl EngineSettings {
    /// Returns true if the engine reported nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Fills in missing settings of a worker and returns the mismatches. A worker has the adapters
    /// of its configuration, because some engines do not list theirs, and those of its list.
    pub fn fill_missing(
        &self,
        worker: &mut Worker,
        settings: &ConfiguredSettings,
    ) -> Vec<SettingMismatch> {
        let mut found = Vec::new();
        if let (Some(configured), Some(engine)) = (&settings.media_model, &self.root)
            && configured != engine
        {
            found.push(SettingMismatch::of("multimodal.model", configured, engine));
        }
        if let (Some(configured), Some(engine)) = (settings.block_size, self.block_size)
            && configured != engine
        {
            found.push(SettingMismatch::of("block_size", &configured.0, &engine.0));
        }
        if let Some(listed) = &self.adapters {
            if !worker.adapters.is_subset(listed) {
                let [configured, engine] = [&worker.adapters, listed].map(format_names);
                found.push(SettingMismatch::of("adapters", &configured, &engine));
            }
            worker.adapters.extend(listed.iter().cloned());
        }
        match (
            worker.capacity.total_kv_blocks,
            self.capacity_in_blocks(worker.block_size),
        ) {
            (None, reported) => worker.capacity.total_kv_blocks = reported,
            (Some(configured), Some(engine)) if configured != engine => {
                found.push(SettingMismatch::of("total_kv_blocks", &configured, &engine));
            }
            _ => {}
        }
        if let Some(engine) = self.ranks.filter(|engine| *engine != worker.ranks) {
            // Event sources are configured per rank, so the ranks cannot change alone.
            if worker.ranks == RankRange::ONE && worker.event_sources.is_empty() {
                worker.ranks = engine;
            } else {
                found.push(SettingMismatch::of(
                    "data_parallel",
                    &format_ranks(worker.ranks),
                    &format_ranks(engine),
                ));
            }
        }
        found.extend(self.fill_event_sources(worker));
        found
    }

    /// Returns the capacity in blocks of the given size.
    pub fn capacity_in_blocks(&self, size: BlockSize) -> Option<u64> {
        let own = self.block_size.unwrap_or(size);
        Some(self.total_kv_blocks?.saturating_mul(own.tokens() as u64) / size.tokens() as u64)
    }

    fn fill_event_sources(&self, worker: &mut Worker) -> Vec<SettingMismatch> {
        let of_rank: Vec<Option<&EventSource>> = worker
            .ranks
            .iter()
            .map(|rank| self.event_sources.get(&rank.0))
            .collect();
        if worker.event_sources.is_empty() {
            // All or none: sources are matched to ranks by position.
            if let Some(all) = of_rank
                .into_iter()
                .map(Option::<&EventSource>::cloned)
                .collect::<Option<Vec<_>>>()
            {
                worker.event_sources = all;
            }
            return Vec::new();
        }
        let mut found = Vec::new();
        for (configured, reported) in worker.event_sources.iter_mut().zip(of_rank) {
            let Some(reported) = reported else { continue };
            if endpoint_port(&configured.endpoint) != endpoint_port(&reported.endpoint) {
                found.push(SettingMismatch::of(
                    "kv_events.endpoint",
                    &configured.endpoint,
                    &reported.endpoint,
                ));
                // The configured publisher is not the reported one, so its replay endpoint does not
                // apply.
                continue;
            }
            if !reported.topic.starts_with(&configured.topic) {
                found.push(SettingMismatch::of(
                    "kv_events.topic",
                    &configured.topic,
                    &reported.topic,
                ));
            }
            match (&configured.replay, &reported.replay) {
                (None, Some(_)) => configured.replay = reported.replay.clone(),
                (Some(ours), Some(engines)) if endpoint_port(ours) != endpoint_port(engines) => {
                    found.push(SettingMismatch::of("kv_events.replay", ours, engines));
                }
                _ => {}
            }
        }
        found.sort();
        found
    }
}

/// Returns the part of an endpoint that is compared: the port of a TCP endpoint. Hosts have several
/// names.
fn endpoint_port(endpoint: &str) -> &str {
    match endpoint.strip_prefix("tcp://") {
        Some(address) => address.rsplit_once(':').map_or(address, |(_, port)| port),
        None => endpoint,
    }
}

fn format_names(names: &BTreeSet<String>) -> String {
    names
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join(", ")
}

fn format_ranks(ranks: RankRange) -> String {
    format!("{} from {}", ranks.size, ranks.start)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::worker::{SocketAttach, WorkerId};

    fn source(port: u16, replay: Option<u16>) -> EventSource {
        EventSource {
            endpoint: format!("tcp://10.0.0.1:{port}"),
            topic: "kv".to_owned(),
            attach: SocketAttach::Connect,
            replay: replay.map(|port| format!("tcp://10.0.0.1:{port}")),
        }
    }

    fn size(tokens: u32) -> BlockSize {
        BlockSize::new(tokens).unwrap()
    }

    fn worker() -> Worker {
        Worker::new(
            WorkerId(1),
            "10.0.0.1:8000".parse().unwrap(),
            "m".into(),
            size(16),
        )
    }

    #[test]
    fn common_settings_require_all_engines_to_agree() {
        let reported = |root: Option<&str>, longest| EngineSettings {
            root: root.map(str::to_owned),
            max_model_len: longest,
            ..EngineSettings::default()
        };
        let cases = [
            (vec![], None, false, None),
            (vec![reported(None, None)], None, false, None),
            (
                vec![
                    reported(Some("a"), Some(8)),
                    reported(None, None),
                    reported(Some("a"), Some(8)),
                ],
                Some("a"),
                false,
                Some(8),
            ),
            (
                vec![
                    reported(Some("a"), Some(8)),
                    reported(None, None),
                    reported(Some("b"), Some(8)),
                ],
                None,
                true,
                Some(8),
            ),
            (
                vec![reported(Some("a"), Some(8)), reported(Some("a"), Some(9))],
                Some("a"),
                false,
                None,
            ),
        ];
        for (all, root, roots_differ, max_model_len) in cases {
            let expected = CommonSettings {
                root: root.map(str::to_owned),
                roots_differ,
                max_model_len,
            };
            assert_eq!(CommonSettings::common_to(all.iter()), expected, "{all:?}");
        }
    }

    #[test]
    fn capacity_is_converted_to_index_blocks() {
        // Block size of the index and of the engine, the engine's capacity, and the capacity in
        // index blocks.
        let cases = [
            (16, Some(64), 100, 400),
            (32, Some(16), 101, 50),
            (16, Some(16), 7, 7),
            (16, None, 7, 7),
        ];
        for (ours, engine, total, expected) in cases {
            let reported = EngineSettings {
                block_size: engine.map(size),
                total_kv_blocks: Some(total),
                ..EngineSettings::default()
            };
            let mut worker_without_settings = Worker {
                block_size: size(ours),
                ..worker()
            };
            assert_eq!(
                (
                    reported
                        .fill_missing(&mut worker_without_settings, &ConfiguredSettings::default()),
                    worker_without_settings.capacity.total_kv_blocks
                ),
                (vec![], Some(expected))
            );
            // Configured values are compared in the same unit.
            assert_eq!(
                reported.fill_missing(&mut worker_without_settings, &ConfiguredSettings::default()),
                [],
                "{ours} {engine:?}"
            );
            worker_without_settings.capacity.total_kv_blocks = Some(expected + 1);
            let found =
                reported.fill_missing(&mut worker_without_settings, &ConfiguredSettings::default());
            assert_eq!(
                (found[0].setting, &found[0].engine),
                ("total_kv_blocks", &expected.to_string())
            );
        }
    }

    fn reported(sources: &[EventSource]) -> EngineSettings {
        EngineSettings {
            block_size: Some(size(32)),
            total_kv_blocks: Some(512),
            ranks: NonZeroU32::new(sources.len() as u32).map(|size| RankRange { start: 0, size }),
            event_sources: (0..).zip(sources.iter().cloned()).collect(),
            root: Some("org/m".to_owned()),
            max_model_len: Some(4096),
            adapters: None,
        }
    }

    #[test]
    fn missing_settings_are_filled_in() {
        let mut worker = worker();
        let sources = [source(5557, Some(5657)), source(5558, Some(5658))];
        assert_eq!(
            reported(&sources).fill_missing(&mut worker, &ConfiguredSettings::default()),
            []
        );
        assert_eq!(worker.capacity.total_kv_blocks, Some(1024));
        assert_eq!(
            (worker.ranks.size.get(), &worker.event_sources[..]),
            (2, &sources[..])
        );
        assert_eq!(
            worker.block_size,
            size(16),
            "engine blocks are converted to configured blocks"
        );
    }

    #[test]
    fn configured_settings_win_and_mismatches_are_reported() {
        let mut worker = worker();
        worker.capacity.total_kv_blocks = Some(100);
        worker.event_sources = vec![EventSource {
            topic: "other".to_owned(),
            ..source(5557, Some(7))
        }];
        let before = worker.clone();
        let settings = ConfiguredSettings {
            block_size: Some(size(16)),
            media_model: Some("served".to_owned()),
        };
        let found = reported(&[source(5557, Some(5657)), source(5558, None)])
            .fill_missing(&mut worker, &settings);
        assert_eq!(worker, before);
        let found: Vec<_> = found
            .iter()
            .map(|one| (one.setting, &one.configured[..], &one.engine[..]))
            .collect();
        let expected = [
            ("multimodal.model", "served", "org/m"),
            ("block_size", "16", "32"),
            ("total_kv_blocks", "100", "1024"),
            ("data_parallel", "1 from 0", "2 from 0"),
            (
                "kv_events.replay",
                "tcp://10.0.0.1:7",
                "tcp://10.0.0.1:5657",
            ),
            ("kv_events.topic", "other", "kv"),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn replay_endpoint_is_added_to_matching_source_only() {
        for (port, replay) in [(5557, Some("tcp://10.0.0.1:5657".to_owned())), (6000, None)] {
            let mut worker = worker();
            worker.event_sources = vec![source(port, None)];
            let found = reported(&[source(5557, Some(5657))])
                .fill_missing(&mut worker, &ConfiguredSettings::default());
            assert_eq!(
                (&worker.event_sources[0].replay, found.is_empty()),
                (&replay, replay.is_some())
            );
        }
    }

    #[test]
    fn event_sources_of_some_ranks_are_ignored() {
        let mut worker = Worker {
            ranks: RankRange {
                start: 0,
                size: NonZeroU32::new(2).unwrap(),
            },
            ..worker()
        };
        let found = reported(&[source(5557, None)])
            .fill_missing(&mut worker, &ConfiguredSettings::default());
        assert_eq!(
            (worker.event_sources.len(), found[0].setting),
            (0, "data_parallel")
        );
    }

    #[test]
    fn listed_adapters_are_added_to_configured_ones() {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let settings = ConfiguredSettings::default();
        let listed = |names: &[&str]| EngineSettings {
            adapters: Some(set(names)),
            ..EngineSettings::default()
        };
        let merged = |reported: EngineSettings, configured: &[&str]| {
            let mut worker = Worker {
                adapters: set(configured),
                ..worker()
            };
            let found = reported.fill_missing(&mut worker, &settings);
            let differing = found.into_iter().map(|found| found.engine);
            (worker.adapters, differing.collect::<Vec<_>>())
        };
        let both = set(&["a", "b"]);
        assert_eq!(
            merged(EngineSettings::default(), &["a"]),
            (set(&["a"]), vec![])
        );
        assert_eq!(merged(listed(&["a", "b"]), &[]), (both.clone(), vec![]));
        assert_eq!(merged(listed(&["a", "b"]), &["a"]), (both.clone(), vec![]));
        assert_eq!(merged(listed(&["b"]), &["a"]), (both, vec!["b".to_owned()]));
    }
}
