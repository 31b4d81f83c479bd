//! Tests with a real Envoy: deployments of simulated engines with the real warmroute, and the
//! programs that start them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

/// Declares long tests of one call each. Each test prints its name if it fails.
macro_rules! long_tests {
    ($($name:ident: $test:expr),+ $(,)?) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        #[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
        async fn $name() {
            $test.await;
        }
    )+};
}

mod config;
mod doctor;
mod e2e;
mod faults;
mod gateways;
mod load;
mod modes;
mod quickstart;
mod remote_index;
mod routing;
mod shipped;
#[path = "../support/mod.rs"]
mod support;
mod warm_start;
