//! `warmroute serve`: the router, until a signal.

use std::io::Write;
use std::path::Path;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::app::App;
use crate::telemetry;

/// Serves until SIGTERM or SIGINT, drains, and does not wait for that after a second one; the exit code of the process.
pub fn run(path: &Path, err: &mut impl Write) -> anyhow::Result<u8> {
    let Some(config) = super::load(path, err)? else { return Ok(super::MISCONFIGURED) };
    telemetry::start(&config.log);
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        // Before anything else: a signal during start-up must end it cleanly, too.
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut signalled = async || {
            tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            }
        };
        let app = tokio::select! {
            app = App::start(config) => app?,
            signal = signalled() => {
                info!(signal, "stopped before everything was there");
                return Ok(0);
            }
        };
        let drain = CancellationToken::new();
        let running = app.run_until(drain.clone().cancelled_owned());
        let signals = async {
            // Outside of the log lines: what they say is not even computed where they are switched off.
            let signal = signalled().await;
            info!(signal, "the end begins");
            drain.cancel();
            let signal = signalled().await;
            info!(signal, "the end is now");
        };
        tokio::select! {
            ended = running => ended.map(|()| 0),
            () = signals => Ok(0),
        }
    })
}
