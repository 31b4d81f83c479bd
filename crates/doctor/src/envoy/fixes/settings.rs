//! The settings of Envoy that findings refer to, each with its fixes.

use super::EnvoySetting;

/// The fix if the control plane has no field for a setting.
const NO_FIELD: &str = "";

/// Places of fixes. A fix with the name of a place at its start is written into its sentence.
pub(crate) const PLACES: [(&str, &str); 14] = [
    ("{Cluster} ", "in cluster `{cluster}` write `{text}`"),
    (
        "{Http2Options} ",
        "in the `http2_protocol_options` of cluster `{cluster}` write `{text}`",
    ),
    (
        "{Filter} ",
        "in the filter `{filter}` of listener `{listener}` write {text}",
    ),
    (
        "{IstioFilter} ",
        "in an EnvoyFilter with `applyTo: HTTP_FILTER` write {text} in the `typed_config` \
        of `{filter}`",
    ),
    (
        "{IstioOverrides} ",
        "in an EnvoyFilter \
        with `applyTo: HTTP_ROUTE{routes} write {text} in the `overrides` of `{filter}`",
    ),
    (
        "{IstioRoutes} ",
        "in an EnvoyFilter with `applyTo: HTTP_ROUTE{routes} write {text}",
    ),
    (
        "{IstioHttp2Options} ",
        "in an EnvoyFilter with `applyTo: CLUSTER` write `{text}` in the `http2_protocol_options` \
        of `{cluster}`",
    ),
    (
        "{IstioConnections} ",
        "in an EnvoyFilter with `applyTo: NETWORK_FILTER` write {text}",
    ),
    (
        "{DestinationRule} ",
        "in the DestinationRule of the host `{host}` write `trafficPolicy: {text}`",
    ),
    (
        "{ExtensionPolicy} ",
        "in `extProc` of the EnvoyExtensionPolicy{policy} write `{text}`",
    ),
    (
        "{BackendSettings} ",
        "in `extProc` of the EnvoyExtensionPolicy{policy} write `backendSettings: {{text}}`",
    ),
    (
        "{TrafficPolicy} ",
        "in a BackendTrafficPolicy for the HTTPRoute{http_route} write `{text}`",
    ),
    (
        "{ClientPolicy} ",
        "in a ClientTrafficPolicy for the Gateway{gateway} write `{text}`",
    ),
    (
        "{PoolAnnotation} ",
        "annotate the InferencePool with `{text}`",
    ),
];

/// Circuit breakers of the cluster of warmroute. Envoy AI Gateway adds this cluster after it
/// applies all policies, but runtime keys affect it.
pub(crate) static PICKER_LIMITS: EnvoySetting = EnvoySetting {
    envoy: ENVOY_LIMITS,
    istio: "{DestinationRule} \
        {connectionPool: {http: {http1MaxPendingRequests: 100000, http2MaxRequests: 100000}}}",
    envoy_gateway: "{BackendSettings} circuitBreaker: {maxConnections: 100000, \
        maxPendingRequests: 100000, maxParallelRequests: 100000}",
    ai_gateway: "in the EnvoyProxy that the Gateway{gateway} refers \
        to write `bootstrap: {type: JSONPatch, jsonPatches: [{op: add, path: \
        /layered_runtime/layers/0/static_layer/circuit_breakers.{cluster}.default.max_requests, \
        value: 100000}]}`, and the same for max_pending_requests",
};

/// HTTP/2 pings on the connections to warmroute.
pub(crate) static PICKER_KEEPALIVE: EnvoySetting = EnvoySetting {
    envoy: "{Http2Options} connection_keepalive: {interval: 2s, timeout: 2s}",
    istio: "{IstioHttp2Options} connection_keepalive: {interval: 2s, timeout: 2s}",
    envoy_gateway: "{BackendSettings} http2: {connectionKeepalive: {interval: 2s, timeout: 1s}}",
    ai_gateway: NO_FIELD,
};

/// HTTP/2 windows of the connections to warmroute: a small part of each body is on the connection.
pub(crate) static PICKER_WINDOW: EnvoySetting = EnvoySetting {
    envoy: "{Http2Options} initial_stream_window_size: 65536, \
        initial_connection_window_size: 1048576",
    istio: "{IstioHttp2Options} initial_stream_window_size: 65536, \
        initial_connection_window_size: 1048576",
    envoy_gateway: "{BackendSettings} \
        http2: {initialStreamWindowSize: 64Ki, initialConnectionWindowSize: 1Mi}",
    ai_gateway: NO_FIELD,
};

/// Connect timeout of the connections to warmroute.
pub(crate) static PICKER_CONNECT_TIMEOUT: EnvoySetting = EnvoySetting {
    envoy: "{Cluster} connect_timeout: 1s",
    istio: "{DestinationRule} {connectionPool: {tcp: {connectTimeout: 1s}}}",
    envoy_gateway: "{BackendSettings} timeout: {tcp: {connectTimeout: 1s}}",
    ai_gateway: NO_FIELD,
};

/// TLS to warmroute.
pub(crate) static PICKER_TLS: EnvoySetting = EnvoySetting {
    envoy: "in cluster `{cluster}` write a `transport_socket` as in envoy/README.md, \
        \"warmroute on another machine\"",
    istio: "{DestinationRule} {tls: {mode: SIMPLE, insecureSkipVerify: true, sni: {host}}}",
    envoy_gateway: "write `tls: {insecureSkipVerify: true}` in the Backend \
        that the EnvoyExtensionPolicy refers to, or attach a BackendTLSPolicy to the Service",
    ai_gateway: NO_FIELD,
};

/// No TLS to warmroute.
pub(crate) static PICKER_PLAINTEXT: EnvoySetting = EnvoySetting {
    envoy: "remove the `transport_socket` from cluster `{cluster}`",
    istio: "{DestinationRule} {tls: {mode: DISABLE}}",
    envoy_gateway: "remove `tls` from the Backend that the EnvoyExtensionPolicy refers to",
    ai_gateway: NO_FIELD,
};

/// The server name (SNI) of the connections to warmroute.
pub(crate) static SERVER_NAME: EnvoySetting = EnvoySetting {
    envoy: "in the `UpstreamTlsContext` of cluster `{cluster}` write `sni`, \
        and remove `auto_sni` from its HttpProtocolOptions",
    istio: "{DestinationRule} {tls: {sni: {host}}}",
    envoy_gateway: NO_FIELD,
    ai_gateway: NO_FIELD,
};

/// HTTP/2 to warmroute.
pub(crate) static PICKER_HTTP2: EnvoySetting = EnvoySetting {
    envoy: "in cluster `{cluster}` write `typed_extension_protocol_options` \
        as in cluster `ext_proc` of envoy/standalone.yaml",
    istio: "in the Service `{host}` write `appProtocol: grpc` for the port of warmroute",
    envoy_gateway: NO_FIELD,
    ai_gateway: NO_FIELD,
};

/// Address of warmroute.
pub(crate) static PICKER_ADDRESS: EnvoySetting = with_one_gateway_fix(
    "{own}",
    "in the Service `{host}` write the port {port} as `targetPort`",
    "in the Service of warmroute write the port {port} as `targetPort`, \
        and refer to that Service and its port",
);

/// Circuit breakers of the cluster of the workers.
pub(crate) static WORKER_LIMITS: EnvoySetting = with_one_gateway_fix(
    ENVOY_LIMITS,
    "{DestinationRule} {connectionPool: {tcp: {maxConnections: 100000}, \
        http: {http1MaxPendingRequests: 100000, http2MaxRequests: 100000}}}",
    "{TrafficPolicy} circuitBreaker: {maxConnections: 100000, maxPendingRequests: 100000, \
        maxParallelRequests: 100000}",
);

/// Idle timeout of the connections to the workers.
pub(crate) static WORKER_IDLE_TIMEOUT: EnvoySetting = with_one_gateway_fix(
    "in the HttpProtocolOptions \
        of cluster `{cluster}` write `common_http_protocol_options: {idle_timeout: 4s}`, \
        as in cluster `workers` of envoy/standalone.yaml",
    "{DestinationRule} {connectionPool: {http: {idleTimeout: 4s}}}",
    "{TrafficPolicy} timeout: {http: {connectionIdleTimeout: 4s}}",
);

/// Endpoints of the workers.
pub(crate) static WORKER_ENDPOINTS: EnvoySetting = with_one_gateway_fix(
    "write them into the cluster, or let warmroute do it: \
        `envoy: {endpoints_file: .., cluster: ..}` in its configuration",
    "in the InferencePool write a `selector` and `targetPorts` that select these pods, \
        as `workers.kubernetes.pools` in the configuration of warmroute does",
    "in the Service of the HTTPRoute's `backendRefs` write a `selector` that selects these pods",
);

/// Selection of the worker by the endpoint from warmroute.
pub(crate) static ENDPOINT_OVERRIDE: EnvoySetting = EnvoySetting {
    envoy: "{own}",
    istio: "in the rule of the HTTPRoute refer to the InferencePool in `backendRefs`",
    envoy_gateway: "{TrafficPolicy} loadBalancer: {type: LeastRequest, \
        endpointOverride: {extractFrom: [{header: x-gateway-destination-endpoint}]}}",
    ai_gateway: NO_FIELD,
};

/// Retries of requests to unreachable workers.
pub(crate) static RETRY: EnvoySetting = EnvoySetting {
    envoy: "{own}",
    istio: "{IstioRoutes} {own}",
    envoy_gateway: "{TrafficPolicy} retry: {numRetries: 5, \
        retryOn: {triggers: [connect-failure, refused-stream, reset-before-request]}}",
    ai_gateway: NO_FIELD,
};

/// Timeout of a route.
pub(crate) static ROUTE_TIMEOUT: EnvoySetting = with_one_gateway_fix(
    "write `timeout: 0s` in the {route}",
    TIMEOUT_OF_RULE,
    TIMEOUT_OF_RULE,
);

/// Maximum size of a buffered body.
pub(crate) static BODY_LIMIT: EnvoySetting = EnvoySetting {
    envoy: "in the virtual host `{host}` write `request_body_buffer_limit: {limit}`",
    istio: "{IstioRoutes} in the virtual host `{host}` write `request_body_buffer_limit: {limit}`",
    envoy_gateway: "{ClientPolicy} connection: {bufferLimit: \"{limit}\"}",
    ai_gateway: "remove the annotation `aigateway.envoyproxy.io/processing-body-mode: buffered` \
        from the InferencePool: with full duplex no body is buffered",
};

/// The `x-envoy-*` headers of responses.
pub(crate) static ENVOY_HEADERS: EnvoySetting = with_one_gateway_fix(
    "remove `suppress_envoy_headers` from the router filter of listener `{listener}`, \
        or in the filter `{filter}` of listener `{listener}` \
        write `response_attributes: [upstream.address, response.flags]`",
    "remove `proxyHeaders: {envoyDebugHeaders: {disabled: true}}` from the MeshConfig or from the \
        annotation `proxy.istio.io/config`",
    "{ClientPolicy} headers: {enableEnvoyHeaders: true}",
);

/// Request headers that Envoy removes early.
pub(crate) static CLIENT_HEADERS: EnvoySetting = with_one_gateway_fix(
    "in the connection manager of listener `{listener}`, \
        under `early_header_mutation_extensions` as in envoy/standalone.yaml, write {removals}",
    "{IstioConnections} under `early_header_mutation_extensions` as in envoy/standalone.yaml, \
        write {removals}",
    "{ClientPolicy} headers: {earlyRequestHeaders: {remove: [{names}]}}",
);

/// The idle timeout of streams.
pub(crate) static IDLE_TIMEOUT: EnvoySetting = with_one_gateway_fix(
    "in the connection manager of listener `{listener}` write `stream_idle_timeout: {length}`",
    "{IstioConnections} `stream_idle_timeout: {length}`",
    "{ClientPolicy} timeout: {http: {streamIdleTimeout: {seconds}}}",
);

const ENVOY_LIMITS: &str = "{Cluster} circuit_breakers: {thresholds: [{max_connections: 100000, \
    max_pending_requests: 100000, max_requests: 100000}]}";
const TIMEOUT_OF_RULE: &str = "in the rule of the HTTPRoute write `timeouts: {request: 0s}`";

/// Returns a setting that Envoy Gateway and Envoy AI Gateway fix in the same way.
const fn with_one_gateway_fix(
    envoy: &'static str,
    istio: &'static str,
    gateway: &'static str,
) -> EnvoySetting {
    EnvoySetting {
        envoy,
        istio,
        envoy_gateway: gateway,
        ai_gateway: gateway,
    }
}

/// A field of the ext_proc filter, with the fix in an EnvoyExtensionPolicy and the one for Envoy AI
/// Gateway. Envoy also reads the fields of `IstioOverrides` in the overrides of a route.
macro_rules! field {
    ($scope:literal, $text:literal) => {
        field!($scope, $text, NO_FIELD, NO_FIELD)
    };
    ($scope:literal, $text:literal, $policy:expr, $pool:expr) => {
        EnvoySetting {
            envoy: concat!("{Filter} ", $text),
            istio: concat!("{", $scope, "} ", $text),
            envoy_gateway: $policy,
            ai_gateway: $pool,
        }
    };
}

const DUPLEX_REQUEST: &str =
    "{ExtensionPolicy} processingMode: {request: {body: FullDuplexStreamed}}";
const DUPLEX_RESPONSE: &str =
    "{ExtensionPolicy} processingMode: {response: {body: FullDuplexStreamed}}";
const DUPLEX_POOL: &str = "{PoolAnnotation} aigateway.envoyproxy.io/processing-body-mode: duplex";

pub(crate) static OBSERVABILITY: EnvoySetting =
    field!("IstioFilter", "`observability_mode: false`");

pub(crate) static REQUEST_HEADERS: EnvoySetting = field!(
    "IstioOverrides",
    "`request_header_mode: SEND` under `processing_mode`",
    DUPLEX_REQUEST,
    NO_FIELD
);

pub(crate) static REQUEST_BODY: EnvoySetting = field!(
    "IstioOverrides",
    "`request_body_mode: BUFFERED` under `processing_mode` (or FULL_DUPLEX_STREAMED \
    with `request_trailer_mode: SEND`, for bodies of any length)",
    DUPLEX_REQUEST,
    DUPLEX_POOL
);

pub(crate) static REQUEST_TRAILERS: EnvoySetting = field!(
    "IstioOverrides",
    "`request_trailer_mode: SEND` under `processing_mode`"
);

pub(crate) static CONTENT_LENGTH: EnvoySetting =
    field!("IstioFilter", "`allow_content_length_header: true`");

pub(crate) static RESPONSE_HEADERS: EnvoySetting = field!(
    "IstioOverrides",
    "`response_header_mode: SEND` under `processing_mode`",
    DUPLEX_RESPONSE,
    NO_FIELD
);

pub(crate) static RESPONSE_BODY: EnvoySetting = field!(
    "IstioOverrides",
    "`response_body_mode: NONE` under `processing_mode`",
    DUPLEX_RESPONSE,
    DUPLEX_POOL
);

pub(crate) static RESPONSE_TRAILERS: EnvoySetting = field!(
    "IstioOverrides",
    "`response_trailer_mode: SEND` under `processing_mode`",
    DUPLEX_RESPONSE,
    DUPLEX_POOL
);

pub(crate) static FAILURE_MODE: EnvoySetting = field!(
    "IstioOverrides",
    "`failure_mode_allow: true`",
    "{ExtensionPolicy} failOpen: true",
    NO_FIELD
);

pub(crate) static MODE_OVERRIDE: EnvoySetting = field!(
    "IstioFilter",
    "`allow_mode_override: true`",
    "{ExtensionPolicy} processingMode: {allowModeOverride: true}",
    "{PoolAnnotation} aigateway.envoyproxy.io/allow-mode-override: \"true\""
);

/// Response attributes. Envoy accepts attributes in the overrides of a route, but ignores them.
pub(crate) static RESPONSE_ATTRIBUTES: EnvoySetting = field!(
    "IstioFilter",
    "`response_attributes: [upstream.address, response.flags]`",
    "{ExtensionPolicy} \
    processingMode: {response: {attributes: [upstream.address, response.flags]}}",
    NO_FIELD
);

pub(crate) static MESSAGE_TIMEOUT: EnvoySetting = field!(
    "IstioFilter",
    "`message_timeout: {length}`",
    "{ExtensionPolicy} messageTimeout: {milliseconds}",
    NO_FIELD
);

pub(crate) static MAX_MESSAGE_TIMEOUT: EnvoySetting =
    field!("IstioFilter", "`max_message_timeout: {length}`");

/// Metadata of a namespace that Envoy accepts.
pub(crate) static RECEIVED_NAMESPACE: EnvoySetting = field!(
    "IstioOverrides",
    "`{namespace}` into `receiving_namespaces: {untyped: [..]}` under `metadata_options`",
    "{ExtensionPolicy} metadata: {writableNamespaces: [{namespace}]}",
    NO_FIELD
);

/// Metadata of a namespace that Envoy sends.
pub(crate) static FORWARDED_NAMESPACE: EnvoySetting = field!(
    "IstioOverrides",
    "`{namespace}` into `forwarding_namespaces: {untyped: [..]}` under `metadata_options`",
    "{ExtensionPolicy} metadata: {accessibleNamespaces: [{namespace}]}",
    NO_FIELD
);
