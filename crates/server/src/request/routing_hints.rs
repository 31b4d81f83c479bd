//! Routing hints of a client, from its headers and from `nvext`. Headers take precedence over the
//! body. A deprecated header is read only if the canonical one is absent. Invalid values are
//! ignored, because hints are not conditions.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use warmroute_core::policy::{Constraints, RequestedWorkers, RouterOverrides, WorkerPin};
use warmroute_core::router::RequestPriority;
use warmroute_core::worker::{DpRank, WorkerId, WorkerRole};
use warmroute_tokens::openai::NvExt;

/// Looks up a request header by its name.
pub type HeaderLookup<'h> = &'h (dyn Fn(&str) -> Option<Cow<'h, str>> + Sync);

const DECODE_WORKER: &[&str] = &["x-dynamo-worker-instance-id", "x-worker-instance-id"];
const PREFILL_WORKER: &[&str] = &["x-dynamo-prefill-instance-id", "x-prefill-instance-id"];
const DECODE_RANK: &[&str] = &["x-dynamo-dp-rank", "x-dp-rank", "x-data-parallel-rank"];
const PREFILL_RANK: &[&str] = &["x-dynamo-prefill-dp-rank", "x-prefill-dp-rank"];
const PRIORITY: &[&str] = &["x-dynamo-request-priority"];
const STRICT_PRIORITY: &[&str] = &["x-dynamo-request-strict-priority"];
const QUEUE_CLASS: &[&str] = &["x-dynamo-meta-policy-class"];
/// Ids of the allowed workers, separated by commas.
const ALLOWED_WORKERS: &str = "x-warmroute-allowed-workers";
/// JSON of the weights for one request.
const OVERRIDES: &str = "x-warmroute-override";

/// Priority headers that warmroute does not read. A component behind it may read them.
const OTHER_PRIORITIES: &[&str] = &["x-warmroute-priority", "x-strict-priority"];

/// Returns the names of all headers with hints.
pub fn hint_headers() -> impl Iterator<Item = &'static str> {
    [
        DECODE_WORKER,
        PREFILL_WORKER,
        DECODE_RANK,
        PREFILL_RANK,
        PRIORITY,
        STRICT_PRIORITY,
        QUEUE_CLASS,
        OTHER_PRIORITIES,
        &[ALLOWED_WORKERS, OVERRIDES],
    ]
    .into_iter()
    .flatten()
    .copied()
}

/// Routing hints of a trusted client.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RoutingHints {
    /// Constraints on the worker.
    pub constraints: Constraints,
    /// The pinned prefill worker.
    pub prefill_pin: Option<WorkerPin>,
    /// Weights for this request.
    pub overrides: RouterOverrides,
    /// Expected length of the output.
    pub expected_output_tokens: Option<u64>,
    /// Priority in the queue.
    pub priority: RequestPriority,
    /// Whether the client only queries the routing decision.
    pub is_query: bool,
}

impl RoutingHints {
    /// Parses the hints of a trusted client.
    pub fn parse(headers: HeaderLookup<'_>, extension: Option<&NvExt>) -> Self {
        let none = NvExt::default();
        let body = extension.unwrap_or(&none);
        let worker = |names| parse_header(headers, names).map(WorkerId);
        let rank = |names| parse_header(headers, names).map(DpRank);
        // The worker header names both the worker in general and the decode worker.
        let workers = RequestedWorkers {
            worker: worker(DECODE_WORKER).or(body.backend_instance_id),
            decode_worker: worker(DECODE_WORKER).or(body.decode_worker_id),
            prefill_worker: worker(PREFILL_WORKER).or(body.prefill_worker_id),
            rank: rank(DECODE_RANK).or(body.dp_rank.map(DpRank)),
            prefill_rank: rank(PREFILL_RANK).or(body.prefill_dp_rank.map(DpRank)),
        };
        let priority_jump =
            parse_header::<f64>(headers, PRIORITY).or(body.agent_hints.priority_jump());
        Self {
            constraints: Constraints {
                pin: workers.pin(WorkerRole::Decode),
                allowed: allowed_workers(headers, body),
                required_taints: body
                    .routing_constraints
                    .required_taints
                    .iter()
                    .cloned()
                    .collect(),
                preferred_taints: finite_weights(&body.routing_constraints.preferred_taints),
                ..Constraints::default()
            },
            prefill_pin: workers.pin(WorkerRole::Prefill),
            overrides: weight_overrides(headers, body),
            expected_output_tokens: body.agent_hints.osl,
            priority: RequestPriority {
                strict: parse_header(headers, STRICT_PRIORITY)
                    .or(body.agent_hints.strict_priority)
                    .unwrap_or(0_u32)
                    .into(),
                jump: priority_jump
                    .filter(|priority_jump| priority_jump.is_finite())
                    .unwrap_or(0.0)
                    .max(0.0),
                class: first_present(headers, QUEUE_CLASS).map(Cow::into_owned),
            },
            is_query: body.is_query(),
        }
    }
}

fn finite_weights(weights: &BTreeMap<String, f64>) -> BTreeMap<String, f64> {
    weights
        .iter()
        .filter(|(_, weight)| weight.is_finite())
        .map(|(taint, weight)| (taint.clone(), *weight))
        .collect()
}

/// Returns the allowed workers. A list with an invalid id is ignored.
fn allowed_workers(headers: HeaderLookup<'_>, body: &NvExt) -> Option<BTreeSet<WorkerId>> {
    let Some(list) = headers(ALLOWED_WORKERS) else {
        return body
            .allowed_worker_ids
            .as_ref()
            .map(|ids| ids.iter().copied().map(WorkerId).collect());
    };
    list.split(',')
        .map(|id| id.trim().parse().ok().map(WorkerId))
        .collect()
}

fn weight_overrides(headers: HeaderLookup<'_>, body: &NvExt) -> RouterOverrides {
    let of_header =
        headers(OVERRIDES).and_then(|text| serde_json::from_str::<RouterOverrides>(&text).ok());
    let of_body = || serde_json::from_value(body.router_config_override.clone()?).ok();
    let valid = |overrides: &RouterOverrides| overrides.validate().is_ok();
    of_header
        .filter(valid)
        .or_else(|| of_body().filter(valid))
        .unwrap_or_default()
}

/// Returns the value of the first present header.
fn first_present<'h>(headers: HeaderLookup<'h>, names: &[&str]) -> Option<Cow<'h, str>> {
    names.iter().find_map(|name| headers(name))
}

fn parse_header<T: FromStr>(headers: HeaderLookup<'_>, names: &[&str]) -> Option<T> {
    first_present(headers, names)?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_hints(headers: &[(&str, &str)], nvext: &str) -> RoutingHints {
        let body = format!(r#"{{"model":"m","prompt":"x","nvext":{nvext}}}"#);
        let request = warmroute_tokens::openai::parse(
            warmroute_tokens::openai::ApiKind::Completions,
            body.as_bytes(),
        )
        .unwrap();
        let find = |name: &str| {
            headers
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| Cow::Borrowed(*value))
        };
        let extension = request.nvext.as_deref().map(NvExt::parse);
        RoutingHints::parse(&find, extension.as_ref())
    }

    fn pinned(worker: u64, rank: Option<u32>) -> Option<WorkerPin> {
        Some(WorkerPin {
            worker: WorkerId(worker),
            rank: rank.map(DpRank),
        })
    }

    #[test]
    fn every_header_that_is_read_is_listed() {
        let read = parking_lot::Mutex::new(BTreeSet::new());
        let record = |name: &str| {
            read.lock().insert(name.to_owned());
            None
        };
        RoutingHints::parse(&record, None);
        let listed = BTreeSet::from_iter(hint_headers().map(str::to_owned));
        let missing: Vec<_> = read.lock().difference(&listed).cloned().collect();
        assert!(missing.is_empty() && !read.lock().is_empty(), "{missing:?}");
    }

    #[test]
    fn ids_become_pins_per_phase() {
        type Case<'a> = (
            &'a [(&'a str, &'a str)],
            &'a str,
            Option<WorkerPin>,
            Option<WorkerPin>,
        );
        let decode_8 = r#"{"decode_worker_id":8}"#;
        let number = r#"{"backend_instance_id":7,"dp_rank":1}"#;
        let text = r#"{"backend_instance_id":"7","dp_rank":1}"#;
        let cases: [Case<'_>; 9] = [
            (&[], "{}", None, None),
            (&[], number, pinned(7, Some(1)), pinned(7, Some(1))),
            (&[], text, pinned(7, Some(1)), pinned(7, Some(1))),
            (
                &[],
                r#"{"decode_worker_id":8,"prefill_worker_id":9,"dp_rank":1,"prefill_dp_rank":2}"#,
                pinned(8, Some(1)),
                pinned(9, Some(2)),
            ),
            (
                &[("x-worker-instance-id", "3")],
                decode_8,
                pinned(3, None),
                None,
            ),
            (
                &[("x-prefill-instance-id", "4"), ("x-dp-rank", "4294967295")],
                decode_8,
                pinned(8, None),
                pinned(4, None),
            ),
            // A canonical header hides the deprecated one even if it is unreadable.
            (
                &[
                    ("x-dynamo-worker-instance-id", "abc"),
                    ("x-worker-instance-id", "3"),
                ],
                "{}",
                None,
                None,
            ),
            (
                &[("x-worker-instance-id", "18446744073709551615")],
                "{}",
                pinned(u64::MAX, None),
                None,
            ),
            (
                &[("x-worker-instance-id", "-1")],
                decode_8,
                pinned(8, None),
                None,
            ),
        ];
        for (headers, nvext, decode, prefill) in cases {
            let hints = parse_hints(headers, nvext);
            let pins = (hints.constraints.pin, hints.prefill_pin);
            assert_eq!(pins, (decode, prefill), "{headers:?} {nvext}");
        }
    }

    #[test]
    fn invalid_hint_does_not_hide_valid_ones() {
        let hints = parse_hints(
            &[("x-dynamo-request-strict-priority", "high")],
            r#"{"dp_rank":"one","unknown":1,"agent_hints":{"priority":5,"strict_priority":2,"osl":64},
                "routing_constraints":{"required_taints":["a"],"preferred_taints":{"b":0.5}},
                "annotations":["query_instance_id:decode"],"router_config_override":{"router_temperature":0.5}}"#,
        );
        assert_eq!(
            hints.priority,
            RequestPriority {
                strict: 2,
                jump: 5.0,
                class: None
            }
        );
        assert_eq!(hints.expected_output_tokens, Some(64));
        assert!(hints.constraints.required_taints.contains("a"));
        assert_eq!(hints.constraints.preferred_taints["b"], 0.5);
        assert!(hints.is_query);
        assert_eq!(hints.overrides.router_temperature, Some(0.5));
    }

    #[test]
    fn allow_list_of_header_precedes_nvext() {
        let ids = |ids: &[u64]| Some(ids.iter().copied().map(WorkerId).collect());
        let nvext = r#"{"allowed_worker_ids":[3,18446744073709551615]}"#;
        type Case<'a> = (
            &'a [(&'a str, &'a str)],
            &'a str,
            Option<BTreeSet<WorkerId>>,
        );
        let cases: [Case<'_>; 6] = [
            (&[], "{}", None),
            (&[], nvext, ids(&[3, u64::MAX])),
            (&[], r#"{"allowed_worker_ids":[]}"#, ids(&[])),
            (
                &[("x-warmroute-allowed-workers", "1, 2")],
                nvext,
                ids(&[1, 2]),
            ),
            (&[("x-warmroute-allowed-workers", "1,x")], nvext, None),
            (&[], r#"{"allowed_worker_ids":"x"}"#, None),
        ];
        for (headers, nvext, expected) in cases {
            assert_eq!(
                parse_hints(headers, nvext).constraints.allowed,
                expected,
                "{headers:?} {nvext}"
            );
        }
    }

    #[test]
    fn weights_out_of_range_are_ignored() {
        let hints = parse_hints(
            &[("x-warmroute-override", r#"{"overlap_score_credit":-1}"#)],
            "{}",
        );
        assert_eq!(hints.overrides, RouterOverrides::default());
        let hints = parse_hints(
            &[("x-warmroute-override", r#"{"overlap_score_credit":2}"#)],
            "{}",
        );
        assert_eq!(hints.overrides.overlap_score_credit, Some(2.0));
    }
}
