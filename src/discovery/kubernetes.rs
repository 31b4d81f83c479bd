//! Workers by Kubernetes: the pods of InferencePools, or of label selectors where that resource is not there. What a pod says is
//! turned into workers by a pure function ([`pods`]), the objects of each pool are kept by a plain value ([`pool`]), and
//! [`watch`] listens to the API server.

mod config;
mod objects;
mod pods;
mod pool;
mod watch;

pub use config::{Ids, KubernetesConfig, LabelsConfig, PodsConfig};
pub use pods::{dynamo_id, worker_id};
pub use watch::{look, watch};
