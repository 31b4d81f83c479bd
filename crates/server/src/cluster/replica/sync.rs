//! Event loop of replica sync.
//!
//! One task publishes local events in batches, applies the messages of peers, and handles timeouts.
//! It never blocks requests.

mod messages;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use parking_lot::Mutex;
use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tracing::{debug, warn};
use warmroute_core::fleet::FleetMember;
use warmroute_core::load::BookingEnd;
use warmroute_core::worker::WorkerRole;
use warmroute_metrics::Metrics;
use warmroute_runtime::lifecycle::{self, Readiness, ReadyGuard};

use super::arrival_rates::{ArrivalRates, BookingKind};
use super::config::ReplicasConfig;
use super::local_events::{LocalEventChannel, LocalEvents};
use super::mirror::LocalView;
use super::nats::NatsLink;
use super::outbox::ReplicaOutbox;
use super::peers::{PeerTable, PeerUpdate};
use super::{ReplicaEvent, ReplicaId};
use crate::dispatch::Dispatcher;
use crate::proto::replica::Batch;
use crate::tracking_hash::TrackingKey;

/// Maximum number of local events received at a time.
const MAX_EVENTS_PER_POLL: usize = 1024;

/// Number of heartbeats per lease. It is above one, so that a lost heartbeat does not end the
/// lease.
const HEARTBEATS_PER_LEASE: u32 = 4;

/// Time that peers have to respond to the hello message at startup.
const HELLO_TIMEOUT: Duration = Duration::from_millis(300);

/// Time for which events are collected into a batch.
const BATCH_INTERVAL: Duration = Duration::from_millis(1);

/// Interval between timeout checks.
const TICK_INTERVAL: Duration = Duration::from_millis(100);

/// Delay before the next attempt to create the NATS client after a failure.
const RETRY_DELAY: Duration = Duration::from_secs(5);

type OnFirstToken = Box<dyn Fn(&str) + Send + Sync>;

/// Replica sync of this process.
pub struct ReplicaSync {
    settings: ReplicasConfig,
    id: ReplicaId,
    dispatcher: Arc<Dispatcher>,
    metrics: Arc<Metrics>,
    state: Mutex<ReplicaState>,
    readiness: Readiness,
    /// Time at which the connection was established; `None` while disconnected.
    connected_since: Mutex<Option<Instant>>,
    link: Mutex<Option<Arc<NatsLink>>>,
    events: LocalEvents,
    first_token: OnceLock<OnFirstToken>,
    /// Unpublished local events. The running event loop holds the lock.
    events_rx: tokio::sync::Mutex<mpsc::UnboundedReceiver<ReplicaEvent>>,
    starting: Mutex<Option<StartupSync>>,
    started_at: Instant,
    rates: Mutex<(ArrivalRates, Instant)>,
    key: Option<TrackingKey>,
    /// Last logged error of the NATS client.
    last_error: Mutex<String>,
}

struct ReplicaState {
    outbox: ReplicaOutbox,
    peers: PeerTable,
    random: SmallRng,
}

/// Initial sync in progress.
struct StartupSync {
    guard: ReadyGuard,
    deadline: Instant,
    hello_sent_at: Option<Instant>,
}

/// Dependencies of [`ReplicaSync`].
pub struct ReplicaSyncParts {
    /// Dispatcher, whose router and sessions are synchronized.
    pub dispatcher: Arc<Dispatcher>,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// Startup step, held until the initial sync is complete.
    pub ready: ReadyGuard,
    /// Readiness of the process, which includes whether it is draining.
    pub readiness: Readiness,
    /// Key of `routing.block_hash`, if configured.
    pub key: Option<TrackingKey>,
    /// Queue of local changes.
    pub channel: LocalEventChannel,
}

impl ReplicaSync {
    /// Creates replica sync with the display name of this replica.
    pub fn new(settings: &ReplicasConfig, name: String, parts: ReplicaSyncParts) -> Arc<Self> {
        let ReplicaSyncParts {
            dispatcher,
            metrics,
            ready,
            readiness,
            key,
            channel,
        } = parts;
        metrics.replicas.connected.set(0);
        let LocalEventChannel { events, events_rx } = channel;
        let id = events.replica_id();
        let state = ReplicaState {
            outbox: ReplicaOutbox::new(id, name, key.clone()),
            peers: PeerTable::new(id, settings.lease.get()),
            random: SmallRng::seed_from_u64(rand::random()),
        };
        let starting = StartupSync {
            guard: ready,
            deadline: Instant::now() + settings.sync_timeout.get(),
            hello_sent_at: None,
        };
        Arc::new(Self {
            settings: settings.clone(),
            id,
            dispatcher,
            metrics,
            state: Mutex::new(state),
            readiness,
            connected_since: Mutex::new(None),
            link: Mutex::new(None),
            events,
            first_token: OnceLock::new(),
            events_rx: tokio::sync::Mutex::new(events_rx),
            starting: Mutex::new(Some(starting)),
            started_at: Instant::now(),
            rates: Mutex::new((ArrivalRates::default(), Instant::now())),
            last_error: Mutex::default(),
            key,
        })
    }

    /// Registers the listener for first tokens that other replicas publish. Only the first
    /// registration takes effect.
    pub fn on_first_token(&self, listener: impl Fn(&str) + Send + Sync + 'static) {
        self.first_token.set(Box::new(listener)).ok();
    }

    /// Publishes the first token of an exchange that this replica does not serve.
    pub fn publish_first_token(&self, name: &str) {
        self.events.record_first_token(name);
    }

    /// Returns the state for the status page.
    pub fn status(&self) -> Value {
        let state = self.state.lock();
        json!({
            "replica": self.id,
            "group": self.settings.group,
            "connected": self.is_connected(),
            "reservations": state.outbox.len(),
            "peers": state.peers.statuses(Instant::now()),
            "propagation_seconds": self.rates.lock().0.delay(),
            "unconfirmed_bookings": self.dispatcher.router().in_flight_bookings(),
        })
    }

    /// Runs the event loop.
    pub async fn run(self: Arc<Self>) -> anyhow::Result<()> {
        let mut events = self.events_rx.lock().await;
        let (link, mut subscriptions) = loop {
            match NatsLink::open(&self.settings, self.id).await {
                Ok(opened) => break opened,
                Err(error) => self.run_disconnected(&mut events, &error).await?,
            }
        };
        let link = Arc::new(link);
        *self.link.lock() = Some(link.clone());
        let mut heartbeats = lifecycle::ticks(self.settings.lease.get() / HEARTBEATS_PER_LEASE);
        let mut ticks = lifecycle::ticks(TICK_INTERVAL);
        let mut received = Vec::with_capacity(MAX_EVENTS_PER_POLL);
        let mut due = None::<tokio::time::Instant>;
        loop {
            let flush = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = flush => {
                    due = None;
                    self.publish_batches(&link).await;
                }
                count = events.recv_many(&mut received, MAX_EVENTS_PER_POLL) => {
                    if count == 0 {
                        bail!("the channel of local events is closed");
                    }
                    self.record(received.drain(..));
                    due.get_or_insert_with(|| tokio::time::Instant::now() + BATCH_INTERVAL);
                }
                () = self.events.session_updates.notified() => {
                    self.record_session_updates();
                    due.get_or_insert_with(|| tokio::time::Instant::now() + BATCH_INTERVAL);
                }
                message = subscriptions.next() => {
                    let message = message.context("the NATS subscription has ended")?;
                    self.on_message(&link, message).await;
                },
                _ = heartbeats.tick() => self.send_heartbeat(&link, Batch::default()).await,
                _ = ticks.tick() => {
                    let update = self.tick();
                    self.apply_update(&link, update).await;
                    if self.start_draining() {
                        self.send_heartbeat(&link, Batch::default()).await;
                    }
                    link.send_echo(self.started_at.elapsed().as_nanos() as u64).await;
                }
            }
        }
    }

    /// Runs without a NATS client until the next attempt to create one. Local events are recorded,
    /// and the resulting batches are dropped.
    async fn run_disconnected(
        &self,
        events: &mut mpsc::UnboundedReceiver<ReplicaEvent>,
        error: &anyhow::Error,
    ) -> anyhow::Result<()> {
        warn!(
            servers = self.nats_servers(),
            error = format!("{error:#}"),
            "NATS not usable; routing only considers bookings of this replica"
        );
        let deadline = tokio::time::Instant::now() + RETRY_DELAY;
        let mut ticks = lifecycle::ticks(TICK_INTERVAL);
        let mut received = Vec::with_capacity(MAX_EVENTS_PER_POLL);
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(deadline) => return Ok(()),
                count = events.recv_many(&mut received, MAX_EVENTS_PER_POLL) => {
                    if count == 0 {
                        bail!("the channel of local events is closed");
                    }
                    self.record(received.drain(..));
                }
                _ = ticks.tick() => {
                    self.record_session_updates();
                    drop(self.state.lock().outbox.take_batches());
                    drop(self.tick());
                }
            }
        }
    }

    fn is_connected(&self) -> bool {
        self.connected_since.lock().is_some()
    }

    /// Notifies the peers that this replica leaves. Call this after the last reservation is
    /// released.
    pub async fn leave(&self) {
        let link = self.link.lock().take();
        let Some(link) = link else { return };
        self.send_heartbeat(
            &link,
            Batch {
                leaving: true,
                ..Batch::default()
            },
        )
        .await;
        link.flush().await;
    }

    /// Records local events.
    fn record(&self, events: impl Iterator<Item = ReplicaEvent>) {
        let outbox = &mut self.state.lock().outbox;
        for event in events {
            if matches!(event, ReplicaEvent::Routed(_)) {
                self.events.gate.release();
            }
            outbox.record(&event);
        }
    }

    fn record_session_updates(&self) {
        let updates: Vec<_> = self
            .dispatcher
            .sessions()
            .into_iter()
            .flat_map(|sessions| sessions.take_updates())
            .collect();
        let stored = self.dispatcher.stored_responses().take_updates();
        let stored = stored.into_iter().map(ReplicaEvent::StoredResponse);
        self.record(updates.into_iter().map(ReplicaEvent::Session).chain(stored));
    }

    /// Handles timeouts.
    fn tick(&self) -> PeerUpdate {
        let update =
            self.update_state(|ReplicaState { peers, .. }, view, now| peers.tick(view, now));
        self.update_in_flight();
        self.adopt_sessions();
        let mut starting = self.starting.lock();
        let now = Instant::now();
        let is_complete = |starting: &mut StartupSync| {
            let is_hello_over = starting
                .hello_sent_at
                .is_some_and(|sent_at| now >= sent_at + HELLO_TIMEOUT);
            now >= starting.deadline || is_hello_over && self.state.lock().peers.are_synced()
        };
        let finished = starting.take_if(is_complete);
        drop(starting);
        if let Some(StartupSync {
            guard, deadline, ..
        }) = finished
        {
            if now >= deadline {
                guard.give_up()
            } else {
                guard.complete()
            }
        }
        update
    }

    /// Updates the router's estimate of bookings in flight.
    fn update_in_flight(&self) {
        let (rates, last_update) = &mut *self.rates.lock();
        let elapsed = std::mem::replace(last_update, Instant::now()).elapsed();
        if !self.is_connected() {
            rates.reset();
        }
        let router = self.dispatcher.router();
        let fleet = router.fleet();
        let ranks = |(model, end): &BookingKind| {
            let has_kind = |member: &&FleetMember| {
                member.worker.model == *model
                    && (member.worker.role == WorkerRole::Prefill)
                        == (*end == BookingEnd::FirstToken)
            };
            fleet.members().filter(has_kind).count()
        };
        router.set_in_flight_estimates(rates.estimate(elapsed, BATCH_INTERVAL, ranks));
    }

    fn update_state(
        &self,
        apply: impl FnOnce(&mut ReplicaState, &LocalView<'_>, Instant) -> PeerUpdate,
    ) -> PeerUpdate {
        let router = self.dispatcher.router();
        let fleet = router.fleet();
        let view = LocalView {
            load: router.load(),
            slot: &|rank| fleet.slot(rank),
            key: self.key.as_ref(),
            sessions: self.dispatcher.sessions().map(|sessions| &**sessions),
            stored_responses: Some(self.dispatcher.stored_responses()),
            on_overloaded: &|worker, time| router.mark_overloaded(worker, time),
            on_booked: &|booking| {
                if let Some(member) = fleet.slot(booking.rank).and_then(|slot| fleet.member(slot)) {
                    self.rates
                        .lock()
                        .0
                        .record_booking((member.worker.model.clone(), booking.end), booking);
                }
            },
            on_routed: &|routed| {
                router
                    .predictors()
                    .record_remote_route(&router.fleet(), routed)
            },
            on_first_token: &|name| {
                if let Some(listener) = self.first_token.get() {
                    listener(name);
                }
            },
        };
        let mut state = self.state.lock();
        let update = apply(&mut state, &view, Instant::now());
        self.metrics.replicas.peers.set(state.peers.len() as i64);
        self.events.gate.set_peers(state.peers.len());
        self.metrics
            .replicas
            .reservations
            .set(state.peers.reservations() as i64);
        update
    }

    /// Returns whether any connected peer is not draining and can take over the sessions of this
    /// replica.
    pub fn has_remaining_peers(&self) -> bool {
        self.is_connected() && self.state.lock().peers.remaining() > 0
    }

    /// Marks this replica as draining during shutdown. Returns true once, when the caller has to
    /// notify the peers.
    fn start_draining(&self) -> bool {
        self.readiness.is_draining() && self.state.lock().outbox.set_draining()
    }

    /// Adopts the sessions of departed replicas. After a reconnect, sessions are adopted only after
    /// a full lease, because the timeouts of peers are not detected earlier.
    fn adopt_sessions(&self) {
        let Some(sessions) = self.dispatcher.sessions() else {
            return;
        };
        if !self
            .connected_since
            .lock()
            .is_some_and(|since| since.elapsed() >= self.settings.lease.get())
        {
            return;
        }
        let peers = &mut self.state.lock().peers;
        if peers.should_adopt_sessions(Instant::now()) {
            let sessions = sessions.take_over_orphans(|router| peers.contains(ReplicaId(router)));
            debug!(sessions, "sessions of departed replicas adopted");
        }
    }
}
