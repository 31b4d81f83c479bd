//! Rules that a cluster defines with its own objects: priorities by objective, and model rewrites.
//! They change at run time, independently of the configuration, and each request reads the current
//! ones.

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use serde_json::Value;

use super::rewrite::{RewriteRule, RewriteRules};

/// The current rules.
pub type SharedClusterRules = Arc<ArcSwap<ClusterRules>>;

/// Rules of a cluster.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClusterRules {
    /// Priorities by objective, with their pools in order.
    objectives: HashMap<String, Vec<(Arc<str>, i64)>>,
    rewrites: RewriteRules,
    /// The rules as JSON, for status pages.
    pub status: Value,
}

impl ClusterRules {
    /// Creates rules from objectives (pool, name, priority) and rewrite rules with their pools. The
    /// first match is used.
    pub fn new(
        objectives: impl IntoIterator<Item = (Arc<str>, String, i64)>,
        rewrites: impl IntoIterator<Item = (Arc<str>, RewriteRule)>,
    ) -> Self {
        let mut cluster = Self {
            rewrites: RewriteRules::from_pools(rewrites),
            ..Self::default()
        };
        for (pool, name, priority) in objectives {
            cluster
                .objectives
                .entry(name)
                .or_default()
                .push((pool, priority));
        }
        cluster
    }

    /// Sets the JSON for status pages.
    #[must_use]
    pub fn with_status(self, status: Value) -> Self {
        Self { status, ..self }
    }

    /// Returns the priority of an objective for requests to a pool. Without a pool, returns the
    /// first priority of that name.
    pub fn priority(&self, name: &str, pool: Option<&str>) -> Option<i64> {
        let entries = self.objectives.get(name)?;
        let matches_pool = |entry: &&(Arc<str>, i64)| pool.is_none_or(|pool| *entry.0 == *pool);
        entries
            .iter()
            .find(matches_pool)
            .map(|(_, priority)| *priority)
    }

    /// Returns whether there are any objectives.
    pub fn has_objectives(&self) -> bool {
        !self.objectives.is_empty()
    }

    /// Returns the rewrite rules in addition to the configured ones.
    pub fn rewrites(&self) -> &RewriteRules {
        &self.rewrites
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objective_is_resolved_in_pool_of_request() {
        let objectives = [("p", "gold", 5), ("q", "gold", 9), ("q", "batch", -1)];
        let owned =
            objectives.map(|(pool, name, priority)| (pool.into(), name.to_owned(), priority));
        let cluster = ClusterRules::new(owned, []);
        for (name, pool, expected) in [
            ("gold", None, Some(5)),
            ("gold", Some("q"), Some(9)),
            ("batch", None, Some(-1)),
            ("batch", Some("p"), None),
            ("Gold", None, None),
            ("gold", Some("other"), None),
        ] {
            assert_eq!(cluster.priority(name, pool), expected, "{name} {pool:?}");
        }
        assert!(cluster.has_objectives() && !ClusterRules::default().has_objectives());
    }
}
