//! What clients see when a part fails: a real Envoy with the shipped configuration, the real warmroute, simulated engines,
//! each a process that is killed, frozen, restarted or abused here. The claim is always the same: every client gets its
//! whole answer, and at the end nothing is booked.

#![expect(clippy::unwrap_used, reason = "a test ends where something fails")]

#[path = "envoy_faults/bed.rs"]
mod bed;
#[path = "envoy_faults/cancels.rs"]
mod cancels;
#[path = "envoy_faults/drain.rs"]
mod drain;
#[path = "envoy_faults/engines.rs"]
mod engines;
#[path = "envoy_faults/garbage.rs"]
mod garbage;
#[path = "envoy_faults/load.rs"]
mod load;
#[path = "envoy_faults/rolling.rs"]
mod rolling;
#[path = "envoy_faults/router.rs"]
mod router;
#[path = "../examples/support/mod.rs"]
mod support;
