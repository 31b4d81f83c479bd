//! The Envoy side: one gRPC stream per HTTP exchange. [`Exchange`] is the protocol as a pure state
//! machine. [`service`] passes the messages of a stream to it and applies its effects. [`pipeline`]
//! turns a request into a route. Within the request path, only this module knows Envoy's wire
//! types.

mod body_budget;
pub mod config;
pub mod exchange;
mod first_tokens;
pub mod gateway;
mod guard;
pub mod header_changes;
pub mod headers;
pub mod message;
pub mod metadata;
pub mod mutation;
pub mod pipeline;
mod probe;
pub mod reject;
pub mod reply;
pub mod response_content;
mod response_stream;
mod retries;
pub mod returned_piece;
pub mod routing_headers;
pub mod server;
pub mod service;
pub mod state;
mod stream;
pub mod wire;

pub use exchange::{Effect, Exchange};
