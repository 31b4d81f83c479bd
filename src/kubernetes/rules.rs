//! Pure interpretation of the objects that configure InferencePools: named priorities and model
//! rewrites.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;

use super::objects::{self, InferenceModelRewrite, InferenceObjective, PoolRef, RewriteRuleSpec};

/// Rules for the requests of all pools.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct KubernetesRules {
    /// Status of each kind of object.
    pub objects: Vec<KindStatus>,
    /// Named priorities. The first one with a name applies.
    pub objectives: Vec<PoolObjective>,
    /// Model rewrites. The first match applies; a rule for specific models takes precedence over
    /// one for all models.
    pub rewrites: Vec<PoolRewrite>,
}

/// Status of one kind of object in one namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KindStatus {
    /// Kind of the objects.
    pub kind: &'static str,
    /// Namespace of the objects.
    pub namespace: String,
    /// State of the watch.
    pub state: String,
    /// Error of the current failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Ignored objects, which do not have the expected form.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<String>,
}

/// Named priority.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PoolObjective {
    /// Title of the pool.
    pub pool: Arc<str>,
    /// Name of the objective.
    pub name: String,
    /// Higher values are served first; requests with a negative priority are shed first.
    pub priority: i64,
}

/// Rewrite of requested models.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PoolRewrite {
    /// Title of the pool.
    pub pool: Arc<str>,
    /// Object that contains the rule.
    pub object: String,
    /// Requested models; empty means all.
    pub models: Vec<String>,
    /// Served models and their weights.
    pub to: Vec<(String, Option<u32>)>,
}

/// InferencePool of the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServedPool {
    /// Title of the pool, as in the configuration.
    pub(super) title: Arc<str>,
    pub(super) namespace: String,
    pub(super) name: String,
}

/// Objects by namespace and uid.
pub(super) type ObjectsByNamespace<K> = BTreeMap<String, BTreeMap<String, K>>;

/// Returns the priorities for the configured pools.
pub(super) fn objectives(
    served: &[ServedPool],
    all: &ObjectsByNamespace<InferenceObjective>,
) -> Vec<PoolObjective> {
    let of_pool = |pool: &ServedPool| {
        let objects = all
            .get(&pool.namespace)
            .into_iter()
            .flat_map(BTreeMap::values);
        let objectives = objects
            .filter(|object| is_for(&object.spec.pool_ref, pool))
            .map(|object| PoolObjective {
                pool: pool.title.clone(),
                name: object.metadata.name.clone().unwrap_or_default(),
                priority: object.spec.priority,
            });
        let mut objectives: Vec<PoolObjective> = objectives.collect();
        objectives.sort_by(|a, b| a.name.cmp(&b.name));
        objectives
    };
    served.iter().flat_map(of_pool).collect()
}

/// Returns the rewrites for the configured pools: those of the oldest object first, in the order of
/// its rules.
pub(super) fn rewrites(
    served: &[ServedPool],
    all: &ObjectsByNamespace<InferenceModelRewrite>,
) -> Vec<PoolRewrite> {
    let mut objects: Vec<(&String, &InferenceModelRewrite)> = all
        .iter()
        .flat_map(|(namespace, objects)| objects.values().map(move |object| (namespace, object)))
        .collect();
    let age = |object: &InferenceModelRewrite| object.metadata.creation_timestamp.clone();
    objects.sort_by(|(a_in, a), (b_in, b)| {
        let by_age = (age(a).is_none(), age(a)).cmp(&(age(b).is_none(), age(b)));
        by_age.then_with(|| (a_in, &a.metadata.name).cmp(&(b_in, &b.metadata.name)))
    });
    let of_object = |(namespace, object): (&String, &InferenceModelRewrite)| {
        let name = format!(
            "{namespace}/{}",
            object.metadata.name.as_deref().unwrap_or_default()
        );
        let pools = served
            .iter()
            .filter(|pool| pool.namespace == *namespace && is_for(&object.spec.pool_ref, pool));
        let rules = |pool: &ServedPool| {
            object
                .spec
                .rules
                .iter()
                .filter_map(|rule| parse_rule(rule, &pool.title, &name))
                .collect::<Vec<_>>()
        };
        pools.flat_map(rules).collect::<Vec<_>>()
    };
    objects.into_iter().flat_map(of_object).collect()
}

fn is_for(pool_ref: &PoolRef, pool: &ServedPool) -> bool {
    let group = pool_ref.group.as_deref().unwrap_or(objects::POOL_GROUP);
    let kind = pool_ref.kind.as_deref().unwrap_or("InferencePool");
    (group, kind, pool_ref.name.as_str())
        == (objects::POOL_GROUP, "InferencePool", pool.name.as_str())
}

/// Converts a rule, or returns `None` if it matches nothing or has no target. Unknown match types
/// match nothing.
fn parse_rule(rule: &RewriteRuleSpec, pool: &Arc<str>, object: &str) -> Option<PoolRewrite> {
    let known = rule
        .matches
        .iter()
        .filter_map(|rule_match| rule_match.model.as_ref());
    let exact = known.filter(|model| {
        model.kind.as_deref().unwrap_or("Exact") == "Exact" && !model.value.is_empty()
    });
    let models: Vec<String> = exact.map(|model| model.value.clone()).collect();
    let targets = rule
        .targets
        .iter()
        .filter(|target| !target.model_rewrite.is_empty());
    let weight = |weight: i64| u32::try_from(weight.max(0)).unwrap_or(u32::MAX);
    let to: Vec<_> = targets
        .map(|target| (target.model_rewrite.clone(), target.weight.map(weight)))
        .collect();
    let has_matches = rule.matches.is_empty() || !models.is_empty();
    (has_matches && !to.is_empty()).then(|| PoolRewrite {
        pool: pool.clone(),
        object: object.to_owned(),
        models,
        to,
    })
}

#[cfg(test)]
mod tests;
