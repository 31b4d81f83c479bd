//! Whether a listener may be reached by other hosts.

use std::net::SocketAddr;

use super::TlsConfig;
use crate::settings::Problem;

/// A listener that only client certificates protect.
pub struct ListenerExposure<'a> {
    /// The key of the address in its section.
    pub key: &'static str,
    /// The address.
    pub listen: SocketAddr,
    /// TLS of the listener.
    pub tls: Option<&'a TlsConfig>,
    /// Whether the operator accepts every caller.
    pub unprotected: bool,
    /// The actions that any caller could take.
    pub risk: &'static str,
}

impl ListenerExposure<'_> {
    /// The mistake of a listener beyond loopback without protection, or of one with protection that is declared unprotected.
    pub fn problem(&self) -> Option<Problem> {
        let is_mutual = self.tls.is_some_and(TlsConfig::is_mutual);
        if self.unprotected && is_mutual {
            let text = "callers need a certificate by `tls.client_ca`; keep either that or this";
            return Some(Problem::of("unprotected", text));
        }
        if self.unprotected || is_mutual || self.listen.ip().to_canonical().is_loopback() {
            return None;
        }
        let text = format!(
            "{} can be reached by others, who could {}; give `tls.client_ca`, listen on 127.0.0.1, or say `unprotected: true`",
            self.listen, self.risk
        );
        Some(Problem::of(self.key, text))
    }
}
