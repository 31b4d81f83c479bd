//! Failures of single components: a real Envoy with the shipped configuration, the real warmroute, and
//! simulated engines, each a process that is killed, frozen, restarted or sent garbage. In each case,
//! all clients receive their whole response, and no booking remains.

mod bed;
mod cancels;
mod drain;
mod engines;
mod garbage;
mod load;
mod rolling;
mod router;
