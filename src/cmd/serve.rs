//! `warmroute serve`: the router, until a signal.

use std::io::Write;
use std::path::Path;

use tokio::signal::unix::{SignalKind, signal};
use tracing::info;

use crate::app::App;
use crate::telemetry;

/// Serves until SIGTERM or SIGINT; the exit code of the process.
pub fn run(path: &Path, err: &mut impl Write) -> anyhow::Result<u8> {
    let Some(config) = super::load(path, err)? else { return Ok(super::MISCONFIGURED) };
    telemetry::start(&config.log);
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        // Before anything else: a signal during start-up must end it cleanly, too.
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let app = App::start(config).await?;
        app.run_until(async {
            tokio::select! {
                _ = terminate.recv() => info!("SIGTERM"),
                _ = interrupt.recv() => info!("SIGINT"),
            }
        })
        .await
    })?;
    Ok(0)
}
