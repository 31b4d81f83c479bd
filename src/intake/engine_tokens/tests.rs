use std::sync::atomic::AtomicUsize;

use axum::Router as Routes;
use axum::http::StatusCode;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::*;
use crate::block::Windows;
use crate::index::PrefixIndex;
use crate::intake::{Limits, Model, Models, Parts};
use crate::kv_events::{Converted, MediaTokens, Normalizer, wire};
use crate::learned::Agreed;
use crate::load::LoadTracker;
use crate::router::RouterSettings;
use crate::settings::Period;
use crate::worker::BlockSize;

const PATH: &str = "/v1/chat/completions";

/// A render server that answers after a while, and how often it was asked.
async fn server(status: u16, text: String, after: Duration) -> (String, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let answer = move || {
        let (count, text) = (count.clone(), text.clone());
        async move {
            count.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(after).await;
            (StatusCode::from_u16(status).unwrap(), text)
        }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        axum::serve(listener, Routes::new().fallback(answer))
            .await
            .unwrap()
    });
    (url, asked)
}

fn intake(config: &EngineTokensConfig, media: MediaTokens) -> (Arc<Intake>, Arc<Metrics>) {
    let router = Router::new(
        PrefixIndex::new(),
        LoadTracker::new(Instant::now),
        RouterSettings::default(),
        1,
    );
    let metrics = Arc::new(Metrics::new());
    let engines = EnginesConfig::default();
    let client = EngineClient::new(&engines).unwrap();
    let engine = EngineTokens::new(config, &engines, &client, Arc::new(router), metrics.clone());
    let source = TokenSource {
        standing: Arc::default(),
        engine: Some(engine),
        agreed: Default::default(),
    };
    let block_size = BlockSize::new(32).unwrap();
    let mut models = Models::default();
    let model = Model {
        name: "m".into(),
        block_size,
        windows: Windows::Plain,
        media,
        encoder: None,
    };
    models.add(model, &[], &[]);
    let limits = Limits {
        inline: 4096,
        queue: 1,
        deadline: Duration::from_secs(30),
    };
    let parts = Parts {
        models,
        paths: openai::Paths::default(),
        clients: super::super::config::ClientsConfig::default(),
        confine: Default::default(),
        rewrites: Default::default(),
        rewrite_headers: Vec::new(),
        cluster: Default::default(),
        limits,
        tracking: crate::block::TrackingHash::Public,
        sessions: None,
        shared: None,
        remote: None,
        tokens: HashMap::from([("m".into(), source)]),
    };
    (Intake::new(parts), metrics)
}

fn patient(urls: Vec<String>) -> EngineTokensConfig {
    let long = Period::seconds(30);
    EngineTokensConfig {
        urls,
        deadline: long,
        hedge_after: long,
        ..EngineTokensConfig::default()
    }
}

async fn ask(intake: &Arc<Intake>) -> Result<Vec<Vec<u32>>, Reason> {
    let body = Bytes::from(
        json!({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).to_string(),
    );
    let taken = intake.take(PATH, &|_| None, &Body::Whole(body)).await;
    match taken.request.prompt {
        Prompt::Estimated { because, .. } => Err(because),
        _ => Ok(taken.tokens),
    }
}

fn outcomes(metrics: &Metrics, outcome: &'static str) -> u64 {
    metrics
        .engine_tokens
        .get_or_create(&ModelOutcomeLabels::new(&"m".into(), outcome))
        .get()
}

const TOKENS: &str = r#"{"token_ids":[1,2,3]}"#;

#[tokio::test]
async fn a_second_one_is_asked_beside_one_that_is_slow_and_after_one_that_fails() {
    let (slow, _) = server(200, TOKENS.into(), Duration::from_secs(60)).await;
    let (quick, asked) = server(200, TOKENS.into(), Duration::ZERO).await;
    let (broken, _) = server(500, String::new(), Duration::ZERO).await;
    for first in [slow, broken] {
        let config = EngineTokensConfig {
            hedge_after: Period::millis(5),
            ..patient(vec![first, quick.clone()])
        };
        let (intake, metrics) = intake(&config, MediaTokens::default());
        // Whoever's turn it is, there is an answer.
        for _ in 0..4 {
            assert_eq!(ask(&intake).await, Ok(vec![vec![1, 2, 3]]));
        }
        assert_eq!(outcomes(&metrics, "ok"), 4);
    }
    assert!(asked.load(Ordering::SeqCst) >= 8);
}

#[tokio::test]
async fn a_refusal_is_taken_for_an_answer_and_failures_in_a_row_are_not_asked_again() {
    let (refuses, refused) = server(400, r#"{"message":"no"}"#.into(), Duration::ZERO).await;
    let (other, unasked) = server(400, String::new(), Duration::ZERO).await;
    let (way, metrics) = intake(&patient(vec![refuses, other]), MediaTokens::default());
    assert_eq!(ask(&way).await, Err(Reason::EngineTokensFailed));
    let calls = refused.load(Ordering::SeqCst) + unasked.load(Ordering::SeqCst);
    assert_eq!(
        (calls, outcomes(&metrics, "refused")),
        (1, 1),
        "nobody else would take it"
    );
    let (broken, asked) = server(503, String::new(), Duration::ZERO).await;
    let config = EngineTokensConfig {
        failures: 2,
        rest: Period::seconds(600),
        ..patient(vec![broken])
    };
    let (way, metrics) = intake(&config, MediaTokens::default());
    for _ in 0..5 {
        assert_eq!(ask(&way).await, Err(Reason::EngineTokensFailed));
    }
    assert_eq!(
        (
            asked.load(Ordering::SeqCst),
            outcomes(&metrics, "status"),
            outcomes(&metrics, "nobody")
        ),
        (2, 2, 3)
    );
}

#[tokio::test]
async fn nobody_waits_longer_than_the_deadline() {
    let (slow, _) = server(200, TOKENS.into(), Duration::from_secs(60)).await;
    let config = EngineTokensConfig {
        deadline: Period::millis(50),
        ..patient(vec![slow.clone(), slow])
    };
    let (intake, metrics) = intake(&config, MediaTokens::default());
    let started = Instant::now();
    assert_eq!(ask(&intake).await, Err(Reason::EngineTokensFailed));
    assert!(started.elapsed() < Duration::from_secs(20));
    assert_eq!(outcomes(&metrics, "timeout"), 1);
}

/// The local hashes of the first event of a real engine that computed the same image.
fn told(media: MediaTokens) -> Vec<crate::block::LocalHash> {
    let capture: Value =
        serde_json::from_str(include_str!("../../../tests/data/kv_events/e02-image.json")).unwrap();
    let frame = capture["frames"][0][2].as_str().unwrap();
    let digit = |at: usize| u8::from_str_radix(&frame[at..at + 2], 16).unwrap();
    let payload: Vec<u8> = (0..frame.len()).step_by(2).map(digit).collect();
    let batch = wire::decode(&payload).unwrap();
    let mut normalizer = Normalizer::new(BlockSize::new(32).unwrap(), media);
    match normalizer.convert(&batch.events[0]) {
        Converted::Event(crate::index::KvEvent::Stored { blocks, .. }) => {
            blocks.iter().map(|block| block.local).collect()
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_blocks_of_a_rendered_image_are_those_that_its_engine_tells_of() {
    let rendered = include_str!("../../../tests/data/engines/render-image.json");
    let (url, _) = server(200, rendered.to_owned(), Duration::ZERO).await;
    for image in [None, Some(151_655)] {
        let media = MediaTokens { image, video: None };
        let (intake, _) = intake(&patient(vec![url.clone()]), media);
        let body = json!({"model": "m", "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
            {"type": "text", "text": "What is this?"}]}]});
        let taken = intake
            .take(PATH, &|_| None, &Body::Whole(body.to_string().into()))
            .await;
        let [blocks] = taken.request.prompt.blocks() else {
            panic!("{:?}", taken.request.prompt)
        };
        assert_eq!((blocks.tokens(), blocks.len()), (124, 3));
        assert_eq!(blocks.locals(), told(media), "{image:?}");
    }
}

/// The same intake, with engines that report this length of their model.
fn of_length(intake: Arc<Intake>, max_model_len: u64) -> Arc<Intake> {
    let mut intake = Arc::into_inner(intake).unwrap();
    let agreed = Agreed {
        max_model_len: Some(max_model_len),
        ..Agreed::default()
    };
    let source = intake.parts.tokens.get_mut(&"m".into()).unwrap();
    source.agreed = Arc::new(arc_swap::ArcSwap::from_pointee(
        [("m".into(), agreed)].into(),
    ));
    Arc::new(intake)
}

#[tokio::test]
async fn engine_tokens_are_truncated_to_model_length() {
    let tokens: Vec<u32> = (1..=200).collect();
    let (url, _) = server(
        200,
        json!({"token_ids": tokens}).to_string(),
        Duration::ZERO,
    )
    .await;
    let body =
        json!({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).to_string();
    for (longest, because, blocks) in [(200, None, 6), (100, Some(Reason::PromptTooLong), 3)] {
        let intake = of_length(
            intake(&patient(vec![url.clone()]), MediaTokens::default()).0,
            longest,
        );
        let prompt = intake
            .take(PATH, &|_| None, &Body::Whole(body.clone().into()))
            .await
            .request
            .prompt;
        assert_eq!(prompt.because(), because);
        let known = match &prompt {
            Prompt::Beginning { known, .. } => known,
            prompt => &prompt.blocks()[0],
        };
        assert_eq!(
            known.locals(),
            &whole_locals(&tokens)[..blocks],
            "{longest}"
        );
    }
}

fn whole_locals(tokens: &[u32]) -> Vec<crate::block::LocalHash> {
    crate::block::hash::locals(
        tokens,
        BlockSize::new(32).unwrap(),
        &Salt::default(),
        Windows::Plain,
        &[],
    )
}

#[tokio::test]
async fn shadow_tokenization_has_the_limits_of_prompts() {
    let (intake, _) = intake(
        &patient(vec!["http://127.0.0.1:1".to_owned()]),
        MediaTokens::default(),
    );
    let mut intake = Arc::into_inner(of_length(intake, 1000)).unwrap();
    let files = crate::prompt::Config {
        tokenizer: "examples/models/qwen2.5/tokenizer.json.gz".into(),
        tokenizer_config: None,
        chat_template: None,
    };
    let encoder = Some(Arc::new(crate::prompt::Encoder::load(&files).unwrap()));
    let block_size = BlockSize::new(32).unwrap();
    let (windows, media) = (Windows::Plain, MediaTokens::default());
    intake.parts.models = Models::default();
    intake.parts.models.add(
        Model {
            name: "m".into(),
            block_size,
            windows,
            media,
            encoder,
        },
        &[],
        &[],
    );
    let named = intake.parts.models.find(Some("m")).unwrap();
    let source = &intake.parts.tokens[&"m".into()];
    let is_compared = |repeats: usize, until: Option<Instant>| {
        let body =
            json!({"model": "m", "prompt": "one two three four ".repeat(repeats)}).to_string();
        let request = openai::parse(Api::Completions, body.as_bytes()).unwrap();
        let foretold = intake.shadow((&named, &Salt::default()), source, until, &request);
        matches!(foretold, Foretold::Shadow(_))
    };
    assert!(is_compared(100, None));
    assert!(
        !is_compared(1000, None),
        "it exceeds the length of the model"
    );
    assert!(
        !is_compared(200_000, Some(Instant::now())),
        "the deadline has passed"
    );
}

#[tokio::test]
async fn what_tokenize_would_show_and_the_chat_may_not_is_not_asked_for() {
    let (url, asked) = server(
        200,
        r#"{"tokens":[1,2,3],"count":3,"max_model_len":9}"#.into(),
        Duration::ZERO,
    )
    .await;
    let config = EngineTokensConfig {
        path: RenderPath::Tokenize,
        ..patient(vec![url])
    };
    let (intake, _) = intake(&config, MediaTokens::default());
    let tool = json!({"type": "function", "function": {"name": "f"}});
    for (more, known) in [
        (json!({}), true),
        (json!({"tool_choice": "none"}), true),
        (json!({"tool_choice": "none", "tools": []}), true),
        (json!({"tool_choice": "none", "tools": null}), true),
        (json!({"tool_choice": "auto", "tools": [tool]}), true),
        (json!({"tool_choice": "none", "tools": [tool]}), false),
    ] {
        let before = asked.load(Ordering::SeqCst);
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hello"}]});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let taken = intake
            .take(PATH, &|_| None, &Body::Whole(body.to_string().into()))
            .await;
        assert_eq!(taken.tokens == [[1, 2, 3]], known, "{more}");
        assert_eq!(
            asked.load(Ordering::SeqCst) - before,
            usize::from(known),
            "{more}"
        );
    }
}

#[tokio::test]
async fn engines_are_not_asked_for_more_prompts_than_are_looked_at() {
    let (url, asked) = server(200, r#"[{"token_ids":[1,2,3]}]"#.into(), Duration::ZERO).await;
    let (intake, _) = intake(&patient(vec![url]), MediaTokens::default());
    for (prompts, expected) in [(1024, 1), (1025, 0)] {
        for prompt in [json!(vec!["x"; prompts]), json!(vec![[7]; prompts])] {
            let before = asked.load(Ordering::SeqCst);
            let body = Bytes::from(json!({"model": "m", "prompt": prompt}).to_string());
            let taken = intake
                .take("/v1/completions", &|_| None, &Body::Whole(body))
                .await;
            assert_eq!(asked.load(Ordering::SeqCst) - before, expected, "{prompts}");
            let because = taken.request.prompt.because();
            assert_eq!(
                because == Some(Reason::TooManyPrompts),
                expected == 0,
                "{prompts}: {because:?}"
            );
        }
    }
}

/// A conversation that is not encoded on the caller's thread.
fn large() -> Body {
    let text = "hello ".repeat(2000);
    Body::Whole(
        json!({"model": "m", "messages": [{"role": "user", "content": text}]})
            .to_string()
            .into(),
    )
}

/// Takes one request on a task of its own.
fn take(intake: &Arc<Intake>, body: Body) -> tokio::task::JoinHandle<crate::intake::Taken> {
    let intake = intake.clone();
    tokio::spawn(async move { intake.take(PATH, &|_| None, &body).await })
}

async fn until(what: impl Fn() -> bool) {
    let waiting = async {
        while !what() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), waiting)
        .await
        .expect("it comes within half a minute");
}

#[tokio::test]
async fn large_bodies_are_prepared_in_the_queue_of_prompts_and_within_the_deadline() {
    let (url, asked) = server(200, TOKENS.into(), Duration::ZERO).await;
    let config = EngineTokensConfig {
        deadline: Period::millis(20),
        ..patient(vec![url.clone()])
    };
    let (way, metrics) = intake(&config, MediaTokens::default());
    let cores = way.encoders.available_permits() as u32;
    let all = way
        .encoders
        .clone()
        .acquire_many_owned(cores)
        .await
        .unwrap();
    let one = take(&way, large());
    until(|| outcomes(&metrics, "timeout") == 1).await;
    drop(all);
    one.await.unwrap();
    // And where the queue is full, nobody joins it.
    let (way, metrics) = intake(&patient(vec![url]), MediaTokens::default());
    let place = Place::take(&way.queued, 1).unwrap();
    take(&way, large()).await.unwrap();
    drop(place);
    assert_eq!(
        (outcomes(&metrics, "busy"), asked.load(Ordering::SeqCst)),
        (1, 0)
    );
    take(&way, large()).await.unwrap();
    assert_eq!(
        (outcomes(&metrics, "ok"), asked.load(Ordering::SeqCst)),
        (1, 1)
    );
}

#[tokio::test]
async fn beyond_what_may_be_under_way_a_body_is_not_even_looked_at() {
    let (slow, asked) = server(200, TOKENS.into(), Duration::from_secs(600)).await;
    let config = EngineTokensConfig {
        in_flight: 1,
        ..patient(vec![slow])
    };
    let (way, metrics) = intake(&config, MediaTokens::default());
    let first = take(
        &way,
        Body::Whole(json!({"model": "m", "messages": []}).to_string().into()),
    );
    until(|| asked.load(Ordering::SeqCst) == 1).await;
    let cores = way.encoders.available_permits() as u32;
    let all = way
        .encoders
        .clone()
        .acquire_many_owned(cores)
        .await
        .unwrap();
    let second = take(&way, large());
    until(|| outcomes(&metrics, "busy") == 1).await;
    drop(all);
    second.await.unwrap();
    first.abort();
}
