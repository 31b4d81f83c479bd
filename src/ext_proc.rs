//! The Envoy side: one gRPC stream per HTTP exchange. [`Exchange`] is the protocol as a pure state machine, [`service`]
//! feeds it with a stream's messages and carries out its effects, [`pipeline`] turns a body into a routing question.
//! This folder knows Envoy's wire types; nothing else of the request path does.

pub mod carrying;
pub mod config;
pub mod contract;
pub mod exchange;
mod first_tokens;
pub mod gateway;
pub mod headers;
mod held;
pub mod message;
pub mod metadata;
pub mod mutation;
pub mod pipeline;
mod probe;
mod record;
pub mod reject;
mod replies;
mod retries;
pub mod service;
mod stream;
pub mod wire;

pub use exchange::{Effect, Exchange};
