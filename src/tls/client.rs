//! The way out: HTTP clients for engines and caches, and TLS to others of us. They share one provider of cryptography with our own sockets, which has
//! to be named before the first client is built.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use reqwest::ClientBuilder;
use rustls::crypto::ring;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::settings::Problem;

/// A client to be built, which goes straight to whom it asks: what it asks are neighbours, and proxies of the environment
/// are for the world. It believes no authority, so that it can be built where the system knows of none.
pub fn client() -> ClientBuilder {
    believing_the_system().tls_certs_only([])
}

/// The same, which believes the authorities that the system believes; where there are none, it cannot be built.
pub fn believing_the_system() -> ClientBuilder {
    // An embedder may have named another one already, which is as good.
    ring::default_provider().install_default().ok();
    reqwest::Client::builder().no_proxy()
}

/// A client for an address that an operator gives. It trusts the CAs of the file, or those of the system without a file.
pub fn trusting(authority: Option<&Path>) -> anyhow::Result<ClientBuilder> {
    let Some(file) = authority else {
        return Ok(believing_the_system());
    };
    let bytes =
        std::fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?;
    let authorities = reqwest::Certificate::from_pem_bundle(&bytes)
        .with_context(|| format!("{} is not a PEM file with certificates", file.display()))?;
    Ok(believing_the_system().tls_certs_only(authorities))
}

/// Files with which somebody is reached over TLS, as sections of the configuration name them.
#[derive(Clone, Copy, Debug)]
pub struct ClientFiles<'a> {
    /// `ca_file`: who may vouch for them; whom this system trusts where left out.
    pub ca: Option<&'a PathBuf>,
    /// `cert_file`: our certificate, where they want one.
    pub cert: Option<&'a PathBuf>,
    /// `key_file`: its key.
    pub key: Option<&'a PathBuf>,
}

impl ClientFiles<'_> {
    /// Reads them.
    pub fn read(self) -> anyhow::Result<ClientTlsConfig> {
        let read = |file: &PathBuf| {
            std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))
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

    /// Mistakes of meaning, where somebody is reached over TLS or nobody is.
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
                problems.push(Problem::of(
                    key,
                    format!("there is no file {}", file.display()),
                ));
            } else if !encrypted {
                let text = "nobody is reached by https://, so it would never be used; leave it out, or write https://";
                problems.push(Problem::of(key, text));
            }
        }
        if self.cert.is_some() != self.key.is_some() {
            let (key, missing) = if self.cert.is_some() {
                ("cert_file", "key_file")
            } else {
                ("key_file", "cert_file")
            };
            problems.push(Problem::of(
                key,
                format!("`{missing}` belongs to it and is missing"),
            ));
        }
        problems
    }
}
