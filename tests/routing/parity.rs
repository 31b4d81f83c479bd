//! Engines that make other tokens than warmroute does are noticed, named and not believed, until they agree again; and the
//! engines' own tokens in place of ours, whether they can be had or not.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::bed::{Bed, SOON, chat, engine, essay, text};
use crate::support::ports::{FreePort, until};
use crate::support::stack::{BLOCK_SIZE, EngineSpec, MODEL, model_file};

/// Where the engine's template says something else: the tokens before it are the same.
const OTHER: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                     {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

struct Template {
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Template {
    fn other() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("other.jinja");
        std::fs::write(&path, OTHER).unwrap();
        Self {
            path,
            _folder: folder,
        }
    }

    fn flags<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        [&["--chat-template", self.path.to_str().unwrap()], more].concat()
    }
}

async fn parity(bed: &Bed) -> Value {
    bed.stack.debug("parity").await.unwrap()[0].take()
}

async fn becomes(bed: &Bed, mistrusted: bool) -> Value {
    let reached = until(SOON, async || parity(bed).await["mistrusted"] == mistrusted).await;
    let shown = parity(bed).await;
    assert!(reached, "mistrusted: {mistrusted}\n{shown:#}\n{}", log(bed));
    shown
}

fn log(bed: &Bed) -> String {
    std::fs::read_to_string(bed.stack.router().unwrap().log()).unwrap()
}

/// The engine starts again as its operator meant it.
async fn mend(bed: &mut Bed) {
    bed.stack.engines[0]
        .spec
        .args
        .retain(|arg| !arg.contains("template") && !arg.contains("jinja"));
    bed.restart(1).await;
}

fn models(more: &Value) -> Value {
    let mut model = json!({"name": MODEL, "block_size": BLOCK_SIZE});
    model
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    json!([model])
}

fn with_tokenizer(more: &Value) -> Value {
    let mut model = json!({
        "tokenizer": model_file("tokenizer.json.gz"), "tokenizer_config": model_file("tokenizer_config.json")});
    model
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    models(&model)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_template_is_named_at_the_start_and_forgiven_after_a_restart_with_the_right_one() {
    let template = Template::other();
    let config = json!({"self_test": {"interval": "1s", "deadline": "30s"}});
    let mut bed = Bed::start(&[engine(1).with(&template.flags(&[]))], config).await;
    let shown = becomes(&bed, true).await;
    let difference = &shown["workers"]["1"]["difference"];
    assert_eq!(
        (&difference["what"], &difference["canary"]),
        (&json!("tokens"), &json!("chat_plain")),
        "{shown:#}"
    );
    assert!(
        difference["ours"].is_u64() && difference["theirs"].is_u64(),
        "{shown:#}"
    );
    assert_ne!(difference["ours"], difference["theirs"]);
    // Qwen's template says who it is where nobody else does.
    assert!(
        difference["our_text"]
            .as_str()
            .unwrap()
            .contains("<|im_start|>system"),
        "{shown:#}"
    );
    assert!(
        difference["their_text"]
            .as_str()
            .unwrap()
            .contains("<|im_start|>user"),
        "{shown:#}"
    );
    let said = log(&bed);
    let line = said
        .lines()
        .find(|line| line.contains("makes other tokens than we do"))
        .unwrap_or_else(|| panic!("{said}"));
    for word in [
        "chat_plain",
        &format!("ours=Some({})", difference["ours"]),
        &format!("theirs=Some({})", difference["theirs"]),
    ] {
        assert!(line.contains(word), "{word}: {line}");
    }
    let question = chat(&essay(1));
    for _ in 0..2 {
        let answer = bed.ask(&question).await;
        assert_eq!(
            (answer.mode(), answer.engine()),
            ("load_only", 1),
            "{answer:?}"
        );
    }
    // Tokens that the client brings are not ours.
    let tokens: Vec<u32> = (1000..1100).collect();
    assert_eq!(
        bed.ask(&json!({"model": MODEL, "prompt": tokens, "max_tokens": 2}))
            .await
            .mode(),
        "exact"
    );
    bed.shows("it is counted", |page| {
        page.sum("parity_mistrusted", &[("model", MODEL)]) == 1.0
            && page.sum("parity_mismatches_total", &[("model", MODEL)]) == 1.0
            && page.sum("parity_workers", &[("outcome", "differs")]) == 1.0
            && page.sum("degradations_total", &[("reason", "parity_mismatch")]) == 2.0
    })
    .await;
    mend(&mut bed).await;
    let healed = becomes(&bed, false).await;
    assert_eq!(healed["workers"]["1"]["verdict"], "agrees", "{healed:#}");
    assert!(
        healed["workers"]["1"]["compared"].as_u64().unwrap() > 10,
        "{healed:#}"
    );
    let exact = until(SOON, async || bed.ask(&question).await.mode() == "exact").await;
    assert!(exact, "{}", log(&bed));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_engines_only_the_one_that_differs_is_left_to_the_load() {
    let template = Template::other();
    let bed = Bed::start(
        &[engine(1).with(&template.flags(&[])), engine(2)],
        json!({}),
    )
    .await;
    let told = async || {
        let shown = parity(&bed).await;
        shown["workers"]["1"]["verdict"] == "differs"
            && shown["workers"]["2"]["verdict"] == "agrees"
    };
    assert!(until(SOON, told).await, "{:#}", parity(&bed).await);
    assert_eq!(parity(&bed).await["mistrusted"], false);
    let mut modes = std::collections::BTreeSet::new();
    let mut topic = 0;
    let both = until(SOON, async || {
        topic += 1;
        let answer = bed.ask(&text(&essay(topic))).await;
        modes.insert((answer.engine(), answer.mode().to_owned()));
        modes.len() >= 2
    });
    assert!(both.await, "{modes:?}");
    assert_eq!(
        modes,
        [(1, "load_only".to_owned()), (2, "exact".to_owned())].into()
    );
    let reasons = bed
        .metrics()
        .await
        .sum("degradations_total", &[("reason", "parity_mismatch")]);
    assert!(reasons >= 1.0, "{reasons}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_engines_cannot_be_asked_their_events_tell_within_a_hundred_requests_and_heal_it() {
    events_tell_and_heal(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_heal_what_they_proved_although_some_of_the_new_life_are_lost() {
    events_tell_and_heal(false).await;
}

/// The second proof alone, with replay or with a batch that nobody repeats after the engine began anew.
async fn events_tell_and_heal(replay: bool) {
    let template = Template::other();
    let config = json!({"self_test": {"interval": "1s", "grace": "200ms"}});
    let flags = template.flags(&["--no-tokenize", "--no-render"]);
    let mut bed = Bed::start(
        &[EngineSpec {
            replay,
            ..engine(1).with(&flags)
        }],
        config,
    )
    .await;
    let mut requests = 0;
    let found = until(SOON, async || {
        requests += 1;
        bed.ask(&chat(&essay(requests))).await.engine();
        parity(&bed).await["mistrusted"] == true
    });
    assert!(found.await, "{:#}\n{}", parity(&bed).await, log(&bed));
    assert!(requests <= 100, "{requests} requests");
    let shown = parity(&bed).await;
    assert_eq!(shown["workers"]["1"]["verdict"], "cannot_test", "{shown:#}");
    let difference = &shown["workers"]["1"]["events"]["differs"];
    assert_eq!(
        (&difference["what"], &difference["block"]),
        (&json!("events"), &json!(0)),
        "{shown:#}"
    );
    let nothing = ["canary", "ours", "theirs", "our_text", "their_text"];
    assert!(
        nothing.iter().all(|key| difference[*key].is_null()),
        "nothing of a user is shown: {shown:#}"
    );
    assert_eq!(bed.ask(&chat(&essay(500))).await.mode(), "load_only");
    mend(&mut bed).await;
    if !replay {
        bed.misbehave(
            1,
            json!({"drop_events": {"batches": 1, "keep_for_replay": false}}),
        )
        .await;
    }
    let mut topic = 1000;
    let healed = until(SOON, async || {
        topic += 1;
        bed.ask(&of_its_own(topic)).await;
        parity(&bed).await["mistrusted"] == false
    });
    assert!(healed.await, "{:#}\n{}", parity(&bed).await, log(&bed));
    assert_eq!(bed.ask(&of_its_own(topic)).await.mode(), "exact");
}

/// A chat that has no block in common with others: the first one of all others may be among those that were lost.
fn of_its_own(topic: usize) -> Value {
    let mut body = chat("Go on.");
    let question = body["messages"][0].take();
    body["messages"] = json!([{"role": "system", "content": essay(topic)}, question]);
    body
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_ours_differ_the_engines_own_tokens_are_used_where_they_are_configured() {
    let template = Template::other();
    let tokens =
        json!({"when": "mismatch", "path": "tokenize", "deadline": "20s", "hedge_after": "20s"});
    let config = json!({"models": with_tokenizer(&json!({"engine_tokens": tokens})), "self_test": {"deadline": "30s"}});
    let bed = Bed::start(&[engine(1).with(&template.flags(&[]))], config).await;
    becomes(&bed, true).await;
    exact_twice(&bed, 1).await;
    // What `/tokenize` would not read is not asked for.
    let mut cut = chat(&essay(2));
    cut["truncate_prompt_tokens"] = json!(64);
    assert_eq!(bed.ask(&cut).await.mode(), "load_only");
}

/// The same chat twice: the second time the engine reports as cached what was predicted.
async fn exact_twice(bed: &Bed, topic: usize) {
    let question = chat(&essay(topic));
    assert_eq!(bed.ask(&question).await.mode(), "exact", "{}", log(bed));
    bed.settle().await;
    let answer = bed.ask(&question).await;
    assert_eq!(answer.mode(), "exact", "{answer:?}");
    let cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap();
    assert!(cached > 100, "{answer:?}");
    assert_eq!(
        answer.header("x-warmroute-predicted-cached-tokens"),
        cached.to_string(),
        "{answer:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_tokenizer_of_ours_the_engines_tokens_are_exact() {
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "letmein\n").unwrap();
    let tokens = json!({"deadline": "20s", "hedge_after": "20s", "token_file": token});
    let bed = Bed::start(
        &[engine(1), engine(2)],
        json!({"models": models(&json!({"engine_tokens": tokens}))}),
    )
    .await;
    exact_twice(&bed, 1).await;
    let prompt = text(&essay(2));
    let first = bed.ask(&prompt).await;
    bed.settle().await;
    let second = bed.ask(&prompt).await;
    assert_eq!(
        (first.mode(), second.mode(), second.engine()),
        ("exact", "exact", first.engine())
    );
    bed.shows("they are counted", |page| {
        page.sum("engine_tokens_total", &[("outcome", "ok")]) == 4.0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn render_servers_that_are_dead_or_slow_never_make_an_error() {
    // One accepts and says nothing; at the other nobody is there.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent_url = format!("http://{}", silent.local_addr().unwrap());
    let held = tokio::spawn(async move {
        let mut sockets = Vec::new();
        while let Ok((socket, _)) = silent.accept().await {
            sockets.push(socket);
        }
    });
    let dead = format!("http://127.0.0.1:{}", FreePort::find().unwrap().release());
    let tokens = json!({
        "urls": [silent_url, dead], "deadline": "200ms", "hedge_after": "20ms", "failures": 1, "rest": "1h"});
    for (ours, mode) in [(true, "exact"), (false, "load_only")] {
        let more = json!({"engine_tokens": tokens});
        let models = if ours {
            with_tokenizer(&more)
        } else {
            models(&more)
        };
        let bed = Bed::start(&[engine(1)], json!({"models": models})).await;
        for topic in 0..3 {
            let answer = bed.ask(&chat(&essay(topic))).await;
            assert_eq!((answer.mode(), answer.engine()), (mode, 1), "{answer:?}");
        }
        // Both rest by now, so nobody is waited for.
        let started = Instant::now();
        bed.shows("nobody is asked", |page| {
            page.sum("engine_tokens_total", &[("outcome", "nobody")]) >= 1.0
        })
        .await;
        assert!(started.elapsed() < Duration::from_secs(30));
        let reasons = bed
            .metrics()
            .await
            .sum("degradations_total", &[("reason", "engine_tokens_failed")]);
        assert_eq!(reasons, if ours { 0.0 } else { 3.0 });
    }
    held.abort();
}
