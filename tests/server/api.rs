//! End-to-end tests of the gRPC service: a generated client, the whole process with real sockets, a
//! workers file that changes, and engines that publish KV events.

mod arguments;
mod life;
pub(crate) mod site;
mod streams;
