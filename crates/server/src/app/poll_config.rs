//! Reloadable configuration of a task that polls engines.

use std::sync::Arc;

use tokio::sync::watch;
use warmroute_engines::engine_client::EngineClient;
use warmroute_engines::engine_client::config::EnginesConfig;

use super::App;
use super::reload::ReloadCandidate;
use crate::config::Config;

/// Settings of a poller, with the engine client.
#[derive(Clone)]
pub(super) struct PollConfig<S> {
    pub(super) settings: S,
    pub(super) engines: EnginesConfig,
    pub(super) client: EngineClient,
}

impl<S: PartialEq> PollConfig<S> {
    fn new(config: &Config, client: &EngineClient, select: fn(&Config) -> S) -> Arc<Self> {
        Arc::new(Self {
            settings: select(config),
            engines: config.engines.http.clone(),
            client: client.clone(),
        })
    }

    fn is_equivalent(&self, other: &Self) -> bool {
        self.settings == other.settings
            && self.engines == other.engines
            && self.client.is_same(&other.client)
    }
}

impl App {
    /// Returns the configuration of a poller, which follows the reloads that change it. `select`
    /// returns the poller's own settings.
    pub(super) fn watch_poll_config<S: PartialEq + Send + Sync + 'static>(
        &mut self,
        name: &'static str,
        config: &Config,
        select: fn(&Config) -> S,
    ) -> watch::Receiver<Arc<PollConfig<S>>> {
        let first = PollConfig::new(config, &self.reloader.client(), select);
        let (config_tx, config_rx) = watch::channel(first);
        self.reloader.register(name, move |next: &ReloadCandidate| {
            let config_tx = config_tx.clone();
            let poll_config = PollConfig::new(&next.config, &next.client, select);
            Ok(Box::new(move || {
                config_tx.send_if_modified(|running| {
                    let changed = !running.is_equivalent(&poll_config);
                    *running = poll_config;
                    changed
                });
            }))
        });
        config_rx
    }
}
