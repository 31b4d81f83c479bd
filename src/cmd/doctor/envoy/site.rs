//! Where in Envoy's configuration warmroute stands: the connection managers whose filters ask us, what the filters are on
//! each route, and which of two filters is which.

use serde_json::Value;

use super::control_plane::{ControlPlane, GeneratedNames};
use super::dump::{Address, Dump, Server, is, part};
use super::expected::Expected;
use super::parts::{
    Action, Extension, ExternalProcessing, Grpc, KeyValue, Match, Overrides, PerRoute, RetryPolicy,
    Route, VirtualHost, body_mode, shows_headers, shows_trailers,
};
use crate::cmd::doctor::finding::At;
use crate::ext_proc::service::{FILTER, PROBE};

/// One ext_proc filter of a connection manager.
#[derive(Clone, Debug)]
pub(super) struct Filter {
    /// Its name.
    pub(super) name: String,
    /// Its place in the list.
    pub(super) at: usize,
    /// Whether routes have to switch it on.
    off: bool,
    /// What it does where no route says otherwise.
    pub(super) config: ExternalProcessing,
}

impl Filter {
    /// One that is not switched off.
    pub(super) fn new(name: String, at: usize, config: ExternalProcessing) -> Self {
        Self {
            name,
            at,
            off: false,
            config,
        }
    }

    /// What it tells us of itself.
    pub(super) fn says(&self) -> Option<&str> {
        let service = self.config.grpc_service.as_ref()?;
        service
            .initial_metadata
            .iter()
            .find(|pair| pair.key == FILTER)
            .map(|pair| pair.value.as_str())
    }

    /// Whether it only looks for the first token.
    pub(super) fn is_probe(&self) -> bool {
        let modes = &self.config.processing_mode;
        let blind = !shows_headers(&modes.request_header_mode)
            && !shows_headers(&modes.response_header_mode);
        match self.says() {
            Some(said) => said == PROBE,
            None => blind && modes.response_body_mode == "STREAMED",
        }
    }

    /// The cluster it asks.
    pub(super) fn cluster(&self) -> Option<&str> {
        self.config.grpc_service.as_ref()?.cluster()
    }

    /// Where it asks.
    pub(super) fn asks(&self, dump: &Dump) -> Vec<Address> {
        self.config
            .grpc_service
            .as_ref()
            .map(|service| service.addresses(dump))
            .unwrap_or_default()
    }
}

impl Grpc {
    /// The cluster of the calls.
    pub(super) fn cluster(&self) -> Option<&str> {
        Some(&self.envoy_grpc.as_ref()?.cluster_name)
    }

    /// The addresses of the calls.
    pub(super) fn addresses(&self, dump: &Dump) -> Vec<Address> {
        if let Some(by_address) = &self.google_grpc {
            return uri(&by_address.target_uri).into_iter().collect();
        }
        let cluster = self.cluster().and_then(|name| dump.clusters.get(name));
        cluster
            .and_then(|cluster| dump.endpoints_of(cluster))
            .unwrap_or_default()
    }
}

impl ExternalProcessing {
    /// Whether the filter sends nothing to the server and so never calls it. Istio's filter is idle unless a route overrides it.
    pub(super) fn is_idle(&self) -> bool {
        let modes = &self.processing_mode;
        let bodies = [&modes.request_body_mode, &modes.response_body_mode];
        let trailers = [&modes.request_trailer_mode, &modes.response_trailer_mode];
        !shows_headers(&modes.request_header_mode)
            && !shows_headers(&modes.response_header_mode)
            && bodies.into_iter().all(|mode| body_mode(mode) == "NONE")
            && !trailers.into_iter().any(|mode| shows_trailers(mode))
    }
}

fn uri(target: &str) -> Option<Address> {
    if let Some(path) = target.strip_prefix("unix:") {
        return Some(Address::Pipe(path.trim_start_matches("//").to_owned()));
    }
    let (host, port) = target
        .rsplit_once("/")
        .map_or(target, |(_, rest)| rest)
        .rsplit_once(':')?;
    Some(Address::Socket(
        host.trim_matches(['[', ']']).to_owned(),
        port.parse().ok()?,
    ))
}

/// A route on which the main filter is at work.
#[derive(Clone, Debug)]
pub(super) struct Active<'d> {
    pub(super) host: &'d VirtualHost,
    pub(super) route: &'d Route,
    /// Further ones that do the same with other paths.
    pub(super) alike: Vec<&'d Route>,
    pub(super) action: &'d Action,
    /// The filter as this route has it.
    pub(super) filter: ExternalProcessing,
}

impl<'d> Active<'d> {
    /// All of its routes.
    pub(super) fn routes(&self) -> impl Iterator<Item = &'d Route> {
        std::iter::once(self.route).chain(self.alike.iter().copied())
    }

    /// It in a word.
    pub(super) fn title(&self) -> String {
        let title = self.route.title();
        if self.alike.is_empty() {
            title
        } else {
            format!("{title} and {} like it", self.alike.len())
        }
    }

    /// When its requests are sent again.
    pub(super) fn retry_policy(&self) -> Option<&'d RetryPolicy> {
        self.action
            .retry_policy
            .as_ref()
            .or(self.host.retry_policy.as_ref())
    }

    /// Whether nothing but the paths tells the two apart.
    fn is_like(&self, other: &Self) -> bool {
        let paths = |active: &Self| {
            let Match {
                prefix,
                path,
                path_separated_prefix,
                safe_regex,
                headers,
            } = &active.route.matches;
            let exact = path.is_some()
                && prefix.is_none()
                && path_separated_prefix.is_none()
                && safe_regex.is_none();
            exact && headers.is_empty()
        };
        let rest = |route: &Route| {
            let removed = route.request_headers_to_remove.clone();
            (
                route.request_body_buffer_limit,
                route.per_request_buffer_limit_bytes,
                removed,
            )
        };
        paths(self)
            && paths(other)
            && std::ptr::eq(self.host, other.host)
            && rest(self.route) == rest(other.route)
            && self.action == other.action
            && self.filter == other.filter
    }
}

/// One connection manager that asks us.
#[derive(Clone, Debug)]
pub(super) struct Site<'d> {
    pub(super) dump: &'d Dump,
    pub(super) expected: &'d Expected,
    pub(super) server: &'d Server,
    /// The filter that routes.
    pub(super) main: Filter,
    /// The filter that looks for first tokens.
    pub(super) probe: Option<Filter>,
    /// Where the first is at work.
    pub(super) active: Vec<Active<'d>>,
    /// Routes on which the filter is on, and shows nothing.
    pub(super) idle: Vec<&'d Route>,
    /// The control plane that generated it.
    pub(super) plane: ControlPlane,
}

impl<'d> Site<'d> {
    /// Every connection manager whose filters ask us; where none does, those that ask anybody.
    pub(super) fn all(dump: &'d Dump, expected: &'d Expected) -> Vec<Self> {
        let of = |only_ours: bool| -> Vec<Self> {
            dump.servers
                .iter()
                .flat_map(|server| Self::of(dump, expected, server, only_ours))
                .collect()
        };
        let ours = of(true);
        if ours.is_empty() { of(false) } else { ours }
    }

    /// A site per filter: Envoy AI Gateway adds one for each pool.
    fn of(
        dump: &'d Dump,
        expected: &'d Expected,
        server: &'d Server,
        only_ours: bool,
    ) -> Vec<Self> {
        let filters = filters(&server.hcm.http_filters);
        let is_ours = |service: &Grpc| {
            service
                .addresses(dump)
                .iter()
                .any(|address| expected.is_ours(address))
        };
        let asks_us = |filter: &Filter| {
            let of_routes = FilterRoutes::of(server, filter).active;
            let services = of_routes
                .iter()
                .map(|active| &active.filter)
                .chain([&filter.config]);
            services
                .filter_map(|config| config.grpc_service.as_ref())
                .any(is_ours)
        };
        let signed = |filter: &Filter| filter.says().is_some();
        let mains = || filters.iter().filter(|filter| !filter.is_probe());
        let found: Vec<&Filter> = if only_ours {
            mains().filter(|filter| asks_us(filter)).collect()
        } else {
            mains()
                .find(|filter| signed(filter))
                .or_else(|| mains().next())
                .into_iter()
                .collect()
        };
        // A probe that asks elsewhere is ours all the same where it says so.
        let probe = filters
            .iter()
            .find(|filter| filter.is_probe() && (asks_us(filter) || signed(filter)));
        found
            .into_iter()
            .map(|main| Self::new(dump, expected, server, main.clone()).with(probe.cloned()))
            .collect()
    }

    fn new(dump: &'d Dump, expected: &'d Expected, server: &'d Server, main: Filter) -> Self {
        let FilterRoutes { active, idle } = FilterRoutes::of(server, &main);
        let services = active
            .iter()
            .map(|active| &active.filter)
            .chain([&main.config]);
        let names = GeneratedNames {
            listener: &server.listener,
            pickers: services
                .filter_map(|config| config.grpc_service.as_ref()?.cluster())
                .collect(),
            routes: active
                .iter()
                .flat_map(Active::routes)
                .map(|route| route.name.as_str())
                .collect(),
            targets: targets(dump, server),
        };
        let plane = ControlPlane::recognise(dump, &names);
        Self {
            dump,
            expected,
            server,
            main,
            probe: None,
            active,
            idle,
            plane,
        }
    }

    fn with(self, probe: Option<Filter>) -> Self {
        Self { probe, ..self }
    }

    /// A check of this connection manager.
    pub(super) fn at(&self, check: &'static str) -> At {
        At::new(check, format!("listener {}", self.server.listener))
    }

    /// A check of one of its filters.
    pub(super) fn at_filter(&self, check: &'static str, filter: &Filter) -> At {
        At::new(
            check,
            format!("listener {}, filter {}", self.server.listener, filter.name),
        )
    }

    /// A check of one of its routes.
    pub(super) fn at_route(&self, check: &'static str, active: &Active<'_>) -> At {
        At::new(
            check,
            format!("listener {}, {}", self.server.listener, active.title()),
        )
    }

    /// `text`, and that it is to be written in the main filter.
    pub(super) fn in_main(&self, text: &str) -> String {
        format!(
            "in the filter `{}` of listener `{}` write {text}",
            self.main.name, self.server.listener
        )
    }

    /// The filter as the routes have it, each way once; as the list of filters has it where no route is known to use it,
    /// because what is wrong there is wrong wherever it is switched on.
    pub(super) fn variants(&self) -> Vec<&ExternalProcessing> {
        if self.active.is_empty() {
            return if self.main.config.is_idle() {
                Vec::new()
            } else {
                vec![&self.main.config]
            };
        }
        let mut variants: Vec<&ExternalProcessing> = Vec::new();
        for active in &self.active {
            if !variants.contains(&&active.filter) {
                variants.push(&active.filter);
            }
        }
        variants
    }
}

fn filters(list: &[Extension]) -> Vec<Filter> {
    let read = |(at, filter): (usize, &Extension)| {
        let ext_proc =
            is(&filter.typed_config, "ExternalProcessor").then_some(&filter.typed_config)?;
        let config = part(ext_proc, "a filter").ok()?;
        Some(Filter {
            name: filter.name.clone(),
            at,
            off: filter.disabled,
            config,
        })
    };
    list.iter().enumerate().filter_map(read).collect()
}

/// The clusters of all routes of a connection manager; every cluster where its routes are not on the page.
fn targets<'d>(dump: &'d Dump, server: &'d Server) -> Vec<&'d str> {
    let Some(routes) = &server.routes else {
        return dump.clusters.keys().map(String::as_str).collect();
    };
    let actions = routes
        .virtual_hosts
        .iter()
        .flat_map(|host| &host.routes)
        .filter_map(|route| route.route.as_ref());
    actions.flat_map(Action::clusters).collect()
}

/// The routes on which a filter is on.
#[derive(Default)]
struct FilterRoutes<'d> {
    active: Vec<Active<'d>>,
    idle: Vec<&'d Route>,
}

impl<'d> FilterRoutes<'d> {
    fn of(server: &'d Server, filter: &Filter) -> Self {
        let mut uses = Self::default();
        let Some(routes) = &server.routes else {
            return uses;
        };
        for host in &routes.virtual_hosts {
            for route in &host.routes {
                let levels = [
                    &routes.typed_per_filter_config,
                    &host.typed_per_filter_config,
                    &route.typed_per_filter_config,
                ];
                let levels: Vec<PerRoute> = levels
                    .into_iter()
                    .filter_map(|level| level.get(&filter.name))
                    .map(per_route)
                    .collect();
                let (Some(action), Some(filter)) = (&route.route, effective(filter, &levels))
                else {
                    continue;
                };
                if filter.is_idle() {
                    uses.idle.push(route);
                    continue;
                }
                let next = Active {
                    host,
                    route,
                    alike: Vec::new(),
                    action,
                    filter,
                };
                match uses.active.iter_mut().find(|known| known.is_like(&next)) {
                    Some(known) => known.alike.push(route),
                    None => uses.active.push(next),
                }
            }
        }
        uses
    }
}

fn per_route(said: &Value) -> PerRoute {
    let outer = PerRoute {
        disabled: said["disabled"].as_bool().unwrap_or_default(),
        overrides: None,
    };
    let inner = if is(said, "FilterConfig") {
        &said["config"]
    } else {
        said
    };
    let inner: PerRoute = part(inner, "a route").unwrap_or_default();
    PerRoute {
        disabled: outer.disabled || inner.disabled,
        ..inner
    }
}

/// The filter on a route, from the settings of the route configuration, the virtual host and the route; none where it is off.
fn effective(filter: &Filter, levels: &[PerRoute]) -> Option<ExternalProcessing> {
    let Some(last) = levels.last() else {
        return (!filter.off).then(|| filter.config.clone());
    };
    if last.disabled {
        return None;
    }
    let mut config = filter.config.clone();
    // A more specific level overrides field by field.
    for overrides in levels.iter().filter_map(|level| level.overrides.as_ref()) {
        apply(overrides, &mut config);
    }
    Some(config)
}

fn apply(overrides: &Overrides, config: &mut ExternalProcessing) {
    let Overrides {
        processing_mode,
        grpc_service,
        grpc_initial_metadata,
        metadata_options,
        failure_mode_allow,
        ..
    } = overrides;
    if let Some(modes) = processing_mode {
        config.processing_mode = modes.clone();
    }
    if let Some(service) = grpc_service {
        config.grpc_service = Some(service.clone());
    }
    if let Some(service) = &mut config.grpc_service {
        grpc_initial_metadata
            .iter()
            .for_each(|pair| set(&mut service.initial_metadata, pair));
    }
    let options = metadata_options.clone().unwrap_or_default();
    if let Some(namespaces) = options.forwarding_namespaces {
        config.metadata_options.forwarding_namespaces = namespaces;
    }
    if let Some(namespaces) = options.receiving_namespaces {
        config.metadata_options.receiving_namespaces = namespaces;
    }
    config.failure_mode_allow = failure_mode_allow.unwrap_or(config.failure_mode_allow);
    config.ignored_attributes.extend(
        overrides
            .request_attributes
            .iter()
            .chain(&overrides.response_attributes)
            .cloned(),
    );
}

fn set(metadata: &mut Vec<KeyValue>, pair: &KeyValue) {
    metadata.retain(|known| known.key != pair.key);
    metadata.push(pair.clone());
}
