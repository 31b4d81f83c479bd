//! Settings that contradict each other.

use std::net::SocketAddr;

use warmroute_core::worker::WorkerRole;
use warmroute_settings::Problem;

use super::steps;
use crate::config::Config;

/// Returns a problem for each threshold on prefill tokens if these are not counted.
pub(super) fn uncounted_thresholds(config: &Config) -> Vec<Problem> {
    if config.routing.load.prefill_tokens {
        return Vec::new();
    }
    let overload = &config.routing.overload;
    let queue = &config.queue;
    let conditional = config.routing.disaggregation.conditional.as_ref();
    let found = vec![
        (
            steps("routing.overload.prefill_tokens_threshold"),
            overload.prefill_tokens_threshold.is_some(),
        ),
        (
            steps("routing.overload.prefill_tokens_threshold_frac"),
            overload.prefill_tokens_threshold_frac.is_some(),
        ),
        (
            steps("queue.prefill_busy_threshold"),
            queue.prefill_busy_threshold.is_some(),
        ),
        (
            steps("queue.prefill_busy_threshold_frac"),
            queue.prefill_busy_threshold_frac.is_some(),
        ),
        (
            steps("routing.disaggregation.conditional.prefill_busy_threshold"),
            conditional.is_some_and(|conditional| conditional.prefill_busy_threshold.is_some()),
        ),
    ];
    let text = "prefill tokens are not counted, so this is never reached; set \
        `routing.load.prefill_tokens: true`, or leave it out";
    found
        .into_iter()
        .filter(|(_, given)| *given)
        .map(|(path, _)| Problem::at(path, text))
        .collect()
}

/// Returns a problem for each setting that another section makes useless or harmful.
pub(super) fn useless_settings(config: &Config) -> Vec<Problem> {
    let mut problems = Vec::new();
    if let Some(sessions) = &config.sessions
        && sessions.wait_timeout > config.queue.timeout
    {
        let text = format!(
            "{} is longer than `queue.timeout` ({}), after which the first request of a session is \
            routed or rejected; give at most as much",
            sessions.wait_timeout, config.queue.timeout
        );
        problems.push(Problem::at(steps("sessions.wait_timeout"), text));
    }
    if let Some(cache) = &config.index.shared_cache {
        if cache.timeout >= config.requests.limits.decision_timeout {
            let text = format!(
                "{} is not less than `requests.limits.decision_timeout` ({}), and Envoy waits for \
                both; the default is 20ms",
                cache.timeout, config.requests.limits.decision_timeout
            );
            problems.push(Problem::at(steps("index.shared_cache.timeout"), text));
        }
        let multiplier = config.routing.weights.shared_cache_multiplier;
        if multiplier.is_none_or(|multiplier| multiplier == 0.0) && !config.requests.clients.trusted
        {
            let text = "its hits do not count; set `routing.weights.shared_cache_multiplier`, \
                usually to 0.5";
            problems.push(Problem::at(steps("index.shared_cache"), text));
        }
    }
    for (at, model) in config.models.iter().enumerate() {
        let Some(tokens) = &model.remote_tokenizer else {
            continue;
        };
        if tokens.timeout >= config.requests.limits.decision_timeout {
            let text = format!(
                "{} is not less than `requests.limits.decision_timeout` ({}), and Envoy waits for \
                both; the default is 300ms",
                tokens.timeout, config.requests.limits.decision_timeout
            );
            let path = [
                "models".into(),
                at.into(),
                "remote_tokenizer".into(),
                "timeout".into(),
            ];
            problems.push(Problem::at(path, text));
        }
    }
    problems
}

/// Returns a problem for each setting of prefill and decode that cannot take effect.
pub(super) fn disaggregation(config: &Config) -> Vec<Problem> {
    let mut problems = Vec::new();
    if config.routing.disaggregation.conditional.is_some() && config.has_dynamo_prefills() {
        let text = "front ends of Dynamo (`gateway.header_profiles` has `dynamo`) reject a request \
            whose decode worker should compute the prompt; leave this out";
        problems.push(Problem::at(
            steps("routing.disaggregation.conditional"),
            text,
        ));
    }
    let workers = config
        .workers
        .list
        .as_deref()
        .filter(|workers| !workers.is_empty());
    if config.routing.disaggregation.enforce
        && workers.is_some_and(|list| list.iter().all(|worker| worker.role != WorkerRole::Prefill))
    {
        let text = "no worker has `role: prefill`, so no prefill worker can be chosen; add one, or \
            leave this out";
        problems.push(Problem::at(steps("routing.disaggregation.enforce"), text));
    }
    problems
}

/// Returns a problem for each setting that contradicts `index.remote` or `index.serve`.
pub(super) fn remote_index(config: &Config) -> Vec<Problem> {
    let mut problems = Vec::new();
    if config.index.serve && config.listeners.api.is_none() {
        let text = "the index is served by `listeners.api`, which is not given; give `listeners: \
            {api: {address: ...}}`, or leave this out";
        problems.push(Problem::at(steps("index.serve"), text));
    }
    let Some(remote) = &config.index.remote else {
        return problems;
    };
    if config.index.serve {
        let text = "a process with a remote index keeps none that it could serve; keep either \
            `index.serve` or this";
        problems.push(Problem::at(steps("index.remote"), text));
    }
    if config.index.warm_start.is_some() {
        let text =
            "a process with a remote index keeps none that it could start from; leave this out";
        problems.push(Problem::at(steps("index.warm_start"), text));
    }
    if remote.timeout >= config.requests.limits.decision_timeout {
        let text = format!(
            "{} is not less than `requests.limits.decision_timeout` ({}), and Envoy waits for \
            both; the default is 10ms",
            remote.timeout, config.requests.limits.decision_timeout
        );
        problems.push(Problem::at(steps("index.remote.timeout"), text));
    }
    problems
}

/// Returns a problem for each listener whose address collides with an earlier one.
pub(super) fn addresses(config: &Config) -> Vec<Problem> {
    let xds = config.envoy.as_ref().and_then(|envoy| envoy.xds.as_ref());
    let listeners: [(&str, Option<SocketAddr>); 5] = [
        (
            "listeners.ext_proc.address",
            config.listeners.ext_proc.address,
        ),
        (
            "listeners.admin.address",
            Some(config.listeners.admin.address),
        ),
        (
            "listeners.api.address",
            config.listeners.api.as_ref().map(|api| api.address),
        ),
        (
            "listeners.ext_proc.health_address",
            config.listeners.ext_proc.health_address,
        ),
        ("envoy.xds.address", xds.and_then(|xds| xds.address)),
    ];
    let given: Vec<(&str, SocketAddr)> = listeners
        .into_iter()
        .filter_map(|(key, at)| Some((key, at?)))
        .collect();
    let mut problems = Vec::new();
    for (index, (key, listen)) in given.iter().enumerate() {
        for (other_key, other) in given[..index]
            .iter()
            .filter(|(_, other)| collide(*listen, *other))
        {
            let text = format!(
                "`{key}` ({listen}) and `{other_key}` ({other}) have the same port; choose another \
                one"
            );
            problems.push(Problem::at(steps(key), text));
        }
    }
    problems
}

/// Returns whether two listeners would bind the same port. Port 0 requests a free port from the
/// system.
fn collide(a: SocketAddr, b: SocketAddr) -> bool {
    let overlap = a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified();
    a.port() != 0 && a.port() == b.port() && overlap
}
