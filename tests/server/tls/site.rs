//! A server with protected listeners, and its clients.

use std::io;
use std::net::SocketAddr;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use warmroute_testbed::ports::PATIENCE;
use warmroute_testbed::{merge_config, ports};

use crate::site::ServerSite;

/// A running server.
pub(crate) struct TlsSite(ServerSite);

impl Deref for TlsSite {
    type Target = ServerSite;

    fn deref(&self) -> &ServerSite {
        &self.0
    }
}

impl TlsSite {
    /// Starts the server. `write_files` writes files into the directory that contains the
    /// configuration file, where `more` can refer to them.
    pub(crate) async fn start(more: Value, write_files: impl FnOnce(&Path)) -> Self {
        let mut config = json!({
            "models": [{"name": "m", "block_size": 4}],
            "workers": {"list": [{"id": 1, "endpoint": "10.0.0.1:8000"}]},
        });
        merge_config(&mut config, &more);
        Self(ServerSite::start(&config, write_files).await)
    }

    /// Requests a page by plain HTTP with an optional header. Returns the status, and the headers
    /// and body as text.
    pub(crate) async fn page(&self, path: &str, header: &str) -> (u16, String) {
        http(TcpStream::connect(self.admin).await.unwrap(), path, header)
            .await
            .unwrap()
    }

    /// Returns the value of a series, or 0 if it does not exist.
    pub(crate) async fn metric(&self, series: &str) -> f64 {
        let (_, page) = self.page("/metrics", "").await;
        let line = page
            .lines()
            .find_map(|line| line.strip_prefix(&format!("warmroute_{series} ")));
        line.map_or(0.0, |value| value.trim().parse().unwrap())
    }

    /// Waits until a series has a value.
    pub(crate) async fn wait_metric(&self, series: &str, wanted: f64) {
        let what = format!("{series} is {wanted}");
        until(&what, async || self.metric(series).await == wanted).await;
    }

    pub(crate) async fn stop(self) {
        self.0.end().await;
    }
}

/// Waits until the condition holds.
pub(crate) async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let is_met = ports::until(PATIENCE, async || condition().await);
    assert!(is_met.await, "never: {what}");
}

/// Opens a TLS connection to a listener.
pub(crate) async fn dial(
    address: SocketAddr,
    client: Arc<ClientConfig>,
) -> io::Result<TlsStream<TcpStream>> {
    let socket = TcpStream::connect(address).await?;
    let name = ServerName::try_from("localhost").unwrap();
    timeout(PATIENCE, TlsConnector::from(client).connect(name, socket))
        .await
        .unwrap()
}

/// Returns the certificate of a listener.
pub(crate) async fn shown(
    address: SocketAddr,
    client: Arc<ClientConfig>,
) -> CertificateDer<'static> {
    let stream = dial(address, client).await.unwrap();
    stream.get_ref().1.peer_certificates().unwrap()[0]
        .clone()
        .into_owned()
}

/// Returns the serial number of a listener's certificate.
pub(crate) async fn serial(address: SocketAddr, client: Arc<ClientConfig>) -> u64 {
    let shown = shown(address, client).await;
    let (_, parsed) = x509_parser::parse_x509_certificate(&shown).unwrap();
    parsed
        .raw_serial()
        .iter()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Sends an HTTP/1.1 request. Returns the status, and the headers and body as text.
pub(crate) async fn http(
    mut stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    path: &str,
    header: &str,
) -> io::Result<(u16, String)> {
    let request =
        format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{header}\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut text = Vec::new();
    timeout(PATIENCE, stream.read_to_end(&mut text))
        .await
        .unwrap()?;
    let text = String::from_utf8(text).unwrap();
    let status = text
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    Ok((status.ok_or(io::ErrorKind::UnexpectedEof)?, text))
}

/// gRPC client over a TLS tunnel. tonic's own TLS feature is not used, because Cargo would also
/// enable it in the server.
pub(crate) struct TlsCaller {
    pub(crate) channel: Channel,
    _tunnel: AbortOnDropHandle<()>,
}

impl TlsCaller {
    pub(crate) async fn new(address: SocketAddr, client: Arc<ClientConfig>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = listener.local_addr().unwrap();
        let tunnel = tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                let client = client.clone();
                tokio::spawn(async move {
                    let mut far = dial(address, client).await?;
                    copy_bidirectional(&mut socket, &mut far).await
                });
            }
        });
        let channel = Channel::from_shared(format!("http://{near}"))
            .unwrap()
            .connect_lazy();
        Self {
            channel,
            _tunnel: AbortOnDropHandle::new(tunnel),
        }
    }

    /// Returns true if the health service reports `SERVING`.
    pub(crate) async fn is_served(&self) -> Result<bool, tonic::Status> {
        served(self.channel.clone()).await
    }
}

pub(crate) async fn served(channel: Channel) -> Result<bool, tonic::Status> {
    let health_request = HealthCheckRequest {
        service: String::new(),
    };
    let answer = timeout(PATIENCE, HealthClient::new(channel).check(health_request))
        .await
        .unwrap()?;
    Ok(answer.into_inner().status() == ServingStatus::Serving)
}
