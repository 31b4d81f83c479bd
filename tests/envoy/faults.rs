//! Failures of single components: a real Envoy with the shipped configuration, the real warmroute,
//! and simulated engines. Each process is killed, frozen, restarted, or receives invalid bytes. All
//! clients must receive complete responses, and no booking may remain.

pub(crate) mod bed;
mod cancels;
mod drain;
mod garbage;
mod load;
mod rolling;
