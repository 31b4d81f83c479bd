//! TLS, client certificates, tokens and connection limits of the whole process, with real sockets
//! and files that change.

mod admission;
mod http2;
mod renewal;
mod site;
