//! Warm start of the prefix index and of the learned latency.
//!
//! A new process does not start with an empty index. Before it connects to an event source for the
//! first time, it copies the blocks of the rank and the position of the last applied event from a
//! ready warmroute process, or reads them from the snapshot file of the last shutdown. The event
//! stream then continues from that position.

pub mod config;
mod peer;
mod snapshot;

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use tokio::sync::OnceCell;
use tokio::time::Instant;
use tracing::{info, warn};

use config::{DeadlineAction, WarmStartConfig};
use peer::PeerClient;
pub use snapshot::{write_latency, write_snapshot};
use warmroute_core::index::dump::RankDump;
use warmroute_core::load::LatencySnapshot;
use warmroute_core::worker::WorkerRank;
use warmroute_engines::kv_events::SourceSpec;

/// Sources of copies for the warm start.
pub struct WarmStart {
    settings: WarmStartConfig,
    peer: Option<PeerClient>,
    /// Contents of the snapshot file after the first read.
    file_ranks: OnceCell<HashMap<WorkerRank, Arc<RankDump>>>,
    expires_at: OnceLock<Instant>,
}

impl WarmStart {
    /// Creates the sources. It does not connect to the peer or read the file.
    pub fn new(settings: &WarmStartConfig) -> anyhow::Result<Self> {
        Ok(Self {
            settings: settings.clone(),
            peer: settings
                .url
                .as_ref()
                .map(|url| PeerClient::new(url, settings))
                .transpose()?,
            file_ranks: OnceCell::new(),
            expires_at: OnceLock::new(),
        })
    }

    /// Returns a copy of the blocks of a rank, from the peer or otherwise from the file. Returns
    /// `None` if neither has a usable copy before the deadline.
    pub async fn fetch(&self, spec: &SourceSpec) -> Option<Arc<RankDump>> {
        let copy = self.fetch_from_peer(spec).await.map(Arc::new);
        if let Some(copy) = copy.filter(|copy| is_usable(spec, copy, "peer")) {
            return Some(copy);
        }
        self.load_from_file(spec.rank)
            .await
            .filter(|copy| is_usable(spec, copy, "file"))
    }

    async fn fetch_from_peer(&self, spec: &SourceSpec) -> Option<RankDump> {
        let peer = self.peer.as_ref()?;
        match peer.fetch_rank(spec.rank, self.peer_deadline()).await {
            Ok(copy) => copy,
            Err(problem) => {
                let problem = format!("{problem:#}");
                warn!(rank = %spec.rank, name = spec.worker_name, problem, "warm start: no copy from the peer");
                None
            }
        }
    }

    /// Returns the deadline of copies from the peer, or `None` if they wait without limit.
    fn peer_deadline(&self) -> Option<Instant> {
        // The time limit starts with the first query.
        let deadline = *self
            .expires_at
            .get_or_init(|| Instant::now() + self.settings.timeout.get());
        (self.settings.on_timeout == DeadlineAction::Cold).then_some(deadline)
    }

    /// Returns a copy of the learned latency, from the peer or otherwise from the file.
    pub async fn fetch_latency(&self) -> Option<LatencySnapshot> {
        if let Some(peer) = &self.peer {
            match peer.fetch_latency(self.peer_deadline()).await {
                Ok(latency) if !latency.is_empty() => return Some(latency),
                Ok(_) => info!("warm start: the peer has no learned latency"),
                Err(problem) => {
                    let problem = format!("{problem:#}");
                    warn!(problem, "warm start: no learned latency from the peer");
                }
            }
        }
        let path = self.settings.snapshot_file.clone()?;
        let read = move || snapshot::read_latency(&path, SystemTime::now());
        tokio::task::spawn_blocking(read).await.ok()?
    }

    async fn load_from_file(&self, rank: WorkerRank) -> Option<Arc<RankDump>> {
        let path = self.settings.snapshot_file.as_ref()?;
        let read = async || {
            let path = path.clone();
            let read = tokio::task::spawn_blocking(move || {
                snapshot::read_snapshot(&path, SystemTime::now())
            })
            .await;
            read.unwrap_or_default()
        };
        // The contents are kept in memory, because a source may be started more than once during
        // startup.
        self.file_ranks.get_or_init(read).await.get(&rank).cloned()
    }
}

/// Returns whether the event stream can continue from the position of the copy.
fn is_usable(spec: &SourceSpec, copy: &RankDump, from: &str) -> bool {
    let SourceSpec {
        rank, worker_name, ..
    } = spec;
    let Some(position) = copy.position() else {
        info!(%rank, name = worker_name, from, "warm start: copy has no event position");
        return false;
    };
    if position.reader_digest != spec.settings_digest() {
        let reason =
            "warm start: copy rejected: another engine, or different block size or media tokens";
        warn!(%rank, name = worker_name, from, "{reason}");
        return false;
    }
    info!(%rank, name = worker_name, from, seq = position.seq, "warm start: restored");
    true
}
