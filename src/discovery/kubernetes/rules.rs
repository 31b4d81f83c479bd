//! What InferencePools say of requests by objects beside them: priorities with names, and models that are served by others. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;

use super::objects::{self, Objective, PoolRef, Rewrite, Rule};

/// Everything that the pools say of requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Rules {
    /// How it is with each kind of object.
    pub objects: Vec<Followed>,
    /// Priorities with names; of one name the first counts.
    pub objectives: Vec<PoolObjective>,
    /// The first that fits counts, one for the model before one for all.
    pub rewrites: Vec<PoolRewrite>,
}

/// How it is with one kind of object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Followed {
    /// The kind.
    pub kind: &'static str,
    /// In which namespace.
    pub namespace: String,
    /// How it is.
    pub standing: String,
    /// Why it cannot be read or watched now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Objects that are ignored because they do not have the expected form.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<String>,
}

/// A priority with a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PoolObjective {
    /// The pool.
    pub pool: Arc<str>,
    /// Its name.
    pub name: String,
    /// More goes first; with less than 0 a request gives way.
    pub priority: i64,
}

/// Models that are served by others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PoolRewrite {
    /// The pool.
    pub pool: Arc<str>,
    /// Which object says so.
    pub object: String,
    /// As requests name them; empty: all.
    pub models: Vec<String>,
    /// By what they are served, and the weight of each.
    pub to: Vec<(String, Option<u32>)>,
}

/// An InferencePool that is served here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OurPool {
    /// What it is called here.
    pub(super) title: Arc<str>,
    pub(super) namespace: String,
    pub(super) name: String,
}

/// The objects of each namespace, by uid.
pub(super) type Objects<K> = BTreeMap<String, BTreeMap<String, K>>;

/// What the objects say of our pools.
pub(super) fn objectives(ours: &[OurPool], all: &Objects<Objective>) -> Vec<PoolObjective> {
    let of_pool = |pool: &OurPool| {
        let objects = all
            .get(&pool.namespace)
            .into_iter()
            .flat_map(BTreeMap::values);
        let own = objects
            .filter(|object| is_for(&object.spec.pool_ref, pool))
            .map(|object| PoolObjective {
                pool: pool.title.clone(),
                name: object.metadata.name.clone().unwrap_or_default(),
                priority: object.spec.priority,
            });
        let mut own: Vec<PoolObjective> = own.collect();
        own.sort_by(|a, b| a.name.cmp(&b.name));
        own
    };
    ours.iter().flat_map(of_pool).collect()
}

/// The rules of all objects for our pools: those of the oldest first, and each object's in its order.
pub(super) fn rewrites(ours: &[OurPool], all: &Objects<Rewrite>) -> Vec<PoolRewrite> {
    let mut objects: Vec<(&String, &Rewrite)> = all
        .iter()
        .flat_map(|(namespace, objects)| objects.values().map(move |object| (namespace, object)))
        .collect();
    let age = |object: &Rewrite| object.metadata.creation_timestamp.clone();
    objects.sort_by(|(a_in, a), (b_in, b)| {
        let aged = (age(a).is_none(), age(a)).cmp(&(age(b).is_none(), age(b)));
        aged.then_with(|| (a_in, &a.metadata.name).cmp(&(b_in, &b.metadata.name)))
    });
    let of_object = |(namespace, object): (&String, &Rewrite)| {
        let name = format!(
            "{namespace}/{}",
            object.metadata.name.as_deref().unwrap_or_default()
        );
        let pools = ours
            .iter()
            .filter(|pool| pool.namespace == *namespace && is_for(&object.spec.pool_ref, pool));
        let rules = |pool: &OurPool| {
            object
                .spec
                .rules
                .iter()
                .filter_map(|rule| usable(rule, &pool.title, &name))
                .collect::<Vec<_>>()
        };
        pools.flat_map(rules).collect::<Vec<_>>()
    };
    objects.into_iter().flat_map(of_object).collect()
}

fn is_for(pool_ref: &PoolRef, pool: &OurPool) -> bool {
    let group = pool_ref.group.as_deref().unwrap_or(objects::POOLS);
    let kind = pool_ref.kind.as_deref().unwrap_or("InferencePool");
    (group, kind, pool_ref.name.as_str()) == (objects::POOLS, "InferencePool", pool.name.as_str())
}

/// A rule, unless it fits nothing or leads nowhere. One that asks for what we do not know fits nothing.
fn usable(rule: &Rule, pool: &Arc<str>, object: &str) -> Option<PoolRewrite> {
    let known = rule
        .matches
        .iter()
        .filter_map(|wanted| wanted.model.as_ref());
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
    let fits_something = rule.matches.is_empty() || !models.is_empty();
    (fits_something && !to.is_empty()).then(|| PoolRewrite {
        pool: pool.clone(),
        object: object.to_owned(),
        models,
        to,
    })
}

#[cfg(test)]
mod tests;
