//! Reloadable configuration of a task that queries engines.

use std::sync::Arc;

use tokio::sync::watch;
use warmroute_engines::engine_client::EngineClient;
use warmroute_engines::engine_client::config::EnginesConfig;

use super::reload::Reloader;
use super::self_test::CanarySuites;
use crate::config::Config;

/// Settings of a poller, with the engine client.
#[derive(Clone, PartialEq)]
pub(super) struct PollConfig<S> {
    pub(super) settings: S,
    pub(super) engines: EnginesConfig,
    pub(super) client: EngineClient,
}

/// Receives the configuration of a poller after each change.
pub(super) type PollConfigReceiver<S> = watch::Receiver<Arc<PollConfig<S>>>;

impl<S: PartialEq + Send + Sync + 'static> PollConfig<S> {
    /// Follows the reloads that change the configuration. `select` returns the poller's own
    /// settings.
    pub(super) fn watch(
        reloader: &Reloader,
        select: fn(&Config, &Arc<CanarySuites>) -> S,
    ) -> PollConfigReceiver<S> {
        let create = move |config: &Config, client: EngineClient, suites: &Arc<CanarySuites>| {
            Arc::new(Self {
                settings: select(config, suites),
                engines: config.engines.http.clone(),
                client,
            })
        };
        let initial = create(&reloader.running(), reloader.client(), &reloader.suites());
        reloader.watch(initial, move |next| {
            create(&next.config, next.client.clone(), &next.suites)
        })
    }
}
