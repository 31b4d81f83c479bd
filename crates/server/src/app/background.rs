//! Background tasks: fleet controller, timers, file watchers, replica sync.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::info;
use warmroute_core::router::Router;
use warmroute_engines::engine_sessions::{EngineAccess, EngineSessions, RecordedSessions};
use warmroute_engines::kv_events::SharedResync;
use warmroute_metrics::Metrics;
use warmroute_runtime::lifecycle::file_watcher::FileWatchTiming;
use warmroute_runtime::lifecycle::{ReadyGuard, supervise, ticks};
use warmroute_runtime::tls;

use super::endpoint_publisher::EndpointPublisher;
use super::fleet_controller::{self, FleetController};
use super::fleet_source::{self, DesiredFleet, FleetSource, FleetSourceDeps};
use super::{App, load_poller, settings_poller};
use crate::api::RankWriters;
use crate::cluster::replica::{LocalEventChannel, ReplicaSync, ReplicaSyncParts};
use crate::cluster::warm_start::WarmStart;
use crate::config::Config;
use crate::dispatch::Dispatcher;
use crate::dispatch::audit::CacheAudit;
use crate::fleet::xds::XdsClients;
use crate::tracking_hash::TrackingHash;

/// Interval in which expired entries are removed.
const SWEEP_INTERVAL: Duration = Duration::from_millis(100);

/// Watch of certificates, keys and tokens.
const SECRETS_WATCH: FileWatchTiming = FileWatchTiming {
    poll: Duration::from_secs(10),
    debounce: Duration::from_millis(250),
};

/// Startup step of replica sync.
const REPLICAS: &str = "replica sync";

/// Time that engines have at shutdown to close the sessions that this process opened.
const SESSION_CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Background tasks of the process. They end only when the process stops.
pub(super) struct BackgroundTasks {
    metrics: Arc<Metrics>,
    /// Stops all tasks.
    pub(super) stop: CancellationToken,
    pub(super) running: JoinSet<()>,
}

impl BackgroundTasks {
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            metrics,
            stop: CancellationToken::new(),
            running: JoinSet::new(),
        }
    }

    /// Starts a task that runs again after each failure.
    pub(super) fn supervise<F, Fut>(&mut self, name: &'static str, task: F)
    where
        F: FnMut() -> Fut + Send + 'static,
        Fut: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        self.supervise_then(name, task, std::future::ready(()));
    }

    /// Starts a task that runs again after each failure. `at_stop` runs when the process stops.
    fn supervise_then<F, Fut>(
        &mut self,
        name: &'static str,
        task: F,
        at_stop: impl Future<Output = ()> + Send + 'static,
    ) where
        F: FnMut() -> Fut + Send + 'static,
        Fut: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        let metrics = self.metrics.clone();
        let stop = self.stop.clone();
        self.running.spawn(async move {
            supervise(name, &metrics, stop, task).await;
            at_stop.await;
        });
    }

    /// Starts a task that may end before the process stops.
    pub(super) fn run_until_stop(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        self.running.spawn(async move {
            stop.run_until_cancelled(task).await;
            // The end of a background task would stop the process.
            stop.cancelled().await;
        });
    }
}

/// Continues from the learned latency of another process.
async fn restore_latency(warm_start: Arc<WarmStart>, router: Arc<Router>, ready: ReadyGuard) {
    if let Some(latency) = warm_start.fetch_latency().await {
        let models = router.load().restore_latency(latency);
        info!(models, "warm start: learned latency restored");
    }
    ready.complete();
}

impl App {
    /// Reloads certificates and tokens when their files change and when the configuration is
    /// reloaded.
    pub(super) fn follow_files(&mut self) {
        let files = self.reloadable_files.clone();
        self.reloader.follow(|_| (), move |()| files.reload());
        let files = self.reloadable_files.clone();
        self.background.supervise("secrets", move || {
            let files = files.clone();
            async move { match files.follow(SECRETS_WATCH).await {} }
        });
    }

    /// Starts replica sync, if configured.
    pub(super) fn join_replicas(
        &mut self,
        config: &Config,
        dispatcher: &Arc<Dispatcher>,
        channel: Option<LocalEventChannel>,
    ) -> anyhow::Result<Option<Arc<ReplicaSync>>> {
        let (Some(settings), Some(channel)) = (&config.replicas, channel) else {
            return Ok(None);
        };
        let key = match config
            .routing
            .block_hash
            .load()
            .map_err(|problem| anyhow::anyhow!("{}", problem.text))?
        {
            TrackingHash::Public => None,
            TrackingHash::Keyed(key) => Some(key),
        };
        let name = settings
            .name
            .clone()
            .or_else(tls::host_name)
            .unwrap_or_default();
        let parts = ReplicaSyncParts {
            dispatcher: dispatcher.clone(),
            metrics: self.reloader.metrics.clone(),
            ready: self.readiness.begin_step(REPLICAS),
            readiness: self.readiness.clone(),
            key,
            channel,
        };
        let replica = ReplicaSync::new(settings, name, parts);
        let sync = replica.clone();
        let leaving = replica.clone();
        self.background
            .supervise_then("replicas", move || sync.clone().run(), async move {
                leaving.leave().await
            });
        Ok(Some(replica))
    }

    /// Starts the fleet controller, its source, and the pollers of engines.
    pub(super) fn start_fleet_controller(
        &mut self,
        config: &Config,
        dispatcher: &Arc<Dispatcher>,
        writers: Arc<RankWriters>,
        envoys: Option<Arc<XdsClients>>,
    ) -> anyhow::Result<()> {
        let metrics = self.reloader.metrics.clone();
        let (desired, sets) = mpsc::unbounded_channel();
        let (reports_tx, reports_rx) = watch::channel(if config.engines.discovery.enabled {
            Arc::default()
        } else {
            settings_poller::disabled()
        });
        let resync = SharedResync::default();
        resync.set(config.index.freshness.on_lost_events);
        let publisher = EndpointPublisher::new(config.envoy.as_ref(), envoys, metrics.clone());
        let parts = fleet_controller::FleetControllerParts {
            dispatcher: dispatcher.clone(),
            writers,
            metrics: metrics.clone(),
            engine_reports: reports_rx,
            resync: resync.clone(),
            publisher,
            warm_start: config
                .index
                .warm_start
                .as_ref()
                .map(WarmStart::new)
                .transpose()?
                .map(Arc::new),
        };
        if let Some(warm_start) = parts.warm_start.clone() {
            let ready = self
                .readiness
                .begin_step("warm start of the learned latency");
            let router = dispatcher.router().clone();
            self.background
                .run_until_stop(restore_latency(warm_start, router, ready));
        }
        let controller = FleetController::new(config, parts, self.readiness.clone());
        settings_poller::start(&mut self.background, &self.reloader, reports_tx);
        load_poller::start(&mut self.background, &self.reloader);
        let stop = self.background.stop.clone();
        self.background.running.spawn(controller.run(sets, stop));
        self.follow_workers(config, desired);
        let router = dispatcher.router().clone();
        self.reloader.follow(
            |next| next.config.router_settings(),
            move |settings| {
                resync.set(settings.freshness.resync);
                router.set_settings(settings);
            },
        );
        Ok(())
    }

    /// Follows the configured source of workers, and sends each desired set.
    fn follow_workers(&mut self, config: &Config, desired: mpsc::UnboundedSender<DesiredFleet>) {
        let source_rx = self.reloader.watch(FleetSource::from(config), |next| {
            FleetSource::from(&*next.config)
        });
        let deps = FleetSourceDeps {
            discovery: self.discovery.clone(),
            cluster_rules: self.reloader.cluster.clone(),
            metrics: self.reloader.metrics.clone(),
            list_filter: Arc::default(),
        };
        self.background.supervise("workers", move || {
            fleet_source::follow_fleet_source(source_rx.clone(), desired.clone(), deps.clone())
        });
    }

    /// Starts the queue timer and the expiry of old entries.
    pub(super) fn start_timers(&mut self, dispatcher: &Arc<Dispatcher>) {
        let queue_dispatcher = dispatcher.clone();
        self.background.supervise("admission", move || {
            let dispatcher = queue_dispatcher.clone();
            async move {
                dispatcher.queue().run().await;
                Ok(())
            }
        });
        let dispatcher = dispatcher.clone();
        let audit = self.audit.clone();
        self.background
            .supervise("sweep", move || sweep(dispatcher.clone(), audit.clone()));
    }

    /// Starts the client of the remote index.
    pub(super) fn start_index_client(&mut self) {
        let Some(index_client) = self.reloader.index_client.clone() else {
            return;
        };
        self.background.supervise("remote_index", move || {
            let index_client = index_client.clone();
            async move { match index_client.run_probes().await {} }
        });
    }

    /// Starts the session client of the engines, if configured.
    pub(super) fn start_engine_sessions(
        &mut self,
        config: &Config,
        dispatcher: &Arc<Dispatcher>,
        moves: &Arc<Notify>,
        replica: Option<Arc<ReplicaSync>>,
    ) {
        let engine = config
            .sessions
            .as_ref()
            .and_then(|sessions| sessions.engine.clone());
        let (Some(engine), Some(sessions)) = (engine, dispatcher.sessions()) else {
            return;
        };
        let access = EngineAccess::new(&self.reloader.client(), &config.engines.http);
        let engines = EngineSessions::new(
            engine,
            access,
            RecordedSessions {
                sessions: sessions.clone(),
                moves: moves.clone(),
            },
            dispatcher.router().clone(),
            self.reloader.metrics.clone(),
        );
        let reloaded = engines.clone();
        self.reloader.follow(
            |next| EngineAccess::new(&next.client, &next.config.engines.http),
            move |access| reloaded.set_access(access),
        );
        let opener = engines.clone();
        dispatcher.on_session_open(engines.deadline(), move |rank, session| {
            let engines = opener.clone();
            let id = session.id.clone();
            let tenant = session.tenant.as_deref().map(Into::into);
            Box::pin(async move { engines.wait_until_open(rank, id, tenant).await })
        });
        let opened = engines.clone();
        self.background.supervise_then(
            "engine_sessions",
            move || {
                let engines = engines.clone();
                async move {
                    engines.run().await;
                    Ok(())
                }
            },
            // Without other replicas the sessions end with this process, because its successor
            // would open them again.
            async move {
                let has_peers = replica.is_some_and(|replica| replica.has_remaining_peers());
                opened.close_all(SESSION_CLOSE_TIMEOUT, has_peers).await;
            },
        );
    }
}

/// Removes expired entries periodically.
async fn sweep(dispatcher: Arc<Dispatcher>, audit: Arc<CacheAudit>) -> anyhow::Result<()> {
    let mut tick = ticks(SWEEP_INTERVAL);
    loop {
        tick.tick().await;
        dispatcher.router().predictors().expire();
        audit.resolve_due(std::time::Instant::now());
        dispatcher.stored_responses().expire();
        if let Some(sessions) = dispatcher.sessions() {
            sessions.expire();
        }
    }
}
