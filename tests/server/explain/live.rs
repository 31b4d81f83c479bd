//! Explanations from a deployment of eight engines with different caches and loads.

use std::collections::BTreeMap;
use std::ops::Deref;

use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use warmroute_testbed::deployment::MODEL;
use warmroute_testbed::ports::{PATIENCE, until};

use super::{captured_chat, explained, write};
use crate::support::deployment::{RoutedAnswer, TestDeployment, fast};

const CHAT: &str = "/v1/chat/completions";
/// Engine that responds with 503.
const REFUSING: u64 = 8;
/// Engines that never respond, with the number of requests of each.
const HANGING: [(u64, usize); 2] = [(6, 3), (7, 1)];

struct ExplainDeployment(TestDeployment);

impl Deref for ExplainDeployment {
    type Target = TestDeployment;

    fn deref(&self) -> &TestDeployment {
        &self.0
    }
}

impl ExplainDeployment {
    async fn start() -> Self {
        let config = json!({
            "gateway": {"response_headers": {"why": true}},
            "requests": {"clients": {"trusted": true}},
            "routing": {
                // Active requests have a cost, so that every term of the cost is nonzero.
                "weights": {"prefill_load_scale": 1, "decode_active_request_weight": 0.5},
                "overload": {"backoff": "10m"},
            },
            "process": {"log": {"level": "debug"}},
        });
        let specs: Vec<_> = (1..=8).map(fast).collect();
        Self(TestDeployment::start_with(&specs, config, str::to_owned).await)
    }

    /// Returns a request that is pinned in its body, because the shipped Envoy removes the header
    /// of clients.
    fn pinned(&self, id: u64, body: &Value) -> reqwest::RequestBuilder {
        let mut body = body.clone();
        body["nvext"] = json!({"backend_instance_id": id});
        self.request(CHAT, &body)
    }

    async fn wait_page(&self, what: &str, page: &str, holds: impl Fn(&Value) -> bool) {
        let shown = until(PATIENCE, async || {
            holds(&self.debug_page(page).await.unwrap())
        });
        assert!(
            shown.await,
            "{what}: {}",
            self.debug_page(page).await.unwrap()
        );
    }

    /// Fills the caches. Each of the first six engines caches more of the system prompt than the
    /// one before. The others cache none of it.
    async fn warm(&self) {
        let chat = captured_chat();
        let system = chat["messages"][0]["content"].as_str().unwrap();
        for id in 1..=6 {
            let mut part = chat.clone();
            part["messages"][0]["content"] = system[..system.len() * id as usize / 8].into();
            part["messages"][1]["content"] = "Go on.".into();
            let answer = RoutedAnswer::send(self.pinned(id, &part)).await;
            assert_eq!(answer.engine(), id);
        }
        self.settle().await;
        assert!(self.cached_blocks().await > 60);
    }

    /// Makes two engines hang and one reject its request.
    async fn create_load(&self) -> Vec<JoinHandle<()>> {
        let mut held = Vec::new();
        for (id, count) in HANGING {
            self.misbehave(id, json!({"hang": true})).await;
            for at in 0..count {
                let words = format!("Number {at} for {id}: ").repeat(20);
                let body =
                    json!({"model": MODEL, "messages": [{"role": "user", "content": words}]});
                let sending = self.pinned(id, &body).timeout(PATIENCE * 4).send();
                held.push(tokio::spawn(async move { drop(sending.await) }));
            }
        }
        self.wait_page("four requests are booked", "load", |page| {
            requests(page) == 4
        })
        .await;
        self.misbehave(REFUSING, json!({"refuse": 503})).await;
        let refused = RoutedAnswer::send(self.pinned(REFUSING, &captured_chat())).await;
        assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
        self.wait_page("the rejected request is released", "load", |page| {
            requests(page) == 4
        })
        .await;
        held
    }
}

fn requests(load: &Value) -> u64 {
    load.as_array()
        .unwrap()
        .iter()
        .map(|rank| rank["active_requests"].as_u64().unwrap())
        .sum()
}

/// Parses a line of the form `key=value key=value`.
fn pairs(line: &str) -> BTreeMap<String, String> {
    let pairs = line
        .split_whitespace()
        .filter_map(|pair| pair.split_once('='));
    pairs
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

/// Asserts the short form of an explanation, and returns its pairs.
fn short_of(report: &Value) -> BTreeMap<String, String> {
    let [phase] = &report["phases"].as_array().unwrap()[..] else {
        panic!("{report}")
    };
    let explanation = phase["workers"].as_array().unwrap();
    let won = explanation
        .iter()
        .find(|explanation| explanation["rank"] == phase["winner"])
        .unwrap();
    let term = |name: &str| format!("{:.3}", won["cost"][name].as_f64().unwrap());
    let candidates = explanation
        .iter()
        .filter(|explanation| explanation["excluded"].is_null())
        .count();
    [
        ("worker", rank_name(&won["rank"])),
        ("cost", term("total")),
        ("prefill", term("prefill")),
        ("decode", term("decode")),
        ("blocks", report["prompt_blocks"].to_string()),
        ("device", won["overlap"]["device"].to_string()),
        ("cached_tokens", won["cached_tokens"].to_string()),
        ("candidates", candidates.to_string()),
        ("ties", phase["ties"].to_string()),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explanation_matches_next_real_request() {
    let deployment = ExplainDeployment::start().await;
    deployment.warm().await;
    let held = deployment.create_load().await;

    let body = write(
        &deployment.run_dir,
        "body.json",
        captured_chat().to_string(),
    );
    let admin = deployment.admin_url("/");
    let body = body.to_str().unwrap();
    let json = explained(&["--admin", &admin, "--body", body, "--json"], b"").await;
    let summary = explained(&["--admin", &admin, "--body", body], b"").await;
    assert!(
        summary.lines().all(|line| line.chars().count() <= 100),
        "{summary}"
    );
    let table = explained(&["--admin", &admin, "--body", body, "--table"], b"").await;
    print(&table);
    let report: Value = serde_json::from_str(&json).unwrap();
    check(&report, &table);
    let load = deployment.debug_page("load").await.unwrap();
    assert_eq!(requests(&load), 4, "an explanation books nothing: {load}");

    let query = deployment
        .request(CHAT, &captured_chat())
        .header("x-request-id", "the-next");
    let answer = query.send().await.unwrap();
    let header = |name: &str| answer.headers()[name].to_str().unwrap().to_owned();
    assert_eq!(
        (answer.status(), header("x-warmroute-mode")),
        (StatusCode::OK, "exact".to_owned())
    );
    let expected = short_of(&report);
    assert_eq!(pairs(&header("x-warmroute-why")), expected);
    assert_eq!(format!("{}/0", header("x-engine-id")), expected["worker"]);
    assert_eq!(
        header("x-warmroute-predicted-cached-tokens"),
        expected["cached_tokens"]
    );
    assert_decision_is_logged(
        &deployment.router_log(),
        &header("x-warmroute-why"),
        &report,
    );
    let delivered: Value = answer.json().await.unwrap();
    let cached = &delivered["usage"]["prompt_tokens_details"]["cached_tokens"];
    assert_eq!(
        cached.to_string(),
        expected["cached_tokens"],
        "cached tokens of the engine: {delivered}"
    );
    held.iter().for_each(JoinHandle::abort);
}

/// Asserts that the log line of a request matches its explanation.
fn assert_decision_is_logged(log: &str, why: &str, report: &Value) {
    let line = log
        .lines()
        .find(|line| line.contains("routed worker=") && line.contains("the-next"));
    print(&format!(
        "x-warmroute-why: {why}\n{}",
        line.unwrap_or_default()
    ));
    let logged = pairs(line.unwrap_or_else(|| panic!("{log}")));
    for (key, value) in &short_of(report) {
        assert_eq!(logged.get(key), Some(value), "{key} in {line:?}");
    }
    assert_eq!(
        logged["prompt_tokens"],
        report["prompt_tokens"].to_string(),
        "{line:?}"
    );
    assert_eq!(logged["mode"].trim_matches('"'), "exact", "{line:?}");
}

/// Formats a worker rank as tables and headers do.
fn rank_name(rank: &Value) -> String {
    format!("{}/{}", rank["worker"].as_str().unwrap(), rank["rank"])
}

/// Asserts that the report and the table show the prepared states.
fn check(report: &Value, table: &str) {
    let phase = &report["phases"][0];
    let explanation = phase["workers"].as_array().unwrap();
    assert_eq!(explanation.len(), 8);
    let held: Vec<u64> = explanation
        .iter()
        .map(|explanation| explanation["overlap"]["device"].as_u64().unwrap())
        .collect();
    assert!(
        held[..6].windows(2).all(|pair| pair[0] < pair[1]),
        "{held:?}"
    );
    for (id, count) in HANGING {
        let load = &explanation[id as usize - 1]["load"];
        assert_eq!(load["active_requests"], count, "{load}");
        assert!(
            load["active_prefill_tokens"].as_u64().unwrap() > 100 * count as u64,
            "{load}"
        );
    }
    assert_eq!(explanation[7]["excluded"], "is overloaded");
    assert_eq!(
        phase["winner"]["worker"], "5",
        "the sixth engine caches more, but is busier: {table}"
    );
    assert_eq!(phase["runner_up"]["worker"], "4");
    assert!(
        report["summary"]
            .as_str()
            .unwrap()
            .contains("while 6/0 holds"),
        "{report}"
    );
    for explanation in explanation {
        assert_rows(explanation, table);
    }
}

/// Asserts the two rows of a worker in the table.
fn assert_rows(explanation: &Value, table: &str) {
    let name = rank_name(&explanation["rank"]);
    let rows: Vec<Vec<&str>> = table
        .lines()
        .filter(|line| line.split_whitespace().next() == Some(&name))
        .map(|line| line.split_whitespace().collect())
        .collect();
    let [state, costs] = &rows[..] else {
        panic!("{name}: {table}")
    };
    let number = |value: &Value| value.to_string();
    let load = &explanation["load"];
    let expected = [
        number(&explanation["overlap"]["device"]),
        number(&explanation["overlap"]["host"]),
        number(&explanation["overlap"]["disk"]),
        number(&explanation["overlap"]["external"]),
        number(&explanation["cached_tokens"]),
        number(&load["active_requests"]),
        number(&load["active_prefill_tokens"]),
        number(&explanation["prefill_tokens"]),
        number(&load["active_blocks"]),
        number(&explanation["decode_blocks"]),
    ];
    assert_eq!(state[3..], expected, "{table}");
    let Some(cost) = explanation["cost"].as_object() else {
        return;
    };
    let terms = [
        "prefill_blocks",
        "credit_decay",
        "freshness_credit",
        "device_credit",
        "host_credit",
        "disk_credit",
        "shared_credit",
        "prefill",
        "decode",
        "requests",
        "taint_factor",
        "total",
    ];
    assert_eq!(cost["policy"], "linear");
    assert_eq!(cost.len(), 1 + terms.len(), "every term is in the table");
    let terms = terms.map(|term| format!("{:.3}", cost[term].as_f64().unwrap()));
    assert_eq!(costs[1..13], terms, "{table}");
}

#[expect(clippy::print_stdout, reason = "shown with --nocapture")]
fn print(text: &str) {
    println!("{text}");
}
