//! Workers by Kubernetes: the pods of InferencePools, or of label selectors where that resource is not there. What a pod says is
//! turned into workers by a pure function ([`pods`]), the objects of each pool are kept by a plain value ([`pool`]), and
//! [`watch`] listens to the API server. Beside the pools there may be objects that say something of requests: [`rules`], and
//! [`optional`] because none of them need be there.

mod config;
mod objects;
mod optional;
mod pods;
mod pool;
mod rules;
mod watch;

pub use config::{Ids, KubernetesConfig, LabelsConfig, PodsConfig};
pub use optional::watch_rules;
pub use pods::{dynamo_id, worker_id};
pub use rules::{Followed, PoolObjective, PoolRewrite, Rules};
pub use watch::{look, watch};
