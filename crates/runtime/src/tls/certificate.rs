//! Certificates and keys read from files, and the TLS server configuration built from them.
//!
//! All files are read before any of them is checked. Comparison, check and configuration therefore
//! use the same bytes.

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
use warmroute_settings::{MAX_SECRET_FILE, read_regular_file};

/// Validity of a self-signed certificate. It exceeds the lifetime of any process.
const SELF_SIGNED_VALIDITY: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Tolerance for client clocks that are slow.
const CLOCK_SKEW: Duration = Duration::from_secs(24 * 3600);

/// Error of an unusable certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsError {
    /// File that caused the error, if any.
    pub path: Option<PathBuf>,
    /// Problem and fix.
    pub text: String,
}

impl TlsError {
    fn for_file(path: &Path, text: impl Into<String>) -> Self {
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

/// Origin of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CertificateSource {
    /// Two PEM files.
    Files { cert: PathBuf, key: PathBuf },
    /// Created at startup.
    SelfSigned,
}

/// Certificate and key as PEM, with their paths.
struct CertificatePair {
    cert: (PathBuf, Vec<u8>),
    key: (PathBuf, Vec<u8>),
}

/// Contents of the files.
pub(super) struct CertificateMaterial {
    pair: Option<CertificatePair>,
    client_ca: Option<(PathBuf, Vec<u8>)>,
}

/// Parsed certificate chain and private key.
#[derive(Clone)]
pub(super) struct ServerIdentity {
    chain: Vec<CertificateDer<'static>>,
    key: Arc<PrivateKeyDer<'static>>,
    /// Expiry time in seconds of Unix time.
    pub(super) expires: i64,
}

impl CertificateMaterial {
    /// Reads the configured files.
    pub(super) fn read(
        source: &CertificateSource,
        client_ca: Option<&Path>,
    ) -> Result<Self, TlsError> {
        let pair = match source {
            CertificateSource::SelfSigned => None,
            CertificateSource::Files { cert, key } => Some(CertificatePair {
                cert: read_file(cert)?,
                key: read_file(key)?,
            }),
        };
        Ok(Self {
            pair,
            client_ca: client_ca.map(read_file).transpose()?,
        })
    }

    /// Returns a hash of the contents. A change is detected without storing the private key.
    pub(super) fn fingerprint(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        let pair = self.pair.iter().flat_map(|pair| [&pair.cert, &pair.key]);
        for (_, bytes) in pair.chain(&self.client_ca) {
            hasher.update(&bytes.len().to_le_bytes()).update(bytes);
        }
        hasher.finalize()
    }

    /// Checks that the contents are usable. The check does not create a self-signed certificate.
    pub(super) fn check(&self) -> Result<(), TlsError> {
        let identity = self.identity()?.map_or_else(self_signed, Ok)?;
        self.server_config(&identity, &[]).map(drop)
    }

    /// Returns the configured certificate, or `None` if it is self-signed.
    pub(super) fn identity(&self) -> Result<Option<ServerIdentity>, TlsError> {
        let Some(CertificatePair {
            cert: (cert, cert_pem),
            key: (key, key_pem),
        }) = &self.pair
        else {
            return Ok(None);
        };
        let chain: Vec<_> = CertificateDer::pem_slice_iter(cert_pem)
            .collect::<Result<_, _>>()
            .map_err(|error| {
                TlsError::for_file(
                    cert,
                    format!("not a PEM file ({error}); expected a certificate"),
                )
            })?;
        let Some(first) = chain.first() else {
            return Err(TlsError::for_file(
                cert,
                "contains no certificate; expected a PEM certificate followed by its chain",
            ));
        };
        let expires = expiry_of(first).map_err(|text| TlsError::for_file(cert, text))?;
        let private = PrivateKeyDer::from_pem_slice(key_pem).map_err(|error| match error {
            pem::Error::NoItemsFound => TlsError::for_file(
                key,
                "contains no private key; expected a PEM key without a password",
            ),
            error => TlsError::for_file(
                key,
                format!("not a PEM file ({error}); expected a private key"),
            ),
        })?;
        Ok(Some(ServerIdentity {
            chain,
            key: Arc::new(private),
            expires,
        }))
    }

    /// Builds a server configuration with `identity` and ALPN `protocols`.
    pub(super) fn server_config(
        &self,
        identity: &ServerIdentity,
        protocols: &[&[u8]],
    ) -> Result<ServerConfig, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
            .map_err(|error| TlsError::plain(error.to_string()))?;
        let builder = match &self.client_ca {
            None => builder.with_no_client_auth(),
            Some((path, pem)) => {
                let verifier = WebPkiClientVerifier::builder_with_provider(
                    parse_roots(path, pem)?.into(),
                    provider,
                )
                .build();
                builder.with_client_cert_verifier(
                    verifier.map_err(|error| TlsError::for_file(path, error.to_string()))?,
                )
            }
        };
        let mut server = builder
            .with_single_cert(identity.chain.clone(), identity.key.clone_key())
            .map_err(|error| match &self.pair {
                Some(pair) => {
                    let text = format!(
                        "does not match {} ({error}); use a certificate and key of the same pair",
                        pair.key.0.display()
                    );
                    TlsError::for_file(&pair.cert.0, text)
                }
                None => TlsError::plain(error.to_string()),
            })?;
        server.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        Ok(server)
    }
}

fn read_file(path: &Path) -> Result<(PathBuf, Vec<u8>), TlsError> {
    let bytes = read_regular_file(path, MAX_SECRET_FILE).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => TlsError::for_file(path, "no such file"),
        _ => TlsError::for_file(path, format!("cannot be read: {error}")),
    })?;
    Ok((path.to_owned(), bytes))
}

/// Parses the CA certificates that sign client certificates.
fn parse_roots(path: &Path, pem: &[u8]) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for found in CertificateDer::pem_slice_iter(pem) {
        let found = found
            .map_err(|error| TlsError::for_file(path, format!("this is not PEM ({error})")))?;
        roots.add(found).map_err(|error| {
            TlsError::for_file(path, format!("a certificate in it is unusable: {error}"))
        })?;
    }
    if roots.is_empty() {
        return Err(TlsError::for_file(
            path,
            "contains no certificate; expected the PEM certificates of the authorities",
        ));
    }
    Ok(roots)
}

/// Returns the expiry time in seconds of Unix time.
fn expiry_of(certificate: &CertificateDer<'_>) -> Result<i64, String> {
    x509_parser::parse_x509_certificate(certificate)
        .map(|(_, parsed)| parsed.validity().not_after.timestamp())
        .map_err(|error| format!("this is not a certificate ({error})"))
}

/// Creates a self-signed certificate for `localhost` and the host name.
pub(super) fn self_signed() -> Result<ServerIdentity, TlsError> {
    let failed = |error: rcgen::Error| {
        TlsError::plain(format!(
            "self-signed certificate cannot be created: {error}"
        ))
    };
    let names = ["localhost", "127.0.0.1", "::1"]
        .into_iter()
        .map(str::to_owned)
        .chain(host_name());
    let mut params = rcgen::CertificateParams::new(names.collect::<Vec<_>>()).map_err(failed)?;
    let now = SystemTime::now();
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + SELF_SIGNED_VALIDITY).into();
    params
        .distinguished_name
        .push(rcgen::DnType::CommonName, "warmroute");
    params
        .extended_key_usages
        .push(rcgen::ExtendedKeyUsagePurpose::ServerAuth);
    let key = rcgen::KeyPair::generate().map_err(failed)?;
    let certificate = params.self_signed(&key).map_err(failed)?;
    let expires = expiry_of(certificate.der()).map_err(TlsError::plain)?;
    let private = PrivateKeyDer::try_from(key.serialize_der()).map_err(TlsError::plain)?;
    Ok(ServerIdentity {
        chain: vec![certificate.der().clone()],
        key: Arc::new(private),
        expires,
    })
}

/// Returns the host name, or `None` if it is not a valid certificate name. In a container, it is
/// the pod name.
pub fn host_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    let name = name.trim();
    let sound = |letter: char| letter.is_ascii_alphanumeric() || letter == '-' || letter == '.';
    (!name.is_empty() && name.chars().all(sound)).then(|| name.to_owned())
}

/// Returns the current Unix time in seconds.
pub(super) fn unix_now() -> i64 {
    let since = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn self_signed_certificate_has_local_names_and_lasts() {
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
        let years = (identity.expires - unix_now()) / (365 * 24 * 3600);
        assert!((9..=10).contains(&years), "{years}");
    }

    /// Returns a certificate and a key as PEM.
    fn pair() -> (String, String) {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
    }

    #[test]
    fn unusable_files_are_reported_with_path_and_fix() {
        let ((cert, key), (other_cert, other_key)) = (pair(), pair());
        let der = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        let cut = cert[..cert.len() / 2].to_owned();
        for (cert_text, key_text, ca_text, at, expected) in [
            (
                cert.as_str(),
                key.as_str(),
                Some(other_cert.as_str()),
                "",
                "",
            ),
            (&format!("{cert}{other_cert}"), &key, None, "", ""),
            // Some tools write certificate and key into one file.
            (
                &format!("{key}{cert}"),
                &format!("{cert}{key}"),
                None,
                "",
                "",
            ),
            ("", &key, None, "cert", "contains no certificate"),
            (&key, &key, None, "cert", "contains no certificate"),
            (&cut, &key, None, "cert", "PEM"),
            (der, &key, None, "cert", "not a certificate"),
            (&cert, "", None, "key", "contains no private key"),
            (&cert, &cert, None, "key", "contains no private key"),
            (&cert, &other_key, None, "cert", "does not match"),
            (&cert, &key, Some(""), "ca", "contains no certificate"),
            (&cert, &key, Some(der), "ca", "unusable"),
            (&cert, &key, Some("none"), "ca", "contains no certificate"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let [cert, key, ca] = ["cert", "key", "ca"].map(|name| dir.path().join(name));
            std::fs::write(&cert, cert_text).unwrap();
            std::fs::write(&key, key_text).unwrap();
            std::fs::write(&ca, ca_text.unwrap_or_default()).unwrap();
            let source = CertificateSource::Files {
                cert: cert.clone(),
                key: key.clone(),
            };
            let checked = CertificateMaterial::read(&source, ca_text.map(|_| ca.as_path()))
                .and_then(|read| read.check());
            match (at, checked) {
                ("", checked) => checked.unwrap(),
                (at, Ok(())) => panic!("a broken {at} was accepted, expected {expected:?}"),
                (at, Err(error)) => {
                    assert_eq!(
                        error.path.as_ref().and_then(|path| path.file_name()),
                        Some(at.as_ref()),
                        "{error}"
                    );
                    assert!(error.text.contains(expected), "{error}");
                }
            }
        }
    }

    #[test]
    fn different_contents_have_different_fingerprints() {
        let of = |cert: &str, key: &str, ca: Option<&str>| {
            let named = |text: &str| (PathBuf::new(), text.as_bytes().to_vec());
            let pair = Some(CertificatePair {
                cert: named(cert),
                key: named(key),
            });
            CertificateMaterial {
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
