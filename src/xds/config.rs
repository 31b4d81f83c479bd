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
    /// Envoy's admin page, for `warmroute doctor`; nothing else asks it.
    #[serde(default)]
    pub admin: Option<String>,
}

fn workers() -> String {
    "workers".to_owned()
}

impl EnvoyConfig {
    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let nameless = self.cluster.is_empty();
        let text = "the cluster has no name; write the one Envoy's `eds_cluster_config` has, `workers` by default";
        let page = self.admin.as_deref().filter(|url| !url.starts_with("http://") && !url.starts_with("https://"));
        let wrong = page.map(|url| {
            Problem::of(
                "admin",
                format!("`{url}` is not the address of a page; write for example http://127.0.0.1:9900"),
            )
        });
        nameless.then(|| Problem::of("cluster", text)).into_iter().chain(wrong).collect()
    }
}
