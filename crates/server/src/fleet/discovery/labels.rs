//! Taints, LoRA adapters, topology labels and KV transfer constraints of a worker. Names that no
//! request could match are rejected.

use warmroute_core::worker::{KvTransferRule, TransferEnforcement};
use warmroute_settings::{PathStep, Problem, nearest};

use super::config::{EnforcementConfig, KvTransferConfig, WorkerConfig};

/// Returns the errors in taints, adapters and topology labels.
pub(super) fn problems(config: &WorkerConfig) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (key, names) in [("taints", &config.taints), ("adapters", &config.adapters)] {
        if names.contains("") {
            problems.push(Problem::of(
                key,
                "a name is empty; write the name or remove the entry",
            ));
        }
    }
    for (domain, value) in &config.topology {
        let mut refuse = |path: [PathStep; 2], text: String| problems.push(Problem::at(path, text));
        if domain.is_empty() {
            refuse(
                ["topology".into(), "".into()],
                "a domain has no name; write for example `zone: a`".to_owned(),
            );
        } else if domain.contains('=') {
            let text = format!(
                "the domain `{domain}` holds an `=`, which ends the name of a domain; leave it out"
            );
            refuse(["topology".into(), domain.as_str().into()], text);
        }
        if value.is_empty() {
            let text = format!(
                "the domain `{domain}` has no value; give the worker's value in the domain, or \
                leave it out"
            );
            refuse(["topology".into(), domain.as_str().into()], text);
        }
    }
    problems
}

/// Returns the topology constraint on the decode worker.
pub(super) fn kv_transfer(config: &WorkerConfig) -> Result<Option<KvTransferRule>, Problem> {
    let Some(KvTransferConfig {
        domain,
        enforcement,
        weight,
    }) = &config.kv_transfer
    else {
        return Ok(None);
    };
    let wrong = |key: &str, text: String| Err(Problem::of(key, text).within("kv_transfer"));
    if !config.topology.contains_key(domain) {
        let hint = match nearest(domain, config.topology.keys().map(String::as_str)) {
            Some(suggestion) => format!("did you mean `{suggestion}`?"),
            None => "add it to `topology`".to_owned(),
        };
        return wrong(
            "domain",
            format!("the worker's `topology` has no domain of the name `{domain}`; {hint}"),
        );
    }
    let enforcement = match (enforcement, weight) {
        (EnforcementConfig::Required, None) => TransferEnforcement::Required,
        (EnforcementConfig::Required, Some(_)) => {
            let text =
                "`weight` applies to `preferred` constraints only; remove it or use `preferred`";
            return wrong("weight", text.to_owned());
        }
        (EnforcementConfig::Preferred, Some(weight)) if (0.0..=1.0).contains(weight) => {
            TransferEnforcement::Preferred(*weight)
        }
        (EnforcementConfig::Preferred, Some(weight)) => {
            return wrong(
                "weight",
                format!("the weight is {weight}, but must be from 0 to 1"),
            );
        }
        (EnforcementConfig::Preferred, None) => {
            return wrong(
                "enforcement",
                "`weight` is missing; set a value from 0 to 1".to_owned(),
            );
        }
    };
    Ok(Some(KvTransferRule {
        domain: domain.clone(),
        enforcement,
    }))
}
