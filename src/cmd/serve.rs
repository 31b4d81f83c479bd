//! `warmroute serve`: the router, until a signal.

use tokio::signal::unix::{SignalKind, signal};
use tracing::info;

use crate::app::App;
use crate::config::Config;

/// Serves until SIGTERM or SIGINT.
pub fn run(config: Config) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
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
    })
}
