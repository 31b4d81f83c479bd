//! The start with what is known already: before a source is listened to for the first time, what its rank holds is copied
//! from a warmroute that is ready, or taken from the file that we left when we ended, together with the newest event that is
//! in it. The source is then gone on with from there, so a restart or one more replica need not learn from the beginning
//! what engines no longer repeat.

pub mod config;
mod peer;
mod snapshot;

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::sync::OnceCell;
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

use crate::index::dump::RankDump;
use crate::worker::WorkerRank;
use config::{Late, TakeoverConfig};
use peer::Peer;
pub use snapshot::write;

/// Where what is known already is to be had.
pub struct Takeover {
    peer: Option<Peer>,
    file: Option<File>,
    until: Instant,
    late: Late,
}

/// The file, and what was found in it and not taken yet.
struct File {
    path: PathBuf,
    max_age: Duration,
    found: OnceCell<Mutex<HashMap<WorkerRank, RankDump>>>,
}

/// Whose knowledge it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    Peer,
    File,
}

impl Takeover {
    /// Nothing is asked or read yet.
    pub fn new(settings: &TakeoverConfig) -> anyhow::Result<Self> {
        let file =
            |path: &PathBuf| File { path: path.clone(), max_age: settings.max_age.get(), found: OnceCell::new() };
        Ok(Self {
            peer: settings.from.as_ref().map(|from| Peer::new(from, settings)).transpose()?,
            file: settings.file.as_ref().map(file),
            until: Instant::now() + settings.deadline.get(),
            late: settings.late,
        })
    }

    /// What is known of a rank by whoever reads its events as we do; `None` where that is nothing, or not to be had in time.
    pub async fn copy(&self, rank: WorkerRank, reading: u64) -> Option<RankDump> {
        let (from, held) = match self.of_peer(rank).await {
            Some(held) => (From::Peer, held),
            None => (From::File, self.of_file(rank).await?),
        };
        // Without a position nobody could go on from it.
        let position = held.position()?;
        if position.reading != reading {
            warn!(%rank, ?from, "what is known of the rank was read with another block size or other media tokens; it is learned anew");
            return None;
        }
        info!(%rank, ?from, seq = position.seq, "what is known of the rank is taken over");
        Some(held)
    }

    async fn of_peer(&self, rank: WorkerRank) -> Option<RankDump> {
        let peer = self.peer.as_ref()?;
        if self.late == Late::Wait {
            return peer.ask(rank).await;
        }
        let found = timeout_at(self.until, peer.ask(rank)).await;
        found.unwrap_or_else(|_| {
            warn!(%rank, "nobody told in time what is known of the rank");
            None
        })
    }

    async fn of_file(&self, rank: WorkerRank) -> Option<RankDump> {
        let File { path, max_age, found } = self.file.as_ref()?;
        let read = async || {
            let (path, max_age) = (path.clone(), *max_age);
            let read = tokio::task::spawn_blocking(move || snapshot::read(&path, max_age, SystemTime::now())).await;
            Mutex::new(read.unwrap_or_default())
        };
        found.get_or_init(read).await.lock().remove(&rank)
    }
}
