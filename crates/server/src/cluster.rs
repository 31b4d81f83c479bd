//! State that several routers share: replicas, a remote index, and warm starts from peers.

pub mod remote_index;
pub mod replica;
pub mod warm_start;
