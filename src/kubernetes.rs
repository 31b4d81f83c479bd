//! Discovery by Kubernetes: the pods of InferencePools, or of label selectors where that resource
//! is not installed.
//!
//! `pods` is a pure function from pods to workers. `pool` and `store` contain the objects.
//! `reflector` lists and watches objects with the requests of `client`; the pure state machine
//! `list_watch` determines their order and timing. `watch` runs reflectors for each pool, and
//! `optional_kinds` for the objects that configure pools. `rules` interprets the contents of these
//! objects.

mod client;
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

pub use inspect::{ClusterReport, inspect};
pub use optional_kinds::watch_rules;
pub use pods::{dynamo_id, worker_id};
pub use rules::{KindStatus, KubernetesRules, PoolObjective, PoolRewrite};
pub use watch::{list_workers, watch};
