use std::fs;
use std::path::Path;

use super::*;

/// Writes a new certificate with its key.
fn issue(cert: &Path, key: &Path) {
    let pair = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    fs::write(cert, params.self_signed(&pair).unwrap().pem()).unwrap();
    fs::write(key, pair.serialize_pem()).unwrap();
}

struct Harness {
    dir: tempfile::TempDir,
    acceptor: Arc<ListenerCertificate>,
    metrics: Arc<Metrics>,
    last_config: Arc<ServerConfig>,
}

impl Harness {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let cert = dir.path().join("tls.crt");
        let key = dir.path().join("tls.key");
        issue(&cert, &key);
        let metrics = Arc::new(Metrics::new());
        let config = TlsConfig {
            cert_dir: Some(dir.path().to_owned()),
            ..TlsConfig::default()
        };
        let acceptor =
            ListenerCertificate::new("test", &config, ListenerProtocol::Grpc, metrics.clone())
                .unwrap();
        let last_config = acceptor.current();
        Self {
            dir,
            acceptor,
            metrics,
            last_config,
        }
    }

    fn files(&self) -> (PathBuf, PathBuf) {
        (
            self.dir.path().join("tls.crt"),
            self.dir.path().join("tls.key"),
        )
    }

    /// Reloads the files. Returns whether the certificate changed, and the numbers of applied and
    /// invalid reloads so far.
    fn reload(&mut self) -> (bool, u64, u64) {
        self.acceptor.reload();
        let before = std::mem::replace(&mut self.last_config, self.acceptor.current());
        let count = |outcome| {
            let labels = ListenerOutcomeLabels {
                listener: "test",
                outcome,
            };
            self.metrics
                .listeners
                .tls_reloads
                .get_or_create(&labels)
                .get()
        };
        (
            !Arc::ptr_eq(&before, &self.last_config),
            count("applied"),
            count("invalid"),
        )
    }
}

#[test]
fn only_changes_are_applied_and_logged() {
    let mut harness = Harness::start();
    let (cert, key) = harness.files();
    assert_eq!(harness.reload(), (false, 0, 0), "no file has changed");
    issue(&cert, &key);
    assert_eq!(harness.reload(), (true, 1, 0));
    let good = (fs::read(&cert).unwrap(), fs::read(&key).unwrap());
    // The current certificate stays in use while files do not match, are broken, or are missing.
    issue(&cert, &harness.dir.path().join("other.key"));
    assert_eq!(harness.reload(), (false, 1, 1));
    assert_eq!(
        harness.reload(),
        (false, 1, 1),
        "the error was already logged"
    );
    fs::write(&cert, "broken").unwrap();
    assert_eq!(harness.reload(), (false, 1, 2));
    fs::remove_file(&cert).unwrap();
    assert_eq!(harness.reload(), (false, 1, 3));
    assert_eq!(harness.reload(), (false, 1, 3));
    // Restoring the files of the current certificate is no change and clears the error.
    fs::write(&cert, &good.0).unwrap();
    assert_eq!(harness.reload(), (false, 1, 3));
    fs::write(&cert, "broken").unwrap();
    assert_eq!(harness.reload(), (false, 1, 4));
    issue(&cert, &key);
    assert_eq!(harness.reload(), (true, 2, 4));
}

#[test]
fn certificate_expiry_is_published() {
    let harness = Harness::start();
    let (cert, key) = harness.files();
    let label = ListenerLabel { listener: "test" };
    let expiry = || {
        harness
            .metrics
            .listeners
            .tls_certificate_expiry_timestamp_seconds
            .get_or_create(&label)
            .get()
    };
    let pair = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    // Times after 2049 have another encoding.
    for (year, seconds) in [
        (2030, 1_893_456_000),
        (2060, 2_840_140_800),
        (2001, 978_307_200),
    ] {
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        fs::write(&cert, params.self_signed(&pair).unwrap().pem()).unwrap();
        fs::write(&key, pair.serialize_pem()).unwrap();
        harness.acceptor.reload();
        assert_eq!(
            expiry(),
            seconds,
            "{year}: expired certificates are served too, because some clients do not verify"
        );
    }
}

#[test]
fn self_signed_certificate_survives_client_ca_change() {
    let dir = tempfile::tempdir().unwrap();
    let ca = dir.path().join("ca.pem");
    issue(&ca, &dir.path().join("ca.key"));
    let config = TlsConfig {
        self_signed: true,
        client_ca: Some(ca.clone()),
        ..TlsConfig::default()
    };
    let acceptor = ListenerCertificate::new(
        "test",
        &config,
        ListenerProtocol::Grpc,
        Arc::new(Metrics::new()),
    )
    .unwrap();
    assert_eq!(acceptor.files(), std::slice::from_ref(&ca));
    let before = acceptor.current();
    let own = acceptor.self_signed.as_ref().unwrap().expires;
    issue(&ca, &dir.path().join("ca.key"));
    acceptor.reload();
    assert!(!Arc::ptr_eq(&before, &acceptor.current()));
    assert_eq!(acceptor.self_signed.as_ref().unwrap().expires, own);
}
