//! What makes no sense is refused by every call, with the status that says why, and changes nothing.

use std::collections::HashMap;

use tonic::{Code, Status};
use warmroute::api::pb;
use warmroute::api::pb::question::Prompt;

use crate::site::{Site, attempt, book, rank, tokens, worker};

fn question(prompt: Option<Prompt>) -> pb::Question {
    pb::Question {
        prompt,
        ..pb::Question::default()
    }
}

fn blocks(local_hashes: usize, sequence_hashes: usize, isl_tokens: u64) -> pb::Question {
    question(Some(Prompt::Blocks(pb::BlockHashes {
        local_hashes: vec![1; local_hashes],
        sequence_hashes: vec![1; sequence_hashes],
        isl_tokens,
    })))
}

fn body(path: &str, json: &str) -> pb::Question {
    let headers = HashMap::new();
    question(Some(Prompt::Body(pb::Body {
        path: path.into(),
        headers,
        json: json.as_bytes().to_vec(),
    })))
}

/// Questions that none of the calls takes.
fn bad_questions() -> Vec<(&'static str, Option<pb::Question>, Code)> {
    let completions = "/v1/completions";
    let good = body(completions, r#"{"model":"m","prompt":"x"}"#);
    vec![
        ("no question", None, Code::InvalidArgument),
        ("no prompt", Some(question(None)), Code::InvalidArgument),
        ("no tokens", Some(tokens(0)), Code::InvalidArgument),
        (
            "an unknown model",
            Some(pb::Question {
                model: "x".into(),
                ..tokens(9)
            }),
            Code::NotFound,
        ),
        (
            "blocks of no length",
            Some(blocks(0, 0, 0)),
            Code::InvalidArgument,
        ),
        (
            "more blocks than tokens",
            Some(blocks(3, 0, 11)),
            Code::InvalidArgument,
        ),
        (
            "names for some blocks",
            Some(blocks(3, 2, 12)),
            Code::InvalidArgument,
        ),
        (
            "a salt beside hashes",
            Some(pb::Question {
                cache_salt: "s".into(),
                ..blocks(1, 0, 4)
            }),
            Code::InvalidArgument,
        ),
        (
            "a model beside a body",
            Some(pb::Question {
                model: "m".into(),
                ..good.clone()
            }),
            Code::InvalidArgument,
        ),
        (
            "a salt beside a body",
            Some(pb::Question {
                cache_salt: "m".into(),
                ..good
            }),
            Code::InvalidArgument,
        ),
        (
            "a body that is none",
            Some(body(completions, "{")),
            Code::InvalidArgument,
        ),
        (
            "a path that is none",
            Some(body("/v1/models", "{}")),
            Code::InvalidArgument,
        ),
        (
            "a body's unknown model",
            Some(body(completions, r#"{"model":"x","prompt":"x"}"#)),
            Code::NotFound,
        ),
    ]
}

fn bad_attempts() -> [(&'static str, Option<pb::Attempt>); 3] {
    [
        ("no attempt", None),
        ("an empty id", attempt("", 0)),
        ("an id too long", attempt(&"x".repeat(513), 0)),
    ]
}

fn refused<T: std::fmt::Debug>(what: &str, answer: Result<T, Status>, code: Code) {
    let status = answer.expect_err(what);
    assert_eq!(status.code(), code, "{what}: {status:?}");
    assert!(!status.message().is_empty(), "{what}");
}

#[tokio::test]
async fn questions_that_make_no_sense_are_refused_by_every_call() {
    let site = Site::plain().await;
    let mut client = site.client.clone();
    for (what, question, code) in bad_questions() {
        for id in ["", "r"] {
            let book = attempt(id, 0).filter(|_| !id.is_empty());
            let asked = pb::RouteRequest {
                question: question.clone(),
                book,
                ..pb::RouteRequest::default()
            };
            refused(what, client.route(asked).await, code);
        }
        let asked = pb::OverlapScoresRequest {
            question: question.clone(),
            ..Default::default()
        };
        refused(what, client.overlap_scores(asked).await, code);
        if question.is_some() {
            // Without a question it tells the loads as they are.
            let asked = pb::PotentialLoadsRequest {
                question: question.clone(),
                ..Default::default()
            };
            refused(what, client.potential_loads(asked).await, code);
        }
        let asked = pb::AddRequestRequest {
            attempt: attempt("r", 0),
            worker: rank(1),
            question,
            ..pb::AddRequestRequest::default()
        };
        refused(what, client.add_request(asked).await, code);
    }
    assert_eq!(site.load().await, (0, 0, 0));
}

#[tokio::test]
async fn bookings_need_a_name_a_place_and_sense() {
    let site = Site::plain().await;
    let mut client = site.client.clone();
    let add = pb::AddRequestRequest {
        attempt: attempt("r", 0),
        worker: rank(1),
        question: Some(tokens(9)),
        ..pb::AddRequestRequest::default()
    };
    for (what, attempt) in bad_attempts() {
        let code = Code::InvalidArgument;
        if attempt.is_some() {
            // Without one nothing is to be booked.
            refused(
                what,
                client
                    .route(pb::RouteRequest {
                        book: attempt.clone(),
                        ..book("", 0, 9)
                    })
                    .await,
                code,
            );
        }
        let asked = pb::AddRequestRequest {
            attempt: attempt.clone(),
            ..add.clone()
        };
        refused(what, client.add_request(asked).await, code);
        let asked = pb::MarkPrefillCompletedRequest {
            attempt: attempt.clone(),
        };
        refused(what, client.mark_prefill_completed(asked).await, code);
        let asked = pb::AddOutputBlockRequest {
            attempt: attempt.clone(),
            decay_fraction: None,
        };
        refused(what, client.add_output_block(asked).await, code);
        refused(
            what,
            client
                .free(pb::FreeRequest {
                    attempt,
                    status: None,
                })
                .await,
            code,
        );
    }
    let nowhere = pb::AddRequestRequest {
        worker: None,
        ..add.clone()
    };
    refused(
        "no place",
        client.add_request(nowhere).await,
        Code::InvalidArgument,
    );
    let unknown = pb::AddRequestRequest {
        worker: rank(9),
        ..add.clone()
    };
    refused(
        "an unknown place",
        client.add_request(unknown).await,
        Code::NotFound,
    );
    let no_such_rank = Some(pb::WorkerRank {
        worker_id: 1,
        dp_rank: 1,
    });
    let unknown = pb::AddRequestRequest {
        worker: no_such_rank,
        ..add.clone()
    };
    refused(
        "an unknown rank",
        client.add_request(unknown).await,
        Code::NotFound,
    );
    let too_warm = pb::AddRequestRequest {
        cached_tokens: Some(10),
        ..add
    };
    refused(
        "more cached than there is",
        client.add_request(too_warm).await,
        Code::InvalidArgument,
    );

    let unknown = attempt("nobody", 0);
    let asked = pb::MarkPrefillCompletedRequest {
        attempt: unknown.clone(),
    };
    refused(
        "not booked",
        client.mark_prefill_completed(asked).await,
        Code::NotFound,
    );
    let output = |attempt, decay_fraction| pb::AddOutputBlockRequest {
        attempt,
        decay_fraction,
    };
    refused(
        "not booked",
        client.add_output_block(output(unknown, None)).await,
        Code::NotFound,
    );
    site.route(book("r", 0, 9)).await.unwrap();
    for fraction in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
        let answer = client
            .add_output_block(output(attempt("r", 0), Some(fraction)))
            .await;
        refused(&fraction.to_string(), answer, Code::InvalidArgument);
    }
    assert_eq!(site.load().await, (9, 2, 1));
    for status in [0, 99, 600, u32::MAX] {
        let asked = pb::FreeRequest {
            attempt: attempt("r", 0),
            status: Some(status),
        };
        refused(
            &status.to_string(),
            client.free(asked).await,
            Code::InvalidArgument,
        );
    }
    assert_eq!(site.load().await, (9, 2, 1));
    let page = site.page("metrics").await;
    let counted = r#"warmroute_api_calls_total{call="AddOutputBlock",code="INVALID_ARGUMENT"} 7"#;
    assert!(page.lines().any(|line| line == counted), "{page}");
    let ranks = rank(9).into_iter().collect();
    refused(
        "an unknown rank",
        client
            .dump_events(pb::DumpEventsRequest { ranks })
            .await
            .map(drop),
        Code::NotFound,
    );
    let watch = pb::WatchFleetRequest { model: "x".into() };
    refused(
        "an unknown model",
        client.watch_fleet(watch).await.map(drop),
        Code::NotFound,
    );
}

#[tokio::test]
async fn prompts_have_only_so_many_blocks_and_an_unknown_model_is_named() {
    let site = Site::start(
        "api: {listen: '127.0.0.1:0', most_blocks: 2}\n",
        &[worker(1, "")],
    )
    .await;
    for question in [tokens(12), blocks(3, 0, 12), blocks(3, 3, 12)] {
        let asked = pb::RouteRequest {
            question: Some(question),
            ..book("r", 0, 9)
        };
        refused("too long", site.route(asked).await, Code::InvalidArgument);
    }
    site.route(book("r", 0, 11)).await.unwrap();
    let unknown = body("/v1/completions", r#"{"model":"nobody's","prompt":"x"}"#);
    let asked = pb::RouteRequest {
        question: Some(unknown),
        ..book("s", 0, 9)
    };
    let status = site.route(asked).await.unwrap_err();
    assert!(status.message().contains("nobody's"), "{status:?}");
}

#[tokio::test]
async fn nothing_is_booked_on_a_worker_of_another_model() {
    let models = "models: [{name: m, block_size: 4}, {name: n, block_size: 4}]\n";
    let site = Site::start(models, &[worker(1, ", model: m"), worker(2, ", model: n")]).await;
    for (model, worker, code) in [
        ("m", 1, None),
        ("m", 2, Some(Code::NotFound)),
        ("n", 1, Some(Code::NotFound)),
    ] {
        let asked = pb::AddRequestRequest {
            attempt: attempt(&format!("{model}{worker}"), 0),
            worker: rank(worker),
            question: Some(pb::Question {
                model: model.into(),
                ..tokens(9)
            }),
            ..pb::AddRequestRequest::default()
        };
        let answer = site.client.clone().add_request(asked).await;
        assert_eq!(
            answer.err().map(|status| status.code()),
            code,
            "{model} on {worker}"
        );
    }
    assert_eq!(site.load().await.2, 1);
}

/// Wishes that nobody can fulfil, and what comes of them.
fn bad_wishes() -> Vec<(&'static str, pb::Wishes, Code)> {
    let pin = |worker_id, dp_rank| Some(pb::Pin { worker_id, dp_rank });
    let none = pb::Wishes::default;
    let overrides = |set: pb::Overrides| pb::Wishes {
        overrides: Some(set),
        ..none()
    };
    let priority = |jump| pb::Wishes {
        priority: Some(pb::Priority {
            jump,
            ..pb::Priority::default()
        }),
        ..none()
    };
    let allowed = |ids: &[u64]| Some(pb::AllowedWorkers { ids: ids.to_vec() });
    vec![
        (
            "an unknown pin",
            pb::Wishes {
                pin: pin(9, None),
                ..none()
            },
            Code::NotFound,
        ),
        (
            "an unknown rank",
            pb::Wishes {
                pin: pin(1, Some(5)),
                ..none()
            },
            Code::NotFound,
        ),
        (
            "no rank of two",
            pb::Wishes {
                pin: pin(2, None),
                ..none()
            },
            Code::InvalidArgument,
        ),
        (
            "a pin that is not allowed",
            pb::Wishes {
                pin: pin(1, None),
                allowed_workers: allowed(&[2]),
                ..none()
            },
            Code::InvalidArgument,
        ),
        (
            "nobody allowed",
            pb::Wishes {
                allowed_workers: allowed(&[]),
                ..none()
            },
            Code::FailedPrecondition,
        ),
        (
            "a taint",
            pb::Wishes {
                required_taints: vec!["x".into()],
                ..none()
            },
            Code::FailedPrecondition,
        ),
        (
            "no number",
            pb::Wishes {
                preferred_taints: [("x".to_owned(), f64::NAN)].into(),
                ..none()
            },
            Code::InvalidArgument,
        ),
        ("going back", priority(-1.0), Code::InvalidArgument),
        ("for ever", priority(f64::INFINITY), Code::InvalidArgument),
        (
            "less than nothing",
            overrides(pb::Overrides {
                overlap_score_credit: Some(-1.0),
                ..pb::Overrides::default()
            }),
            Code::InvalidArgument,
        ),
        (
            "more than all",
            overrides(pb::Overrides {
                shared_cache_multiplier: Some(2.0),
                ..pb::Overrides::default()
            }),
            Code::InvalidArgument,
        ),
    ]
}

#[tokio::test]
async fn wishes_that_cannot_be_fulfilled_are_refused_and_others_are_heard() {
    let site = Site::start(
        "",
        &[
            worker(1, ""),
            worker(2, ", taints: [fast], data_parallel: {size: 2}"),
        ],
    )
    .await;
    for (what, wishes, code) in bad_wishes() {
        for asked in [
            book("r", 0, 9),
            pb::RouteRequest {
                book: None,
                ..book("r", 0, 9)
            },
        ] {
            refused(
                what,
                site.route(pb::RouteRequest {
                    wishes: Some(wishes.clone()),
                    ..asked
                })
                .await,
                code,
            );
        }
    }
    let session = Some(pb::Session::default());
    refused(
        "no id",
        site.route(pb::RouteRequest {
            session,
            ..book("r", 0, 9)
        })
        .await,
        Code::InvalidArgument,
    );
    assert_eq!(site.load().await, (0, 0, 0));

    let none = pb::Wishes::default;
    let pin = Some(pb::Pin {
        worker_id: 2,
        dp_rank: Some(1),
    });
    let good = [
        (pb::Wishes { pin, ..none() }, 2),
        (
            pb::Wishes {
                allowed_workers: Some(pb::AllowedWorkers { ids: vec![1] }),
                ..none()
            },
            1,
        ),
        (
            pb::Wishes {
                required_taints: vec!["fast".into()],
                ..none()
            },
            2,
        ),
        (
            pb::Wishes {
                preferred_taints: [("fast".to_owned(), -1.0)].into(),
                ..none()
            },
            1,
        ),
    ];
    for (wishes, worker) in good {
        let asked = pb::RouteRequest {
            wishes: Some(wishes.clone()),
            book: None,
            ..book("", 0, 9)
        };
        let answer = site.route(asked).await.unwrap();
        assert_eq!(
            answer.decode.unwrap().worker.unwrap().worker_id,
            worker,
            "{wishes:?}"
        );
    }
}

#[tokio::test]
async fn too_many_are_refused_and_told_when_to_come_back() {
    let few = Site::start(
        "api: {listen: '127.0.0.1:0', bookings: 1}\n",
        &[worker(1, "")],
    )
    .await;
    few.route(book("a", 0, 9)).await.unwrap();
    let full = few.route(book("b", 0, 9)).await.unwrap_err();
    assert_eq!(full.code(), Code::ResourceExhausted);
    assert_eq!(full.metadata().get("retry-after").unwrap(), "1");
    assert_eq!(few.load().await.2, 1, "what was chosen for it is released");

    let hurried = Site::start(
        "queue: {prefill_busy_threshold: 1, deadline: 50ms}\n",
        &[worker(1, "")],
    )
    .await;
    hurried.route(book("a", 0, 9)).await.unwrap();
    let late = hurried.route(book("b", 0, 9)).await.unwrap_err();
    assert_eq!(late.code(), Code::ResourceExhausted, "{late:?}");
    assert!(late.metadata().contains_key("retry-after"));

    hurried.list(&["[]".to_owned()]);
    hurried
        .until(
            "nobody left",
            |page| page["members"].as_array().is_some_and(Vec::is_empty),
            "debug/fleet",
        )
        .await;
    let nobody = hurried.route(book("b", 0, 9)).await.unwrap_err();
    assert_eq!(nobody.code(), Code::Unavailable, "{nobody:?}");
}

#[tokio::test]
async fn a_body_is_read_as_the_engines_read_it() {
    let root = env!("CARGO_MANIFEST_DIR");
    let models = format!(
        "models:\n- {{name: qwen2.5, block_size: 4, tokenizer: '{root}/examples/models/qwen2.5/tokenizer.json.gz',\n   \
         tokenizer_config: '{root}/examples/models/qwen2.5/tokenizer_config.json'}}\n- {{name: bare, block_size: 4}}\n"
    );
    let site = Site::start(
        &models,
        &[worker(1, ", model: qwen2.5"), worker(2, ", model: bare")],
    )
    .await;
    let ask = |question| pb::RouteRequest {
        question: Some(question),
        with_tokens: true,
        ..pb::RouteRequest::default()
    };
    let chat =
        r#"{"model":"qwen2.5","messages":[{"role":"user","content":"Why is the sky blue?"}]}"#;
    let answer = site
        .route(ask(body("/v1/chat/completions", chat)))
        .await
        .unwrap();
    assert_eq!(
        (
            answer.model.as_str(),
            answer.decode.as_ref().unwrap().worker
        ),
        ("qwen2.5", rank(1))
    );
    let told = &answer.prompts[0];
    assert_eq!(
        (told.token_ids.len() as u64, told.local_hashes.len()),
        (told.tokens, told.tokens as usize / 4)
    );
    // The tokens that were told lead to the same blocks.
    let prompt = Some(Prompt::Tokens(pb::Tokens {
        ids: told.token_ids.clone(),
    }));
    let again = site
        .route(ask(pb::Question {
            model: "qwen2.5".into(),
            ..question(prompt)
        }))
        .await
        .unwrap();
    assert_eq!(&again.prompts[0], told);
    // A model without a tokenizer goes by load, and of two models one has to be named.
    let bare = site
        .route(ask(body(
            "/v1/completions",
            r#"{"model":"bare","prompt":"x"}"#,
        )))
        .await
        .unwrap();
    assert_eq!(
        (bare.mode(), bare.reason.as_str(), bare.prompts.len()),
        (pb::Mode::LoadOnly, "no_tokenizer", 0)
    );
    refused(
        "no model",
        site.route(ask(tokens(9))).await,
        Code::InvalidArgument,
    );
}
