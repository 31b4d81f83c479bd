//! TLS proxy between warmroute and the API server that injects faults of networks and load
//! balancers.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use parking_lot::Mutex;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_util::task::AbortOnDropHandle;

use crate::control_plane::TestControlPlane;
use crate::pki::TestAuthority;

/// Behaviour of the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProxyMode {
    /// Forwards all bytes.
    Pass,
    /// Accepts connections and bytes, but forwards nothing.
    Hold,
    /// Closes every connection.
    Cut,
    /// Responds to every new connection with this status.
    Status(u16),
}

#[derive(Clone, Copy, Debug)]
struct ProxyState {
    mode: ProxyMode,
    /// Connections with a lower number are dead: they stay open and never forward anything again.
    dead_before: u64,
}

impl ProxyState {
    fn holds(self, connection: u64) -> bool {
        self.mode == ProxyMode::Hold || connection < self.dead_before
    }

    fn cuts(self, connection: u64) -> bool {
        matches!(self.mode, ProxyMode::Cut | ProxyMode::Status(_)) && connection >= self.dead_before
    }
}

/// A running proxy. Dropping it closes all connections.
pub(crate) struct ApiProxy {
    pub(crate) address: SocketAddr,
    link: Arc<ProxyLink>,
    state: watch::Sender<ProxyState>,
    connections: watch::Receiver<u64>,
    _accepting: AbortOnDropHandle<()>,
}

struct ProxyLink {
    acceptor: Mutex<TlsAcceptor>,
    connector: TlsConnector,
    upstream: SocketAddr,
}

impl ApiProxy {
    pub(crate) async fn start(plane: &TestControlPlane, mode: ProxyMode) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(
            plane.authority.cert.as_bytes(),
        )?)?;
        let client = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let link = Arc::new(ProxyLink {
            acceptor: Mutex::new(acceptor(&plane.authority)?),
            connector: TlsConnector::from(Arc::new(client)),
            upstream: plane.address,
        });
        let state = watch::Sender::new(ProxyState {
            mode,
            dead_before: 0,
        });
        let (accepted_tx, connections) = watch::channel(0);
        let accepting = tokio::spawn(accept(listener, link.clone(), state.clone(), accepted_tx));
        Ok(Self {
            address,
            link,
            state,
            connections,
            _accepting: AbortOnDropHandle::new(accepting),
        })
    }

    pub(crate) fn set(&self, mode: ProxyMode) {
        self.state.send_modify(|state| state.mode = mode);
    }

    /// Closes all connections, and presents a certificate of another authority on new ones.
    pub(crate) async fn change_authority(&self, authority: &TestAuthority) -> anyhow::Result<()> {
        *self.link.acceptor.lock() = acceptor(authority)?;
        self.set(ProxyMode::Cut);
        tokio::time::sleep(Duration::from_millis(50)).await;
        self.set(ProxyMode::Pass);
        Ok(())
    }

    /// Makes all existing connections stay open and never forward anything again. New ones work.
    pub(crate) fn kill_silently(&self) {
        let dead_before = *self.connections.borrow();
        self.state.send_modify(|state| {
            *state = ProxyState {
                mode: ProxyMode::Pass,
                dead_before,
            }
        });
    }
}

fn acceptor(authority: &TestAuthority) -> anyhow::Result<TlsAcceptor> {
    let pair = authority.sign(1);
    let config = rustls::ServerConfig::builder_with_provider(Arc::new(
        rustls::crypto::ring::default_provider(),
    ))
    .with_safe_default_protocol_versions()?
    .with_no_client_auth()
    .with_single_cert(
        vec![CertificateDer::from_pem_slice(pair.cert.as_bytes())?],
        PrivateKeyDer::from_pem_slice(pair.key.as_bytes())?,
    )?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

async fn accept(
    listener: TcpListener,
    link: Arc<ProxyLink>,
    state: watch::Sender<ProxyState>,
    accepted_tx: watch::Sender<u64>,
) {
    let mut running = JoinSet::new();
    while let Ok((socket, _)) = listener.accept().await {
        let connection = *accepted_tx.borrow();
        accepted_tx.send_replace(connection + 1);
        let link = link.clone();
        let state = state.subscribe();
        running.spawn(async move { _ = serve(socket, connection, &link, state).await });
    }
}

async fn serve(
    socket: TcpStream,
    connection: u64,
    link: &ProxyLink,
    mut state: watch::Receiver<ProxyState>,
) -> anyhow::Result<()> {
    if state.borrow().mode == ProxyMode::Cut {
        return Ok(());
    }
    let acceptor = link.acceptor.lock().clone();
    let mut near = acceptor.accept(socket).await?;
    let mut head = vec![0; 64 * 1024];
    let length = near.read(&mut head).await?;
    let now = *state.borrow();
    if let ProxyMode::Status(code) = now.mode {
        let response =
            format!("HTTP/1.1 {code} Failure\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        near.write_all(response.as_bytes()).await?;
        near.shutdown().await?;
        return Ok(());
    }
    wait_released(&mut state, connection).await?;
    let far = TcpStream::connect(link.upstream).await?;
    let name = ServerName::IpAddress(link.upstream.ip().into());
    let mut far = link
        .connector
        .connect(name, far)
        .await
        .context("upstream")?;
    far.write_all(&head[..length]).await?;
    let (near_read, near_write) = tokio::io::split(near);
    let (far_read, far_write) = tokio::io::split(far);
    let ended = state.clone();
    tokio::select! {
        result = pump(near_read, far_write, connection, state.clone()) => result,
        result = pump(far_read, near_write, connection, state) => result,
        () = wait_cut(ended, connection) => Ok(()),
    }
}

/// Copies a stream to its end. Pauses while the connection is held.
async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut into: impl AsyncWrite + Unpin,
    connection: u64,
    mut state: watch::Receiver<ProxyState>,
) -> anyhow::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let length = from.read(&mut buffer).await?;
        wait_released(&mut state, connection).await?;
        if length == 0 {
            return Ok(into.shutdown().await?);
        }
        into.write_all(&buffer[..length]).await?;
    }
}

async fn wait_released(
    state: &mut watch::Receiver<ProxyState>,
    connection: u64,
) -> anyhow::Result<()> {
    state.wait_for(|state| !state.holds(connection)).await?;
    Ok(())
}

async fn wait_cut(mut state: watch::Receiver<ProxyState>, connection: u64) {
    _ = state.wait_for(|state| state.cuts(connection)).await;
    // Gives bytes in transit time to arrive.
    tokio::time::sleep(Duration::from_millis(1)).await;
}
