//! The ext_proc filters of a connection manager.

use warmroute_core::envoy_names::{FILTER_ROLE, PROBE_FILTER};

use crate::envoy::dump::{ConfigDump, EnvoyAddress, parse_part};
use crate::envoy::schema::{
    ExternalProcessor, GrpcService, TypedExtension, body_mode, has_type, shows_headers,
    shows_trailers,
};

/// An ext_proc filter of a connection manager.
#[derive(Clone, Debug)]
pub(crate) struct ExtProcFilter {
    /// Filter name.
    pub(crate) name: String,
    /// Index in the list of filters.
    pub(crate) index: usize,
    /// Whether it is disabled unless a route enables it.
    pub(super) is_disabled: bool,
    /// Configuration without route overrides.
    pub(crate) config: ExternalProcessor,
}

impl ExtProcFilter {
    /// Creates an enabled filter.
    pub(crate) fn new(name: String, at: usize, config: ExternalProcessor) -> Self {
        Self {
            name,
            index: at,
            is_disabled: false,
            config,
        }
    }

    /// Returns the filter role that its initial metadata declares.
    pub(crate) fn declared_kind(&self) -> Option<&str> {
        let service = self.config.grpc_service.as_ref()?;
        service
            .initial_metadata
            .iter()
            .find(|pair| pair.key == FILTER_ROLE)
            .map(|pair| pair.value.as_str())
    }

    /// Returns whether it is a first-token probe.
    pub(crate) fn is_probe(&self) -> bool {
        let modes = &self.config.processing_mode;
        let skips_headers = !shows_headers(&modes.request_header_mode)
            && !shows_headers(&modes.response_header_mode);
        match self.declared_kind() {
            Some(role) => role == PROBE_FILTER,
            None => skips_headers && modes.response_body_mode == "STREAMED",
        }
    }

    /// Returns the cluster that the filter calls.
    pub(crate) fn cluster(&self) -> Option<&str> {
        self.config.grpc_service.as_ref()?.cluster()
    }

    /// Returns the addresses that the filter calls.
    pub(crate) fn addresses(&self, dump: &ConfigDump) -> Vec<EnvoyAddress> {
        self.config
            .grpc_service
            .as_ref()
            .map(|service| service.addresses(dump))
            .unwrap_or_default()
    }
}

impl GrpcService {
    /// Returns the called cluster.
    pub(crate) fn cluster(&self) -> Option<&str> {
        Some(&self.envoy_grpc.as_ref()?.cluster_name)
    }

    /// Returns the called addresses.
    pub(crate) fn addresses(&self, dump: &ConfigDump) -> Vec<EnvoyAddress> {
        if let Some(by_address) = &self.google_grpc {
            return parse_target_uri(&by_address.target_uri)
                .into_iter()
                .collect();
        }
        let cluster = self.cluster().and_then(|name| dump.clusters.get(name));
        cluster
            .and_then(|cluster| dump.cluster_addresses(cluster))
            .unwrap_or_default()
    }
}

impl ExternalProcessor {
    /// Returns whether the filter sends nothing and so never calls the server. Istio's filter is
    /// idle unless a route overrides it.
    pub(crate) fn is_idle(&self) -> bool {
        let modes = &self.processing_mode;
        let bodies = [&modes.request_body_mode, &modes.response_body_mode];
        let trailers = [&modes.request_trailer_mode, &modes.response_trailer_mode];
        !shows_headers(&modes.request_header_mode)
            && !shows_headers(&modes.response_header_mode)
            && bodies.into_iter().all(|mode| body_mode(mode) == "NONE")
            && !trailers.into_iter().any(|mode| shows_trailers(mode))
    }
}

fn parse_target_uri(target: &str) -> Option<EnvoyAddress> {
    if let Some(path) = target.strip_prefix("unix:") {
        return Some(EnvoyAddress::Pipe(path.trim_start_matches("//").to_owned()));
    }
    let (host, port) = target
        .rsplit_once("/")
        .map_or(target, |(_, rest)| rest)
        .rsplit_once(':')?;
    Some(EnvoyAddress::Socket(
        host.trim_matches(['[', ']']).to_owned(),
        port.parse().ok()?,
    ))
}

/// Returns the ext_proc filters of a list.
pub(super) fn read_filters(list: &[TypedExtension]) -> Vec<ExtProcFilter> {
    let read = |(at, filter): (usize, &TypedExtension)| {
        let ext_proc =
            has_type(&filter.typed_config, "ExternalProcessor").then_some(&filter.typed_config)?;
        let config = parse_part(ext_proc, "a filter").ok()?;
        Some(ExtProcFilter {
            name: filter.name.clone(),
            index: at,
            is_disabled: filter.disabled,
            config,
        })
    };
    list.iter().enumerate().filter_map(read).collect()
}
