//! The workers of the deployment: their discovery, and their publication to Envoy.

pub mod discovery;
pub mod xds;
