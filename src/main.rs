//! Binary of warmroute. Its implementation is in the library.
//!
//! Decision 0007.

use std::process::ExitCode;

/// Large bodies, their texts and tokens are allocated and freed on all threads. glibc's allocator
/// retains that memory per thread; jemalloc returns it within seconds.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    warmroute::cmd::run(warmroute::cmd::cli::Cli::from_env_args())
}
