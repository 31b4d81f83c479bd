//! The Envoy side: one gRPC stream per HTTP exchange. [`Exchange`] is the protocol as a pure state machine, [`service`]
//! feeds it with a stream's messages and carries out its effects, [`pipeline`] turns a body into a routing question.
//! This folder knows Envoy's wire types; nothing else of the request path does.

pub mod config;
pub mod exchange;
pub mod headers;
pub mod message;
pub mod mutation;
pub mod pipeline;
mod record;
pub mod reject;
pub mod service;

pub use exchange::{Effect, Exchange};
