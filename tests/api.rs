//! The service for callers that are not Envoy, by a client made from the same protocol, against the whole process: real
//! sockets, a workers file that changes, and engines that publish what they cache.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "api/arguments.rs"]
mod arguments;
#[path = "api/life.rs"]
mod life;
#[path = "api/site.rs"]
mod site;
#[path = "api/streams.rs"]
mod streams;
