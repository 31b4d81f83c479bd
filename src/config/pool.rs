//! `pool:`: which pool of workers this is. Only an identity: it is shown in the log, in a metric and in `/debug/config`.

use serde::{Deserialize, Serialize};

use crate::settings::Problem;

/// `pool:`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PoolConfig {
    /// Its name, as of an InferencePool.
    pub name: Option<String>,
    /// The namespace it is in.
    pub namespace: Option<String>,
}

impl PoolConfig {
    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let named = [("name", &self.name), ("namespace", &self.namespace)];
        let empty = named
            .into_iter()
            .filter(|(_, name)| name.as_ref().is_some_and(|name| name.is_empty()));
        empty
            .map(|(key, _)| {
                Problem::of(
                    key,
                    format!("the {key} is empty; write it, or leave it out"),
                )
            })
            .collect()
    }
}
