//! Whether a prefill worker can be taken over from: whether it hands KV over at all, and whether others find the place.

use std::net::IpAddr;

use serde_json::Value;

use super::facts::{Met, WorkerFacts, WorkerOrigin, why};
use crate::cmd::doctor::finding::{At, Finding};
use crate::engine_client::EngineError;

/// Every check of it; none for workers from whom nobody takes anything over.
pub(super) fn check(facts: &WorkerFacts) -> Vec<Finding> {
    meeting(facts)
        .into_iter()
        .chain(handed_over(facts))
        .collect()
}

fn meeting(facts: &WorkerFacts) -> Option<Finding> {
    let at = At::new("engine.bootstrap", facts.subject());
    let (host, port) = facts.worker.meeting_place();
    let setting = match facts.origin {
        WorkerOrigin::Listed => "bootstrap: {host: .., port: ..}",
        WorkerOrigin::Pod { .. } => "bootstrap_port: ..",
    };
    let mend = format!(
        "start the engine with `--disaggregation-mode prefill --disaggregation-bootstrap-port {port}`, or write `{setting}` for {}",
        facts.section()
    );
    Some(match facts.met.as_ref()? {
        Met::Somebody => at.ok(format!("decode workers can meet it at port {port} of {host}")),
        Met::Nobody => {
            at.error(format!("nobody listens at port {port} of {host}, where decode workers are to meet it"), mend)
        }
        Met::Unknown(why) => at.warning(
            format!("from here port {port} of {host}, where decode workers are to meet it, cannot be reached: {why}"),
            mend,
        ),
    })
}

fn handed_over(facts: &WorkerFacts) -> Option<Finding> {
    let at = At::new("engine.handover", facts.subject());
    let answer = match facts.handed_over.as_ref()? {
        Ok(answer) => answer,
        Err(error @ EngineError::Status { .. }) => {
            return Some(at.error(
                format!("it does not prefill for another worker: {}", why(error)),
                "look in the engine's log, and at its `--kv-transfer-config`",
            ));
        }
        Err(error) => {
            return Some(at.skipped(format!(
                "no prefill for another worker was to be had: {}",
                why(error)
            )));
        }
    };
    let params = &answer["kv_transfer_params"];
    if !params.is_object() {
        return Some(at.error(
            "asked to keep the KV of a prompt for another worker it says nothing of it: every prompt is computed twice",
            "start it with `--kv-transfer-config '{\"kv_connector\":\"NixlConnector\",\"kv_role\":\"kv_both\",\
             \"kv_load_failure_policy\":\"recompute\"}'`",
        ));
    }
    let Some(host) = params["remote_host"].as_str() else {
        return Some(at.ok("it hands over what it has prefilled"));
    };
    let port = match &params["remote_port"] {
        Value::Null => String::new(),
        port => format!(", port {port}"),
    };
    Some(if is_loopback(host) && facts.fetched_from_afar {
        at.error(
            format!("it tells decode workers to fetch at {host}, which on their machines is themselves"),
            format!(
                "start it with `VLLM_NIXL_SIDE_CHANNEL_HOST={}`, or whatever decode workers reach it by",
                facts.worker.endpoint.0.ip()
            ),
        )
    } else {
        at.ok(format!(
            "it hands over what it has prefilled, to be fetched at {host}{port}"
        ))
    })
}

fn is_loopback(host: &str) -> bool {
    host == "localhost"
        || host
            .trim_matches(['[', ']'])
            .parse::<IpAddr>()
            .is_ok_and(|ip| ip.is_loopback())
}
