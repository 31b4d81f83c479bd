//! Each shipped Envoy configuration with a real Envoy, the real warmroute, and workers that
//! identify themselves: exact routing, and the documented behaviour on failures.

pub(crate) mod bursts;
mod configurations;
mod probe;
mod uploads;
mod xds;
