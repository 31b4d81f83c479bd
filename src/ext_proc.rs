//! The Envoy side.
