//! TLS clients, optionally with server verification and a client certificate.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use crate::support::pki::{CertificatePair, TestAuthority};

/// Accepts any certificate, as gateways do.
#[derive(Debug)]
struct AnyCertificate(CryptoProvider);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(
            message,
            cert,
            signed,
            &self.0.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            cert,
            signed,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Returns a client with the ALPN `protocol` and an optional client certificate. It trusts
/// `authority`, or any certificate if that is `None`.
pub(crate) fn client(
    authority: Option<&TestAuthority>,
    own: Option<&CertificatePair>,
    protocol: &str,
) -> Arc<ClientConfig> {
    client_of(
        &[&rustls::version::TLS13, &rustls::version::TLS12],
        authority,
        own,
        protocol,
    )
}

/// Like [`client`], with the given TLS versions.
pub(crate) fn client_of(
    versions: &[&'static rustls::SupportedProtocolVersion],
    authority: Option<&TestAuthority>,
    own: Option<&CertificatePair>,
    protocol: &str,
) -> Arc<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_protocol_versions(versions).unwrap();
    let builder = match authority {
        Some(authority) => {
            let mut roots = RootCertStore::empty();
            roots
                .add(CertificateDer::from_pem_slice(authority.cert.as_bytes()).unwrap())
                .unwrap();
            builder.with_root_certificates(roots)
        }
        None => builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyCertificate(ring::default_provider()))),
    };
    let mut client = match own {
        Some(pair) => {
            let chain = vec![CertificateDer::from_pem_slice(pair.cert.as_bytes()).unwrap()];
            builder
                .with_client_auth_cert(
                    chain,
                    PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap(),
                )
                .unwrap()
        }
        None => builder.with_no_client_auth(),
    };
    client.alpn_protocols = vec![protocol.as_bytes().to_vec()];
    Arc::new(client)
}
