//! `process.pool:`: identity of the pool. It appears in the log, in a metric and in
//! `/debug/config`, and has no other effect.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_settings::Problem;

/// The `process.pool:` section.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PoolConfig {
    /// Name of the pool, for example of an InferencePool.
    pub name: Option<String>,
    /// Namespace of the pool.
    pub namespace: Option<String>,
}

impl PoolConfig {
    /// Checks the values.
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
