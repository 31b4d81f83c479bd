//! Shutdown sequence.
//!
//! During the grace period everything is served while gRPC health reports `draining`. Then no new
//! exchanges begin, and open ones, including detached prefills, may continue until the deadline.
//! After the abort, engines are notified of cancelled requests. A successor that has taken over the
//! unix socket waits for the other addresses, so the grace period ends early. While a successor
//! loads, the grace period continues, up to the deadline.

use std::pin::pin;
use std::time::Duration;

use tracing::{info, warn};

use super::App;
use super::unix_socket::{self, SocketIdentity};

/// Time for admin responses in progress.
const PAGE_GRACE: Duration = Duration::from_millis(500);

/// Time to notify engines of aborted requests.
const ABORT_GRACE: Duration = Duration::from_secs(2);

/// Poll interval for open exchanges.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

impl App {
    /// Serves for the grace period or until a successor takes over the unix socket, then finishes
    /// open exchanges up to the deadline.
    pub(super) async fn drain(&mut self) -> anyhow::Result<()> {
        let drain = self.reloader.running().process.drain.clone();
        info!(grace = %drain.grace_period, deadline = %drain.timeout, "draining");
        let grace = drain.grace_period.get();
        let mut deadline = pin!(tokio::time::sleep(grace + drain.timeout.get()));
        let socket = self.socket.take();
        let grace_end = wait_grace(grace, socket.clone());
        let mut successor = pin!(wait_for_successor(socket));
        let mut has_successor = false;
        if !grace.is_zero() {
            tokio::select! {
                () = grace_end => {}
                () = &mut deadline => {}
                () = &mut successor => has_successor = true,
                failed = self.wait_for_failure() => return failed,
            }
        }
        if has_successor {
            self.release_addresses().await;
        }
        self.closing.cancel();
        // Health watches would keep connections open.
        self.health.clear().await;
        let exchange_tasks = self.exchange_tasks.clone();
        exchange_tasks.close();
        loop {
            tokio::select! {
                _ended = self.servers.join_next(), if !self.servers.is_empty() => {}
                () = exchange_tasks.wait(), if self.servers.is_empty() => return Ok(()),
                () = &mut successor, if !has_successor => {
                    has_successor = true;
                    self.release_addresses().await;
                }
                () = &mut deadline => {
                    if self.servers.is_empty() {
                        let prefills = exchange_tasks.len();
                        warn!(prefills, "drain deadline exceeded; aborting prefills");
                    } else {
                        warn!("drain deadline exceeded; aborting open exchanges");
                    }
                    return Ok(());
                }
            }
        }
    }

    /// Aborts open exchanges, and waits until engines have been notified.
    pub(super) async fn abort_open(&mut self) {
        self.abort.cancel();
        let notified = async {
            let open = || self.reloader.metrics.ext_proc.open_exchanges.get() > 0;
            let mut was_open = true;
            while was_open {
                // An exchange queues its notifications shortly after it has ended.
                was_open = open();
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            self.exchange_tasks.wait().await;
        };
        let _in_time = tokio::time::timeout(ABORT_GRACE, notified).await;
        self.servers.shutdown().await;
        self.pages.shutdown().await;
        while self.background.running.join_next().await.is_some() {}
    }

    /// Releases the admin and health addresses, which a successor waits for.
    async fn release_addresses(&mut self) {
        info!("successor took over the unix socket");
        // Keep-alive connections would continue to reach this process.
        self.close_pages.cancel();
        let ended = async { while self.pages.join_next().await.is_some() {} };
        let _in_time = tokio::time::timeout(PAGE_GRACE, ended).await;
        self.pages.shutdown().await;
    }
}

/// Waits until the grace period has passed and no successor loads.
async fn wait_grace(grace: Duration, socket: Option<SocketIdentity>) {
    tokio::time::sleep(grace).await;
    if let Some(socket) = socket {
        unix_socket::wait_successor_loaded(socket.path()).await;
    }
}

/// Waits until a successor owns the unix socket; pending without one.
async fn wait_for_successor(socket: Option<SocketIdentity>) {
    match socket {
        Some(socket) => socket.wait_replaced().await,
        None => std::future::pending().await,
    }
}
