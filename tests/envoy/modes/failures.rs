//! Responses to clients while warmroute is killed, down or frozen, for each Envoy configuration,
//! and recovery afterwards.

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::modes::gateway::{ConnectionManager, ManagerChange, ModeGateway};
use crate::routing::bed::{chat, engine, stream};
use crate::support::deployment::RoutedAnswer;

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

const fn row(
    name: &'static str,
    change: fn(&mut ConnectionManager),
    [held, between, middle, down, frozen]: [&'static str; 5],
) -> FailureRow {
    FailureRow {
        name,
        change,
        held,
        between,
        middle,
        down,
        frozen,
    }
}

const ROWS: [FailureRow; 9] = [
    row(
        "buffered, open",
        |_| {},
        ["whole", "whole", "whole", "whole", "whole"],
    ),
    row(
        "buffered, closed",
        closed,
        ["500", "500", "cut", "500", "504"],
    ),
    row(
        "buffered, closed, no response messages",
        |manager| {
            closed(manager);
            without_responses(manager);
        },
        ["500", "500", "cut", "500", "504"],
    ),
    row(
        "duplex, open, no response messages",
        |manager| {
            manager.duplex();
            without_responses(manager);
        },
        ["500", "whole", "whole", "500", "500"],
    ),
    row(
        "duplex, open",
        ConnectionManager::duplex,
        ["500", "500", "cut", "500", "500"],
    ),
    row(
        "duplex, closed",
        |manager| {
            closed(manager);
            manager.duplex();
        },
        ["500", "500", "cut", "500", "500"],
    ),
    row(
        "responses streamed, open",
        |manager| {
            manager.remove_first_token_probe();
            manager.modes(&[("response_body_mode", "STREAMED")]);
        },
        ["whole", "whole", "whole", "whole", "whole"],
    ),
    row(
        "duplex both ways, open",
        |manager| {
            manager.remove_first_token_probe();
            manager.duplex();
            manager.modes(&[("response_body_mode", "FULL_DUPLEX_STREAMED")]);
        },
        ["500", "500", "cut", "500", "500"],
    ),
    row(
        "request buffered, response duplex, open",
        |manager| {
            manager.remove_first_token_probe();
            manager.modes(&[("response_body_mode", "FULL_DUPLEX_STREAMED")]);
        },
        ["whole", "whole", "cut", "whole", "whole"],
    ),
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

fn outcome(got: &RoutedAnswer) -> String {
    let is_stream = got.header("content-type").starts_with("text/event-stream");
    match got.status.as_u16() {
        200 if !got.is_incomplete && (!is_stream || got.text.ends_with("data: [DONE]\n\n")) => {
            "whole".to_owned()
        }
        200 => "cut".to_owned(),
        status => status.to_string(),
    }
}

impl ModeGateway {
    /// Returns the outcome of a request to each listener from `first` on.
    async fn outcomes(&self, first: usize, body: &Value) -> Vec<String> {
        let requests = (first..first + ROWS.len())
            .map(async |at| outcome(&RoutedAnswer::send_unchecked(self.chat_to(at, body)).await));
        join_all(requests).await
    }

    /// Waits until a cluster of Envoy has this many requests in flight.
    async fn wait_active(&self, cluster: &str, wanted: usize) {
        let what = format!("cluster.{cluster}.upstream_rq_active");
        let mut active = 0;
        let reached = until(PATIENCE, async || {
            active = self.envoy_stat(&what).await;
            active == wanted as u64
        });
        assert!(reached.await, "{active} in flight, not {wanted}");
    }

    /// Sends a chat to the listener of each row in the background.
    fn send_to_rows(&self, question: &str) -> Vec<JoinHandle<String>> {
        let send = |at| {
            let request = self.chat_to(at, &chat(question));
            tokio::spawn(async move { outcome(&RoutedAnswer::send_unchecked(request).await) })
        };
        (0..ROWS.len()).map(send).collect()
    }

    /// Asserts that requests to each listener are routed exactly and leave no booking.
    async fn assert_recovered(&self) {
        let served = (0..self.ports.len()).map(async |listener| {
            let exact = async || {
                let request = self.chat_to(listener, &chat("are you there?"));
                let got = RoutedAnswer::send_unchecked(request).await;
                // If Envoy sends no response messages, warmroute cannot add the header with the
                // mode.
                got.status == 200 && ["exact", ""].contains(&got.mode())
            };
            assert!(
                until(PATIENCE, exact).await,
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

async fn joined(requests: Vec<JoinHandle<String>>) -> Vec<String> {
    let outcomes = join_all(requests).await;
    outcomes.into_iter().map(Result::unwrap).collect()
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
    let requests = gateway.send_to_rows("held");
    gateway.wait_active("ext_proc", ROWS.len()).await;
    let outcomes = gateway
        .kill_and_restart(async |_| joined(requests).await)
        .await;
    assert_rows("held", &outcomes, |row| row.held);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_between_request_and_response() {
    let mut gateway = gateway().await;
    hold_tokens(&gateway, true).await;
    let requests = gateway.send_to_rows("between");
    gateway.wait_active("workers", ROWS.len()).await;
    let outcomes = async |gateway: &ModeGateway| {
        hold_tokens(gateway, false).await;
        joined(requests).await
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
        let mut response = gateway.chat_to(at, &body).send().await.unwrap();
        response.chunk().await.unwrap().unwrap();
        response
    });
    let begun = join_all(begun).await;
    let outcomes = async |gateway: &ModeGateway| {
        let rest = begun
            .into_iter()
            .map(async |response| outcome(&RoutedAnswer::read(response).await));
        let mut outcomes = join_all(rest).await;
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
