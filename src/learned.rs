//! What engines say of themselves, against what is configured. What nobody configured is filled in; where both speak and
//! differ, the operator is told both values. The configured one holds, because it was meant; only of its own blocks the
//! engine knows better, and those are brought to our size as its events come.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::worker::{BlockSize, EventSource, Ranks, Worker};

/// What an engine says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Learned {
    /// Tokens per block.
    pub block_size: Option<BlockSize>,
    /// KV blocks of one rank, in blocks of its own size; the fewest where ranks differ.
    pub total_kv_blocks: Option<u64>,
    /// Its data-parallel ranks.
    pub ranks: Option<Ranks>,
    /// Where its ranks publish.
    pub event_sources: BTreeMap<u32, EventSource>,
    /// What it was started with (`vllm serve THIS`).
    pub root: Option<String>,
    /// Its longest context, in tokens.
    pub max_model_len: Option<u64>,
}

/// What the operator gave for a model, where that is something that engines tell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Given {
    /// Tokens per block.
    pub block_size: Option<BlockSize>,
    /// `media.model`.
    pub media_model: Option<String>,
}

/// What all engines of a model say alike, of those who say it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Agreed {
    /// What they were started with.
    pub root: Option<String>,
    /// Whether they were started with different things, which is more than that nobody said.
    pub roots_differ: bool,
    /// Their longest context, in tokens.
    pub max_model_len: Option<u64>,
}

impl Agreed {
    /// What these say alike.
    pub fn of<'l>(all: impl Iterator<Item = &'l Learned> + Clone) -> Self {
        fn alike<T: PartialEq>(mut said: impl Iterator<Item = T>) -> Option<T> {
            let first = said.next()?;
            said.all(|other| other == first).then_some(first)
        }
        let mut roots = all.clone().filter_map(|learned| learned.root.as_ref());
        let root = alike(roots.clone()).cloned();
        Self {
            roots_differ: root.is_none() && roots.next().is_some(),
            root,
            max_model_len: alike(all.filter_map(|learned| learned.max_model_len)),
        }
    }
}

/// Settings that an engine may report otherwise than configured.
pub const SETTINGS: [&str; 7] = [
    "block_size",
    "data_parallel",
    "kv_events.endpoint",
    "kv_events.replay",
    "kv_events.topic",
    "media.model",
    "total_kv_blocks",
];

/// Two values of one setting.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Mismatch {
    /// Its name in the configuration.
    pub setting: &'static str,
    /// What is configured.
    pub configured: String,
    /// What the engine says.
    pub engine: String,
}

impl Mismatch {
    fn of(setting: &'static str, configured: &impl ToString, engine: &impl ToString) -> Self {
        Self {
            setting,
            configured: configured.to_string(),
            engine: engine.to_string(),
        }
    }
}

impl Learned {
    /// Whether nothing was said.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Fills in what is not configured, and tells what is configured otherwise.
    pub fn fill(&self, worker: &mut Worker, given: &Given) -> Vec<Mismatch> {
        let mut found = Vec::new();
        if let (Some(configured), Some(engine)) = (&given.media_model, &self.root)
            && configured != engine
        {
            found.push(Mismatch::of("media.model", configured, engine));
        }
        if let (Some(configured), Some(engine)) = (given.block_size, self.block_size)
            && configured != engine
        {
            found.push(Mismatch::of("block_size", &configured.0, &engine.0));
        }
        match (
            worker.capacity.total_kv_blocks,
            self.blocks_of(worker.block_size),
        ) {
            (None, learned) => worker.capacity.total_kv_blocks = learned,
            (Some(configured), Some(engine)) if configured != engine => {
                found.push(Mismatch::of("total_kv_blocks", &configured, &engine));
            }
            _ => {}
        }
        if let Some(engine) = self.ranks.filter(|engine| *engine != worker.ranks) {
            // With sources that were counted out for other ranks, these cannot be changed alone.
            if worker.ranks == Ranks::ONE && worker.event_sources.is_empty() {
                worker.ranks = engine;
            } else {
                found.push(Mismatch::of(
                    "data_parallel",
                    &told(worker.ranks),
                    &told(engine),
                ));
            }
        }
        found.extend(self.fill_sources(worker));
        found
    }

    /// Its capacity in blocks of this size.
    pub fn blocks_of(&self, size: BlockSize) -> Option<u64> {
        let own = self.block_size.unwrap_or(size);
        Some(self.total_kv_blocks?.saturating_mul(own.tokens() as u64) / size.tokens() as u64)
    }

    fn fill_sources(&self, worker: &mut Worker) -> Vec<Mismatch> {
        let of_rank: Vec<Option<&EventSource>> = worker
            .ranks
            .iter()
            .map(|rank| self.event_sources.get(&rank.0))
            .collect();
        if worker.event_sources.is_empty() {
            // All or none: sources are counted by rank.
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
        for (configured, learned) in worker.event_sources.iter_mut().zip(of_rank) {
            let Some(learned) = learned else { continue };
            if port(&configured.endpoint) != port(&learned.endpoint) {
                found.push(Mismatch::of(
                    "kv_events.endpoint",
                    &configured.endpoint,
                    &learned.endpoint,
                ));
                // Another publisher than the engine tells of; its replay is none of ours either.
                continue;
            }
            if !learned.topic.starts_with(&configured.topic) {
                found.push(Mismatch::of(
                    "kv_events.topic",
                    &configured.topic,
                    &learned.topic,
                ));
            }
            match (&configured.replay, &learned.replay) {
                (None, Some(_)) => configured.replay = learned.replay.clone(),
                (Some(ours), Some(engines)) if port(ours) != port(engines) => {
                    found.push(Mismatch::of("kv_events.replay", ours, engines));
                }
                _ => {}
            }
        }
        found.sort();
        found
    }
}

/// What has to be the same on both sides; hosts have several names.
fn port(endpoint: &str) -> &str {
    match endpoint.strip_prefix("tcp://") {
        Some(address) => address.rsplit_once(':').map_or(address, |(_, port)| port),
        None => endpoint,
    }
}

fn told(ranks: Ranks) -> String {
    format!("{} from {}", ranks.size, ranks.start)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::worker::{Attach, WorkerId};

    fn source(port: u16, replay: Option<u16>) -> EventSource {
        EventSource {
            endpoint: format!("tcp://10.0.0.1:{port}"),
            topic: "kv".to_owned(),
            attach: Attach::Connect,
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
    fn a_model_is_what_all_its_engines_say_alike() {
        let says = |root: Option<&str>, longest| Learned {
            root: root.map(str::to_owned),
            max_model_len: longest,
            ..Learned::default()
        };
        let cases = [
            (vec![], None, false, None),
            (vec![says(None, None)], None, false, None),
            (
                vec![
                    says(Some("a"), Some(8)),
                    says(None, None),
                    says(Some("a"), Some(8)),
                ],
                Some("a"),
                false,
                Some(8),
            ),
            (
                vec![
                    says(Some("a"), Some(8)),
                    says(None, None),
                    says(Some("b"), Some(8)),
                ],
                None,
                true,
                Some(8),
            ),
            (
                vec![says(Some("a"), Some(8)), says(Some("a"), Some(9))],
                Some("a"),
                false,
                None,
            ),
        ];
        for (all, root, roots_differ, max_model_len) in cases {
            let expected = Agreed {
                root: root.map(str::to_owned),
                roots_differ,
                max_model_len,
            };
            assert_eq!(Agreed::of(all.iter()), expected, "{all:?}");
        }
    }

    #[test]
    fn capacity_is_counted_in_our_blocks() {
        // Tokens per block of ours and of the engine, its capacity, and how many of ours that is.
        let cases = [
            (16, Some(64), 100, 400),
            (32, Some(16), 101, 50),
            (16, Some(16), 7, 7),
            (16, None, 7, 7),
        ];
        for (ours, engine, total, expected) in cases {
            let says = Learned {
                block_size: engine.map(size),
                total_kv_blocks: Some(total),
                ..Learned::default()
            };
            let mut bare = Worker {
                block_size: size(ours),
                ..worker()
            };
            assert_eq!(
                (
                    says.fill(&mut bare, &Given::default()),
                    bare.capacity.total_kv_blocks
                ),
                (vec![], Some(expected))
            );
            // What is configured is compared in the same unit.
            assert_eq!(
                says.fill(&mut bare, &Given::default()),
                [],
                "{ours} {engine:?}"
            );
            bare.capacity.total_kv_blocks = Some(expected + 1);
            let found = says.fill(&mut bare, &Given::default());
            assert_eq!(
                (found[0].setting, &found[0].engine),
                ("total_kv_blocks", &expected.to_string())
            );
        }
    }

    fn learned(sources: &[EventSource]) -> Learned {
        Learned {
            block_size: Some(size(32)),
            total_kv_blocks: Some(512),
            ranks: NonZeroU32::new(sources.len() as u32).map(|size| Ranks { start: 0, size }),
            event_sources: (0..).zip(sources.iter().cloned()).collect(),
            root: Some("org/m".to_owned()),
            max_model_len: Some(4096),
        }
    }

    #[test]
    fn what_is_not_configured_is_filled_in() {
        let mut worker = worker();
        let sources = [source(5557, Some(5657)), source(5558, Some(5658))];
        assert_eq!(learned(&sources).fill(&mut worker, &Given::default()), []);
        assert_eq!(worker.capacity.total_kv_blocks, Some(1024));
        assert_eq!(
            (worker.ranks.size.get(), &worker.event_sources[..]),
            (2, &sources[..])
        );
        assert_eq!(
            worker.block_size,
            size(16),
            "its blocks are brought to ours"
        );
    }

    #[test]
    fn what_is_configured_holds_and_both_values_are_told() {
        let mut worker = worker();
        worker.capacity.total_kv_blocks = Some(100);
        worker.event_sources = vec![EventSource {
            topic: "other".to_owned(),
            ..source(5557, Some(7))
        }];
        let before = worker.clone();
        let given = Given {
            block_size: Some(size(16)),
            media_model: Some("served".to_owned()),
        };
        let found =
            learned(&[source(5557, Some(5657)), source(5558, None)]).fill(&mut worker, &given);
        assert_eq!(worker, before);
        let found: Vec<_> = found
            .iter()
            .map(|one| (one.setting, &one.configured[..], &one.engine[..]))
            .collect();
        let expected = [
            ("media.model", "served", "org/m"),
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
    fn a_replay_endpoint_is_added_to_the_source_it_belongs_to_only() {
        for (port, replay) in [(5557, Some("tcp://10.0.0.1:5657".to_owned())), (6000, None)] {
            let mut worker = worker();
            worker.event_sources = vec![source(port, None)];
            let found = learned(&[source(5557, Some(5657))]).fill(&mut worker, &Given::default());
            assert_eq!(
                (&worker.event_sources[0].replay, found.is_empty()),
                (&replay, replay.is_some())
            );
        }
    }

    #[test]
    fn sources_of_some_ranks_are_no_sources() {
        let mut worker = Worker {
            ranks: Ranks {
                start: 0,
                size: NonZeroU32::new(2).unwrap(),
            },
            ..worker()
        };
        let found = learned(&[source(5557, None)]).fill(&mut worker, &Given::default());
        assert_eq!(
            (worker.event_sources.len(), found[0].setting),
            (0, "data_parallel")
        );
    }
}
