//! Routing decisions for LLM workers, without I/O: which worker has the blocks of a prompt in its KV
//! cache, how loaded each worker is, and what each choice costs.
//!
//! A [`Router`](router::Router) reads a fleet of workers, the index of their cached blocks, and their
//! load. An [`index::RankWriter`] applies the KV events of an engine to the index. A route is booked
//! as load of its worker until its reservation is dropped.
//!
//! ```
//! use std::time::Instant;
//!
//! use warmroute_core::block::{BlockHashes, CacheSalt, EngineHash, StorageTier};
//! use warmroute_core::freshness::SourceStatus;
//! use warmroute_core::index::{KvEvent, PrefixIndex, StoredBlock};
//! use warmroute_core::load::LoadTracker;
//! use warmroute_core::router::{RoutePrompt, RouteRequest, Router, RouterSettings};
//! use warmroute_core::worker::{BlockSize, Worker, WorkerEndpoint, WorkerId};
//!
//! let load = LoadTracker::new(Instant::now);
//! let router = Router::new(PrefixIndex::new(), load, RouterSettings::default(), 1);
//! let block_size = BlockSize::new(16).ok_or("a block has tokens")?;
//! let members = router.set_workers((1..=4).map(|id| {
//!     let endpoint = WorkerEndpoint(([10, 0, 0, id], 8000).into());
//!     Worker::new(WorkerId(id.into()), endpoint, "m".into(), block_size)
//! }));
//!
//! // The third worker reports that it has cached the first six blocks of the prompt.
//! let tokens: Vec<u32> = (0..130).collect();
//! let prompt = BlockHashes::from_tokens(&tokens, block_size, &CacheSalt::default());
//! let third = &members[2];
//! let mut writer = router.index().create_writer(third.slot);
//! let blocks = prompt.locals().iter().zip(100..).take(6);
//! writer.apply(&KvEvent::Stored {
//!     parent: None,
//!     blocks: blocks
//!         .map(|(&local, id)| StoredBlock { engine: EngineHash(id), local })
//!         .collect(),
//!     tier: StorageTier::Device,
//! });
//! router.set_source_status(third.rank, SourceStatus::EXACT);
//!
//! let request = RouteRequest::new(Some("m".into()), RoutePrompt::Hashed(vec![prompt]));
//! let mut placement = router.route(request)?;
//! assert_eq!(placement.route.to.rank, third.rank);
//! assert_eq!(placement.route.predicted_cached_tokens, 6 * 16);
//!
//! // After the first token, the prefill no longer counts as load. After the end, nothing does.
//! placement.reservation.on_first_token();
//! drop(placement);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod adapters;
pub mod block;
pub mod engine_settings;
pub mod envoy_names;
pub mod fleet;
pub mod freshness;
pub mod health;
pub mod index;
pub mod load;
pub mod parity;
pub mod policy;
pub mod predict;
pub mod queue;
pub mod router;
pub mod sessions;
pub mod wall_time;
pub mod worker;
