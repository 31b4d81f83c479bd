//! Process services of warmroute: readiness and supervised tasks ([`lifecycle`]), and TLS listeners
//! and clients whose files are reloaded ([`tls`]).

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod lifecycle;
pub mod tls;
