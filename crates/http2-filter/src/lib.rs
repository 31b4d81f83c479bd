//! A filter between an accepted connection and the `h2` crate.
//!
//! `h2` resets every stream whose `:authority` is not an authority in the sense of RFC 3986. Envoy
//! sends the name of the cluster there unless its `envoy_grpc.authority` is set, and control planes
//! name clusters freely: `outbound|9002||picker.ns.svc` (Istio), `extension/ns/name` (Contour).
//! [`Http2Filter`] reads the HTTP/2 frames of the client and replaces the characters that `h2`
//! refuses (see [`normalize_authority`]). All other octets pass unchanged. This includes malformed
//! input, which `h2` rejects.
//!
//! The replacement has as many octets as the original. An entry of the HPACK dynamic table
//! therefore has the same size in `h2` and in the encoder of the client, and both evict the same
//! entries. Later header blocks that refer to the entry need no change. The filter stores only the
//! size of each table entry and whether its name is `:authority`.
//!
//! The filter also counts open streams. It reports the RST_STREAM and GOAWAY frames that `h2` sends
//! because of errors, because `h2` does not report them to its caller.
//!
//! Decision 0054.

mod activity;
mod authority;
mod frame;
mod hpack;
mod huffman;
mod inbound;
mod outbound;
mod service;
mod stream;

pub use activity::OpenStreams;
pub use authority::normalize_authority;
pub use outbound::{ErrorScope, SentError};
pub use service::{host_without_port, service_of_authority};
pub use stream::{Http2Filter, Http2Limits};
