//! Prefill and decode on two simulators with NIXL, connected over HTTP as a router connects
//! engines. The output must equal that of a single engine, and every mistake of a router must be
//! counted.

mod bed;
mod nixl;
