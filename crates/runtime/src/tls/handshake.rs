//! Reasons of TLS handshake failures, for metrics and logs.

use std::io;

use rustls::{Error, InvalidMessage, PeerMisbehaved};
use strum::{IntoStaticStr, VariantArray};

/// Reason for a failed handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub(super) enum HandshakeError {
    /// The server name of the client is not a DNS name; rustls 0.23 rejects it.
    ServerName,
    /// The client does not use TLS.
    Plaintext,
    /// The first messages are malformed.
    Malformed,
    /// A client certificate is required, but the client sent none.
    NoClientCertificate,
    /// The client certificate is not valid.
    ClientCertificate,
    /// No common version, cipher or key exchange.
    Incompatible,
    /// No common application protocol.
    Alpn,
    /// The client sent an alert, for example because it does not trust the certificate.
    Alert,
    /// The client closed the connection, as port probes do.
    Closed,
    /// The handshake took too long.
    Timeout,
    /// Another reason.
    Other,
}

impl HandshakeError {
    pub(super) fn of(error: &io::Error) -> Self {
        let Some(error) = error
            .get_ref()
            .and_then(|error| error.downcast_ref::<Error>())
        else {
            return Self::Closed;
        };
        match error {
            Error::PeerMisbehaved(PeerMisbehaved::ServerNameMustContainOneHostName)
            | Error::InvalidMessage(InvalidMessage::InvalidServerName) => Self::ServerName,
            Error::InvalidMessage(InvalidMessage::InvalidContentType) => Self::Plaintext,
            Error::InvalidMessage(_) => Self::Malformed,
            Error::NoCertificatesPresented => Self::NoClientCertificate,
            Error::InvalidCertificate(_) => Self::ClientCertificate,
            Error::PeerIncompatible(_) => Self::Incompatible,
            Error::NoApplicationProtocol => Self::Alpn,
            Error::AlertReceived(_) => Self::Alert,
            _ => Self::Other,
        }
    }

    /// Returns the metric label.
    pub(super) fn reason(self) -> &'static str {
        self.into()
    }

    /// Returns a hint for fixing the failure, or an empty text.
    pub(super) fn hint(self) -> &'static str {
        match self {
            Self::ServerName => {
                "the server name (SNI) of the client is not a DNS name. Istio sends the name of \
                the cluster unless the DestinationRule of this Service sets \
                `trafficPolicy.tls.sni`; in Envoy's own configuration, replace `auto_sni` by `sni` \
                in UpstreamTlsContext"
            }
            Self::Plaintext => {
                "the client speaks no TLS; configure TLS in the client, or remove `tls` of this \
                listener"
            }
            Self::NoClientCertificate => {
                "the listener has `client_ca`; use a client certificate of that authority"
            }
            Self::ClientCertificate => {
                "the client's certificate is not valid for `client_ca` of this listener"
            }
            Self::Alpn => {
                "the client offers another protocol; gRPC listeners need h2, the admin listener \
                http/1.1"
            }
            Self::Alert => {
                "the client refused the handshake; it may not trust the certificate of this \
                listener"
            }
            Self::Malformed | Self::Incompatible | Self::Closed | Self::Timeout | Self::Other => "",
        }
    }

    /// Returns whether the failure is logged as a warning. Port probes that close the connection
    /// are not.
    pub(super) fn is_notable(self) -> bool {
        self != Self::Closed
    }
}
