//! Runs a program until its work ends or a signal arrives.

use std::process::ExitCode;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};

/// Runs to the end, or until SIGINT or SIGTERM arrives.
pub fn run_until_signal(run: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Runtime::new()?;
    let result = runtime.block_on(until_signal(run));
    // Dropping a runtime waits for blocking tasks without limit. An installation of Envoy may be
    // such a task.
    runtime.shutdown_timeout(Duration::from_secs(2));
    result
}

async fn until_signal(run: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<ExitCode> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    // In either case, dropping the future ends its processes.
    tokio::select! {
        result = run => result.map(|()| ExitCode::SUCCESS),
        _ = interrupt.recv() => Ok(ExitCode::from(130)),
        _ = terminate.recv() => Ok(ExitCode::from(143)),
    }
}
