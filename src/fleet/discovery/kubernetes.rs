//! Discovery by Kubernetes: the pods of InferencePools, or of label selectors where that resource
//! is not installed.
//!
//! A pure function turns pods into workers (`pods`); `pool` and `store` hold the objects.
//! `reflector` lists and watches them with the requests of `client`; the pure state machine
//! `list_watch` determines order and timing. `watch` does so for each pool, `optional_kinds`
//! for the objects that configure pools, whose contents `rules` interprets.

mod client;
mod config;
mod credentials;
mod error;
mod inspect;
mod list_watch;
mod object_watch;
mod objects;
mod optional_kinds;
mod pods;
mod pool;
mod reflector;
mod rules;
mod store;
mod watch;

pub use config::{KubernetesConfig, LabelsConfig, PodsConfig, WorkerIdSource};
pub use inspect::{ClusterReport, inspect};
pub use optional_kinds::watch_rules;
pub use pods::{dynamo_id, worker_id};
pub use rules::{KindStatus, KubernetesRules, PoolObjective, PoolRewrite};
pub use watch::{list_workers, watch};
