//! Replacement of the requested model: by a header, or by weighted rules, for canaries and for
//! stable names of changing models. The module is pure: the caller passes the random number.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_core::worker::ModelName;
use warmroute_settings::{PathStep, Problem, all_within, header_name_problems};

/// The `routing.model_rewrites:` section.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RewritesConfig {
    /// Headers that name the model. The first present one is used and overrides the rules. Empty by
    /// default, because any client could choose a model with it.
    pub headers: Vec<String>,
    /// Rewrite rules. A rule that names the model precedes one for all models. The first match
    /// applies.
    pub rules: Vec<RewriteRule>,
}

/// One rule of `routing.model_rewrites:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RewriteRule {
    /// Requested models. Empty: all models, and requests without a model.
    #[serde(default)]
    pub models: Vec<ModelName>,
    /// Models to send the requests to.
    pub targets: Vec<RewriteTarget>,
}

/// One target of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RewriteTarget {
    /// The model, as the engines serve it.
    pub model: ModelName,
    /// Weight relative to the other targets. Without any weights the shares are equal.
    #[serde(default)]
    pub weight: Option<u32>,
}

/// The active rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RewriteRules {
    rules: Vec<PoolRewriteRule>,
}

/// A rule and its pool; without a pool it applies to every request.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PoolRewriteRule {
    pool: Option<Arc<str>>,
    rule: RewriteRule,
}

/// The model that a request names.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestedModel<'a> {
    /// Model in the body.
    pub name: Option<&'a str>,
    /// Model in a rewrite header.
    pub header: Option<&'a str>,
    /// Pool of the request.
    pub pool: Option<&'a str>,
}

/// Replacement of a request body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyEdit {
    /// The new body.
    pub body: Bytes,
    /// Model name to restore in the response.
    pub model_rename: Option<ModelRename>,
}

impl BodyEdit {
    /// Replaces the body and keeps the model name to restore.
    pub(crate) fn replace_body(before: Option<Self>, body: Option<Bytes>) -> Option<Self> {
        let Some(body) = body else { return before };
        Some(Self {
            body,
            model_rename: before.and_then(|edit| edit.model_rename),
        })
    }
}

/// A model that is served under another name than the client requested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelRename {
    /// Model name for the engine.
    pub served: String,
    /// Model name for the client.
    pub requested: String,
}

impl From<&RewritesConfig> for RewriteRules {
    fn from(config: &RewritesConfig) -> Self {
        Self {
            rules: config
                .rules
                .iter()
                .map(|rule| PoolRewriteRule {
                    pool: None,
                    rule: rule.clone(),
                })
                .collect(),
        }
    }
}

impl RewriteRules {
    /// Creates rules of pools, in order. A request without a pool may match the rules of all pools.
    pub fn from_pools(rules: impl IntoIterator<Item = (Arc<str>, RewriteRule)>) -> Self {
        Self {
            rules: rules
                .into_iter()
                .map(|(pool, rule)| PoolRewriteRule {
                    pool: Some(pool),
                    rule,
                })
                .collect(),
        }
    }

    /// Returns the model to send a request to; `None` keeps the requested one. `later` contains
    /// rules that apply after these. `random` is at least 0 and below 1.
    pub fn choose_model<'a>(
        &'a self,
        later: &'a Self,
        requested: RequestedModel<'a>,
        random: f64,
    ) -> Option<&'a str> {
        let header = requested
            .header
            .map(str::trim)
            .filter(|name| !name.is_empty());
        let chosen = header.or_else(|| self.find_rule(later, requested)?.pick_target(random))?;
        (Some(chosen) != requested.name).then_some(chosen)
    }

    /// Returns whether there are no rules.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    fn find_rule<'a>(
        &'a self,
        later: &'a Self,
        requested: RequestedModel<'_>,
    ) -> Option<&'a RewriteRule> {
        let is_for = |rule: &&PoolRewriteRule| match (&rule.pool, requested.pool) {
            (Some(pool), Some(requested)) => **pool == *requested,
            _ => true,
        };
        let rules = || {
            self.rules
                .iter()
                .chain(&later.rules)
                .filter(is_for)
                .map(|rule| &rule.rule)
        };
        let names = |rule: &&RewriteRule| {
            requested
                .name
                .is_some_and(|name| rule.models.iter().any(|m| m.as_str() == name))
        };
        rules()
            .find(names)
            .or_else(|| rules().find(|rule| rule.models.is_empty()))
    }
}

impl RewriteRule {
    fn pick_target(&self, random: f64) -> Option<&str> {
        let equal = self
            .targets
            .iter()
            .all(|target| target.weight.unwrap_or(0) == 0);
        let weight = |target: &RewriteTarget| {
            if equal {
                1
            } else {
                u64::from(target.weight.unwrap_or(0))
            }
        };
        let total: u64 = self.targets.iter().map(weight).sum();
        let mut remaining = random * total as f64;
        let mut chosen = None;
        for target in self.targets.iter().filter(|target| weight(target) > 0) {
            chosen = Some(target.model.as_str());
            remaining -= weight(target) as f64;
            if remaining < 0.0 {
                break;
            }
        }
        chosen
    }

    fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let weighted = self
            .targets
            .iter()
            .filter(|target| target.weight.is_some())
            .count();
        if self.targets.is_empty() {
            problems.push(Problem::of(
                "targets",
                "the list is empty; name at least one model",
            ));
        } else if weighted == self.targets.len()
            && self.targets.iter().all(|target| target.weight == Some(0))
        {
            let text =
                "all weights are 0, so no model could be chosen; remove them for equal shares";
            problems.push(Problem::of("targets", text));
        }
        if weighted > 0 && weighted < self.targets.len() {
            let unweighted = self
                .targets
                .iter()
                .enumerate()
                .filter(|(_, target)| target.weight.is_none());
            problems.extend(unweighted.map(|(at, target)| {
                let text = format!(
                    "`{}` has no `weight` and others have; set one for all or for none",
                    target.model
                );
                Problem::at([PathStep::from("targets"), at.into()], text)
            }));
        }
        let names = self
            .models
            .iter()
            .enumerate()
            .map(|(at, name)| ([PathStep::from("models"), at.into()], name));
        let empty = names.filter(|(_, name)| name.as_str().is_empty());
        problems
            .extend(empty.map(|(path, _)| Problem::at(path, "the name is empty; leave it out")));
        let targets = self
            .targets
            .iter()
            .enumerate()
            .filter(|(_, target)| target.model.as_str().is_empty());
        let path = |at: usize| [PathStep::from("targets"), at.into(), "model".into()];
        problems.extend(
            targets.map(|(at, _)| {
                Problem::at(path(at), "the name is empty; give the name of a model")
            }),
        );
        problems
    }
}

impl RewritesConfig {
    /// Returns the semantic errors of the configuration.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems: Vec<_> =
            header_name_problems("headers", &self.headers, "x-model").collect();
        let mut named = HashSet::new();
        let mut for_all = false;
        for (at, rule) in self.rules.iter().enumerate() {
            let path = [PathStep::from("rules"), at.into()];
            let new = rule
                .models
                .iter()
                .filter(|model| named.insert(*model))
                .count();
            let reached = if rule.models.is_empty() {
                !std::mem::replace(&mut for_all, true)
            } else {
                new > 0
            };
            if !reached {
                let text =
                    "earlier rules match all requests of this one, so it is never used; remove one";
                problems.push(Problem::at(path, text));
            }
            problems.extend(all_within("rules", all_within(at, rule.problems())));
        }
        problems
    }

    /// Returns every target with its path in the configuration.
    pub fn targets(&self) -> impl Iterator<Item = ([PathStep; 5], &ModelName)> {
        let path = |rule: usize, target: usize| {
            [
                PathStep::from("rules"),
                rule.into(),
                "targets".into(),
                target.into(),
                "model".into(),
            ]
        };
        let rules = self.rules.iter().enumerate();
        rules.flat_map(move |(nth, rule)| {
            rule.targets
                .iter()
                .enumerate()
                .map(move |(at, target)| (path(nth, at), &target.model))
        })
    }
}

#[cfg(test)]
mod tests;
