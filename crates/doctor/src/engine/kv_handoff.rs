//! Checks of prefill workers: whether they support KV handoff, and whether decode workers can reach
//! them.

use std::net::IpAddr;

use serde_json::Value;
use warmroute_engines::engine_client::EngineError;

use super::facts::{BootstrapReachability, WorkerFacts, WorkerOrigin, describe_error};
use crate::finding::{Finding, FindingBuilder};

/// Returns the findings about the KV handoff; empty for workers that need none.
pub(super) fn check(facts: &WorkerFacts) -> Vec<Finding> {
    check_bootstrap(facts)
        .into_iter()
        .chain(check_kv_handoff(facts))
        .collect()
}

fn check_bootstrap(facts: &WorkerFacts) -> Option<Finding> {
    let at = FindingBuilder::new("engine.bootstrap", facts.subject());
    let (host, port) = facts.worker.bootstrap_address();
    let setting = match facts.origin {
        WorkerOrigin::Listed => "bootstrap: {host: .., port: ..}",
        WorkerOrigin::Pod { .. } => "bootstrap_port: ..",
    };
    let fix = format!(
        "start the engine with `--disaggregation-mode prefill --disaggregation-bootstrap-port \
        {port}`, or write `{setting}` for {}",
        facts.config_section()
    );
    Some(match facts.bootstrap.as_ref()? {
        BootstrapReachability::Listening => at.ok(format!(
            "decode workers can reach its bootstrap \
        port {port} at {host}"
        )),
        BootstrapReachability::Refused => at.error(
            format!("its bootstrap port {port} at {host} refuses connections"),
            fix,
        ),
        BootstrapReachability::Unknown(why) => at.warning(
            format!("its bootstrap port {port} at {host} is unreachable from here: {why}"),
            fix,
        ),
    })
}

fn check_kv_handoff(facts: &WorkerFacts) -> Option<Finding> {
    let at = FindingBuilder::new("engine.kv_handoff", facts.subject());
    let answer = match facts.kv_handoff.as_ref()? {
        Ok(answer) => answer,
        Err(error @ EngineError::Status { .. }) => {
            return Some(at.error(
                format!(
                    "it does not prefill for other workers: {}",
                    describe_error(error)
                ),
                "check the engine's log and its `--kv-transfer-config`",
            ));
        }
        Err(error) => {
            return Some(at.skipped(format!(
                "the prefill request failed: {}",
                describe_error(error)
            )));
        }
    };
    let params = &answer["kv_transfer_params"];
    if !params.is_object() {
        return Some(at.error(
            "its response to a prefill with KV handoff has no kv_transfer_params: every prompt is \
            computed twice",
            "start it with `--kv-transfer-config \
            '{\"kv_connector\":\"NixlConnector\",\"kv_role\":\"kv_both\",\
             \"kv_load_failure_policy\":\"recompute\"}'`",
        ));
    }
    let Some(host) = params["remote_host"].as_str() else {
        return Some(at.ok("it hands over KV"));
    };
    let port = match &params["remote_port"] {
        Value::Null => String::new(),
        port => format!(", port {port}"),
    };
    Some(if is_loopback(host) && facts.has_remote_decoders {
        at.error(
            format!(
                "it makes decode workers fetch KV from {host}, which on other machines is not \
            this engine"
            ),
            format!(
                "start it with `VLLM_NIXL_SIDE_CHANNEL_HOST={}`, or another address that decode \
                workers can reach",
                facts.worker.endpoint.0.ip()
            ),
        )
    } else {
        at.ok(format!("it hands over KV at {host}{port}"))
    })
}

fn is_loopback(host: &str) -> bool {
    host == "localhost"
        || host
            .trim_matches(['[', ']'])
            .parse::<IpAddr>()
            .is_ok_and(|ip| ip.is_loopback())
}
