//! Warm start of the prefix index.
//!
//! Before an event source is connected for the first time, the blocks of its rank and the position
//! of the last applied event are copied from a ready warmroute process, or restored from the
//! snapshot file of the last shutdown. The event stream continues from there, so a restart or an
//! additional replica does not begin with a cold index.

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

use config::{DeadlineAction, WarmStartConfig};
use peer::PeerClient;
pub use snapshot::write_snapshot;
use warmroute_core::index::dump::RankDump;
use warmroute_core::worker::WorkerRank;

/// Sources of warm start data.
pub struct WarmStart {
    peer: Option<PeerClient>,
    file: Option<SnapshotFile>,
    deadline: Duration,
    expires_at: OnceLock<Instant>,
    on_deadline: DeadlineAction,
}

/// Snapshot file and its contents, once read.
struct SnapshotFile {
    path: PathBuf,
    max_age: Duration,
    ranks: OnceCell<HashMap<WorkerRank, Arc<RankDump>>>,
}

/// Origin of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopyOrigin {
    Peer,
    File,
}

impl WarmStart {
    /// Creates the sources without connecting or reading.
    pub fn new(settings: &WarmStartConfig) -> anyhow::Result<Self> {
        let file = |path: &PathBuf| SnapshotFile {
            path: path.clone(),
            max_age: settings.max_snapshot_age.get(),
            ranks: OnceCell::new(),
        };
        Ok(Self {
            peer: settings
                .url
                .as_ref()
                .map(|from| PeerClient::new(from, settings))
                .transpose()?,
            file: settings.snapshot_file.as_ref().map(file),
            deadline: settings.timeout.get(),
            expires_at: OnceLock::new(),
            on_deadline: settings.on_timeout,
        })
    }

    /// Returns a copy of a rank's blocks, from the peer or else from the file. Returns `None` if
    /// there is no usable copy in time.
    pub async fn fetch(&self, rank: WorkerRank, reading: u64) -> Option<Arc<RankDump>> {
        let copy = self.fetch_from_peer(rank).await.map(Arc::new);
        if let Some(held) = copy.filter(|held| is_usable(rank, reading, held, CopyOrigin::Peer)) {
            return Some(held);
        }
        self.load_from_file(rank)
            .await
            .filter(|held| is_usable(rank, reading, held, CopyOrigin::File))
    }

    async fn fetch_from_peer(&self, rank: WorkerRank) -> Option<RankDump> {
        let peer = self.peer.as_ref()?;
        // The deadline starts with the first query.
        let until = *self
            .expires_at
            .get_or_init(|| Instant::now() + self.deadline);
        match peer
            .fetch_rank(
                rank,
                (self.on_deadline == DeadlineAction::Cold).then_some(until),
            )
            .await
        {
            Ok(held) => held,
            Err(problem) => {
                let problem = format!("{problem:#}");
                warn!(%rank, problem, "warm start: no copy from the peer");
                None
            }
        }
    }

    async fn load_from_file(&self, rank: WorkerRank) -> Option<Arc<RankDump>> {
        let SnapshotFile {
            path,
            max_age,
            ranks: found,
        } = self.file.as_ref()?;
        let read = async || {
            let path = path.clone();
            let max_age = *max_age;
            let read = tokio::task::spawn_blocking(move || {
                snapshot::read_snapshot(&path, max_age, SystemTime::now())
            })
            .await;
            read.unwrap_or_default()
        };
        // The contents stay in memory, because a source may be started more than once during
        // startup.
        found.get_or_init(read).await.get(&rank).cloned()
    }
}

/// Returns whether the event stream can continue from the position of the copy.
fn is_usable(rank: WorkerRank, reading: u64, held: &RankDump, from: CopyOrigin) -> bool {
    let Some(position) = held.position() else {
        info!(%rank, ?from, "warm start: copy has no event position");
        return false;
    };
    if position.reader_digest != reading {
        let reason = "warm start: copy rejected, it is of another engine, or used another block size or media tokens";
        warn!(%rank, ?from, "{reason}");
        return false;
    }
    info!(%rank, ?from, seq = position.seq, "warm start: restored");
    true
}
