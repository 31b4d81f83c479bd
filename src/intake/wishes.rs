//! What a client wishes of the choice, from its headers and from `nvext`. Headers go before the body. Where a header has
//! an older name, that is looked at only if the canonical one is not there at all; a value that cannot be read counts as
//! none, because it is a wish and not a condition of the request.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use crate::openai::Extension;
use crate::router::Priority;
use crate::schedule::{Constraints, NamedWorkers, Overrides, Pin};
use crate::worker::{DpRank, Role, WorkerId};

/// Looks a request header up by its name.
pub type Headers<'h> = &'h (dyn Fn(&str) -> Option<Cow<'h, str>> + Sync);

const DECODE_WORKER: &[&str] = &["x-dynamo-worker-instance-id", "x-worker-instance-id"];
const PREFILL_WORKER: &[&str] = &["x-dynamo-prefill-instance-id", "x-prefill-instance-id"];
const DECODE_RANK: &[&str] = &["x-dynamo-dp-rank", "x-dp-rank", "x-data-parallel-rank"];
const PREFILL_RANK: &[&str] = &["x-dynamo-prefill-dp-rank", "x-prefill-dp-rank"];
const PRIORITY: &[&str] = &["x-dynamo-request-priority"];
const STRICT_PRIORITY: &[&str] = &["x-dynamo-request-strict-priority"];
const CLASS: &[&str] = &["x-dynamo-meta-policy-class"];
/// Ids of the workers that may be chosen, separated by commas.
const ALLOWED_WORKERS: &str = "x-warmroute-allowed-workers";
/// JSON of the weights for one request.
const OVERRIDES: &str = "x-warmroute-override";

/// What a trusted client wishes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wishes {
    /// Whom the request may go to.
    pub constraints: Constraints,
    /// Who may do the prefill.
    pub prefill_pin: Option<Pin>,
    /// Weights for this request.
    pub overrides: Overrides,
    /// How long the answer will be.
    pub expected_output_tokens: Option<u64>,
    /// Its place among those who wait.
    pub priority: Priority,
    /// Whether the choice is asked for, and not an answer.
    pub query: bool,
}

impl Wishes {
    /// Reads what a trusted client wishes.
    pub fn read(headers: Headers<'_>, extension: Option<&Extension>) -> Self {
        let none = Extension::default();
        let body = extension.unwrap_or(&none);
        let worker = |names| header(headers, names).map(WorkerId);
        let rank = |names| header(headers, names).map(DpRank);
        // The header of the worker says both who serves in general and who decodes.
        let named = NamedWorkers {
            worker: worker(DECODE_WORKER).or(body.backend_instance_id),
            decode_worker: worker(DECODE_WORKER).or(body.decode_worker_id),
            prefill_worker: worker(PREFILL_WORKER).or(body.prefill_worker_id),
            rank: rank(DECODE_RANK).or(body.dp_rank.map(DpRank)),
            prefill_rank: rank(PREFILL_RANK).or(body.prefill_dp_rank.map(DpRank)),
        };
        let jump = header::<f64>(headers, PRIORITY).or(body.agent_hints.priority_jump());
        Self {
            constraints: Constraints {
                pin: named.pin(Role::Decode),
                allowed: allowed(headers, body),
                required_taints: body
                    .routing_constraints
                    .required_taints
                    .iter()
                    .cloned()
                    .collect(),
                preferred_taints: finite(&body.routing_constraints.preferred_taints),
                ..Constraints::default()
            },
            prefill_pin: named.pin(Role::Prefill),
            overrides: overrides(headers, body),
            expected_output_tokens: body.agent_hints.osl,
            priority: Priority {
                strict: header(headers, STRICT_PRIORITY)
                    .or(body.agent_hints.strict_priority)
                    .unwrap_or(0_u32)
                    .into(),
                jump: jump.filter(|jump| jump.is_finite()).unwrap_or(0.0).max(0.0),
                class: present(headers, CLASS).map(Cow::into_owned),
            },
            query: body.is_query(),
        }
    }
}

fn finite(weights: &BTreeMap<String, f64>) -> BTreeMap<String, f64> {
    weights
        .iter()
        .filter(|(_, weight)| weight.is_finite())
        .map(|(taint, weight)| (taint.clone(), *weight))
        .collect()
}

/// The workers that may be chosen. A list with an invalid id is ignored.
fn allowed(headers: Headers<'_>, body: &Extension) -> Option<BTreeSet<WorkerId>> {
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

fn overrides(headers: Headers<'_>, body: &Extension) -> Overrides {
    let of_header =
        headers(OVERRIDES).and_then(|text| serde_json::from_str::<Overrides>(&text).ok());
    let of_body = || serde_json::from_value(body.router_config_override.clone()?).ok();
    let valid = |overrides: &Overrides| overrides.validate().is_ok();
    of_header
        .filter(valid)
        .or_else(|| of_body().filter(valid))
        .unwrap_or_default()
}

/// The first of the names that is there at all.
fn present<'h>(headers: Headers<'h>, names: &[&str]) -> Option<Cow<'h, str>> {
    names.iter().find_map(|name| headers(name))
}

fn header<T: FromStr>(headers: Headers<'_>, names: &[&str]) -> Option<T> {
    present(headers, names)?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(headers: &[(&str, &str)], nvext: &str) -> Wishes {
        let body = format!(r#"{{"model":"m","prompt":"x","nvext":{nvext}}}"#);
        let request =
            crate::openai::parse(crate::openai::Api::Completions, body.as_bytes()).unwrap();
        let find = |name: &str| {
            headers
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| Cow::Borrowed(*value))
        };
        let extension = request.extension.as_deref().map(Extension::read);
        Wishes::read(&find, extension.as_ref())
    }

    fn pinned(worker: u64, rank: Option<u32>) -> Option<Pin> {
        Some(Pin {
            worker: WorkerId(worker),
            rank: rank.map(DpRank),
        })
    }

    #[test]
    fn ids_become_pins_per_phase() {
        type Case<'a> = (&'a [(&'a str, &'a str)], &'a str, Option<Pin>, Option<Pin>);
        let cases: [Case<'_>; 9] = [
            (&[], "{}", None, None),
            (
                &[],
                r#"{"backend_instance_id":7,"dp_rank":1}"#,
                pinned(7, Some(1)),
                pinned(7, Some(1)),
            ),
            (
                &[],
                r#"{"backend_instance_id":"7","dp_rank":1}"#,
                pinned(7, Some(1)),
                pinned(7, Some(1)),
            ),
            (
                &[],
                r#"{"decode_worker_id":8,"prefill_worker_id":9,"dp_rank":1,"prefill_dp_rank":2}"#,
                pinned(8, Some(1)),
                pinned(9, Some(2)),
            ),
            (
                &[("x-worker-instance-id", "3")],
                r#"{"decode_worker_id":8}"#,
                pinned(3, None),
                None,
            ),
            (
                &[("x-prefill-instance-id", "4"), ("x-dp-rank", "4294967295")],
                r#"{"decode_worker_id":8}"#,
                pinned(8, None),
                pinned(4, None),
            ),
            // A canonical header hides the older one even where it cannot be read.
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
                r#"{"decode_worker_id":8}"#,
                pinned(8, None),
                None,
            ),
        ];
        for (headers, nvext, decode, prefill) in cases {
            let wishes = read(headers, nvext);
            assert_eq!(
                (wishes.constraints.pin, wishes.prefill_pin),
                (decode, prefill),
                "{headers:?} {nvext}"
            );
        }
    }

    #[test]
    fn a_bad_value_does_not_hide_the_good_ones_beside_it() {
        let wishes = read(
            &[("x-dynamo-request-strict-priority", "high")],
            r#"{"dp_rank":"one","unknown":1,"agent_hints":{"priority":5,"strict_priority":2,"osl":64},
                "routing_constraints":{"required_taints":["a"],"preferred_taints":{"b":0.5}},
                "annotations":["query_instance_id:decode"],"router_config_override":{"router_temperature":0.5}}"#,
        );
        assert_eq!(
            wishes.priority,
            Priority {
                strict: 2,
                jump: 5.0,
                class: None
            }
        );
        assert_eq!(wishes.expected_output_tokens, Some(64));
        assert!(wishes.constraints.required_taints.contains("a"));
        assert_eq!(wishes.constraints.preferred_taints["b"], 0.5);
        assert!(wishes.query);
        assert_eq!(wishes.overrides.router_temperature, Some(0.5));
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
                read(headers, nvext).constraints.allowed,
                expected,
                "{headers:?} {nvext}"
            );
        }
    }

    #[test]
    fn weights_out_of_range_are_as_if_they_were_not_there() {
        let wishes = read(
            &[("x-warmroute-override", r#"{"overlap_score_credit":-1}"#)],
            "{}",
        );
        assert_eq!(wishes.overrides, Overrides::default());
        let wishes = read(
            &[("x-warmroute-override", r#"{"overlap_score_credit":2}"#)],
            "{}",
        );
        assert_eq!(wishes.overrides.overlap_score_credit, Some(2.0));
    }
}
