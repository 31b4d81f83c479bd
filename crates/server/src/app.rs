//! Composition root, which connects all components. [`App::start`] builds them from the
//! configuration and binds the sockets; [`App::run_until`] serves until shutdown is requested, then
//! drains.

mod abortable;
mod addresses;
mod background;
mod core_listener;
mod drain;
mod encoders;
mod endpoint_publisher;
mod ext_proc_factory;
mod external_discovery;
mod fleet_controller;
mod fleet_source;
mod health;
mod health_checks;
mod listeners;
mod load_poller;
mod offline;
mod parity_log;
mod parts;
mod poll_config;
mod reload;
mod self_test;
mod servers;
mod settings_poller;
mod source_task;
mod stream_limit;
pub mod telemetry;
mod tokenizer_checks;
mod unix_socket;
mod worker_schedule;

use std::collections::BTreeSet;
use std::future::Future;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use anyhow::{Context as _, bail};
use arc_swap::ArcSwap;
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tracing::{field, info};
use warmroute_core::router::{Reason, Router};
use warmroute_core::wall_time::WallTime;
use warmroute_core::worker::ModelName;
use warmroute_metrics::{KnownLabels, Metrics, PoolLabels};
use warmroute_runtime::descriptors::DescriptorReserve;
use warmroute_runtime::lifecycle::Readiness;
use warmroute_runtime::tls::ReloadableFiles;
use warmroute_settings::format_elapsed;

use crate::admin::explain::{ExplainContext, SharedExplainContext};
use crate::api::{self, RankWriters};
use crate::app::telemetry::LogControl;
use crate::cluster::replica::LocalEventChannel;
use crate::config::Config;
use crate::dispatch::audit::{CacheAudit, MissCause};
use crate::request::RequestPreprocessor;
use background::BackgroundTasks;
use core_listener::CoreListener;
use health::GrpcHealth;
use listeners::ListenerFactory;
use reload::{ReloadCandidate, Reloader};
use stream_limit::MaxStreams;
use unix_socket::{SocketIdentity, SuccessorLock};

pub use addresses::descriptor_demand;
pub use external_discovery::{
    ExternalDiscovery, ExternalSource, ExternalWatch, NoExternalDiscovery,
};
pub use offline::{LoadReport, OfflineRouter, listed_workers, load_model, try_load};
pub use reload::ConfigFile;
pub use servers::ProcessOrigin;
pub use settings_poller::parse_engine_settings;

/// Startup step that ends when the ext_proc service is served.
const LOADING: &str = "tokenizers";

/// A running warmroute process.
pub struct App {
    /// Stops the background tasks before the components that they use are dropped, for example when
    /// startup fails.
    _stop_first: DropGuard,
    started: Instant,
    started_at: WallTime,
    origin: ProcessOrigin,
    /// Admin address.
    pub admin_address: SocketAddr,
    /// API address, if configured.
    pub api_address: Option<SocketAddr>,
    /// ext_proc TCP address.
    pub ext_proc_address: Option<SocketAddr>,
    /// ext_proc unix socket.
    pub ext_proc_socket: Option<PathBuf>,
    /// Address of the dedicated gRPC health listener.
    pub health_address: Option<SocketAddr>,
    /// xDS address, if separate from ext_proc.
    pub xds_address: Option<SocketAddr>,
    /// Certificates, keys and tokens; [`ReloadableFiles::reload`] reads them immediately.
    pub reloadable_files: ReloadableFiles,
    /// Audit of predictions.
    audit: Arc<CacheAudit>,
    /// Unix socket that a successor may take over.
    socket: Option<SocketIdentity>,
    readiness: Readiness,
    /// Health service of the main listeners; its watches end when they close.
    health: GrpcHealth,
    /// Health service of the dedicated listener, which serves until the process ends.
    dedicated_health: GrpcHealth,
    reloader: Arc<Reloader>,
    /// Clients for discovery by Kubernetes and DNS.
    discovery: Arc<dyn ExternalDiscovery>,
    /// Stops accepting exchanges and finishes open ones.
    closing: CancellationToken,
    /// Aborts open exchanges.
    abort: CancellationToken,
    /// Tasks that outlive their exchange: prefills and engine notifications.
    exchange_tasks: TaskTracker,
    /// Servers that end with `closing`.
    servers: JoinSet<anyhow::Result<()>>,
    /// Closes the admin and health listeners; ends with the background tasks.
    close_pages: CancellationToken,
    /// Servers that end with `close_pages`.
    pages: JoinSet<anyhow::Result<()>>,
    background: BackgroundTasks,
}

impl App {
    /// Builds everything, binds the sockets and starts the background tasks. Metrics and status
    /// pages show `origin`; a program that embeds the server passes its own version.
    pub async fn start(
        config: Config,
        discovery: Arc<dyn ExternalDiscovery>,
        origin: ProcessOrigin,
    ) -> anyhow::Result<Self> {
        let metrics = Arc::new(Metrics::new());
        metrics.set_build_info(origin.version.number, origin.version.commit_hash());
        let replicas = config.replicas.as_ref();
        let channel = replicas.map(|_| LocalEventChannel::default());
        let replica_events = channel.as_ref().map(|channel| channel.events.clone());
        let core_listener = Arc::new(CoreListener::for_server(&config, replica_events));
        let dispatcher = parts::dispatcher(&config, rand::random(), &core_listener);
        let router = dispatcher.router().clone();
        let audit = CacheAudit::new(router.clone(), metrics.clone());
        let mut app = Self::new(Arc::new(config), discovery, &router, &metrics, audit)?;
        app.origin = origin;
        let config = app.reloader.running();
        let sockets = app.listener_factory(&config, &metrics).await?;
        let successor_lock = Self::successor_lock(&config, &sockets).await?;
        // Health and admin pages start first, so that they show pending startup steps.
        let loading = app.readiness.begin_step(LOADING);
        let explain = SharedExplainContext::default();
        app.serve_health(&sockets, &config).await?;
        let envoys = parts::xds_clients(&config, &metrics);
        let replica = app.join_replicas(&config, &dispatcher, channel)?;
        let pages = app.admin_pages(&dispatcher, &explain, envoys.clone(), replica.clone());
        app.serve_admin(&sockets, &config, pages).await?;
        let writers = Arc::new(RankWriters::default());
        app.start_fleet_controller(&config, &dispatcher, writers.clone(), envoys.clone())?;
        let discovery = app.start_xds(&sockets, &config, envoys).await?;
        app.start_timers(&dispatcher);
        app.start_index_client();
        app.start_engine_sessions(
            &config,
            &dispatcher,
            core_listener.session_moves(),
            replica.clone(),
        );
        let models = app.reloader.load_models().await?;
        let listeners = app.bind_ext_proc(&sockets, &config).await?;
        drop(successor_lock);
        let client = app.reloader.client();
        let preprocessor = app.reloader.build_preprocessor(&config, models, &client)?;
        let parts = api::ApiDependencies {
            preprocessor: app.publish_preprocessor(&preprocessor, explain),
            dispatcher: dispatcher.clone(),
            writers,
            metrics: metrics.clone(),
            shutdown: app.closing.clone(),
            readiness: app.readiness.clone(),
        };
        // The checks need the parity status of each model, which was created above.
        self_test::start(&mut app.background, &app.reloader);
        health_checks::start(&mut app.background, &app.reloader);
        tokenizer_checks::start(&mut app.background, &app.reloader);
        app.serve_api(&sockets, &config, parts).await?;
        app.follow_files();
        let service = app.ext_proc_service(&config, preprocessor, dispatcher, replica)?;
        app.serve_ext_proc(listeners, &service, discovery.as_ref());
        loading.complete();
        Ok(app)
    }

    /// Creates the factory of all listeners.
    async fn listener_factory(
        &mut self,
        config: &Config,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<ListenerFactory> {
        Ok(ListenerFactory {
            limits: addresses::fitting_limits(config),
            max_streams: self.max_streams(config),
            reserve: DescriptorReserve::new(),
            wait_for_addresses: addresses::ensure_free(config).await?,
            reloadable_files: self.reloadable_files.clone(),
            metrics: metrics.clone(),
        })
    }

    /// Locks the unix socket while another process drains, so that it serves until this one is
    /// ready.
    async fn successor_lock(
        config: &Config,
        sockets: &ListenerFactory,
    ) -> anyhow::Result<Option<SuccessorLock>> {
        Ok(match &config.listeners.ext_proc.unix_socket {
            Some(socket) if sockets.wait_for_addresses => {
                Some(SuccessorLock::acquire(socket).await?)
            }
            _ => None,
        })
    }

    /// Creates the process state without starting tasks.
    fn new(
        config: Arc<Config>,
        discovery: Arc<dyn ExternalDiscovery>,
        router: &Arc<Router>,
        metrics: &Arc<Metrics>,
        audit: Arc<CacheAudit>,
    ) -> anyhow::Result<Self> {
        let models: Vec<ModelName> = config
            .models
            .iter()
            .map(|model| model.name.clone())
            .collect();
        let reasons: Vec<_> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
        let causes: Vec<_> = MissCause::ALL.iter().map(|cause| cause.as_str()).collect();
        metrics.init_known_series(&KnownLabels {
            models: &models,
            reasons: &reasons,
            causes: &causes,
        });
        if let Some(pool) = &config.process.pool {
            let name = pool.name.as_deref().unwrap_or_default();
            let namespace = pool.namespace.as_deref().unwrap_or_default();
            info!(name, namespace, "process serves a pool");
            let labels = PoolLabels {
                name: name.into(),
                namespace: namespace.into(),
            };
            metrics.process.pool_info.get_or_create(&labels).set(1);
        }
        let background = BackgroundTasks::new(metrics.clone());
        Ok(Self {
            _stop_first: background.stop.clone().drop_guard(),
            started: Instant::now(),
            started_at: SystemTime::now().into(),
            origin: ProcessOrigin::default(),
            admin_address: config.listeners.admin.address,
            api_address: None,
            ext_proc_address: None,
            ext_proc_socket: None,
            health_address: None,
            xds_address: None,
            reloadable_files: ReloadableFiles::default(),
            audit,
            socket: None,
            readiness: Readiness::default(),
            health: GrpcHealth::default(),
            dedicated_health: GrpcHealth::default(),
            reloader: Arc::new(Reloader::new(config, router.clone(), metrics.clone())?),
            discovery,
            closing: CancellationToken::new(),
            abort: CancellationToken::new(),
            exchange_tasks: TaskTracker::new(),
            close_pages: background.stop.child_token(),
            servers: JoinSet::new(),
            pages: JoinSet::new(),
            background,
        })
    }

    /// Reloads the configuration when its file changes or a reload is requested.
    pub fn follow_config_file(&mut self, file: ConfigFile, log: Arc<LogControl>) {
        self.reloader.follow(
            |next| next.config.process.log.level,
            move |level| log.set_level(level),
        );
        let reloader = self.reloader.clone();
        let file = Arc::new(file);
        self.background.supervise("configuration", move || {
            reload::follow(reloader.clone(), file.clone())
        });
    }

    /// Serves until `shutdown` completes, then drains. During the grace period the process is not
    /// ready but serves; then it accepts no new streams until the deadline.
    pub async fn run_until(mut self, shutdown: impl Future<Output = ()>) -> anyhow::Result<()> {
        let socket = self.ext_proc_socket.as_deref().map(Path::display);
        info!(
            ext_proc = self.ext_proc_address.map(field::display),
            ext_proc_unix = socket.map(field::display),
            admin = %self.admin_address,
            health = self.health_address.map(field::display),
            api = self.api_address.map(field::display),
            xds = self.xds_address.map(field::display),
            "listening"
        );
        // Dropped before the components, because dropping them ends their startup steps.
        let _announcement = AbortOnDropHandle::new(tokio::spawn(announce_ready(
            self.readiness.clone(),
            self.reloader.clone(),
            self.started,
        )));
        tokio::select! {
            () = shutdown => {}
            failed = self.wait_for_failure() => return failed,
        }
        self.readiness.drain();
        for health in [&self.health, &self.dedicated_health] {
            health.publish(&self.readiness).await;
        }
        self.drain().await?;
        self.background.stop.cancel();
        self.abort_open().await;
        info!(uptime = format_elapsed(self.started.elapsed()), "stopped");
        Ok(())
    }

    /// Returns when a server or task ends unexpectedly.
    async fn wait_for_failure(&mut self) -> anyhow::Result<()> {
        tokio::select! {
            // Servers end by themselves only on failure.
            ended = self.servers.join_next() => ended.context("there is no server")??,
            ended = self.pages.join_next() => ended.context("there are no pages")??,
            ended = self.background.running.join_next() => {
                // Background tasks end only on failure, too. Without the fleet controller, the
                // fleet would silently stay unchanged.
                ended.context("there is no background task")?.context("a background task failed")?;
                bail!("a background task ended");
            }
        }
    }

    /// Returns the maximum number of open streams, which follows configuration reloads.
    fn max_streams(&self, config: &Config) -> MaxStreams {
        let max_streams = MaxStreams::new(config.listeners.limits.max_streams);
        let current = max_streams.clone();
        self.reloader.follow(
            |next| next.config.listeners.limits.max_streams,
            move |count| current.set(count),
        );
        max_streams
    }

    /// Publishes the preprocessor to the parity checks and the admin pages, and again after each
    /// reload. Returns the one of the API.
    fn publish_preprocessor(
        &self,
        preprocessor: &Arc<RequestPreprocessor>,
        explain: SharedExplainContext,
    ) -> Arc<ArcSwap<RequestPreprocessor>> {
        let context = |config: &Config, preprocessor: &Arc<RequestPreprocessor>| {
            Arc::new(ExplainContext {
                preprocessor: preprocessor.clone(),
                body_limit: config.requests.limits.max_body_size.bytes(),
            })
        };
        let api = Arc::new(ArcSwap::new(preprocessor.clone()));
        let published = api.clone();
        let router = self.reloader.router().clone();
        let publish = move |context: Arc<ExplainContext>| {
            let preprocessor = context.preprocessor.clone();
            router.parity().configure(preprocessor.parity_statuses());
            published.store(preprocessor);
            explain.store(Some(context));
        };
        publish(context(&self.reloader.running(), preprocessor));
        let select = move |next: &ReloadCandidate| context(&next.config, &next.preprocessor);
        self.reloader.follow(select, publish);
        api
    }
}

/// Logs one line with the loaded models, workers and event sources once every startup step has
/// ended.
async fn announce_ready(readiness: Readiness, reloader: Arc<Reloader>, started: Instant) {
    if readiness
        .subscribe()
        .wait_for(BTreeSet::is_empty)
        .await
        .is_err()
    {
        return;
    }
    let router = reloader.router();
    let fleet = router.fleet();
    let sources = fleet
        .members()
        .filter(|member| member.worker.event_source(member.rank.rank).is_some());
    let (live, absent): (Vec<_>, Vec<_>) =
        sources.partition(|member| router.source_status(member.rank).is_attached());
    info!(
        after = %format_elapsed(started.elapsed()),
        models = reloader.running().models.len(),
        workers = fleet.workers().count(),
        event_sources = format!("{} of {}", live.len(), live.len() + absent.len()),
        "ready"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn panicking_background_task_ends_process() {
        let text = "listeners: {ext_proc: {address: '127.0.0.1:0'}, admin: {address: '127.0.0.1:0'}}\nmodels: [{name: m, block_size: 16}]\n\
                    workers: {list: [{id: 1, endpoint: '127.0.0.1:8000'}]}\n";
        let config =
            Config::parse(std::path::Path::new("warmroute.yaml"), text.as_bytes()).unwrap();
        let mut app = App::start(
            config,
            Arc::new(NoExternalDiscovery),
            ProcessOrigin::default(),
        )
        .await
        .unwrap();
        app.background
            .running
            .spawn(async { panic!("injected failure") });
        let ended = app.run_until(std::future::pending()).await.unwrap_err();
        assert!(
            format!("{ended:#}").contains("a background task failed"),
            "{ended:#}"
        );
    }
}
