//! Responses to clients while warmroute is killed, down or frozen, for each Envoy configuration,
//! and recovery afterwards.

use futures_util::future::join_all;
use reqwest::Response;
use serde_json::{Value, json};
use warmroute_testbed::ports::until;

use crate::modes::client::{UploadResponse, take};
use crate::modes::gateway::{ConnectionManager, ManagerChange, ModeGateway};
use crate::routing::bed::{SOON, chat, engine, stream};

/// An Envoy configuration and the expected outcomes for clients.
struct FailureRow {
    name: &'static str,
    change: fn(&mut ConnectionManager),
    /// Outcome if warmroute is killed while it holds requests.
    held: &'static str,
    /// Outcome if warmroute is killed between request and response.
    between: &'static str,
    /// Outcome if warmroute is killed during a stream.
    middle: &'static str,
    /// Outcome if warmroute is not running.
    down: &'static str,
    /// Outcome if warmroute is frozen, with a message timeout of half a second.
    frozen: &'static str,
}

fn closed(manager: &mut ConnectionManager) {
    manager.filter()["failure_mode_allow"] = json!(false);
}

fn without_responses(manager: &mut ConnectionManager) {
    manager.modes(&[
        ("response_header_mode", "SKIP"),
        ("response_trailer_mode", "SKIP"),
    ]);
}

const ROWS: [FailureRow; 9] = [
    FailureRow {
        name: "buffered, open",
        change: |_| {},
        held: "whole",
        between: "whole",
        middle: "whole",
        down: "whole",
        frozen: "whole",
    },
    FailureRow {
        name: "buffered, closed",
        change: closed,
        held: "500",
        between: "500",
        middle: "cut",
        down: "500",
        frozen: "504",
    },
    FailureRow {
        name: "buffered, closed, no response messages",
        change: |manager| {
            closed(manager);
            without_responses(manager);
        },
        held: "500",
        between: "500",
        middle: "cut",
        down: "500",
        frozen: "504",
    },
    FailureRow {
        name: "duplex, open, no response messages",
        change: |manager| {
            manager.duplex();
            without_responses(manager);
        },
        held: "500",
        between: "whole",
        middle: "whole",
        down: "500",
        frozen: "500",
    },
    FailureRow {
        name: "duplex, open",
        change: ConnectionManager::duplex,
        held: "500",
        between: "500",
        middle: "cut",
        down: "500",
        frozen: "500",
    },
    FailureRow {
        name: "duplex, closed",
        change: |manager| {
            closed(manager);
            manager.duplex();
        },
        held: "500",
        between: "500",
        middle: "cut",
        down: "500",
        frozen: "500",
    },
    FailureRow {
        name: "responses streamed, open",
        change: |manager| {
            manager.remove_first_token_probe();
            manager.modes(&[("response_body_mode", "STREAMED")]);
        },
        held: "whole",
        between: "whole",
        middle: "whole",
        down: "whole",
        frozen: "whole",
    },
    FailureRow {
        name: "duplex both ways, open",
        change: |manager| {
            manager.remove_first_token_probe();
            manager.duplex();
            manager.modes(&[("response_body_mode", "FULL_DUPLEX_STREAMED")]);
        },
        held: "500",
        between: "500",
        middle: "cut",
        down: "500",
        frozen: "500",
    },
    FailureRow {
        name: "request buffered, response duplex, open",
        change: |manager| {
            manager.remove_first_token_probe();
            manager.modes(&[("response_body_mode", "FULL_DUPLEX_STREAMED")]);
        },
        held: "whole",
        between: "whole",
        middle: "cut",
        down: "whole",
        frozen: "whole",
    },
];

/// Starts listeners for all rows, and again for all rows with a short message timeout.
async fn gateway() -> ModeGateway {
    let mut changes: Vec<ManagerChange> = ROWS
        .iter()
        .map(|row| Box::new(row.change) as ManagerChange)
        .collect();
    changes.extend(ROWS.iter().map(|row| {
        let change = row.change;
        Box::new(move |manager: &mut ConnectionManager| {
            change(manager);
            manager.filter()["message_timeout"] = json!("0.5s");
        }) as ManagerChange
    }));
    ModeGateway::start(
        &[engine(1), engine(2)].map(|spec| spec.with(&["--step-us", "300000"])),
        config(),
        &changes,
    )
    .await
}

fn config() -> Value {
    json!({
        "gateway": {"response_headers": {"worker": true}},
        "requests": {"limits": {"decision_timeout": "25s"}},
        "process": {"readiness": {"event_sources_timeout": "60s"}},
    })
}

fn outcome(got: &UploadResponse) -> String {
    match got.status {
        200 if got.whole && !got.header("content-type").starts_with("text/event-stream") => {
            "whole".to_owned()
        }
        200 if got.whole && got.body.ends_with(b"data: [DONE]\n\n") => "whole".to_owned(),
        200 => "cut".to_owned(),
        status => status.to_string(),
    }
}

impl ModeGateway {
    async fn post_to(&self, listener: usize, body: &Value) -> Response {
        self.http
            .post(self.at(listener, "/v1/chat/completions"))
            .json(body)
            .send()
            .await
            .unwrap()
    }

    /// Returns the outcome of a request to each listener from `first` on.
    async fn outcomes(&self, first: usize, body: &Value) -> Vec<String> {
        let requests = (first..first + ROWS.len())
            .map(async |at| outcome(&take(self.post_to(at, body).await).await));
        join_all(requests).await
    }

    /// Waits until a cluster of Envoy has this many requests in flight.
    async fn wait_active(&self, cluster: &str, wanted: usize) {
        let what = format!("cluster.{cluster}.upstream_rq_active");
        let reached = until(SOON, async || {
            self.envoy_counts(&what).await == wanted as u64
        })
        .await;
        assert!(
            reached,
            "{} in flight, not {wanted}",
            self.envoy_counts(&what).await
        );
    }

    /// Asserts that requests to each listener are routed exactly and leave no booking.
    async fn assert_recovered(&self) {
        let served = (0..self.ports.len()).map(async |listener| {
            let exact = async || {
                let got = take(self.post_to(listener, &chat("are you there?")).await).await;
                // If Envoy sends no response messages, warmroute cannot add the header with the
                // mode.
                got.status == 200 && ["exact", ""].contains(&got.mode())
            };
            assert!(
                until(SOON, exact).await,
                "listener {listener} is not served"
            );
        });
        join_all(served).await;
        self.wait_idle().await;
    }

    async fn kill_and_restart(
        &mut self,
        outcomes: impl AsyncFnOnce(&ModeGateway) -> Vec<String>,
    ) -> Vec<String> {
        self.stack.kill9_router();
        let outcomes = outcomes(self).await;
        self.stack.start_router(&config()).await.unwrap();
        self.assert_recovered().await;
        outcomes
    }
}

fn assert_rows(when: &str, outcomes: &[String], expected: impl Fn(&FailureRow) -> &'static str) {
    let named = |outcome: &dyn Fn(usize) -> String| -> Vec<String> {
        ROWS.iter()
            .enumerate()
            .map(|(at, row)| format!("{}: {}", row.name, outcome(at)))
            .collect()
    };
    assert_eq!(
        named(&|at| outcomes[at].clone()),
        named(&|at| expected(&ROWS[at]).to_owned()),
        "{when}"
    );
}

async fn hold_tokens(gateway: &ModeGateway, hold: bool) {
    for id in [1, 2] {
        gateway.set_first_tokens(id, !hold).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn kill_during_requests() {
    let mut gateway = gateway().await;
    gateway.stack.router().unwrap().freeze();
    let requests: Vec<_> = (0..ROWS.len())
        .map(|at| {
            let request = gateway
                .http
                .post(gateway.at(at, "/v1/chat/completions"))
                .json(&chat("held"));
            tokio::spawn(async move { outcome(&take(request.send().await.unwrap()).await) })
        })
        .collect();
    gateway.wait_active("ext_proc", ROWS.len()).await;
    let outcomes = gateway
        .kill_and_restart(async |_| {
            join_all(requests)
                .await
                .into_iter()
                .map(Result::unwrap)
                .collect()
        })
        .await;
    assert_rows("held", &outcomes, |row| row.held);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_between_request_and_response() {
    let mut gateway = gateway().await;
    hold_tokens(&gateway, true).await;
    let requests: Vec<_> = (0..ROWS.len())
        .map(|at| {
            let request = gateway
                .http
                .post(gateway.at(at, "/v1/chat/completions"))
                .json(&chat("between"));
            tokio::spawn(async move { outcome(&take(request.send().await.unwrap()).await) })
        })
        .collect();
    gateway.wait_active("workers", ROWS.len()).await;
    let outcomes = async |gateway: &ModeGateway| {
        hold_tokens(gateway, false).await;
        join_all(requests)
            .await
            .into_iter()
            .map(Result::unwrap)
            .collect()
    };
    let outcomes = gateway.kill_and_restart(outcomes).await;
    assert_rows("between", &outcomes, |row| row.between);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn kill_during_streams_and_downtime() {
    let mut gateway = gateway().await;
    let body = stream("middle", 12);
    let begun = (0..ROWS.len()).map(async |at| {
        let mut response = gateway.post_to(at, &body).await;
        response.chunk().await.unwrap().unwrap();
        response
    });
    let begun = join_all(begun).await;
    let outcomes = async |gateway: &ModeGateway| {
        let mut outcomes = join_all(
            begun
                .into_iter()
                .map(async |response| outcome(&take(response).await)),
        )
        .await;
        outcomes.extend(gateway.outcomes(0, &chat("down")).await);
        outcomes
    };
    let outcomes = gateway.kill_and_restart(outcomes).await;
    assert_rows("in the middle", &outcomes[..ROWS.len()], |row| row.middle);
    assert_rows("down", &outcomes[ROWS.len()..], |row| row.down);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn frozen_process() {
    let gateway = gateway().await;
    gateway.stack.router().unwrap().freeze();
    let outcomes = gateway.outcomes(ROWS.len(), &chat("frozen")).await;
    gateway.stack.router().unwrap().thaw();
    assert_rows("frozen", &outcomes, |row| row.frozen);
    gateway.assert_recovered().await;
}
