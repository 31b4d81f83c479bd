//! Whole requests, from headers and a body to a question, without a tokenizer.

use std::borrow::Cow;
use std::pin::pin;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use warmroute::block::Windows;
use warmroute::block::tracking::TrackingHash;
use warmroute::intake::config::ClientsConfig;
use warmroute::intake::{Body, Intake, Limits, Model, Models, Parts, SessionSigns, Taken};
use warmroute::openai::{Paths, Shape};
use warmroute::router::{Prompt, Reason};
use warmroute::worker::BlockSize;

use crate::bodies::CANARY;
use crate::input::Input;

const PATHS: [&str; 24] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/conversations",
    "/score",
    "/v1/rerank",
    "/tokenize",
    "/detokenize",
    "/v1/chat/completions/render",
    "/v1/models",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/images/variations",
    "/generate",
    "/inference/v1/generate",
    "/prefix/v1/chat/completions/?x=y",
];

const HEADERS: [&str; 14] = [
    "content-type",
    "x-tenant",
    "x-session",
    "x-parent",
    "x-final",
    "x-worker-instance-id",
    "x-prefill-instance-id",
    "x-dp-rank",
    "x-data-parallel-rank",
    "x-warmroute-override",
    "x-warmroute-priority",
    "x-expected-output-tokens",
    "x-request-priority",
    "x-strict-priority",
];

/// Most tokens that are guessed from bytes.
const MOST_ESTIMATED: u64 = 131_072;

fn intake(trusted: bool, named: bool) -> Arc<Intake> {
    let mut models = Models::default();
    let size = BlockSize::new(4).expect("four tokens are a block");
    let model = |name: &str, windows| Model {
        name: name.into(),
        block_size: size,
        windows,
        media: Default::default(),
        encoder: None,
    };
    models.add(
        model("m", Windows::Plain),
        &["alias".into()],
        &["tuned".into()],
    );
    if named {
        models.add(model("n", Windows::Plain), &[], &[]);
    }
    Intake::new(Parts {
        models,
        paths: Paths::default(),
        clients: ClientsConfig {
            trusted,
            tenant_header: Some("x-tenant".to_owned()),
            ..ClientsConfig::default()
        },
        confine: Default::default(),
        rewrites: warmroute::intake::Rewrites::default(),
        rewrite_headers: Vec::new(),
        cluster: Default::default(),
        // Everything at once, on this thread.
        limits: Limits {
            inline: usize::MAX,
            queue: 1,
            deadline: Duration::MAX,
        },
        tracking: TrackingHash::Public,
        sessions: Some(SessionSigns {
            headers: vec!["x-session".to_owned()],
            body_field: Some("metadata.session".to_owned()),
            parent_headers: vec!["x-parent".to_owned()],
            final_headers: vec!["x-final".to_owned()],
        }),
        shared: None,
        remote: None,
        tokens: Default::default(),
    })
}

/// Requests of every kind become questions.
pub(crate) fn requests(bytes: &[u8]) {
    static INTAKES: LazyLock<[Arc<Intake>; 4]> = LazyLock::new(|| {
        [
            intake(false, false),
            intake(true, false),
            intake(false, true),
            intake(true, true),
        ]
    });
    let mut input = Input::new(bytes);
    let intake = &INTAKES[input.below(4)];
    let path = if input.rarely() {
        Cow::Owned(input.text())
    } else {
        Cow::Borrowed(input.pick(&PATHS))
    };
    let shown = input.byte();
    let count = input.below(4);
    let headers: Vec<(&str, String)> = (0..count)
        .map(|_| (input.pick(&HEADERS), input.text()))
        .collect();
    let body = Bytes::copy_from_slice(input.rest());
    let length = body.len();
    let body = match shown % 8 {
        0 => Body::Absent,
        1 => Body::Unseen,
        2 => Body::Streamed,
        3 => Body::TooLarge {
            shown: body,
            bytes: (length as u64) << (shown >> 3),
        },
        4 => Body::Cut {
            shown: body,
            length: None,
        },
        5 => Body::Cut {
            shown: body,
            length: Some((length as u64) << (shown >> 3)),
        },
        _ => Body::Whole(body),
    };
    let taken = take(intake, &path, &headers, &body);
    check(&taken, length);
    let timeless = |taken: Taken| {
        format!(
            "{:?}",
            Taken {
                times: Vec::new(),
                ..taken
            }
        )
    };
    assert_eq!(
        timeless(take(intake, &path, &headers, &body)),
        timeless(taken),
        "read twice"
    );
}

fn take(intake: &Arc<Intake>, path: &str, headers: &[(&str, String)], body: &Body) -> Taken {
    let header = |name: &str| {
        headers
            .iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| Cow::Borrowed(&**value))
    };
    let mut context = Context::from_waker(Waker::noop());
    match pin!(intake.take(path, &header, body)).poll(&mut context) {
        Poll::Ready(taken) => taken,
        Poll::Pending => panic!("there is nothing to wait for"),
    }
}

fn check(taken: &Taken, length: usize) {
    let hashed = match &taken.request.prompt {
        Prompt::Estimated { tokens, because } => {
            assert_ne!(*because, Reason::EncodeFailed, "something panicked");
            assert!(*tokens <= MOST_ESTIMATED, "{tokens} tokens are guessed");
            if taken.api.is_none_or(|api| api.shape() == Shape::NoPrompt) {
                assert_eq!((*tokens, *because), (0, Reason::NotInference));
            }
            0
        }
        Prompt::Beginning { known, tokens, .. } => {
            assert!(known.tokens() > 0 && *tokens <= MOST_ESTIMATED.max(known.tokens() as u64));
            known.tokens()
        }
        Prompt::Hashed(prompts) => {
            assert_eq!(prompts.len(), taken.tokens.len());
            taken.tokens.iter().map(Vec::len).sum()
        }
    };
    assert!(hashed <= length, "{hashed} tokens in {length} bytes");
    if let Some(what) = &taken.unreadable {
        assert!(!what.contains(CANARY), "`{what}` quotes the body");
    }
    assert!(
        taken
            .session
            .as_ref()
            .is_none_or(|session| !session.id.is_empty()),
        "a session without a name"
    );
}
