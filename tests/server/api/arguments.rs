//! Every call rejects invalid arguments with the right status and without side effects.

mod hints;

use std::collections::HashMap;

use tonic::{Code, Status};
use warmroute_server::api::MAX_PROMPT_BLOCKS;
use warmroute_server::proto::router as pb;
use warmroute_server::proto::router::prompt_query::Prompt;

use crate::api::site::{ApiSite, attempt, book, rank, tokens, worker};

fn query(prompt: Option<Prompt>) -> pb::PromptQuery {
    pb::PromptQuery {
        prompt,
        ..pb::PromptQuery::default()
    }
}

fn blocks(local_hashes: usize, sequence_hashes: usize, isl_tokens: u64) -> pb::PromptQuery {
    query(Some(Prompt::Blocks(pb::BlockHashes {
        local_hashes: vec![1; local_hashes],
        sequence_hashes: vec![1; sequence_hashes],
        isl_tokens,
    })))
}

fn body(path: &str, json: &str) -> pb::PromptQuery {
    let headers = HashMap::new();
    query(Some(Prompt::Body(pb::Body {
        path: path.into(),
        headers,
        json: json.as_bytes().to_vec(),
    })))
}

type InvalidQuery = (&'static str, Option<pb::PromptQuery>, Code);

fn invalid(what: &'static str, query: pb::PromptQuery) -> InvalidQuery {
    (what, Some(query), Code::InvalidArgument)
}

/// Returns queries that every call rejects.
fn invalid_queries() -> Vec<InvalidQuery> {
    let with_model = |model: &str, query| pb::PromptQuery {
        model: model.into(),
        ..query
    };
    let with_salt = |query| pb::PromptQuery {
        cache_salt: "s".into(),
        ..query
    };
    let completion = |json| body("/v1/completions", json);
    let good = completion(r#"{"model":"m","prompt":"x"}"#);
    let unknown = with_model("x", tokens(9));
    let unknown_in_body = completion(r#"{"model":"x","prompt":"x"}"#);
    vec![
        ("no query", None, Code::InvalidArgument),
        invalid("no prompt", query(None)),
        invalid("no tokens", tokens(0)),
        ("an unknown model", Some(unknown), Code::NotFound),
        invalid("blocks of size zero", blocks(0, 0, 0)),
        invalid("more blocks than tokens", blocks(3, 0, 11)),
        invalid("sequence hashes for some blocks only", blocks(3, 2, 12)),
        invalid("a salt in addition to hashes", with_salt(blocks(1, 0, 4))),
        invalid(
            "a model in addition to a body",
            with_model("m", good.clone()),
        ),
        invalid("a salt in addition to a body", with_salt(good)),
        invalid("a body that is not JSON", completion("{")),
        invalid("an invalid path", body("/v1/models", "{}")),
        (
            "a body's unknown model",
            Some(unknown_in_body),
            Code::NotFound,
        ),
    ]
}

fn invalid_attempts() -> [(&'static str, Option<pb::Attempt>); 3] {
    [
        ("no attempt", None),
        ("an empty id", attempt("", 0)),
        ("an id too long", attempt(&"x".repeat(513), 0)),
    ]
}

fn assert_code<T: std::fmt::Debug>(what: &str, answer: Result<T, Status>, code: Code) {
    let status = answer.expect_err(what);
    assert_eq!(status.code(), code, "{what}: {status:?}");
    assert!(!status.message().is_empty(), "{what}");
}

#[tokio::test]
async fn invalid_queries_are_rejected_by_every_call() {
    let site = ApiSite::plain().await;
    let mut client = site.client.clone();
    for (what, query, code) in invalid_queries() {
        for id in ["", "r"] {
            let book = attempt(id, 0).filter(|_| !id.is_empty());
            let call_request = pb::RouteRequest {
                query: query.clone(),
                book,
                ..pb::RouteRequest::default()
            };
            assert_code(what, client.route(call_request).await, code);
        }
        let call_request = pb::OverlapScoresRequest {
            query: query.clone(),
            ..Default::default()
        };
        assert_code(what, client.overlap_scores(call_request).await, code);
        if query.is_some() {
            // Without a query, the call returns the current loads.
            let call_request = pb::PotentialLoadsRequest {
                query: query.clone(),
                ..Default::default()
            };
            assert_code(what, client.potential_loads(call_request).await, code);
        }
        let call_request = pb::AddRequestRequest {
            attempt: attempt("r", 0),
            worker: rank(1),
            query,
            ..pb::AddRequestRequest::default()
        };
        assert_code(what, client.add_request(call_request).await, code);
    }
    assert_eq!(site.load().await, (0, 0, 0));
}

#[tokio::test]
async fn bookings_require_a_valid_attempt() {
    let site = ApiSite::plain().await;
    let mut client = site.client.clone();
    let code = Code::InvalidArgument;
    for (what, attempt) in invalid_attempts() {
        if attempt.is_some() {
            // Without an attempt, the call does not book the request.
            let request = pb::RouteRequest {
                book: attempt.clone(),
                ..book("", 0, 9)
            };
            assert_code(what, client.route(request).await, code);
        }
        let request = pb::AddRequestRequest {
            attempt: attempt.clone(),
            ..booking()
        };
        assert_code(what, client.add_request(request).await, code);
        let request = pb::MarkPrefillCompletedRequest {
            attempt: attempt.clone(),
        };
        assert_code(what, client.mark_prefill_completed(request).await, code);
        let request = output(attempt.clone(), None);
        assert_code(what, client.add_output_block(request).await, code);
        let request = pb::FreeRequest {
            attempt,
            status: None,
        };
        assert_code(what, client.free(request).await, code);
    }
}

/// Returns a booking of 9 tokens on worker 1.
fn booking() -> pb::AddRequestRequest {
    pb::AddRequestRequest {
        attempt: attempt("r", 0),
        worker: rank(1),
        query: Some(tokens(9)),
        ..pb::AddRequestRequest::default()
    }
}

fn output(attempt: Option<pb::Attempt>, decay_fraction: Option<f64>) -> pb::AddOutputBlockRequest {
    pb::AddOutputBlockRequest {
        attempt,
        decay_fraction,
    }
}

#[tokio::test]
async fn bookings_require_a_known_rank() {
    let site = ApiSite::plain().await;
    let mut client = site.client.clone();
    let on = |worker| pb::AddRequestRequest {
        worker,
        ..booking()
    };
    let missing_rank = Some(pb::WorkerRank {
        worker_id: 1,
        dp_rank: 1,
    });
    let too_warm = pb::AddRequestRequest {
        cached_tokens: Some(10),
        ..booking()
    };
    for (what, request, code) in [
        ("no rank", on(None), Code::InvalidArgument),
        ("an unknown worker", on(rank(9)), Code::NotFound),
        ("an unknown rank", on(missing_rank), Code::NotFound),
        ("more cached than prompt", too_warm, Code::InvalidArgument),
    ] {
        assert_code(what, client.add_request(request).await, code);
    }
    let ranks = rank(9).into_iter().collect();
    let dump = client.dump_events(pb::DumpEventsRequest { ranks }).await;
    assert_code("an unknown rank", dump.map(drop), Code::NotFound);
    let watch = pb::WatchFleetRequest { model: "x".into() };
    let fleet = client.watch_fleet(watch).await;
    assert_code("an unknown model", fleet.map(drop), Code::NotFound);
}

#[tokio::test]
async fn updates_require_a_booking_and_valid_values() {
    let site = ApiSite::plain().await;
    let mut client = site.client.clone();
    let unknown = attempt("unknown", 0);
    let request = pb::MarkPrefillCompletedRequest {
        attempt: unknown.clone(),
    };
    let marked = client.mark_prefill_completed(request).await;
    assert_code("not booked", marked, Code::NotFound);
    let added = client.add_output_block(output(unknown, None)).await;
    assert_code("not booked", added, Code::NotFound);
    site.route(book("r", 0, 9)).await.unwrap();
    for fraction in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
        let request = output(attempt("r", 0), Some(fraction));
        let added = client.add_output_block(request).await;
        assert_code(&fraction.to_string(), added, Code::InvalidArgument);
    }
    assert_eq!(site.load().await, (9, 2, 1));
    for status in [0, 99, 600, u32::MAX] {
        let request = pb::FreeRequest {
            attempt: attempt("r", 0),
            status: Some(status),
        };
        let freed = client.free(request).await;
        assert_code(&status.to_string(), freed, Code::InvalidArgument);
    }
    assert_eq!(site.load().await, (9, 2, 1));
    let page = site.text("metrics").await;
    let counted = r#"warmroute_api_calls_total{method="AddOutputBlock",code="INVALID_ARGUMENT"} 4"#;
    assert!(page.lines().any(|line| line == counted), "{page}");
}

#[tokio::test]
async fn block_limit_and_unknown_model_are_reported() {
    let site = ApiSite::start("", &[worker(1, "")]).await;
    let count = MAX_PROMPT_BLOCKS + 1;
    let length = 4 * count as u64;
    for query in [
        tokens(4 * count as u32),
        blocks(count, 0, length),
        blocks(count, count, length),
    ] {
        let call_request = pb::RouteRequest {
            query: Some(query),
            ..book("r", 0, 9)
        };
        assert_code(
            "too long",
            site.route(call_request).await,
            Code::InvalidArgument,
        );
    }
    site.route(book("r", 0, 11)).await.unwrap();
    let unknown = body(
        "/v1/completions",
        r#"{"model":"absent-model","prompt":"x"}"#,
    );
    let call_request = pb::RouteRequest {
        query: Some(unknown),
        ..book("s", 0, 9)
    };
    let status = site.route(call_request).await.unwrap_err();
    assert!(status.message().contains("absent-model"), "{status:?}");
}

#[tokio::test]
async fn booking_on_another_model_is_rejected() {
    let models = "models: [{name: m, block_size: 4}, {name: 'n', block_size: 4}]\n";
    let site = ApiSite::start(models, &[worker(1, ", model: m"), worker(2, ", model: n")]).await;
    for (model, worker, code) in [
        ("m", 1, None),
        ("m", 2, Some(Code::NotFound)),
        ("n", 1, Some(Code::NotFound)),
    ] {
        let call_request = pb::AddRequestRequest {
            attempt: attempt(&format!("{model}{worker}"), 0),
            worker: rank(worker),
            query: Some(pb::PromptQuery {
                model: model.into(),
                ..tokens(9)
            }),
            ..pb::AddRequestRequest::default()
        };
        let answer = site.client.clone().add_request(call_request).await;
        assert_eq!(
            answer.err().map(|status| status.code()),
            code,
            "{model} on {worker}"
        );
    }
    assert_eq!(site.load().await.2, 1);
}

#[tokio::test]
async fn queue_timeout_is_rejected_with_retry_after() {
    let short_timeout = ApiSite::start(
        "queue: {prefill_busy_threshold: 1, timeout: 50ms}\n",
        &[worker(1, "")],
    )
    .await;
    short_timeout.route(book("a", 0, 9)).await.unwrap();
    let late = short_timeout.route(book("b", 0, 9)).await.unwrap_err();
    assert_eq!(late.code(), Code::ResourceExhausted, "{late:?}");
    assert!(late.metadata().contains_key("retry-after"));

    short_timeout.set_workers(&["[]".to_owned()]);
    short_timeout
        .until(
            "no worker is left",
            |page| page["members"].as_array().is_some_and(Vec::is_empty),
            "debug/fleet",
        )
        .await;
    let unroutable = short_timeout.route(book("b", 0, 9)).await.unwrap_err();
    assert_eq!(unroutable.code(), Code::Unavailable, "{unroutable:?}");
}

#[tokio::test]
async fn body_is_tokenized_like_the_engine() {
    let site = site_with_tokenizer().await;
    let chat =
        r#"{"model":"qwen2.5","messages":[{"role":"user","content":"Why is the sky blue?"}]}"#;
    let answer = site
        .route(unbooked(body("/v1/chat/completions", chat)))
        .await
        .unwrap();
    assert_eq!(
        (
            answer.model.as_str(),
            answer.decode.as_ref().unwrap().worker
        ),
        ("qwen2.5", rank(1))
    );
    let tokenized = &answer.prompts[0];
    assert_eq!(
        (
            tokenized.token_ids.len() as u64,
            tokenized.local_hashes.len()
        ),
        (tokenized.tokens, tokenized.tokens as usize / 4)
    );
    // The returned tokens have the same block hashes.
    let prompt = Some(Prompt::Tokens(pb::Tokens {
        ids: tokenized.token_ids.clone(),
    }));
    let again = site
        .route(unbooked(pb::PromptQuery {
            model: "qwen2.5".into(),
            ..query(prompt)
        }))
        .await
        .unwrap();
    assert_eq!(&again.prompts[0], tokenized);
}

#[tokio::test]
async fn model_without_tokenizer_is_routed_by_load() {
    let site = site_with_tokenizer().await;
    // With two models, a query must name one.
    let bare = site
        .route(unbooked(body(
            "/v1/completions",
            r#"{"model":"bare","prompt":"x"}"#,
        )))
        .await
        .unwrap();
    assert_eq!(
        (bare.mode(), bare.reason.as_str(), bare.prompts.len()),
        (pb::Mode::LoadOnly, "no_tokenizer", 0)
    );
    assert_code(
        "no model",
        site.route(unbooked(tokens(9))).await,
        Code::InvalidArgument,
    );
}

fn unbooked(query: pb::PromptQuery) -> pb::RouteRequest {
    pb::RouteRequest {
        query: Some(query),
        include_token_ids: true,
        ..pb::RouteRequest::default()
    }
}

/// Starts a site with a model that has a tokenizer and a model that has none.
async fn site_with_tokenizer() -> ApiSite {
    let root = env!("CARGO_MANIFEST_DIR");
    let models = format!(
        "models:\n- {{name: qwen2.5, block_size: 4, tokenizer: \
        '{root}/examples/models/qwen2.5/tokenizer.json.gz',\n   \
         tokenizer_config: '{root}/examples/models/qwen2.5/tokenizer_config.json'}}\n- {{name: bare, block_size: 4}}\n"
    );
    ApiSite::start(
        &models,
        &[worker(1, ", model: qwen2.5"), worker(2, ", model: bare")],
    )
    .await
}
