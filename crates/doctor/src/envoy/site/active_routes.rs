//! Routes on which an ext_proc filter is active, and its configuration there.

use serde_json::Value;

use super::ExtProcFilter;
use crate::envoy::dump::{ConfigDump, HttpListener, parse_part};
use crate::envoy::schema::{
    EnvoyRoute, ExtProcOverrides, ExtProcPerRoute, ExternalProcessor, KeyValue, RetryPolicy,
    RouteAction, RouteMatch, VirtualHost, has_type,
};

/// A route on which the main filter is active.
#[derive(Clone, Debug)]
pub(crate) struct ActiveRoute<'d> {
    pub(crate) host: &'d VirtualHost,
    pub(crate) route: &'d EnvoyRoute,
    /// Other routes that differ only in their paths.
    pub(crate) similar: Vec<&'d EnvoyRoute>,
    pub(crate) action: &'d RouteAction,
    /// Filter configuration on this route.
    pub(crate) filter: ExternalProcessor,
}

impl<'d> ActiveRoute<'d> {
    /// Returns all routes.
    pub(crate) fn routes(&self) -> impl Iterator<Item = &'d EnvoyRoute> {
        std::iter::once(self.route).chain(self.similar.iter().copied())
    }

    /// Returns a short name.
    pub(crate) fn title(&self) -> String {
        let title = self.route.title();
        if self.similar.is_empty() {
            title
        } else {
            format!("{title} and {} like it", self.similar.len())
        }
    }

    /// Returns the retry policy of the route or its virtual host.
    pub(crate) fn retry_policy(&self) -> Option<&'d RetryPolicy> {
        self.action
            .retry_policy
            .as_ref()
            .or(self.host.retry_policy.as_ref())
    }

    /// Returns whether both differ only in their paths.
    fn differs_only_in_path(&self, other: &Self) -> bool {
        let paths = |active: &Self| {
            let RouteMatch {
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
        let rest = |route: &EnvoyRoute| {
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

/// Returns the clusters of all routes, or every cluster if the dump does not contain the routes.
pub(super) fn route_clusters<'d>(dump: &'d ConfigDump, server: &'d HttpListener) -> Vec<&'d str> {
    let Some(routes) = &server.routes else {
        return dump.clusters.keys().map(String::as_str).collect();
    };
    let actions = routes
        .virtual_hosts
        .iter()
        .flat_map(|host| &host.routes)
        .filter_map(|route| route.route.as_ref());
    actions.flat_map(RouteAction::clusters).collect()
}

/// Routes on which a filter is enabled.
#[derive(Default)]
pub(super) struct FilterRoutes<'d> {
    pub(super) active: Vec<ActiveRoute<'d>>,
    pub(super) idle: Vec<&'d EnvoyRoute>,
}

impl<'d> FilterRoutes<'d> {
    /// Finds the routes of a filter.
    pub(super) fn find(server: &'d HttpListener, filter: &ExtProcFilter) -> Self {
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
                let levels: Vec<ExtProcPerRoute> = levels
                    .into_iter()
                    .filter_map(|level| level.get(&filter.name))
                    .map(read_per_route)
                    .collect();
                let (Some(action), Some(filter)) =
                    (&route.route, effective_config(filter, &levels))
                else {
                    continue;
                };
                if filter.is_idle() {
                    uses.idle.push(route);
                    continue;
                }
                let next = ActiveRoute {
                    host,
                    route,
                    similar: Vec::new(),
                    action,
                    filter,
                };
                match uses
                    .active
                    .iter_mut()
                    .find(|known| known.differs_only_in_path(&next))
                {
                    Some(known) => known.similar.push(route),
                    None => uses.active.push(next),
                }
            }
        }
        uses
    }
}

fn read_per_route(role: &Value) -> ExtProcPerRoute {
    let outer = ExtProcPerRoute {
        disabled: role["disabled"].as_bool().unwrap_or_default(),
        overrides: None,
    };
    let inner = if has_type(role, "FilterConfig") {
        &role["config"]
    } else {
        role
    };
    let inner: ExtProcPerRoute = parse_part(inner, "a route").unwrap_or_default();
    ExtProcPerRoute {
        disabled: outer.disabled || inner.disabled,
        ..inner
    }
}

/// Returns the filter configuration on a route, from the settings of the route configuration, the
/// virtual host and the route; `None` if it is disabled there.
fn effective_config(
    filter: &ExtProcFilter,
    levels: &[ExtProcPerRoute],
) -> Option<ExternalProcessor> {
    let Some(last) = levels.last() else {
        return (!filter.is_disabled).then(|| filter.config.clone());
    };
    if last.disabled {
        return None;
    }
    let mut config = filter.config.clone();
    // A more specific level overrides single fields.
    for overrides in levels.iter().filter_map(|level| level.overrides.as_ref()) {
        apply_overrides(overrides, &mut config);
    }
    Some(config)
}

fn apply_overrides(overrides: &ExtProcOverrides, config: &mut ExternalProcessor) {
    let ExtProcOverrides {
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
            .for_each(|pair| set_metadata(&mut service.initial_metadata, pair));
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

fn set_metadata(metadata: &mut Vec<KeyValue>, pair: &KeyValue) {
    metadata.retain(|known| known.key != pair.key);
    metadata.push(pair.clone());
}
