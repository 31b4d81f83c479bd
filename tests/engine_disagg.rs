//! Simulators against one another, over HTTP, the way a router makes real engines work together: prefill here, decode
//! there. What must come out is what one engine would have said alone, and everything that a router can do wrong must be
//! counted.

#![expect(
    clippy::unwrap_used,
    reason = "in a test, and in what helps it, a failure is a failed test"
)]

#[path = "engine_disagg/bed.rs"]
mod bed;
#[path = "engine_disagg/nixl.rs"]
mod nixl;
#[path = "engine_disagg/sglang.rs"]
mod sglang;
#[path = "engine_disagg/trtllm.rs"]
mod trtllm;
