//! Servers of the process: health, admin pages, xDS, ext_proc and API.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use tonic::service::Routes;
use warmroute_runtime::lifecycle::supervise;

use super::ext_proc_factory::ExtProcFactory;
use super::listeners::{GrpcListener, ListenerFactory};
use super::reload::{ConfigStatus, ReloadCandidate, Reloader};
use super::reloadable_service::ReloadableService;
use super::{App, LOADING, unix_socket};
use crate::admin::explain::ExplainContext;
use crate::admin::{
    self, AdminState, ModelStatus, ProcessStatus, ProcessStatusSource, TokenizerKind,
};
use crate::api::{self, ApiService};
use crate::cluster::remote_index::{self, IndexService, IndexedModel};
use crate::cluster::replica::ReplicaSync;
use crate::config::{Config, ModelConfig, PoolConfig, WorkerSource};
use crate::dispatch::Dispatcher;
use crate::ext_proc::config::ObserveMode;
use crate::ext_proc::server::ExtProcServer;
use crate::ext_proc::state::ExtProcState;
use crate::fleet::xds::{XdsClients, XdsService};
use crate::request::RequestPreprocessor;
use crate::version::BuildVersion;

/// Version of the program and file of its configuration, for metrics and status pages.
#[derive(Clone, Debug)]
pub struct ProcessOrigin {
    /// Version of the program.
    pub version: BuildVersion,
    /// Configuration file. `None` if the process is configured by flags or by a test.
    pub config_file: Option<PathBuf>,
}

impl Default for ProcessOrigin {
    fn default() -> Self {
        Self {
            version: BuildVersion::PACKAGE,
            config_file: None,
        }
    }
}

/// Returns the page of the configuration in use.
fn config_page(status: &ConfigStatus, file: Option<&Path>) -> Value {
    json!({
        "file": file.map(|file| file.display().to_string()),
        "generation": status.generation,
        "last_reload": status.last_reload,
        "needs_restart": status.needs_restart,
        "config": status.config.to_json(),
    })
}

/// Returns the rules that the cluster defines. `None` if warmroute does not watch a cluster.
fn cluster_page(reloader: &Reloader) -> Option<Value> {
    let status = reloader.cluster.load().status.clone();
    match (reloader.running().worker_source(), status) {
        (WorkerSource::Kubernetes(_), Value::Null) => {
            Some(json!({"pending": "the objects of the cluster have not been read yet"}))
        }
        (WorkerSource::Kubernetes(_), status) => Some(status),
        _ => None,
    }
}

fn model_status(model: &ModelConfig) -> ModelStatus {
    let local = model.tokenizer.as_ref().map(|_| TokenizerKind::Local);
    let remote = model.remote_tokenizer.as_ref();
    ModelStatus {
        name: model.name.to_string(),
        tokenizer: local.or(remote.map(|_| TokenizerKind::Remote)),
    }
}

/// Returns the display name of a pool.
fn pool_name(pool: &PoolConfig) -> Option<String> {
    let name = pool.name.as_ref()?;
    Some(match &pool.namespace {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.clone(),
    })
}

impl App {
    /// Starts the health services, which follow readiness, and the dedicated listener if
    /// configured.
    pub(super) async fn serve_health(
        &mut self,
        sockets: &ListenerFactory,
        config: &Config,
    ) -> anyhow::Result<()> {
        for health in [&self.health, &self.dedicated_health] {
            health.publish(&self.readiness).await;
            let health = health.clone();
            let readiness = self.readiness.clone();
            let stop = self.stop.clone();
            self.background.spawn(async move {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = health.follow_readiness(readiness) => {}
                }
            });
        }
        let Some(address) = config.listeners.ext_proc.health_address else {
            return Ok(());
        };
        let listener = sockets.bind_health(address).await?;
        self.health_address = listener.address();
        self.pages.spawn(listener.serve(
            Routes::new(self.dedicated_health.service()),
            self.close_pages.clone(),
            self.abort.clone(),
        ));
        Ok(())
    }

    /// Creates the state of the admin pages.
    pub(super) fn admin_pages(
        &self,
        dispatcher: &Arc<Dispatcher>,
        explain: &ExplainContext,
        envoys: Option<Arc<XdsClients>>,
        replica: Option<Arc<ReplicaSync>>,
    ) -> AdminState {
        let reloader = self.reloader.clone();
        let cluster = move || cluster_page(&reloader);
        let index_client = self.reloader.index_client.clone();
        let reloader = self.reloader.clone();
        let file = self.origin.config_file.clone();
        let config = move || Some(config_page(&reloader.status(), file.as_deref()));
        AdminState {
            dispatcher: dispatcher.clone(),
            audit: self.audit.clone(),
            metrics: self.reloader.metrics.clone(),
            readiness: self.readiness.clone(),
            process: self.process_status(),
            config: Arc::new(config),
            explain: explain.clone(),
            envoys: Arc::new(move || Some(json!(envoys.as_ref()?.statuses()))),
            cluster: Arc::new(cluster),
            replicas: Arc::new(move || Some(replica.as_ref()?.status())),
            remote_index: Arc::new(move || Some(index_client.as_ref()?.status())),
        }
    }

    /// Returns the source of the process status of the admin pages.
    fn process_status(&self) -> ProcessStatusSource {
        let reloader = self.reloader.clone();
        let origin = self.origin.clone();
        let started_at = self.started_at;
        Arc::new(move || {
            let ConfigStatus {
                generation,
                config,
                needs_restart,
                last_reload,
            } = ConfigStatus::clone(&reloader.status());
            let parity = &config.engines.parity_check;
            ProcessStatus {
                version: origin.version,
                started_at,
                config_file: origin.config_file.clone(),
                generation,
                last_reload,
                needs_restart,
                pool: config.process.pool.as_ref().and_then(pool_name),
                models: config.models.iter().map(model_status).collect(),
                observes_usage: matches!(
                    config.gateway.observe,
                    ObserveMode::Usage | ObserveMode::Sampled(_)
                ),
                checks_parity: parity.enabled || parity.sample_requests,
            }
        })
    }

    /// Creates the xDS service, if configured, and returns it if it belongs to the ext_proc
    /// listener. With its own address it starts immediately, so that Envoy receives the workers
    /// while tokenizers load.
    pub(super) async fn start_xds(
        &mut self,
        sockets: &ListenerFactory,
        config: &Config,
        envoys: Option<Arc<XdsClients>>,
    ) -> anyhow::Result<Option<XdsService>> {
        let settings = config.envoy.as_ref().and_then(|envoy| envoy.xds.as_ref());
        let (Some(settings), Some(envoys)) = (settings, envoys) else {
            return Ok(None);
        };
        let discovery = XdsService::new(envoys, self.closing.clone());
        let Some(address) = settings.address else {
            return Ok(Some(discovery));
        };
        let listener = sockets.bind_xds(address, settings.tls.as_ref()).await?;
        self.xds_address = listener.address();
        let routes = discovery.add_to(Routes::new(self.health.service()));
        self.servers
            .spawn(listener.serve(routes, self.closing.clone(), self.abort.clone()));
        Ok(None)
    }

    /// Serves the admin pages.
    pub(super) async fn serve_admin(
        &mut self,
        sockets: &ListenerFactory,
        config: &Config,
        pages: AdminState,
    ) -> anyhow::Result<()> {
        let listener = sockets.bind_admin(&config.listeners.admin).await?;
        self.admin_address = listener.address;
        self.pages
            .spawn(listener.serve(admin::admin_routes(pages), self.close_pages.clone()));
        Ok(())
    }

    /// Binds the ext_proc listeners.
    pub(super) async fn bind_ext_proc(
        &mut self,
        sockets: &ListenerFactory,
        config: &Config,
    ) -> anyhow::Result<Vec<GrpcListener>> {
        if let Some(socket) = &config.listeners.ext_proc.unix_socket {
            unix_socket::wait_turn(socket, &self.readiness, LOADING).await;
        }
        // Bound last: a socket that accepts but does not respond would delay each request until
        // Envoy times out, while a closed port fails immediately.
        let listeners = sockets.bind(&config.listeners.ext_proc).await?;
        self.ext_proc_address = listeners.iter().find_map(GrpcListener::address);
        self.ext_proc_socket = listeners.iter().find_map(GrpcListener::path);
        self.socket = listeners.iter().find_map(GrpcListener::socket_identity);
        Ok(listeners)
    }

    /// Serves ext_proc, health and, if `discovery` is set, xDS.
    pub(super) fn serve_ext_proc(
        &mut self,
        listeners: Vec<GrpcListener>,
        service: &ReloadableService<ExtProcServer>,
        discovery: Option<&XdsService>,
    ) {
        for listener in listeners {
            let routes = Routes::new(self.health.service()).add_service(service.clone());
            let routes = match discovery {
                Some(discovery) => discovery.add_to(routes),
                None => routes,
            };
            self.servers
                .spawn(listener.serve(routes, self.closing.clone(), self.abort.clone()));
        }
    }

    /// Creates the ext_proc service, which follows configuration reloads.
    pub(super) fn ext_proc_service(
        &self,
        config: &Config,
        preprocessor: Arc<RequestPreprocessor>,
        dispatcher: Arc<Dispatcher>,
        replica: Option<Arc<ReplicaSync>>,
    ) -> anyhow::Result<ReloadableService<ExtProcServer>> {
        let state = ExtProcState::new(self.reloader.metrics.clone(), self.audit.clone());
        if let Some(replica) = replica {
            let weak_state = Arc::downgrade(&state);
            replica.on_first_token(move |name| {
                weak_state
                    .upgrade()
                    .into_iter()
                    .for_each(|state| state.record_first_token(name));
            });
            state.on_foreign_first_token(move |name| replica.publish_first_token(name));
        }
        let factory = ExtProcFactory::new(dispatcher, state, self.exchange_tasks.clone());
        let (service, prefill_clients) = factory.prepare(config, preprocessor)?;
        factory.commit(prefill_clients);
        let reloadable = ReloadableService::new(service);
        let current = reloadable.clone();
        self.reloader
            .register("ext_proc", move |next: &ReloadCandidate| {
                let (service, prefill_clients) =
                    factory.prepare(&next.config, next.preprocessor.clone())?;
                let current = current.clone();
                let factory = factory.clone();
                Ok(Box::new(move || {
                    factory.commit(prefill_clients);
                    current.replace(service);
                }))
            });
        Ok(reloadable)
    }

    /// Creates the index service, for processes that keep no index of their own.
    fn served_index(&self, parts: &api::ApiDependencies) -> IndexService {
        let preprocessor = parts.preprocessor.clone();
        let find_model = move |name: Option<&str>| {
            let resolved = preprocessor.load().resolve_model(name)?;
            let hashing = resolved.hash_fingerprint();
            let model = resolved.model;
            Some(IndexedModel {
                name: model.name.clone(),
                block_size: model.block_size,
                hashing,
            })
        };
        IndexService::new(remote_index::IndexServiceParts {
            router: parts.dispatcher.router().clone(),
            find_model: Box::new(find_model),
            readiness: self.readiness.clone(),
            metrics: parts.metrics.clone(),
            max_blocks: api::MAX_PROMPT_BLOCKS,
        })
    }

    /// Starts the API, and the expiry of its bookings.
    pub(super) async fn serve_api(
        &mut self,
        sockets: &ListenerFactory,
        config: &Config,
        parts: api::ApiDependencies,
    ) -> anyhow::Result<()> {
        let Some(settings) = &config.listeners.api else {
            return Ok(());
        };
        let metrics = parts.metrics.clone();
        let stop = self.stop.clone();
        let index = self.served_index(&parts);
        let api = ApiService::new(parts, settings);
        let listener = sockets.bind_api(settings).await?;
        self.api_address = listener.address();
        let server = ReloadableService::new(api.server(config.requests.limits.max_message_bytes()));
        let mut routes = Routes::new(self.health.service()).add_service(server.clone());
        if config.index.serve {
            routes = routes.add_service(index.server());
        }
        let reload_api = api.clone();
        self.reloader.register("api", move |next| {
            let current = server.clone();
            let server = reload_api.server(next.config.requests.limits.max_message_bytes());
            Ok(Box::new(move || current.replace(server)))
        });
        self.servers
            .spawn(listener.serve(routes, self.closing.clone(), self.abort.clone()));
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
