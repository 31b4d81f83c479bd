//! A program that ends with its work or by a signal, whichever comes first.

use std::process::ExitCode;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};

/// Runs to the end, or until it is interrupted or terminated.
pub(crate) fn run_until_signal(
    run: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Runtime::new()?;
    let result = runtime.block_on(until_signal(run));
    // Dropping a runtime waits for blocking tasks without end, and an installation of Envoy may be one.
    runtime.shutdown_timeout(Duration::from_secs(2));
    result
}

async fn until_signal(run: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<ExitCode> {
    let (mut interrupt, mut terminate) = (
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
    );
    // Dropping the run ends its processes, whichever way it ends.
    tokio::select! {
        result = run => result.map(|()| ExitCode::SUCCESS),
        _ = interrupt.recv() => Ok(ExitCode::from(130)),
        _ = terminate.recv() => Ok(ExitCode::from(143)),
    }
}
