//! Loopback ports for processes that must be told their port, and waiting until somebody answers there.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::bail;
use tokio::net::{TcpStream, UnixStream};

use super::child::Child;

/// Below the ports that Linux and macOS give to outgoing connections, which could take one between the moment it is
/// handed out and the moment it is bound.
const RANGE: Range<u16> = 15_000..32_000;
/// How often a condition is looked at again while waiting for it.
const POLL: Duration = Duration::from_millis(10);

/// A free loopback port, held until it is handed out.
#[derive(Debug)]
pub(crate) struct FreePort {
    listener: TcpListener,
    number: u16,
}

impl FreePort {
    /// Finds a free port. No number is found twice by one process, even after it was handed out: Envoy shares its
    /// ports (`SO_REUSEPORT`), so that a second Envoy on the same port would go unnoticed.
    pub(crate) fn find() -> io::Result<Self> {
        static OURS: Mutex<Vec<Slot>> = Mutex::new(Vec::new());
        let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            for number in ours.last_mut().into_iter().flat_map(|slot| &mut slot.rest) {
                if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, number)) {
                    return Ok(Self { listener, number });
                }
            }
            // The old ones are kept: their numbers have been handed out.
            ours.push(Slot::take()?);
        }
    }

    /// The number, while it is held.
    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    /// Lets go of the port: to be called just before the process that is to bind it starts.
    pub(crate) fn release(self) -> u16 {
        self.number
    }
}

/// Neighbouring ports that no other process like this one hands out: between the moment a port is let go and the moment
/// it is bound, nothing else would keep them from it.
#[derive(Debug)]
struct Slot {
    /// On the first port of the slot: whoever holds it has the others.
    _lock: TcpListener,
    rest: Range<u16>,
}

impl Slot {
    const PORTS: u16 = 100;

    fn take() -> io::Result<Self> {
        let slots = (RANGE.end - RANGE.start) / Self::PORTS;
        let first = rand::random_range(0..slots);
        let mut last_error = None;
        for turn in 0..slots {
            let start = RANGE.start + (first + turn) % slots * Self::PORTS;
            match TcpListener::bind((Ipv4Addr::LOCALHOST, start)) {
                Ok(lock) => {
                    return Ok(Self {
                        _lock: lock,
                        rest: start + 1..start + Self::PORTS,
                    });
                }
                Err(error) => last_error = Some(error),
            }
        }
        Err(last_error.unwrap_or_else(|| io::ErrorKind::AddrInUse.into()))
    }
}

/// Where an answer is waited for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Ready<'a> {
    /// A TCP port that accepts connections.
    Tcp(SocketAddr),
    /// A Unix socket that accepts connections.
    Unix(&'a Path),
    /// A URL that answers 200 to a GET.
    Http(&'a str),
}

impl Ready<'_> {
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

/// Waits until `ready` answers; fails early, with the last lines of its log, when `child` has ended.
pub(crate) async fn wait_ready(
    ready: Ready<'_>,
    within: Duration,
    child: &Child,
) -> anyhow::Result<()> {
    // A proxy from the environment has no business on the loopback.
    let http = warmroute::tls::client()
        .timeout(Duration::from_secs(1))
        .build()?;
    let answered = until(within, async || {
        ready.answers(&http).await || !child.is_running()
    })
    .await;
    let name = child.name();
    // The log is read once the process has ended: what it says last is why.
    if !child.is_running() {
        bail!(
            "{name} has ended before it was ready; its last lines:\n{}",
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

/// Looks at `condition` again and again until it holds; `false` if it still does not after `within`.
pub(crate) async fn until(within: Duration, mut condition: impl AsyncFnMut() -> bool) -> bool {
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
