//! A deployment to break, clients that check whether their answer is whole, and conditions to wait for.

use std::path::Path;
use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Response;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::support::child::Child;
use crate::support::ports::until;
use crate::support::stack::{EngineSpec, MODEL, Programs, Stack};

/// How long anything that must happen may take on a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// A running deployment in a directory of its own.
pub(crate) struct Bed {
    pub(crate) stack: Stack,
    pub(crate) http: reqwest::Client,
    more: Value,
    _dir: tempfile::TempDir,
}

/// How long Envoy waits for warmroute.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// As shipped.
    Shipped,
    /// So long that a busy machine does not play a part.
    Long,
}

/// What a client got.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) engine: u64,
    /// The step of the ladder; none where Envoy decided.
    pub(crate) mode: Option<String>,
    pub(crate) predicted: Option<u64>,
    pub(crate) delivered: u64,
}

impl Bed {
    /// Starts engines with the given arguments, ids from 1 on.
    pub(crate) async fn start(engines: usize, args: &[&str], patience: Patience) -> Self {
        let specs: Vec<_> = (1..=engines as u64)
            .map(|id| EngineSpec::new(id).with(args))
            .collect();
        Self::of(&specs, patience, json!({})).await
    }

    pub(crate) async fn of(specs: &[EngineSpec], patience: Patience, more: Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut all = json!({"response": {"prediction_header": true, "worker_header": true}});
        all.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        if patience == Patience::Long {
            all["limits"] = json!({"exchange_deadline": "25s"});
        }
        let mut stack = Stack::engines(&programs(), specs, dir.path())
            .await
            .unwrap();
        stack.write_workers().unwrap();
        stack.start_router(&all).await.unwrap();
        let mut config = stack.standalone().config().unwrap();
        if patience == Patience::Long {
            for setting in [" message_timeout: ", " connect_timeout: "] {
                assert_eq!(
                    config.matches(&format!("{setting}1s")).count(),
                    1,
                    "{setting}"
                );
                config = config.replace(&format!("{setting}1s"), &format!("{setting}30s"));
            }
        }
        stack.start_envoy(&config).await.unwrap();
        let http = warmroute::tls::client().build().unwrap();
        let bed = Self {
            stack,
            http,
            more: all,
            _dir: dir,
        };
        bed.routed_again().await;
        bed
    }

    /// Starts warmroute again, with the configuration it had.
    pub(crate) async fn restart_router(&mut self) {
        let more = self.more.clone();
        self.stack.start_router(&more).await.unwrap();
    }

    /// Waits until requests are routed by warmroute, exactly.
    pub(crate) async fn routed_again(&self) {
        let exact =
            async || self.ask(&chat("are you there?", 1)).await.mode.as_deref() == Some("exact");
        assert!(until(SOON, exact).await, "no request was routed exactly");
        self.quiet().await;
    }

    /// Tells warmroute to end and starts another one in its place, with the configuration it had; the old one is returned.
    pub(crate) async fn succeed_router(&mut self) -> Child {
        let more = self.more.clone();
        self.stack.succeed_router(&more).await.unwrap()
    }

    pub(crate) fn post(&self, body: &Value) -> reqwest::RequestBuilder {
        self.http
            .post(self.stack.url("/v1/chat/completions"))
            .json(body)
    }

    /// Sends a request and insists on the whole answer.
    pub(crate) async fn ask(&self, body: &Value) -> Answer {
        whole(self.post(body).send().await.unwrap(), body).await
    }

    /// The same in the background.
    pub(crate) fn asking(&self, body: Value) -> JoinHandle<Answer> {
        let request = self.post(&body);
        tokio::spawn(async move { whole(request.send().await.unwrap(), &body).await })
    }

    /// Several requests at once in the background, every second a stream.
    pub(crate) fn asking_many(
        &self,
        count: usize,
        name: &str,
        tokens: u64,
    ) -> Vec<JoinHandle<Answer>> {
        let body = |at| {
            if at % 2 == 0 {
                chat(&format!("{name} {at}"), tokens)
            } else {
                stream(&format!("{name} {at}"), tokens)
            }
        };
        (0..count).map(|at| self.asking(body(at))).collect()
    }

    /// One number summed over all ranks.
    pub(crate) async fn load(&self, of: &str) -> u64 {
        let ranks = self.stack.debug("load").await.unwrap();
        ranks
            .as_array()
            .unwrap()
            .iter()
            .map(|rank| rank[of].as_u64().unwrap())
            .sum()
    }

    pub(crate) async fn wait_load(&self, of: &str, wanted: u64) {
        let mut seen = 0;
        let reached = until(SOON, async || {
            seen = self.load(of).await;
            seen == wanted
        });
        assert!(reached.await, "{of} is {seen}, not {wanted}");
    }

    /// A number of warmroute's metrics page.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        number(&self.text(&self.stack.admin_url("/metrics")).await, name)
    }

    pub(crate) async fn wait_exchanges(&self, wanted: usize) {
        let mut seen = 0.0;
        let reached = until(SOON, async || {
            seen = self.metric("warmroute_exchanges_open").await;
            seen == wanted as f64
        });
        assert!(reached.await, "{seen} exchanges are open, not {wanted}");
    }

    /// Waits until Envoy has that many streams to warmroute, as it sees them.
    pub(crate) async fn wait_held(&self, wanted: usize) {
        let url = self
            .stack
            .standalone()
            .admin_url("/stats?filter=cluster.ext_proc.upstream_rq_active");
        let mut seen = 0.0;
        let reached = until(SOON, async || {
            seen = number(
                &self.text(&url).await,
                "cluster.ext_proc.upstream_rq_active:",
            );
            seen == wanted as f64
        });
        assert!(
            reached.await,
            "Envoy has {seen} streams to warmroute, not {wanted}"
        );
    }

    /// Waits until nothing is open and insists that then nothing is booked, on any rank.
    pub(crate) async fn quiet(&self) {
        self.wait_exchanges(0).await;
        for rank in self.stack.debug("load").await.unwrap().as_array().unwrap() {
            for of in ["active_requests", "active_blocks", "active_prefill_tokens"] {
                assert_eq!(rank[of], json!(0), "{of} of {rank}");
            }
        }
    }

    async fn text(&self, url: &str) -> String {
        self.http
            .get(url)
            .send()
            .await
            .unwrap()
            .text()
            .await
            .unwrap()
    }

    /// Tells an engine how to misbehave.
    pub(crate) async fn misbehave(&self, at: usize, how: &Value) {
        let response = self
            .http
            .post(self.stack.engines[at].url("/sim/misbehave"))
            .json(how)
            .send()
            .await
            .unwrap();
        assert!(response.status().is_success());
    }
}

fn number(page: &str, name: &str) -> f64 {
    let line = page
        .lines()
        .find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    line.unwrap_or_else(|| panic!("no {name} in {page}"))
}

fn programs() -> Programs {
    let warmroute = env!("CARGO_BIN_EXE_warmroute");
    let engine = Path::new(warmroute)
        .with_file_name("examples")
        .join("engine_sim");
    assert!(
        engine.exists(),
        "{} is missing: cargo build --examples",
        engine.display()
    );
    Programs {
        warmroute: vec![warmroute.into()],
        engine: vec![engine.into()],
    }
}

/// A unary request.
pub(crate) fn chat(text: &str, tokens: u64) -> Value {
    // Long enough for several blocks, and different from the first word on, so that prompts share only the template.
    let filler = "one two three four five six seven eight nine ten ".repeat(12);
    json!({"model": MODEL, "max_tokens": tokens, "messages": [{"role": "user", "content": format!("{text}: {filler}")}]})
}

/// A streaming request.
pub(crate) fn stream(text: &str, tokens: u64) -> Value {
    let mut body = chat(text, tokens);
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body
}

/// Reads an answer to its end and insists that it is complete.
pub(crate) async fn whole(response: Response, asked: &Value) -> Answer {
    let (status, headers) = (response.status(), response.headers().clone());
    let text = response.text().await.unwrap();
    assert_eq!(status, 200, "{headers:?} {text}");
    let usage = if asked["stream"] == json!(true) {
        usage_of_stream(&text)
    } else {
        serde_json::from_str::<Value>(&text).unwrap()["usage"].clone()
    };
    assert_eq!(usage["completion_tokens"], asked["max_tokens"], "{text}");
    let header = |name: &str| {
        headers
            .get(name)
            .map(|value| value.to_str().unwrap().to_owned())
    };
    Answer {
        engine: header("x-engine-id").unwrap().parse().unwrap(),
        mode: header("x-warmroute-mode"),
        predicted: header("x-warmroute-predicted-cached-tokens")
            .map(|tokens| tokens.parse().unwrap()),
        delivered: usage["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap_or(0),
    }
}

/// What the last event before the end says was used.
pub(crate) fn usage_of_stream(text: &str) -> Value {
    assert!(text.ends_with("data: [DONE]\n\n"), "a cut stream: {text}");
    let events = text.lines().filter_map(|line| line.strip_prefix("data: {"));
    let usage =
        |event| serde_json::from_str::<Value>(&format!("{{{event}")).unwrap()["usage"].clone();
    events.map(usage).rfind(|usage| !usage.is_null()).unwrap()
}

/// Insists that every request in the background was answered whole.
pub(crate) async fn all(asking: Vec<JoinHandle<Answer>>) -> Vec<Answer> {
    let answers = tokio::time::timeout(SOON * 2, join_all(asking))
        .await
        .expect("requests are still unanswered");
    answers.into_iter().map(Result::unwrap).collect()
}
