//! End-to-end tests of the gRPC service with a generated client against the whole process: real
//! sockets, a workers file that changes, and engines that publish KV events.

mod arguments;
mod life;
pub(crate) mod site;
mod streams;
