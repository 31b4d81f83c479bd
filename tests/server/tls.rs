//! TLS, client certificates, tokens and the limits of connections, against the whole process with
//! real sockets and files that change.

mod admission;
mod http2;
mod renewal;
mod site;
