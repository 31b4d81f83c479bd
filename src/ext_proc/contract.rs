//! Which headers a request gets on its way to the chosen worker: named profiles for those who read them, combinable, with
//! every name the operator's to change. Whatever is set, the names of all profiles are taken from clients, or anybody
//! could choose a worker.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::headers::{self, RequestHead};
use super::metadata::SUBSET;
use super::mutation::HeaderChanges;
use crate::router::Steer;
use crate::worker::Endpoint;

/// Name of a header.
pub type Name = Arc<str>;

/// A group of headers that belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// `x-worker-instance-id`, `x-dp-rank` and their like for the prefill.
    WorkerId,
    /// The same under the names that Dynamo's workers and front ends read, beside the plain ones.
    Dynamo,
    /// `x-gateway-destination-endpoint`, as inference gateways read it.
    GatewayApi,
    /// `x-prefiller-host-port` and `x-data-parallel-rank`, as llm-d's sidecars and vLLM's front end read them.
    LlmD,
}

/// What a header tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    WorkerId,
    DpRank,
    /// The rank again, only where the worker has several.
    SharedRank,
    Endpoint,
    PrefillId,
    PrefillRank,
    PrefillEndpoint,
    RoutingMode,
}

const WORKER_IDS: [(Field, &str); 4] = [
    (Field::WorkerId, headers::WORKER_ID),
    (Field::DpRank, headers::DP_RANK),
    (Field::PrefillId, headers::PREFILL_ID),
    (Field::PrefillRank, headers::PREFILL_RANK),
];

const DYNAMO: [(Field, &str); 5] = [
    (Field::WorkerId, "x-dynamo-worker-instance-id"),
    (Field::DpRank, "x-dynamo-dp-rank"),
    (Field::PrefillId, "x-dynamo-prefill-instance-id"),
    (Field::PrefillRank, "x-dynamo-prefill-dp-rank"),
    (Field::RoutingMode, "x-dynamo-routing-mode"),
];

const GATEWAY_API: [(Field, &str); 1] = [(Field::Endpoint, headers::ENDPOINT)];

const LLM_D: [(Field, &str); 2] = [
    (Field::PrefillEndpoint, headers::PREFILL_ENDPOINT),
    (Field::SharedRank, headers::DATA_PARALLEL_RANK),
];

/// Further names that only we, or the gateway, may use.
const RESERVED: [&str; 6] = [
    "x-gateway-destination-endpoint-served",
    SUBSET,
    headers::MODE,
    headers::DROPPED,
    headers::PREFILL_CLUSTER,
    headers::PREFILL_DESTINATION,
];

/// Names in place of those of the profiles; an empty list sets no header for that field.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Names {
    /// Instance id of the worker.
    pub worker_id: Option<Vec<String>>,
    /// Its data-parallel rank.
    pub dp_rank: Option<Vec<String>>,
    /// The rank again, only where the worker has several.
    pub data_parallel_rank: Option<Vec<String>>,
    /// `ip:port` of the worker.
    pub endpoint: Option<Vec<String>>,
    /// Instance id of the prefill worker.
    pub prefill_worker_id: Option<Vec<String>>,
    /// Its data-parallel rank.
    pub prefill_dp_rank: Option<Vec<String>>,
    /// `ip:port` of the prefill worker.
    pub prefill_endpoint: Option<Vec<String>>,
    /// `aggregated` or `disaggregated`.
    pub routing_mode: Option<Vec<String>>,
}

impl Names {
    /// Every field by its key, with the names given for it.
    pub fn given(&self) -> impl Iterator<Item = (&'static str, &[String])> {
        self.fields()
            .into_iter()
            .filter_map(|(key, _, names)| Some((key, names.as_deref()?)))
    }

    fn fields(&self) -> [(&'static str, Field, &Option<Vec<String>>); 8] {
        [
            ("worker_id", Field::WorkerId, &self.worker_id),
            ("dp_rank", Field::DpRank, &self.dp_rank),
            (
                "data_parallel_rank",
                Field::SharedRank,
                &self.data_parallel_rank,
            ),
            ("endpoint", Field::Endpoint, &self.endpoint),
            (
                "prefill_worker_id",
                Field::PrefillId,
                &self.prefill_worker_id,
            ),
            ("prefill_dp_rank", Field::PrefillRank, &self.prefill_dp_rank),
            (
                "prefill_endpoint",
                Field::PrefillEndpoint,
                &self.prefill_endpoint,
            ),
            ("routing_mode", Field::RoutingMode, &self.routing_mode),
        ]
    }
}

/// The headers of one deployment.
#[derive(Clone, Debug)]
pub struct Contract {
    set: Vec<(Field, Name)>,
    reserved: Vec<Name>,
    llm_d: bool,
}

impl Default for Contract {
    fn default() -> Self {
        Self::new(&Profile::DEFAULT, &Names::default())
    }
}

impl Profile {
    /// What is set unless the operator says otherwise. A header that nobody reads harms nobody.
    pub const DEFAULT: [Profile; 3] = [Profile::WorkerId, Profile::GatewayApi, Profile::LlmD];

    fn fields(self) -> Vec<(Field, &'static str)> {
        match self {
            Profile::WorkerId => WORKER_IDS.to_vec(),
            Profile::Dynamo => [&WORKER_IDS[..], &DYNAMO].concat(),
            Profile::GatewayApi => GATEWAY_API.to_vec(),
            Profile::LlmD => LLM_D.to_vec(),
        }
    }
}

impl Contract {
    /// The headers of these profiles, with other names where such are given.
    pub fn new(profiles: &[Profile], names: &Names) -> Self {
        let other: Vec<_> = names
            .fields()
            .into_iter()
            .filter_map(|(_, field, names)| Some((field, names.as_ref()?)))
            .collect();
        let renamed = |field: Field| other.iter().any(|(other, _)| *other == field);
        let of_profiles = profiles.iter().flat_map(|profile| profile.fields());
        let of_profiles = of_profiles
            .filter(|(field, _)| !renamed(*field))
            .map(|(field, name)| (field, name.into()));
        let of_names = other
            .iter()
            .flat_map(|(field, names)| names.iter().map(|name| (*field, lower(name))));
        let mut set: Vec<(Field, Name)> = Vec::new();
        for (field, name) in of_profiles.chain(of_names) {
            if !set.iter().any(|(_, known): &(Field, Name)| *known == name) {
                set.push((field, name));
            }
        }
        let known = [&WORKER_IDS[..], &DYNAMO, &GATEWAY_API, &LLM_D].concat();
        let known = known
            .into_iter()
            .map(|(_, name)| name)
            .chain(RESERVED)
            .map(Name::from);
        let mut reserved: Vec<Name> = known
            .chain(set.iter().map(|(_, name)| name.clone()))
            .collect();
        reserved.sort_unstable();
        reserved.dedup();
        Self {
            set,
            reserved,
            llm_d: profiles.contains(&Profile::LlmD),
        }
    }

    /// Whether refusals say why in llm-d's header.
    pub fn says_why_dropped(&self) -> bool {
        self.llm_d
    }

    /// Names that we set.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.set.iter().map(|(_, name)| &**name)
    }

    /// Names under which we set the worker's endpoint.
    pub fn endpoint_names(&self) -> impl Iterator<Item = &str> {
        let endpoint = |(field, _): &&(Field, Name)| *field == Field::Endpoint;
        self.set.iter().filter(endpoint).map(|(_, name)| &**name)
    }

    /// Names that only we, or the gateway, may use.
    pub fn reserved(&self) -> impl Iterator<Item = &str> {
        self.reserved.iter().map(|name| &**name)
    }

    /// Routing headers that the client sent, to be removed.
    pub fn forged(&self, head: &RequestHead) -> Vec<Name> {
        let sent = |name: &&Name| {
            head.all
                .headers
                .iter()
                .any(|header| header.key.eq_ignore_ascii_case(name))
        };
        self.reserved.iter().filter(sent).cloned().collect()
    }

    /// Sets what tells the way.
    pub fn tell(&self, steer: &Steer, changes: &mut HeaderChanges) {
        let Some(to) = &steer.to else { return };
        let prefill = steer.prefill.as_ref();
        for (field, name) in &self.set {
            let value = match field {
                Field::WorkerId => Some(to.rank.worker.to_string()),
                Field::DpRank => Some(to.rank.rank.to_string()),
                Field::SharedRank => to.several_ranks.then(|| to.rank.rank.to_string()),
                Field::Endpoint => Some(endpoints(to.endpoint, &steer.fallbacks)),
                Field::PrefillId => prefill.map(|to| to.rank.worker.to_string()),
                Field::PrefillRank => prefill.map(|to| to.rank.rank.to_string()),
                Field::PrefillEndpoint => prefill.map(|to| to.endpoint.to_string()),
                Field::RoutingMode => Some(
                    if prefill.is_some() {
                        "disaggregated"
                    } else {
                        "aggregated"
                    }
                    .to_owned(),
                ),
            };
            if let Some(value) = value {
                changes.set(name.clone(), value);
            }
        }
    }
}

/// The endpoints to try, best first, as header and metadata have them.
pub fn endpoints(chosen: Endpoint, fallbacks: &[Endpoint]) -> String {
    let mut text = chosen.to_string();
    for other in fallbacks {
        text.push(',');
        text.push_str(&other.to_string());
    }
    text
}

fn lower(name: &str) -> Name {
    name.to_ascii_lowercase().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::{Destination, Mode};
    use crate::worker::{DpRank, WorkerId, WorkerRank};

    fn to(worker: u64, port: u16, several_ranks: bool) -> Destination {
        let endpoint = Endpoint(([10, 0, 0, 1], port).into());
        Destination {
            rank: WorkerRank {
                worker: WorkerId(worker),
                rank: DpRank(1),
            },
            endpoint,
            several_ranks,
        }
    }

    fn told(contract: &Contract, steer: &Steer) -> Vec<String> {
        let mut changes = HeaderChanges::default();
        contract.tell(steer, &mut changes);
        changes
            .pairs()
            .map(|(name, value)| format!("{name}={value}"))
            .collect()
    }

    #[test]
    fn each_profile_sets_its_headers_and_renamed_ones_go_under_their_new_names() {
        let alone = Steer {
            to: Some(to(7, 8000, false)),
            mode: Mode::Exact,
            ..Steer::PASSTHROUGH
        };
        let both = Steer {
            to: Some(to(7, 8000, true)),
            prefill: Some(to(9, 9000, false)),
            ..alone.clone()
        };
        let plain = ["x-worker-instance-id=7", "x-dp-rank=1"];
        let none = Names::default();
        assert_eq!(
            told(&Contract::new(&[Profile::WorkerId], &none), &alone),
            plain
        );
        let dynamo = Contract::new(&[Profile::WorkerId, Profile::Dynamo], &none);
        let mode = "x-dynamo-routing-mode=";
        let names = ["x-dynamo-worker-instance-id=7", "x-dynamo-dp-rank=1"];
        assert_eq!(
            told(&dynamo, &alone),
            [&plain[..], &names, &[&format!("{mode}aggregated")]].concat()
        );
        assert!(told(&dynamo, &both).contains(&format!("{mode}disaggregated")));
        assert!(told(&dynamo, &both).contains(&"x-dynamo-prefill-instance-id=9".to_owned()));
        let llm_d = Contract::new(&[Profile::LlmD], &none);
        assert!(told(&llm_d, &alone).is_empty());
        assert_eq!(
            told(&llm_d, &both),
            [
                "x-prefiller-host-port=10.0.0.1:9000",
                "x-data-parallel-rank=1"
            ]
        );
        let listed = Steer {
            fallbacks: vec![to(8, 8001, false).endpoint],
            ..alone.clone()
        };
        let gateway = Contract::new(&[Profile::GatewayApi], &none);
        assert_eq!(
            told(&gateway, &listed),
            ["x-gateway-destination-endpoint=10.0.0.1:8000,10.0.0.1:8001"]
        );
        let names = Names {
            worker_id: Some(vec!["X-Pod".into()]),
            dp_rank: Some(vec![]),
            ..Names::default()
        };
        assert_eq!(
            told(&Contract::new(&[Profile::WorkerId], &names), &alone),
            ["x-pod=7"]
        );
        assert!(told(&dynamo, &Steer::PASSTHROUGH).is_empty());
    }

    #[test]
    fn the_names_of_all_profiles_and_those_given_are_taken_from_clients() {
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
        let head = RequestHead::read(Some(HeaderMap {
            headers: sent.map(header).to_vec(),
        }));
        let names = Names {
            worker_id: Some(vec!["x-pod".into()]),
            ..Names::default()
        };
        let forged = Contract::new(&[Profile::WorkerId], &names).forged(&head);
        let forged: Vec<&str> = forged.iter().map(AsRef::as_ref).collect();
        assert_eq!(
            forged,
            ["x-dynamo-dp-rank", "x-pod", "x-worker-instance-id"]
        );
    }
}
