//! Client of remote index servers. It selects the servers in turn. If a response is slow, it sends
//! a second query (a hedge) to another server. The first valid response is used, and the other
//! pending queries are dropped, which cancels them. No query exceeds the deadline.
//!
//! Decision 0019.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{info, warn};
use warmroute_core::block::BlockHashes;
use warmroute_core::router::{RemoteAnswer, RemoteOverlaps, RemoteRanks};
use warmroute_core::worker::ModelName;
use warmroute_metrics::{Metrics, count_outcome};

use super::config::RemoteIndexConfig;
use super::server_connection::{QueryError, ServerConnection, is_rejection};
use super::server_pool::{PoolChange, QueryOutcome, ServerPick, ServerPool};
use super::wire;
use crate::proto::index as pb;

/// Timeout of a probe, and interval between checks for due probes.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
const PROBE_INTERVAL: Duration = Duration::from_millis(100);

/// Share of the timeout after which a second server is queried.
const HEDGE_SHARE: f64 = 0.3;

/// Maximum delay after which a second server is queried.
const MAX_HEDGE_DELAY: Duration = Duration::from_millis(100);

/// Maximum number of concurrent queries. Beyond it, requests are routed without a query.
pub(super) const MAX_CONCURRENCY: usize = 256;

/// A query for the cached blocks of prompts.
#[derive(Clone, Copy, Debug)]
pub struct OverlapQuery<'a> {
    /// Model name; `None` selects the only model of the server.
    pub model: Option<&'a ModelName>,
    /// Hash of a fixed prompt, to compare the hashing of client and server.
    pub hashing: u64,
    /// Block hashes of the prompts, all with the same block size.
    pub prompts: &'a [BlockHashes],
}

/// Client of all remote index servers.
pub struct RemoteIndexClient {
    servers: Vec<ServerConnection>,
    pool: Mutex<ServerPool>,
    pub(super) permits: Semaphore,
    deadline: Duration,
    metrics: Arc<Metrics>,
    /// Set while no server responds.
    is_unreachable: AtomicBool,
}

impl RemoteIndexClient {
    /// Creates a client. It connects to a server with the first query or probe.
    pub fn new(settings: &RemoteIndexConfig, metrics: Arc<Metrics>) -> anyhow::Result<Self> {
        let servers: Vec<ServerConnection> = settings
            .servers
            .iter()
            .map(|url| ServerConnection::new(url, settings))
            .collect::<anyhow::Result<_>>()?;
        Ok(Self {
            pool: Mutex::new(ServerPool::new(servers.len())),
            servers,
            permits: Semaphore::new(MAX_CONCURRENCY),
            deadline: settings.timeout.get(),
            metrics,
            is_unreachable: AtomicBool::new(false),
        })
    }

    /// Queries the cached blocks of prompts.
    pub async fn query(&self, query: OverlapQuery<'_>) -> RemoteOverlaps {
        let Some(block_size) = query
            .prompts
            .first()
            .map(|prompt| prompt.block_size().0.get())
        else {
            return RemoteOverlaps::NotQueried;
        };
        let started = Instant::now();
        let answer = match self.permits.try_acquire() {
            _ if query.prompts.len() > wire::MAX_PROMPTS => Err(QueryError::Refused),
            Ok(_permit) => self.query_hedged(query, block_size, started).await,
            Err(_) => Err(QueryError::Busy),
        };
        let outcome = match &answer {
            Ok((_, false)) => "answered",
            Ok((_, true)) => "hedge_answered",
            Err(error) => error.as_str(),
        };
        count_outcome(&self.metrics.index.remote_queries, outcome);
        self.metrics
            .index
            .remote_query_duration_seconds
            .observe(started.elapsed().as_secs_f64());
        match answer {
            Ok((answer, _)) => RemoteOverlaps::Received(Arc::new(answer)),
            Err(_) => RemoteOverlaps::Unavailable(self.last_known_ranks()),
        }
    }

    /// Returns the last state of the worker ranks from any server. Only the block sizes are used,
    /// and these are the same on all servers.
    fn last_known_ranks(&self) -> Arc<RemoteRanks> {
        let last_ranks = self
            .servers
            .iter()
            .find_map(|server| server.last_ranks.load_full());
        last_ranks
            .map(|last_ranks| last_ranks.ranks.clone())
            .unwrap_or_default()
    }

    /// Returns the first valid response, and whether it is from a hedge.
    async fn query_hedged(
        &self,
        query: OverlapQuery<'_>,
        block_size: u32,
        started: Instant,
    ) -> Result<(RemoteAnswer, bool), QueryError> {
        let deadline = sleep_until(started + self.deadline);
        let hedge_delay = self.deadline.mul_f64(HEDGE_SHARE).min(MAX_HEDGE_DELAY);
        let hedge = sleep_until(started + hedge_delay);
        tokio::pin!(deadline, hedge);
        let mut hedged_query = HedgedQuery::new(self);
        let mut in_flight = FuturesUnordered::new();
        let begin = |pick: ServerPick| self.send_query(pick, query, block_size);
        in_flight.push(begin(
            hedged_query
                .start(ServerPool::pick_first)
                .ok_or(QueryError::NoServer)?,
        ));
        let mut may_hedge = true;
        loop {
            tokio::select! {
                // A response that has already arrived is used even if the deadline has passed.
                biased;
                Some((pick, answer)) = in_flight.next() => match answer {
                    Ok(answer) => return Ok((answer, hedged_query.finish_with(pick))),
                    Err(error) => match hedged_query.start_retry(pick, error) {
                        Some(next) => in_flight.push(begin(next)),
                        None if in_flight.is_empty() => return Err(error),
                        None => {}
                    },
                },
                () = &mut deadline => {
                    hedged_query.time_out();
                    return Err(QueryError::TimedOut);
                }
                () = &mut hedge, if may_hedge => {
                    may_hedge = false;
                    in_flight.extend(hedged_query.start_hedge().map(begin));
                }
            }
        }
    }

    /// Sends a query to one server.
    async fn send_query(
        &self,
        pick: ServerPick,
        query: OverlapQuery<'_>,
        block_size: u32,
    ) -> (ServerPick, Result<RemoteAnswer, QueryError>) {
        let server = &self.servers[pick.server];
        let last_ranks = server.last_ranks.load_full();
        let request = pb::OverlapsRequest {
            model: query
                .model
                .map(|model| model.as_str().to_owned())
                .unwrap_or_default(),
            block_size,
            hashing: query.hashing,
            known_ranks: last_ranks
                .as_ref()
                .map_or(0, |last_ranks| last_ranks.version),
            prompts: wire::encode_prompts(query.prompts),
        };
        let answer = match server.client.clone().overlaps(request).await {
            Ok(answer) => server
                .parse_answer(&answer.into_inner(), last_ranks, query.prompts)
                .map_err(|error| {
                    warn!(server = server.url, %error, "invalid response from remote index server");
                    QueryError::Failed
                }),
            Err(status) => Err(server.classify_status(&status)),
        };
        (pick, answer)
    }

    /// Connects to all servers, and then probes the ejected servers until it is dropped. A
    /// connection is established only while a call waits for it, and the timeout of a request is
    /// too short for that.
    pub async fn run_probes(&self) -> Infallible {
        let all = (0..self.servers.len()).map(|server| {
            self.probe(ServerPick {
                server,
                is_probe: false,
            })
        });
        futures_util::future::join_all(all).await;
        let mut probes = FuturesUnordered::new();
        let mut interval = tokio::time::interval(PROBE_INTERVAL);
        loop {
            tokio::select! {
                _ = interval.tick() => {
                    while let Some(pick) = self.next_probe() {
                        probes.push(self.probe(pick));
                    }
                }
                Some(()) = probes.next() => {}
            }
        }
    }

    fn next_probe(&self) -> Option<ServerPick> {
        self.pool.lock().pick_probe(Instant::now().into_std())
    }

    /// Probes a server with an invalid query, which a healthy server refuses.
    async fn probe(&self, pick: ServerPick) {
        let mut probe_query = HedgedQuery::new(self);
        probe_query.pending.push(pick);
        let mut client = self.servers[pick.server].client.clone();
        let outcome = match timeout(
            PROBE_TIMEOUT,
            client.overlaps(pb::OverlapsRequest::default()),
        )
        .await
        {
            Err(_) => QueryOutcome::TimedOut,
            Ok(Err(status)) if !is_rejection(status.code()) => QueryOutcome::Failed,
            Ok(_) => QueryOutcome::Answered,
        };
        probe_query.finish(pick, outcome);
    }

    fn log_change(&self, change: Option<PoolChange>) {
        let url = |server: usize| self.servers[server].url.as_str();
        match change {
            None => {}
            Some(PoolChange::Ejected(server)) => {
                warn!(server = url(server), "remote index server ejected");
            }
            Some(PoolChange::AllEjected(server)) => {
                self.is_unreachable.store(true, Ordering::Relaxed);
                warn!(
                    server = url(server),
                    "all remote index servers ejected; routing by predictions"
                );
            }
            Some(PoolChange::Readmitted(server)) => {
                let server = url(server);
                if self.is_unreachable.swap(false, Ordering::Relaxed) {
                    info!(server, "remote index server readmitted; queries resume");
                } else {
                    info!(server, "remote index server readmitted");
                }
            }
        }
    }

    /// Returns the status of all servers for the status page.
    pub fn status(&self) -> Value {
        let pool = self.pool.lock();
        let status = |(index, server): (usize, &ServerConnection)| {
            let last_ranks = server.last_ranks.load();
            let ranks = last_ranks
                .as_ref()
                .map_or(0, |last_ranks| last_ranks.ranks.rows().len());
            json!({"server": server.url, "available": pool.is_healthy(index), "ranks": ranks})
        };
        json!(
            self.servers
                .iter()
                .enumerate()
                .map(status)
                .collect::<Vec<_>>()
        )
    }
}

/// A query with its hedges and retries. Queries that are pending on drop count as cancelled,
/// because the request was cancelled.
struct HedgedQuery<'a> {
    client: &'a RemoteIndexClient,
    queried: Vec<ServerPick>,
    pending: Vec<ServerPick>,
}

impl<'a> HedgedQuery<'a> {
    fn new(client: &'a RemoteIndexClient) -> Self {
        Self {
            client,
            queried: Vec::new(),
            pending: Vec::new(),
        }
    }

    fn start(
        &mut self,
        pick_server: impl FnOnce(&mut ServerPool) -> Option<ServerPick>,
    ) -> Option<ServerPick> {
        let pick = pick_server(&mut self.client.pool.lock())?;
        self.queried.push(pick);
        self.pending.push(pick);
        Some(pick)
    }

    fn start_hedge(&mut self) -> Option<ServerPick> {
        let queried = self.queried.clone();
        self.start(|servers| servers.pick_hedge(&queried))
    }

    /// Records a failure and starts a query to another server.
    fn start_retry(&mut self, pick: ServerPick, error: QueryError) -> Option<ServerPick> {
        // A server that refuses a query is healthy.
        self.finish(
            pick,
            if error == QueryError::Refused {
                QueryOutcome::Answered
            } else {
                QueryOutcome::Failed
            },
        );
        let queried = self.queried.clone();
        self.start(|servers| servers.pick_retry(&queried))
    }

    /// Records a response, and the pending queries to servers that were queried earlier as slow.
    /// Returns true if the response is from a hedge.
    fn finish_with(&mut self, winner: ServerPick) -> bool {
        self.finish(winner, QueryOutcome::Answered);
        let earlier = self.queried.iter().take_while(|pick| **pick != winner);
        let slow: Vec<ServerPick> = earlier
            .filter(|pick| self.pending.contains(pick))
            .copied()
            .collect();
        slow.iter()
            .for_each(|pick| self.finish(*pick, QueryOutcome::TimedOut));
        !slow.is_empty()
    }

    fn time_out(&mut self) {
        std::mem::take(&mut self.pending)
            .into_iter()
            .for_each(|pick| self.record(pick, QueryOutcome::TimedOut));
    }

    fn finish(&mut self, pick: ServerPick, outcome: QueryOutcome) {
        self.pending.retain(|pending| *pending != pick);
        self.record(pick, outcome);
    }

    fn record(&self, pick: ServerPick, outcome: QueryOutcome) {
        let change =
            self.client
                .pool
                .lock()
                .record_outcome(pick, outcome, Instant::now().into_std());
        self.client.log_change(change);
    }
}

impl Drop for HedgedQuery<'_> {
    fn drop(&mut self) {
        std::mem::take(&mut self.pending)
            .into_iter()
            .for_each(|pick| self.record(pick, QueryOutcome::Cancelled));
    }
}
