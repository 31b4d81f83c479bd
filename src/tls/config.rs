//! Settings of TLS, the same for every listener.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::material::{Material, Source};
use crate::settings::Problem;

/// Names of the files in a directory of certificates, as charts mount them.
const IN_FOLDER: (&str, &str) = ("tls.crt", "tls.key");

/// `tls:` of a listener. The certificate is given by `cert` and `key`, by `cert_dir`, or made at start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsConfig {
    /// The certificate and those between it and its root, PEM.
    pub cert: Option<PathBuf>,
    /// Its private key, PEM.
    pub key: Option<PathBuf>,
    /// A directory with both, as `tls.crt` and `tls.key`.
    pub cert_dir: Option<PathBuf>,
    /// Make a certificate at start, for clients that encrypt and do not check.
    pub self_signed: bool,
    /// Who signs clients' certificates, PEM; then clients need one.
    pub client_ca: Option<PathBuf>,
}

impl TlsConfig {
    /// Whether clients have to show who they are.
    pub fn is_mutual(&self) -> bool {
        self.client_ca.is_some()
    }

    /// Makes names of files absolute.
    pub fn resolve(&mut self, folder: &Path) {
        let files = [
            &mut self.cert,
            &mut self.key,
            &mut self.cert_dir,
            &mut self.client_ca,
        ];
        for file in files.into_iter().flatten() {
            *file = folder.join(&*file);
        }
    }

    /// Mistakes of meaning; reads the files.
    pub fn problems(&self) -> Vec<Problem> {
        let source = match self.source() {
            Ok(source) => source,
            Err(problem) => return vec![problem],
        };
        match Material::read(&source, self.client_ca.as_deref())
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

    /// Where the certificate comes from.
    pub(super) fn source(&self) -> Result<Source, Problem> {
        match (&self.cert, &self.key, &self.cert_dir, self.self_signed) {
            (Some(cert), Some(key), None, false) => Ok(Source::Files {
                cert: cert.clone(),
                key: key.clone(),
            }),
            (None, None, Some(folder), false) => Ok(Source::Files {
                cert: folder.join(IN_FOLDER.0),
                key: folder.join(IN_FOLDER.1),
            }),
            (None, None, None, true) => Ok(Source::SelfSigned),
            (Some(_), None, None, false) => Err(Problem::of(
                "cert",
                "there is no key for it; name its file as `key`",
            )),
            (None, Some(_), None, false) => Err(Problem::of(
                "key",
                "there is no certificate for it; name its file as `cert`",
            )),
            (None, None, None, false) => {
                let text = "there is no certificate; give `cert` and `key`, or `cert_dir`, or `self_signed: true`";
                Err(Problem::at([], text))
            }
            _ => {
                let text = "the certificate is given in several ways; keep one of `cert` with `key`, `cert_dir` and \
                            `self_signed`";
                Err(Problem::at([], text))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_one_certificate_is_wanted() {
        let (cert, key) = (Some(PathBuf::from("c")), Some(PathBuf::from("k")));
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
                Some("there is no certificate;"),
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
                Some(words) => assert!(
                    found.as_deref().unwrap_or_default().contains(words),
                    "{config:?}: {found:?}"
                ),
            }
        }
    }

    #[test]
    fn files_are_sought_from_the_folder_of_the_configuration() {
        let mut config = TlsConfig {
            cert: Some("tls/c.pem".into()),
            key: Some("/k.pem".into()),
            cert_dir: Some("dir".into()),
            self_signed: false,
            client_ca: Some("ca.pem".into()),
        };
        config.resolve(Path::new("/etc/w"));
        let files =
            [config.cert, config.key, config.cert_dir, config.client_ca].map(Option::unwrap);
        assert_eq!(
            files,
            ["/etc/w/tls/c.pem", "/k.pem", "/etc/w/dir", "/etc/w/ca.pem"].map(PathBuf::from)
        );
    }
}
