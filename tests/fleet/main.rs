//! Tests of worker discovery: Kubernetes, DNS, the shipped manifests, and the gateway conformance
//! fixture.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod conformance;
mod dns;
mod kubernetes;
mod manifests;
#[path = "../support/mod.rs"]
mod support;
