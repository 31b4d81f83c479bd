//! Composition root: it alone knows every part. [`App::start`] builds the parts from the configuration and binds the
//! sockets; [`App::run_until`] serves until told to stop, and then drains.

mod addresses;
mod announcer;
mod background;
mod cut;
mod drain;
mod encoders;
mod followed;
mod gateway;
mod health;
mod health_checks;
mod keeper;
mod learn;
mod lives;
mod offline;
mod parts;
mod reload;
mod self_test;
mod sockets;
mod subjects;
mod swap;
mod tokenizers;
mod unix;
mod workers;

use std::collections::BTreeSet;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, bail};
use arc_swap::ArcSwap;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tonic::service::Routes;
use tracing::info;

use crate::admin::explain::WayIn;
use crate::admin::{self, Admin};
use crate::api::{self, Api, ApiConfig, Feed};
use crate::audit::{Audit, Cause};
use crate::config::Config;
use crate::entrance::Entrance;
use crate::ext_proc::service::Kept;
use crate::ext_proc::wire::ExtProc;
use crate::intake::{Intake, Models};
use crate::lifecycle::{Readiness, supervise};
use crate::metrics::{KnownLabels, Metrics, PoolLabels};
use crate::remote_index::{self, ServedIndex, ServedModel};
use crate::replica::Replica;
use crate::router::{Reason, Router};
use crate::telemetry::LogFilter;
use crate::tls::Secrets;
use crate::worker::ModelName;
use crate::xds::{Discovery, Envoys};
use gateway::Gateway;
use health::Health;
use reload::Next;
use sockets::{GrpcListener, Sockets};
use swap::Swap;
use unix::Place;

pub use learn::learned;
pub use offline::{LoadReport, Offline, listed, model, try_load, without_template, workers};
pub use reload::{ConfigFile, ReadConfig, Reloaded, Reloader};

/// gRPC message overhead on top of a body: headers, attributes, metadata.
const MESSAGE_OVERHEAD: usize = 1 << 20;

/// What readiness waits for until there is a service.
const LOADING: &str = "tokenizers";

/// A running warmroute.
pub struct App {
    /// Stops the background tasks before the parts that they use are dropped, for example when the start fails.
    _stop_first: DropGuard,
    started: Instant,
    /// Where the admin pages are.
    pub admin_address: SocketAddr,
    /// Where callers that are not Envoy are served, if they are.
    pub api_address: Option<SocketAddr>,
    /// Where ext_proc listens by TCP.
    pub ext_proc_address: Option<SocketAddr>,
    /// Where ext_proc listens by unix socket.
    pub ext_proc_socket: Option<PathBuf>,
    /// Where gRPC health listens for itself.
    pub health_address: Option<SocketAddr>,
    /// Where Envoys are told of the fleet, if not beside ext_proc.
    pub xds_address: Option<SocketAddr>,
    /// Certificates, keys and tokens; [`Secrets::reload`] reads them again at once.
    pub secrets: Secrets,
    /// Whether it came as was foreseen.
    audit: Arc<Audit>,
    /// Where the unix socket is, which a successor takes over.
    place: Option<Place>,
    readiness: Readiness,
    /// Health beside the services; its watchers are let go with them.
    health: Health,
    /// Health alone, until the very end.
    own_health: Health,
    reloader: Arc<Reloader>,
    /// Stops accepting and finishes what is open.
    closing: CancellationToken,
    /// Cuts what is open.
    cut: CancellationToken,
    /// What is done for exchanges that may have ended: prefills, and words to engines.
    under_way: TaskTracker,
    /// Stops everything else.
    stop: CancellationToken,
    /// Those that end with `closing`.
    servers: JoinSet<anyhow::Result<()>>,
    /// Gives up the pages; `stop` does, too.
    leave: CancellationToken,
    /// Those that end with `leave`.
    pages: JoinSet<anyhow::Result<()>>,
    background: JoinSet<()>,
}

impl App {
    /// Builds everything, binds the sockets and starts the background tasks.
    pub async fn start(config: Config) -> anyhow::Result<Self> {
        let metrics = Arc::new(Metrics::new());
        let entrance = parts::entrance(&config, rand::random());
        let audit = Audit::new(entrance.router().clone(), metrics.clone());
        let mut app = Self::bare(Arc::new(config), entrance.router(), &metrics, audit)?;
        let config = app.reloader.running();
        let (limits, secrets) = (config.limits.clone(), app.secrets.clone());
        let heir = addresses::ensure_free(&config).await?;
        let sockets = Sockets {
            limits,
            heir,
            secrets,
            metrics: metrics.clone(),
        };
        // Health and the pages come first, so that they can say what the rest is waiting for.
        let loading = app.readiness.wait_for(LOADING);
        let way_in = WayIn::new(config.limits.body.bytes());
        app.serve_health(&sockets, &config).await?;
        let envoys = parts::envoys(&config, &metrics);
        let replica = app.join_replicas(&config, &entrance)?;
        let pages = app.shown(&entrance, &way_in, (envoys.clone(), replica.clone()));
        let listener = sockets.bind_admin(&config.admin).await?;
        app.admin_address = listener.address;
        app.pages
            .spawn(listener.serve(admin::routes(pages), app.leave.clone()));
        let feed = Arc::new(Feed::default());
        app.feed(&config, &entrance, feed.clone(), envoys.clone())?;
        let discovery = app.discovery(&sockets, &config, envoys).await?;
        app.keep_time(&entrance, &metrics);
        app.keep_in_touch();
        app.tell_engines(&config, &entrance, replica.clone());
        let models = app.reloader.load_models().await?;
        if let Some(socket) = &config.listen.unix {
            unix::wait_turn(socket, &app.readiness, LOADING).await;
        }
        // Bound only now: a socket that accepts and does not answer would hold every request until Envoy gives up on it,
        // while one that refuses lets Envoy go on at once.
        let grpc = sockets.bind(&config.listen).await?;
        app.ext_proc_address = grpc.iter().find_map(GrpcListener::address);
        app.ext_proc_socket = grpc.iter().find_map(GrpcListener::path);
        app.place = grpc.iter().find_map(GrpcListener::place);
        let intake = app.intake(&config, models, entrance.router())?;
        entrance.router().parity().configure(intake.standings());
        way_in.intake.store(Some(intake.clone()));
        let parts = api::Parts {
            intake: Arc::new(ArcSwap::new(intake.clone())),
            entrance: entrance.clone(),
            feed,
            metrics: metrics.clone(),
            closing: app.closing.clone(),
            readiness: app.readiness.clone(),
        };
        app.reload_ways_in(entrance.router().clone(), way_in, parts.intake.clone());
        // Only now are there standings to be told what is found out.
        app.judge_tokens(&config, entrance.router());
        app.serve_api(&sockets, &config, parts).await?;
        app.follow_secrets(&metrics);
        let service = app.ext_proc(&config, intake, entrance, replica)?;
        for listener in grpc {
            let routes = Routes::new(app.health.service()).add_service(service.clone());
            let routes = discovery
                .iter()
                .fold(routes, |routes, discovery| discovery.beside(routes));
            app.servers
                .spawn(listener.serve(routes, app.closing.clone(), app.cut.clone()));
        }
        loading.done();
        Ok(app)
    }

    fn intake(
        &self,
        config: &Config,
        models: Models,
        router: &Arc<Router>,
    ) -> anyhow::Result<Arc<Intake>> {
        let Reloader {
            cluster,
            metrics,
            asker,
            ..
        } = &*self.reloader;
        parts::intake(
            config,
            (models, cluster),
            &self.reloader.client(),
            router,
            (metrics, asker.clone()),
        )
    }

    fn judge_tokens(&mut self, config: &Config, router: &Arc<Router>) {
        self.test_tokens(config, router);
        self.check_health(config, router);
        self.compare_tokenizers(router);
    }

    /// Nothing runs yet.
    fn bare(
        config: Arc<Config>,
        router: &Arc<Router>,
        metrics: &Arc<Metrics>,
        audit: Arc<Audit>,
    ) -> anyhow::Result<Self> {
        let models: Vec<ModelName> = config
            .models
            .iter()
            .map(|model| model.name.clone())
            .collect();
        metrics.start_at_zero(&KnownLabels {
            models: &models,
            reasons: &Reason::ALL.map(Reason::as_str),
            causes: &Cause::ALL.map(Cause::as_str),
        });
        if let Some(pool) = &config.pool {
            let (name, namespace) = (
                pool.name.clone().unwrap_or_default(),
                pool.namespace.clone().unwrap_or_default(),
            );
            info!(name, namespace, "serving this pool");
            metrics
                .pool_info
                .get_or_create(&PoolLabels { name, namespace })
                .set(1);
        }
        let stop = CancellationToken::new();
        Ok(Self {
            _stop_first: stop.clone().drop_guard(),
            started: Instant::now(),
            admin_address: config.admin.listen,
            api_address: None,
            ext_proc_address: None,
            ext_proc_socket: None,
            health_address: None,
            xds_address: None,
            secrets: Secrets::default(),
            audit,
            place: None,
            readiness: Readiness::default(),
            health: Health::default(),
            own_health: Health::default(),
            reloader: Arc::new(Reloader::new(config, router.clone(), metrics.clone())?),
            closing: CancellationToken::new(),
            cut: CancellationToken::new(),
            under_way: TaskTracker::new(),
            leave: stop.child_token(),
            stop,
            servers: JoinSet::new(),
            pages: JoinSet::new(),
            background: JoinSet::new(),
        })
    }

    /// Takes another configuration into use, whenever its file changes or is asked to be read.
    pub fn follow(&mut self, file: ConfigFile, log: LogFilter) {
        let log = Arc::new(log);
        self.reloader.part("log.level", move |next| {
            let (log, level) = (log.clone(), next.config.log.level);
            Ok(Box::new(move || log.set(level)))
        });
        let (reloader, file, stop) = (self.reloader.clone(), Arc::new(file), self.stop.clone());
        let metrics = reloader.metrics.clone();
        self.background.spawn(async move {
            supervise("configuration", &metrics, stop, || {
                reload::follow(reloader.clone(), file.clone())
            })
            .await;
        });
    }

    /// The way to another configuration.
    pub fn reloader(&self) -> &Arc<Reloader> {
        &self.reloader
    }

    /// Serves until `shutdown` completes, then drains: not ready but serving for the grace, then no new streams, open ones
    /// up to the deadline.
    pub async fn run_until(mut self, shutdown: impl Future<Output = ()>) -> anyhow::Result<()> {
        info!(
            admin = %self.admin_address,
            tcp = ?self.ext_proc_address,
            unix = ?self.ext_proc_socket,
            health = ?self.health_address,
            api = ?self.api_address,
            xds = ?self.xds_address,
            "listening"
        );
        // Dropped before the parts, because dropping a part ends its readiness steps.
        let _announcement = AbortOnDropHandle::new(tokio::spawn(announce_ready(
            self.readiness.clone(),
            self.reloader.clone(),
            self.started,
        )));
        tokio::select! {
            () = shutdown => {}
            failed = self.fails() => return failed,
        }
        self.readiness.drain();
        for health in [&self.health, &self.own_health] {
            health.tell(&self.readiness).await;
        }
        self.drain().await?;
        self.stop.cancel();
        self.farewell().await;
        info!("stopped");
        Ok(())
    }

    /// Ends when a part ends that should not.
    async fn fails(&mut self) -> anyhow::Result<()> {
        tokio::select! {
            // Servers only end by themselves when they fail.
            ended = self.servers.join_next() => ended.context("there is no server")??,
            ended = self.pages.join_next() => ended.context("there are no pages")??,
            ended = self.background.join_next() => {
                // Neither do these, and without the keeper the fleet would stay as it is, unnoticed.
                ended.context("there is no background task")?.context("a background task failed")?;
                bail!("a background task ended");
            }
        }
    }

    /// Answers for our health, where that has an address of its own, and keeps it in step with readiness.
    async fn serve_health(&mut self, sockets: &Sockets, config: &Config) -> anyhow::Result<()> {
        for health in [&self.health, &self.own_health] {
            health.tell(&self.readiness).await;
            let (health, readiness, stop) =
                (health.clone(), self.readiness.clone(), self.stop.clone());
            self.background.spawn(async move {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = health.follow(readiness) => {}
                }
            });
        }
        let Some(address) = config.listen.health else {
            return Ok(());
        };
        let listener = sockets.bind_health(address).await?;
        self.health_address = listener.address();
        self.pages.spawn(listener.serve(
            Routes::new(self.own_health.service()),
            self.leave.clone(),
            self.cut.clone(),
        ));
        Ok(())
    }

    /// What the pages show.
    fn shown(
        &self,
        entrance: &Arc<Entrance>,
        way_in: &WayIn,
        (envoys, replica): (Option<Arc<Envoys>>, Option<Arc<Replica>>),
    ) -> Admin {
        let cluster = self.reloader.cluster.clone();
        let replicas = move || {
            replica
                .as_ref()
                .map_or(Value::Null, |replica| replica.shown())
        };
        let asker = self.reloader.asker.clone();
        let remote_index = move || asker.as_ref().map_or(Value::Null, |asker| asker.shown());
        let listeners = move || {
            envoys
                .as_ref()
                .map_or(Value::Null, |envoys| json!(envoys.listeners()))
        };
        Admin {
            entrance: entrance.clone(),
            audit: self.audit.clone(),
            metrics: self.reloader.metrics.clone(),
            readiness: self.readiness.clone(),
            config: self.reloader.shown(),
            way_in: way_in.clone(),
            envoys: Arc::new(listeners),
            cluster: Arc::new(move || cluster.load().shown.clone()),
            replicas: Arc::new(replicas),
            remote_index: Arc::new(remote_index),
        }
    }

    /// What tells Envoys of the fleet, where it is to stand beside ext_proc. At an address of its own it is there at once, so
    /// that Envoys know the workers while we still load.
    async fn discovery(
        &mut self,
        sockets: &Sockets,
        config: &Config,
        envoys: Option<Arc<Envoys>>,
    ) -> anyhow::Result<Option<Discovery>> {
        let settings = config.envoy.as_ref().and_then(|envoy| envoy.xds.as_ref());
        let (Some(settings), Some(envoys)) = (settings, envoys) else {
            return Ok(None);
        };
        let discovery = Discovery::new(envoys, self.closing.clone());
        let Some(address) = settings.listen else {
            return Ok(Some(discovery));
        };
        let listener = sockets.bind_xds(address, settings.tls.as_ref()).await?;
        self.xds_address = listener.address();
        let routes = discovery.beside(Routes::new(self.health.service()));
        self.servers
            .spawn(listener.serve(routes, self.closing.clone(), self.cut.clone()));
        Ok(None)
    }

    /// Lets the ways in beside ext_proc follow the configuration.
    fn reload_ways_in(&self, router: Arc<Router>, way_in: WayIn, api: Arc<ArcSwap<Intake>>) {
        self.reloader.part("models", move |next| {
            let (way_in, api, intake, router) = (
                way_in.clone(),
                api.clone(),
                next.intake.clone(),
                router.clone(),
            );
            let body_limit = next.config.limits.body.bytes();
            Ok(Box::new(move || {
                router.parity().configure(intake.standings());
                way_in.limit(body_limit);
                way_in.intake.store(Some(intake.clone()));
                api.store(intake);
            }))
        });
    }

    /// The ext_proc service, which follows the configuration.
    fn ext_proc(
        &self,
        config: &Config,
        intake: Arc<Intake>,
        entrance: Arc<Entrance>,
        replica: Option<Arc<Replica>>,
    ) -> anyhow::Result<Swap<ExtProc>> {
        let kept = Kept::new(self.reloader.metrics.clone(), self.audit.clone());
        if let Some(replica) = replica {
            let of_ours = Arc::downgrade(&kept);
            replica.on_first_token(move |name| {
                of_ours
                    .upgrade()
                    .into_iter()
                    .for_each(|kept| kept.first_token_of(name));
            });
            kept.on_foreign_first_token(move |name| replica.first_token_of(name));
        }
        let gateway = Gateway::new(entrance, kept, self.under_way.clone());
        let (service, callers) = gateway.prepare(config, intake)?;
        gateway.keep(callers);
        let live = Swap::new(service);
        let place = live.clone();
        self.reloader.part("ext_proc", move |next: &Next| {
            let (service, callers) = gateway.prepare(&next.config, next.intake.clone())?;
            let (place, gateway) = (place.clone(), gateway.clone());
            Ok(Box::new(move || {
                gateway.keep(callers);
                place.replace(service);
            }))
        });
        Ok(live)
    }

    /// Our index, for those who have none.
    fn index(&self, parts: &api::Parts, settings: &ApiConfig) -> ServedIndex {
        let intake = parts.intake.clone();
        let find = move |name: Option<&str>| {
            let model = intake.load().named(name)?.model;
            let hashing = model.agreement();
            Some(ServedModel {
                name: model.name.clone(),
                block_size: model.block_size,
                hashing,
            })
        };
        ServedIndex::new(remote_index::Parts {
            router: parts.entrance.router().clone(),
            find: Box::new(find),
            readiness: self.readiness.clone(),
            metrics: parts.metrics.clone(),
            most_blocks: settings.most_blocks as usize,
        })
    }

    /// Serves callers that are not Envoy, and ends what they book and forget.
    async fn serve_api(
        &mut self,
        sockets: &Sockets,
        config: &Config,
        parts: api::Parts,
    ) -> anyhow::Result<()> {
        let Some(settings) = &config.api else {
            return Ok(());
        };
        let (metrics, stop) = (parts.metrics.clone(), self.stop.clone());
        let index = self.index(&parts, settings);
        let api = Api::new(parts, settings);
        let listener = sockets.bind_api(settings).await?;
        self.api_address = listener.address();
        let server = Swap::new(api.server(most_bytes(config)));
        let mut routes = Routes::new(self.health.service()).add_service(server.clone());
        if config.serve_index {
            routes = routes.add_service(index.server());
        }
        let of_reload = api.clone();
        self.reloader.part("api", move |next| {
            let (place, server) = (server.clone(), of_reload.server(most_bytes(&next.config)));
            Ok(Box::new(move || place.replace(server)))
        });
        self.servers
            .spawn(listener.serve(routes, self.closing.clone(), self.cut.clone()));
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
        Ok(())
    }
}

/// Logs one line with the loaded models, workers and event sources once every startup step has ended.
async fn announce_ready(readiness: Readiness, reloader: Arc<Reloader>, started: Instant) {
    if readiness
        .changes()
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
        sources.partition(|member| router.trust(member.rank).is_attached());
    info!(
        took = format!("{:.1}s", started.elapsed().as_secs_f64()),
        models = reloader.running().models.len(),
        workers = fleet.workers().count(),
        event_sources = format!("{} of {}", live.len(), live.len() + absent.len()),
        "ready"
    );
}

/// Most bytes that a message with a body may have.
fn most_bytes(config: &Config) -> usize {
    config.limits.body.bytes().saturating_add(MESSAGE_OVERHEAD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_background_task_that_dies_ends_the_process() {
        let text = "listen: {tcp: '127.0.0.1:0'}\nadmin: {listen: '127.0.0.1:0'}\nmodels: [{name: m, block_size: 16}]\n\
                    workers: [{id: 1, endpoint: '127.0.0.1:8000'}]\n";
        let config =
            Config::parse(std::path::Path::new("warmroute.yaml"), text.as_bytes()).unwrap();
        let mut app = App::start(config).await.unwrap();
        app.background
            .spawn(async { panic!("as the keeper might") });
        let ended = app.run_until(std::future::pending()).await.unwrap_err();
        assert!(
            format!("{ended:#}").contains("a background task failed"),
            "{ended:#}"
        );
    }
}
