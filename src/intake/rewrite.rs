//! Which model a request is sent to in place of the one it names: by the word of a header, or by shares, for canaries and
//! for names that outlive the models behind them. Pure: the caller rolls the dice.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::{Headers, Intake, Parts};
use crate::openai;
use crate::settings::{Problem, Step, is_header_name};
use crate::worker::ModelName;

/// `rewrites:`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RewritesConfig {
    /// Headers that may name the model to send a request to; the first that a request has counts, and beats the rules. None
    /// by default, because whoever sends one chooses.
    pub headers: Vec<String>,
    /// Which models are sent where. A rule that names the model beats one for all, and then the first.
    pub rules: Vec<RewriteRule>,
}

/// One rule of `rewrites:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RewriteRule {
    /// Models as requests name them; empty: all, and requests that name none.
    #[serde(default)]
    pub models: Vec<ModelName>,
    /// Where they are sent.
    pub to: Vec<RewriteTarget>,
}

/// One target of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RewriteTarget {
    /// The model, as the engines serve it.
    pub model: ModelName,
    /// Its share of the requests, against those of the other targets; with none at all the shares are equal.
    #[serde(default)]
    pub weight: Option<u32>,
}

/// The rules in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rewrites {
    rules: Vec<PoolRule>,
}

/// A rule, and of which pool it is; of none: for every request.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PoolRule {
    pool: Option<Arc<str>>,
    rule: RewriteRule,
}

/// What a request says of the model it asks for.
#[derive(Clone, Copy, Debug, Default)]
pub struct AskedModel<'a> {
    /// As its body names it.
    pub name: Option<&'a str>,
    /// What a header says, where one may.
    pub header: Option<&'a str>,
    /// The pool it is for, where it is for one.
    pub pool: Option<&'a str>,
}

/// A request body with another model than the client requested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RewrittenBody {
    /// The body.
    pub bytes: Bytes,
    /// The model in the body.
    pub served: String,
    /// The model that the client requested; `None` if the body named none.
    pub requested: Option<String>,
}

impl Intake {
    /// Replaces the model of a body, if a header or a rule says so. `random` selects among weighted models: at least 0, below 1.
    pub fn rewrite(
        &self,
        pool: Option<&str>,
        headers: Headers<'_>,
        body: &Bytes,
        random: f64,
    ) -> Option<RewrittenBody> {
        let Parts {
            rewrites,
            rewrite_headers,
            ..
        } = &self.parts;
        let header = rewrite_headers
            .iter()
            .find_map(|name| headers(name))
            .map(Cow::into_owned);
        let cluster = self.cluster();
        if rewrites.is_empty() && cluster.rewrites().is_empty() && header.is_none() {
            return None;
        }
        let asked = openai::model_of(body);
        // The asked name is put back into every piece of the response.
        let is_too_long = |name: &str| name.len() > openai::LONGEST_MODEL;
        if [&asked, &header]
            .into_iter()
            .flatten()
            .any(|name| is_too_long(name))
        {
            return None;
        }
        let model = AskedModel {
            name: asked.as_deref(),
            header: header.as_deref(),
            pool,
        };
        let chosen = rewrites.choose(cluster.rewrites(), model, random);
        let served = chosen.filter(|name| !is_too_long(name))?.to_owned();
        // A body that is not a JSON object has no model; the engine refuses it.
        let bytes: Bytes = openai::edit::set_model(body, &served)?.into();
        Some(RewrittenBody {
            bytes,
            served,
            requested: asked,
        })
    }
}

impl From<&RewritesConfig> for Rewrites {
    fn from(config: &RewritesConfig) -> Self {
        Self {
            rules: config
                .rules
                .iter()
                .map(|rule| PoolRule {
                    pool: None,
                    rule: rule.clone(),
                })
                .collect(),
        }
    }
}

impl Rewrites {
    /// Rules of pools, in their order. A request that is for no pool may meet the rules of all.
    pub fn of_pools(rules: impl IntoIterator<Item = (Arc<str>, RewriteRule)>) -> Self {
        Self {
            rules: rules
                .into_iter()
                .map(|(pool, rule)| PoolRule {
                    pool: Some(pool),
                    rule,
                })
                .collect(),
        }
    }

    /// The model a request is sent to in place of the one it asks for; `None`: it stays as it is. `later` are further rules,
    /// which come after these, and `random` is from 0 up to but without 1.
    pub fn choose<'a>(
        &'a self,
        later: &'a Self,
        asked: AskedModel<'a>,
        random: f64,
    ) -> Option<&'a str> {
        let header = asked.header.map(str::trim).filter(|name| !name.is_empty());
        let chosen = header.or_else(|| self.rule(later, asked)?.target(random))?;
        (Some(chosen) != asked.name).then_some(chosen)
    }

    /// Whether nothing is ever rewritten by a rule.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    fn rule<'a>(&'a self, later: &'a Self, asked: AskedModel<'_>) -> Option<&'a RewriteRule> {
        let is_for = |rule: &&PoolRule| match (&rule.pool, asked.pool) {
            (Some(pool), Some(asked)) => **pool == *asked,
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
            asked
                .name
                .is_some_and(|name| rule.models.iter().any(|m| m.as_str() == name))
        };
        rules()
            .find(names)
            .or_else(|| rules().find(|rule| rule.models.is_empty()))
    }
}

impl RewriteRule {
    fn target(&self, random: f64) -> Option<&str> {
        let equal = self.to.iter().all(|target| target.weight.unwrap_or(0) == 0);
        let weight = |target: &RewriteTarget| {
            if equal {
                1
            } else {
                u64::from(target.weight.unwrap_or(0))
            }
        };
        let total: u64 = self.to.iter().map(weight).sum();
        let mut left = random * total as f64;
        let mut chosen = None;
        for target in self.to.iter().filter(|target| weight(target) > 0) {
            chosen = Some(target.model.as_str());
            left -= weight(target) as f64;
            if left < 0.0 {
                break;
            }
        }
        chosen
    }

    fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let given = self
            .to
            .iter()
            .filter(|target| target.weight.is_some())
            .count();
        if self.to.is_empty() {
            problems.push(Problem::of(
                "to",
                "the list is empty; name at least one model",
            ));
        } else if given == self.to.len() && self.to.iter().all(|target| target.weight == Some(0)) {
            let text =
                "all weights are 0, so no model could be chosen; leave them out for equal shares";
            problems.push(Problem::of("to", text));
        }
        if given > 0 && given < self.to.len() {
            let lacking = self
                .to
                .iter()
                .enumerate()
                .filter(|(_, target)| target.weight.is_none());
            problems.extend(lacking.map(|(at, target)| {
                let text = format!(
                    "`{}` has no `weight` and others have; give one to all or to none",
                    target.model
                );
                Problem::at([Step::from("to"), at.into()], text)
            }));
        }
        let names = self
            .models
            .iter()
            .enumerate()
            .map(|(at, name)| ([Step::from("models"), at.into()], name));
        let empty = names.filter(|(_, name)| name.as_str().is_empty());
        problems
            .extend(empty.map(|(place, _)| Problem::at(place, "the name is empty; leave it out")));
        let targets = self
            .to
            .iter()
            .enumerate()
            .filter(|(_, target)| target.model.as_str().is_empty());
        let place = |at: usize| [Step::from("to"), at.into(), "model".into()];
        problems.extend(
            targets.map(|(at, _)| Problem::at(place(at), "the name is empty; give a model's")),
        );
        problems
    }
}

impl RewritesConfig {
    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        for (at, name) in self
            .headers
            .iter()
            .enumerate()
            .filter(|(_, name)| !is_header_name(name))
        {
            let text = format!(
                "`{name}` cannot be the name of a header; write letters, digits and hyphens"
            );
            problems.push(Problem::at([Step::from("headers"), at.into()], text));
        }
        let mut named = HashSet::new();
        let mut for_all = false;
        for (at, rule) in self.rules.iter().enumerate() {
            let place = [Step::from("rules"), at.into()];
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
                let text = "an earlier rule takes all that this one is for, so it is never reached; leave one out";
                problems.push(Problem::at(place, text));
            }
            problems.extend(
                rule.problems()
                    .into_iter()
                    .map(|problem| problem.within(at).within("rules")),
            );
        }
        problems
    }

    /// Every target with its place.
    pub fn targets(&self) -> impl Iterator<Item = ([Step; 5], &ModelName)> {
        let place = |rule: usize, target: usize| {
            [
                Step::from("rules"),
                rule.into(),
                "to".into(),
                target.into(),
                "model".into(),
            ]
        };
        let rules = self.rules.iter().enumerate();
        rules.flat_map(move |(nth, rule)| {
            rule.to
                .iter()
                .enumerate()
                .map(move |(at, target)| (place(nth, at), &target.model))
        })
    }
}

#[cfg(test)]
mod tests;
