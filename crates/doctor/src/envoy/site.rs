//! Sites of warmroute's ext_proc filters in Envoy's configuration: the connection managers that
//! call warmroute, the configuration of the filter on each route, and the roles of several filters.

use super::cluster::EnvoyCluster;
use super::config_node::ConfigNode;
use super::control_plane::ControlPlane;
use super::dump::{ConfigDump, HttpListener};
use super::expected::ExpectedEnvoy;
use super::ext_proc_filter::{ExtProcFilter, FilterConfig, service_addresses};
use crate::finding::CheckFacts;

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
    pub(super) idle: Vec<ConfigNode<'d>>,
    /// Control plane that generated the configuration.
    pub(super) plane: ControlPlane,
}

impl CheckFacts for FilterSite<'_> {
    fn subject(&self) -> String {
        format!("listener {}", self.listener.name)
    }
}

impl<'d> FilterSite<'d> {
    /// Returns every site whose filter calls warmroute. If there is none, returns the sites that
    /// call any server.
    pub(super) fn find_all(dump: &'d ConfigDump, expected: &'d ExpectedEnvoy) -> Vec<Self> {
        let of = |only_ours: bool| -> Vec<Self> {
            let listeners = dump.listeners.iter();
            listeners
                .flat_map(|listener| Self::for_listener(dump, expected, listener, only_ours))
                .collect()
        };
        let ours = of(true);
        if ours.is_empty() { of(false) } else { ours }
    }

    /// Returns one site per filter: Envoy AI Gateway adds a filter for each pool.
    fn for_listener(
        dump: &'d ConfigDump,
        expected: &'d ExpectedEnvoy,
        listener: &'d HttpListener,
        only_ours: bool,
    ) -> Vec<Self> {
        let filters = listener.filters().enumerate();
        let filters: Vec<ExtProcFilter> = filters
            .filter_map(|(at, filter)| ExtProcFilter::read(at, filter, filter.at("typed_config")))
            .collect();
        let calls_warmroute = |filter: &&ExtProcFilter| {
            let routes = FilterRoutes::find(listener, filter).active;
            let configs = routes.iter().map(|active| &active.filter);
            let services = configs.chain([&filter.config]);
            let addresses = services
                .filter_map(FilterConfig::service)
                .flat_map(|service| service_addresses(service, dump));
            addresses
                .into_iter()
                .any(|address| expected.is_ours(&address))
        };
        let declares_role = |filter: &&ExtProcFilter| filter.declared_role().is_some();
        let mains = || filters.iter().filter(|filter| !filter.is_probe());
        let found: Vec<&ExtProcFilter> = if only_ours {
            mains().filter(calls_warmroute).collect()
        } else {
            let declared = mains().find(declares_role);
            declared.or_else(|| mains().next()).into_iter().collect()
        };
        // A probe with another address belongs to warmroute if it declares its role.
        let mut probes = filters.iter().filter(|filter| filter.is_probe());
        let probe = probes.find(|filter| calls_warmroute(filter) || declares_role(filter));
        let site = |main: &ExtProcFilter| {
            let FilterRoutes { active, idle } = FilterRoutes::find(listener, main);
            let configs = active.iter().map(|active| &active.filter);
            let configs = configs.chain([&main.config]);
            let pickers: Vec<&str> = configs.filter_map(FilterConfig::cluster).collect();
            let plane = ControlPlane::detect(dump, listener, &pickers, &active);
            Self {
                dump,
                expected,
                listener,
                main: main.clone(),
                probe: probe.cloned(),
                active,
                idle,
                plane,
            }
        };
        found.into_iter().map(site).collect()
    }

    /// Returns the configurations of the filters that call a cluster.
    pub(super) fn callers_of(&self, cluster: &str) -> impl Iterator<Item = &FilterConfig> {
        let of_probe = self.probe.iter().map(|probe| &probe.config);
        let all = self.variants().into_iter().chain(of_probe);
        all.filter(move |filter| filter.cluster() == Some(cluster))
    }

    /// Returns the distinct filter configurations of the routes. If no routes are known, returns
    /// the filter's own configuration, because its problems affect every route.
    pub(super) fn variants(&self) -> Vec<&FilterConfig> {
        let own = Some(&self.main.config).filter(|own| self.active.is_empty() && !own.is_idle());
        let mut variants: Vec<&FilterConfig> = own.into_iter().collect();
        for active in &self.active {
            if !variants.contains(&&active.filter) {
                variants.push(&active.filter);
            }
        }
        variants
    }

    /// Returns the clusters of all active routes, each with its routes.
    pub(super) fn routed_clusters(&self) -> Vec<ClusterFacts<'_, 'd>> {
        let mut found: Vec<ClusterFacts<'_, 'd>> = Vec::new();
        for active in &self.active {
            for cluster in active.clusters(self.dump) {
                let mut known = found.iter_mut();
                match known.find(|known| known.cluster.name() == cluster.name()) {
                    Some(known) => known.actives.push(active),
                    None => found.push(ClusterFacts {
                        actives: vec![active],
                        ..ClusterFacts::new(self, cluster)
                    }),
                }
            }
        }
        found
    }
}

/// A cluster with its site, and the active routes that lead to it.
#[derive(Clone, Debug)]
pub(super) struct ClusterFacts<'s, 'd> {
    pub(super) site: &'s FilterSite<'d>,
    pub(super) cluster: EnvoyCluster<'d>,
    pub(super) actives: Vec<&'s ActiveRoute<'d>>,
}

impl<'s, 'd> ClusterFacts<'s, 'd> {
    /// Returns the facts about a cluster without routes.
    pub(super) fn new(site: &'s FilterSite<'d>, cluster: EnvoyCluster<'d>) -> Self {
        let actives = Vec::new();
        Self {
            site,
            cluster,
            actives,
        }
    }
}

impl CheckFacts for ClusterFacts<'_, '_> {
    fn subject(&self) -> String {
        format!("cluster {}", self.cluster.name())
    }
}

/// Returns the names of the clusters that a route may forward to.
pub(super) fn action_clusters(route: ConfigNode<'_>) -> impl Iterator<Item = &str> {
    let weighted = route.items("route.weighted_clusters.clusters");
    let weighted = weighted.map(|one| one.text("name"));
    route
        .given_text("route.cluster")
        .into_iter()
        .chain(weighted)
}

/// Returns a short name of a route.
pub(super) fn route_title(route: ConfigNode<'_>) -> String {
    let keys = ["path", "path_separated_prefix", "prefix"];
    let path = keys
        .into_iter()
        .find_map(|key| route.at("match").given_text(key));
    match (path, route.text("name")) {
        (Some(path), _) => format!("route {path}"),
        (None, "") => "a route by pattern".to_owned(),
        (None, name) => format!("route {name}"),
    }
}

/// A route on which the main filter is active.
#[derive(Clone, Debug)]
pub(super) struct ActiveRoute<'d> {
    pub(super) host: ConfigNode<'d>,
    pub(super) route: ConfigNode<'d>,
    /// Other routes that differ only in their paths.
    similar: Vec<ConfigNode<'d>>,
    /// Filter configuration on this route.
    pub(super) filter: FilterConfig,
}

impl<'d> ActiveRoute<'d> {
    /// Returns all routes.
    pub(super) fn routes(&self) -> impl Iterator<Item = ConfigNode<'d>> {
        std::iter::once(self.route).chain(self.similar.iter().copied())
    }

    /// Returns a short name.
    pub(super) fn title(&self) -> String {
        let title = route_title(self.route);
        match self.similar.len() {
            0 => title,
            similar => format!("{title} and {similar} like it"),
        }
    }

    /// Returns the known clusters that the route may forward to.
    pub(super) fn clusters(&self, dump: &'d ConfigDump) -> impl Iterator<Item = EnvoyCluster<'d>> {
        action_clusters(self.route).filter_map(|name| dump.cluster(name))
    }

    /// Returns the retry policy of the route or its virtual host.
    pub(super) fn retry_policy(&self) -> Option<ConfigNode<'d>> {
        let own = self.route.at("route.retry_policy").present();
        own.or(self.host.at("retry_policy").present())
    }

    /// Returns the headers that the route or its choice of a cluster depends on.
    pub(super) fn matched_headers(&self) -> impl Iterator<Item = &'d str> {
        let headers = self.route.items("match.headers");
        let headers = headers.map(|header| header.text("name"));
        headers.chain(self.route.given_text("route.cluster_header"))
    }

    /// Returns whether both differ only in their paths.
    fn differs_only_in_path(&self, other: &Self) -> bool {
        let has_exact_path = |active: &Self| {
            let matches = active.route.at("match");
            let keys = ["prefix", "path_separated_prefix", "safe_regex"];
            matches.given_text("path").is_some()
                && keys.iter().all(|key| matches.at(key).present().is_none())
                && matches.items("headers").next().is_none()
        };
        let compared = [
            "request_headers_to_remove",
            "request_body_buffer_limit",
            "per_request_buffer_limit_bytes",
            "route.cluster",
            "route.cluster_header",
            "route.weighted_clusters",
            "route.timeout",
            "route.idle_timeout",
            "route.retry_policy.retry_on",
            "route.retry_policy.retriable_status_codes",
            "route.retry_policy.retry_host_predicate",
            "route.request_mirror_policies",
        ];
        has_exact_path(self)
            && has_exact_path(other)
            && std::ptr::eq(self.host.0, other.host.0)
            && compared
                .iter()
                .all(|key| self.route.at(key) == other.route.at(key))
            && self.filter == other.filter
    }
}

/// Routes on which a filter is enabled.
#[derive(Default)]
struct FilterRoutes<'d> {
    active: Vec<ActiveRoute<'d>>,
    idle: Vec<ConfigNode<'d>>,
}

impl<'d> FilterRoutes<'d> {
    /// Finds the routes of a filter.
    fn find(listener: &'d HttpListener, filter: &ExtProcFilter) -> Self {
        let mut found = Self::default();
        let Some(all) = listener.routes() else {
            return found;
        };
        for host in all.items("virtual_hosts") {
            for route in host.items("routes") {
                let config = effective_config(filter, [all, host, route]);
                match config.filter(|_| route.at("route").present().is_some()) {
                    Some(config) if config.is_idle() => found.idle.push(route),
                    Some(filter) => found.add_active(ActiveRoute {
                        host,
                        route,
                        similar: Vec::new(),
                        filter,
                    }),
                    None => {}
                }
            }
        }
        found
    }

    fn add_active(&mut self, next: ActiveRoute<'d>) {
        let mut known = self.active.iter_mut();
        match known.find(|known| known.differs_only_in_path(&next)) {
            Some(known) => known.similar.push(next.route),
            None => self.active.push(next),
        }
    }
}

/// Returns the filter configuration on a route, from the settings of the route configuration, the
/// virtual host and the route; `None` if it is disabled there.
fn effective_config(filter: &ExtProcFilter, levels: [ConfigNode<'_>; 3]) -> Option<FilterConfig> {
    let settings = levels.map(|level| level.at("typed_per_filter_config").field(&filter.name));
    let mut is_disabled = filter.is_disabled;
    let mut config = filter.config.clone();
    // A more specific level overrides single fields.
    for setting in settings.into_iter().filter_map(ConfigNode::present) {
        let is_wrapped = setting.has_type("FilterConfig");
        let inner = if is_wrapped {
            setting.at("config")
        } else {
            setting
        };
        is_disabled = setting.flag("disabled") || inner.flag("disabled");
        config.apply_overrides(inner.at("overrides"));
    }
    (!is_disabled).then_some(config)
}

/// An active route with its site.
pub(super) struct RouteFacts<'s, 'd> {
    pub(super) site: &'s FilterSite<'d>,
    pub(super) active: &'s ActiveRoute<'d>,
}

impl CheckFacts for RouteFacts<'_, '_> {
    fn subject(&self) -> String {
        format!("{}, {}", self.site.subject(), self.active.title())
    }
}

/// A configuration of a filter with its site.
pub(super) struct FilterFacts<'s, 'd> {
    pub(super) site: &'s FilterSite<'d>,
    pub(super) filter: &'s FilterConfig,
}

impl CheckFacts for FilterFacts<'_, '_> {
    fn subject(&self) -> String {
        self.site.subject()
    }
}
