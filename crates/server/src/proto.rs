//! Generated messages, clients and servers of the protocols in `proto`.
#![allow(missing_docs, clippy::all, clippy::too_many_lines)]

/// Service of the router for clients other than Envoy.
pub mod router {
    tonic::include_proto!("warmroute.v1");
}

/// Service of a remote index.
pub mod index {
    tonic::include_proto!("warmroute.index.v1");
}

/// Messages between replicas.
pub mod replica {
    tonic::include_proto!("warmroute.replica.v1");
}
