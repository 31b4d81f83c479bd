//! Workers by Kubernetes: the pods of InferencePools, or of label selectors where that resource is not installed. A pure function
//! turns pods into workers ([`pods`]); [`pool`] and [`store`] hold the objects. [`reflector`] lists and watches them with the
//! requests of [`client`], in the order and at the times that the pure states of [`list_watch`] determine. [`watch`] does so for
//! each pool, and [`optional`] for the objects beside the pools, whose contents are those of [`rules`].

mod client;
mod config;
mod credentials;
mod error;
mod inspect;
mod list_watch;
mod objects;
mod optional;
mod pods;
mod pool;
mod reflector;
mod rules;
mod store;
mod watch;

pub use config::{Ids, KubernetesConfig, LabelsConfig, PodsConfig};
pub use inspect::{ClusterReport, MissingRight, PoolFailure, PoolReport, RequestCause, inspect};
pub use optional::watch_rules;
pub use pods::{dynamo_id, worker_id};
pub use rules::{Followed, PoolObjective, PoolRewrite, Rules};
pub use watch::{look, watch};
