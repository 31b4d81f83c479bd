//! TLS for the listeners of warmroute, connection limits, and HTTP clients for outgoing
//! connections.
//!
//! Certificates are reloaded when their files change, because issuers replace them every few weeks.
//! New connections use the new certificate; established connections are not affected. Each
//! handshake runs in a separate task and has a deadline, so a silent client delays no other client.

mod certificate;
mod client;
pub mod config;
mod connection;
mod connection_table;
mod handshake;
mod listener;
mod listener_certificate;
mod listener_context;
mod reloadable_files;

pub use certificate::{TlsError, host_name};
pub use client::{
    ClientFiles, http_client_builder, http_client_with_ca, http_client_with_system_roots,
};
pub use config::{ListenerExposure, TlsConfig};
pub use connection::AcceptedConnection;
pub use connection_table::ConnectionLimits;
pub use listener::{LimitedListener, PeerAddress};
pub use listener_certificate::{ListenerCertificate, ListenerProtocol};
pub use listener_context::{ListenerLimits, ListenerProfile};
pub use reloadable_files::{FileBacked, ReloadableFiles};
