//! The other programs of a measurement. Each runs in a process of the same executable. The first
//! argument selects the program.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser as _;

use crate::bare_server::{self, BareServerArgs};
use crate::instant_engines::{self, InstantEngineArgs};

/// First argument of the engines.
pub(crate) const AS_INSTANT_ENGINES: &str = "as-answers";
/// First argument of the bare server.
pub(crate) const AS_BARE_SERVER: &str = "as-bare";
/// First argument of warmroute. The executable runs warmroute itself, because this crate does not
/// depend on it.
pub const AS_WARMROUTE: &str = "as-warmroute";

/// The arguments of the process.
#[derive(Debug)]
pub struct ProcessArguments {
    /// First argument, which selects the program.
    pub program: Option<String>,
    /// Name of the executable and all further arguments.
    pub rest: Vec<OsString>,
}

impl ProcessArguments {
    /// Reads the arguments of this process.
    pub fn read() -> Self {
        let mut args = std::env::args_os();
        let executable = args.next();
        let first = args.next();
        Self {
            program: first.and_then(|first| first.into_string().ok()),
            rest: executable.into_iter().chain(args).collect(),
        }
    }

    /// Runs the engines or the bare server until the process ends, if the first argument selects
    /// one of them.
    pub fn run_helper(&self) -> Option<anyhow::Result<ExitCode>> {
        let result = match self.program.as_deref()? {
            AS_INSTANT_ENGINES => run_instant_engines(InstantEngineArgs::parse_from(&self.rest)),
            AS_BARE_SERVER => run_bare_server(BareServerArgs::parse_from(&self.rest)),
            _ => return None,
        };
        Some(result.map(|()| ExitCode::SUCCESS))
    }
}

/// Runs the engines on one thread, which is enough for responses without work.
fn run_instant_engines(args: InstantEngineArgs) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(instant_engines::serve(args))
}

/// Runs the bare server on the same kind of runtime as warmroute.
fn run_bare_server(args: BareServerArgs) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?
        .block_on(bare_server::serve(args))
}
