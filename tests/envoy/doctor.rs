//! End-to-end tests of `warmroute doctor`: healthy deployments, and deployments with one fault
//! each. Engines are simulated, Envoy is real.

mod bed;
mod engines;
mod envoys;
mod gateways;
mod healthy;
mod ours;
mod stalled;
