//! The way out: HTTP clients for engines and caches. They share one provider of cryptography with our own sockets, which has
//! to be named before the first client is built.

use reqwest::ClientBuilder;
use rustls::crypto::ring;

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
