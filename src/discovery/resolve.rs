//! From the list an operator writes to workers: defaults filled in, event sources counted out per rank, and everything
//! refused that would route wrongly later.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

use super::ServedModel;
use super::config::{BootstrapConfig, DataParallel, KvEventsConfig, RankSource, WorkerConfig};
use super::labels;
use super::zmq::ZmqEndpoint;
use crate::settings::{Problem, Step, nearest};
use crate::worker::{
    Attach, Bootstrap, Capacity, DpRank, Endpoint, EventSource, Ranks, Role, Worker, WorkerId,
};

/// The workers, or every mistake, each with its trail from the list.
pub fn resolve(list: &[WorkerConfig], models: &[ServedModel]) -> Result<Vec<Worker>, Vec<Problem>> {
    let mut problems = duplicates(list);
    let mut workers = Vec::with_capacity(list.len());
    for (at, config) in list.iter().enumerate() {
        match worker(config, models) {
            Ok(worker) => workers.push(worker),
            Err(found) => problems.extend(found.into_iter().map(|problem| problem.within(at))),
        }
    }
    if problems.is_empty() {
        problems = shared_sources(list, &workers);
        problems.extend(shared_meetings(list, &workers, models));
    }
    if problems.is_empty() {
        Ok(workers)
    } else {
        Err(problems)
    }
}

/// The workers of those entries that have no mistake, and the mistakes of the others. For entries that nobody wrote: one that is
/// wrong is no reason to do without the rest.
pub fn resolve_each(
    mut list: Vec<WorkerConfig>,
    models: &[ServedModel],
) -> (Vec<Worker>, Vec<String>) {
    let mut mistakes = Vec::new();
    remove_replaced(&mut list);
    loop {
        let problems = match resolve(&list, models) {
            Ok(workers) => return (workers, mistakes),
            Err(problems) => problems,
        };
        let mut wrong = vec![false; list.len()];
        for problem in problems {
            // Every problem is one of an entry; if not, nobody would be left to blame.
            let at = match problem.trail.first() {
                Some(Step::At(at)) => *at,
                _ => 0,
            };
            wrong[at] = true;
            mistakes.push(format!("{}: {}", list[at].title(), problem.text));
        }
        let mut wrong = wrong.into_iter();
        list.retain(|_| !wrong.next().unwrap_or_default());
    }
}

/// Removes draining workers whose address another worker has taken. Kubernetes gives an address to a new pod while the old one is
/// still listed.
fn remove_replaced(list: &mut Vec<WorkerConfig>) {
    let in_use: HashSet<Endpoint> = list
        .iter()
        .filter(|worker| !worker.draining)
        .map(|worker| worker.endpoint)
        .collect();
    list.retain(|worker| !worker.draining || !in_use.contains(&worker.endpoint));
}

impl WorkerConfig {
    fn title(&self) -> String {
        self.name
            .clone()
            .unwrap_or_else(|| format!("the worker at {}", self.endpoint))
    }

    /// Writes down what is left out and follows from the models.
    pub fn fill(&mut self, models: &[ServedModel]) {
        if let (None, [only]) = (&self.model, models) {
            self.model = Some(only.name.clone());
        }
        let model = models
            .iter()
            .find(|model| Some(&model.name) == self.model.as_ref());
        self.block_size = self.block_size.or(model.map(|model| model.block_size));
    }
}

fn worker(config: &WorkerConfig, models: &[ServedModel]) -> Result<Worker, Vec<Problem>> {
    let mut problems = Vec::new();
    let mut keep =
        |result: Result<_, Problem>| result.map_err(|problem| problems.push(problem)).ok();
    let model = keep(model(config, models));
    if config.endpoint.0.port() == 0 || config.endpoint.0.ip().is_unspecified() {
        let text = format!(
            "Envoy cannot send to {}; write the worker's own address and port",
            config.endpoint
        );
        problems.push(Problem::of("endpoint", text));
    }
    let ranks = ranks(config.data_parallel)
        .map_err(|problem| problems.push(problem))
        .ok();
    let sources = match (&config.kv_events, ranks) {
        (Some(events), Some(ranks)) => event_sources(events, ranks),
        _ => Ok(Vec::new()),
    };
    let event_sources = match sources {
        Ok(sources) => sources,
        Err(found) => {
            problems.extend(found.into_iter().map(|problem| problem.within("kv_events")));
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
            model: model.name.clone(),
            role: config.role,
            block_size: model.block_size,
            ranks,
            capacity: Capacity {
                max_num_batched_tokens: config.max_num_batched_tokens,
                total_kv_blocks: config.total_kv_blocks,
            },
            taints: config.taints.clone(),
            adapters: config.adapters.clone(),
            topology: config.topology.clone(),
            kv_transfer,
            bootstrap: config
                .bootstrap
                .clone()
                .map(|BootstrapConfig { host, port }| Bootstrap { host, port }),
            event_sources,
            draining: config.draining,
        }),
        _ => Err(problems),
    }
}

fn model<'m>(config: &WorkerConfig, models: &'m [ServedModel]) -> Result<&'m ServedModel, Problem> {
    let names = || models.iter().map(|model| model.name.as_str());
    let model = match (&config.model, models) {
        (None, [only]) => only,
        (None, _) => {
            let all = names().collect::<Vec<_>>().join(", ");
            return Err(Problem::at(
                [],
                format!("`model` is missing; with several models it must be one of {all}"),
            ));
        }
        (Some(name), _) => models
            .iter()
            .find(|model| model.name == *name)
            .ok_or_else(|| {
                let hint = match nearest(name.as_str(), names()) {
                    Some(meant) => format!("did you mean `{meant}`?"),
                    None => format!("known are {}", names().collect::<Vec<_>>().join(", ")),
                };
                Problem::of(
                    "model",
                    format!("no model of the name `{name}` is configured under `models`; {hint}"),
                )
            })?,
    };
    match config.block_size {
        Some(size) if size != model.block_size => {
            let text = format!(
                "block size {} differs from the {} of the model {}, so its blocks would never match; all workers of a \
                 model must run with one block size",
                size.0, model.block_size.0, model.name
            );
            Err(Problem::of("block_size", text))
        }
        _ => Ok(model),
    }
}

fn ranks(data_parallel: DataParallel) -> Result<Ranks, Problem> {
    let DataParallel { start, size } = data_parallel;
    let fits = size.get() <= Ranks::MOST && start.checked_add(size.get()).is_some();
    let text = format!(
        "{size} ranks from {start} are more than an engine has; at most {} are taken",
        Ranks::MOST
    );
    let wrong = || Problem::at(["data_parallel".into(), "size".into()], text);
    fits.then_some(Ranks { start, size }).ok_or_else(wrong)
}

fn event_sources(events: &KvEventsConfig, ranks: Ranks) -> Result<Vec<EventSource>, Vec<Problem>> {
    let sources = match (&events.endpoint, &events.ranks[..]) {
        (Some(endpoint), []) => counted(events, endpoint, ranks)?,
        (None, []) => {
            let text = "neither `endpoint` nor `ranks` is given; say where the engine publishes, or leave out `kv_events`";
            return Err(vec![Problem::at([], text)]);
        }
        (Some(_), _) => {
            let text = "`endpoint` and `ranks` are both given; keep one";
            return Err(vec![Problem::of("endpoint", text)]);
        }
        (None, list) if list.len() != ranks.size.get() as usize => {
            let text = format!(
                "there are {} data-parallel ranks but {} sources; give one per rank",
                ranks.size,
                list.len()
            );
            return Err(vec![Problem::of("ranks", text)]);
        }
        (None, list) => list.to_vec(),
    };
    let listed = !events.ranks.is_empty();
    let mut problems = attachments(
        events.attach,
        if listed { &sources } else { &sources[..1] },
        listed,
    );
    if listed && events.replay.is_some() {
        problems.push(Problem::of(
            "replay",
            "`replay` belongs into each entry of `ranks` where `ranks` is given",
        ));
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    let source = |source: &RankSource| EventSource {
        endpoint: match events.attach {
            Attach::Connect => source.endpoint.to_string(),
            Attach::Bind => source.endpoint.to_bind(),
        },
        topic: events.topic.clone(),
        attach: events.attach,
        replay: source.replay.as_ref().map(ZmqEndpoint::to_string),
    };
    Ok(sources.iter().map(source).collect())
}

/// One source per rank by vLLM's rule, port + rank.
fn counted(
    events: &KvEventsConfig,
    first: &ZmqEndpoint,
    ranks: Ranks,
) -> Result<Vec<RankSource>, Vec<Problem>> {
    let of_rank = |key: &str, endpoint: &ZmqEndpoint, DpRank(rank): DpRank| {
        endpoint.of_rank(rank).ok_or_else(|| {
            let why = match endpoint {
                ZmqEndpoint::Tcp { port, .. } => {
                    format!("rank {rank} would use port {port} + {rank}, beyond 65535")
                }
                ZmqEndpoint::Ipc { .. } => {
                    format!("rank {rank} has no port to count on to in {endpoint}")
                }
            };
            vec![Problem::of(
                key,
                format!("{why}; list the endpoint of each rank under `ranks`"),
            )]
        })
    };
    let source = |rank| {
        let replay = events
            .replay
            .as_ref()
            .map(|replay| of_rank("replay", replay, rank));
        Ok(RankSource {
            endpoint: of_rank("endpoint", first, rank)?,
            replay: replay.transpose()?,
        })
    };
    ranks.iter().map(source).collect()
}

fn attachments(attach: Attach, sources: &[RankSource], listed: bool) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (at, source) in sources.iter().enumerate() {
        let mut refuse = |key: &str, text: String| {
            let outer = listed.then(|| ["ranks".into(), Step::At(at)]);
            problems.push(Problem::at(
                outer.into_iter().flatten().chain([key.into()]),
                text,
            ));
        };
        if attach == Attach::Connect && source.endpoint.is_wildcard() {
            let text = format!(
                "we cannot connect to the wildcard {}; write the address of the machine the engine binds on. \
                 (vLLM binds where its own endpoint holds `*` or `::`, and otherwise connects: with an engine that \
                 connects, write `attach: bind`)",
                source.endpoint
            );
            refuse("endpoint", text);
        }
        if let Some(replay) = source.replay.as_ref().filter(|replay| replay.is_wildcard()) {
            let text = format!(
                "we cannot connect to the wildcard {replay}; write the engine's address (it always binds here)"
            );
            refuse("replay", text);
        } else if source.replay.as_ref() == Some(&source.endpoint) {
            let text = format!(
                "{} is the `endpoint`, where events are published; the replay endpoint has a port of its own \
                 (replay_endpoint of vLLM's --kv-events-config)",
                source.endpoint
            );
            refuse("replay", text);
        }
    }
    problems
}

fn duplicates(list: &[WorkerConfig]) -> Vec<Problem> {
    let mut problems = repeated(list.iter().map(|worker| worker.id), "id", |id, first| {
        format!(
            "the id {id} is taken by the worker number {} of the list; ids must differ",
            first + 1
        )
    });
    problems.extend(repeated(list.iter().map(|worker| worker.endpoint), "endpoint", |endpoint, first| {
        let owner = list[first].id;
        format!("{endpoint} is the endpoint of the worker {owner} already; Envoy could not tell the two apart")
    }));
    problems
}

fn repeated<T: Eq + Hash + Copy>(
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

/// Who is to be met where somebody else is met as well meets nobody: the decode worker finds the other one.
fn shared_meetings(
    list: &[WorkerConfig],
    workers: &[Worker],
    models: &[ServedModel],
) -> Vec<Problem> {
    let meets = |worker: &Worker| {
        models
            .iter()
            .any(|model| model.meets && model.name == worker.model)
    };
    let mut owners: HashMap<(String, u16), WorkerId> = HashMap::new();
    let mut problems = Vec::new();
    for (at, worker) in workers.iter().enumerate() {
        if worker.role != Role::Prefill || !meets(worker) {
            continue;
        }
        let place = worker.meeting_place();
        let (host, port) = place.clone();
        let owner = *owners.entry(place).or_insert(worker.id);
        if owner == worker.id {
            continue;
        }
        let text = format!(
            "decode workers are to meet the worker {} at port {port} of {host}, where they meet the worker {owner} already; give \
             each engine a `--disaggregation-bootstrap-port` of its own, and write it as `bootstrap: {{port: ..}}`",
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

/// Two ranks that listen to one endpoint would credit each other's blocks, and two that ask one replay endpoint would be
/// told each other's past.
fn shared_sources(list: &[WorkerConfig], workers: &[Worker]) -> Vec<Problem> {
    let mut problems = shared(list, workers, "endpoint", |source| Some(&source.endpoint));
    problems.extend(shared(list, workers, "replay", |source| {
        source.replay.as_deref()
    }));
    problems
}

fn shared(
    list: &[WorkerConfig],
    workers: &[Worker],
    key: &str,
    endpoint: impl Fn(&EventSource) -> Option<&str>,
) -> Vec<Problem> {
    let mut owners: HashMap<&str, String> = HashMap::new();
    let mut problems = Vec::new();
    for (at, worker) in workers.iter().enumerate() {
        for (nth, (rank, source)) in worker.ranks.iter().zip(&worker.event_sources).enumerate() {
            let owner = format!("{}/{rank}", worker.id);
            let Some(endpoint) = endpoint(source) else {
                continue;
            };
            if let Some(taken) = owners.get(endpoint) {
                let text = format!(
                    "rank {owner} would use {endpoint}, which is the source of {taken} already; each rank needs its own"
                );
                let listed = list[at]
                    .kv_events
                    .as_ref()
                    .is_some_and(|events| !events.ranks.is_empty());
                let inner = if listed {
                    vec!["ranks".into(), nth.into()]
                } else {
                    Vec::new()
                };
                let outer: [Step; 2] = [at.into(), "kv_events".into()];
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
