//! One fault of each kind in turn, under steady traffic of conversations: the errors that clients
//! see, and the page, metric and log line that show the fault.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use warmroute_testbed::ports::{PATIENCE, until};

use warmroute_testbed::deployment::EngineSpec;

use crate::routing::bed::{RoutingBed, stream};

/// Time for which each fault lasts, at least, and time after it until the next one.
const FAULT_TIME: Duration = Duration::from_secs(4);
const REST_TIME: Duration = Duration::from_secs(2);

/// Number of concurrent conversations, and their turns.
const CONVERSATIONS: usize = 6;
const TURNS: usize = 6;
const PAUSE: Duration = Duration::from_millis(100);

/// Time for which a client waits for an answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(8);

/// Maximum time from the repair of a fault to normal service. A slow engine needs several prefills
/// that are fast although the machine is busy.
const RECOVERY_TIME: Duration = Duration::from_secs(180);

/// Requests after a fault that must all succeed.
const SUCCESSES: usize = 20;

/// The engine with the fault, unless all have it.
const FAULTY: u64 = 3;
const ENGINES: [u64; 3] = [1, 2, FAULTY];

enum EngineFault {
    Killed,
    Misbehaves(Value),
    AllMisbehave(Value),
}

/// Fault, and what shows it.
struct InjectedFault {
    name: &'static str,
    fault: EngineFault,
    /// Text in the entry of the engine on the page of the fleet.
    page: &'static str,
    /// Text on the overview.
    overview: &'static str,
    /// Metric that increases; none if the name is empty.
    metric: (&'static str, &'static [(&'static str, &'static str)]),
    /// Text of a log line.
    log: &'static str,
    /// Text of a log line after the repair.
    repair_log: &'static str,
}

/// Returns a fault that is shown by failed requests of a kind.
fn failing(
    name: &'static str,
    fault: EngineFault,
    kind: &'static [(&'static str, &'static str)],
) -> InjectedFault {
    InjectedFault {
        name,
        fault,
        page: kind[0].1,
        overview: "ejected for",
        metric: ("worker_failed_requests_total", kind),
        log: "worker ejected",
        repair_log: "worker readmitted",
    }
}

/// Returns the faults for which one engine is ejected.
fn ejecting_faults() -> Vec<InjectedFault> {
    use EngineFault::{Killed, Misbehaves};
    let refuse = |status: u16| Misbehaves(json!({"refuse": status}));
    vec![
        failing("connection refused", Killed, &[("kind", "unreachable")]),
        failing(
            "connection reset",
            Misbehaves(json!({"crash": "next_request"})),
            &[("kind", "unreachable")],
        ),
        failing("500", refuse(500), &[("kind", "server_error")]),
        failing("404", refuse(404), &[("kind", "rejected")]),
        failing(
            "empty 200",
            Misbehaves(json!({"empty_responses": true})),
            &[("kind", "empty")],
        ),
        failing(
            "hangs before the response",
            Misbehaves(json!({"hang": true})),
            &[("kind", "no_response")],
        ),
        failing(
            "hangs before the content",
            Misbehaves(json!({"hold_first_tokens": true, "early_stream_events": true})),
            &[("kind", "no_content")],
        ),
        failing("503", refuse(503), &[("kind", "overloaded")]),
    ]
}

/// Returns the faults for which no engine is ejected.
fn tolerated_faults() -> Vec<InjectedFault> {
    use EngineFault::{AllMisbehave, Misbehaves};
    vec![
        InjectedFault {
            name: "slow",
            fault: Misbehaves(json!({"slow_steps": 8.0})),
            page: "\"slow\":{",
            overview: "slow for",
            metric: ("", &[]),
            log: "worker is slow",
            repair_log: "worker is no longer slow",
        },
        InjectedFault {
            name: "KV events injected",
            fault: Misbehaves(json!({"drop_events": {"batches": 1_000_000}})),
            page: "\"stale\"",
            overview: "stale",
            metric: ("kv_event_source_freshness", &[("freshness", "stale")]),
            log: "KV event source is silent",
            // The index stays stale until all blocks from before the loss are evicted or reported again.
            repair_log: "KV event batches lost",
        },
        InjectedFault {
            name: "load scrapes fail",
            fault: Misbehaves(json!({"refuse_metrics": true})),
            page: "load_scrape",
            overview: "",
            metric: ("engine_load_scrapes_total", &[("outcome", "status")]),
            log: "scrape of engine load failed",
            repair_log: "",
        },
        // No rank is at fault if all fail.
        InjectedFault {
            overview: "no worker of",
            log: "no worker of the model delivers answers",
            repair_log: "workers of the model deliver answers again",
            ..failing(
                "500 of all engines",
                AllMisbehave(json!({"refuse": 500})),
                &[("kind", "server_error")],
            )
        },
    ]
}

/// Results of all requests, in order of their ends: an error, or none.
type TrafficResults = Arc<Mutex<Vec<Option<String>>>>;

/// Conversations that run until they are dropped.
struct ConversationTraffic {
    results: TrafficResults,
    _tasks: JoinSet<()>,
}

impl ConversationTraffic {
    fn start(url: &str) -> Self {
        let results = TrafficResults::default();
        let mut tasks = JoinSet::new();
        for number in 0..CONVERSATIONS {
            tasks.spawn(converse(url.to_owned(), number, results.clone()));
        }
        Self {
            results,
            _tasks: tasks,
        }
    }

    fn count(&self) -> usize {
        self.results.lock().len()
    }

    fn errors_since(&self, first: usize) -> BTreeMap<String, usize> {
        let mut errors = BTreeMap::new();
        for error in self.results.lock()[first..].iter().flatten() {
            *errors.entry(error.clone()).or_default() += 1;
        }
        errors
    }

    /// Returns whether the last requests since the one with a number have succeeded.
    fn has_recovered(&self, first: usize) -> bool {
        let results = self.results.lock();
        let recent = results.len().saturating_sub(SUCCESSES);
        recent >= first && results[recent..].iter().all(Option::is_none)
    }
}

async fn converse(url: String, number: usize, results: TrafficResults) {
    let client = reqwest::Client::builder()
        .timeout(CLIENT_TIMEOUT)
        .build()
        .unwrap();
    for round in 0.. {
        let mut body = stream(
            &format!("{number} {round} {}", "a question ".repeat(400)),
            8,
        );
        for turn in 0..TURNS {
            let error = query(&client, &url, &body).await.err();
            results.lock().push(error);
            let messages = body["messages"].as_array_mut().unwrap();
            messages.push(json!({"role": "assistant", "content": "an answer ".repeat(8)}));
            messages.push(json!({"role": "user", "content": format!("and {turn}?")}));
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Sends a request. Returns the error that the client sees.
async fn query(client: &reqwest::Client, url: &str, body: &Value) -> Result<(), String> {
    let on_error = |error: reqwest::Error| {
        let name = if error.is_timeout() { "timeout" } else { "cut" };
        name.to_owned()
    };
    let answer = client.post(url).json(body).send().await.map_err(on_error)?;
    let status = answer.status();
    if !status.is_success() {
        return Err(status.as_u16().to_string());
    }
    let text = answer.text().await.map_err(on_error)?;
    let is_complete = text.ends_with("data: [DONE]\n\n");
    is_complete.then_some(()).ok_or("incomplete".to_owned())
}

/// Number of log lines, and value of a metric, before a fault.
struct LogAndMetric {
    lines: usize,
    metric: f64,
}

struct FaultScenario {
    bed: RoutingBed,
    traffic: ConversationTraffic,
}

impl FaultScenario {
    async fn begin(&mut self, fault: &EngineFault) {
        match fault {
            EngineFault::Killed => self.bed.kill(FAULTY),
            EngineFault::Misbehaves(how) => self.bed.misbehave(FAULTY, how.clone()).await,
            EngineFault::AllMisbehave(how) => {
                for id in ENGINES {
                    self.bed.misbehave(id, how.clone()).await;
                }
            }
        }
    }

    async fn end(&mut self, fault: &EngineFault) {
        match fault {
            EngineFault::Killed => self.bed.restart(FAULTY).await,
            // A crashed engine does not run any more.
            EngineFault::Misbehaves(how) if how.get("crash").is_some() => {
                self.bed.kill(FAULTY);
                self.bed.restart(FAULTY).await;
            }
            EngineFault::Misbehaves(_) | EngineFault::AllMisbehave(_) => {
                for id in ENGINES {
                    self.bed.misbehave(id, no_faults()).await;
                }
            }
        }
    }

    async fn member(&self, id: u64) -> Value {
        let page = self.bed.stack.debug_page("fleet").await.unwrap();
        let mut members = page["members"].as_array().unwrap().iter();
        let is_wanted = |member: &&Value| member["worker"]["id"] == json!(id.to_string());
        members.find(is_wanted).unwrap().clone()
    }

    async fn health(&self, id: u64) -> String {
        let member = self.member(id).await;
        let health = member["health"]["health"].as_str();
        health.unwrap_or("healthy").to_owned()
    }

    async fn metric(&self, injected: &InjectedFault) -> f64 {
        let (name, labels) = injected.metric;
        if name.is_empty() {
            return 0.0;
        }
        self.bed.metric(name, labels).await
    }

    fn log_lines(&self, text: &str) -> usize {
        let log = self.bed.router_log();
        log.lines().filter(|line| line.contains(text)).count()
    }

    async fn overview(&self) -> String {
        self.bed.page(self.bed.admin_url("/")).await
    }

    async fn is_shown(&self, injected: &InjectedFault, before: &LogAndMetric) -> bool {
        let entry = self.member(FAULTY).await.to_string();
        entry.contains(injected.page)
            && self.overview().await.contains(injected.overview)
            && (injected.metric.0.is_empty() || self.metric(injected).await > before.metric)
            && self.log_lines(injected.log) > before.lines
    }

    /// Injects a fault and asserts that it is seen and that the traffic recovers.
    #[expect(clippy::print_stdout, reason = "figures of a test")]
    async fn inject(&mut self, injected: &InjectedFault) {
        let first = self.traffic.count();
        let before = LogAndMetric {
            lines: self.log_lines(injected.log),
            metric: self.metric(injected).await,
        };
        let start = Instant::now();
        self.begin(&injected.fault).await;
        let mut shown: Option<Duration> = None;
        let seen = until(PATIENCE, async || {
            if shown.is_none() && self.is_shown(injected, &before).await {
                shown.get_or_insert(start.elapsed());
            }
            shown.is_some() && start.elapsed() >= FAULT_TIME
        });
        let is_seen = seen.await;
        let entry = self.member(FAULTY).await;
        assert!(
            is_seen,
            "{}: {entry}\n{}\n{}",
            injected.name,
            self.bed.router_log(),
            self.bed.metrics().await.text()
        );
        let errors = self.traffic.errors_since(first);
        let requests = self.traffic.count() - first;
        let health = self.health(FAULTY).await;
        let repair_lines = self.log_lines(injected.repair_log);
        self.end(&injected.fault).await;
        let repaired = Instant::now();
        let after = self.traffic.count();
        let recovered = until(RECOVERY_TIME, async || {
            let is_logged = injected.repair_log.is_empty()
                || self.log_lines(injected.repair_log) > repair_lines;
            is_logged && self.traffic.has_recovered(after) && self.health(FAULTY).await == "healthy"
        });
        assert!(
            recovered.await,
            "{}: {:?} {}\n{}\n{:#}",
            injected.name,
            self.traffic.errors_since(after),
            self.member(FAULTY).await,
            self.bed.router_log(),
            self.bed.stack.debug_page("calibration").await.unwrap()
        );
        println!(
            "| {} | {requests} | {errors:?} | {health} | {:.1} | {} {:?} +{} | {} +{} | {:.1} |",
            injected.name,
            shown.unwrap().as_secs_f64(),
            injected.metric.0,
            injected.metric.1,
            self.metric(injected).await - before.metric,
            injected.log,
            self.log_lines(injected.log) - before.lines,
            repaired.elapsed().as_secs_f64(),
        );
        tokio::time::sleep(REST_TIME).await;
    }
}

fn no_faults() -> Value {
    json!({
        "refuse": null, "hang": false, "slow_steps": null, "hold_first_tokens": false, "early_stream_events": false,
        "empty_responses": false, "refuse_metrics": false, "drop_events": null,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn every_fault_is_shown_and_passes() {
    let bed = RoutingBed::start(&ENGINES.map(EngineSpec::new), json!({})).await;
    let traffic = ConversationTraffic::start(&bed.stack.url("/v1/chat/completions"));
    let mut scenario = FaultScenario { bed, traffic };
    let has_traffic = until(PATIENCE, async || scenario.traffic.has_recovered(0));
    assert!(has_traffic.await, "{:?}", scenario.traffic.errors_since(0));
    for fault in ejecting_faults().into_iter().chain(tolerated_faults()) {
        scenario.inject(&fault).await;
    }
}
