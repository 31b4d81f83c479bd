//! TLS configuration of a listener.

use std::net::SocketAddr;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::certificate::{CertificateMaterial, CertificateSource};
use warmroute_settings::{Problem, describe_missing_file};

/// File names in a certificate directory, as in a Kubernetes TLS secret.
const CERT_DIR_FILES: (&str, &str) = ("tls.crt", "tls.key");

/// `tls:` of a listener. The certificate comes from `cert` and `key`, from `cert_dir`, or is
/// self-signed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TlsConfig {
    /// Certificate chain, PEM.
    pub cert: Option<PathBuf>,
    /// Private key, PEM.
    pub key: Option<PathBuf>,
    /// Directory with `tls.crt` and `tls.key`.
    pub cert_dir: Option<PathBuf>,
    /// Creates a certificate at startup, for clients that encrypt without verification.
    pub self_signed: bool,
    /// CA of client certificates, PEM. If set, clients must present a certificate.
    pub client_ca: Option<PathBuf>,
}

impl TlsConfig {
    /// Returns whether clients must present a certificate.
    pub fn is_mutual(&self) -> bool {
        self.client_ca.is_some()
    }

    /// Returns semantic errors. Reads the files.
    pub fn problems(&self) -> Vec<Problem> {
        let source = match self.source() {
            Ok(source) => source,
            Err(problem) => return vec![problem],
        };
        let missing = self.missing_files(&source);
        if !missing.is_empty() {
            return missing;
        }
        match CertificateMaterial::read(&source, self.client_ca.as_deref())
            .and_then(|material| material.check())
        {
            Ok(()) => Vec::new(),
            Err(error) => {
                let key = match &error.path {
                    Some(path) if self.client_ca.as_ref() == Some(path) => "client_ca",
                    Some(path) if self.key.as_ref() == Some(path) => "key",
                    _ if self.cert_dir.is_some() => "cert_dir",
                    _ => "cert",
                };
                vec![Problem::of(key, error.to_string())]
            }
        }
    }

    /// Returns a problem for each file that does not exist.
    fn missing_files(&self, source: &CertificateSource) -> Vec<Problem> {
        let mut files = Vec::new();
        if let CertificateSource::Files { cert, key } = source {
            let keys = if self.cert_dir.is_some() {
                ["cert_dir", "cert_dir"]
            } else {
                ["cert", "key"]
            };
            files.extend(keys.into_iter().zip([cert.as_path(), key]));
        }
        files.extend(
            self.client_ca
                .iter()
                .map(|file| ("client_ca", file.as_path())),
        );
        let missing = files.into_iter().filter(|(_, file)| !file.exists());
        missing
            .map(|(key, file)| Problem::of(key, describe_missing_file(file)))
            .collect()
    }

    /// Returns the source of the certificate.
    pub(super) fn source(&self) -> Result<CertificateSource, Problem> {
        match (&self.cert, &self.key, &self.cert_dir, self.self_signed) {
            (Some(cert), Some(key), None, false) => Ok(CertificateSource::Files {
                cert: cert.clone(),
                key: key.clone(),
            }),
            (None, None, Some(directory), false) => Ok(CertificateSource::Files {
                cert: directory.join(CERT_DIR_FILES.0),
                key: directory.join(CERT_DIR_FILES.1),
            }),
            (None, None, None, true) => Ok(CertificateSource::SelfSigned),
            (Some(_), None, None, false) => Err(Problem::of(
                "cert",
                "there is no key for it; name its file as `key`",
            )),
            (None, Some(_), None, false) => Err(Problem::of(
                "key",
                "there is no certificate for it; name its file as `cert`",
            )),
            (None, None, None, false) => {
                let text = "no certificate is configured; set `cert` and `key`, `cert_dir`, or \
                    `self_signed: true`";
                Err(Problem::at([], text))
            }
            _ => {
                let text = "the certificate is given in several ways; keep one of `cert` with \
                    `key`, `cert_dir` and `self_signed`";
                Err(Problem::at([], text))
            }
        }
    }
}

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
            "{} is reachable from other hosts, and any caller could {}; set `tls.client_ca`, \
            listen on 127.0.0.1, or set `unprotected: true`",
            self.listen, self.allowed_actions
        );
        Some(Problem::of(self.key, text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_one_certificate_source_is_accepted() {
        let cert = Some(PathBuf::from("c"));
        let key = Some(PathBuf::from("k"));
        let dir = Some(PathBuf::from("d"));
        let of =
            |cert: &Option<PathBuf>, key: &Option<PathBuf>, dir: &Option<PathBuf>, own| TlsConfig {
                cert: cert.clone(),
                key: key.clone(),
                cert_dir: dir.clone(),
                self_signed: own,
                client_ca: None,
            };
        for (config, complaint) in [
            (of(&cert, &key, &None, false), None),
            (of(&None, &None, &dir, false), None),
            (of(&None, &None, &None, true), None),
            (
                of(&None, &None, &None, false),
                Some("no certificate is configured;"),
            ),
            (of(&cert, &None, &None, false), Some("there is no key")),
            (
                of(&None, &key, &None, false),
                Some("there is no certificate for it"),
            ),
            (of(&cert, &key, &dir, false), Some("several ways")),
            (of(&cert, &key, &None, true), Some("several ways")),
            (of(&None, &key, &dir, false), Some("several ways")),
            (of(&None, &None, &dir, true), Some("several ways")),
        ] {
            let found = config.source().err().map(|problem| problem.text);
            match complaint {
                None => assert_eq!(found, None, "{config:?}"),
                Some(expected) => assert!(
                    found.as_deref().unwrap_or_default().contains(expected),
                    "{config:?}: {found:?}"
                ),
            }
        }
    }
}
