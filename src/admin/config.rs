//! Settings of the admin HTTP server.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::token::Token;
use crate::settings::Problem;
use crate::tls::TlsConfig;

/// `admin:`. Beyond loopback it asks for protection: whoever reads it learns the fleet, and with what it answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdminConfig {
    /// Where metrics, health and the explanations of decisions are served.
    pub listen: SocketAddr,
    /// TLS; none: plaintext.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsConfig>,
    /// A file with the token that everything but the probes asks for; none: nothing is asked.
    pub token_file: Option<PathBuf>,
    /// Serve everybody who reaches an address that is not loopback.
    pub unprotected: bool,
}

impl Default for AdminConfig {
    fn default() -> Self {
        Self {
            listen: (Ipv4Addr::LOCALHOST, 9901).into(),
            tls: None,
            token_file: None,
            unprotected: false,
        }
    }
}

impl AdminConfig {
    /// Makes names of files absolute.
    pub fn resolve(&mut self, folder: &Path) {
        if let Some(tls) = &mut self.tls {
            tls.resolve(folder);
        }
        if let Some(file) = &mut self.token_file {
            *file = folder.join(&*file);
        }
    }

    /// Mistakes of meaning; reads the files.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if let Some(tls) = &self.tls {
            problems.extend(
                tls.problems()
                    .into_iter()
                    .map(|problem| problem.within("tls")),
            );
        }
        if let Some(file) = &self.token_file
            && let Err(error) = Token::read(file)
        {
            problems.push(Problem::of("token_file", error));
        }
        let protected =
            self.token_file.is_some() || self.tls.as_ref().is_some_and(TlsConfig::is_mutual);
        if self.unprotected && protected {
            let text = "the pages are protected by a token or by client certificates; keep either that or this";
            problems.push(Problem::of("unprotected", text));
        } else if !self.unprotected && !protected && !self.listen.ip().to_canonical().is_loopback()
        {
            let text = format!(
                "{} can be reached by others, who would see the fleet; give a `token_file` or `tls.client_ca`, listen on \
                 127.0.0.1, or say `unprotected: true`",
                self.listen
            );
            problems.push(Problem::of("listen", text));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_loopback_protection_is_asked_for() {
        for (listen, unprotected, mistaken) in [
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
                listen: listen.parse().unwrap(),
                unprotected,
                ..AdminConfig::default()
            };
            assert_eq!(!config.problems().is_empty(), mistaken, "{config:?}");
        }
    }

    #[test]
    fn a_token_protects_and_one_that_is_not_there_is_a_mistake() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        let listen = "0.0.0.0:1".parse().unwrap();
        let mut config = AdminConfig {
            listen,
            token_file: Some(file.clone()),
            ..AdminConfig::default()
        };
        assert_eq!(config.problems().len(), 1, "there is no such file");
        std::fs::write(&file, "secret\n").unwrap();
        assert_eq!(config.problems(), []);
        config.unprotected = true;
        assert_eq!(config.problems().len(), 1, "both");
    }
}
