//! Engine simulators connected over HTTP, in the way a router connects real engines: prefill here,
//! decode there. The output must equal that of a single engine, and every mistake of a router must
//! be counted.

mod bed;
mod nixl;
mod sglang;
mod trtllm;
