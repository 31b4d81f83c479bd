//! Settings of the admin HTTP server.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_runtime::tls::TlsConfig;
use warmroute_settings::{ADDRESS_PATTERN, Problem, all_within};

use super::token::AdminToken;

/// The `listeners.admin:` section. The pages reveal the fleet and its routing, so an address beyond
/// loopback requires protection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdminConfig {
    /// Address of metrics, health and explanations.
    #[schemars(extend("pattern" = ADDRESS_PATTERN))]
    pub address: SocketAddr,
    /// TLS settings; `None` for plaintext.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsConfig>,
    /// File with the bearer token that every page except the probes requires; `None` for no token.
    pub token_file: Option<PathBuf>,
    /// Whether the pages are served without protection on an address that is not loopback.
    pub unprotected: bool,
}

impl Default for AdminConfig {
    fn default() -> Self {
        Self {
            address: (Ipv4Addr::LOCALHOST, 9005).into(),
            tls: None,
            token_file: None,
            unprotected: false,
        }
    }
}

impl AdminConfig {
    /// Returns the semantic errors of the configuration. Reads the configured files.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if let Some(tls) = &self.tls {
            problems.extend(all_within("tls", tls.problems()));
        }
        if let Some(file) = &self.token_file
            && let Err(error) = AdminToken::hash_file(file)
        {
            problems.push(Problem::of("token_file", error));
        }
        let protected =
            self.token_file.is_some() || self.tls.as_ref().is_some_and(TlsConfig::is_mutual);
        if self.unprotected && protected {
            let text = "the pages already require a token or client certificates; remove \
            `unprotected` or the protection";
            problems.push(Problem::of("unprotected", text));
        } else if !self.unprotected && !protected && !self.address.ip().to_canonical().is_loopback()
        {
            let text = format!(
                "{} is reachable from other machines, which could read the fleet; set \
                `token_file` or `tls.client_ca`, listen on 127.0.0.1, or set `unprotected: true`",
                self.address
            );
            problems.push(Problem::of("address", text));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_listen_address_requires_protection() {
        for (listen, unprotected, is_invalid) in [
            ("127.0.0.1:1", false, false),
            ("127.8.0.1:1", false, false),
            ("[::1]:1", false, false),
            ("[::ffff:127.0.0.1]:1", false, false),
            ("127.0.0.1:1", true, false),
            ("0.0.0.0:1", false, true),
            ("[::]:1", false, true),
            ("10.0.0.1:1", false, true),
            ("[::ffff:10.0.0.1]:1", false, true),
            ("0.0.0.0:1", true, false),
        ] {
            let config = AdminConfig {
                address: listen.parse().unwrap(),
                unprotected,
                ..AdminConfig::default()
            };
            assert_eq!(!config.problems().is_empty(), is_invalid, "{config:?}");
        }
    }

    #[test]
    fn token_file_protects_and_must_exist() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        let listen = "0.0.0.0:1".parse().unwrap();
        let mut config = AdminConfig {
            address: listen,
            token_file: Some(file.clone()),
            ..AdminConfig::default()
        };
        assert_eq!(config.problems().len(), 1, "there is no such file");
        std::fs::write(&file, "secret\n").unwrap();
        assert_eq!(config.problems(), []);
        config.unprotected = true;
        assert_eq!(
            config.problems().len(),
            1,
            "`unprotected` is rejected beside a token"
        );
    }
}
