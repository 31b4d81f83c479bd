//! Checks of the whole configuration: each section alone, and sections against each other. The only
//! I/O is to read or to find the files that it names.

mod conflicts;
mod credentials;
mod models;
mod workers;

use std::collections::HashSet;

use warmroute_core::policy::Weights;
use warmroute_settings::{PathStep, Problem, all_within};

use super::Config;
use super::policy::PolicyConfig;

/// Returns all problems of a parsed configuration.
pub(super) fn problems(config: &Config) -> Vec<Problem> {
    let mut found = SectionProblems::default();
    found.check_listeners(config);
    found.check_engines(config);
    found.check_index(config);
    found.check_routing(config);
    found.check_requests(config);
    let mut problems = found.0;
    problems.extend(conflicts::uncounted_thresholds(config));
    problems.extend(conflicts::useless_settings(config));
    problems.extend(conflicts::disaggregation(config));
    problems.extend(conflicts::remote_index(config));
    problems.extend(conflicts::addresses(config));
    problems.extend(models::models(&config.models));
    problems.extend(workers::workers(config));
    problems.extend(workers::files(config));
    credentials::with_credentials_first(problems, credentials::credentials(config))
}

/// Problems of the sections, in the order of the checks.
#[derive(Default)]
struct SectionProblems(Vec<Problem>);

impl SectionProblems {
    /// Adds the problems of the section at a dotted path.
    fn add(&mut self, path: &str, found: impl IntoIterator<Item = Problem>) {
        let within = |problem| {
            let inner_first = path.rsplit('.');
            inner_first.fold(problem, |problem: Problem, key| problem.within(key))
        };
        self.0.extend(found.into_iter().map(within));
    }

    fn check_listeners(&mut self, config: &Config) {
        let listeners = &config.listeners;
        self.add("listeners.ext_proc", listeners.ext_proc.problems());
        self.add("listeners.admin", listeners.admin.problems());
        if let Some(api) = &listeners.api {
            self.add("listeners.api", api.problems());
        }
        self.add("listeners.limits", listeners.limits.problems());
    }

    fn check_engines(&mut self, config: &Config) {
        let engines = &config.engines;
        self.add("engines.http", engines.http.problems());
        self.add("engines.discovery", engines.discovery.problems());
        self.add("engines.load", engines.load.problems());
        self.add("engines.parity_check", engines.parity_check.problems());
        self.add("engines.kv_events", engines.kv_events.problems());
    }

    fn check_index(&mut self, config: &Config) {
        let index = &config.index;
        self.add("index", index.problems());
        self.add("index.freshness", index.freshness.problems());
        self.add("index.approximate", index.approximate.problems());
        if let Some(cache) = &index.shared_cache {
            self.add("index.shared_cache", cache.problems());
        }
        self.add("index.warm_start", warm_start(config));
        if let Some(remote) = &index.remote {
            self.add("index.remote", remote.problems());
        }
    }

    fn check_routing(&mut self, config: &Config) {
        let routing = &config.routing;
        self.add("routing.policy", policy(config));
        self.add("routing.weights", weights(config));
        for (at, model) in config.models.iter().enumerate() {
            let problems = model.policy.iter().flat_map(PolicyConfig::problems);
            self.add("models", all_within(at, all_within("policy", problems)));
        }
        self.add("routing.load", load(config));
        self.add("routing.block_hash", routing.block_hash.load().err());
        self.add("routing.overload", routing.overload.problems());
        self.add("routing.disaggregation", disaggregation(config));
        self.add("routing.pool_routes", routing.pool_routes.problems());
        self.add("routing.model_rewrites", rewrites(config));
        self.add("queue", config.queue.problems());
        if let Some(sessions) = &config.sessions {
            self.add("sessions", sessions.problems());
        }
        if let Some(replicas) = &config.replicas {
            self.add("replicas", replicas.problems());
        }
    }

    fn check_requests(&mut self, config: &Config) {
        let requests = &config.requests;
        self.add("requests", requests.path_problems());
        self.add("requests.clients", requests.clients.problems());
        self.add("requests.limits", requests.limits.problems());
        self.add("gateway", config.gateway.problems());
        self.add("envoy", envoy(config));
        if let Some(pool) = &config.process.pool {
            self.add("process.pool", pool.problems());
        }
    }
}

/// Splits the dotted path of a key.
fn steps(path: &str) -> Vec<PathStep> {
    path.split('.').map(PathStep::from).collect()
}

fn envoy(config: &Config) -> Vec<Problem> {
    let models: Vec<_> = config
        .models
        .iter()
        .map(|model| model.name.clone())
        .collect();
    config
        .envoy
        .as_ref()
        .map(|envoy| envoy.problems(&models))
        .unwrap_or_default()
}

fn policy(config: &Config) -> Vec<Problem> {
    let Some(policy) = config.routing.policy else {
        return Vec::new();
    };
    let mut problems = policy.problems();
    problems.extend(policy.weight_conflict(&config.routing.weights));
    problems
}

fn weights(config: &Config) -> Option<Problem> {
    let weights = config.routing.weights.apply(Weights::default());
    let (name, text) = weights.validate().err()?;
    Some(Problem::of(name, format!("`{name}` {text}")))
}

fn disaggregation(config: &Config) -> Option<Problem> {
    let (name, text) = config.routing.disaggregation.validate().err()?;
    Some(Problem::at(
        [PathStep::from("conditional"), name.into()],
        format!("`{name}` {text}"),
    ))
}

fn rewrites(config: &Config) -> Vec<Problem> {
    let models = config.models.iter().flat_map(|model| {
        model
            .aliases
            .iter()
            .chain(&model.adapters)
            .chain([&model.name])
    });
    let known: HashSet<&str> = models.map(|name| name.as_str()).collect();
    let mut problems = config.routing.model_rewrites.problems();
    let unknown = config
        .routing
        .model_rewrites
        .targets()
        .filter(|(_, name)| !name.as_str().is_empty() && !known.contains(name.as_str()));
    problems.extend(unknown.map(|(path, name)| {
        let text = format!(
            "`{name}` is no model, alias or adapter under `models`; add it there, \
            or name one of these"
        );
        Problem::at(path, text)
    }));
    problems
}

fn load(config: &Config) -> Vec<Problem> {
    let is_useless = config.routing.load.prefill_decay && !config.routing.load.prefill_tokens;
    let text = "prefill tokens are not counted, so there is nothing to decay; set `prefill_tokens: \
        true`, or leave this out";
    is_useless
        .then(|| Problem::of("prefill_decay", text))
        .into_iter()
        .collect()
}

fn warm_start(config: &Config) -> Vec<Problem> {
    let sources = config.process.readiness.event_sources_timeout.get();
    config
        .index
        .warm_start
        .as_ref()
        .map(|warm_start| warm_start.problems(sources))
        .unwrap_or_default()
}
