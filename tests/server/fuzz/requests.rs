//! Preprocessing of complete requests, from headers and body to a route request, without a
//! tokenizer.

use std::borrow::Cow;
use std::pin::pin;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use warmroute_core::block::BlockWindows;
use warmroute_core::router::{Reason, RoutePrompt};
use warmroute_core::worker::BlockSize;
use warmroute_server::request::config::ClientsConfig;
use warmroute_server::request::{
    ConfiguredModel, EncodeLimits, ModelRegistry, NvExtScope, PreprocessedRequest,
    PreprocessorParts, RequestBody, RequestPreprocessor, SessionsConfig,
};
use warmroute_server::tracking_hash::TrackingHash;
use warmroute_tokens::openai::{ApiPaths, ApiWorkload};

use super::bodies::CANARY;
use super::input::Input;

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

/// Maximum token estimate of a body.
const MAX_ESTIMATE: u64 = 131_072;

fn preprocessor(trusted: bool, named: bool) -> Arc<RequestPreprocessor> {
    let mut models = ModelRegistry::default();
    let size = BlockSize::new(4).expect("four tokens are a block");
    let model = |name: &str, windows| ConfiguredModel {
        name: name.into(),
        block_size: size,
        windows,
        media: Default::default(),
        encoder: None,
    };
    models.add(
        model("m", BlockWindows::Plain),
        &["alias".into()],
        &["tuned".into()],
    );
    if named {
        models.add(model("n", BlockWindows::Plain), &[], &[]);
    }
    RequestPreprocessor::new(PreprocessorParts {
        models,
        message_cache: None,
        paths: ApiPaths::default(),
        clients: ClientsConfig {
            trusted,
            tenant_header: Some("x-tenant".to_owned()),
            ..ClientsConfig::default()
        },
        nvext: if trusted {
            NvExtScope::All
        } else {
            NvExtScope::Content
        },
        pool_routes: Default::default(),
        rewrites: warmroute_server::request::RewriteRules::default(),
        rewrite_headers: Vec::new(),
        cluster: Default::default(),
        // The limits make all work run on this thread.
        limits: EncodeLimits {
            inline: usize::MAX,
            queue: 1,
            deadline: Duration::MAX,
        },
        tracking_hash: TrackingHash::Public,
        sessions: Some(SessionsConfig {
            headers: vec!["x-session".to_owned()],
            body_field: Some("metadata.session".to_owned()),
            parent_headers: vec!["x-parent".to_owned()],
            final_headers: vec!["x-final".to_owned()],
            ..SessionsConfig::default()
        }),
        shared_cache: None,
        index_client: None,
        token_sources: Default::default(),
    })
}

/// Preprocesses requests of every kind.
pub(crate) fn requests(bytes: &[u8]) {
    static PREPROCESSORS: LazyLock<[Arc<RequestPreprocessor>; 4]> = LazyLock::new(|| {
        [
            preprocessor(false, false),
            preprocessor(true, false),
            preprocessor(false, true),
            preprocessor(true, true),
        ]
    });
    let mut input = Input::new(bytes);
    let preprocessor = &PREPROCESSORS[input.below(4)];
    let path = if input.rarely() {
        Cow::Owned(input.text())
    } else {
        Cow::Borrowed(input.pick(&PATHS))
    };
    let received = input.byte();
    let count = input.below(4);
    let headers: Vec<(&str, String)> = (0..count)
        .map(|_| (input.pick(&HEADERS), input.text()))
        .collect();
    let body = Bytes::copy_from_slice(input.rest());
    let length = body.len();
    let body = match received % 8 {
        0 => RequestBody::Absent,
        1 => RequestBody::NotReceived,
        2 => RequestBody::Streamed,
        3 => RequestBody::TooLarge {
            received: body,
            bytes: (length as u64) << (received >> 3),
        },
        4 => RequestBody::Truncated {
            received: body,
            length: None,
        },
        5 => RequestBody::Truncated {
            received: body,
            length: Some((length as u64) << (received >> 3)),
        },
        _ => RequestBody::Whole(body),
    };
    let preprocessed = preprocess(preprocessor, &path, &headers, &body);
    check(&preprocessed, length);
    let without_times = |preprocessed: PreprocessedRequest| {
        format!(
            "{:?}",
            PreprocessedRequest {
                stage_times: Vec::new(),
                ..preprocessed
            }
        )
    };
    assert_eq!(
        without_times(preprocess(preprocessor, &path, &headers, &body)),
        without_times(preprocessed),
        "the second result differs"
    );
}

fn preprocess(
    preprocessor: &Arc<RequestPreprocessor>,
    path: &str,
    headers: &[(&str, String)],
    body: &RequestBody,
) -> PreprocessedRequest {
    let header = |name: &str| {
        headers
            .iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| Cow::Borrowed(&**value))
    };
    let mut context = Context::from_waker(Waker::noop());
    match pin!(preprocessor.preprocess(path, &header, body)).poll(&mut context) {
        Poll::Ready(preprocessed) => preprocessed,
        Poll::Pending => panic!("preprocessing must not wait"),
    }
}

fn check(preprocessed: &PreprocessedRequest, length: usize) {
    let hashed = match &preprocessed.route_request.prompt {
        RoutePrompt::Estimated { tokens, reason } => {
            assert_ne!(*reason, Reason::EncodeFailed, "tokenization panicked");
            assert!(*tokens <= MAX_ESTIMATE, "estimate of {tokens} tokens");
            if preprocessed
                .api
                .is_none_or(|api| api.workload() == ApiWorkload::None)
            {
                assert_eq!((*tokens, *reason), (0, Reason::NotInference));
            }
            0
        }
        RoutePrompt::Truncated { known, tokens, .. } => {
            assert!(known.tokens() > 0 && *tokens <= MAX_ESTIMATE.max(known.tokens() as u64));
            known.tokens()
        }
        RoutePrompt::Hashed(prompts) => {
            assert_eq!(prompts.len(), preprocessed.tokens.len());
            preprocessed.tokens.iter().map(Vec::len).sum()
        }
    };
    assert!(hashed <= length, "{hashed} tokens in {length} bytes");
    if let Some(what) = &preprocessed.parse_error {
        assert!(!what.contains(CANARY), "`{what}` quotes the body");
    }
    assert!(
        preprocessed
            .session
            .as_ref()
            .is_none_or(|session| !session.id.is_empty()),
        "a session without an id"
    );
}
