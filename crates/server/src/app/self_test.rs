//! Compares warmroute's tokens with those of the engines. Canaries are sent when a worker joins,
//! when it may have been restarted, and after each interval. The KV events of completed requests
//! are compared as well.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt as _};
use tracing::{info, warn};
use warmroute_core::fleet::Fleet;
use warmroute_core::parity::{
    BlockEvidence, CanaryVerdict, ParityChange, ParityCheck, ParityStatus,
};
use warmroute_core::router::Router;
use warmroute_core::worker::{ModelName, Worker, WorkerId};
use warmroute_metrics::{Metrics, ModelLabel, ModelOutcomeLabels};
use warmroute_runtime::lifecycle::ticks;

use super::background::BackgroundTasks;
use super::parity_log;
use super::poll_config::{PollConfig, PollConfigReceiver};
use super::reload::Reloader;
use super::worker_schedule::{WorkerIncarnation, WorkerSchedule};
use crate::config::{CanaryHeaders, Config};
use crate::request::ModelRegistry;
use crate::self_test::CanarySuite;
use crate::self_test::config::SelfTestConfig;

/// Interval of checks for due workers and requests.
const SCAN_INTERVAL: Duration = Duration::from_millis(250);

/// Delay between a response and the comparison of its events, which arrive later.
const EVENT_DELAY: Duration = Duration::from_secs(2);

/// Maximum number of concurrent tests.
const MAX_CONCURRENT_TESTS: usize = 4;

/// Canaries by model. They are tokenized once per tokenizer, on blocking threads, because that
/// takes milliseconds.
pub(super) type CanarySuites = HashMap<ModelName, Arc<CanarySuite>>;

/// Loads the canaries of a configuration. Unchanged ones are reused from `before`. There are none
/// if the self-test is disabled.
pub(super) async fn load_canary_suites(
    config: &Config,
    models: &ModelRegistry,
    before: &CanarySuites,
) -> anyhow::Result<CanarySuites> {
    let mut suites = CanarySuites::new();
    if !config.engines.parity_check.enabled {
        return Ok(suites);
    }
    let named = config
        .models
        .iter()
        .filter_map(|model| Some((&model.name, models.resolve(Some(model.name.as_str()))?)));
    let loading: Vec<_> = named
        .map(|(name, named)| {
            let known = before
                .get(name)
                .filter(|suite| suite.is_current(&named.model))
                .cloned();
            let prepare = move || known.or_else(|| CanarySuite::new(&named.model).map(Arc::new));
            (name, tokio::task::spawn_blocking(prepare))
        })
        .collect();
    for (name, suite) in loading {
        suites.extend(suite.await?.map(|suite| (name.clone(), suite)));
    }
    Ok(suites)
}

/// Settings and canaries of the self-test.
#[derive(PartialEq)]
struct SelfTestSettings {
    config: SelfTestConfig,
    canary_headers: CanaryHeaders,
    suites: Arc<CanarySuites>,
}

impl SelfTestSettings {
    fn new(config: &Config, suites: &Arc<CanarySuites>) -> Self {
        Self {
            config: config.engines.parity_check.clone(),
            canary_headers: CanaryHeaders::new(config),
            suites: suites.clone(),
        }
    }
}

/// State of the self-test.
struct SelfTestRunner {
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    schedules: HashMap<WorkerId, WorkerSchedule>,
    /// Completed requests to be checked, oldest first, with their completion time.
    pending_checks: VecDeque<(Instant, ModelName, ParityCheck)>,
}

/// Starts the self-test.
pub(super) fn start(tasks: &mut BackgroundTasks, reloader: &Reloader) {
    let plan_rx = PollConfig::watch(reloader, SelfTestSettings::new);
    let router = reloader.router().clone();
    let metrics = reloader.metrics.clone();
    tasks.supervise("self_test", move || {
        let runner = SelfTestRunner::new(router.clone(), metrics.clone());
        runner.run(plan_rx.clone())
    });
}

impl SelfTestRunner {
    fn new(router: Arc<Router>, metrics: Arc<Metrics>) -> Self {
        Self {
            router,
            metrics,
            schedules: HashMap::new(),
            pending_checks: VecDeque::new(),
        }
    }

    async fn run(
        mut self,
        mut plan_rx: PollConfigReceiver<SelfTestSettings>,
    ) -> anyhow::Result<()> {
        let mut tick = ticks(SCAN_INTERVAL);
        // Tests wait for engines. They run concurrently, because the checks of real requests must
        // not wait for them.
        let mut tests = None;
        let mut suites = plan_rx.borrow().settings.suites.clone();
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                tested = finish_tests(&mut tests), if tests.is_some() => self.apply_results(tested),
                changed = plan_rx.changed() => {
                    changed?;
                    // Tokenizers or connections have changed, so results of running tests are
                    // obsolete.
                    self.schedules.clear();
                    tests = None;
                }
            }
            // The value is not marked as seen, so that a concurrent change triggers another
            // iteration.
            let plan = plan_rx.borrow().clone();
            let before = std::mem::replace(&mut suites, plan.settings.suites.clone());
            self.reset_changed_suites(&before, &suites);
            if tests.is_none() {
                let due = self.due_workers(&plan.settings);
                if !due.is_empty() {
                    tests = Some(Box::pin(run_tests(plan.clone(), self.router.fleet(), due)));
                }
            }
            self.check_events(&plan.settings.config);
            self.publish_metrics();
        }
    }

    /// Clears the findings of models whose tokenizer has changed.
    fn reset_changed_suites(&self, before: &Arc<CanarySuites>, now: &Arc<CanarySuites>) {
        if Arc::ptr_eq(before, now) {
            return;
        }
        for (name, suite) in before.iter() {
            let has_changed = now.get(name).is_some_and(|now| !now.shares_encoder(suite));
            if let Some(status) = self
                .router
                .parity()
                .model_status(name)
                .filter(|_| has_changed)
            {
                self.log_change(name, None, status.clear_canaries(), "tokenizer changed");
                self.log_change(name, None, status.clear_events(), "tokenizer changed");
            }
        }
    }

    /// Returns the workers to test now, and removes findings that no longer apply.
    fn due_workers(&mut self, settings: &SelfTestSettings) -> Vec<Arc<Worker>> {
        let fleet = self.router.fleet();
        let ejected = self.router.ejected_workers().into_iter().collect();
        self.schedules.retain(|id, _| fleet.worker(*id).is_some());
        for (model, status) in self.router.parity().statuses() {
            let serves = |id| fleet.worker(id).is_some_and(|worker| worker.model == model);
            self.log_change(&model, None, status.retain(serves), "fleet changed");
            if !settings.suites.contains_key(&model) {
                self.log_change(&model, None, status.clear_canaries(), "canaries disabled");
            }
            if !settings.config.sample_requests {
                self.log_change(&model, None, status.clear_events(), "event checks disabled");
            }
        }
        let tested = fleet
            .workers()
            .filter(|worker| settings.suites.contains_key(&worker.model));
        let mut due = Vec::new();
        for worker in tested {
            let incarnation = WorkerIncarnation::of(worker, &self.router, &ejected);
            let is_ejected = incarnation.is_ejected;
            let schedule = self.schedules.entry(worker.id).or_default();
            if schedule.observe(incarnation)
                && let Some(status) = self.router.parity().model_status(&worker.model)
            {
                status.mark_restarted(worker.id);
            }
            if schedule.is_due() && !is_ejected {
                schedule.start(settings.config.interval.get());
                due.push(worker.clone());
            }
        }
        due
    }

    /// Stores test results, and logs changes.
    fn apply_results(&mut self, mut tested: Vec<SelfTestResult>) {
        // The log of a difference depends on the workers that agree.
        tested.sort_by_key(|tested| !matches!(tested.verdict, CanaryVerdict::Agrees { .. }));
        for SelfTestResult { worker, verdict } in tested {
            let is_transient = matches!(
                verdict,
                CanaryVerdict::CannotTest {
                    is_transient: true,
                    ..
                }
            );
            if let Some(schedule) = self.schedules.get_mut(&worker.id) {
                schedule.finish(is_transient);
            }
            let Some(status) = self.router.parity().model_status(&worker.model) else {
                continue;
            };
            let before = status
                .parity()
                .workers
                .get(&worker.id)
                .cloned()
                .unwrap_or_default()
                .canaries;
            let labels = ModelOutcomeLabels::new(&worker.model, verdict.label());
            self.metrics.parity.checks.get_or_create(&labels).inc();
            let change = status.record_canaries(worker.id, verdict.clone());
            if before != verdict {
                let has_agreeing_worker = status.parity().has_agreeing_worker();
                parity_log::log_verdict(&worker, &before, &verdict, has_agreeing_worker);
                if let CanaryVerdict::Differs { .. }
                | CanaryVerdict::GenerationPromptDiffers { .. } = verdict
                {
                    self.count_mismatch(&worker.model);
                }
            }
            self.log_change(&worker.model, Some(worker.id), change, "canaries");
        }
    }

    fn count_mismatch(&self, model: &ModelName) {
        self.metrics
            .parity
            .mismatches
            .get_or_create(&ModelLabel::from(model))
            .inc();
    }

    /// Checks the KV events of requests that completed some time ago.
    fn check_events(&mut self, config: &SelfTestConfig) {
        let now = Instant::now();
        for (model, status) in self.router.parity().statuses() {
            let ready = status.take_ready_checks();
            self.pending_checks
                .extend(ready.into_iter().map(|check| (now, model.clone(), check)));
        }
        if !config.sample_requests {
            self.pending_checks.clear();
        }
        while let Some((since, ..)) = self.pending_checks.front()
            && since.elapsed() >= EVENT_DELAY
            && let Some((_, model, check)) = self.pending_checks.pop_front()
        {
            let worker = check.rank().worker;
            let found = self.router.evaluate_parity_check(check);
            let outcome = match found {
                None => "unknown",
                Some((BlockEvidence::Confirmed, _)) => "confirmed",
                Some((BlockEvidence::Unconfirmed { .. }, _)) => "unconfirmed",
            };
            self.metrics
                .parity
                .event_checks
                .get_or_create(&ModelOutcomeLabels::new(&model, outcome))
                .inc();
            let Some((evidence, change)) = found else {
                continue;
            };
            if let (
                BlockEvidence::Unconfirmed { block },
                ParityChange::TokensDisabled | ParityChange::WorkerDiffers,
            ) = (evidence, change)
            {
                self.count_mismatch(&model);
                warn!(
                    %model,
                    %worker,
                    name = self.router.fleet().display_name(worker),
                    block,
                    "KV events contain other blocks than several consecutive requests should have \
                    stored"
                );
            }
            self.log_change(&model, Some(worker), change, "events");
        }
    }

    fn publish_metrics(&self) {
        for (model, status) in self.router.parity().statuses() {
            let tokens_disabled = i64::from(status.are_tokens_disabled());
            self.metrics
                .parity
                .tokens_disabled
                .get_or_create(&ModelLabel::from(&model))
                .set(tokens_disabled);
            self.publish_worker_counts(&model, &status);
        }
    }

    fn publish_worker_counts(&self, model: &ModelName, status: &ParityStatus) {
        let parity = status.parity();
        for label in [
            "untested",
            "agrees",
            "differs",
            "generation_prompt_differs",
            "cannot_test",
        ] {
            let workers = parity
                .workers
                .values()
                .filter(|verdict| verdict.label() == label)
                .count();
            let labels = ModelOutcomeLabels::new(model, label);
            self.metrics
                .parity
                .workers
                .get_or_create(&labels)
                .set(workers as i64);
        }
    }

    /// Logs a change of the parity of a worker or a model.
    fn log_change(
        &self,
        model: &ModelName,
        worker: Option<WorkerId>,
        change: ParityChange,
        by: &str,
    ) {
        let name = worker.and_then(|worker| self.router.fleet().display_name(worker));
        let worker = worker.map(tracing::field::display);
        match change {
            ParityChange::None => {}
            ParityChange::WorkerDiffers => {
                warn!(%model, worker, name, by, "token mismatch of one worker; its requests are routed by load")
            }
            ParityChange::WorkerAgrees => {
                info!(%model, worker, name, by, "tokens match again; requests to this worker are routed by prefix")
            }
            ParityChange::TokensDisabled => {
                warn!(%model, by, "token mismatch of the model; requests are routed by load or with engine tokens");
            }
            ParityChange::TokensEnabled => {
                info!(%model, by, "tokens match again; requests are routed by prefix")
            }
        }
    }
}

/// Result of testing one worker.
struct SelfTestResult {
    worker: Arc<Worker>,
    verdict: CanaryVerdict,
}

type RunningTests = std::pin::Pin<Box<dyn Future<Output = Vec<SelfTestResult>> + Send>>;

/// Waits for the running tests and returns their results.
async fn finish_tests(tests: &mut Option<RunningTests>) -> Vec<SelfTestResult> {
    let Some(running) = tests else {
        return Vec::new();
    };
    let tested = running.await;
    *tests = None;
    tested
}

async fn run_tests(
    plan: Arc<PollConfig<SelfTestSettings>>,
    fleet: Arc<Fleet>,
    due: Vec<Arc<Worker>>,
) -> Vec<SelfTestResult> {
    let test_worker = |worker: Arc<Worker>| {
        let plan = plan.clone();
        let settings = &plan.settings;
        let workers = fleet.workers().map(|worker| &**worker);
        let client = plan
            .client
            .with_headers(settings.canary_headers.headers(&worker, None, workers));
        async move {
            let url = plan.engines.url(worker.endpoint);
            let settings = &plan.settings;
            let suite = settings.suites.get(&worker.model)?;
            let verdict = suite
                .compare(&client, &url, settings.config.timeout.get())
                .await;
            Some(SelfTestResult { worker, verdict })
        }
    };
    stream::iter(due)
        .map(test_worker)
        .buffer_unordered(MAX_CONCURRENT_TESTS)
        .filter_map(std::future::ready)
        .collect()
        .await
}
