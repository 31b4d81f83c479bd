//! Composition root: it alone knows every part. [`App::start`] builds the parts from the configuration and binds the
//! sockets; [`App::run_until`] serves until told to stop, and then drains.

mod keeper;
mod live;
mod offline;
mod parts;
mod sockets;

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context as _, bail};
use arc_swap::ArcSwap;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::ExternalProcessorServer;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic_health::server::HealthReporter;
use tracing::{info, warn};

use crate::admin::explain::WayIn;
use crate::admin::{self, Admin};
use crate::api::{self, Api, Feed};
use crate::config::{Config, WorkerSource};
use crate::discovery::{self, file::WorkersFile};
use crate::engine_sessions::EngineSessions;
use crate::entrance::Entrance;
use crate::ext_proc::service::Service;
use crate::intake::Intake;
use crate::lifecycle::{Readiness, supervise};
use crate::metrics::Metrics;
use crate::tls::{Pace, Secrets};
use crate::worker::Worker;
use keeper::Keeper;
use sockets::{GrpcListener, Sockets};

pub use offline::Offline;

/// gRPC message overhead on top of a body: headers, attributes, metadata.
const MESSAGE_OVERHEAD: usize = 1 << 20;

/// A running warmroute.
pub struct App {
    /// Where the admin pages are.
    pub admin_address: SocketAddr,
    /// Where callers that are not Envoy are served, if they are.
    pub api_address: Option<SocketAddr>,
    /// Where ext_proc listens by TCP.
    pub ext_proc_address: Option<SocketAddr>,
    /// Where ext_proc listens by unix socket.
    pub ext_proc_socket: Option<PathBuf>,
    /// Certificates, keys and tokens; [`Secrets::reload`] reads them again at once.
    pub secrets: Secrets,
    readiness: Readiness,
    health: HealthReporter,
    drain_deadline: Duration,
    /// Stops accepting and finishes what is open.
    closing: CancellationToken,
    /// Stops everything else.
    stop: CancellationToken,
    servers: JoinSet<anyhow::Result<()>>,
    background: JoinSet<()>,
}

/// How often what has grown old is looked for.
const SWEEP: Duration = Duration::from_millis(100);

/// How long engines may take at the end to close the sessions that we opened.
const FAREWELL: Duration = Duration::from_secs(2);

impl App {
    /// Builds everything, binds the sockets and starts the background tasks.
    pub async fn start(config: Config) -> anyhow::Result<Self> {
        let metrics = Arc::new(Metrics::new());
        let readiness = Readiness::default();
        let entrance = parts::entrance(&config, rand::random());
        let sockets = Sockets { limits: config.limits.clone(), secrets: Secrets::default(), metrics: metrics.clone() };
        let admin_listener = sockets.bind_admin(&config.admin).await?;
        let (health, health_service) = tonic_health::server::health_reporter();
        let mut app = Self {
            admin_address: admin_listener.address,
            api_address: None,
            ext_proc_address: None,
            ext_proc_socket: None,
            secrets: sockets.secrets.clone(),
            readiness,
            health,
            drain_deadline: config.drain.deadline.get(),
            closing: CancellationToken::new(),
            stop: CancellationToken::new(),
            servers: JoinSet::new(),
            background: JoinSet::new(),
        };
        // The pages come first, so that they can say what the rest is waiting for.
        let loading = app.readiness.wait_for("tokenizers");
        let way_in = WayIn { intake: Arc::new(OnceLock::new()), body_limit: config.limits.body.bytes() };
        let pages = Admin {
            entrance: entrance.clone(),
            metrics: metrics.clone(),
            readiness: app.readiness.clone(),
            way_in: way_in.clone(),
        };
        app.servers.spawn(admin_listener.serve(admin::routes(pages), app.stop.clone()));
        app.follow_readiness();
        let feed = Arc::new(Feed::default());
        app.feed(&config, &entrance, feed.clone(), metrics.clone());
        app.keep_time(&entrance, &metrics);
        app.tell_engines(&config, &entrance, &metrics)?;
        let models = parts::load_models(&config).await?;
        // Bound only now: a socket that accepts and does not answer would hold every request until Envoy gives up on it,
        // while one that refuses lets Envoy go on at once.
        let grpc = sockets.bind(&config.listen).await?;
        app.ext_proc_address = grpc.iter().find_map(GrpcListener::address);
        app.ext_proc_socket = grpc.iter().find_map(GrpcListener::path);
        let intake = parts::intake(&config, models, &metrics)?;
        // Only here is it set.
        let _set = way_in.intake.set(intake.clone());
        let parts = api::Parts {
            intake: intake.clone(),
            entrance: entrance.clone(),
            feed,
            metrics: metrics.clone(),
            closing: app.closing.clone(),
        };
        if let Some(settings) = &config.api {
            let (listener, routes) =
                (sockets.bind_api(settings).await?, tonic::service::Routes::new(health_service.clone()));
            app.serve_api(&config, parts, routes, listener);
        }
        app.follow_secrets(&metrics);
        let service = app.ext_proc(&config, intake, entrance.clone(), &metrics);
        for listener in grpc {
            let routes = tonic::service::Routes::new(health_service.clone()).add_service(service.clone());
            app.servers.spawn(listener.serve(routes, app.closing.clone()));
        }
        drop(loading);
        Ok(app)
    }

    /// Serves until `shutdown` completes, then drains: not ready, no new streams, open ones up to the deadline.
    pub async fn run_until(mut self, shutdown: impl Future<Output = ()>) -> anyhow::Result<()> {
        info!(
            admin = %self.admin_address,
            tcp = ?self.ext_proc_address,
            unix = ?self.ext_proc_socket,
            api = ?self.api_address,
            "listening"
        );
        tokio::select! {
            () = shutdown => {}
            ended = self.servers.join_next() => {
                // Servers only end by themselves when they fail.
                ended.context("there is no server")???;
            }
            ended = self.background.join_next() => {
                // Neither do these, and without the keeper the fleet would stay as it is, unnoticed.
                ended.context("there is no background task")?.context("a background task failed")?;
                bail!("a background task ended");
            }
        }
        info!(deadline = ?self.drain_deadline, "draining");
        self.readiness.drain();
        self.closing.cancel();
        let admin_is_left = 1;
        let drained = tokio::time::timeout(self.drain_deadline, async {
            while self.servers.len() > admin_is_left {
                let _ended = self.servers.join_next().await;
            }
        });
        if drained.await.is_err() {
            warn!("the drain deadline passed with exchanges still open; leaving them to Envoy");
        }
        self.stop.cancel();
        self.servers.shutdown().await;
        while self.background.join_next().await.is_some() {}
        info!("stopped");
        Ok(())
    }

    fn ext_proc(
        &self,
        config: &Config,
        intake: Arc<Intake>,
        entrance: Arc<Entrance>,
        metrics: &Arc<Metrics>,
    ) -> ExternalProcessorServer<Service> {
        let limit = config.limits.body.bytes();
        let live = live::live(config, intake, entrance, metrics.clone());
        let service = Service::new(Arc::new(ArcSwap::from_pointee(live)), metrics.clone());
        // tonic's own limit of 4 MiB would refuse bodies that the configuration allows, and with failure_mode_allow the
        // request would then silently go to a random worker.
        ExternalProcessorServer::new(service)
            .max_decoding_message_size(limit.saturating_add(MESSAGE_OVERHEAD))
            .max_encoding_message_size(usize::MAX)
    }

    /// Serves callers that are not Envoy, and ends what they book and forget.
    fn serve_api(
        &mut self,
        config: &Config,
        parts: api::Parts,
        routes: tonic::service::Routes,
        listener: GrpcListener,
    ) {
        let Some(settings) = &config.api else { return };
        let (metrics, stop) = (parts.metrics.clone(), self.stop.clone());
        let api = Api::new(parts, settings);
        self.api_address = listener.address();
        let largest = config.limits.body.bytes().saturating_add(MESSAGE_OVERHEAD);
        let routes = routes.add_service(api.server(largest));
        self.servers.spawn(listener.serve(routes, self.closing.clone()));
        self.background.spawn(async move {
            supervise("bookings", &metrics, stop, || {
                let api = api.clone();
                async move {
                    api.run_expiry().await;
                    Ok(())
                }
            })
            .await;
        });
    }

    /// Reads certificates and tokens again when their files change.
    fn follow_secrets(&mut self, metrics: &Arc<Metrics>) {
        let (secrets, metrics, stop) = (self.secrets.clone(), metrics.clone(), self.stop.clone());
        self.background.spawn(async move {
            supervise("secrets", &metrics, stop, || {
                let secrets = secrets.clone();
                async move { match secrets.follow(Pace::default()).await {} }
            })
            .await;
        });
    }

    /// Starts what feeds the fleet.
    fn feed(&mut self, config: &Config, entrance: &Arc<Entrance>, feed: Arc<Feed>, metrics: Arc<Metrics>) {
        let (desired, sets) = mpsc::unbounded_channel::<Vec<Worker>>();
        let keeper = Keeper::new(config, entrance.clone(), feed, metrics.clone(), self.readiness.clone());
        self.background.spawn(keeper.run(sets, self.stop.clone()));
        match config.worker_source() {
            WorkerSource::Fixed(workers) => {
                let _sent = desired.send(workers);
                let stop = self.stop.clone();
                // The keeper follows the sets until their sender is gone.
                self.background.spawn(async move {
                    stop.cancelled().await;
                    drop(desired);
                });
            }
            WorkerSource::File(path) => {
                let file = WorkersFile { path, models: config.served_models(), follow: config.discovery.clone() };
                let stop = self.stop.clone();
                self.background.spawn(async move {
                    let follow = || {
                        let desired = desired.clone();
                        let watch = discovery::file::watch(file.clone(), metrics.clone(), move |workers| {
                            let _sent = desired.send(workers);
                        });
                        async move { match watch.await {} }
                    };
                    supervise("workers_file", &metrics, stop, follow).await;
                });
            }
        }
    }

    /// Starts what has to happen from time to time.
    fn keep_time(&mut self, entrance: &Arc<Entrance>, metrics: &Arc<Metrics>) {
        let metrics_of_sweep = metrics.clone();
        let (waiting, metrics, stop) = (entrance.clone(), metrics.clone(), self.stop.clone());
        self.background.spawn(async move {
            supervise("admission", &metrics, stop, || {
                let waiting = waiting.clone();
                async move {
                    waiting.admission().run().await;
                    Ok(())
                }
            })
            .await;
        });
        let (entrance, stop) = (entrance.clone(), self.stop.clone());
        self.background.spawn(async move {
            supervise("sweep", &metrics_of_sweep, stop, || sweep(entrance.clone())).await;
        });
    }

    /// Starts what tells engines of sessions, if they are to be told.
    fn tell_engines(
        &mut self,
        config: &Config,
        entrance: &Arc<Entrance>,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<()> {
        let engine = config.sessions.as_ref().and_then(|sessions| sessions.engine.clone());
        let (Some(engine), Some(sessions)) = (engine, entrance.sessions()) else { return Ok(()) };
        let engines = EngineSessions::new(engine, sessions.clone(), entrance.router().clone(), metrics.clone())?;
        let (metrics, stop) = (metrics.clone(), self.stop.clone());
        self.background.spawn(async move {
            supervise("engine_sessions", &metrics, stop, || {
                let engines = engines.clone();
                async move {
                    engines.run().await;
                    Ok(())
                }
            })
            .await;
            // Our sessions end with us, and the next of us would open them anew.
            engines.close_all(FAREWELL).await;
        });
        Ok(())
    }

    /// Keeps the gRPC health service in step with readiness.
    fn follow_readiness(&mut self) {
        let (readiness, health, stop) = (self.readiness.clone(), self.health.clone(), self.stop.clone());
        self.background.spawn(async move {
            let mut changes = readiness.changes();
            loop {
                let status = match readiness.pending().is_empty() {
                    true => tonic_health::ServingStatus::Serving,
                    false => tonic_health::ServingStatus::NotServing,
                };
                health.set_service_status("", status).await;
                health.set_service_status("envoy.service.ext_proc.v3.ExternalProcessor", status).await;
                health.set_service_status("warmroute.v1.Router", status).await;
                tokio::select! {
                    () = stop.cancelled() => break,
                    changed = changes.changed() => if changed.is_err() { break },
                }
            }
        });
    }
}

/// Lets what has grown old expire, for ever.
async fn sweep(entrance: Arc<Entrance>) -> anyhow::Result<()> {
    let mut tick = tokio::time::interval(SWEEP);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        entrance.router().predictions().expire();
        if let Some(sessions) = entrance.sessions() {
            sessions.expire();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_background_task_that_dies_ends_the_process() {
        let text = "listen: {tcp: '127.0.0.1:0'}\nadmin: {listen: '127.0.0.1:0'}\nmodels: [{name: m, block_size: 16}]\n\
                    workers: [{id: 1, endpoint: '127.0.0.1:8000'}]\n";
        let config = Config::parse(std::path::Path::new("warmroute.yaml"), text.as_bytes()).unwrap();
        let mut app = App::start(config).await.unwrap();
        app.background.spawn(async { panic!("as the keeper might") });
        let ended = app.run_until(std::future::pending()).await.unwrap_err();
        assert!(format!("{ended:#}").contains("a background task failed"), "{ended:#}");
    }
}
