//! Handles received messages and connection events, and publishes batches, heartbeats and
//! snapshots.

use std::time::{Duration, Instant};

use prost::Message as _;
use tracing::{debug, info, warn};
use warmroute_metrics::count_outcome;

use super::{ReplicaState, ReplicaSync};
use crate::cluster::replica::nats::{NatsLink, NatsMessage};
use crate::cluster::replica::peers::{PeerAction, PeerChange, PeerUpdate};
use crate::cluster::replica::{ReplicaEvent, ReplicaId};
use crate::proto::replica::{Batch, SnapshotPart};

/// Error of the NATS client for a server that it cannot connect to.
const UNREACHABLE: &str = "client error: nats: IO error";

impl ReplicaSync {
    /// Handles a received message.
    pub(super) async fn on_message(&self, link: &NatsLink, message: NatsMessage) {
        match message {
            NatsMessage::Connection(state) => self.on_connection_event(link, &state).await,
            NatsMessage::Echo(message) => {
                let sent = message.payload[..]
                    .try_into()
                    .map(u64::from_be_bytes)
                    .map(Duration::from_nanos);
                let delay = sent
                    .ok()
                    .and_then(|sent| self.started_at.elapsed().checked_sub(sent));
                if let Some(delay) = delay {
                    self.rates.lock().0.record_delay(delay);
                }
            }
            NatsMessage::Batch(message) if link.is_own(&message.subject) => {}
            NatsMessage::Batch(message) => match Batch::decode(message.payload) {
                Ok(batch) if !link.is_from(&message.subject, ReplicaId(batch.replica)) => {
                    self.count_message("malformed")
                }
                Ok(batch) => {
                    self.count_message("received");
                    let update =
                        self.update_state(|ReplicaState { peers, random, .. }, view, now| {
                            peers.on_batch(batch, view, now, random)
                        });
                    self.apply_update(link, update).await;
                }
                Err(error) => self.reject_message(&error),
            },
            NatsMessage::SnapshotPart(message) => match SnapshotPart::decode(message.payload) {
                Ok(part) => {
                    let update =
                        self.update_state(|ReplicaState { peers, random, .. }, view, now| {
                            peers.on_snapshot_part(part, view, now, random)
                        });
                    self.apply_update(link, update).await;
                }
                Err(error) => self.reject_message(&error),
            },
            NatsMessage::SnapshotRequest(message) => {
                if let Some(reply) = message.reply {
                    self.send_snapshot(link, reply.to_string()).await;
                }
            }
        }
    }

    /// Sends a heartbeat with the `hello` and `leaving` flags of `flags`. Pending batches are
    /// published first, because the heartbeat contains the number of the last batch.
    pub(super) async fn send_heartbeat(&self, link: &NatsLink, flags: Batch) {
        self.publish_batches(link).await;
        let heartbeat = self.state.lock().outbox.heartbeat();
        self.publish_batch(
            link,
            &Batch {
                hello: flags.hello,
                leaving: flags.leaving,
                ..heartbeat
            },
        )
        .await;
    }

    /// Publishes the pending batches.
    pub(super) async fn publish_batches(&self, link: &NatsLink) {
        let batches = self.state.lock().outbox.take_batches();
        for batch in &batches {
            self.publish_batch(link, batch).await;
        }
    }

    async fn publish_batch(&self, link: &NatsLink, batch: &Batch) {
        let sent = link.publish(batch).await;
        self.count_message(if sent { "sent" } else { "lost" });
    }

    /// Sends a snapshot to a peer.
    async fn send_snapshot(&self, link: &NatsLink, to: String) {
        let mut sessions = self
            .dispatcher
            .sessions()
            .map(|sessions| sessions.snapshot_updates())
            .unwrap_or_default();
        let mut stored = self.dispatcher.stored_responses().snapshot_updates();
        let marks = self.dispatcher.router().overload_marks();
        self.publish_batches(link).await;
        let parts = {
            let ReplicaState { outbox, peers, .. } = &*self.state.lock();
            // The other peers publish their own bindings.
            for updates in [&mut sessions, &mut stored] {
                updates.retain(|update| !peers.contains(ReplicaId(update.router())));
            }
            let marks = marks
                .into_iter()
                .map(|(worker, time)| ReplicaEvent::Overloaded(worker, time));
            outbox.snapshot(
                &sessions
                    .into_iter()
                    .map(ReplicaEvent::Session)
                    .chain(stored.into_iter().map(ReplicaEvent::StoredResponse))
                    .chain(marks)
                    .collect::<Vec<_>>(),
            )
        };
        for part in &parts {
            if !link.reply(to.clone(), part).await {
                return;
            }
        }
        self.count_message("snapshot_sent");
    }

    /// Handles a connection event.
    async fn on_connection_event(&self, link: &NatsLink, event: &async_nats::Event) {
        let was_up = self.is_connected();
        let is_up = match event {
            async_nats::Event::Connected => true,
            async_nats::Event::Disconnected | async_nats::Event::Closed => false,
            async_nats::Event::ServerError(_) | async_nats::Event::ClientError(_) => {
                self.log_nats_error(&event.to_string());
                was_up
            }
            _ => was_up,
        };
        if is_up != was_up {
            *self.connected_since.lock() = is_up.then(Instant::now);
        }
        self.metrics.replicas.connected.set(i64::from(is_up));
        match (was_up, is_up) {
            (false, true) => {
                info!(replica = %self.id, group = self.settings.group, servers = self.nats_servers(), "NATS connected")
            }
            (true, false) => {
                warn!(
                    servers = self.nats_servers(),
                    "NATS connection lost; routing only considers bookings of this replica until \
                    it reconnects"
                );
                // The failing attempts to reconnect follow from the loss.
                UNREACHABLE.clone_into(&mut self.last_error.lock());
            }
            _ => debug!(%event, "NATS connection event"),
        }
        if !matches!(event, async_nats::Event::Connected) {
            return;
        }
        self.last_error.lock().clear();
        self.state
            .lock()
            .outbox
            .set_max_bytes(link.max_message_bytes());
        self.send_heartbeat(
            link,
            Batch {
                hello: true,
                ..Batch::default()
            },
        )
        .await;
        if let Some(starting) = &mut *self.starting.lock() {
            starting.hello_sent_at.get_or_insert_with(Instant::now);
        }
    }

    /// Logs a NATS error, unless it equals the last one.
    fn log_nats_error(&self, problem: &str) {
        let mut last_error = self.last_error.lock();
        if *last_error != problem {
            warn!(
                servers = self.nats_servers(),
                problem, "NATS client reported an error"
            );
            problem.clone_into(&mut last_error);
        }
    }

    /// Returns the configured servers for logs.
    pub(super) fn nats_servers(&self) -> String {
        self.settings.nats.servers.join(", ")
    }

    /// Logs the changes and performs the actions.
    pub(super) async fn apply_update(&self, link: &NatsLink, update: PeerUpdate) {
        for change in update.changes {
            match change {
                PeerChange::Joined(peer, name) => info!(%peer, name, "replica joined"),
                PeerChange::Left(peer, name) => info!(%peer, name, "replica left"),
                PeerChange::Synced(peer, reservations) => {
                    self.count_message("snapshot_received");
                    debug!(%peer, reservations, "replica synced");
                }
                PeerChange::Gap(peer) => {
                    self.count_message("gap");
                    debug!(%peer, "replica messages lost; requesting a snapshot");
                }
                PeerChange::TimedOut(peer, name, reservations) => {
                    warn!(%peer, name, reservations, "replica timed out; its reservations are dropped");
                }
            }
        }
        for action in update.actions {
            match action {
                PeerAction::FetchSnapshot(peer) => _ = link.request_snapshot(peer).await,
                PeerAction::SendHeartbeat => self.send_heartbeat(link, Batch::default()).await,
            }
        }
    }

    fn reject_message(&self, error: &prost::DecodeError) {
        self.count_message("malformed");
        debug!(%error, "malformed message received");
    }

    fn count_message(&self, outcome: &'static str) {
        count_outcome(&self.metrics.replicas.messages, outcome);
    }
}
