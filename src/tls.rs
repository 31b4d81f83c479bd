//! TLS of our own sockets, and who comes in at all; and the way out to servers that want it. Certificates are followed while we run, because whoever issues them
//! replaces them every few weeks; new connections get the new one and old ones go on. Handshakes happen beside one another
//! and have a deadline, so that a client that says nothing holds up nobody.

mod acceptor;
mod client;
pub mod config;
mod connection;
mod connection_table;
mod exposure;
mod files;
mod handshake;
mod listener;
mod log_limit;
mod material;
mod secrets;

pub use acceptor::{Acceptor, Protocol};
pub use client::{ClientFiles, believing_the_system, client, trusting};
pub use config::TlsConfig;
pub use connection::AcceptedConnection;
pub use connection_table::ConnectionLimits;
pub use exposure::ListenerExposure;
pub use files::Pace;
pub use listener::{LimitedListener, ListenerLimits, ListenerProfile, PeerAddress};
pub use material::{TlsError, host_name};
pub use secrets::{Secret, Secrets};
