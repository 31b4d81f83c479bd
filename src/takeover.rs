//! The start with what is known already: before a source is listened to for the first time, what its rank holds is copied
//! from a warmroute that is ready, or taken from the file that we left when we ended, together with the newest event that is
//! in it. The source is then gone on with from there, so a restart or one more replica need not learn from the beginning
//! what engines no longer repeat.

pub mod config;
mod peer;
mod snapshot;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use tokio::sync::OnceCell;
use tokio::time::Instant;
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
    deadline: Duration,
    until: OnceLock<Instant>,
    late: Late,
}

/// The file, and what was found in it.
struct File {
    path: PathBuf,
    max_age: Duration,
    found: OnceCell<HashMap<WorkerRank, Arc<RankDump>>>,
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
        let file = |path: &PathBuf| File {
            path: path.clone(),
            max_age: settings.max_age.get(),
            found: OnceCell::new(),
        };
        Ok(Self {
            peer: settings
                .from
                .as_ref()
                .map(|from| Peer::new(from, settings))
                .transpose()?,
            file: settings.file.as_ref().map(file),
            deadline: settings.deadline.get(),
            until: OnceLock::new(),
            late: settings.late,
        })
    }

    /// What is known of a rank by whoever reads the events of the same engine as we do; `None` where that is nothing, or not
    /// to be had in time.
    pub async fn copy(&self, rank: WorkerRank, reading: u64) -> Option<Arc<RankDump>> {
        let of_peer = self.of_peer(rank).await.map(Arc::new);
        if let Some(held) = of_peer.filter(|held| is_of_use(rank, reading, held, From::Peer)) {
            return Some(held);
        }
        self.of_file(rank)
            .await
            .filter(|held| is_of_use(rank, reading, held, From::File))
    }

    async fn of_peer(&self, rank: WorkerRank) -> Option<RankDump> {
        let peer = self.peer.as_ref()?;
        // It is not before the first rank is known that anything could be asked.
        let until = *self.until.get_or_init(|| Instant::now() + self.deadline);
        match peer
            .ask(rank, (self.late == Late::Cold).then_some(until))
            .await
        {
            Ok(held) => held,
            Err(problem) => {
                let problem = format!("{problem:#}");
                warn!(%rank, problem, "nobody tells what is known of the rank");
                None
            }
        }
    }

    async fn of_file(&self, rank: WorkerRank) -> Option<Arc<RankDump>> {
        let File {
            path,
            max_age,
            found,
        } = self.file.as_ref()?;
        let read = async || {
            let (path, max_age) = (path.clone(), *max_age);
            let read = tokio::task::spawn_blocking(move || {
                snapshot::read(&path, max_age, SystemTime::now())
            })
            .await;
            read.unwrap_or_default()
        };
        // It stays there: while we start, a source may be started more than once.
        found.get_or_init(read).await.get(&rank).cloned()
    }
}

/// Whether the source can be gone on with from there.
fn is_of_use(rank: WorkerRank, reading: u64, held: &RankDump, from: From) -> bool {
    let Some(position) = held.position() else {
        info!(%rank, ?from, "what is known of the rank cannot be gone on with");
        return false;
    };
    if position.reading != reading {
        let because = "what is known of the rank is of another engine, or was read with another block size or media tokens";
        warn!(%rank, ?from, because);
        return false;
    }
    info!(%rank, ?from, seq = position.seq, "what is known of the rank is taken over");
    true
}
