//! Where in Envoy's configuration warmroute stands: the connection managers whose filters ask us, what the filters are on
//! each route, and which of two filters is which.

use serde_json::Value;

use super::dump::{Address, Dump, Server, is, part};
use super::expected::Expected;
use super::parts::{
    Action, Extension, ExternalProcessing, Match, PerRoute, RetryPolicy, Route, VirtualHost, shows_headers,
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
        Self { name, at, off: false, config }
    }

    /// What it tells us of itself.
    pub(super) fn says(&self) -> Option<&str> {
        let service = self.config.grpc_service.as_ref()?;
        service.initial_metadata.iter().find(|pair| pair.key == FILTER).map(|pair| pair.value.as_str())
    }

    /// Whether it only looks for the first token.
    pub(super) fn is_probe(&self) -> bool {
        let modes = &self.config.processing_mode;
        let blind = !shows_headers(&modes.request_header_mode) && !shows_headers(&modes.response_header_mode);
        match self.says() {
            Some(said) => said == PROBE,
            None => blind && modes.response_body_mode == "STREAMED",
        }
    }

    /// The cluster it asks.
    pub(super) fn cluster(&self) -> Option<&str> {
        let by_cluster = self.config.grpc_service.as_ref()?.envoy_grpc.as_ref()?;
        Some(&by_cluster.cluster_name)
    }

    /// Where it asks.
    pub(super) fn asks(&self, dump: &Dump) -> Vec<Address> {
        let by_address = self.config.grpc_service.as_ref().and_then(|service| service.google_grpc.as_ref());
        if let Some(by_address) = by_address {
            return uri(&by_address.target_uri).into_iter().collect();
        }
        let cluster = self.cluster().and_then(|name| dump.clusters.get(name));
        cluster.and_then(|cluster| dump.endpoints_of(cluster)).unwrap_or_default()
    }
}

fn uri(target: &str) -> Option<Address> {
    if let Some(path) = target.strip_prefix("unix:") {
        return Some(Address::Pipe(path.trim_start_matches("//").to_owned()));
    }
    let (host, port) = target.rsplit_once("/").map_or(target, |(_, rest)| rest).rsplit_once(':')?;
    Some(Address::Socket(host.trim_matches(['[', ']']).to_owned(), port.parse().ok()?))
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
        if self.alike.is_empty() { title } else { format!("{title} and {} like it", self.alike.len()) }
    }

    /// When its requests are sent again.
    pub(super) fn retry_policy(&self) -> Option<&'d RetryPolicy> {
        self.action.retry_policy.as_ref().or(self.host.retry_policy.as_ref())
    }

    /// Whether nothing but the paths tells the two apart.
    fn is_like(&self, other: &Self) -> bool {
        let paths = |active: &Self| {
            let Match { prefix, path, path_separated_prefix, safe_regex, headers } = &active.route.matches;
            let exact = path.is_some() && prefix.is_none() && path_separated_prefix.is_none() && safe_regex.is_none();
            exact && headers.is_empty()
        };
        let rest = |route: &Route| {
            let removed = route.request_headers_to_remove.clone();
            (route.request_body_buffer_limit, route.per_request_buffer_limit_bytes, removed)
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
}

impl<'d> Site<'d> {
    /// Every connection manager whose filters ask us; where none does, those that ask anybody.
    pub(super) fn all(dump: &'d Dump, expected: &'d Expected) -> Vec<Self> {
        let of = |only_ours: bool| -> Vec<Self> {
            dump.servers.iter().filter_map(|server| Self::of(dump, expected, server, only_ours)).collect()
        };
        let ours = of(true);
        if ours.is_empty() { of(false) } else { ours }
    }

    fn of(dump: &'d Dump, expected: &'d Expected, server: &'d Server, only_ours: bool) -> Option<Self> {
        let filters = filters(&server.hcm.http_filters);
        let ours = |filter: &Filter| filter.asks(dump).iter().any(|address| expected.is_ours(address));
        let signed = |filter: &Filter| filter.says().is_some();
        let mains = || filters.iter().filter(|filter| !filter.is_probe());
        let found = mains().find(|filter| ours(filter));
        let found = if only_ours { found } else { mains().find(|filter| signed(filter)).or_else(|| mains().next()) };
        let main = found?.clone();
        // A probe that asks elsewhere is ours all the same where it says so.
        let probe = filters.iter().find(|filter| filter.is_probe() && (ours(filter) || signed(filter))).cloned();
        let active = active(server, &main);
        Some(Self { dump, expected, server, main, probe, active })
    }

    /// A check of this connection manager.
    pub(super) fn at(&self, check: &'static str) -> At {
        At::new(check, format!("listener {}", self.server.listener))
    }

    /// A check of one of its filters.
    pub(super) fn at_filter(&self, check: &'static str, filter: &Filter) -> At {
        At::new(check, format!("listener {}, filter {}", self.server.listener, filter.name))
    }

    /// A check of one of its routes.
    pub(super) fn at_route(&self, check: &'static str, active: &Active<'_>) -> At {
        At::new(check, format!("listener {}, {}", self.server.listener, active.title()))
    }

    /// `text`, and that it is to be written in the main filter.
    pub(super) fn in_main(&self, text: &str) -> String {
        format!("in the filter `{}` of listener `{}` write {text}", self.main.name, self.server.listener)
    }

    /// The filter as the routes have it, each way once; as the list of filters has it where no route is known to use it,
    /// because what is wrong there is wrong wherever it is switched on.
    pub(super) fn variants(&self) -> Vec<&ExternalProcessing> {
        if self.active.is_empty() {
            return vec![&self.main.config];
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
        let ext_proc = is(&filter.typed_config, "ExternalProcessor").then_some(&filter.typed_config)?;
        let config = part(ext_proc, "a filter").ok()?;
        Some(Filter { name: filter.name.clone(), at, off: filter.disabled, config })
    };
    list.iter().enumerate().filter_map(read).collect()
}

/// The routes on which a filter is at work, each with what it does there.
fn active<'d>(server: &'d Server, filter: &Filter) -> Vec<Active<'d>> {
    let mut found = Vec::new();
    let Some(routes) = &server.routes else { return found };
    for host in &routes.virtual_hosts {
        for route in &host.routes {
            let levels =
                [&route.typed_per_filter_config, &host.typed_per_filter_config, &routes.typed_per_filter_config];
            let said = levels.into_iter().find_map(|level| level.get(&filter.name)).map(per_route);
            let (Some(action), Some(filter)) = (&route.route, effective(filter, said)) else { continue };
            let next = Active { host, route, alike: Vec::new(), action, filter };
            match found.iter_mut().find(|known: &&mut Active<'_>| known.is_like(&next)) {
                Some(known) => known.alike.push(route),
                None => found.push(next),
            }
        }
    }
    found
}

fn per_route(said: &Value) -> PerRoute {
    let outer = PerRoute { disabled: said["disabled"].as_bool().unwrap_or_default(), overrides: None };
    let inner = if is(said, "FilterConfig") { &said["config"] } else { said };
    let inner: PerRoute = part(inner, "a route").unwrap_or_default();
    PerRoute { disabled: outer.disabled || inner.disabled, ..inner }
}

/// What the filter does on a route; none where it does nothing.
fn effective(filter: &Filter, said: Option<PerRoute>) -> Option<ExternalProcessing> {
    let Some(said) = said else { return (!filter.off).then(|| filter.config.clone()) };
    if said.disabled {
        return None;
    }
    let mut config = filter.config.clone();
    let overrides = said.overrides.unwrap_or_default();
    config.processing_mode = overrides.processing_mode.unwrap_or(config.processing_mode);
    config.grpc_service = overrides.grpc_service.or(config.grpc_service);
    config.metadata_options = overrides.metadata_options.unwrap_or(config.metadata_options);
    config.failure_mode_allow = overrides.failure_mode_allow.unwrap_or(config.failure_mode_allow);
    Some(config)
}
