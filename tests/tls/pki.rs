//! Authorities and the certificates they sign.

use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, SerialNumber};

/// A certificate with its key, as PEM.
pub(crate) struct Pair {
    pub(crate) cert: String,
    pub(crate) key: String,
}

impl Pair {
    /// Writes both into a folder under the names that charts use.
    pub(crate) fn write(&self, folder: &Path) {
        std::fs::create_dir_all(folder).unwrap();
        // The key first: between the two, they do not go together either way.
        std::fs::write(folder.join("tls.key"), &self.key).unwrap();
        std::fs::write(folder.join("tls.crt"), &self.cert).unwrap();
    }
}

/// Somebody who signs.
pub(crate) struct Authority {
    pub(crate) cert: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
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

    /// A certificate for the loopback, good for servers and clients.
    pub(crate) fn sign(&self, serial: u64) -> Pair {
        let mut params =
            CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
        params.serial_number = Some(SerialNumber::from(serial));
        params
            .distinguished_name
            .push(DnType::CommonName, "loopback");
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap().pem();
        Pair {
            cert,
            key: key.serialize_pem(),
        }
    }
}
