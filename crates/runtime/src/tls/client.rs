//! Outgoing connections: HTTP clients for engines and caches, and TLS for connections to other
//! warmroute processes. They share the cryptography provider of the listeners, which must be
//! installed before the first client is built.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use reqwest::ClientBuilder;
use rustls::crypto::ring;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use warmroute_settings::{MAX_SECRET_FILE, Problem, describe_missing_file, read_regular_file};

/// Returns the builder of a direct HTTP client without any certificate authority.
///
/// It ignores proxy variables of the environment, because engines and caches are in the same
/// network. It can be built on hosts without system roots.
pub fn http_client_builder() -> ClientBuilder {
    http_client_with_system_roots().tls_certs_only([])
}

/// Returns the builder of a direct HTTP client that trusts the system roots. Building the client
/// fails on a host without system roots.
pub fn http_client_with_system_roots() -> ClientBuilder {
    // An embedding program may have installed another provider, which works as well.
    ring::default_provider().install_default().ok();
    reqwest::Client::builder().no_proxy()
}

/// Returns the builder of a client for a configured address. It trusts the CA file, or the system
/// roots if `authority` is `None`.
pub fn http_client_with_ca(authority: Option<&Path>) -> anyhow::Result<ClientBuilder> {
    let Some(file) = authority else {
        return Ok(http_client_with_system_roots());
    };
    let bytes = read_regular_file(file, MAX_SECRET_FILE)
        .with_context(|| format!("{} cannot be read", file.display()))?;
    let authorities = reqwest::Certificate::from_pem_bundle(&bytes)
        .with_context(|| format!("{} is not a PEM file with certificates", file.display()))?;
    Ok(http_client_with_system_roots().tls_certs_only(authorities))
}

/// TLS client files, under the names of the configuration keys.
#[derive(Clone, Copy, Debug)]
pub struct ClientFiles<'a> {
    /// `ca_file`: CA of the server; `None` means the system roots.
    pub ca: Option<&'a PathBuf>,
    /// `cert_file`: client certificate, if the server requires one.
    pub cert: Option<&'a PathBuf>,
    /// `key_file`: private key of the client certificate.
    pub key: Option<&'a PathBuf>,
}

impl ClientFiles<'_> {
    /// Reads the files.
    pub fn read(self) -> anyhow::Result<ClientTlsConfig> {
        let read = |file: &PathBuf| {
            read_regular_file(file, MAX_SECRET_FILE)
                .with_context(|| format!("cannot read {}", file.display()))
        };
        let tls = match self.ca {
            Some(file) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(file)?)),
            None => ClientTlsConfig::new().with_enabled_roots(),
        };
        Ok(match (self.cert, self.key) {
            (Some(cert), Some(key)) => tls.identity(Identity::from_pem(read(cert)?, read(key)?)),
            _ => tls,
        })
    }

    /// Returns semantic errors. `encrypted` states whether any address uses `https://`.
    pub fn problems(self, encrypted: bool) -> Vec<Problem> {
        let mut problems = Vec::new();
        let files = [
            ("ca_file", self.ca),
            ("cert_file", self.cert),
            ("key_file", self.key),
        ];
        for (key, file) in files
            .into_iter()
            .filter_map(|(key, file)| Some((key, file?)))
        {
            if !file.is_file() {
                problems.push(Problem::of(key, describe_missing_file(file)));
            } else if !encrypted {
                let text = "no address uses https://, so this file would not be used; remove it or \
                    write https://";
                problems.push(Problem::of(key, text));
            }
        }
        if self.cert.is_some() != self.key.is_some() {
            let (key, missing) = if self.cert.is_some() {
                ("cert_file", "key_file")
            } else {
                ("key_file", "cert_file")
            };
            problems.push(Problem::of(key, format!("requires `{missing}`")));
        }
        problems
    }
}
