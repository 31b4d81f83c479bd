//! A deployment to route through, and what the tests ask and observe.

use std::path::Path;
use std::time::Duration;

use reqwest::{RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use warmroute::engine_client::MetricsPage;

use crate::openmetrics::{self, Page};
use crate::support::ports::until;
use crate::support::stack::{Engine, EngineSpec, MODEL, Programs, Stack};

/// How long anything that must happen may take on a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// A running deployment in a directory of its own. The processes end before their directory goes.
pub(crate) struct Bed {
    pub(crate) stack: Stack,
    pub(crate) http: reqwest::Client,
    /// What engines had counted that were killed, by worker.
    harvested: Vec<(u64, MetricsPage)>,
    _dir: tempfile::TempDir,
}

/// An engine twenty times faster than a real one.
pub(crate) fn engine(id: u64) -> EngineSpec {
    EngineSpec::new(id).with(&["--speed", "20"])
}

/// One that does a phase only.
pub(crate) fn engine_for(role: &str, id: u64) -> EngineSpec {
    engine(id).listed(json!({"role": role}))
}

/// The shipped configuration; only how long Envoy waits for warmroute and for connections is another, because on a busy
/// machine a second passes without anybody being at fault.
pub(crate) fn patient(shipped: &str) -> String {
    let mut config = shipped.to_owned();
    for setting in [" message_timeout: ", " connect_timeout: "] {
        assert!(config.contains(&format!("{setting}1s")), "{setting}");
        config = config.replace(&format!("{setting}1s"), &format!("{setting}30s"));
    }
    config
}

/// Lets pins and ranks of clients through to warmroute, as `envoy/README.md` says.
pub(crate) fn letting_pins_through(shipped: &str) -> String {
    let mut config = patient(shipped);
    for name in [
        "x-worker-instance-id",
        "x-prefill-instance-id",
        "x-dp-rank",
        "x-data-parallel-rank",
        "x-prefill-dp-rank",
        "x-dynamo-worker-instance-id",
        "x-dynamo-prefill-instance-id",
        "x-dynamo-dp-rank",
        "x-dynamo-prefill-dp-rank",
    ] {
        let line = format!("              - remove: {name}\n");
        assert_eq!(config.matches(&line).count(), 1, "{name}");
        config = config.replace(&line, "");
    }
    config
}

impl Bed {
    /// Starts everything and waits until requests are routed; `more` is laid over warmroute's configuration.
    pub(crate) async fn start(specs: &[EngineSpec], more: Value) -> Self {
        Self::behind(specs, more, patient).await
    }

    /// The same behind an Envoy of one's own.
    pub(crate) async fn behind(
        specs: &[EngineSpec],
        more: Value,
        envoy: impl Fn(&str) -> String,
    ) -> Self {
        Self::behind_file("standalone", specs, more, envoy).await
    }

    /// The same behind another of the shipped files.
    pub(crate) async fn behind_file(
        file: &str,
        specs: &[EngineSpec],
        more: Value,
        envoy: impl Fn(&str) -> String,
    ) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("warmroute-")
            .tempdir()
            .unwrap();
        let mut stack = Stack::engines(&programs(), specs, dir.path())
            .await
            .unwrap();
        stack.write_workers().unwrap();
        let mut config = json!({
            "response": {"worker_header": true, "prediction_header": true},
            "limits": {"exchange_deadline": "30s"},
            "readiness": {"event_sources_deadline": "60s"},
            "log": {"level": "info"},
        });
        config
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        stack.start_router(&config).await.unwrap();
        let shipped = stack.standalone().config_of(file, &[]).unwrap();
        stack.start_envoy(&envoy(&shipped)).await.unwrap();
        let http = warmroute::tls::client().timeout(SOON).build().unwrap();
        Self {
            stack,
            http,
            harvested: Vec::new(),
            _dir: dir,
        }
    }

    pub(crate) fn post(&self, body: &Value) -> RequestBuilder {
        self.http.post(self.stack.url(path_of(body))).json(body)
    }

    pub(crate) async fn ask(&self, body: &Value) -> Answer {
        Answer::of(self.post(body)).await
    }

    /// The same in the background.
    pub(crate) fn asking(&self, body: &Value) -> JoinHandle<Answer> {
        tokio::spawn(Answer::of(self.post(body)))
    }

    /// Tells an engine how to misbehave.
    pub(crate) async fn misbehave(&self, id: u64, how: Value) {
        let response = self
            .http
            .post(self.engine(id).url("/sim/misbehave"))
            .json(&how)
            .send()
            .await
            .unwrap();
        assert!(response.status().is_success());
    }

    /// Whether first tokens of an engine come; where they do not, its prefills do not end.
    pub(crate) async fn first_tokens(&self, id: u64, come: bool) {
        self.misbehave(id, json!({"hold_first_tokens": !come}))
            .await;
    }

    pub(crate) fn engine(&self, id: u64) -> &Engine {
        &self.stack.engines[self.at(id)]
    }

    fn at(&self, id: u64) -> usize {
        self.stack
            .engines
            .iter()
            .position(|engine| engine.spec.id == id)
            .unwrap()
    }

    /// Keeps what an engine has counted until now, before it is killed.
    pub(crate) async fn harvest(&mut self, id: u64) {
        let page = self.page(id).await;
        self.harvested.push((id, page));
    }

    async fn page(&self, id: u64) -> MetricsPage {
        let page = self
            .http
            .get(self.engine(id).url("/metrics"))
            .send()
            .await
            .unwrap();
        MetricsPage::read(&page.text().await.unwrap())
    }

    /// A counter or gauge of an engine, over all engines.
    pub(crate) async fn engines(&self, name: &str) -> f64 {
        let all: Vec<u64> = self
            .stack
            .engines
            .iter()
            .map(|engine| engine.spec.id)
            .collect();
        self.engine_sum(&all, name).await
    }

    /// The same over some engines. What was counted before they were killed counts; a gauge of an engine that was killed
    /// and does not run again is nothing.
    pub(crate) async fn engine_sum(&self, ids: &[u64], name: &str) -> f64 {
        let of = |page: &MetricsPage| page.sum(name).unwrap_or_else(|| panic!("no {name}"));
        let counted = |name: &str| name.ends_with("_total");
        let before = self
            .harvested
            .iter()
            .filter(|(id, _)| ids.contains(id) && counted(name));
        let mut sum = before.map(|(_, page)| of(page)).sum();
        for id in ids.iter().filter(|id| self.engine(**id).pid().is_some()) {
            sum += of(&self.page(*id).await);
        }
        sum
    }

    pub(crate) fn kill(&mut self, id: u64) {
        let at = self.at(id);
        self.stack.engines[at].kill9();
    }

    pub(crate) async fn restart(&mut self, id: u64) {
        let (programs, run_dir, at) = (
            self.stack.programs.clone(),
            self.stack.run_dir.clone(),
            self.at(id),
        );
        self.stack.engines[at]
            .restart(&programs, &run_dir)
            .await
            .unwrap();
    }

    pub(crate) async fn metrics(&self) -> Page {
        let asking = self
            .http
            .get(self.stack.admin_url("/metrics"))
            .header("accept", openmetrics::ACCEPT);
        let response = asking.send().await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        Page::read(&response.text().await.unwrap())
    }

    /// Waits until a metrics page pleases.
    pub(crate) async fn shows(&self, what: &str, pleases: impl Fn(&Page) -> bool) {
        let met = until(SOON, async || pleases(&self.metrics().await)).await;
        assert!(met, "{what}:\n{}", self.metrics().await.text());
    }

    /// A number of one worker rank as `/debug/load` has it.
    pub(crate) async fn load(&self, id: u64, of: &str) -> u64 {
        let ranks = self.stack.debug("load").await.unwrap();
        let own = ranks
            .as_array()
            .unwrap()
            .iter()
            .filter(|rank| rank["rank"]["worker"] == json!(id.to_string()));
        own.map(|rank| {
            rank[of]
                .as_u64()
                .unwrap_or_else(|| panic!("no {of} in {ranks}"))
        })
        .sum()
    }

    pub(crate) async fn wait_load(&self, id: u64, of: &str, wanted: impl Fn(u64) -> bool) {
        let reached = until(SOON, async || wanted(self.load(id, of).await)).await;
        assert!(
            reached,
            "{of} of worker {id} is {}",
            self.load(id, of).await
        );
    }

    /// Waits until nothing is in flight, and insists that then nothing is booked, waits or runs in a session.
    pub(crate) async fn quiet(&self) {
        self.shows("exchanges are open", |page| {
            page.sum("exchanges_open", &[]) == 0.0
        })
        .await;
        let load = self.stack.debug("load").await.unwrap();
        for rank in load.as_array().unwrap() {
            for of in ["active_requests", "active_blocks", "active_prefill_tokens"] {
                assert_eq!(rank[of], json!(0), "{of} of {rank}");
            }
        }
        let page = self.metrics().await;
        for family in [
            "queue_requests",
            "queue_prompt_tokens",
            "queue_cached_tokens",
            "session_requests",
        ] {
            assert_eq!(page.sum(family, &[]), 0.0, "{family}:\n{}", page.text());
        }
    }

    /// Waits until nothing is in flight and the index holds exactly what the engines hold.
    pub(crate) async fn settle(&self) {
        self.quiet().await;
        let agree = async || {
            let indexed = self.stack.debug("index").await.unwrap()["total"]["device"]
                .as_u64()
                .unwrap();
            indexed == self.cached_blocks().await
        };
        assert!(
            until(SOON, agree).await,
            "the index differs from what the engines hold"
        );
    }

    async fn cached_blocks(&self) -> u64 {
        let mut blocks = 0;
        for engine in &self.stack.engines {
            let Ok(response) = self.http.get(engine.url("/sim/state")).send().await else {
                continue;
            };
            let state: Value = response.json().await.unwrap();
            let ranks = state["ranks"].as_array().unwrap().iter();
            blocks += ranks
                .map(|rank| rank["cached"].as_array().unwrap().len() as u64)
                .sum::<u64>();
        }
        blocks
    }

    /// Asks engine after engine for the same, directly, so that each of them has it cached.
    pub(crate) async fn warm(&self, id: u64, body: &Value) {
        let request = self
            .http
            .post(self.engine(id).url(path_of(body)))
            .json(body);
        assert_eq!(request.send().await.unwrap().status(), StatusCode::OK);
        self.settle().await;
    }
}

pub(crate) fn programs() -> Programs {
    let tests = std::env::current_exe().unwrap();
    let engine = tests
        .parent()
        .unwrap()
        .with_file_name("examples")
        .join("engine_sim");
    // A whole `cargo test` builds it first; a run of this test alone does not.
    assert!(
        Path::exists(&engine),
        "{} is missing: cargo build --example engine_sim",
        engine.display()
    );
    Programs {
        warmroute: vec![env!("CARGO_BIN_EXE_warmroute").into()],
        engine: vec![engine.into()],
    }
}

pub(crate) fn path_of(body: &Value) -> &'static str {
    if body["prompt"].is_null() {
        "/v1/chat/completions"
    } else {
        "/v1/completions"
    }
}

/// A unary completion. All chats begin alike, so that whoever had one is warmer for the next; completions need not.
pub(crate) fn text(prompt: &str) -> Value {
    json!({"model": MODEL, "prompt": prompt, "max_tokens": 2})
}

/// A unary chat.
pub(crate) fn chat(question: &str) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 2})
}

/// The same as a stream that tells its usage.
pub(crate) fn stream(question: &str, tokens: u64) -> Value {
    let mut body = chat(question);
    body["max_tokens"] = json!(tokens);
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body
}

/// A few hundred tokens that no other `topic` begins with.
pub(crate) fn essay(topic: usize) -> String {
    let words = [
        "river", "engine", "window", "copper", "letter", "garden", "signal", "winter", "harbour",
        "thread",
    ];
    let word = |at: usize| words[(at * 7 + topic * (at + 3)) % words.len()];
    let body: Vec<&str> = (0..300).map(word).collect();
    format!("{topic} is the number: {}", body.join(" "))
}

/// What a client got.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    headers: reqwest::header::HeaderMap,
    pub(crate) text: String,
    /// Whether its end never came.
    pub(crate) cut: bool,
}

impl Answer {
    pub(crate) async fn of(request: RequestBuilder) -> Self {
        let answer = Self::begun(request).await;
        assert!(!answer.cut, "{answer:?}");
        answer
    }

    /// The same of a worker that may die.
    pub(crate) async fn begun(request: RequestBuilder) -> Self {
        Self::read(request.send().await.unwrap()).await
    }

    pub(crate) async fn read(mut response: Response) -> Self {
        let (status, headers) = (response.status(), response.headers().clone());
        let mut text = Vec::new();
        let cut = loop {
            match response.chunk().await {
                Ok(Some(chunk)) => text.extend_from_slice(&chunk),
                end => break end.is_err(),
            }
        };
        Self {
            status,
            headers,
            text: String::from_utf8(text).unwrap(),
            cut,
        }
    }

    /// A header; empty where there is none.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }

    /// The worker that answered.
    pub(crate) fn engine(&self) -> u64 {
        assert_eq!(self.status, StatusCode::OK, "{self:?}");
        self.header("x-engine-id").parse().unwrap()
    }

    /// Whether Envoy tried more than one worker.
    pub(crate) fn is_retried(&self) -> bool {
        let attempts = self.header("x-received-envoy-attempt-count");
        assert!(!attempts.is_empty(), "{self:?}");
        attempts != "1"
    }

    /// The worker that the response names.
    pub(crate) fn chosen(&self) -> u64 {
        self.header("x-worker-instance-id")
            .parse()
            .unwrap_or_else(|_| panic!("nobody was chosen: {self:?}"))
    }

    pub(crate) fn mode(&self) -> &str {
        self.header("x-warmroute-mode")
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Insists that it is an error as OpenAI writes them; gives out its code and its message.
    pub(crate) fn error(&self, status: u16) -> (String, String) {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("content-type"), "application/json", "{self:?}");
        let error = &self.json()["error"];
        let text = |key: &str| {
            error[key]
                .as_str()
                .unwrap_or_else(|| panic!("no {key}: {self:?}"))
                .to_owned()
        };
        assert!(
            !text("type").is_empty() && error.get("param").is_some(),
            "{self:?}"
        );
        (text("code"), text("message"))
    }

    /// Seconds after which the client may come back.
    pub(crate) fn retry_after(&self) -> u64 {
        self.header("retry-after")
            .parse()
            .unwrap_or_else(|_| panic!("no Retry-After: {self:?}"))
    }
}
