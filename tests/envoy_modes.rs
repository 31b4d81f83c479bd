//! Every way in which Envoy can show bodies, by a real Envoy and a real warmroute: what workers receive, what clients get
//! when warmroute fails, how long a stream lives, and what a gateway says beside the headers. One Envoy has many listeners
//! here, the shipped one with what a case changes.

#![expect(clippy::unwrap_used, reason = "a test ends where something fails")]

#[path = "../examples/support/mod.rs"]
mod support;

#[expect(dead_code, reason = "shared with tests that need more of it")]
#[path = "routing/bed.rs"]
mod bed;
#[path = "envoy_modes/client.rs"]
mod client;
#[path = "envoy_modes/failures.rs"]
mod failures;
#[path = "envoy_modes/gateway.rs"]
mod gateway;
#[path = "envoy_modes/held.rs"]
mod held;
#[path = "envoy_modes/hints.rs"]
mod hints;
#[path = "envoy_modes/lives.rs"]
mod lives;
#[path = "envoy_e2e/openmetrics.rs"]
mod openmetrics;
#[path = "envoy_modes/refusals.rs"]
mod refusals;
#[path = "envoy_modes/renamed.rs"]
mod renamed;
#[path = "envoy_modes/uploads.rs"]
mod uploads;
#[path = "envoy_modes/worker.rs"]
mod worker;
