//! Background tasks: fleet controller, timers, file watchers, replica sync.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tracing::info;
use warmroute_core::router::Router;
use warmroute_engines::engine_sessions::{EngineAccess, EngineSessions, RecordedSessions};
use warmroute_engines::kv_events::SharedResync;
use warmroute_metrics::Metrics;
use warmroute_runtime::lifecycle::file_watcher::FileWatchTiming;
use warmroute_runtime::lifecycle::{ReadyGuard, supervise};
use warmroute_runtime::tls;

use super::endpoint_publisher::EndpointPublisher;
use super::fleet_controller::{self, FleetController};
use super::fleet_source::{self, DesiredFleet, FleetSource, FleetSourceDeps};
use super::{App, settings_poller};
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
    pub(super) fn follow_files(&mut self, metrics: &Arc<Metrics>) {
        let files = self.reloadable_files.clone();
        let reloaded_files = self.reloadable_files.clone();
        self.reloader.register("secrets", move |_| {
            let files = reloaded_files.clone();
            Ok(Box::new(move || files.reload()))
        });
        let metrics = metrics.clone();
        let stop = self.stop.clone();
        self.background.spawn(async move {
            supervise("secrets", &metrics, stop, || {
                let files = files.clone();
                async move { match files.follow(SECRETS_WATCH).await {} }
            })
            .await;
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
        let metrics = self.reloader.metrics.clone();
        let parts = ReplicaSyncParts {
            dispatcher: dispatcher.clone(),
            metrics: metrics.clone(),
            ready: self.readiness.begin_step(REPLICAS),
            readiness: self.readiness.clone(),
            key,
            channel,
        };
        let replica = ReplicaSync::new(settings, name, parts);
        let sync = replica.clone();
        let stop = self.stop.clone();
        self.background.spawn(async move {
            supervise("replicas", &metrics, stop, || {
                let replica = sync.clone();
                async move { replica.run().await }
            })
            .await;
            sync.leave().await;
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
            let stop = self.stop.clone();
            self.background.spawn(async move {
                stop.run_until_cancelled(restore_latency(warm_start, router, ready))
                    .await;
                // The end of a background task would stop the process.
                stop.cancelled().await;
            });
        }
        let controller = FleetController::new(config, parts, self.readiness.clone());
        self.poll_engine_settings(config, dispatcher.router(), reports_tx);
        self.poll_engine_load(config, dispatcher.router());
        self.background
            .spawn(controller.run(sets, self.stop.clone()));
        self.follow_workers(config, desired);
        let router = dispatcher.router().clone();
        self.reloader.register("router", move |next| {
            let router = router.clone();
            let settings = next.config.router_settings();
            let resync = resync.clone();
            Ok(Box::new(move || {
                resync.set(settings.freshness.resync);
                router.set_settings(settings);
            }))
        });
        Ok(())
    }

    /// Follows the configured source of workers, and sends each desired set.
    fn follow_workers(&mut self, config: &Config, desired: mpsc::UnboundedSender<DesiredFleet>) {
        let (source_tx, source_rx) = watch::channel(FleetSource::from(config));
        self.reloader.register("workers", move |next| {
            let source_tx = source_tx.clone();
            let next = FleetSource::from(&*next.config);
            Ok(Box::new(move || {
                source_tx.send_if_modified(|current| {
                    let changed = *current != next;
                    *current = next;
                    changed
                });
            }))
        });
        let metrics = self.reloader.metrics.clone();
        let deps = FleetSourceDeps {
            discovery: self.discovery.clone(),
            cluster_rules: self.reloader.cluster.clone(),
            metrics: metrics.clone(),
            list_filter: Arc::default(),
        };
        let stop = self.stop.clone();
        self.background.spawn(async move {
            let follow = || {
                fleet_source::follow_fleet_source(source_rx.clone(), desired.clone(), deps.clone())
            };
            supervise("workers", &metrics, stop, follow).await;
        });
    }

    /// Starts the queue timer and the expiry of old entries.
    pub(super) fn start_timers(&mut self, dispatcher: &Arc<Dispatcher>, metrics: &Arc<Metrics>) {
        let sweep_metrics = metrics.clone();
        let queue_dispatcher = dispatcher.clone();
        let metrics = metrics.clone();
        let stop = self.stop.clone();
        self.background.spawn(async move {
            supervise("admission", &metrics, stop, || {
                let queue_dispatcher = queue_dispatcher.clone();
                async move {
                    queue_dispatcher.queue().run().await;
                    Ok(())
                }
            })
            .await;
        });
        let dispatcher = dispatcher.clone();
        let audit = self.audit.clone();
        let stop = self.stop.clone();
        self.background.spawn(async move {
            supervise("sweep", &sweep_metrics, stop, || {
                sweep(dispatcher.clone(), audit.clone())
            })
            .await;
        });
    }

    /// Starts the client of the remote index.
    pub(super) fn start_index_client(&mut self) {
        let Some(index_client) = self.reloader.index_client.clone() else {
            return;
        };
        let metrics = self.reloader.metrics.clone();
        let stop = self.stop.clone();
        self.background.spawn(async move {
            supervise("remote_index", &metrics, stop, || {
                let index_client = index_client.clone();
                async move { match index_client.run_probes().await {} }
            })
            .await;
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
        let metrics = self.reloader.metrics.clone();
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
            metrics.clone(),
        );
        let reloaded = engines.clone();
        self.reloader.register("engine_sessions", move |next| {
            let engines = reloaded.clone();
            let access = EngineAccess::new(&next.client, &next.config.engines.http);
            Ok(Box::new(move || engines.set_access(access)))
        });
        let opener = engines.clone();
        dispatcher.on_session_open(engines.deadline(), move |rank, session| {
            let engines = opener.clone();
            let id = session.id.clone();
            let tenant = session.tenant.as_deref().map(Into::into);
            Box::pin(async move { engines.wait_until_open(rank, id, tenant).await })
        });
        let stop = self.stop.clone();
        self.background.spawn(async move {
            supervise("engine_sessions", &metrics, stop, || {
                let engines = engines.clone();
                async move {
                    engines.run().await;
                    Ok(())
                }
            })
            .await;
            // Without other replicas the sessions end with this process, because its successor
            // would open them again.
            engines
                .close_all(
                    SESSION_CLOSE_TIMEOUT,
                    replica.is_some_and(|replica| replica.has_remaining_peers()),
                )
                .await;
        });
    }
}

/// Removes expired entries periodically.
async fn sweep(dispatcher: Arc<Dispatcher>, audit: Arc<CacheAudit>) -> anyhow::Result<()> {
    let mut tick = tokio::time::interval(SWEEP_INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
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
