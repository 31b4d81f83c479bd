//! From files to what a TLS server needs. Everything is read before anything is judged, so that what is compared, what is
//! refused and what is used are the same bytes.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

/// How long a certificate of our own is good: longer than any process runs, and whoever checks would not take it anyway.
const OWN_VALIDITY: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Clocks of clients may be behind.
const BEFORE: Duration = Duration::from_secs(24 * 3600);

/// Why a certificate cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsError {
    /// The file at fault, if it is one.
    pub path: Option<PathBuf>,
    /// What is wrong and how to mend it.
    pub text: String,
}

impl TlsError {
    fn of(path: &Path, text: impl Into<String>) -> Self {
        Self {
            path: Some(path.to_owned()),
            text: text.into(),
        }
    }

    pub(super) fn plain(text: impl Into<String>) -> Self {
        Self {
            path: None,
            text: text.into(),
        }
    }
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            Some(path) => write!(f, "{}: {}", path.display(), self.text),
            None => f.write_str(&self.text),
        }
    }
}

impl std::error::Error for TlsError {}

/// Where a certificate comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// Two PEM files.
    Files { cert: PathBuf, key: PathBuf },
    /// Made by us.
    SelfSigned,
}

/// A certificate with its key, as PEM, and where each was read.
struct Pair {
    cert: (PathBuf, Vec<u8>),
    key: (PathBuf, Vec<u8>),
}

/// What was read.
pub(super) struct Material {
    pair: Option<Pair>,
    client_ca: Option<(PathBuf, Vec<u8>)>,
}

/// A certificate with its key, ready for use.
#[derive(Clone)]
pub(super) struct Identity {
    chain: Vec<CertificateDer<'static>>,
    key: Arc<PrivateKeyDer<'static>>,
    /// When it ends, in seconds of unix time.
    pub(super) expires: i64,
}

impl Material {
    /// Reads what there is to read.
    pub(super) fn read(source: &Source, client_ca: Option<&Path>) -> Result<Self, TlsError> {
        let pair = match source {
            Source::SelfSigned => None,
            Source::Files { cert, key } => Some(Pair {
                cert: read(cert)?,
                key: read(key)?,
            }),
        };
        Ok(Self {
            pair,
            client_ca: client_ca.map(read).transpose()?,
        })
    }

    /// Tells contents apart, without keeping a private key longer than it is needed.
    pub(super) fn fingerprint(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        let pair = self.pair.iter().flat_map(|pair| [&pair.cert, &pair.key]);
        for (_, bytes) in pair.chain(&self.client_ca) {
            hasher.update(&bytes.len().to_le_bytes()).update(bytes);
        }
        hasher.finalize()
    }

    /// Whether it could be used; where the certificate is to be made by us, only the rest is looked at.
    pub(super) fn check(&self) -> Result<(), TlsError> {
        let identity = if self.pair.is_some() {
            self.identity()?
        } else {
            None
        };
        let identity = identity.map_or_else(self_signed, Ok)?;
        self.server(&identity, &[]).map(drop)
    }

    /// The certificate that was read, if one was to be.
    pub(super) fn identity(&self) -> Result<Option<Identity>, TlsError> {
        let Some(Pair {
            cert: (cert, cert_pem),
            key: (key, key_pem),
        }) = &self.pair
        else {
            return Ok(None);
        };
        let chain: Vec<_> = CertificateDer::pem_slice_iter(cert_pem)
            .collect::<Result<_, _>>()
            .map_err(|error| {
                TlsError::of(
                    cert,
                    format!("this is not PEM ({error}); give a certificate as PEM"),
                )
            })?;
        let Some(first) = chain.first() else {
            return Err(TlsError::of(
                cert,
                "there is no certificate in it; give one as PEM, its chain after it",
            ));
        };
        let expires = expiry(first).map_err(|text| TlsError::of(cert, text))?;
        let private = PrivateKeyDer::from_pem_slice(key_pem).map_err(|error| match error {
            pem::Error::NoItemsFound => TlsError::of(
                key,
                "there is no private key in it; give one as PEM, without a password",
            ),
            error => TlsError::of(
                key,
                format!("this is not PEM ({error}); give a private key as PEM"),
            ),
        })?;
        Ok(Some(Identity {
            chain,
            key: Arc::new(private),
            expires,
        }))
    }

    /// A server that shows `identity` and speaks one of `protocols`.
    pub(super) fn server(
        &self,
        identity: &Identity,
        protocols: &[&[u8]],
    ) -> Result<ServerConfig, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
            .map_err(|error| TlsError::plain(error.to_string()))?;
        let builder = match &self.client_ca {
            None => builder.with_no_client_auth(),
            Some((path, pem)) => {
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(roots(path, pem)?.into(), provider)
                        .build();
                builder.with_client_cert_verifier(
                    verifier.map_err(|error| TlsError::of(path, error.to_string()))?,
                )
            }
        };
        let mut server = builder
            .with_single_cert(identity.chain.clone(), identity.key.clone_key())
            .map_err(|error| match &self.pair {
                Some(pair) => {
                    let text = format!(
                        "it does not go with {} ({error}); give both of one pair",
                        pair.key.0.display()
                    );
                    TlsError::of(&pair.cert.0, text)
                }
                None => TlsError::plain(error.to_string()),
            })?;
        server.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        Ok(server)
    }
}

fn read(path: &Path) -> Result<(PathBuf, Vec<u8>), TlsError> {
    let bytes = std::fs::read(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => TlsError::of(path, "there is no such file"),
        _ => TlsError::of(path, format!("it cannot be read: {error}")),
    })?;
    Ok((path.to_owned(), bytes))
}

/// Who may sign clients' certificates.
fn roots(path: &Path, pem: &[u8]) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for found in CertificateDer::pem_slice_iter(pem) {
        let found =
            found.map_err(|error| TlsError::of(path, format!("this is not PEM ({error})")))?;
        roots.add(found).map_err(|error| {
            TlsError::of(path, format!("a certificate in it is unusable: {error}"))
        })?;
    }
    if roots.is_empty() {
        return Err(TlsError::of(
            path,
            "there is no certificate in it; give those of the authorities as PEM",
        ));
    }
    Ok(roots)
}

/// When a certificate ends, in seconds of unix time.
fn expiry(certificate: &CertificateDer<'_>) -> Result<i64, String> {
    x509_parser::parse_x509_certificate(certificate)
        .map(|(_, parsed)| parsed.validity().not_after.timestamp())
        .map_err(|error| format!("this is not a certificate ({error})"))
}

/// A certificate of our own, for the names under which we are reached from near.
pub(super) fn self_signed() -> Result<Identity, TlsError> {
    let failed = |error: rcgen::Error| {
        TlsError::plain(format!("a certificate of our own cannot be made: {error}"))
    };
    let names = ["localhost", "127.0.0.1", "::1"]
        .into_iter()
        .map(str::to_owned)
        .chain(host_name());
    let mut params = rcgen::CertificateParams::new(names.collect::<Vec<_>>()).map_err(failed)?;
    let now = SystemTime::now();
    params.not_before = (now - BEFORE).into();
    params.not_after = (now + OWN_VALIDITY).into();
    params
        .distinguished_name
        .push(rcgen::DnType::CommonName, "warmroute");
    params
        .extended_key_usages
        .push(rcgen::ExtendedKeyUsagePurpose::ServerAuth);
    let key = rcgen::KeyPair::generate().map_err(failed)?;
    let certificate = params.self_signed(&key).map_err(failed)?;
    let expires = expiry(certificate.der()).map_err(TlsError::plain)?;
    let private = PrivateKeyDer::try_from(key.serialize_der()).map_err(TlsError::plain)?;
    Ok(Identity {
        chain: vec![certificate.der().clone()],
        key: Arc::new(private),
        expires,
    })
}

/// What the kernel calls this machine; in a container, its pod. None where that is no name for a certificate.
pub fn host_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    let name = name.trim();
    let sound = |letter: char| letter.is_ascii_alphanumeric() || letter == '-' || letter == '.';
    (!name.is_empty() && name.chars().all(sound)).then(|| name.to_owned())
}

/// Seconds of unix time.
pub(super) fn now() -> i64 {
    let since = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_certificate_is_for_names_from_near_and_lasts() {
        let identity = self_signed().unwrap();
        let (_, parsed) = x509_parser::parse_x509_certificate(&identity.chain[0]).unwrap();
        let names = format!(
            "{:?}",
            parsed.subject_alternative_name().unwrap().unwrap().value
        );
        for name in ["localhost", "[127, 0, 0, 1]", "0, 0, 1]"] {
            assert!(names.contains(name), "{names}");
        }
        if let Some(host) = host_name() {
            assert!(names.contains(&host), "{names}");
        }
        assert!(parsed.validity().is_valid());
        let years = (identity.expires - now()) / (365 * 24 * 3600);
        assert!((9..=10).contains(&years), "{years}");
    }

    /// A certificate and a key as PEM.
    fn pair() -> (String, String) {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
    }

    #[test]
    fn what_cannot_be_used_is_said_with_the_file_and_the_mend() {
        let ((cert, key), (other_cert, other_key)) = (pair(), pair());
        let der = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        let cut = cert[..cert.len() / 2].to_owned();
        for (cert_text, key_text, ca_text, at, words) in [
            (
                cert.as_str(),
                key.as_str(),
                Some(other_cert.as_str()),
                "",
                "",
            ),
            (&format!("{cert}{other_cert}"), &key, None, "", ""),
            // Files with both, as some tools write them.
            (
                &format!("{key}{cert}"),
                &format!("{cert}{key}"),
                None,
                "",
                "",
            ),
            ("", &key, None, "cert", "no certificate in it"),
            (&key, &key, None, "cert", "no certificate in it"),
            (&cut, &key, None, "cert", "PEM"),
            (der, &key, None, "cert", "not a certificate"),
            (&cert, "", None, "key", "no private key in it"),
            (&cert, &cert, None, "key", "no private key in it"),
            (&cert, &other_key, None, "cert", "does not go with"),
            (&cert, &key, Some(""), "ca", "no certificate in it"),
            (&cert, &key, Some(der), "ca", "unusable"),
            (&cert, &key, Some("none"), "ca", "no certificate in it"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let [cert, key, ca] = ["cert", "key", "ca"].map(|name| dir.path().join(name));
            std::fs::write(&cert, cert_text).unwrap();
            std::fs::write(&key, key_text).unwrap();
            std::fs::write(&ca, ca_text.unwrap_or_default()).unwrap();
            let source = Source::Files {
                cert: cert.clone(),
                key: key.clone(),
            };
            let checked = Material::read(&source, ca_text.map(|_| ca.as_path()))
                .and_then(|read| read.check());
            match (at, checked) {
                ("", checked) => checked.unwrap(),
                (at, Ok(())) => panic!("a broken {at} is taken, where {words:?} is expected"),
                (at, Err(error)) => {
                    assert_eq!(
                        error.path.as_ref().and_then(|path| path.file_name()),
                        Some(at.as_ref()),
                        "{error}"
                    );
                    assert!(error.text.contains(words), "{error}");
                }
            }
        }
    }

    #[test]
    fn contents_that_differ_have_other_fingerprints() {
        let of = |cert: &str, key: &str, ca: Option<&str>| {
            let named = |text: &str| (PathBuf::new(), text.as_bytes().to_vec());
            let pair = Some(Pair {
                cert: named(cert),
                key: named(key),
            });
            Material {
                pair,
                client_ca: ca.map(named),
            }
            .fingerprint()
        };
        let all = [
            of("ab", "c", None),
            of("a", "bc", None),
            of("ab", "c", Some("")),
            of("ab", "", Some("c")),
        ];
        for (at, one) in all.iter().enumerate() {
            assert_eq!(all.iter().position(|other| other == one), Some(at));
        }
        assert_eq!(of("ab", "c", None), all[0]);
    }
}
