//! Loopback ports for processes that need a fixed port, and waiting until a port responds.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::bail;
use tokio::net::{TcpSocket, TcpStream, UnixStream};

use crate::child_process::ChildProcess;

/// Ports below the ephemeral ranges of Linux and macOS. An ephemeral port could be used by an
/// outgoing connection between its selection and its binding.
const RANGE: Range<u16> = 15_000..32_000;
/// Interval between two polls of a condition.
const POLL: Duration = Duration::from_millis(10);

/// A free loopback port. It is held until it is released.
///
/// The socket is bound, but does not listen. A process that is forked while the port is held has a
/// copy of the socket until it executes its program. On Linux, a copy that listens prevents other
/// processes from binding the released port.
#[derive(Debug)]
pub struct FreePort {
    _socket: TcpSocket,
    number: u16,
}

impl FreePort {
    /// Finds a free port. One process never gets the same number twice, even after a release. Envoy
    /// shares its ports (`SO_REUSEPORT`), so a second Envoy on the same port would not be noticed.
    pub fn find() -> io::Result<Self> {
        static BLOCKS: Mutex<Vec<PortBlock>> = Mutex::new(Vec::new());
        let mut blocks = BLOCKS.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            for number in blocks
                .last_mut()
                .into_iter()
                .flat_map(|block| &mut block.unused)
            {
                if let Ok(socket) = bind_without_listening(number) {
                    return Ok(Self {
                        _socket: socket,
                        number,
                    });
                }
            }
            // Used blocks stay reserved, because their ports are in use.
            blocks.push(PortBlock::reserve()?);
        }
    }

    /// Returns the port number while the port is held.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Releases the port. Call this just before starting the process that binds it.
    pub fn release(self) -> u16 {
        self.number
    }
}

fn bind_without_listening(port: u16) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    // A server can bind the port beside a copy of this socket only if both sockets set the option.
    socket.set_reuseaddr(true)?;
    socket.bind((Ipv4Addr::LOCALHOST, port).into())?;
    Ok(socket)
}

/// Adjacent ports that no other process with this module uses. A port has no other protection
/// between its release and its binding.
#[derive(Debug)]
struct PortBlock {
    /// Listener on the first port of the block, which reserves the other ports.
    _lock: TcpListener,
    unused: Range<u16>,
}

impl PortBlock {
    const PORTS: u16 = 100;

    fn reserve() -> io::Result<Self> {
        let blocks = (RANGE.end - RANGE.start) / Self::PORTS;
        let first = rand::random_range(0..blocks);
        let mut last_error = None;
        for offset in 0..blocks {
            let start = RANGE.start + (first + offset) % blocks * Self::PORTS;
            match TcpListener::bind((Ipv4Addr::LOCALHOST, start)) {
                Ok(lock) => {
                    return Ok(Self {
                        _lock: lock,
                        unused: start + 1..start + Self::PORTS,
                    });
                }
                Err(error) => last_error = Some(error),
            }
        }
        Err(last_error.unwrap_or_else(|| io::ErrorKind::AddrInUse.into()))
    }
}

/// Readiness condition of a process.
#[derive(Debug, Clone, Copy)]
pub enum ReadyCheck<'a> {
    /// A TCP port that accepts connections.
    Tcp(SocketAddr),
    /// A Unix socket that accepts connections.
    Unix(&'a Path),
    /// A URL that responds to a GET with status 200.
    Http(&'a str),
}

impl ReadyCheck<'_> {
    async fn answers(self, http: &reqwest::Client) -> bool {
        match self {
            Self::Tcp(address) => TcpStream::connect(address).await.is_ok(),
            Self::Unix(path) => UnixStream::connect(path).await.is_ok(),
            Self::Http(url) => http
                .get(url)
                .send()
                .await
                .is_ok_and(|answer| answer.status() == reqwest::StatusCode::OK),
        }
    }
}

/// Waits until `ready` holds. If `child` ends before that, fails with the last lines of its log.
pub async fn wait_ready(
    ready: ReadyCheck<'_>,
    within: Duration,
    child: &ChildProcess,
) -> anyhow::Result<()> {
    // On loopback, a proxy from the environment must not be used.
    let http = warmroute_runtime::tls::http_client_builder()
        .timeout(Duration::from_secs(1))
        .build()?;
    let answered = until(within, async || {
        ready.answers(&http).await || !child.is_running()
    })
    .await;
    let name = child.name();
    // The log is read after the exit, because its last lines contain the reason.
    if !child.is_running() {
        bail!(
            "{name} ended before it was ready; its last lines:\n{}",
            child.log_tail()
        );
    }
    if !answered {
        bail!(
            "{name} did not answer at {ready:?} within {within:?}; its last lines:\n{}",
            child.log_tail()
        );
    }
    Ok(())
}

/// Timeout of waits, far longer than any step takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Polls `condition` until it holds. Returns `false` if it does not within the time.
pub async fn until(within: Duration, mut condition: impl AsyncFnMut() -> bool) -> bool {
    let deadline = Instant::now() + within;
    loop {
        if condition().await {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        tokio::time::sleep(POLL).await;
    }
}
