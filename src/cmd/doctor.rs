//! `warmroute doctor`: is this deployment as its configuration says? Looked at from outside, as a request would meet it:
//! the engines, their events, Envoy, and the machine. Facts are gathered first and judged by pure functions.

pub mod envoy;
pub mod finding;
