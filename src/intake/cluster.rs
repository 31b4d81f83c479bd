//! What a cluster says of requests by objects of its own: priorities by name, and models that are served by others. It comes
//! while we run, beside the configuration, and whoever reads requests looks at what is there at that moment.

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use serde_json::Value;

use super::rewrite::{RewriteRule, Rewrites};
use super::{Headers, Intake};

/// Where it is replaced.
pub type SharedCluster = Arc<ArcSwap<Cluster>>;

/// What was said last.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cluster {
    /// By name; of several pools in their order.
    objectives: HashMap<String, Vec<(Arc<str>, i64)>>,
    rewrites: Rewrites,
    /// The same, for people.
    pub shown: Value,
}

impl Cluster {
    /// Priorities as (pool, name, priority), and rules with their pools; the first of these that fits counts.
    pub fn new(
        objectives: impl IntoIterator<Item = (Arc<str>, String, i64)>,
        rewrites: impl IntoIterator<Item = (Arc<str>, RewriteRule)>,
    ) -> Self {
        let mut cluster = Self {
            rewrites: Rewrites::of_pools(rewrites),
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

    /// The same, with what people are shown.
    #[must_use]
    pub fn shown_as(self, shown: Value) -> Self {
        Self { shown, ..self }
    }

    /// The priority that goes by a name, for requests to a pool; of no pool: that of the first which has one.
    pub fn priority(&self, name: &str, pool: Option<&str>) -> Option<i64> {
        let of_name = self.objectives.get(name)?;
        let own = |of: &&(Arc<str>, i64)| pool.is_none_or(|pool| *of.0 == *pool);
        of_name.iter().find(own).map(|(_, priority)| *priority)
    }

    /// Whether there are priorities at all.
    pub fn has_objectives(&self) -> bool {
        !self.objectives.is_empty()
    }

    /// Rules beside the configured ones.
    pub fn rewrites(&self) -> &Rewrites {
        &self.rewrites
    }
}

impl Intake {
    /// What a cluster says of requests now.
    pub fn cluster(&self) -> Arc<Cluster> {
        self.parts.cluster.load_full()
    }

    /// The priority of the objective that a request names. Only those that the cluster has can be named, so anybody may.
    pub(super) fn objective(&self, headers: Headers<'_>, pool: Option<&str>) -> Option<i64> {
        let cluster = self.parts.cluster.load();
        let names = self
            .parts
            .clients
            .objective_headers
            .iter()
            .filter(|_| cluster.has_objectives());
        let name = names.filter_map(|header| headers(header)).next()?;
        cluster.priority(name.trim(), pool)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_looked_for_in_the_pool_of_the_request() {
        let objectives = [("p", "gold", 5), ("q", "gold", 9), ("q", "batch", -1)];
        let owned =
            objectives.map(|(pool, name, priority)| (pool.into(), name.to_owned(), priority));
        let cluster = Cluster::new(owned, []);
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
        assert!(cluster.has_objectives() && !Cluster::default().has_objectives());
    }
}
