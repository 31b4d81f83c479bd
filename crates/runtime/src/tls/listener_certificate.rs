//! The certificate of one listener, reloaded when its files change.
//!
//! If the new files cannot be used, the old certificate stays in use. An expired certificate causes
//! warnings for weeks, but a listener without a certificate is an outage at once.

use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustls::ServerConfig;
use tracing::{info, warn};

use super::certificate::{self, CertificateMaterial, CertificateSource, ServerIdentity, TlsError};
use super::config::TlsConfig;
use super::reloadable_files::FileBacked;
use warmroute_metrics::{ListenerLabel, ListenerOutcomeLabels, Metrics};

/// Application protocol inside TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenerProtocol {
    /// gRPC over HTTP/2.
    Grpc,
    /// HTTP/1.1.
    Http,
}

impl ListenerProtocol {
    fn alpn_protocols(self) -> &'static [&'static [u8]] {
        match self {
            ListenerProtocol::Grpc => &[b"h2"],
            ListenerProtocol::Http => &[b"http/1.1"],
        }
    }
}

/// Certificate and client verification of one listener.
pub struct ListenerCertificate {
    listener: &'static str,
    protocol: ListenerProtocol,
    source: CertificateSource,
    client_ca: Option<PathBuf>,
    /// Self-signed certificate, if no files are configured. It is created once and survives a
    /// change of the client CA.
    self_signed: Option<ServerIdentity>,
    server: ArcSwap<ServerConfig>,
    last_read: Mutex<LastRead>,
    metrics: Arc<Metrics>,
}

/// Result of the last read of the files, so that only changes are logged.
struct LastRead {
    in_use: blake3::Hash,
    /// Error of the last read, with the content that caused it.
    error: Option<(Option<blake3::Hash>, TlsError)>,
}

impl ListenerCertificate {
    /// Reads the files or creates a self-signed certificate. `listener` is the name in logs and
    /// metrics.
    pub fn new(
        listener: &'static str,
        config: &TlsConfig,
        protocol: ListenerProtocol,
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Self>, TlsError> {
        let source = config
            .source()
            .map_err(|problem| TlsError::plain(problem.text))?;
        let material = CertificateMaterial::read(&source, config.client_ca.as_deref())?;
        let self_signed = (source == CertificateSource::SelfSigned)
            .then(certificate::self_signed)
            .transpose()?;
        let (server, expires) = build_server_config(&material, self_signed.as_ref(), protocol)?;
        let acceptor = Self {
            listener,
            protocol,
            source,
            client_ca: config.client_ca.clone(),
            server: ArcSwap::from_pointee(server),
            last_read: Mutex::new(LastRead {
                in_use: material.fingerprint(),
                error: None,
            }),
            metrics,
            self_signed,
        };
        acceptor.publish_expiry(expires);
        info!(
            listener,
            self_signed = acceptor.self_signed.is_some(),
            mutual = acceptor.client_ca.is_some(),
            "TLS enabled"
        );
        Ok(Arc::new(acceptor))
    }

    /// Returns the TLS configuration for new connections.
    pub fn current(&self) -> Arc<ServerConfig> {
        self.server.load_full()
    }

    /// Publishes the expiry time of the certificate in use.
    fn publish_expiry(&self, expires: i64) {
        let label = ListenerLabel {
            listener: self.listener,
        };
        self.metrics
            .listeners
            .tls_certificate_expiry_timestamp_seconds
            .get_or_create(&label)
            .set(expires);
        if expires <= certificate::unix_now() {
            warn!(
                listener = self.listener,
                "TLS certificate expired; clients that verify it reject the connection"
            );
        }
    }

    /// Logs unusable files, once for each content and error.
    fn record_error(&self, read: &mut LastRead, content: Option<blake3::Hash>, error: TlsError) {
        let problem = Some((content, error));
        if read.error == problem {
            return;
        }
        if let Some((_, error)) = &problem {
            warn!(listener = self.listener, %error, "TLS certificate reload rejected; the current certificate stays in use");
        }
        read.error = problem;
        self.count_reload("invalid");
    }

    fn count_reload(&self, outcome: &'static str) {
        self.metrics
            .listeners
            .tls_reloads
            .get_or_create(&ListenerOutcomeLabels {
                listener: self.listener,
                outcome,
            })
            .inc();
    }
}

/// Builds the server configuration. Returns it with the expiry time of its certificate.
fn build_server_config(
    material: &CertificateMaterial,
    self_signed: Option<&ServerIdentity>,
    protocol: ListenerProtocol,
) -> Result<(ServerConfig, i64), TlsError> {
    let read = material.identity()?;
    let identity = read.as_ref().or(self_signed);
    let identity = identity.ok_or_else(|| TlsError::plain("no certificate is configured"))?;
    let server = material.server_config(identity, protocol.alpn_protocols())?;
    Ok((server, identity.expires))
}

impl FileBacked for ListenerCertificate {
    fn files(&self) -> Vec<PathBuf> {
        let pair = match &self.source {
            CertificateSource::Files { cert, key } => vec![cert.clone(), key.clone()],
            CertificateSource::SelfSigned => Vec::new(),
        };
        pair.into_iter().chain(self.client_ca.clone()).collect()
    }

    fn reload(&self) {
        // The lock is held for the whole reload, so that a concurrent reload cannot install older
        // content last.
        let mut read = self.last_read.lock();
        let material = match CertificateMaterial::read(&self.source, self.client_ca.as_deref()) {
            Ok(material) => material,
            Err(error) => return self.record_error(&mut read, None, error),
        };
        let content = material.fingerprint();
        if content == read.in_use {
            if read.error.take().is_some() {
                info!(
                    listener = self.listener,
                    "TLS certificate files valid again; the certificate has not changed"
                );
            }
            return;
        }
        match build_server_config(&material, self.self_signed.as_ref(), self.protocol) {
            Ok((server, expires)) => {
                self.server.store(Arc::new(server));
                *read = LastRead {
                    in_use: content,
                    error: None,
                };
                self.count_reload("applied");
                info!(listener = self.listener, "TLS certificate reloaded");
                self.publish_expiry(expires);
            }
            Err(error) => self.record_error(&mut read, Some(content), error),
        }
    }
}

#[cfg(test)]
mod tests;
