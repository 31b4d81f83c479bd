//! Checks that listeners reachable from other hosts are protected.

use std::net::SocketAddr;

use super::TlsConfig;
use warmroute_settings::Problem;

/// A listener that must require client certificates, unless it listens on loopback or is declared
/// unprotected.
pub struct ListenerExposure<'a> {
    /// Key of the address in its configuration section.
    pub key: &'static str,
    /// Listen address.
    pub listen: SocketAddr,
    /// TLS configuration, if any.
    pub tls: Option<&'a TlsConfig>,
    /// True if the configuration allows unauthenticated callers.
    pub unprotected: bool,
    /// Actions available to any caller, for the error text.
    pub allowed_actions: &'static str,
}

impl ListenerExposure<'_> {
    /// Returns an error if the listener is reachable without protection, or is protected and
    /// declared unprotected.
    pub fn problem(&self) -> Option<Problem> {
        let is_mutual = self.tls.is_some_and(TlsConfig::is_mutual);
        if self.unprotected && is_mutual {
            let text =
                "callers need a certificate because of `tls.client_ca`; remove one of the two";
            return Some(Problem::of("unprotected", text));
        }
        if self.unprotected || is_mutual || self.listen.ip().to_canonical().is_loopback() {
            return None;
        }
        let text = format!(
            "{} is reachable from other hosts, and any caller could {}; set `tls.client_ca`, listen on 127.0.0.1, or set `unprotected: true`",
            self.listen, self.allowed_actions
        );
        Some(Problem::of(self.key, text))
    }
}
