//! Prefill and decode on different engine simulators, connected over HTTP as a router connects real
//! engines. The output must equal that of a single engine, and every mistake of a router must be
//! counted.

mod bed;
mod nixl;
mod sglang;
mod trtllm;
