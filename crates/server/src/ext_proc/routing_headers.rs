//! Headers that carry the route to the chosen worker. Profiles group the headers of each consumer
//! and can be combined, and the operator can rename every header. The names of all profiles are
//! removed from client requests, because otherwise a client could choose its worker. The routing
//! hints of untrusted clients are removed too, because a component behind warmroute may read them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_core::envoy_names::SERVED_KEY;
use warmroute_core::router::RouteTarget;
use warmroute_core::worker::WorkerEndpoint;

use super::header_changes::HeaderKey;
use super::headers::{self, RequestHead};
use super::metadata::SUBSET_KEY;
use crate::request::hint_headers;

/// Header group of one consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HeaderProfile {
    /// `x-worker-instance-id`, `x-dp-rank`, and their counterparts for the prefill worker.
    WorkerId,
    /// The headers of `worker-id`, and Dynamo's newer names for them. Front ends of Dynamo 1.6 read
    /// both. `x-dynamo-routing-mode` is for earlier versions.
    Dynamo,
    /// `x-gateway-destination-endpoint`, as inference gateways read it.
    GatewayApi,
    /// `x-prefiller-host-port` and `x-data-parallel-rank`, as llm-d's sidecars and vLLM's front end
    /// read them.
    LlmD,
}

/// Part of a route that a header carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeaderField {
    WorkerId,
    DpRank,
    /// The rank, only for workers with several ranks.
    SharedRank,
    Endpoint,
    PrefillId,
    PrefillRank,
    PrefillEndpoint,
    RoutingMode,
}

const WORKER_IDS: [(HeaderField, &str); 4] = [
    (HeaderField::WorkerId, headers::WORKER_ID),
    (HeaderField::DpRank, headers::DP_RANK),
    (HeaderField::PrefillId, headers::PREFILL_ID),
    (HeaderField::PrefillRank, headers::PREFILL_RANK),
];

const DYNAMO: [(HeaderField, &str); 5] = [
    (HeaderField::WorkerId, "x-dynamo-worker-instance-id"),
    (HeaderField::DpRank, "x-dynamo-dp-rank"),
    (HeaderField::PrefillId, "x-dynamo-prefill-instance-id"),
    (HeaderField::PrefillRank, "x-dynamo-prefill-dp-rank"),
    (HeaderField::RoutingMode, "x-dynamo-routing-mode"),
];

const GATEWAY_API: [(HeaderField, &str); 1] = [(HeaderField::Endpoint, headers::ENDPOINT)];

const LLM_D: [(HeaderField, &str); 2] = [
    (HeaderField::PrefillEndpoint, headers::PREFILL_ENDPOINT),
    (HeaderField::SharedRank, headers::DATA_PARALLEL_RANK),
];

/// Further names that only warmroute or the gateway may set.
const RESERVED: [&str; 6] = [
    SERVED_KEY,
    SUBSET_KEY,
    headers::MODE,
    headers::DROPPED_REASON,
    headers::PREFILL_CLUSTER,
    headers::PREFILL_DESTINATION,
];

/// Header names that replace those of the profiles. An empty list sets no header for that field.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct HeaderNames {
    /// Instance id of the worker.
    pub worker_id: Option<Vec<String>>,
    /// Data-parallel rank of the worker. The name of the header for vLLM's front end is fixed.
    pub dp_rank: Option<Vec<String>>,
    /// `ip:port` of the worker.
    pub endpoint: Option<Vec<String>>,
    /// Instance id of the prefill worker.
    pub prefill_worker_id: Option<Vec<String>>,
    /// Data-parallel rank of the prefill worker.
    pub prefill_dp_rank: Option<Vec<String>>,
    /// `ip:port` of the prefill worker.
    pub prefill_endpoint: Option<Vec<String>>,
    /// `aggregated` or `disaggregated`.
    pub routing_mode: Option<Vec<String>>,
}

impl HeaderNames {
    /// Returns the configured names, with the key of each field.
    pub fn overrides(&self) -> impl Iterator<Item = (&'static str, &[String])> {
        self.fields()
            .into_iter()
            .filter_map(|(key, _, names)| Some((key, names.as_deref()?)))
    }

    fn fields(&self) -> [(&'static str, HeaderField, &Option<Vec<String>>); 7] {
        [
            ("worker_id", HeaderField::WorkerId, &self.worker_id),
            ("dp_rank", HeaderField::DpRank, &self.dp_rank),
            ("endpoint", HeaderField::Endpoint, &self.endpoint),
            (
                "prefill_worker_id",
                HeaderField::PrefillId,
                &self.prefill_worker_id,
            ),
            (
                "prefill_dp_rank",
                HeaderField::PrefillRank,
                &self.prefill_dp_rank,
            ),
            (
                "prefill_endpoint",
                HeaderField::PrefillEndpoint,
                &self.prefill_endpoint,
            ),
            ("routing_mode", HeaderField::RoutingMode, &self.routing_mode),
        ]
    }
}

/// The routing headers of one deployment.
#[derive(Clone, Debug)]
pub struct RoutingHeaders {
    set: Vec<(HeaderField, HeaderKey)>,
    reserved_names: Vec<HeaderKey>,
    /// Further names that are removed from the requests of untrusted clients.
    hint_names: Vec<HeaderKey>,
    has_llm_d: bool,
}

impl Default for RoutingHeaders {
    fn default() -> Self {
        Self::new(&HeaderProfile::DEFAULT, &HeaderNames::default())
    }
}

impl HeaderProfile {
    /// The default profiles. A header that no component reads is harmless.
    pub const DEFAULT: [HeaderProfile; 3] = [
        HeaderProfile::WorkerId,
        HeaderProfile::GatewayApi,
        HeaderProfile::LlmD,
    ];

    fn fields(self) -> Vec<(HeaderField, &'static str)> {
        match self {
            HeaderProfile::WorkerId => WORKER_IDS.to_vec(),
            HeaderProfile::Dynamo => [&WORKER_IDS[..], &DYNAMO].concat(),
            HeaderProfile::GatewayApi => GATEWAY_API.to_vec(),
            HeaderProfile::LlmD => LLM_D.to_vec(),
        }
    }
}

impl RoutingHeaders {
    /// Creates the headers of `profiles`, with the configured `names`.
    pub fn new(profiles: &[HeaderProfile], names: &HeaderNames) -> Self {
        let overrides: Vec<_> = names
            .fields()
            .into_iter()
            .filter_map(|(_, field, names)| Some((field, names.as_ref()?)))
            .collect();
        let renamed =
            |field: HeaderField| overrides.iter().any(|(overridden, _)| *overridden == field);
        let of_profiles = profiles.iter().flat_map(|profile| profile.fields());
        let of_profiles = of_profiles
            .filter(|(field, _)| !renamed(*field))
            .map(|(field, name)| (field, name.into()));
        let of_names = overrides
            .iter()
            .flat_map(|(field, names)| names.iter().map(|name| (*field, lowercase(name))));
        let mut set: Vec<(HeaderField, HeaderKey)> = Vec::new();
        for (field, name) in of_profiles.chain(of_names) {
            if !set
                .iter()
                .any(|(_, known): &(HeaderField, HeaderKey)| *known == name)
            {
                set.push((field, name));
            }
        }
        let known = [&WORKER_IDS[..], &DYNAMO, &GATEWAY_API, &LLM_D].concat();
        let known = known
            .into_iter()
            .map(|(_, name)| name)
            .chain(RESERVED)
            .map(HeaderKey::from);
        let mut reserved: Vec<HeaderKey> = known
            .chain(set.iter().map(|(_, name)| name.clone()))
            .collect();
        reserved.sort_unstable();
        reserved.dedup();
        Self {
            set,
            reserved_names: reserved,
            hint_names: Vec::new(),
            has_llm_d: profiles.contains(&HeaderProfile::LlmD),
        }
    }

    /// Removes the routing hints of clients too, because the clients are not trusted.
    pub fn without_client_hints(mut self) -> Self {
        let is_new = |name: &&str| self.reserved_names().all(|reserved| reserved != *name);
        self.hint_names = hint_headers().filter(is_new).map(HeaderKey::from).collect();
        self
    }

    /// Returns whether rejections set llm-d's header with the reason.
    pub fn sets_dropped_reason(&self) -> bool {
        self.has_llm_d
    }

    /// Returns the names of the headers that warmroute sets.
    pub fn header_names(&self) -> impl Iterator<Item = &str> {
        self.set.iter().map(|(_, name)| &**name)
    }

    /// Returns the names of the headers that carry the worker's endpoint.
    pub fn endpoint_names(&self) -> impl Iterator<Item = &str> {
        let endpoint = |(field, _): &&(HeaderField, HeaderKey)| *field == HeaderField::Endpoint;
        self.set.iter().filter(endpoint).map(|(_, name)| &**name)
    }

    /// Returns whether a header carries the id of the worker.
    pub fn name_workers(&self) -> bool {
        self.set
            .iter()
            .any(|(field, _)| *field == HeaderField::WorkerId)
    }

    /// Returns the names that only warmroute or the gateway may set.
    pub fn reserved_names(&self) -> impl Iterator<Item = &str> {
        self.reserved_names.iter().map(|name| &**name)
    }

    /// Returns the names of the headers that clients cannot send to workers.
    pub fn removed_names(&self) -> impl Iterator<Item = &HeaderKey> {
        self.reserved_names.iter().chain(&self.hint_names)
    }

    /// Returns the headers in a client's request that must be removed.
    pub fn forged_headers(&self, head: &RequestHead) -> Vec<HeaderKey> {
        let sent = |name: &&HeaderKey| {
            head.headers
                .headers
                .iter()
                .any(|header| header.key.eq_ignore_ascii_case(name))
        };
        self.removed_names().filter(sent).cloned().collect()
    }

    /// Returns the names and values of the headers of a route.
    pub fn route_headers<'a>(
        &'a self,
        target: &'a RouteTarget,
    ) -> impl Iterator<Item = (&'a HeaderKey, String)> {
        let prefill = target.prefill.as_ref();
        self.set.iter().filter_map(move |(field, name)| {
            let to = target.to.as_ref()?;
            let value = match field {
                HeaderField::WorkerId => Some(to.rank.worker.to_string()),
                HeaderField::DpRank => Some(to.rank.rank.to_string()),
                HeaderField::SharedRank => to.several_ranks.then(|| to.rank.rank.to_string()),
                HeaderField::Endpoint => Some(endpoint_list(to.endpoint, &target.fallbacks)),
                HeaderField::PrefillId => prefill.map(|to| to.rank.worker.to_string()),
                HeaderField::PrefillRank => prefill.map(|to| to.rank.rank.to_string()),
                HeaderField::PrefillEndpoint => prefill.map(|to| to.endpoint.to_string()),
                HeaderField::RoutingMode => Some(
                    if prefill.is_some() {
                        "disaggregated"
                    } else {
                        "aggregated"
                    }
                    .to_owned(),
                ),
            };
            Some((name, value?))
        })
    }
}

/// Returns the endpoints to try, best first, separated by commas.
pub(super) fn endpoint_list(chosen: WorkerEndpoint, fallbacks: &[WorkerEndpoint]) -> String {
    let mut text = chosen.to_string();
    for other in fallbacks {
        text.push(',');
        text.push_str(&other.to_string());
    }
    text
}

fn lowercase(name: &str) -> HeaderKey {
    name.to_ascii_lowercase().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmroute_core::router::{Mode, RankEndpoint};
    use warmroute_core::worker::WorkerRank;

    fn rank_endpoint(worker: u64, port: u16, several_ranks: bool) -> RankEndpoint {
        let endpoint = WorkerEndpoint(([10, 0, 0, 1], port).into());
        RankEndpoint {
            rank: WorkerRank::new(worker, 1),
            endpoint,
            via: Default::default(),
            several_ranks,
        }
    }

    fn header_lines(headers: &RoutingHeaders, target: &RouteTarget) -> Vec<String> {
        headers
            .route_headers(target)
            .map(|(name, value)| format!("{name}={value}"))
            .collect()
    }

    #[test]
    fn profiles_set_their_headers() {
        let alone = RouteTarget {
            to: Some(rank_endpoint(7, 8000, false)),
            mode: Mode::Exact,
            ..RouteTarget::PASSTHROUGH
        };
        let both = RouteTarget {
            to: Some(rank_endpoint(7, 8000, true)),
            prefill: Some(rank_endpoint(9, 9000, false)),
            ..alone.clone()
        };
        let plain = ["x-worker-instance-id=7", "x-dp-rank=1"];
        let none = HeaderNames::default();
        assert_eq!(
            header_lines(
                &RoutingHeaders::new(&[HeaderProfile::WorkerId], &none),
                &alone
            ),
            plain
        );
        let dynamo = RoutingHeaders::new(&[HeaderProfile::WorkerId, HeaderProfile::Dynamo], &none);
        let mode = "x-dynamo-routing-mode=";
        let names = ["x-dynamo-worker-instance-id=7", "x-dynamo-dp-rank=1"];
        assert_eq!(
            header_lines(&dynamo, &alone),
            [&plain[..], &names, &[&format!("{mode}aggregated")]].concat()
        );
        assert!(header_lines(&dynamo, &both).contains(&format!("{mode}disaggregated")));
        assert!(
            header_lines(&dynamo, &both).contains(&"x-dynamo-prefill-instance-id=9".to_owned())
        );
        let llm_d = RoutingHeaders::new(&[HeaderProfile::LlmD], &none);
        assert!(header_lines(&llm_d, &alone).is_empty());
        assert_eq!(
            header_lines(&llm_d, &both),
            [
                "x-prefiller-host-port=10.0.0.1:9000",
                "x-data-parallel-rank=1"
            ]
        );
        let listed = RouteTarget {
            fallbacks: vec![rank_endpoint(8, 8001, false).endpoint],
            ..alone.clone()
        };
        let gateway = RoutingHeaders::new(&[HeaderProfile::GatewayApi], &none);
        assert_eq!(
            header_lines(&gateway, &listed),
            ["x-gateway-destination-endpoint=10.0.0.1:8000,10.0.0.1:8001"]
        );
        assert!(header_lines(&dynamo, &RouteTarget::PASSTHROUGH).is_empty());
    }

    #[test]
    fn configured_names_replace_default_headers() {
        let alone = RouteTarget {
            to: Some(rank_endpoint(7, 8000, false)),
            mode: Mode::Exact,
            ..RouteTarget::PASSTHROUGH
        };
        let names = HeaderNames {
            worker_id: Some(vec!["X-Pod".into()]),
            dp_rank: Some(vec![]),
            ..HeaderNames::default()
        };
        assert_eq!(
            header_lines(
                &RoutingHeaders::new(&[HeaderProfile::WorkerId], &names),
                &alone
            ),
            ["x-pod=7"]
        );
    }

    #[test]
    fn reserved_headers_of_clients_are_removed() {
        use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
        let header = |key: &str| HeaderValue {
            key: key.to_owned(),
            value: "1".into(),
            ..HeaderValue::default()
        };
        let sent = [
            "x-pod",
            "X-Dynamo-Dp-Rank",
            "x-other",
            "x-worker-instance-id",
            "x-worker-instance-id",
        ];
        let head = RequestHead::parse(Some(HeaderMap {
            headers: sent.map(header).to_vec(),
        }));
        let names = HeaderNames {
            worker_id: Some(vec!["x-pod".into()]),
            ..HeaderNames::default()
        };
        let forged = RoutingHeaders::new(&[HeaderProfile::WorkerId], &names).forged_headers(&head);
        let forged: Vec<&str> = forged.iter().map(AsRef::as_ref).collect();
        assert_eq!(
            forged,
            ["x-dynamo-dp-rank", "x-pod", "x-worker-instance-id"]
        );
    }
}
