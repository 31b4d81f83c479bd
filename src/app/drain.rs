//! The end in its order. For the grace everything is served as before, while those who ask hear that we are leaving; then
//! nothing new is begun, and what is open may go on up to the deadline, prefills too whose clients have left. What is cut
//! then still has a moment to tell engines that nobody waits. Who has taken over our socket meanwhile waits for our
//! other addresses, and the grace has no use any more.

use std::pin::pin;
use std::time::Duration;

use tracing::{info, warn};

use super::App;
use super::unix::Place;

/// How long answers of the pages may take that were begun before.
const FAREWELL: Duration = Duration::from_millis(500);

/// How long it may take to tell engines of what was cut.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How often we look meanwhile whether exchanges are still open.
const LOOK: Duration = Duration::from_millis(10);

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
        let under_way = self.under_way.clone();
        under_way.close();
        loop {
            tokio::select! {
                _ended = self.servers.join_next(), if !self.servers.is_empty() => {}
                () = under_way.wait(), if self.servers.is_empty() => return Ok(()),
                () = &mut superseded, if !have_successor => {
                    have_successor = true;
                    self.leave_addresses().await;
                }
                () = &mut deadline => {
                    match self.servers.is_empty() {
                        false => warn!("the drain deadline passed with exchanges still open; leaving them to Envoy"),
                        true => warn!(prefills = under_way.len(), "the drain deadline passed; cutting off prefills"),
                    }
                    return Ok(());
                }
            }
        }
    }

    /// Cuts what is open, and waits a moment for what is to be told of it.
    pub(super) async fn farewell(&mut self) {
        self.cut.cancel();
        let told = async {
            let open = || self.reloader.metrics.exchanges_open.get() > 0;
            let mut more = true;
            while more {
                // What an exchange leaves to be told is known a little after it has ended.
                more = open();
                tokio::time::sleep(LOOK).await;
            }
            self.under_way.wait().await;
        };
        let _in_time = tokio::time::timeout(LAST_WORDS, told).await;
        self.servers.shutdown().await;
        self.pages.shutdown().await;
        while self.background.join_next().await.is_some() {}
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
