//! Prompts that exceed the length of the model or the deadline are routed by their first tokens, and do not delay others.

use super::*;
use crate::learned::Agreed;

const PATH: &str = "/v1/completions";

/// A text of about this length, in different sentences.
fn words(bytes: usize) -> String {
    (0_u64..)
        .map(|n| format!("sentence {n} of a long prompt, "))
        .take(bytes / 30 + 1)
        .collect()
}

fn body(prompt: &str) -> Bytes {
    serde_json::json!({"model": "m", "prompt": prompt})
        .to_string()
        .into()
}

fn patient() -> Limits {
    Limits {
        inline: 4096,
        queue: 256,
        deadline: Duration::from_secs(60),
    }
}

/// An intake for a model of this length, with trusted clients.
fn of_length(max_model_len: u64, limits: Limits) -> Arc<Intake> {
    let mut intake = Arc::into_inner(with_tokenizer(limits)).unwrap();
    intake.parts.clients.trusted = true;
    let agreed = Agreed {
        max_model_len: Some(max_model_len),
        ..Agreed::default()
    };
    let source = engine_tokens::TokenSource {
        standing: Arc::default(),
        engine: None,
        agreed: Arc::new(arc_swap::ArcSwap::from_pointee(
            [("m".into(), agreed)].into(),
        )),
    };
    intake.parts.tokens = TokenSources::from([("m".into(), source)]);
    Arc::new(intake)
}

/// The known blocks of a partial prompt, with the reason.
fn beginning(prompt: Prompt) -> (BlockHashes, u64, Reason) {
    match prompt {
        Prompt::Beginning {
            known,
            tokens,
            because,
        } => (known, tokens, because),
        prompt => panic!("{:?}", prompt.because()),
    }
}

fn whole(prompt: Prompt) -> BlockHashes {
    match prompt {
        Prompt::Hashed(mut prompts) => prompts.pop().unwrap(),
        prompt => panic!("{:?}", prompt.because()),
    }
}

#[test]
fn prompt_beyond_model_length_is_known_up_to_it() {
    let prompt = words(40_000);
    let exact = whole(
        with_tokenizer(patient())
            .take_now(None, PATH, &|_| None, &body(&prompt))
            .request
            .prompt,
    );
    let intake = of_length(1000, patient());
    let (known, tokens, because) = beginning(
        intake
            .take_now(None, PATH, &|_| None, &body(&prompt))
            .request
            .prompt,
    );
    assert_eq!((known.len(), because), (1000 / 16, Reason::PromptTooLong));
    assert_eq!(known.locals(), &exact.locals()[..known.len()]);
    assert!(
        tokens > 5000,
        "the load of the whole prompt is estimated: {tokens}"
    );
    // What truncation leaves of it is all that the engine sees.
    let cut = serde_json::json!({"model": "m", "prompt": prompt, "truncate_prompt_tokens": 500, "truncation_side": "right"});
    let kept = whole(
        intake
            .take_now(None, PATH, &|_| None, cut.to_string().as_bytes())
            .request
            .prompt,
    );
    assert_eq!(kept.locals(), &exact.locals()[..500 / 16]);
    let tokens: Vec<u32> = (1..=2000).collect();
    let of_tokens = serde_json::json!({"model": "m", "prompt": tokens}).to_string();
    let (known, _, because) = beginning(
        intake
            .take_now(None, PATH, &|_| None, of_tokens.as_bytes())
            .request
            .prompt,
    );
    assert_eq!((known.len(), because), (1000 / 16, Reason::PromptTooLong));
}

#[test]
fn token_data_is_truncated_to_model_length() {
    let tokens: Vec<u32> = (1..=2000).collect();
    let of = |tokens: &[u32]| {
        let body =
            serde_json::json!({"model": "m", "prompt": "x", "nvext": {"token_data": tokens}})
                .to_string();
        of_length(1000, patient())
            .take_now(None, PATH, &|_| None, body.as_bytes())
            .request
            .prompt
    };
    let (known, tokens_estimated, because) = beginning(of(&tokens));
    assert_eq!((known.len(), because), (1000 / 16, Reason::PromptTooLong));
    assert!(tokens_estimated >= 1000 / 16 * 16, "{tokens_estimated}");
    let exact = whole(of(&tokens[..1000]));
    assert_eq!(known.locals(), exact.locals());
}

/// The rest of a cut body may change the last tokens, also where the model limit cuts the prompt.
#[tokio::test]
async fn cut_prompt_beyond_model_length_keeps_settled_blocks() {
    const WORD: &str = "counterrevolutionaryinternationalizationuncharacteristicallyunderstandable";
    let (intake, exact) = (of_length(32, patient()), with_tokenizer(patient()));
    let mut known_prompts = 0;
    for before in 16..32 {
        let sent = body(&format!("{}{WORD}", "a ".repeat(before)));
        let locals = whole(exact.take_now(None, PATH, &|_| None, &sent).request.prompt)
            .locals()
            .to_vec();
        for cut in sent.len() - WORD.len()..sent.len() - 2 {
            let cut = Body::Cut {
                shown: sent.slice(..cut),
                length: Some(sent.len() as u64),
            };
            let prompt = intake.take(PATH, &|_| None, &cut).await.request.prompt;
            if let Prompt::Beginning {
                known,
                because: Reason::PromptTooLong,
                ..
            } = prompt
            {
                assert!(locals.starts_with(known.locals()), "{cut:?}");
                known_prompts += 1;
            }
        }
    }
    assert!(known_prompts > 50, "{known_prompts}");
}

#[tokio::test]
async fn prompt_of_20_mb_is_routed_by_its_prefix() {
    let prompt = words(20_000_000);
    let intake = of_length(16_384, patient());
    let exact = whole(
        with_tokenizer(patient())
            .take_now(None, PATH, &|_| None, &body(&prompt[..200_000]))
            .request
            .prompt,
    );
    let sent = Body::Whole(body(&prompt));
    let (known, _, because) = beginning(intake.take(PATH, &|_| None, &sent).await.request.prompt);
    assert_eq!((known.len(), because), (16_384 / 16, Reason::PromptTooLong));
    assert_eq!(known.locals(), &exact.locals()[..known.len()]);
}

#[tokio::test]
async fn body_above_limit_is_routed_by_its_prefix() {
    let prompt = words(100_000);
    let intake = with_tokenizer(patient());
    let exact = whole(
        intake
            .take_now(None, PATH, &|_| None, &body(&prompt))
            .request
            .prompt,
    );
    let shown = body(&prompt).slice(..60_000);
    let sent = Body::TooLarge {
        shown,
        bytes: 100_000,
    };
    let (known, tokens, because) =
        beginning(intake.take(PATH, &|_| None, &sent).await.request.prompt);
    assert_eq!(because, Reason::BodyTooLarge);
    assert!(
        known.len() > exact.len() / 2,
        "{} of {} blocks",
        known.len(),
        exact.len()
    );
    assert_eq!(known.locals(), &exact.locals()[..known.len()]);
    assert!(tokens > known.tokens() as u64);
}

#[tokio::test]
async fn body_above_limit_keeps_its_reason_when_shown_whole() {
    let intake = of_length(1000, patient());
    for prompt in [words(1000), words(100_000)] {
        let sent = Body::TooLarge {
            shown: body(&prompt),
            bytes: 100_000,
        };
        let (known, _, because) =
            beginning(intake.take(PATH, &|_| None, &sent).await.request.prompt);
        assert_eq!((because, known.is_empty()), (Reason::BodyTooLarge, false));
    }
    let unreadable = Body::TooLarge {
        shown: Bytes::from_static(b"{\"model\":\"m\"}"),
        bytes: 100_000,
    };
    let prompt = intake
        .take(PATH, &|_| None, &unreadable)
        .await
        .request
        .prompt;
    assert_eq!(prompt.because(), Some(Reason::BodyTooLarge), "{prompt:?}");
}

#[tokio::test]
async fn deadline_beyond_time_is_no_deadline() {
    let intake = with_tokenizer(Limits {
        deadline: Duration::MAX,
        ..patient()
    });
    whole(
        intake
            .take(PATH, &|_| None, &Body::Whole(body("one two three")))
            .await
            .request
            .prompt,
    );
}

#[tokio::test]
async fn missed_deadline_keeps_first_tokens() {
    let prompt = words(2_000_000);
    let exact = whole(
        with_tokenizer(patient())
            .take_now(None, PATH, &|_| None, &body(&prompt))
            .request
            .prompt,
    );
    let sent = Body::Whole(body(&prompt));
    // The time that a body takes to be read depends on the machine.
    for millis in [50, 100, 200, 400, 800, 1600, 3200, 6400] {
        let intake = with_tokenizer(Limits {
            deadline: Duration::from_millis(millis),
            ..patient()
        });
        let prompt = intake.take(PATH, &|_| None, &sent).await.request.prompt;
        assert_eq!(
            prompt.because(),
            Some(Reason::Deadline),
            "within {millis} ms"
        );
        if let Prompt::Beginning { known, .. } = prompt {
            assert!(!known.is_empty() && known.len() < exact.len());
            assert_eq!(known.locals(), &exact.locals()[..known.len()]);
            return;
        }
    }
    panic!("nothing was kept of any");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_bodies_leave_small_ones_exact() {
    let limits = Limits {
        deadline: Duration::from_secs(4),
        ..patient()
    };
    let intake = with_tokenizer(limits);
    let large = Body::Whole(body(&words(12_000_000)));
    let clients: Vec<_> = (0..6)
        .map(|_| {
            let intake = intake.clone();
            let large = large.clone();
            tokio::spawn(async move {
                loop {
                    intake.take(PATH, &|_| None, &large).await;
                }
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(500)).await;
    for n in 0..20 {
        let small = Body::Whole(body(&format!("{n} {}", words(20_000))));
        let prompt = intake.take(PATH, &|_| None, &small).await.request.prompt;
        assert!(
            matches!(prompt, Prompt::Hashed(_)),
            "{n}: {:?}",
            prompt.because()
        );
    }
    clients.iter().for_each(tokio::task::JoinHandle::abort);
}
