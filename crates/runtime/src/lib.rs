//! Process services of warmroute. [`lifecycle`] has readiness and supervised tasks. [`tls`] has TLS
//! listeners and clients whose files are reloaded. [`causes`] formats the causes of errors.
//! [`descriptors`] has the limit of open files, and [`files`] reads files.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod causes;
pub mod descriptors;
pub mod files;
pub mod lifecycle;
pub mod tls;
