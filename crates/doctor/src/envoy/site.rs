//! Sites of warmroute's ext_proc filters in Envoy's configuration: the connection managers that
//! call warmroute, the configuration of the filter on each route, and the roles of several filters.

mod active_routes;
mod filter_config;

use super::control_plane::{ControlPlane, GeneratedNames};
use super::dump::{ConfigDump, HttpListener};
use super::expected::ExpectedEnvoy;
use super::schema::{EnvoyRoute, ExternalProcessor, GrpcService};
use crate::finding::FindingBuilder;
use active_routes::{FilterRoutes, route_clusters};
use filter_config::read_filters;

pub(super) use active_routes::ActiveRoute;
pub(super) use filter_config::ExtProcFilter;

/// A connection manager with a filter that calls warmroute.
#[derive(Clone, Debug)]
pub(super) struct FilterSite<'d> {
    pub(super) dump: &'d ConfigDump,
    pub(super) expected: &'d ExpectedEnvoy,
    pub(super) listener: &'d HttpListener,
    /// Main filter, which routes requests.
    pub(super) main: ExtProcFilter,
    /// First-token probe, if there is one.
    pub(super) probe: Option<ExtProcFilter>,
    /// Routes on which the main filter is active.
    pub(super) active: Vec<ActiveRoute<'d>>,
    /// Routes on which the filter is enabled but idle.
    pub(super) idle: Vec<&'d EnvoyRoute>,
    /// Control plane that generated the configuration.
    pub(super) plane: ControlPlane,
}

impl<'d> FilterSite<'d> {
    /// Returns every site whose filter calls warmroute. If there is none, returns the sites that
    /// call any server.
    pub(super) fn find_all(dump: &'d ConfigDump, expected: &'d ExpectedEnvoy) -> Vec<Self> {
        let of = |only_ours: bool| -> Vec<Self> {
            dump.listeners
                .iter()
                .flat_map(|server| Self::for_listener(dump, expected, server, only_ours))
                .collect()
        };
        let ours = of(true);
        if ours.is_empty() { of(false) } else { ours }
    }

    /// Returns one site per filter: Envoy AI Gateway adds a filter for each pool.
    fn for_listener(
        dump: &'d ConfigDump,
        expected: &'d ExpectedEnvoy,
        server: &'d HttpListener,
        only_ours: bool,
    ) -> Vec<Self> {
        let filters = read_filters(&server.hcm.http_filters);
        let is_ours = |service: &GrpcService| {
            service
                .addresses(dump)
                .iter()
                .any(|address| expected.is_ours(address))
        };
        let calls_warmroute = |filter: &ExtProcFilter| {
            let of_routes = FilterRoutes::find(server, filter).active;
            let services = of_routes
                .iter()
                .map(|active| &active.filter)
                .chain([&filter.config]);
            services
                .filter_map(|config| config.grpc_service.as_ref())
                .any(is_ours)
        };
        let declares_role = |filter: &ExtProcFilter| filter.declared_kind().is_some();
        let mains = || filters.iter().filter(|filter| !filter.is_probe());
        let found: Vec<&ExtProcFilter> = if only_ours {
            mains().filter(|filter| calls_warmroute(filter)).collect()
        } else {
            mains()
                .find(|filter| declares_role(filter))
                .or_else(|| mains().next())
                .into_iter()
                .collect()
        };
        // A probe with another address belongs to warmroute if it declares its role.
        let probe = filters
            .iter()
            .find(|filter| filter.is_probe() && (calls_warmroute(filter) || declares_role(filter)));
        found
            .into_iter()
            .map(|main| Self::new(dump, expected, server, main.clone()).with_probe(probe.cloned()))
            .collect()
    }

    fn new(
        dump: &'d ConfigDump,
        expected: &'d ExpectedEnvoy,
        server: &'d HttpListener,
        main: ExtProcFilter,
    ) -> Self {
        let FilterRoutes { active, idle } = FilterRoutes::find(server, &main);
        let services = active
            .iter()
            .map(|active| &active.filter)
            .chain([&main.config]);
        let names = GeneratedNames {
            listener: &server.name,
            pickers: services
                .filter_map(|config| config.grpc_service.as_ref()?.cluster())
                .collect(),
            routes: active
                .iter()
                .flat_map(ActiveRoute::routes)
                .map(|route| route.name.as_str())
                .collect(),
            targets: route_clusters(dump, server),
        };
        let plane = ControlPlane::detect(dump, &names);
        Self {
            dump,
            expected,
            listener: server,
            main,
            probe: None,
            active,
            idle,
            plane,
        }
    }

    fn with_probe(self, probe: Option<ExtProcFilter>) -> Self {
        Self { probe, ..self }
    }

    /// Returns the configurations of the filters that call a cluster.
    pub(super) fn callers_of(&self, cluster: &str) -> impl Iterator<Item = &ExternalProcessor> {
        let of_probe = self.probe.iter().map(|probe| &probe.config);
        let all = self.variants().into_iter().chain(of_probe);
        all.filter(move |filter| {
            filter.grpc_service.as_ref().and_then(GrpcService::cluster) == Some(cluster)
        })
    }

    /// Starts a check of this connection manager.
    pub(super) fn listener_check(&self, check: &'static str) -> FindingBuilder {
        FindingBuilder::new(check, format!("listener {}", self.listener.name))
    }

    /// Starts a check of one of its filters.
    pub(super) fn filter_check(
        &self,
        check: &'static str,
        filter: &ExtProcFilter,
    ) -> FindingBuilder {
        FindingBuilder::new(
            check,
            format!("listener {}, filter {}", self.listener.name, filter.name),
        )
    }

    /// Starts a check of one of its routes.
    pub(super) fn route_check(
        &self,
        check: &'static str,
        active: &ActiveRoute<'_>,
    ) -> FindingBuilder {
        FindingBuilder::new(
            check,
            format!("listener {}, {}", self.listener.name, active.title()),
        )
    }

    /// Formats a fix in the main filter.
    pub(super) fn in_main_filter(&self, text: &str) -> String {
        format!(
            "in the filter `{}` of listener `{}` write {text}",
            self.main.name, self.listener.name
        )
    }

    /// Returns the distinct filter configurations of the routes. If no routes are known, returns
    /// the filter's own configuration, because its problems affect every route.
    pub(super) fn variants(&self) -> Vec<&ExternalProcessor> {
        if self.active.is_empty() {
            return if self.main.config.is_idle() {
                Vec::new()
            } else {
                vec![&self.main.config]
            };
        }
        let mut variants: Vec<&ExternalProcessor> = Vec::new();
        for active in &self.active {
            if !variants.contains(&&active.filter) {
                variants.push(&active.filter);
            }
        }
        variants
    }
}
