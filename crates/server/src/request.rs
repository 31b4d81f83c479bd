//! Request preprocessing: parse a body, render and tokenize its prompt, hash it, and read the
//! client's routing hints. Requests come from Envoy, from API clients, or from a file. Every
//! failure degrades the route by one step with its reason, and never causes an error for the
//! client.

mod cluster_rules;
pub mod config;
mod encode;
mod encode_time;
mod encoder_pool;
pub mod engine_tokens;
mod large_bodies;
mod models;
mod partial_request;
pub mod pool_routes;
mod preprocess;
mod preprocessor;
mod prompt_encoder;
pub mod rewrite;
mod routing_hints;
mod sessions;
mod shared_cache;

pub use cluster_rules::{ClusterRules, SharedClusterRules};
pub use models::{ConfiguredModel, ModelRegistry, ResolvedModel};
pub use preprocess::{PreprocessedRequest, RequestBody};
pub use preprocessor::{EncodeLimits, NvExtScope, PreprocessorParts, RequestPreprocessor};
pub use rewrite::{BodyEdit, ModelRename, RequestedModel, RewriteRules};
pub use routing_hints::{HeaderLookup, RoutingHints, hint_headers};
pub use sessions::SessionsConfig;
pub use shared_cache::SharedCacheLookup;

#[cfg(test)]
mod tests;
