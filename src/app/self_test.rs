//! Compares our tokens with the engines', for ever: canaries when a worker comes, when it may be another engine than before,
//! and after every interval; and beside it the blocks of real requests, a while after they were answered.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt as _};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

use super::App;
use super::lives::{self, Life, SOON};
use super::reload::Next;
use super::subjects::Subjects;
use crate::config::Config;
use crate::engine_client::config::EnginesConfig;
use crate::engine_client::{EngineClient, EngineUrl};
use crate::lifecycle::supervise;
use crate::metrics::{Metrics, ModelLabel, ModelOutcomeLabels};
use crate::parity::{Change, Evidence, Sighting, Standing, Verdict};
use crate::router::Router;
use crate::self_test::Subject;
use crate::self_test::config::SelfTestConfig;
use crate::worker::{ModelName, Worker, WorkerId};

/// How often it is looked who is to be tested, and whose blocks are to be looked for.
const LOOK: Duration = Duration::from_millis(250);

/// Workers tested at once.
const AT_ONCE: usize = 4;

/// What is tested, and how.
struct Task {
    config: SelfTestConfig,
    engines: EnginesConfig,
    client: EngineClient,
    subjects: Arc<Subjects>,
}

impl Task {
    fn is_like(&self, other: &Self) -> bool {
        let known = |(name, subject): (&ModelName, &Arc<Subject>)| {
            other
                .subjects
                .get(name)
                .is_some_and(|other| Arc::ptr_eq(subject, other))
        };
        let same = self.subjects.len() == other.subjects.len() && self.subjects.iter().all(known);
        same && self.config == other.config
            && self.engines == other.engines
            && self.client.is_same(&other.client)
    }
}

/// A worker under test.
struct Known {
    life: Life,
    /// When it is tested next.
    due: Instant,
    /// When it was tested last, if ever.
    tested: Option<Instant>,
}

struct Runner {
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    known: HashMap<WorkerId, Known>,
    /// Requests to be looked after, oldest first, and since when.
    answered: VecDeque<(Instant, ModelName, Sighting)>,
}

impl App {
    /// Compares our tokens with the engines' from now on.
    pub(super) fn test_tokens(&mut self, config: &Config, router: &Arc<Router>) {
        let task = |config: &Config, client: EngineClient, subjects: Arc<Subjects>| {
            Arc::new(Task {
                config: config.self_test.clone(),
                engines: config.engines.clone(),
                client,
                subjects,
            })
        };
        let (tasks, task_of_runner) = watch::channel(task(
            config,
            self.reloader.client(),
            self.reloader.subjects(),
        ));
        self.reloader.part("self_test", move |next: &Next| {
            let (tasks, task) = (
                tasks.clone(),
                task(&next.config, next.client.clone(), next.subjects.clone()),
            );
            Ok(Box::new(move || {
                tasks.send_if_modified(|running| {
                    let news = !running.is_like(&task);
                    *running = task;
                    news
                });
            }))
        });
        let (router, metrics, stop) = (
            router.clone(),
            self.reloader.metrics.clone(),
            self.stop.clone(),
        );
        self.background.spawn(async move {
            supervise("self_test", &metrics, stop, || {
                let runner = Runner::new(router.clone(), metrics.clone());
                runner.run(task_of_runner.clone())
            })
            .await;
        });
    }
}

impl Runner {
    fn new(router: Arc<Router>, metrics: Arc<Metrics>) -> Self {
        Self {
            router,
            metrics,
            known: HashMap::new(),
            answered: VecDeque::new(),
        }
    }

    async fn run(mut self, mut tasks: watch::Receiver<Arc<Task>>) -> anyhow::Result<()> {
        let mut tick = tokio::time::interval(LOOK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // Tests wait for engines, and real requests are not to wait for tests.
        let mut tests = None;
        let mut subjects = tasks.borrow().subjects.clone();
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                tested = run_all(&mut tests), if tests.is_some() => self.take(tested),
                changed = tasks.changed() => {
                    changed?;
                    // Other tokenizers, or other ways to ask; what is found out of the old ones says nothing.
                    self.known.clear();
                    tests = None;
                }
            }
            // Not as seen: what came since is still to be answered with a new beginning.
            let task = tasks.borrow().clone();
            self.forget(
                &std::mem::replace(&mut subjects, task.subjects.clone()),
                &task.subjects,
            );
            if tests.is_none() {
                let due = self.due(&task);
                if !due.is_empty() {
                    tests = Some(Box::pin(test(task.clone(), due)));
                }
            }
            self.look(&task.config);
            self.count();
        }
    }

    /// Forgets what was found out of tokens that are others now.
    fn forget(&self, before: &Arc<Subjects>, now: &Arc<Subjects>) {
        if Arc::ptr_eq(before, now) {
            return;
        }
        for (name, subject) in before.iter() {
            let others = now.get(name).is_some_and(|now| !now.has_tokens_of(subject));
            if let Some(standing) = self.router.parity().of(name).filter(|_| others) {
                tell(
                    (name, None),
                    standing.forget_canaries(),
                    "other tokens of ours",
                );
                tell(
                    (name, None),
                    standing.forget_events(),
                    "other tokens of ours",
                );
            }
        }
    }

    /// The workers that are to be tested now.
    fn due(&mut self, task: &Task) -> Vec<Arc<Worker>> {
        let (fleet, now) = (self.router.fleet(), Instant::now());
        let out = lives::out(&self.router);
        self.known.retain(|id, _| fleet.worker(*id).is_some());
        for (model, standing) in self.router.parity().standings() {
            let serves = |id| fleet.worker(id).is_some_and(|worker| worker.model == model);
            tell((&model, None), standing.retain(serves), "who is left");
            if !task.subjects.contains_key(&model) {
                tell(
                    (&model, None),
                    standing.forget_canaries(),
                    "canaries are not compared",
                );
            }
            if !task.config.traffic {
                tell(
                    (&model, None),
                    standing.forget_events(),
                    "events are not compared",
                );
            }
        }
        let tested = fleet
            .workers()
            .filter(|worker| task.subjects.contains_key(&worker.model));
        let mut due = Vec::new();
        for worker in tested {
            let life = Life::of(worker, &self.router, &out);
            let known = self.known.entry(worker.id).or_insert_with(|| Known {
                life: life.clone(),
                due: now,
                tested: None,
            });
            if life.is_another_than(&known.life) {
                known.due = known
                    .due
                    .min(now + lives::pause(known.tested.map(|tested| now - tested)));
                if let Some(standing) = self.router.parity().of(&worker.model) {
                    standing.restarted(worker.id);
                }
            }
            known.life = life;
            if known.due <= now && !known.life.out {
                (known.due, known.tested) = (now + task.config.interval.get(), Some(now));
                due.push(worker.clone());
            }
        }
        due
    }

    /// Takes note of what was found out.
    fn take(&mut self, tested: Vec<Tested>) {
        for Tested { worker, verdict } in tested {
            let Some(standing) = self.router.parity().of(&worker.model) else {
                continue;
            };
            let before = standing
                .parity()
                .workers
                .get(&worker.id)
                .cloned()
                .unwrap_or_default()
                .canaries;
            let labels = ModelOutcomeLabels::new(&worker.model, verdict.label());
            self.metrics.parity_tests.get_or_create(&labels).inc();
            if let (Verdict::CannotTest { passes: true, .. }, Some(known)) =
                (&verdict, self.known.get_mut(&worker.id))
            {
                known.due = known.due.min(Instant::now() + SOON);
            }
            let change = standing.tested(worker.id, verdict.clone());
            if before != verdict {
                self.report(&worker, &before, &verdict);
            }
            tell((&worker.model, Some(worker.id)), change, "canaries");
        }
    }

    fn report(&self, worker: &Worker, before: &Verdict, verdict: &Verdict) {
        let (model, id) = (&worker.model, worker.id);
        match verdict {
            Verdict::Differs { difference } => {
                self.mismatch(model);
                let d = &**difference;
                warn!(
                    %model,
                    worker = %id,
                    canary = d.canary.as_deref().unwrap_or_default(),
                    position = d.at,
                    block = d.block,
                    ours = ?d.ours,
                    theirs = ?d.theirs,
                    our_text = ?d.our_text.as_deref().unwrap_or_default(),
                    their_text = ?d.their_text.as_deref().unwrap_or_default(),
                    "the engine makes other tokens than we do; compare tokenizer, chat template and settings of the model"
                );
            }
            Verdict::Agrees { compared, skipped } => {
                let skipped = skipped
                    .keys()
                    .map(String::as_str)
                    .collect::<Vec<_>>()
                    .join(" ");
                info!(%model, worker = %id, compared, skipped, "the engine makes the same tokens as we do");
            }
            // Said once; a worker that starts is asked often.
            Verdict::CannotTest { why, .. } if !matches!(before, Verdict::CannotTest { .. }) => {
                info!(%model, worker = %id, why, "the engine's tokens cannot be compared with ours");
            }
            Verdict::CannotTest { .. } | Verdict::Untested => {}
        }
    }

    fn mismatch(&self, model: &ModelName) {
        self.metrics
            .parity_mismatches
            .get_or_create(&ModelLabel::from(model))
            .inc();
    }

    /// Looks for the blocks of requests that were answered a while ago.
    fn look(&mut self, config: &SelfTestConfig) {
        let now = Instant::now();
        for (model, standing) in self.router.parity().standings() {
            let ready = standing.take_ready();
            self.answered.extend(
                ready
                    .into_iter()
                    .map(|sighting| (now, model.clone(), sighting)),
            );
        }
        if !config.traffic {
            self.answered.clear();
        }
        while let Some((since, ..)) = self.answered.front()
            && since.elapsed() >= config.grace.get()
            && let Some((_, model, sighting)) = self.answered.pop_front()
        {
            let worker = sighting.rank().worker;
            let found = self.router.look_for(sighting);
            let outcome = match found {
                None => "unknown",
                Some((Evidence::Confirmed, _)) => "confirmed",
                Some((Evidence::Unconfirmed { .. }, _)) => "unconfirmed",
            };
            self.metrics
                .parity_sightings
                .get_or_create(&ModelOutcomeLabels::new(&model, outcome))
                .inc();
            let Some((evidence, change)) = found else {
                continue;
            };
            if let (Evidence::Unconfirmed { block }, Change::Mistrusted | Change::Differs) =
                (evidence, change)
            {
                self.mismatch(&model);
                warn!(
                    %model,
                    %worker,
                    block,
                    "the blocks of several requests in a row do not appear in their engine's events, which tell of others"
                );
            }
            tell((&model, Some(worker)), change, "events");
        }
    }

    fn count(&self) {
        for (model, standing) in self.router.parity().standings() {
            let mistrusted = i64::from(standing.is_mistrusted());
            self.metrics
                .parity_mistrusted
                .get_or_create(&ModelLabel::from(&model))
                .set(mistrusted);
            self.count_workers(&model, &standing);
        }
    }

    fn count_workers(&self, model: &ModelName, standing: &Standing) {
        let parity = standing.parity();
        for label in ["untested", "agrees", "differs", "cannot_test"] {
            let workers = parity
                .workers
                .values()
                .filter(|verdict| verdict.label() == label)
                .count();
            let labels = ModelOutcomeLabels::new(model, label);
            self.metrics
                .parity_workers
                .get_or_create(&labels)
                .set(workers as i64);
        }
    }
}

/// What was found out of one worker.
struct Tested {
    worker: Arc<Worker>,
    verdict: Verdict,
}

type Tests = std::pin::Pin<Box<dyn Future<Output = Vec<Tested>> + Send>>;

/// The end of the tests that are under way.
async fn run_all(tests: &mut Option<Tests>) -> Vec<Tested> {
    let Some(running) = tests else {
        return Vec::new();
    };
    let tested = running.await;
    *tests = None;
    tested
}

async fn test(task: Arc<Task>, due: Vec<Arc<Worker>>) -> Vec<Tested> {
    let one = |worker: Arc<Worker>| {
        let task = task.clone();
        async move {
            let url: EngineUrl = task.engines.url(worker.endpoint);
            let subject = task.subjects.get(&worker.model)?;
            let verdict = subject
                .test(&task.client, &url, task.config.deadline.get())
                .await;
            Some(Tested { worker, verdict })
        }
    };
    stream::iter(due)
        .map(one)
        .buffer_unordered(AT_ONCE)
        .filter_map(std::future::ready)
        .collect()
        .await
}

/// Tells whoever reads the log what follows.
fn tell((model, worker): (&ModelName, Option<WorkerId>), change: Change, by: &str) {
    let worker = worker.map(tracing::field::display);
    match change {
        Change::None => {}
        Change::Differs => {
            warn!(%model, worker, by, "requests to this worker go by load, while others make our tokens")
        }
        Change::Agrees => {
            info!(%model, worker, by, "requests to this worker go by their prompts again")
        }
        Change::Mistrusted => {
            warn!(%model, by, "our tokens are not used any more: requests go by load, or with the engines' own tokens");
        }
        Change::Trusted => info!(%model, by, "our tokens are used again"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::PrefixIndex;
    use crate::load::LoadTracker;
    use crate::router::RouterSettings;
    use crate::worker::BlockSize;

    #[test]
    fn only_who_may_answer_soon_is_asked_again_soon() {
        let load = LoadTracker::new(Instant::now);
        let router = Arc::new(Router::new(
            PrefixIndex::new(),
            load,
            RouterSettings::default(),
            1,
        ));
        router.parity().configure([("m".into(), Arc::default())]);
        let mut runner = Runner::new(router.clone(), Arc::new(Metrics::new()));
        let endpoint = "127.0.0.1:8000".parse().unwrap();
        let worker = Arc::new(Worker::new(
            WorkerId(1),
            endpoint,
            "m".into(),
            BlockSize::new(16).unwrap(),
        ));
        for passes in [false, true] {
            let due = Instant::now() + Duration::from_secs(300);
            let life = Life::of(&worker, &router, &lives::out(&router));
            runner.known.insert(
                worker.id,
                Known {
                    life,
                    due,
                    tested: None,
                },
            );
            let verdict = Verdict::CannotTest {
                why: String::new(),
                passes,
            };
            runner.take(vec![Tested {
                worker: worker.clone(),
                verdict,
            }]);
            assert_eq!(runner.known[&worker.id].due < due, passes);
        }
    }
}
