//! The certificate of one listener, as it is now. A replacement that cannot be used leaves the old one in place: an expired
//! certificate is a warning for weeks, a listener without one an outage at once.

use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustls::ServerConfig;
use tracing::{info, warn};

use super::config::TlsConfig;
use super::material::{self, Identity, Material, Source, TlsError};
use super::secrets::Secret;
use crate::metrics::{ListenerLabel, ListenerOutcomeLabels, Metrics};

/// What is spoken inside of TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// gRPC, which is HTTP/2.
    Grpc,
    /// HTTP/1.1.
    Http,
}

impl Protocol {
    fn names(self) -> &'static [&'static [u8]] {
        match self {
            Protocol::Grpc => &[b"h2"],
            Protocol::Http => &[b"http/1.1"],
        }
    }
}

/// The certificate of one listener, with who may come in.
pub struct Acceptor {
    listener: &'static str,
    protocol: Protocol,
    source: Source,
    client_ca: Option<PathBuf>,
    /// Made by us, once: a new one at every change of the client CA would be news to nobody.
    own: Option<Identity>,
    server: ArcSwap<ServerConfig>,
    read: Mutex<LastRead>,
    metrics: Arc<Metrics>,
}

/// What the files held, so that only news is told.
struct LastRead {
    in_use: blake3::Hash,
    /// What was wrong with the files when they were last read, and with which content of theirs.
    trouble: Option<(Option<blake3::Hash>, TlsError)>,
}

impl Acceptor {
    /// Reads the files, or makes a certificate; `listener` is its name in logs and metrics.
    pub fn new(
        listener: &'static str,
        config: &TlsConfig,
        protocol: Protocol,
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Self>, TlsError> {
        let source = config
            .source()
            .map_err(|problem| TlsError::plain(problem.text))?;
        let material = Material::read(&source, config.client_ca.as_deref())?;
        let read = material.identity()?;
        let own = if read.is_none() {
            Some(material::self_signed()?)
        } else {
            None
        };
        let Some(identity) = read.as_ref().or(own.as_ref()) else {
            return Err(TlsError::plain("there is no certificate"));
        };
        let server = material.server(identity, protocol.names())?;
        let expires = identity.expires;
        let acceptor = Self {
            listener,
            protocol,
            source,
            client_ca: config.client_ca.clone(),
            server: ArcSwap::from_pointee(server),
            read: Mutex::new(LastRead {
                in_use: material.fingerprint(),
                trouble: None,
            }),
            metrics,
            own,
        };
        acceptor.shows(expires);
        info!(
            listener,
            self_signed = acceptor.own.is_some(),
            mutual = acceptor.client_ca.is_some(),
            "TLS"
        );
        Ok(Arc::new(acceptor))
    }

    /// What new connections get.
    pub fn current(&self) -> Arc<ServerConfig> {
        self.server.load_full()
    }

    /// Says until when the certificate in use is good.
    fn shows(&self, expires: i64) {
        let label = ListenerLabel {
            listener: self.listener,
        };
        self.metrics
            .tls_certificate_expires_seconds
            .get_or_create(&label)
            .set(expires);
        if expires <= material::now() {
            warn!(
                listener = self.listener,
                "the certificate has expired; clients that check refuse it"
            );
        }
    }

    fn build(&self, material: &Material) -> Result<(ServerConfig, i64), TlsError> {
        let read = material.identity()?;
        let identity = read.as_ref().or(self.own.as_ref());
        let identity = identity.ok_or_else(|| TlsError::plain("there is no certificate"))?;
        Ok((
            material.server(identity, self.protocol.names())?,
            identity.expires,
        ))
    }

    /// Tells of files that cannot be used, once for each content and error.
    fn keep(&self, read: &mut LastRead, content: Option<blake3::Hash>, error: TlsError) {
        let trouble = Some((content, error));
        if read.trouble == trouble {
            return;
        }
        if let Some((_, error)) = &trouble {
            warn!(listener = self.listener, %error, "certificate not usable; the one in use is kept");
        }
        read.trouble = trouble;
        self.count("invalid");
    }

    fn count(&self, outcome: &'static str) {
        self.metrics
            .tls_reloads
            .get_or_create(&ListenerOutcomeLabels {
                listener: self.listener,
                outcome,
            })
            .inc();
    }
}

impl Secret for Acceptor {
    fn files(&self) -> Vec<PathBuf> {
        let pair = match &self.source {
            Source::Files { cert, key } => vec![cert.clone(), key.clone()],
            Source::SelfSigned => Vec::new(),
        };
        pair.into_iter().chain(self.client_ca.clone()).collect()
    }

    fn reload(&self) {
        // For the whole of it: two at once must not put the older content in place last.
        let mut read = self.read.lock();
        let material = match Material::read(&self.source, self.client_ca.as_deref()) {
            Ok(material) => material,
            Err(error) => return self.keep(&mut read, None, error),
        };
        let content = material.fingerprint();
        if content == read.in_use {
            if read.trouble.take().is_some() {
                info!(
                    listener = self.listener,
                    "the files hold the certificate in use again"
                );
            }
            return;
        }
        match self.build(&material) {
            Ok((server, expires)) => {
                self.server.store(Arc::new(server));
                *read = LastRead {
                    in_use: content,
                    trouble: None,
                };
                self.count("applied");
                info!(listener = self.listener, "new certificate in use");
                self.shows(expires);
            }
            Err(error) => self.keep(&mut read, Some(content), error),
        }
    }
}

#[cfg(test)]
mod tests;
