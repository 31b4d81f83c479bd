//! Facts about the KV events of a rank.

use warmroute_core::worker::{DpRank, EventSource, SocketAttach, Worker};
use warmroute_doctor::engine::facts::{AttachOutcome, RankFacts};
use warmroute_engines::engine_client::EngineUrl;
use warmroute_engines::kv_events::event_probe::{self, EventProbe};

use super::FactCollector;

impl FactCollector<'_> {
    /// Returns the facts about a rank. If `names_rank` is true, requests name their rank.
    pub(super) async fn collect_rank(
        &self,
        engine: &EngineUrl,
        worker: &Worker,
        rank: DpRank,
        names_rank: bool,
    ) -> RankFacts {
        let source = worker.event_source(rank).cloned();
        let mut socket = None;
        let mut attached = None;
        if let Some(source) = &source {
            let (probe, outcome) = self.attach(worker, source).await;
            (socket, attached) = (probe, Some(outcome));
        }
        let mut received = Vec::new();
        let mut canary = None;
        // A worker that runs requests in pairs rejects a single one.
        if self.sends_canaries && !worker.draining && !self.uses_bootstrap(worker) {
            let sent =
                self.send_canary(engine, worker, names_rank.then_some(rank), socket.as_mut());
            let (answer, messages) = sent.await;
            (canary, received) = (Some(answer), messages);
        }
        let last = received.iter().map(|received| received.seq).max();
        let replay = match source.as_ref().and_then(|source| source.replay.as_deref()) {
            // The replay starts after the newest batch, because only the response itself is
            // checked.
            Some(endpoint) => Some(
                event_probe::count_replayed_batches(
                    endpoint,
                    last.unwrap_or(u64::from(u32::MAX)),
                    self.max_message(),
                )
                .await,
            ),
            None => None,
        };
        RankFacts {
            rank,
            source,
            attachment: attached,
            messages: received,
            canary,
            replay,
            listen_timeout: self.timeout,
        }
    }

    /// Returns the message size limit of a running warmroute.
    fn max_message(&self) -> usize {
        self.config.engines.kv_events.max_message_size.bytes()
    }

    /// Attaches to the event source as configured. If that fails, tries the opposite direction to
    /// find the cause.
    pub(super) async fn attach(
        &self,
        worker: &Worker,
        source: &EventSource,
    ) -> (Option<EventProbe>, AttachOutcome) {
        let opened = EventProbe::open(&source.endpoint, source.attach, self.max_message()).await;
        match (source.attach, opened) {
            (SocketAttach::Connect, Ok(socket)) => {
                (Some(socket), AttachOutcome::Attached(SocketAttach::Connect))
            }
            (SocketAttach::Connect, Err(reason)) => (None, AttachOutcome::ConnectRefused(reason)),
            (SocketAttach::Bind, Err(reason)) => {
                let local_endpoint = source
                    .endpoint
                    .replacen("//*:", "//127.0.0.1:", 1)
                    .replacen("//0.0.0.0:", "//127.0.0.1:", 1);
                match EventProbe::open(&local_endpoint, SocketAttach::Connect, self.max_message())
                    .await
                {
                    Ok(socket) => (Some(socket), AttachOutcome::EngineMayBind(local_endpoint)),
                    Err(_) => (None, AttachOutcome::BindRefused(reason)),
                }
            }
            (SocketAttach::Bind, Ok(mut socket)) => {
                if socket.wait_for_publisher(self.timeout).await {
                    return (Some(socket), AttachOutcome::Attached(SocketAttach::Bind));
                }
                drop(socket);
                let port = source.endpoint.rsplit(':').next().unwrap_or_default();
                let engine_endpoint = format!("tcp://{}:{port}", worker.endpoint.0.ip());
                match EventProbe::open(&engine_endpoint, SocketAttach::Connect, self.max_message())
                    .await
                {
                    Ok(socket) => (Some(socket), AttachOutcome::EngineBinds(engine_endpoint)),
                    Err(_) => (None, AttachOutcome::NoPeer),
                }
            }
        }
    }
}
