//! Settings of the endpoint file for Envoy.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::settings::Problem;

/// `envoy:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnvoyConfig {
    /// The file Envoy's `path_config_source` reads; its folder must be the `watched_directory`.
    pub endpoints_file: PathBuf,
    /// Name of the cluster the endpoints belong to.
    #[serde(default = "workers")]
    pub cluster: String,
}

fn workers() -> String {
    "workers".to_owned()
}

impl EnvoyConfig {
    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let nameless = self.cluster.is_empty();
        let text = "the cluster has no name; write the one Envoy's `eds_cluster_config` has, `workers` by default";
        nameless.then(|| Problem::of("cluster", text)).into_iter().collect()
    }
}
