//! What the gateway says beside the headers, in `metadata_context`: to which endpoints a request is restricted, and which
//! endpoint served it in the end. A key that is there and says nothing restricts to nobody; one that is not there says
//! nothing.

use envoy_types::pb::envoy::config::core::v3::Metadata;
use envoy_types::pb::google::protobuf::Value;
use envoy_types::pb::google::protobuf::value::Kind;

use crate::schedule::Subset;
use crate::worker::Endpoint;

/// Namespace of the metadata that Envoy's load balancers read and write.
pub const LB: &str = "envoy.lb";
/// Namespace of the endpoints that a request is restricted to.
pub const SUBSET_HINT: &str = "envoy.lb.subset_hint";
/// Namespace in which the two filters of one exchange find each other.
pub const OURS: &str = "warmroute";
/// Key of the exchange in our namespace.
pub const EXCHANGE: &str = "exchange";
/// Key of the pool that a request is for, in our namespace.
const POOL: &str = "pool";

/// Key of the endpoints that a request is restricted to. Only the gateway may set it: a client's header of this name is removed.
pub const SUBSET: &str = "x-gateway-destination-endpoint-subset";
/// Key of the endpoint that served.
pub const SERVED: &str = "x-gateway-destination-endpoint-served";

/// What one message says beside the headers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
    /// The only endpoints that will do.
    pub subset: Option<Subset>,
    /// The only pool whose workers will do.
    pub pool: Option<String>,
    /// Who served, as the gateway wrote it.
    pub served: Option<String>,
    /// Which of our exchanges it belongs to.
    pub exchange: Option<String>,
    /// Who gets the request, where it is on its way already.
    pub to: Option<Endpoint>,
}

impl Told {
    /// Reads the metadata of a message.
    pub fn read(metadata: Option<&Metadata>) -> Self {
        let Some(metadata) = metadata else {
            return Self::default();
        };
        let find =
            |namespace: &str, key: &str| metadata.filter_metadata.get(namespace)?.fields.get(key);
        Self {
            subset: find(SUBSET_HINT, SUBSET).map(subset),
            pool: find(OURS, POOL).and_then(text),
            served: find(LB, SERVED).and_then(text),
            exchange: find(OURS, EXCHANGE).and_then(text),
            to: None,
        }
    }
}

/// A list of texts, or one text with commas. What is no text is nobody's endpoint.
fn subset(value: &Value) -> Subset {
    match &value.kind {
        Some(Kind::StringValue(text)) => Subset::parse([text.as_str()]),
        Some(Kind::ListValue(list)) => {
            let texts = list.values.iter().filter_map(|value| match &value.kind {
                Some(Kind::StringValue(text)) => Some(text.as_str()),
                _ => None,
            });
            Subset::parse(texts)
        }
        _ => Subset::parse([]),
    }
}

fn text(value: &Value) -> Option<String> {
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
    fn the_pool_is_a_text_of_our_namespace() {
        let told = |namespace: &str, kind: Kind| {
            let fields = [(POOL.to_owned(), Value { kind: Some(kind) })].into();
            let filter_metadata = [(namespace.to_owned(), Struct { fields })].into();
            Told::read(Some(&Metadata {
                filter_metadata,
                ..Metadata::default()
            }))
            .pool
        };
        let text = |text: &str| Kind::StringValue(text.to_owned());
        assert_eq!(told(OURS, text("ns/p")).as_deref(), Some("ns/p"));
        for (namespace, kind) in [
            (LB, text("p")),
            (OURS, text("")),
            (OURS, Kind::BoolValue(true)),
        ] {
            assert_eq!(told(namespace, kind), None);
        }
    }
}
