//! The settings that findings are about, and the field that sets each in the resources of a control plane.

use std::borrow::Cow;
use std::time::Duration;

use super::control_plane::{ControlPlane, http_route, istio_host};
use super::filter::seconds;
use super::parts::Cluster;
use super::site::Site;
use crate::cmd::doctor::finding::{At, Finding, Level};
use crate::ext_proc::headers::ENDPOINT;

/// The port of warmroute in the manifests.
const PORT: u16 = 9002;
/// Limits that no deployment reaches.
const LIMITS: &str =
    "{maxConnections: 100000, maxPendingRequests: 100000, maxParallelRequests: 100000}";

/// A setting of Envoy.
pub(super) enum EnvoySetting<'a> {
    /// A field of the ext_proc filter.
    Filter(FilterField<'a>),
    /// Circuit breakers of the cluster of warmroute.
    PickerLimits(&'a Cluster),
    /// HTTP/2 pings on the connections to warmroute.
    PickerKeepalive(&'a Cluster),
    /// Time to connect to warmroute.
    PickerConnectTimeout(&'a Cluster),
    /// TLS to warmroute.
    PickerTls(&'a Cluster),
    /// No TLS to warmroute.
    PickerPlaintext(&'a Cluster),
    /// The server name (SNI) of the connections to warmroute.
    ServerName(&'a Cluster),
    /// Circuit breakers of the cluster of the workers.
    WorkerLimits(&'a Cluster),
    /// Retries of requests to unreachable workers; Envoy's own words for it.
    Retry(&'a Cluster, String),
    /// The headers `x-envoy-*` of responses.
    EnvoyHeaders,
    /// Request headers that Envoy removes early.
    ClientHeaders(&'a [&'a str]),
    /// The longest buffered body; Envoy's own words for it.
    BodyLimit(u64, String),
    /// The idle timeout of streams.
    IdleTimeout(Duration),
    /// HTTP/2 to warmroute; Envoy's own words for it.
    PickerHttp2(&'a Cluster, String),
    /// The address of warmroute; Envoy's own words for it.
    PickerAddress(&'a Cluster, String),
    /// The endpoints of the workers; Envoy's own words for it.
    WorkerEndpoints(String),
    /// A worker chosen by the endpoint that warmroute names; Envoy's own words for it.
    EndpointOverride(&'a Cluster, String),
    /// No timeout of the route, by its title.
    RouteTimeout(String),
}

/// Where Envoy reads a field of the ext_proc filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FieldScope {
    /// From the overrides of a route too.
    Route,
    /// From the filter alone.
    Filter,
}

/// A field of the ext_proc filter with its value.
#[derive(Clone, Debug)]
pub(super) struct FilterField<'a> {
    scope: FieldScope,
    envoy: Cow<'a, str>,
    /// Under `extProc` of an EnvoyExtensionPolicy; none: that has no such field.
    policy: Option<Cow<'a, str>>,
    /// Annotation of the InferencePool for Envoy AI Gateway; none: there is none.
    annotation: Option<&'a str>,
}

impl<'a> FilterField<'a> {
    const fn new(
        scope: FieldScope,
        envoy: &'a str,
        policy: Option<&'a str>,
        annotation: Option<&'a str>,
    ) -> Self {
        let policy = match policy {
            Some(text) => Some(Cow::Borrowed(text)),
            None => None,
        };
        Self {
            scope,
            envoy: Cow::Borrowed(envoy),
            policy,
            annotation,
        }
    }

    /// `message_timeout`.
    pub(super) fn message_timeout(length: Duration) -> Self {
        let policy = format!("messageTimeout: {}ms", length.as_millis());
        let envoy = format!("`message_timeout: {}`", seconds(length));
        Self {
            scope: FieldScope::Filter,
            envoy: envoy.into(),
            policy: Some(policy.into()),
            annotation: None,
        }
    }

    /// `max_message_timeout`.
    pub(super) fn max_message_timeout(length: Duration) -> Self {
        let envoy = format!("`max_message_timeout: {}`", seconds(length));
        Self {
            scope: FieldScope::Filter,
            envoy: envoy.into(),
            policy: None,
            annotation: None,
        }
    }

    /// One of the namespaces whose metadata Envoy accepts.
    pub(super) fn receiving(namespace: &str) -> Self {
        let envoy = format!(
            "`{namespace}` into `receiving_namespaces: {{untyped: [..]}}` under `metadata_options`"
        );
        let policy = format!("metadata: {{writableNamespaces: [{namespace}]}}");
        Self {
            scope: FieldScope::Route,
            envoy: envoy.into(),
            policy: Some(policy.into()),
            annotation: None,
        }
    }

    /// One of the namespaces whose metadata Envoy sends.
    pub(super) fn forwarding(namespace: &str) -> Self {
        let envoy = format!(
            "`{namespace}` into `forwarding_namespaces: {{untyped: [..]}}` under `metadata_options`"
        );
        let policy = format!("metadata: {{accessibleNamespaces: [{namespace}]}}");
        Self {
            scope: FieldScope::Route,
            envoy: envoy.into(),
            policy: Some(policy.into()),
            annotation: None,
        }
    }
}

use FieldScope::{Filter, Route};

const DUPLEX_REQUEST: Option<&str> = Some("processingMode: {request: {body: FullDuplexStreamed}}");
const DUPLEX_RESPONSE: Option<&str> =
    Some("processingMode: {response: {body: FullDuplexStreamed}}");
const DUPLEX_POOL: Option<&str> = Some("aigateway.envoyproxy.io/processing-body-mode: duplex");

pub(super) const OBSERVABILITY: FilterField<'static> =
    FilterField::new(Filter, "`observability_mode: false`", None, None);
pub(super) const REQUEST_HEADERS: FilterField<'static> = FilterField::new(
    Route,
    "`request_header_mode: SEND` under `processing_mode`",
    DUPLEX_REQUEST,
    None,
);
pub(super) const REQUEST_BODY: FilterField<'static> = FilterField::new(
    Route,
    "`request_body_mode: BUFFERED` under `processing_mode` (or FULL_DUPLEX_STREAMED with `request_trailer_mode: SEND`, \
     for bodies of any length)",
    DUPLEX_REQUEST,
    DUPLEX_POOL,
);
pub(super) const REQUEST_TRAILERS: FilterField<'static> = FilterField::new(
    Route,
    "`request_trailer_mode: SEND` under `processing_mode`",
    None,
    None,
);
pub(super) const CONTENT_LENGTH: FilterField<'static> =
    FilterField::new(Filter, "`allow_content_length_header: true`", None, None);
pub(super) const RESPONSE_HEADERS: FilterField<'static> = FilterField::new(
    Route,
    "`response_header_mode: SEND` under `processing_mode`",
    DUPLEX_RESPONSE,
    None,
);
pub(super) const RESPONSE_BODY: FilterField<'static> = FilterField::new(
    Route,
    "`response_body_mode: NONE` under `processing_mode`",
    DUPLEX_RESPONSE,
    DUPLEX_POOL,
);
pub(super) const RESPONSE_TRAILERS: FilterField<'static> = FilterField::new(
    Route,
    "`response_trailer_mode: SEND` under `processing_mode`",
    DUPLEX_RESPONSE,
    DUPLEX_POOL,
);
pub(super) const FAILURE_MODE: FilterField<'static> = FilterField::new(
    Route,
    "`failure_mode_allow: true`",
    Some("failOpen: true"),
    None,
);
pub(super) const MODE_OVERRIDE: FilterField<'static> = FilterField::new(
    Filter,
    "`allow_mode_override: true`",
    Some("processingMode: {allowModeOverride: true}"),
    Some("aigateway.envoyproxy.io/allow-mode-override: \"true\""),
);
/// Envoy accepts attributes in the overrides of a route, and ignores them.
pub(super) const RESPONSE_ATTRIBUTES: FilterField<'static> = FilterField::new(
    Filter,
    "`response_attributes: [upstream.address, response.flags]`",
    Some("processingMode: {response: {attributes: [upstream.address, response.flags]}}"),
    None,
);

impl Site<'_> {
    /// Where to write what; none where the control plane has no field for it.
    pub(super) fn fix(&self, setting: &EnvoySetting<'_>) -> Option<String> {
        match &self.plane {
            ControlPlane::Istio { routes } => Some(self.istio(routes, setting)),
            ControlPlane::EnvoyGateway { policy, .. } => match setting {
                EnvoySetting::Filter(field) => {
                    let field = field.policy.as_ref()?;
                    Some(format!("in `extProc` of the EnvoyExtensionPolicy{policy} write `{field}`"))
                }
                EnvoySetting::PickerLimits(_) => {
                    Some(backend_settings(policy, &format!("circuitBreaker: {LIMITS}")))
                }
                EnvoySetting::PickerKeepalive(_) => Some(backend_settings(
                    policy,
                    "http2: {connectionKeepalive: {interval: 2s, timeout: 1s}}",
                )),
                EnvoySetting::PickerConnectTimeout(_) => {
                    Some(backend_settings(policy, "timeout: {tcp: {connectTimeout: 1s}}"))
                }
                EnvoySetting::PickerTls(_) => Some("write `tls: {insecureSkipVerify: true}` in the Backend that the EnvoyExtensionPolicy \
                     refers to, or attach a BackendTLSPolicy to the Service"
                    .to_owned()),
                EnvoySetting::PickerPlaintext(_) => {
                    Some("remove `tls` from the Backend that the EnvoyExtensionPolicy refers to".to_owned())
                }
                other => self.gateway(other),
            },
            ControlPlane::EnvoyAiGateway { .. } => match setting {
                EnvoySetting::Filter(field) => {
                    Some(format!("annotate the InferencePool with `{}`", field.annotation?))
                }
                // Envoy AI Gateway makes this cluster after all policies were applied; keys of the runtime still reach it.
                EnvoySetting::PickerLimits(cluster) => Some(format!(
                    "in the EnvoyProxy that the Gateway{} refers to write `bootstrap: {{type: JSONPatch, jsonPatches: [{{op: add, path: \
                     /layered_runtime/layers/0/static_layer/circuit_breakers.{}.default.max_requests, value: 100000}}]}}`, and \
                     the same for max_pending_requests",
                    self.gateway_name(),
                    cluster.name
                )),
                EnvoySetting::PickerKeepalive(_)
                | EnvoySetting::PickerConnectTimeout(_)
                | EnvoySetting::PickerTls(_)
                | EnvoySetting::PickerPlaintext(_)
                | EnvoySetting::ServerName(_)
                | EnvoySetting::EndpointOverride(..)
                | EnvoySetting::Retry(..) => None,
                EnvoySetting::BodyLimit(..) => Some(
                    "remove the annotation `aigateway.envoyproxy.io/processing-body-mode: buffered` from the InferencePool: with \
                     full duplex no body is buffered"
                        .to_owned(),
                ),
                other => self.gateway(other),
            },
            ControlPlane::Other => Some(self.by_hand(setting)),
        }
    }

    /// A finding with its fix. Without one it is a limit of the control plane, and a note.
    pub(super) fn report(
        &self,
        at: At,
        level: Level,
        seen: impl Into<String>,
        setting: &EnvoySetting<'_>,
    ) -> Finding {
        let seen = seen.into();
        match (self.fix(setting), level) {
            (Some(fix), Level::Error) => at.error(seen, fix),
            (Some(fix), _) => at.warning(seen, fix),
            (None, Level::Error) => at.error(
                seen,
                format!(
                    "{} has no field for it; in Envoy's own configuration: {}",
                    self.plane_name(),
                    self.by_hand(setting)
                ),
            ),
            (None, _) => at.note(format!("{seen}; {} has no field for it", self.plane_name())),
        }
    }

    fn picker_port(&self) -> u16 {
        self.expected.tcp.map_or(PORT, |tcp| tcp.port())
    }

    fn plane_name(&self) -> &'static str {
        match self.plane {
            ControlPlane::Istio { .. } => "Istio",
            ControlPlane::EnvoyGateway { .. } => "Envoy Gateway",
            ControlPlane::EnvoyAiGateway { .. } => "Envoy AI Gateway",
            ControlPlane::Other => "Envoy",
        }
    }

    fn gateway_name(&self) -> String {
        match &self.plane {
            ControlPlane::EnvoyGateway { gateway, .. }
            | ControlPlane::EnvoyAiGateway { gateway } => gateway.to_string(),
            ControlPlane::Istio { .. } | ControlPlane::Other => String::new(),
        }
    }

    /// The fixes that both forms of Envoy Gateway share: the policies for clients and for routes.
    fn gateway(&self, setting: &EnvoySetting<'_>) -> Option<String> {
        let client_policy = |field: &str| {
            Some(format!(
                "in a ClientTrafficPolicy for the Gateway{} write `{field}`",
                self.gateway_name()
            ))
        };
        let traffic_policy = |cluster: &Cluster, field: &str| {
            Some(format!(
                "in a BackendTrafficPolicy for the HTTPRoute{} write `{field}`",
                http_route(cluster)
            ))
        };
        match setting {
            EnvoySetting::WorkerLimits(cluster) => traffic_policy(cluster, &format!("circuitBreaker: {LIMITS}")),
            EnvoySetting::Retry(cluster, _) => traffic_policy(
                cluster,
                "retry: {numRetries: 5, retryOn: {triggers: [connect-failure, refused-stream, reset-before-request]}}",
            ),
            EnvoySetting::EndpointOverride(cluster, _) => traffic_policy(
                cluster,
                &format!(
                    "loadBalancer: {{type: LeastRequest, endpointOverride: {{extractFrom: [{{header: {ENDPOINT}}}]}}}}"
                ),
            ),
            EnvoySetting::WorkerEndpoints(_) => Some(
                "in the Service of the HTTPRoute's `backendRefs` write a `selector` that selects these pods".to_owned(),
            ),
            EnvoySetting::PickerAddress(..) => Some(format!(
                "in the Service of warmroute write the port {} as `targetPort`, and refer to that Service and its port",
                self.picker_port()
            )),
            EnvoySetting::EnvoyHeaders => client_policy("headers: {enableEnvoyHeaders: true}"),
            EnvoySetting::ClientHeaders(names) => {
                client_policy(&format!("headers: {{earlyRequestHeaders: {{remove: [{}]}}}}", names.join(", ")))
            }
            EnvoySetting::BodyLimit(length, _) => client_policy(&format!("connection: {{bufferLimit: \"{length}\"}}")),
            EnvoySetting::IdleTimeout(length) => {
                client_policy(&format!("timeout: {{http: {{streamIdleTimeout: {}s}}}}", length.as_secs()))
            }
            EnvoySetting::RouteTimeout(_) => {
                Some("in the rule of the HTTPRoute write `timeouts: {request: 0s}`".to_owned())
            }
            _ => None,
        }
    }

    fn istio(&self, routes: &[String], setting: &EnvoySetting<'_>) -> String {
        if let Some(field) = destination_rule(setting) {
            return field;
        }
        let envoy_filter = |kind: &str, text: &str| {
            format!("in an EnvoyFilter with `applyTo: {kind}` write {text}")
        };
        let named = match routes {
            [] => "HTTP_ROUTE`".to_owned(),
            [one] => format!("HTTP_ROUTE` that names the route `{one}`"),
            several => format!(
                "HTTP_ROUTE` that names the routes `{}`",
                several.join("`, `")
            ),
        };
        let of_routes =
            |text: &str| format!("in an EnvoyFilter with `applyTo: {named} write {text}");
        match setting {
            EnvoySetting::Filter(field) if field.scope == Route => {
                of_routes(&format!("{} in the `overrides` of `{}`", field.envoy, self.main.name))
            }
            EnvoySetting::Filter(field) => {
                envoy_filter("HTTP_FILTER", &format!("{} in the `typed_config` of `{}`", field.envoy, self.main.name))
            }
            EnvoySetting::PickerKeepalive(cluster) => envoy_filter(
                "CLUSTER",
                &format!(
                    "`connection_keepalive: {{interval: 2s, timeout: 2s}}` in the `http2_protocol_options` of `{}`",
                    cluster.name
                ),
            ),
            EnvoySetting::Retry(_, envoy) | EnvoySetting::BodyLimit(_, envoy) => of_routes(envoy),
            EnvoySetting::PickerHttp2(cluster, _) => {
                format!("in the Service `{}` write `appProtocol: grpc` for the port of warmroute", istio_host(cluster))
            }
            EnvoySetting::PickerAddress(cluster, _) => {
                format!(
                    "in the Service `{}` write the port {} as `targetPort`",
                    istio_host(cluster),
                    self.picker_port()
                )
            }
            EnvoySetting::WorkerEndpoints(_) => {
                "in the InferencePool write a `selector` and `targetPorts` that select these pods, as \
                 `kubernetes.pools` in our configuration does"
                    .to_owned()
            }
            EnvoySetting::EndpointOverride(..) => {
                "in the rule of the HTTPRoute refer to the InferencePool in `backendRefs`".to_owned()
            }
            EnvoySetting::EnvoyHeaders => {
                "remove `proxyHeaders: {envoyDebugHeaders: {disabled: true}}` from the MeshConfig or from the \
                 annotation `proxy.istio.io/config`"
                    .to_owned()
            }
            EnvoySetting::ClientHeaders(names) => envoy_filter("NETWORK_FILTER", &early_removal(names)),
            EnvoySetting::IdleTimeout(length) => {
                envoy_filter("NETWORK_FILTER", &format!("`stream_idle_timeout: {}`", seconds(*length)))
            }
            EnvoySetting::RouteTimeout(_) => "in the rule of the HTTPRoute write `timeouts: {request: 0s}`".to_owned(),
            other => self.by_hand(other),
        }
    }

    /// The words of Envoy's own configuration.
    fn by_hand(&self, setting: &EnvoySetting<'_>) -> String {
        match setting {
            EnvoySetting::Filter(field) => self.in_main(&field.envoy),
            EnvoySetting::PickerLimits(cluster) | EnvoySetting::WorkerLimits(cluster) => format!(
                "in cluster `{}` write `circuit_breakers: {{thresholds: [{{max_connections: 100000, max_pending_requests: 100000, \
                 max_requests: 100000}}]}}`",
                cluster.name
            ),
            EnvoySetting::PickerKeepalive(cluster) => format!(
                "in the `http2_protocol_options` of cluster `{}` write `connection_keepalive: {{interval: 2s, timeout: 2s}}`",
                cluster.name
            ),
            EnvoySetting::PickerConnectTimeout(cluster) => {
                format!("in cluster `{}` write `connect_timeout: 1s`", cluster.name)
            }
            EnvoySetting::PickerTls(cluster) => format!(
                "in cluster `{}` write a `transport_socket` as in envoy/README.md, \"warmroute on another machine\"",
                cluster.name
            ),
            EnvoySetting::PickerPlaintext(cluster) => {
                format!(
                    "remove the `transport_socket` from cluster `{}`",
                    cluster.name
                )
            }
            EnvoySetting::ServerName(cluster) => format!(
                "in the `UpstreamTlsContext` of cluster `{}` write `sni`, and remove `auto_sni` from its HttpProtocolOptions",
                cluster.name
            ),
            EnvoySetting::Retry(_, envoy)
            | EnvoySetting::BodyLimit(_, envoy)
            | EnvoySetting::PickerHttp2(_, envoy)
            | EnvoySetting::PickerAddress(_, envoy)
            | EnvoySetting::WorkerEndpoints(envoy)
            | EnvoySetting::EndpointOverride(_, envoy) => envoy.clone(),
            EnvoySetting::EnvoyHeaders => format!(
                "remove `suppress_envoy_headers` from the router filter of listener `{}`, or {}",
                self.server.listener,
                self.in_main(&RESPONSE_ATTRIBUTES.envoy)
            ),
            EnvoySetting::ClientHeaders(names) => {
                format!(
                    "in the connection manager of listener `{}`, {}",
                    self.server.listener,
                    early_removal(names)
                )
            }
            EnvoySetting::IdleTimeout(length) => format!(
                "in the connection manager of listener `{}` write `stream_idle_timeout: {}`",
                self.server.listener,
                seconds(*length)
            ),
            EnvoySetting::RouteTimeout(title) => format!("write `timeout: 0s` in the {title}"),
        }
    }
}

/// The settings of a cluster that a DestinationRule has fields for.
fn destination_rule(setting: &EnvoySetting<'_>) -> Option<String> {
    let rule = |cluster: &Cluster, policy: &str| {
        let host = istio_host(cluster);
        Some(format!(
            "in the DestinationRule of the host `{host}` write `trafficPolicy: {policy}`"
        ))
    };
    match setting {
        EnvoySetting::PickerLimits(cluster) => rule(
            cluster,
            "{connectionPool: {http: {http1MaxPendingRequests: 100000, http2MaxRequests: 100000}}}",
        ),
        EnvoySetting::PickerConnectTimeout(cluster) => {
            rule(cluster, "{connectionPool: {tcp: {connectTimeout: 1s}}}")
        }
        EnvoySetting::PickerTls(cluster) => {
            let sni = istio_host(cluster);
            rule(
                cluster,
                &format!("{{tls: {{mode: SIMPLE, insecureSkipVerify: true, sni: {sni}}}}}"),
            )
        }
        EnvoySetting::PickerPlaintext(cluster) => rule(cluster, "{tls: {mode: DISABLE}}"),
        EnvoySetting::ServerName(cluster) => rule(
            cluster,
            &format!("{{tls: {{sni: {}}}}}", istio_host(cluster)),
        ),
        EnvoySetting::WorkerLimits(cluster) => rule(
            cluster,
            "{connectionPool: {tcp: {maxConnections: 100000}, http: {http1MaxPendingRequests: 100000, http2MaxRequests: 100000}}}",
        ),
        _ => None,
    }
}

fn backend_settings(policy: &impl std::fmt::Display, field: &str) -> String {
    format!("in `extProc` of the EnvoyExtensionPolicy{policy} write `backendSettings: {{{field}}}`")
}

fn early_removal(names: &[&str]) -> String {
    let lines = names
        .iter()
        .map(|name| format!("- remove: {name}"))
        .collect::<Vec<_>>()
        .join("; ");
    format!("under `early_header_mutation_extensions` as in envoy/standalone.yaml, write {lines}")
}
