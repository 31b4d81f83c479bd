//! TLS, client certificates, tokens and the limits of connections, against the whole process with real sockets and files
//! that change.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "tls/admission.rs"]
mod admission;
#[path = "tls/clients.rs"]
mod clients;
#[path = "tls/http2.rs"]
mod http2;
#[path = "tls/pki.rs"]
mod pki;
#[path = "tls/renewal.rs"]
mod renewal;
#[path = "tls/site.rs"]
mod site;
