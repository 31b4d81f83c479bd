//! Metrics of the replicas.

use crate::*;

metrics! {
    /// Metrics of the replicas.
    ReplicaMetrics {
        /// 1 while the NATS connection to the other replicas is up, 0 otherwise. Absent if
        /// `replicas` is not configured
        "replica_connected" connected: OptionalGauge = OptionalGauge::default();
        /// Other replicas that sent a message within `replicas.lease`
        "replica_peers" peers: Gauge = Gauge::default();
        /// Reservations of other replicas that count as load here
        "replica_reservations" reservations: Gauge = Gauge::default();
        /// Messages between replicas by outcome: sent, lost (NATS was not connected), received, gap
        /// (messages were missed), snapshot_sent, snapshot_received, malformed
        "replica_messages" messages: Family<OutcomeLabel, Counter> = outcomes(&["sent", "lost", "received", "gap", "snapshot_sent", "snapshot_received", "malformed"]);
    }
}
