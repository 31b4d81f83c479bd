//! Requests with bodies, through the public functions of the preprocessor.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use warmroute_core::block::{BlockHashes, BlockWindows, CacheSalt, MediaTokens};
use warmroute_core::parity::ParityExpectation;
use warmroute_core::router::{Reason, RoutePrompt, RouteRequest};
use warmroute_core::worker::{BlockSize, ModelName};
use warmroute_tokens::openai::{ApiKind, ApiPaths};
use warmroute_tokens::prompt;
use warmroute_tokens::prompt::Encoder;

use super::config::ClientsConfig;
use super::engine_tokens::{TokenSource, TokenSources};
use super::partial_request::MAX_ESTIMATED_TOKENS;
use super::*;
use crate::REPOSITORY;
use crate::tracking_hash::TrackingHash;

mod apis;
mod bounds;
mod clients;
mod multimodal;
mod queueing;

fn preprocessor_parts(
    models: ModelRegistry,
    clients: ClientsConfig,
    limits: EncodeLimits,
) -> PreprocessorParts {
    PreprocessorParts {
        models,
        message_cache: None,
        paths: ApiPaths::default(),
        nvext: NvExtScope::new(&clients, false),
        clients,
        pool_routes: Default::default(),
        rewrites: Default::default(),
        rewrite_headers: Vec::new(),
        cluster: Default::default(),
        limits,
        tracking_hash: TrackingHash::Public,
        sessions: None,
        shared_cache: None,
        index_client: None,
        token_sources: Default::default(),
    }
}

/// Returns a preprocessor with the shipped tokenizer and a short deadline.
fn preprocessor_with_short_deadline() -> Arc<RequestPreprocessor> {
    preprocessor_with_tokenizer(EncodeLimits {
        inline: 4096,
        queue: 256,
        deadline: Duration::from_millis(1),
    })
}

fn preprocessor_with_tokenizer(limits: EncodeLimits) -> Arc<RequestPreprocessor> {
    let files = prompt::Config {
        tokenizer: format!("{REPOSITORY}/examples/models/qwen2.5/tokenizer.json.gz").into(),
        tokenizer_config: None,
        chat_template: None,
    };
    let model = ConfiguredModel {
        name: "m".into(),
        block_size: BlockSize::new(16).unwrap(),
        windows: BlockWindows::Plain,
        media: MediaTokens::default(),
        encoder: Some(Arc::new(Encoder::load(&files).unwrap())),
    };
    let mut models = ModelRegistry::default();
    models.add(model, &[], &[]);
    RequestPreprocessor::new(preprocessor_parts(models, ClientsConfig::default(), limits))
}

/// Returns a preprocessor for token prompts only.
fn preprocessor_without_tokenizer(clients: ClientsConfig) -> Arc<RequestPreprocessor> {
    RequestPreprocessor::new(parts_without_tokenizer(clients))
}

fn parts_without_tokenizer(clients: ClientsConfig) -> PreprocessorParts {
    let mut models = ModelRegistry::default();
    let size = BlockSize::new(4).unwrap();
    let model = ConfiguredModel {
        name: "base".into(),
        block_size: size,
        windows: BlockWindows::Plain,
        media: MediaTokens::default(),
        encoder: None,
    };
    models.add(model, &["alias".into()], &["tuned".into()]);
    let limits = EncodeLimits {
        inline: 4096,
        queue: 1,
        deadline: Duration::from_secs(1),
    };
    preprocessor_parts(models, clients, limits)
}

/// Returns the beginning of a PNG file of 56 by 56 pixels with this color type, as a data URL.
fn png_data_url(color: u8) -> String {
    use base64::Engine as _;
    let mut bytes = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x38\0\0\0\x38\x08".to_vec();
    bytes.extend([color, 0, 0, 0, 1, 2, 3, 4]);
    format!(
        "data:image/png;base64,{}",
        base64::engine::general_purpose::STANDARD.encode(bytes)
    )
}
