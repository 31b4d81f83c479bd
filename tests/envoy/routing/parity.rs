//! Parity between the tokens of engines and of warmroute: a mismatch is detected, reported and
//! routed load-only until it ends. Also tokenization by remote engines, which may be unavailable.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::TcpListener;
use warmroute_testbed::deployment::{BLOCK_SIZE, MODEL};
use warmroute_testbed::merge_config;
use warmroute_testbed::ports::{FreePort, PATIENCE, until};

use crate::routing::bed::{RoutingBed, chat, engine, essay, text};
use crate::support::model_file;

/// Template that differs from that of the model after the first tokens.
const OTHER: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                     {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

struct TemplateFile {
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl TemplateFile {
    fn other() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("other.jinja");
        std::fs::write(&path, OTHER).unwrap();
        Self {
            path,
            _directory: directory,
        }
    }

    fn flags<'a>(&'a self, extra_flags: &[&'a str]) -> Vec<&'a str> {
        [
            &["--chat-template", self.path.to_str().unwrap()],
            extra_flags,
        ]
        .concat()
    }
}

async fn parity(bed: &RoutingBed) -> Value {
    bed.stack.debug_page("parity").await.unwrap()[0].take()
}

async fn wait_tokens_disabled(bed: &RoutingBed, tokens_disabled: bool) -> Value {
    let reached = until(PATIENCE, async || {
        parity(bed).await["tokens_disabled"] == tokens_disabled
    })
    .await;
    let shown = parity(bed).await;
    assert!(
        reached,
        "tokens_disabled: {tokens_disabled}\n{shown:#}\n{}",
        bed.router_log()
    );
    shown
}

/// Restarts the engine with the correct template.
async fn restart_with_own_template(bed: &mut RoutingBed) {
    bed.stack.engines[0]
        .spec
        .args
        .retain(|arg| !arg.contains("template") && !arg.contains("jinja"));
    bed.restart(1).await;
}

fn models(more: &Value) -> Value {
    let mut model = json!({"name": MODEL, "block_size": BLOCK_SIZE});
    merge_config(&mut model, more);
    json!([model])
}

fn with_tokenizer(more: &Value) -> Value {
    let mut model = json!({
        "tokenizer": model_file("tokenizer.json.gz"), "tokenizer_config": model_file("tokenizer_config.json")});
    merge_config(&mut model, more);
    models(&model)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn wrong_template_is_reported_until_engine_restart() {
    let template = TemplateFile::other();
    let config = json!({"engines": {"parity_check": {"interval": "1s", "timeout": "30s"}}});
    let mut bed = RoutingBed::start(&[engine(1).with(&template.flags(&[]))], config).await;
    let shown = wait_tokens_disabled(&bed, true).await;
    assert_difference_is_reported(&shown, &bed.router_log());
    let question = chat(&essay(1));
    for _ in 0..2 {
        let answer = bed.query(&question).await;
        assert_eq!(
            (answer.mode(), answer.engine()),
            ("load_only", 1),
            "{answer:?}"
        );
    }
    // Token ids in a request are used unchanged.
    let tokens: Vec<u32> = (1000..1100).collect();
    assert_eq!(
        bed.query(&json!({"model": MODEL, "prompt": tokens, "max_tokens": 2}))
            .await
            .mode(),
        "exact"
    );
    bed.wait_metrics("the mismatch is counted", |page| {
        page.sum("parity_tokens_disabled", &[("model", MODEL)]) == 1.0
            && page.sum("parity_mismatches_total", &[("model", MODEL)]) == 1.0
            && page.sum("parity_workers", &[("outcome", "differs")]) == 1.0
            && page.sum("degradations_total", &[("reason", "parity_mismatch")]) == 2.0
    })
    .await;
    restart_with_own_template(&mut bed).await;
    let recovered = wait_tokens_disabled(&bed, false).await;
    assert_eq!(
        recovered["workers"]["1"]["verdict"], "agrees",
        "{recovered:#}"
    );
    assert!(
        recovered["workers"]["1"]["compared"].as_u64().unwrap() > 10,
        "{recovered:#}"
    );
    let exact = until(PATIENCE, async || {
        bed.query(&question).await.mode() == "exact"
    })
    .await;
    assert!(exact, "{}", bed.router_log());
}

/// Asserts that the page and the log show the difference of the chat template.
fn assert_difference_is_reported(shown: &Value, log_text: &str) {
    let difference = &shown["workers"]["1"]["difference"];
    assert_eq!(
        (&difference["compared"], &difference["canary"]),
        (&json!("tokens"), &json!("chat_plain")),
        "{shown:#}"
    );
    assert!(
        difference["warmroute_token"].is_u64() && difference["engine_token"].is_u64(),
        "{shown:#}"
    );
    assert_ne!(difference["warmroute_token"], difference["engine_token"]);
    // Qwen's template adds a default system prompt.
    assert!(
        difference["warmroute_text"]
            .as_str()
            .unwrap()
            .contains("<|im_start|>system"),
        "{shown:#}"
    );
    assert!(
        difference["engine_text"]
            .as_str()
            .unwrap()
            .contains("<|im_start|>user"),
        "{shown:#}"
    );
    let line = log_text
        .lines()
        .find(|line| line.contains("engine tokens differ"))
        .unwrap_or_else(|| panic!("{log_text}"));
    for word in [
        "chat_plain",
        &format!("warmroute_token={}", difference["warmroute_token"]),
        &format!("engine_token={}", difference["engine_token"]),
    ] {
        assert!(line.contains(word), "{word}: {line}");
    }
}

/// KV events alone detect a mismatch and its end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn events_detect_mismatch_within_hundred_requests() {
    let template = TemplateFile::other();
    let config = json!({"engines": {"parity_check": {"interval": "1s"}}});
    let flags = template.flags(&["--no-tokenize", "--no-render"]);
    let mut bed = RoutingBed::start(&[engine(1).with(&flags)], config).await;
    let mut requests = 0;
    let found = until(PATIENCE, async || {
        requests += 1;
        bed.query(&chat(&essay(requests))).await.engine();
        // Events are compared two seconds later.
        tokio::time::sleep(Duration::from_millis(100)).await;
        parity(&bed).await["tokens_disabled"] == true
    });
    assert!(
        found.await,
        "{:#}\n{}",
        parity(&bed).await,
        bed.router_log()
    );
    assert!(requests <= 100, "{requests} requests");
    let shown = parity(&bed).await;
    assert_eq!(shown["workers"]["1"]["verdict"], "cannot_test", "{shown:#}");
    let difference = &shown["workers"]["1"]["events"]["differs"];
    assert_eq!(
        (&difference["compared"], &difference["block"]),
        (&json!("events"), &json!(0)),
        "{shown:#}"
    );
    let nothing = [
        "canary",
        "warmroute_token",
        "engine_token",
        "warmroute_text",
        "engine_text",
    ];
    assert!(
        nothing.iter().all(|key| difference[*key].is_null()),
        "no request text is shown: {shown:#}"
    );
    assert_eq!(bed.query(&chat(&essay(500))).await.mode(), "load_only");
    restart_with_own_template(&mut bed).await;
    let mut topic = 1000;
    let recovered = until(PATIENCE, async || {
        topic += 1;
        bed.query(&unrelated_chat(topic)).await;
        parity(&bed).await["tokens_disabled"] == false
    });
    assert!(
        recovered.await,
        "{:#}\n{}",
        parity(&bed).await,
        bed.router_log()
    );
    assert_eq!(bed.query(&unrelated_chat(topic)).await.mode(), "exact");
}

/// Returns a chat that shares no block with other chats.
fn unrelated_chat(topic: usize) -> Value {
    let mut body = chat("Go on.");
    let question = body["messages"][0].take();
    body["messages"] = json!([{"role": "system", "content": essay(topic)}, question]);
    body
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn mismatch_falls_back_to_remote_tokenizer() {
    let template = TemplateFile::other();
    let tokens = json!({"mode": "on_mismatch", "endpoint": "tokenize", "timeout": "20s"});
    let config = json!({
        "models": with_tokenizer(&json!({"remote_tokenizer": tokens})),
        "engines": {"parity_check": {"timeout": "30s"}},
    });
    let bed = RoutingBed::start(&[engine(1).with(&template.flags(&[]))], config).await;
    wait_tokens_disabled(&bed, true).await;
    exact_twice(&bed, 1).await;
    // `/tokenize` ignores this field, so warmroute does not call it.
    let mut cut = chat(&essay(2));
    cut["truncate_prompt_tokens"] = json!(64);
    assert_eq!(bed.query(&cut).await.mode(), "load_only");
}

/// Sends a chat twice. Asserts that the engine reports the predicted cached tokens the second time.
async fn exact_twice(bed: &RoutingBed, topic: usize) {
    let question = chat(&essay(topic));
    assert_eq!(
        bed.query(&question).await.mode(),
        "exact",
        "{}",
        bed.router_log()
    );
    bed.settle().await;
    let answer = bed.query(&question).await;
    assert_eq!(answer.mode(), "exact", "{answer:?}");
    let cached = answer.cached_tokens();
    assert!(cached > 100, "{answer:?}");
    assert_eq!(answer.predicted(), Some(cached), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn remote_tokenizer_alone_routes_exactly() {
    let directory = tempfile::tempdir().unwrap();
    let token = directory.path().join("token");
    std::fs::write(&token, "letmein\n").unwrap();
    let tokens = json!({"timeout": "20s", "token_file": token});
    let bed = RoutingBed::start(
        &[engine(1), engine(2)],
        json!({"models": models(&json!({"remote_tokenizer": tokens}))}),
    )
    .await;
    exact_twice(&bed, 1).await;
    let prompt = text(&essay(2));
    let first = bed.query(&prompt).await;
    bed.settle().await;
    let second = bed.query(&prompt).await;
    assert_eq!(
        (first.mode(), second.mode(), second.engine()),
        ("exact", "exact", first.engine())
    );
    bed.wait_metric("remote_tokenizer_requests_total", &[("outcome", "ok")], 4.0)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn dead_or_slow_render_servers_cause_no_error() {
    // The first server accepts connections and never responds. The second address has no server.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent_url = format!("http://{}", silent.local_addr().unwrap());
    let held = tokio::spawn(async move {
        let mut sockets = Vec::new();
        while let Ok((socket, _)) = silent.accept().await {
            sockets.push(socket);
        }
    });
    let dead = format!("http://127.0.0.1:{}", FreePort::find().unwrap().release());
    let tokens = json!({"urls": [silent_url, dead], "timeout": "200ms"});
    for (ours, mode) in [(true, "exact"), (false, "load_only")] {
        let more = json!({"remote_tokenizer": tokens});
        let models = if ours {
            with_tokenizer(&more)
        } else {
            models(&more)
        };
        let bed = RoutingBed::start(&[engine(1)], json!({"models": models})).await;
        // After three failures of both servers, no request waits for them.
        for topic in 0..4 {
            let answer = bed.query(&chat(&essay(topic))).await;
            assert_eq!((answer.mode(), answer.engine()), (mode, 1), "{answer:?}");
        }
        bed.wait_metrics("no engine is queried", |page| {
            page.sum(
                "remote_tokenizer_requests_total",
                &[("outcome", "no_engine")],
            ) >= 1.0
        })
        .await;
        let reasons = bed
            .metric(
                "degradations_total",
                &[("reason", "remote_tokenizer_failed")],
            )
            .await;
        assert_eq!(reasons, if ours { 0.0 } else { 4.0 });
    }
    held.abort();
}
