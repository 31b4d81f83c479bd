//! Warnings about valid settings that are probably mistakes: phases or pools without workers, and
//! suspicious values. The process can serve with them, and the workers may change at any time, so
//! these are warnings and not errors.
//!
//! Decision 0044.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use serde::Serialize;
use warmroute_core::worker::{Worker, WorkerRole};
use warmroute_settings::ByteSize;

use super::{Config, ModelConfig};
use crate::fleet::discovery::kubernetes::PodsConfig;
use crate::prefill::PrefillMode;

/// Warning about a probable mistake.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// Subject: a model, a worker or a key.
    pub subject: String,
    /// Finding and its consequence.
    pub finding: String,
    /// Suggested change.
    pub fix: String,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.subject, self.finding, self.fix)
    }
}

impl Config {
    /// Returns the warnings about the configuration with these workers.
    pub fn advice(&self, workers: &[Worker]) -> Vec<Advice> {
        let of_models = self.models.iter().flat_map(|model| {
            let roles: Vec<WorkerRole> = workers
                .iter()
                .filter(|worker| worker.model == model.name)
                .map(|worker| worker.role)
                .collect();
            pools(model, &roles)
                .into_iter()
                .chain(ignored_condition(self, model))
        });
        let bootstraps = workers
            .iter()
            .filter_map(|worker| unused_bootstrap(self, worker));
        let front_ends = workers
            .iter()
            .filter_map(|worker| unusable_front_end(self, worker));
        let values = [
            short_bodies(self),
            long_deadline(self),
            trusted_open_listener(self),
        ]
        .into_iter()
        .flatten();
        let of_pools = routes_without_workers(self, workers)
            .into_iter()
            .chain(unrestricted_requests(self, workers))
            .chain(duplicate_selectors(self));
        of_models
            .chain(bootstraps)
            .chain(front_ends)
            .chain(of_pools)
            .chain(values)
            .collect()
    }

    fn prefill_mode(&self, worker: &Worker) -> Option<PrefillMode> {
        let model = self
            .models
            .iter()
            .find(|model| model.name == worker.model)?;
        prefill_mode(model)
    }
}

/// Body limits below this size are probably written without their unit.
const SHORT_BODY: ByteSize = ByteSize::kib(64);

/// `message_timeout` of the shipped Envoy files.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);

/// Warns about a small body limit.
fn short_bodies(config: &Config) -> Option<Advice> {
    let limit = config.requests.limits.max_body_size;
    (limit < SHORT_BODY).then(|| Advice {
        subject: "requests.limits.max_body_size".to_owned(),
        finding: format!(
            "{} bytes is less than many request bodies have; requests above the limit are routed \
            by load only",
            limit.0
        ),
        fix: "write for example 32MiB".to_owned(),
    })
}

/// Warns about a decision timeout above Envoy's message timeout.
fn long_deadline(config: &Config) -> Option<Advice> {
    let deadline = config.requests.limits.decision_timeout;
    (deadline.get() >= MESSAGE_TIMEOUT).then(|| Advice {
        subject: "requests.limits.decision_timeout".to_owned(),
        finding: format!(
            "{deadline} is not less than the message_timeout of the shipped Envoy files (1s), \
            after which Envoy continues without a response of warmroute"
        ),
        fix: "lower it, or set a higher `message_timeout` of the ext_proc filter".to_owned(),
    })
}

/// Warns about trusted clients on a listener that is open to all hosts. Clients that connect
/// without Envoy can send headers that Envoy would remove.
fn trusted_open_listener(config: &Config) -> Option<Advice> {
    let open = config.listeners.ext_proc.address.filter(|listen| {
        config.listeners.ext_proc.unprotected && !listen.ip().to_canonical().is_loopback()
    })?;
    config.requests.clients.trusted.then(|| Advice {
        subject: "requests.clients.trusted".to_owned(),
        finding: format!(
            "any client that reaches {open} can pin workers and set priorities, because \
            `listeners.ext_proc.unprotected` is true"
        ),
        fix: "set `listeners.ext_proc.tls.client_ca`, or allow only Envoy with a network \
            policy"
            .to_owned(),
    })
}

fn prefill_mode(model: &ModelConfig) -> Option<PrefillMode> {
    model.prefill.as_ref().map(|prefill| prefill.mode)
}

/// Warns about phases without a worker, and about prefill workers that receive no requests.
fn pools(model: &ModelConfig, roles: &[WorkerRole]) -> Option<Advice> {
    let has = |role| roles.contains(&role);
    let prefill = has(WorkerRole::Prefill);
    let decode = has(WorkerRole::Decode);
    let aggregated = has(WorkerRole::Aggregated);
    let (finding, fix) = match prefill_mode(model) {
        _ if roles.is_empty() => return None,
        None if prefill => (
            "its workers with `role: prefill` are only named in headers: without a sidecar or a \
            front end that reads these headers, they compute no prefills, but load is booked for \
            them",
            "set `prefill: {mode: call}` (vLLM, TensorRT-LLM) or `prefill: {mode: mirror}` \
            (SGLang) of the model, or `prefill: {mode: header}` if there is a sidecar or front end",
        ),
        Some(PrefillMode::Call) if !prefill => (
            "it has `prefill: {mode: call}`, but no worker with `role: prefill`: decode workers \
            compute every prompt",
            "set `role: prefill` for some of its workers, or remove `prefill`",
        ),
        Some(PrefillMode::Call) if !decode && !aggregated => (
            "all of its workers have `role: prefill`, so none can generate responses",
            "set `role: decode` for some of its workers",
        ),
        Some(PrefillMode::Mirror) if !prefill && decode => (
            "it has `prefill: {mode: mirror}`, but no worker with `role: prefill`: its decode \
            workers have no bootstrap partner, and its requests are rejected",
            "set `role: prefill` for some of its workers",
        ),
        Some(PrefillMode::Mirror) if prefill && !decode => (
            "it has `prefill: {mode: mirror}`, but no worker with `role: decode`: its prefill \
            workers have no bootstrap partner",
            "set `role: decode` for some of its workers",
        ),
        Some(PrefillMode::Mirror) if !prefill && !decode => (
            "it has `prefill: {mode: mirror}`, but its workers have no roles: none of them has a \
            bootstrap partner",
            "set `role: prefill` and `role: decode` for its workers, or remove `prefill`",
        ),
        _ => return None,
    };
    Some(Advice {
        subject: format!("model {}", model.name),
        finding: finding.to_owned(),
        fix: fix.to_owned(),
    })
}

/// Warns about a conditional prefill that a model ignores.
fn ignored_condition(config: &Config, model: &ModelConfig) -> Option<Advice> {
    let ignored = config.routing.disaggregation.conditional.is_some()
        && prefill_mode(model) == Some(PrefillMode::Mirror);
    ignored.then(|| Advice {
        subject: format!("model {}", model.name),
        finding: "`routing.disaggregation.conditional` does not apply to models with `prefill: \
            {mode: mirror}`: their decode workers cannot compute prompts, so every prompt goes to \
            a prefill worker"
            .to_owned(),
        fix: "remove it, unless it is meant for other models".to_owned(),
    })
}

/// Warns about a shared front end that does not learn the chosen worker.
fn unusable_front_end(config: &Config, worker: &Worker) -> Option<Advice> {
    if worker.via.is_direct() {
        return None;
    }
    let (finding, fix) = match config.prefill_mode(worker) {
        Some(PrefillMode::Call | PrefillMode::Mirror) => (
            format!(
                "its endpoint is a shared front end, and the model {} has a `prefill` that needs \
                the endpoint of each engine",
                worker.model
            ),
            "set `prefill: {mode: header}`",
        ),
        None | Some(PrefillMode::Header) if !config.gateway.routing_headers().name_workers() => (
            "its endpoint is a shared front end, and no routing header names the worker".to_owned(),
            "add `worker-id` or `dynamo` to `gateway.header_profiles`",
        ),
        None | Some(PrefillMode::Header) => return None,
    };
    Some(Advice {
        subject: format!("worker {}", worker.id),
        finding,
        fix: fix.to_owned(),
    })
}

/// Warns about `bootstrap` of a worker that never takes part in a bootstrap.
fn unused_bootstrap(config: &Config, worker: &Worker) -> Option<Advice> {
    worker.bootstrap.as_ref()?;
    let reason = match (worker.role, config.prefill_mode(worker)) {
        (WorkerRole::Prefill, Some(PrefillMode::Mirror)) => return None,
        (WorkerRole::Prefill, _) => format!(
            "the model {} has no `prefill: {{mode: mirror}}`",
            worker.model
        ),
        (role, _) => {
            format!("it has `role: {role}`, and only prefill workers accept bootstrap connections")
        }
    };
    Some(Advice {
        subject: format!("worker {}", worker.id),
        finding: format!("`bootstrap` has no effect: {reason}"),
        fix: "remove it, or add the missing setting".to_owned(),
    })
}

/// Warns about routes to pools without workers. Their requests are rejected.
fn routes_without_workers(config: &Config, workers: &[Worker]) -> Vec<Advice> {
    // A fleet without workers causes no warning: the workers file may be filled later.
    let mut pools: Vec<&str> = config.routing.pool_routes.pools().collect();
    pools.sort_unstable();
    pools.dedup();
    let without_workers = pools.into_iter().filter(|pool| {
        !workers.is_empty() && !workers.iter().any(|worker| worker.is_in_pool(pool))
    });
    let advice = |pool: &str| Advice {
        subject: "routing.pool_routes".to_owned(),
        finding: format!("no worker belongs to the pool `{pool}`, so its requests are rejected"),
        fix: match &config.workers.kubernetes {
            Some(kubernetes) => {
                let titles: Vec<String> = kubernetes
                    .pools
                    .iter()
                    .map(|pool| format!("`{}`", pool.title()))
                    .collect();
                format!(
                    "the pools of `workers.kubernetes` are {}",
                    titles.join(", ")
                )
            }
            None => format!("add the taint `pool={pool}` to its workers"),
        },
    };
    without_workers.map(advice).collect()
}

/// Warns about several pools without a route that restricts requests to one of them. Dynamic
/// metadata `pool` would restrict them too, but only Envoy's configuration shows whether Envoy
/// sends it.
fn unrestricted_requests(config: &Config, workers: &[Worker]) -> Option<Advice> {
    let of_kubernetes = config
        .workers
        .kubernetes
        .iter()
        .flat_map(|kubernetes| kubernetes.pools.iter().map(PodsConfig::title));
    let of_workers = workers
        .iter()
        .flat_map(|worker| worker.pools().map(str::to_owned));
    let pools: BTreeSet<String> = of_kubernetes.chain(of_workers).collect();
    let pool_routes = &config.routing.pool_routes;
    let unnamed: Vec<String> = pools
        .iter()
        .filter(|pool| pool_routes.pools().all(|named| named != *pool))
        .map(|pool| format!("`{pool}`"))
        .collect();
    // A header can select any pool, and a catch-all rule applies to every request.
    if pools.len() < 2
        || pool_routes.header.is_some()
        || pool_routes.has_catch_all()
        || unnamed.is_empty()
    {
        return None;
    }
    let unnamed = unnamed.join(", ");
    let finding = if pool_routes.is_empty() {
        format!(
            "the workers belong to the pools {unnamed}, and `routing.pool_routes` is empty: a \
            request may be routed to a worker of another pool than that of its route"
        )
    } else {
        format!(
            "`routing.pool_routes` does not name the pools {unnamed}: their requests may be routed \
            to a worker of any pool"
        )
    };
    Some(Advice {
        subject: "routing.pool_routes".to_owned(),
        finding,
        fix:
            "create a Service in front of warmroute for each pool and set `routing: {pool_routes: \
            {authorities: {<service>.<namespace>: <pool>}}}`, or set `header` or `rules` of \
            `routing.pool_routes`. If Envoy sends the dynamic metadata `pool`, add a rule for \
            requests without it"
                .to_owned(),
    })
}

/// Warns about entries whose pods are already selected by an earlier entry. A worker belongs to the
/// first entry, so later ones have no effect.
fn duplicate_selectors(config: &Config) -> Vec<Advice> {
    let pools = config
        .workers
        .kubernetes
        .as_ref()
        .map(|kubernetes| &kubernetes.pools[..])
        .unwrap_or_default();
    let duplicates = pools
        .iter()
        .enumerate()
        .filter(|(at, pool)| pools[..*at].iter().any(|other| other.includes(pool)));
    let advice = |(_, pool): (usize, &PodsConfig)| Advice {
        subject: "workers.kubernetes".to_owned(),
        finding: format!(
            "an earlier entry already selects the pods of `{}`, so this one has no effect",
            pool.title()
        ),
        fix: "remove one of them".to_owned(),
    };
    duplicates.map(advice).collect()
}
