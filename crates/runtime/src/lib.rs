//! Process services of warmroute. [`lifecycle`] has readiness and supervised tasks. [`tls`] has TLS
//! listeners and clients whose files are reloaded. [`causes`] formats the causes of errors.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod causes;
pub mod lifecycle;
pub mod tls;
