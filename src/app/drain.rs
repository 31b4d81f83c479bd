//! The end in its order. For the grace everything is served as before, while those who ask hear that we are leaving; then
//! nothing new is begun, and what is open may go on up to the deadline. Who has taken over our socket meanwhile waits for our
//! other addresses, and the grace has no use any more.

use std::pin::pin;
use std::time::Duration;

use tracing::{info, warn};

use super::App;
use super::unix::Place;

/// How long answers of the pages may take that were begun before.
const FAREWELL: Duration = Duration::from_millis(500);

impl App {
    /// Serves on for the grace, or until a successor does; then nothing new, and what is open up to the deadline.
    pub(super) async fn drain(&mut self) -> anyhow::Result<()> {
        let drain = self.reloader.running().drain.clone();
        info!(grace = %drain.grace, deadline = %drain.deadline, "draining");
        let mut superseded = pin!(superseded(self.place.take()));
        let mut have_successor = false;
        if !drain.grace.get().is_zero() {
            tokio::select! {
                () = tokio::time::sleep(drain.grace.get()) => {}
                () = &mut superseded => have_successor = true,
                failed = self.fails() => return failed,
            }
        }
        if have_successor {
            self.leave_addresses().await;
        }
        self.closing.cancel();
        // Those who watch it would keep their connections open.
        self.health.forget().await;
        let mut deadline = pin!(tokio::time::sleep(drain.deadline.get()));
        loop {
            tokio::select! {
                ended = self.servers.join_next() => if ended.is_none() { return Ok(()) },
                () = &mut superseded, if !have_successor => {
                    have_successor = true;
                    self.leave_addresses().await;
                }
                () = &mut deadline => {
                    warn!("the drain deadline passed with exchanges still open; leaving them to Envoy");
                    return Ok(());
                }
            }
        }
    }

    /// A successor waits for the addresses of the pages.
    async fn leave_addresses(&mut self) {
        info!("a successor has taken over");
        // Connections that are kept alive would go on asking us and not the successor.
        self.leave.cancel();
        let ended = async { while self.pages.join_next().await.is_some() {} };
        let _in_time = tokio::time::timeout(FAREWELL, ended).await;
        self.pages.shutdown().await;
    }
}

/// Waits until somebody else has our place, where there is one to be had.
async fn superseded(place: Option<Place>) {
    match place {
        Some(place) => place.lost().await,
        None => std::future::pending().await,
    }
}
