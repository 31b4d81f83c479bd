//! Certificate authorities and signed certificates.

use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, SerialNumber};

/// A certificate with its key, as PEM.
pub(crate) struct CertificatePair {
    pub(crate) cert: String,
    pub(crate) key: String,
}

impl CertificatePair {
    /// Writes both files into a directory, under the names of a Kubernetes TLS secret.
    pub(crate) fn write(&self, directory: &Path) {
        std::fs::create_dir_all(directory).unwrap();
        // Between the two writes, key and certificate do not match in either order.
        std::fs::write(directory.join("tls.key"), &self.key).unwrap();
        std::fs::write(directory.join("tls.crt"), &self.cert).unwrap();
    }
}

/// A certificate authority.
pub(crate) struct TestAuthority {
    pub(crate) cert: String,
    issuer: Issuer<'static, KeyPair>,
}

impl TestAuthority {
    pub(crate) fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let cert = params.self_signed(&key).unwrap().pem();
        Self {
            cert,
            issuer: Issuer::new(params, key),
        }
    }

    /// Signs a certificate for the loopback interface, valid for servers and clients.
    pub(crate) fn sign(&self, serial: u64) -> CertificatePair {
        let mut params =
            CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
        params.serial_number = Some(SerialNumber::from(serial));
        params
            .distinguished_name
            .push(DnType::CommonName, "loopback");
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap().pem();
        CertificatePair {
            cert,
            key: key.serialize_pem(),
        }
    }
}
