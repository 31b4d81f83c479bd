//! Composition root: it alone knows every part. [`App::start`] builds the parts from the configuration and binds the
//! sockets; [`App::run_until`] serves until told to stop, and then drains.

mod keeper;
mod sockets;

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::ExternalProcessorServer;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic_health::server::HealthReporter;
use tracing::{info, warn};

use crate::admin::{self, Admin};
use crate::config::{Config, WorkerSource};
use crate::discovery::{self, file::WorkersFile};
use crate::ext_proc::exchange::Options;
use crate::ext_proc::pipeline::{Model, Models, Pipeline};
use crate::ext_proc::service::Service;
use crate::index::PrefixIndex;
use crate::lifecycle::{Readiness, supervise};
use crate::load::LoadTracker;
use crate::metrics::Metrics;
use crate::prompt::{self, Encoder};
use crate::router::Router;
use crate::worker::Worker;
use keeper::Keeper;
use sockets::GrpcListener;

/// gRPC message overhead on top of a body: headers, attributes, metadata.
const MESSAGE_OVERHEAD: usize = 1 << 20;

/// A running warmroute.
pub struct App {
    /// Where the admin pages are.
    pub admin_address: SocketAddr,
    /// Where ext_proc listens by TCP.
    pub ext_proc_address: Option<SocketAddr>,
    /// Where ext_proc listens by unix socket.
    pub ext_proc_socket: Option<PathBuf>,
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

impl App {
    /// Builds everything, binds the sockets and starts the background tasks.
    pub async fn start(config: Config) -> anyhow::Result<Self> {
        let metrics = Arc::new(Metrics::new());
        let readiness = Readiness::default();
        let seed = rand::random();
        let router = Arc::new(Router::new(PrefixIndex::new(), LoadTracker::new(Instant::now), config.schedule, seed));
        let admin_listener = tokio::net::TcpListener::bind(config.admin.listen)
            .await
            .with_context(|| format!("the admin address {} cannot be bound", config.admin.listen))?;
        let (health, health_service) = tonic_health::server::health_reporter();
        let mut app = Self {
            admin_address: admin_listener.local_addr()?,
            ext_proc_address: None,
            ext_proc_socket: None,
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
        let pages = Admin { router: router.clone(), metrics: metrics.clone(), readiness: app.readiness.clone() };
        app.servers.spawn(sockets::serve_admin(admin_listener, admin::routes(pages), app.stop.clone()));
        app.follow_readiness();
        app.feed(&config, router.clone(), metrics.clone());
        let models = load_models(&config).await?;
        // Bound only now: a socket that accepts and does not answer would hold every request until Envoy gives up on it,
        // while one that refuses lets Envoy go on at once.
        let grpc = sockets::bind(&config.listen).await?;
        app.ext_proc_address = grpc.iter().find_map(GrpcListener::address);
        app.ext_proc_socket = grpc.iter().find_map(GrpcListener::path);
        let service = app.ext_proc(&config, models, &router, &metrics);
        for listener in grpc {
            let routes = tonic::service::Routes::new(health_service.clone()).add_service(service.clone());
            app.servers.spawn(listener.serve(routes, app.closing.clone()));
        }
        drop(loading);
        Ok(app)
    }

    /// Serves until `shutdown` completes, then drains: not ready, no new streams, open ones up to the deadline.
    pub async fn run_until(mut self, shutdown: impl Future<Output = ()>) -> anyhow::Result<()> {
        info!(admin = %self.admin_address, tcp = ?self.ext_proc_address, unix = ?self.ext_proc_socket, "listening");
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
        models: Models,
        router: &Arc<Router>,
        metrics: &Arc<Metrics>,
    ) -> ExternalProcessorServer<Service> {
        let limit = config.limits.body.bytes();
        let options = Options {
            body_limit: limit,
            mode_header: config.response.mode_header,
            worker_header: config.response.worker_header,
            prediction_header: config.response.prediction_header,
        };
        let pipeline = Pipeline::new(models, router.clone(), metrics.clone(), config.limits.clone());
        // tonic's own limit of 4 MiB would refuse bodies that the configuration allows, and with failure_mode_allow the
        // request would then silently go to a random worker.
        ExternalProcessorServer::new(Service::new(pipeline, metrics.clone(), options))
            .max_decoding_message_size(limit.saturating_add(MESSAGE_OVERHEAD))
            .max_encoding_message_size(usize::MAX)
    }

    /// Starts what feeds the fleet.
    fn feed(&mut self, config: &Config, router: Arc<Router>, metrics: Arc<Metrics>) {
        let (desired, sets) = mpsc::unbounded_channel::<Vec<Worker>>();
        let keeper = Keeper::new(config, router, metrics.clone(), self.readiness.clone());
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
                tokio::select! {
                    () = stop.cancelled() => break,
                    changed = changes.changed() => if changed.is_err() { break },
                }
            }
        });
    }
}

/// Loads the tokenizers, all at once: each costs half a second of one core.
async fn load_models(config: &Config) -> anyhow::Result<Models> {
    let loading: Vec<_> = config
        .models
        .iter()
        .map(|model| {
            let files = model.tokenizer.clone().map(|tokenizer| prompt::Config {
                tokenizer,
                tokenizer_config: model.tokenizer_config.clone(),
                chat_template: model.chat_template.clone(),
            });
            tokio::task::spawn_blocking(move || files.map(|files| Encoder::load(&files)).transpose())
        })
        .collect();
    let mut models = Models::default();
    for (model, loaded) in config.models.iter().zip(loading) {
        let encoder = loaded.await?.with_context(|| format!("model {} cannot be served exactly", model.name))?;
        if encoder.is_none() {
            warn!(model = %model.name, "no tokenizer is configured: requests are routed by load only");
        }
        models.add(Model { name: model.name.clone(), block_size: model.block_size, encoder }, &model.aliases);
    }
    Ok(models)
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
