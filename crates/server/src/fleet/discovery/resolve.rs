//! Resolution of configured workers: fills in defaults, derives one event source per rank, and
//! rejects configurations that would cause wrong routing.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

use warmroute_core::worker::{
    DpRank, EventSource, RankRange, SocketAttach, Worker, WorkerCapacity, WorkerEndpoint, WorkerId,
    WorkerRole,
};
use warmroute_settings::{PathStep, Problem, all_within, nearest};

use super::config::{KvEventsConfig, RankSource, WorkerConfig};
use super::zmq::ZmqEndpoint;
use super::{WorkerModel, labels};

/// Resolves the list. Returns the workers, or all errors with their paths in the list.
pub fn resolve(list: &[WorkerConfig], models: &[WorkerModel]) -> Result<Vec<Worker>, Vec<Problem>> {
    let mut problems = find_duplicates(list);
    let mut workers = Vec::with_capacity(list.len());
    for (at, config) in list.iter().enumerate() {
        match resolve_worker(config, models) {
            Ok(worker) => workers.push(worker),
            Err(found) => problems.extend(all_within(at, found)),
        }
    }
    if problems.is_empty() {
        problems = find_shared_sources(list, &workers);
        problems.extend(find_shared_bootstraps(list, &workers, models));
    }
    if problems.is_empty() {
        Ok(workers)
    } else {
        Err(problems)
    }
}

/// Resolves the valid entries and returns the errors of the others as text.
///
/// Used for discovered workers, where one invalid entry must not remove the rest.
pub fn resolve_each(
    mut list: Vec<WorkerConfig>,
    models: &[WorkerModel],
) -> (Vec<Worker>, Vec<String>) {
    let mut errors = Vec::new();
    remove_replaced(&mut list);
    loop {
        let problems = match resolve(&list, models) {
            Ok(workers) => return (workers, errors),
            Err(problems) => problems,
        };
        let mut is_invalid = vec![false; list.len()];
        for problem in problems {
            // Every problem has the index of an entry. If one had none, the first entry would be
            // rejected.
            let at = match problem.path.first() {
                Some(PathStep::At(at)) => *at,
                _ => 0,
            };
            is_invalid[at] = true;
            errors.push(format!("{}: {}", list[at].title(), problem.text));
        }
        let mut is_invalid = is_invalid.into_iter();
        list.retain(|_| !is_invalid.next().unwrap_or_default());
    }
}

/// Removes draining workers whose address belongs to another worker. Kubernetes may assign an
/// address to a new pod while the old one is still listed.
fn remove_replaced(list: &mut Vec<WorkerConfig>) {
    let active_endpoints: HashSet<WorkerEndpoint> = list
        .iter()
        .filter(|worker| !worker.draining && worker.via.is_direct())
        .map(|worker| worker.endpoint)
        .collect();
    list.retain(|worker| !worker.draining || !active_endpoints.contains(&worker.endpoint));
}

impl WorkerConfig {
    fn title(&self) -> String {
        self.name
            .clone()
            .unwrap_or_else(|| format!("the worker at {}", self.endpoint))
    }

    /// Fills in omitted values that follow from the models.
    pub fn fill_defaults(&mut self, models: &[WorkerModel]) {
        if let (None, [only]) = (&self.model, models) {
            self.model = Some(only.name.clone());
        }
    }
}

fn resolve_worker(config: &WorkerConfig, models: &[WorkerModel]) -> Result<Worker, Vec<Problem>> {
    let mut problems = Vec::new();
    let mut record =
        |result: Result<_, Problem>| result.map_err(|problem| problems.push(problem)).ok();
    let model = record(find_model(config, models));
    if config.endpoint.0.port() == 0 || config.endpoint.0.ip().is_unspecified() {
        let text = format!(
            "Envoy cannot send to {}; write the worker's own address and port",
            config.endpoint
        );
        problems.push(Problem::of("endpoint", text));
    }
    let ranks = check_ranks(config.data_parallel)
        .map_err(|problem| problems.push(problem))
        .ok();
    let sources = match (&config.kv_events, ranks) {
        (Some(events), Some(ranks)) => resolve_event_sources(events, ranks),
        _ => Ok(Vec::new()),
    };
    let event_sources = match sources {
        Ok(sources) => sources,
        Err(found) => {
            problems.extend(all_within("kv_events", found));
            Vec::new()
        }
    };
    let kv_transfer = labels::kv_transfer(config)
        .map_err(|problem| problems.push(problem))
        .unwrap_or_default();
    problems.extend(labels::problems(config));
    match (model, ranks) {
        (Some(model), Some(ranks)) if problems.is_empty() => Ok(Worker {
            id: config.id,
            name: config.name.clone(),
            endpoint: config.endpoint,
            via: config.via,
            model: model.name.clone(),
            role: config.role,
            block_size: model.block_size,
            ranks,
            capacity: WorkerCapacity {
                max_num_batched_tokens: config.max_num_batched_tokens,
                total_kv_blocks: config.total_kv_blocks,
            },
            taints: config.taints.clone(),
            adapters: config.adapters.clone(),
            topology: config.topology.clone(),
            kv_transfer,
            bootstrap: config.bootstrap.clone(),
            event_sources,
            draining: config.draining,
        }),
        _ => Err(problems),
    }
}

fn find_model<'m>(
    config: &WorkerConfig,
    models: &'m [WorkerModel],
) -> Result<&'m WorkerModel, Problem> {
    let names = || models.iter().map(|model| model.name.as_str());
    match (&config.model, models) {
        (None, [only]) => Ok(only),
        // A name that is configured twice is reported at the models.
        (None, [first, rest @ ..]) if rest.iter().all(|model| model.name == first.name) => {
            Ok(first)
        }
        (None, _) => {
            let all = names().collect::<Vec<_>>().join(", ");
            let text = format!("`model` is missing; with several models it must be one of {all}");
            Err(Problem::at([], text))
        }
        (Some(name), _) => {
            let found = models.iter().find(|model| model.name == *name);
            found.ok_or_else(|| {
                let hint = match nearest(name.as_str(), names()) {
                    Some(suggestion) => format!("did you mean `{suggestion}`?"),
                    None => format!("known are {}", names().collect::<Vec<_>>().join(", ")),
                };
                let text =
                    format!("no model of the name `{name}` is configured under `models`; {hint}");
                Problem::of("model", text)
            })
        }
    }
}

fn check_ranks(ranks: RankRange) -> Result<RankRange, Problem> {
    let RankRange { start, size } = ranks;
    let is_in_range = size.get() <= RankRange::MAX_SIZE && start.checked_add(size.get()).is_some();
    let text = format!(
        "{size} ranks from {start} exceed the limit of {} ranks",
        RankRange::MAX_SIZE
    );
    let out_of_range = || Problem::at(["data_parallel".into(), "size".into()], text);
    is_in_range.then_some(ranks).ok_or_else(out_of_range)
}

fn resolve_event_sources(
    events: &KvEventsConfig,
    ranks: RankRange,
) -> Result<Vec<EventSource>, Vec<Problem>> {
    let sources = match (&events.endpoint, &events.ranks[..]) {
        (Some(endpoint), []) => numbered_sources(events, endpoint, ranks)?,
        (None, []) => {
            let text = "neither `endpoint` nor `ranks` is set; set the endpoint of the engine, or \
                remove `kv_events`";
            return Err(vec![Problem::at([], text)]);
        }
        (Some(_), _) => {
            let text = "`endpoint` and `ranks` are both set; remove one";
            return Err(vec![Problem::of("endpoint", text)]);
        }
        (None, list) if list.len() != ranks.size.get() as usize => {
            let text = format!(
                "there are {} data-parallel ranks but {} sources; list one per rank",
                ranks.size,
                list.len()
            );
            return Err(vec![Problem::of("ranks", text)]);
        }
        (None, list) => list.to_vec(),
    };
    let listed = !events.ranks.is_empty();
    let mut problems = check_attachments(
        events.attach,
        if listed { &sources } else { &sources[..1] },
        listed,
    );
    if listed && events.replay_endpoint.is_some() {
        problems.push(Problem::of(
            "replay_endpoint",
            "with `ranks`, set `replay_endpoint` in each entry of `ranks`",
        ));
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    let source = |source: &RankSource| EventSource {
        endpoint: match events.attach {
            SocketAttach::Connect => source.endpoint.to_string(),
            SocketAttach::Bind => source.endpoint.to_bind(),
        },
        topic: events.topic.clone(),
        attach: events.attach,
        replay: source.replay_endpoint.as_ref().map(ZmqEndpoint::to_string),
    };
    Ok(sources.iter().map(source).collect())
}

/// Derives one source per rank by vLLM's rule: the port of a rank is the first port + rank.
fn numbered_sources(
    events: &KvEventsConfig,
    first: &ZmqEndpoint,
    ranks: RankRange,
) -> Result<Vec<RankSource>, Vec<Problem>> {
    let of_rank = |key: &str, endpoint: &ZmqEndpoint, DpRank(rank): DpRank| {
        endpoint.for_rank(rank).ok_or_else(|| {
            let reason = match endpoint {
                ZmqEndpoint::Tcp { port, .. } => {
                    format!("rank {rank} would use port {port} + {rank}, beyond 65535")
                }
                ZmqEndpoint::Ipc { .. } => {
                    format!("rank {rank} has no port to count on to in {endpoint}")
                }
            };
            vec![Problem::of(
                key,
                format!("{reason}; list the endpoint of each rank under `ranks`"),
            )]
        })
    };
    let source = |rank| {
        let replay = events
            .replay_endpoint
            .as_ref()
            .map(|replay| of_rank("replay_endpoint", replay, rank));
        Ok(RankSource {
            endpoint: of_rank("endpoint", first, rank)?,
            replay_endpoint: replay.transpose()?,
        })
    };
    ranks.iter().map(source).collect()
}

fn check_attachments(attach: SocketAttach, sources: &[RankSource], listed: bool) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (at, source) in sources.iter().enumerate() {
        let mut refuse = |key: &str, text: String| {
            let outer = listed.then(|| ["ranks".into(), PathStep::At(at)]);
            problems.push(Problem::at(
                outer.into_iter().flatten().chain([key.into()]),
                text,
            ));
        };
        if attach == SocketAttach::Connect && source.endpoint.is_wildcard() {
            let text = format!(
                "{} is a wildcard; write the address that the engine binds. (vLLM binds where its \
                own endpoint holds `*` or `::`, and otherwise connects: with an engine that \
                connects, write `attach: bind`)",
                source.endpoint
            );
            refuse("endpoint", text);
        }
        if let Some(replay) = source
            .replay_endpoint
            .as_ref()
            .filter(|replay| replay.is_wildcard())
        {
            let text = format!(
                "{replay} is a wildcard; write the address of the engine, which always binds this \
                endpoint"
            );
            refuse("replay_endpoint", text);
        } else if source.replay_endpoint.as_ref() == Some(&source.endpoint) {
            let text = format!(
                "{} is the `endpoint`, where events are published; the replay endpoint has a port \
                of its own (replay_endpoint of vLLM's --kv-events-config)",
                source.endpoint
            );
            refuse("replay_endpoint", text);
        }
    }
    problems
}

/// Returns an error for each worker id and endpoint that an earlier entry has. Only workers behind
/// one front end share an endpoint.
fn find_duplicates(list: &[WorkerConfig]) -> Vec<Problem> {
    let mut problems = find_repeated(list.iter().map(|worker| worker.id), "id", |id, first| {
        format!(
            "the id {id} is already used by entry {} of the list; ids must be unique",
            first + 1
        )
    });
    let direct: HashSet<WorkerEndpoint> = list
        .iter()
        .filter(|worker| worker.via.is_direct())
        .map(|worker| worker.endpoint)
        .collect();
    // The index of an entry makes an endpoint unique that it may share.
    let endpoints = list.iter().enumerate().map(|(at, worker)| {
        let may_share = !direct.contains(&worker.endpoint);
        (worker.endpoint, may_share.then_some(at))
    });
    problems.extend(find_repeated(
        endpoints,
        "endpoint",
        |(endpoint, _), first| {
            let owner = list[first].id;
            format!(
                "{endpoint} is already the endpoint of the worker {owner}; endpoints must be \
                unique, unless each of these workers has `via: front_end`"
            )
        },
    ));
    problems
}

fn find_repeated<T: Eq + Hash + Copy>(
    values: impl Iterator<Item = T>,
    key: &str,
    text: impl Fn(T, usize) -> String,
) -> Vec<Problem> {
    let mut seen: HashMap<T, usize> = HashMap::new();
    let mut problems = Vec::new();
    for (at, value) in values.enumerate() {
        match seen.get(&value) {
            Some(&first) => problems.push(Problem::at([at.into(), key.into()], text(value, first))),
            None => drop(seen.insert(value, at)),
        }
    }
    problems
}

/// Returns an error for each prefill worker that shares its bootstrap address with another one. A
/// decode worker would connect to the wrong one.
fn find_shared_bootstraps(
    list: &[WorkerConfig],
    workers: &[Worker],
    models: &[WorkerModel],
) -> Vec<Problem> {
    let uses_bootstrap = |worker: &Worker| {
        models
            .iter()
            .any(|model| model.uses_bootstrap && model.name == worker.model)
    };
    let mut owners: HashMap<(String, u16), WorkerId> = HashMap::new();
    let mut problems = Vec::new();
    for (at, worker) in workers.iter().enumerate() {
        if worker.role != WorkerRole::Prefill || !uses_bootstrap(worker) {
            continue;
        }
        let address = worker.bootstrap_address();
        let (host, port) = address.clone();
        let owner = *owners.entry(address).or_insert(worker.id);
        if owner == worker.id {
            continue;
        }
        let text = format!(
            "the worker {} has the bootstrap address {host}:{port}, which is already that of the \
            worker {owner}; give each engine a different `--disaggregation-bootstrap-port`, and \
            set it as `bootstrap: {{port: ..}}`",
            worker.id
        );
        let key = if list[at].bootstrap.is_some() {
            "bootstrap"
        } else {
            "endpoint"
        };
        problems.push(Problem::at([at.into(), key.into()], text));
    }
    problems
}

/// Returns an error for each rank that shares an event or replay endpoint with another one. Each
/// would be credited with the blocks of the other.
fn find_shared_sources(list: &[WorkerConfig], workers: &[Worker]) -> Vec<Problem> {
    let mut problems =
        find_shared_endpoints(list, workers, "endpoint", |source| Some(&source.endpoint));
    problems.extend(find_shared_endpoints(
        list,
        workers,
        "replay_endpoint",
        |source| source.replay.as_deref(),
    ));
    problems
}

fn find_shared_endpoints(
    list: &[WorkerConfig],
    workers: &[Worker],
    key: &str,
    endpoint: impl Fn(&EventSource) -> Option<&str>,
) -> Vec<Problem> {
    let mut owners: HashMap<&str, String> = HashMap::new();
    let mut problems = Vec::new();
    for (at, worker) in workers.iter().enumerate() {
        for (index, (rank, source)) in worker.ranks.iter().zip(&worker.event_sources).enumerate() {
            let owner = format!("{}/{rank}", worker.id);
            let Some(endpoint) = endpoint(source) else {
                continue;
            };
            if let Some(other) = owners.get(endpoint) {
                let text = format!(
                    "rank {owner} would use {endpoint}, which is already the source of {other}; \
                    each rank needs a separate endpoint"
                );
                let listed = list[at]
                    .kv_events
                    .as_ref()
                    .is_some_and(|events| !events.ranks.is_empty());
                let inner = if listed {
                    vec!["ranks".into(), index.into()]
                } else {
                    Vec::new()
                };
                let outer: [PathStep; 2] = [at.into(), "kv_events".into()];
                problems.push(Problem::at(
                    outer.into_iter().chain(inner).chain([key.into()]),
                    text,
                ));
                break;
            }
            owners.insert(endpoint, owner);
        }
    }
    problems
}
