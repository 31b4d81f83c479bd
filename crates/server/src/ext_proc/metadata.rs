//! Metadata of the gateway, in `metadata_context`: the endpoints that a request is restricted to,
//! and the endpoint that served it. An empty value of the subset key allows no endpoint; a missing
//! key allows all.
//!
//! Decision 0002.

use envoy_types::pb::envoy::config::core::v3::Metadata;
use envoy_types::pb::google::protobuf::Value;
use envoy_types::pb::google::protobuf::value::Kind;
use warmroute_core::envoy_names::{LB_NAMESPACE, SERVED_KEY, WARMROUTE_NAMESPACE};

use warmroute_core::policy::EndpointSubset;
use warmroute_core::worker::WorkerEndpoint;

/// Namespace of the endpoint subset.
const SUBSET_HINT_NAMESPACE: &str = "envoy.lb.subset_hint";
/// Key of the exchange, in the namespace of warmroute.
pub(super) const EXCHANGE_KEY: &str = "exchange";
/// Key of the pool of a request, in the namespace of warmroute.
const POOL_KEY: &str = "pool";

/// Key of the endpoint subset. Only the gateway may set it: a client's header of this name is
/// removed.
pub(super) const SUBSET_KEY: &str = "x-gateway-destination-endpoint-subset";

/// Metadata of one message.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GatewayMetadata {
    /// Endpoints that may serve the request; `None` allows every endpoint.
    pub subset: Option<EndpointSubset>,
    /// Pool whose workers may serve the request; `None` allows every pool.
    pub pool: Option<String>,
    /// Endpoint that served the request, as the gateway wrote it.
    pub served_endpoint: Option<String>,
    /// Key of the exchange that the message belongs to.
    pub exchange_key: Option<String>,
    /// Endpoint that the request is being sent to.
    pub upstream: Option<WorkerEndpoint>,
}

impl GatewayMetadata {
    /// Parses the metadata of a message.
    pub fn parse(metadata: Option<&Metadata>) -> Self {
        let Some(metadata) = metadata else {
            return Self::default();
        };
        let find =
            |namespace: &str, key: &str| metadata.filter_metadata.get(namespace)?.fields.get(key);
        Self {
            subset: find(SUBSET_HINT_NAMESPACE, SUBSET_KEY).map(parse_subset),
            pool: find(WARMROUTE_NAMESPACE, POOL_KEY).and_then(non_empty_text),
            served_endpoint: find(LB_NAMESPACE, SERVED_KEY).and_then(non_empty_text),
            exchange_key: find(WARMROUTE_NAMESPACE, EXCHANGE_KEY).and_then(non_empty_text),
            upstream: None,
        }
    }
}

/// Parses a list of texts, or one text with commas. Other values match no endpoint.
fn parse_subset(value: &Value) -> EndpointSubset {
    match &value.kind {
        Some(Kind::StringValue(text)) => EndpointSubset::parse([text.as_str()]),
        Some(Kind::ListValue(list)) => {
            let texts = list.values.iter().filter_map(|value| match &value.kind {
                Some(Kind::StringValue(text)) => Some(text.as_str()),
                _ => None,
            });
            EndpointSubset::parse(texts)
        }
        _ => EndpointSubset::parse([]),
    }
}

fn non_empty_text(value: &Value) -> Option<String> {
    match &value.kind {
        Some(Kind::StringValue(text)) if !text.is_empty() => Some(text.clone()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::google::protobuf::Struct;

    use super::*;

    #[test]
    fn pool_is_text_in_warmroute_namespace() {
        let pool = |namespace: &str, kind: Kind| {
            let fields = [(POOL_KEY.to_owned(), Value { kind: Some(kind) })].into();
            let filter_metadata = [(namespace.to_owned(), Struct { fields })].into();
            GatewayMetadata::parse(Some(&Metadata {
                filter_metadata,
                ..Metadata::default()
            }))
            .pool
        };
        let text = |text: &str| Kind::StringValue(text.to_owned());
        assert_eq!(
            pool(WARMROUTE_NAMESPACE, text("ns/p")).as_deref(),
            Some("ns/p")
        );
        for (namespace, kind) in [
            (LB_NAMESPACE, text("p")),
            (WARMROUTE_NAMESPACE, text("")),
            (WARMROUTE_NAMESPACE, Kind::BoolValue(true)),
        ] {
            assert_eq!(pool(namespace, kind), None);
        }
    }
}
