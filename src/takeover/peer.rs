//! Another warmroute that is asked for what it knows.

use std::io::{BufReader, Read as _};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use futures_util::StreamExt as _;
use tokio::sync::Semaphore;
use tokio::time::sleep;
use tokio_util::io::{StreamReader, SyncIoBridge};
use tonic::Code;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tracing::debug;

use super::config::TakeoverConfig;
use crate::api::pb;
use crate::api::pb::router_client::RouterClient;
use crate::index::dump::{RankDump, Reader};
use crate::worker::WorkerRank;

/// Copies at a time; whoever is asked allows four, to all that ask.
const AT_ONCE: usize = 2;

/// Most bytes of the copy of one rank.
const MOST_BYTES: u64 = 16 << 30;

/// Bytes read ahead.
const AHEAD: usize = 256 * 1024;

/// How long it is waited before it is tried again.
const PAUSE: Duration = Duration::from_millis(200);

/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_secs(2);

/// The way to it.
pub(super) struct Peer {
    client: RouterClient<Channel>,
    turns: Semaphore,
}

impl Peer {
    /// Nothing is asked yet.
    pub(super) fn new(from: &str, settings: &TakeoverConfig) -> anyhow::Result<Self> {
        let mut endpoint = Endpoint::from_shared(from.to_owned())?.connect_timeout(CONNECT);
        if from.starts_with("https://") {
            endpoint = endpoint.tls_config(tls(settings)?)?;
        }
        let client = RouterClient::new(endpoint.connect_lazy());
        Ok(Self { client, turns: Semaphore::new(AT_ONCE) })
    }

    /// What it knows of a rank; `None` where it listens to no such rank. Asks for as long as there is no answer.
    pub(super) async fn ask(&self, rank: WorkerRank) -> Option<RankDump> {
        let _turn = self.turns.acquire().await.ok()?;
        loop {
            match self.try_copy(rank).await {
                Ok(held) => return held,
                Err(problem) => debug!(%rank, problem = format!("{problem:#}"), "no copy yet"),
            }
            sleep(PAUSE).await;
        }
    }

    async fn try_copy(&self, rank: WorkerRank) -> anyhow::Result<Option<RankDump>> {
        let worker = pb::WorkerRank { worker_id: rank.worker.0, dp_rank: rank.rank.0 };
        let asked = pb::CopyRankRequest { worker: Some(worker) };
        let pieces = match self.client.clone().copy_rank(asked).await {
            Ok(answer) => answer.into_inner(),
            Err(status) if status.code() == Code::NotFound => return Ok(None),
            Err(status) => bail!(status),
        };
        let pieces = pieces.map(|piece| piece.map(|piece| Bytes::from(piece.piece)).map_err(std::io::Error::other));
        let bytes = SyncIoBridge::new(StreamReader::new(pieces));
        // Never all of the bytes are here: they become rows as they come.
        let read = move || Reader::new(BufReader::with_capacity(AHEAD, bytes.take(MOST_BYTES)))?.single();
        let held = tokio::task::spawn_blocking(read).await??;
        ensure!(held.rank() == rank, "the copy is of another rank");
        Ok(Some(held))
    }
}

fn tls(settings: &TakeoverConfig) -> anyhow::Result<ClientTlsConfig> {
    let read = |file: &PathBuf| std::fs::read(file).with_context(|| format!("cannot read {}", file.display()));
    let mut tls = ClientTlsConfig::new();
    tls = match &settings.ca_file {
        Some(file) => tls.ca_certificate(Certificate::from_pem(read(file)?)),
        None => tls.with_enabled_roots(),
    };
    if let (Some(cert), Some(key)) = (&settings.cert_file, &settings.key_file) {
        tls = tls.identity(Identity::from_pem(read(cert)?, read(key)?));
    }
    Ok(tls)
}
