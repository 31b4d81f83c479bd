//! What the sections must agree on. Pure but for the look whether named files exist.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;

use super::model::missing;
use super::{Config, ModelConfig};
use crate::discovery;
use crate::discovery::config::WorkerConfig;
use crate::discovery::dns::DnsConfig;
use crate::discovery::kubernetes::PodsConfig;
use crate::settings::{Problem, Step, has_credentials};
use crate::worker::Role;

/// Every mistake of meaning.
pub(super) fn problems(config: &Config) -> Vec<Problem> {
    let sections = [
        ("listen", config.listen.problems()),
        ("admin", config.admin.problems()),
        (
            "api",
            config
                .api
                .as_ref()
                .map(|api| api.problems())
                .unwrap_or_default(),
        ),
        (
            "pool",
            config
                .pool
                .as_ref()
                .map(|pool| pool.problems())
                .unwrap_or_default(),
        ),
        ("limits", config.limits.problems()),
        ("reload", config.reload.problems()),
        ("discovery", config.discovery.problems()),
        ("schedule", weights(config).into_iter().collect()),
        (
            "tracking_hash",
            config.tracking_hash.load().err().into_iter().collect(),
        ),
        ("load", load(config)),
        ("overload", config.overload.problems()),
        ("health", config.health.problems()),
        ("index", config.index.problems()),
        ("index_trust", config.index_trust.problems()),
        ("kv_events", config.kv_events.problems()),
        ("queue", config.queue.problems()),
        (
            "disaggregation",
            disaggregation(config).into_iter().collect(),
        ),
        (
            "sessions",
            config
                .sessions
                .as_ref()
                .map(|sessions| sessions.problems())
                .unwrap_or_default(),
        ),
        (
            "replicas",
            config
                .replicas
                .as_ref()
                .map(|replicas| replicas.problems())
                .unwrap_or_default(),
        ),
        ("takeover", takeover(config)),
        (
            "use_remote_index",
            config
                .use_remote_index
                .as_ref()
                .map(|remote| remote.problems())
                .unwrap_or_default(),
        ),
        ("approximate", config.approximate.problems()),
        (
            "shared_cache",
            config
                .shared_cache
                .as_ref()
                .map(|cache| cache.problems())
                .unwrap_or_default(),
        ),
        ("learn", config.learn.problems()),
        ("engines", config.engines.problems()),
        ("self_test", config.self_test.problems()),
        ("paths", config.paths.problems()),
        ("clients", config.clients.problems()),
        ("confine", config.confine.problems()),
        ("rewrites", rewrites(config)),
        ("gateway", config.gateway.problems()),
        ("envoy", envoy(config)),
    ];
    let mut problems: Vec<_> = sections
        .into_iter()
        .flat_map(|(key, found)| found.into_iter().map(move |problem| problem.within(key)))
        .collect();
    problems.extend(uncounted(config));
    problems.extend(without_use(config));
    problems.extend(index(config));
    problems.extend(addresses(config));
    problems.extend(models(&config.models));
    problems.extend(workers(config));
    problems.extend(files(config));
    with_credentials_first(problems, credentials(config))
}

/// Addresses that hold a password.
fn credentials(config: &Config) -> Vec<Problem> {
    let mut urls: Vec<(Vec<Step>, &str)> = Vec::new();
    if let Some(url) = config
        .envoy
        .as_ref()
        .and_then(|envoy| envoy.admin.as_deref())
    {
        urls.push((vec!["envoy".into(), "admin".into()], url));
    }
    if let Some(cache) = &config.shared_cache {
        urls.push((vec!["shared_cache".into(), "url".into()], &cache.url));
    }
    for (at, url) in config
        .use_remote_index
        .iter()
        .flat_map(|remote| remote.servers.iter().enumerate())
    {
        urls.push((
            vec!["use_remote_index".into(), "servers".into(), at.into()],
            url,
        ));
    }
    if let Some(url) = config
        .takeover
        .as_ref()
        .and_then(|takeover| takeover.from.as_deref())
    {
        urls.push((vec!["takeover".into(), "from".into()], url));
    }
    for (at, model) in config.models.iter().enumerate() {
        for (nth, url) in model
            .engine_tokens
            .iter()
            .flat_map(|tokens| tokens.urls.iter().enumerate())
        {
            urls.push((
                vec![
                    "models".into(),
                    at.into(),
                    "engine_tokens".into(),
                    "urls".into(),
                    nth.into(),
                ],
                url,
            ));
        }
    }
    let text = "an address is shown on pages and in the log, so it may not hold a password; write it without `user:password@`";
    urls.into_iter()
        .filter(|(_, url)| has_credentials(url))
        .map(|(place, _)| Problem::at(place, text))
        .collect()
}

/// Drops the other problems of an address with a password, because they would quote it.
fn with_credentials_first(mut problems: Vec<Problem>, credentials: Vec<Problem>) -> Vec<Problem> {
    problems.retain(|problem| credentials.iter().all(|other| other.trail != problem.trail));
    problems.extend(credentials);
    problems
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

fn weights(config: &Config) -> Option<Problem> {
    let (name, text) = config.schedule.validate().err()?;
    Some(Problem::of(name, format!("`{name}` {text}")))
}

fn disaggregation(config: &Config) -> Option<Problem> {
    let (name, text) = config.disaggregation.validate().err()?;
    Some(Problem::at(
        [Step::from("conditional"), name.into()],
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
    let mut problems = config.rewrites.problems();
    let unknown = config
        .rewrites
        .targets()
        .filter(|(_, name)| !name.as_str().is_empty() && !known.contains(name.as_str()));
    problems.extend(unknown.map(|(place, name)| {
        let text = format!("`{name}` is no model, alias or adapter under `models`; add it there, or name one of these");
        Problem::at(place, text)
    }));
    problems
}

fn load(config: &Config) -> Vec<Problem> {
    let shrinks = config.load.prefill_durations && !config.load.prefill_tokens;
    let text = "prefill tokens are not counted, so nothing would shrink; set `prefill_tokens: true`, or leave this out";
    shrinks
        .then(|| Problem::of("prefill_durations", text))
        .into_iter()
        .collect()
}

/// Thresholds on what is not counted.
fn uncounted(config: &Config) -> Vec<Problem> {
    if config.load.prefill_tokens {
        return Vec::new();
    }
    let (overload, queue) = (&config.overload, &config.queue);
    let conditional = config.disaggregation.conditional.as_ref();
    let mut found = vec![
        (
            vec![Step::from("overload"), "prefill_tokens".into()],
            overload.prefill_tokens.is_some(),
        ),
        (
            vec!["overload".into(), "prefill_tokens_fraction".into()],
            overload.prefill_tokens_fraction.is_some(),
        ),
        (
            vec!["queue".into(), "prefill_busy_threshold".into()],
            queue.prefill_busy_threshold.is_some(),
        ),
        (
            vec!["queue".into(), "prefill_busy_threshold_frac".into()],
            queue.prefill_busy_threshold_frac.is_some(),
        ),
        (
            vec![
                "disaggregation".into(),
                "conditional".into(),
                "prefill_busy_threshold".into(),
            ],
            conditional.is_some_and(|conditional| conditional.prefill_busy_threshold.is_some()),
        ),
    ];
    for (at, class) in queue.classes.iter().enumerate() {
        let place = |key: &str| vec!["queue".into(), "classes".into(), at.into(), key.into()];
        found.push((
            place("prefill_busy_threshold"),
            class.prefill_busy_threshold.is_some(),
        ));
        found.push((
            place("prefill_busy_threshold_frac"),
            class.prefill_busy_threshold_frac.is_some(),
        ));
    }
    let text = "prefill tokens are not counted, so this is never reached; set `load.prefill_tokens: true`, or leave it out";
    found
        .into_iter()
        .filter(|(_, given)| *given)
        .map(|(trail, _)| Problem::at(trail, text))
        .collect()
}

/// What other sections make useless or harmful.
fn without_use(config: &Config) -> Vec<Problem> {
    let mut problems = Vec::new();
    if let Some(sessions) = &config.sessions
        && sessions.wait > config.queue.deadline
    {
        let text = format!(
            "{} is longer than `queue.deadline` ({}), by when the first request of a session is routed or refused; give at \
             most as much",
            sessions.wait, config.queue.deadline
        );
        problems.push(Problem::at([Step::from("sessions"), "wait".into()], text));
    }
    if let Some(cache) = &config.shared_cache {
        if cache.timeout >= config.limits.exchange_deadline {
            let text = format!(
                "{} is not less than `limits.exchange_deadline` ({}), and Envoy waits for both; the default is 20ms",
                cache.timeout, config.limits.exchange_deadline
            );
            problems.push(Problem::at(
                [Step::from("shared_cache"), "timeout".into()],
                text,
            ));
        }
        if config.schedule.shared_cache_multiplier == 0.0 && !config.clients.trusted {
            let text = "its hits are worth nothing; set `schedule.shared_cache_multiplier`, usually to 0.5";
            problems.push(Problem::of("shared_cache", text));
        }
    }
    for (at, model) in config.models.iter().enumerate() {
        let Some(tokens) = &model.engine_tokens else {
            continue;
        };
        if tokens.deadline >= config.limits.exchange_deadline {
            let text = format!(
                "{} is not less than `limits.exchange_deadline` ({}), and Envoy waits for both; the default is 300ms",
                tokens.deadline, config.limits.exchange_deadline
            );
            let place = [
                "models".into(),
                at.into(),
                "engine_tokens".into(),
                "deadline".into(),
            ];
            problems.push(Problem::at(place, text));
        }
    }
    let workers = config
        .workers
        .as_deref()
        .filter(|workers| !workers.is_empty());
    if config.disaggregation.enforce
        && workers.is_some_and(|list| list.iter().all(|worker| worker.role != Role::Prefill))
    {
        let text = "no worker has `role: prefill`, so every request would be refused; add one, or leave this out";
        problems.push(Problem::at(
            [Step::from("disaggregation"), "enforce".into()],
            text,
        ));
    }
    problems
}

/// Who keeps the index, and who does not.
fn index(config: &Config) -> Vec<Problem> {
    let mut problems = Vec::new();
    if config.serve_index && config.api.is_none() {
        let text = "it is served where `api` listens, and that is not there; give `api: {listen: ...}`, or leave this out";
        problems.push(Problem::of("serve_index", text));
    }
    let Some(remote) = &config.use_remote_index else {
        return problems;
    };
    if config.serve_index {
        let text = "who asks others keeps no index that could be served; keep either `serve_index` or this";
        problems.push(Problem::of("use_remote_index", text));
    }
    if config.takeover.is_some() {
        let text = "who asks others for the index keeps none that could be copied; leave this out";
        problems.push(Problem::of("takeover", text));
    }
    if remote.deadline >= config.limits.exchange_deadline {
        let text = format!(
            "{} is not less than `limits.exchange_deadline` ({}), and Envoy waits for both; the default is 10ms",
            remote.deadline, config.limits.exchange_deadline
        );
        problems.push(Problem::at(
            [Step::from("use_remote_index"), "deadline".into()],
            text,
        ));
    }
    problems
}

fn addresses(config: &Config) -> Vec<Problem> {
    let xds = config.envoy.as_ref().and_then(|envoy| envoy.xds.as_ref());
    let listeners: [(&[&str], Option<SocketAddr>); 5] = [
        (&["listen", "tcp"], config.listen.tcp),
        (&["admin", "listen"], Some(config.admin.listen)),
        (
            &["api", "listen"],
            config.api.as_ref().map(|api| api.listen),
        ),
        (&["listen", "health"], config.listen.health),
        (&["envoy", "xds", "listen"], xds.and_then(|xds| xds.listen)),
    ];
    let given: Vec<(&[&str], SocketAddr)> = listeners
        .into_iter()
        .filter_map(|(key, at)| Some((key, at?)))
        .collect();
    let mut problems = Vec::new();
    for (nth, (key, listen)) in given.iter().enumerate() {
        for (by, other) in given[..nth]
            .iter()
            .filter(|(_, other)| collide(*listen, *other))
        {
            let text = format!(
                "{listen} is taken by `{}` ({other}) already; choose another port",
                by.join(".")
            );
            problems.push(Problem::at(key.iter().copied().map(Step::from), text));
        }
    }
    problems
}

/// Whether two listeners would fight for a port. Port 0 asks the system for a free one.
fn collide(a: SocketAddr, b: SocketAddr) -> bool {
    let overlap = a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified();
    a.port() != 0 && a.port() == b.port() && overlap
}

fn models(models: &[ModelConfig]) -> Vec<Problem> {
    let mut problems = Vec::new();
    if models.is_empty() {
        problems.push(Problem::of(
            "models",
            "no model is given; name at least one, with its tokenizer",
        ));
    }
    let names = models
        .iter()
        .enumerate()
        .map(|(at, model)| (at, "name", None, &model.name));
    let aliases = models.iter().enumerate().flat_map(|(at, model)| {
        model
            .aliases
            .iter()
            .enumerate()
            .map(move |(nth, alias)| (at, "aliases", Some(nth), alias))
    });
    let adapters = models.iter().enumerate().flat_map(|(at, model)| {
        model
            .adapters
            .iter()
            .enumerate()
            .map(move |(nth, adapter)| (at, "adapters", Some(nth), adapter))
    });
    let mut owners: HashMap<&str, &str> = HashMap::new();
    for (at, key, nth, name) in names.chain(aliases).chain(adapters) {
        let owner = models[at].name.as_str();
        if let Some(taken) = owners.insert(name.as_str(), owner) {
            let text = format!(
                "`{name}` already names the model {taken}; every name, alias and adapter must lead to one model"
            );
            let steps = ["models".into(), at.into(), key.into()]
                .into_iter()
                .chain(nth.map(Step::from));
            problems.push(Problem::at(steps, text));
        }
    }
    for (at, model) in models.iter().enumerate() {
        problems.extend(
            model
                .problems()
                .into_iter()
                .map(|problem| problem.within(at).within("models")),
        );
    }
    problems
}

fn takeover(config: &Config) -> Vec<Problem> {
    let sources = config.readiness.event_sources_deadline.get();
    config
        .takeover
        .as_ref()
        .map(|takeover| takeover.problems(sources))
        .unwrap_or_default()
}

fn workers(config: &Config) -> Vec<Problem> {
    let mut problems = Vec::new();
    let sources = [
        ("workers", config.workers.is_some()),
        ("workers_file", config.workers_file.is_some()),
        ("dns", !config.dns.is_empty()),
        ("kubernetes", config.kubernetes.is_some()),
    ];
    let given: Vec<&str> = sources
        .into_iter()
        .filter(|(_, is_given)| *is_given)
        .map(|(key, _)| key)
        .collect();
    match (&given[..], &config.workers) {
        ([], _) => {
            let text = "there are no workers; list them under `workers`, name a `workers_file`, or say under `dns` or `kubernetes` how they are found";
            problems.push(Problem::at([], text));
        }
        ([first, second, ..], _) => {
            problems.push(Problem::of(
                first,
                format!("`{first}` and `{second}` are both given; keep one"),
            ));
        }
        (_, Some(list)) if list.is_empty() => {
            problems.push(Problem::of(
                "workers",
                "the list is empty; list at least one worker or name a `workers_file`",
            ));
        }
        (_, Some(list)) if list.len() < config.readiness.min_initial_workers as usize => {
            let text = format!(
                "readiness waits for {} workers but the list has {}, so it would never come; lower this or list more",
                config.readiness.min_initial_workers,
                list.len()
            );
            problems.push(Problem::at(
                [Step::from("readiness"), "min_initial_workers".into()],
                text,
            ));
        }
        _ => {}
    }
    if config.models.is_empty() {
        // Whatever the workers say of their model would be wrong only because of that.
        return problems;
    }
    let found = config.fixed_workers().err().unwrap_or_default();
    problems.extend(found.into_iter().map(|problem| problem.within("workers")));
    problems.extend(finders(config));
    problems
}

/// Mistakes of finding workers: those of each source, and those that every worker found by it would have.
fn finders(config: &Config) -> Vec<Problem> {
    let models = config.served_models();
    let of_sample = |sample: &WorkerConfig| {
        let found = discovery::resolve(std::slice::from_ref(sample), &models)
            .err()
            .unwrap_or_default();
        let within = |mut problem: Problem| {
            // Its number in the list of one.
            problem.trail.remove(0);
            problem.within("worker")
        };
        found.into_iter().map(within).collect::<Vec<_>>()
    };
    let of_name = |(at, name): (usize, &DnsConfig)| {
        let problems = name.problems().into_iter().chain(of_sample(&name.sample()));
        problems
            .map(move |problem| problem.within(at).within("dns"))
            .collect::<Vec<_>>()
    };
    let mut problems: Vec<Problem> = config.dns.iter().enumerate().flat_map(of_name).collect();
    let Some(kubernetes) = &config.kubernetes else {
        return problems;
    };
    let of_pool = |(at, pool): (usize, &PodsConfig)| {
        of_sample(&pool.sample())
            .into_iter()
            .map(move |problem| problem.within(at).within("pools"))
            .collect::<Vec<_>>()
    };
    let pools = kubernetes.pools.iter().enumerate().flat_map(of_pool);
    problems.extend(
        kubernetes
            .problems()
            .into_iter()
            .chain(pools)
            .map(|problem| problem.within("kubernetes")),
    );
    problems
}

fn files(config: &Config) -> Vec<Problem> {
    let mut problems = Vec::new();
    if let Some(file) = &config.workers_file {
        if !file.is_file() {
            problems.push(Problem::of("workers_file", missing(file)));
        }
        if config
            .envoy
            .as_ref()
            .is_some_and(|envoy| envoy.endpoints_file.as_ref() == Some(file))
        {
            let text =
                "this is the `workers_file`, which would be overwritten; choose another name";
            problems.push(Problem::at(
                [Step::from("envoy"), "endpoints_file".into()],
                text,
            ));
        }
    }
    problems
}
