//! Telling Envoy who the workers are.
