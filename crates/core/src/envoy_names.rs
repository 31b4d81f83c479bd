//! Names that warmroute and the configuration of Envoy share: headers, metadata and filter roles.

/// Header with `ip:port` of the selected worker. Also the key of the dynamic metadata that Envoy's
/// `override_host` reads.
pub const ENDPOINT: &str = "x-gateway-destination-endpoint";
/// Metadata key of the endpoint that served the request.
pub const SERVED_KEY: &str = "x-gateway-destination-endpoint-served";
/// Header with Envoy's cluster that receives a mirrored copy of the request. Without the header
/// there is no copy.
pub const PREFILL_CLUSTER: &str = "x-prefill-cluster";
/// Header with `ip:port` that receives the mirrored copy. Also a key of the dynamic metadata.
pub const PREFILL_DESTINATION: &str = "x-prefill-destination";

/// Namespace of the metadata that Envoy's load balancers read and write.
pub const LB_NAMESPACE: &str = "envoy.lb";
/// Namespace of the metadata that the filters of one exchange share.
pub const WARMROUTE_NAMESPACE: &str = "warmroute";

/// Key of the gRPC metadata that names the filter which opened a stream.
pub const FILTER_ROLE: &str = "x-warmroute-filter";
/// The filter that only observes the first token.
pub const PROBE_FILTER: &str = "probe";
/// The filter that reports retries.
pub const RETRY_FILTER: &str = "retry";
/// The main filter of a listener that also has a probe filter.
pub const PROBED_FILTER: &str = "probed";
