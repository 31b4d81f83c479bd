//! Creates the ext_proc service of a configuration. State that outlives a reload is passed from one
//! service to the next.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio_util::task::TaskTracker;

use crate::config::{Config, FirstToken};
use crate::dispatch::Dispatcher;
use crate::dispatch::audit::CacheAudit;
use crate::ext_proc::config::AssumedBodies;
use crate::ext_proc::exchange::ExchangeOptions;
use crate::ext_proc::message::{BodyMode, BodyModes};
use crate::ext_proc::pipeline::{ExchangePolicy, RequestPipeline};
use crate::ext_proc::routing_headers::RoutingHeaders;
use crate::ext_proc::server::ExtProcServer;
use crate::ext_proc::service::ExtProcService;
use crate::ext_proc::state::{ExchangeConfig, ExtProcState};
use crate::prefill::{PrefillClients, PrefillPlanner};
use crate::request::RequestPreprocessor;

/// Factory of ext_proc services.
pub(super) struct ExtProcFactory {
    dispatcher: Arc<Dispatcher>,
    state: Arc<ExtProcState>,
    /// Tasks that continue after their exchange: prefills and aborts.
    exchange_tasks: TaskTracker,
    /// Prefill clients of the current configuration.
    prefill_clients: Mutex<PrefillClients>,
}

impl ExtProcFactory {
    pub(super) fn new(
        dispatcher: Arc<Dispatcher>,
        state: Arc<ExtProcState>,
        exchange_tasks: TaskTracker,
    ) -> Arc<Self> {
        Arc::new(Self {
            dispatcher,
            state,
            exchange_tasks,
            prefill_clients: Mutex::default(),
        })
    }

    /// Creates the ext_proc service of a configuration, with its prefill clients. Unchanged clients
    /// are reused, so that connections and limits persist.
    pub(super) fn prepare(
        &self,
        config: &Config,
        preprocessor: Arc<RequestPreprocessor>,
    ) -> anyhow::Result<(ExtProcServer, PrefillClients)> {
        let prefills = config
            .models
            .iter()
            .filter_map(|model| Some((&model.name, model.prefill.as_ref()?)));
        let prefill_clients = self.prefill_clients.lock().reconfigure(
            prefills,
            &config.engines.http,
            &self.state.metrics,
            &self.exchange_tasks,
        )?;
        let metrics = self.state.metrics.clone();
        let exchange_config = ExchangeConfig {
            pipeline: RequestPipeline::new(
                preprocessor,
                self.dispatcher.clone(),
                metrics,
                policy(config),
                prefill_planner(config, &prefill_clients, &self.state.audit),
            ),
            options: Arc::new(options(config)),
            upload_timeout: config.requests.limits.upload_timeout.get(),
            held_body_limit: config.requests.limits.max_buffered_bytes.bytes(),
        };
        let service = ExtProcService::new(exchange_config, self.state.clone());
        // The default message limit of tonic, 4 MiB, would reject bodies that the configuration
        // allows. With `failure_mode_allow` Envoy would then send the request to a random worker.
        Ok((
            ExtProcServer::new(service, config.requests.limits.max_message_bytes()),
            prefill_clients,
        ))
    }

    /// Stores the clients of the new current configuration.
    pub(super) fn commit(&self, clients: PrefillClients) {
        *self.prefill_clients.lock() = clients;
    }
}

fn prefill_planner(
    config: &Config,
    clients: &PrefillClients,
    audit: &Arc<CacheAudit>,
) -> PrefillPlanner {
    let executors = config.models.iter().filter_map(|model| {
        let executor = clients.executor(&model.name, model.prefill.as_ref()?, audit)?;
        Some((model.name.clone(), executor))
    });
    PrefillPlanner {
        executors: executors.collect(),
        reserved_headers: routing_headers(config).removed_names().cloned().collect(),
        trusts_clients: config.requests.clients.trusted,
    }
}

fn routing_headers(config: &Config) -> RoutingHeaders {
    let headers = config.gateway.routing_headers();
    if config.requests.clients.trusted {
        headers
    } else {
        headers.without_client_hints()
    }
}

fn policy(config: &Config) -> ExchangePolicy {
    let with_headers = config
        .models
        .iter()
        .filter(|model| model.first_token_signal == FirstToken::Headers);
    let failure = config
        .models
        .iter()
        .filter_map(|model| Some((model.name.clone(), model.failure_mode?)));
    ExchangePolicy {
        failure: config.gateway.failure,
        model_failure_modes: failure.collect(),
        // An explicit `enforce` requests the 503.
        fails_open_without_prefill: config.has_dynamo_prefills()
            && !config.routing.disaggregation.enforce,
        first_token_with_headers: with_headers.map(|model| model.name.clone()).collect(),
        response_headers: config.gateway.response_headers,
        conformance: config.gateway.conformance,
        dropped_reason_header: config.gateway.routing_headers().sets_dropped_reason(),
    }
}

fn options(config: &Config) -> ExchangeOptions {
    let assumed_modes = match config.gateway.default_body_mode {
        AssumedBodies::Buffered => BodyModes::default(),
        AssumedBodies::FullDuplex => BodyModes {
            request: BodyMode::FullDuplexStreamed,
            response: BodyMode::FullDuplexStreamed,
        },
    };
    ExchangeOptions {
        paths: Arc::new(config.requests.api_paths()),
        body_limit: config.requests.limits.max_body_size.bytes(),
        routing_headers: routing_headers(config),
        clear_route_cache: config.gateway.clear_route_cache,
        assumed_modes,
        observe: config.gateway.observe,
        output_blocks: config.routing.load.output_blocks,
        conformance: config.gateway.conformance,
        response_headers: config.gateway.response_headers,
    }
}
