//! What clients get when warmroute is killed, away or frozen, by how Envoy is configured; and that all is well afterwards.

use futures_util::future::join_all;
use reqwest::Response;
use serde_json::{Value, json};

use crate::bed::{SOON, chat, engine, stream};
use crate::client::{Got, take};
use crate::gateway::{Change, Gateway, Manager};
use crate::support::ports::until;

/// A configuration and what its clients get.
struct Row {
    name: &'static str,
    change: fn(&mut Manager),
    /// Killed while it holds the request.
    held: &'static str,
    /// Killed between request and answer.
    between: &'static str,
    /// Killed in the middle of a stream.
    middle: &'static str,
    /// Not running.
    down: &'static str,
    /// Frozen, where Envoy has half a second of patience.
    frozen: &'static str,
}

fn closed(manager: &mut Manager) {
    manager.filter()["failure_mode_allow"] = json!(false);
}

fn unheard(manager: &mut Manager) {
    manager.modes(&[
        ("response_header_mode", "SKIP"),
        ("response_trailer_mode", "SKIP"),
    ]);
}

const ROWS: [Row; 9] = [
    Row {
        name: "buffered, open",
        change: |_| {},
        held: "whole",
        between: "whole",
        middle: "whole",
        down: "whole",
        frozen: "whole",
    },
    Row {
        name: "buffered, closed",
        change: closed,
        held: "500",
        between: "500",
        middle: "cut",
        down: "500",
        frozen: "504",
    },
    Row {
        name: "buffered, closed, answers unheard",
        change: |manager| {
            closed(manager);
            unheard(manager);
        },
        held: "500",
        between: "500",
        middle: "cut",
        down: "500",
        frozen: "504",
    },
    Row {
        name: "duplex, open, answers unheard",
        change: |manager| {
            manager.duplex();
            unheard(manager);
        },
        held: "500",
        between: "whole",
        middle: "whole",
        down: "500",
        frozen: "500",
    },
    Row {
        name: "duplex, open",
        change: Manager::duplex,
        held: "500",
        between: "500",
        middle: "cut",
        down: "500",
        frozen: "500",
    },
    Row {
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
    Row {
        name: "answers streamed, open",
        change: |manager| {
            manager.alone();
            manager.modes(&[("response_body_mode", "STREAMED")]);
        },
        held: "whole",
        between: "whole",
        middle: "whole",
        down: "whole",
        frozen: "whole",
    },
    Row {
        name: "duplex both ways, open",
        change: |manager| {
            manager.alone();
            manager.duplex();
            manager.modes(&[("response_body_mode", "FULL_DUPLEX_STREAMED")]);
        },
        held: "500",
        between: "500",
        middle: "cut",
        down: "500",
        frozen: "500",
    },
    Row {
        name: "request buffered, answers duplex, open",
        change: |manager| {
            manager.alone();
            manager.modes(&[("response_body_mode", "FULL_DUPLEX_STREAMED")]);
        },
        held: "whole",
        between: "whole",
        middle: "cut",
        down: "whole",
        frozen: "whole",
    },
];

/// Listeners of all rows, and the same again with little patience.
async fn gateway() -> Gateway {
    let mut changes: Vec<Change> = ROWS
        .iter()
        .map(|row| Box::new(row.change) as Change)
        .collect();
    changes.extend(ROWS.iter().map(|row| {
        let change = row.change;
        Box::new(move |manager: &mut Manager| {
            change(manager);
            manager.filter()["message_timeout"] = json!("0.5s");
        }) as Change
    }));
    Gateway::start(
        &[engine(1), engine(2)].map(|spec| spec.with(&["--step-us", "300000"])),
        config(),
        &changes,
    )
    .await
}

fn config() -> Value {
    json!({
        "response": {"worker_header": true},
        "limits": {"exchange_deadline": "25s"},
        "readiness": {"event_sources_deadline": "60s"},
    })
}

fn outcome(got: &Got) -> String {
    match got.status {
        200 if got.whole && !got.header("content-type").starts_with("text/event-stream") => {
            "whole".to_owned()
        }
        200 if got.whole && got.body.ends_with(b"data: [DONE]\n\n") => "whole".to_owned(),
        200 => "cut".to_owned(),
        status => status.to_string(),
    }
}

impl Gateway {
    async fn ask_at(&self, listener: usize, body: &Value) -> Response {
        self.http
            .post(self.at(listener, "/v1/chat/completions"))
            .json(body)
            .send()
            .await
            .unwrap()
    }

    /// A request at every listener from `first` on.
    async fn outcomes(&self, first: usize, body: &Value) -> Vec<String> {
        let asked = (first..first + ROWS.len())
            .map(async |at| outcome(&take(self.ask_at(at, body).await).await));
        join_all(asked).await
    }

    /// Waits until one of Envoy's clusters has so many requests in flight.
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

    /// Every listener's requests are routed exactly, and nothing is booked after them.
    async fn well_again(&self) {
        let served = (0..self.ports.len()).map(async |listener| {
            let exact = async || {
                let got = take(self.ask_at(listener, &chat("are you there?")).await).await;
                // Where nobody listens to answers nobody names the mode in them.
                got.status == 200 && ["exact", ""].contains(&got.mode())
            };
            assert!(
                until(SOON, exact).await,
                "listener {listener} is not served"
            );
        });
        join_all(served).await;
        self.quiet().await;
    }

    async fn kill_and_restart(
        &mut self,
        seen: impl AsyncFnOnce(&Gateway) -> Vec<String>,
    ) -> Vec<String> {
        self.stack.kill9_router();
        let seen = seen(self).await;
        self.stack.start_router(&config()).await.unwrap();
        self.well_again().await;
        seen
    }
}

fn assert_rows(when: &str, seen: &[String], expected: impl Fn(&Row) -> &'static str) {
    let named = |outcome: &dyn Fn(usize) -> String| -> Vec<String> {
        ROWS.iter()
            .enumerate()
            .map(|(at, row)| format!("{}: {}", row.name, outcome(at)))
            .collect()
    };
    assert_eq!(
        named(&|at| seen[at].clone()),
        named(&|at| expected(&ROWS[at]).to_owned()),
        "{when}"
    );
}

async fn hold_tokens(gateway: &Gateway, hold: bool) {
    for id in [1, 2] {
        gateway.first_tokens(id, !hold).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_with_requests_in_hand() {
    let mut gateway = gateway().await;
    gateway.stack.router().unwrap().freeze();
    let asked: Vec<_> = (0..ROWS.len())
        .map(|at| {
            let request = gateway
                .http
                .post(gateway.at(at, "/v1/chat/completions"))
                .json(&chat("held"));
            tokio::spawn(async move { outcome(&take(request.send().await.unwrap()).await) })
        })
        .collect();
    gateway.wait_active("ext_proc", ROWS.len()).await;
    let seen = gateway
        .kill_and_restart(async |_| {
            join_all(asked)
                .await
                .into_iter()
                .map(Result::unwrap)
                .collect()
        })
        .await;
    assert_rows("held", &seen, |row| row.held);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_between_request_and_answer() {
    let mut gateway = gateway().await;
    hold_tokens(&gateway, true).await;
    let asked: Vec<_> = (0..ROWS.len())
        .map(|at| {
            let request = gateway
                .http
                .post(gateway.at(at, "/v1/chat/completions"))
                .json(&chat("between"));
            tokio::spawn(async move { outcome(&take(request.send().await.unwrap()).await) })
        })
        .collect();
    gateway.wait_active("workers", ROWS.len()).await;
    let seen = async |gateway: &Gateway| {
        hold_tokens(gateway, false).await;
        join_all(asked)
            .await
            .into_iter()
            .map(Result::unwrap)
            .collect()
    };
    let seen = gateway.kill_and_restart(seen).await;
    assert_rows("between", &seen, |row| row.between);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_in_the_middle_of_streams_and_down() {
    let mut gateway = gateway().await;
    let body = stream("middle", 12);
    let begun = (0..ROWS.len()).map(async |at| {
        let mut response = gateway.ask_at(at, &body).await;
        response.chunk().await.unwrap().unwrap();
        response
    });
    let begun = join_all(begun).await;
    let seen = async |gateway: &Gateway| {
        let mut seen = join_all(
            begun
                .into_iter()
                .map(async |response| outcome(&take(response).await)),
        )
        .await;
        seen.extend(gateway.outcomes(0, &chat("down")).await);
        seen
    };
    let seen = gateway.kill_and_restart(seen).await;
    assert_rows("in the middle", &seen[..ROWS.len()], |row| row.middle);
    assert_rows("down", &seen[ROWS.len()..], |row| row.down);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen() {
    let gateway = gateway().await;
    gateway.stack.router().unwrap().freeze();
    let seen = gateway.outcomes(ROWS.len(), &chat("frozen")).await;
    gateway.stack.router().unwrap().thaw();
    assert_rows("frozen", &seen, |row| row.frozen);
    gateway.well_again().await;
}
