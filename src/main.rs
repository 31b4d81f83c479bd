//! The binary: everything it does is in the library.

use std::process::ExitCode;

/// Long bodies, their texts and tokens come and go on all threads. glibc's allocator keeps what they took on each of them, and
/// this one gives it back within seconds.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    warmroute::cmd::main(warmroute::cli::Cli::of_process())
}
