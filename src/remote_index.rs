//! The index for very large fleets, where not every one of us can hear what thousands of engines tell: a few keep it and
//! serve it (`serve_index`), many ask them (`use_remote_index`). `proto/warmroute/index/v1/index.proto` says what is asked. A
//! question costs a request at most a deadline; who gets no answer is routed by what was routed before.

mod asker;
mod choice;
pub mod config;
mod serve;
mod wire;

/// The messages, a client and a server, as compiled from the protocol.
#[expect(clippy::too_many_lines, missing_docs, reason = "generated")]
pub mod pb {
    tonic::include_proto!("warmroute.index.v1");
}

pub use asker::{Asker, Question};
pub use serve::{FindModel, Parts, ServedIndex, ServedModel};

#[cfg(test)]
mod tests;
