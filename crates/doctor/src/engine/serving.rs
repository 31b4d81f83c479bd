//! Checks that the engine responds, serves the configured model, and hands over KV blocks.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use warmroute_core::worker::ModelName;
use warmroute_engines::engine_client::{EngineError, EngineModel};
use warmroute_settings::DurationSetting;

use super::facts::{BootstrapReachability, WorkerFacts, WorkerOrigin, describe_error};
use crate::finding::{CheckVerdict, Finding, error, note, ok, row, run_checks, skipped, warning};

/// Maximum clock difference. With a larger one, events look late, and chat templates with a date
/// may render differently.
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(5);

/// Returns the findings about how a worker serves requests.
pub(super) fn check(facts: &WorkerFacts) -> Vec<Finding> {
    // Equal messages and fixes of several engines are printed once, so neither contains the
    // address.
    let subject = format!("{} at {}", facts.title(), facts.worker.endpoint);
    let mut findings = vec![judge_health(facts).about("engine.reachable", subject)];
    let rows = [
        row("engine.deadline", check_deadline),
        row("engine.model", check_model),
        row("engine.image_names", check_images),
        row("engine.clock", check_clock),
    ];
    findings.extend(run_checks(facts, &rows));
    let adapters = check_adapters(facts).into_iter();
    findings.extend(adapters.map(|verdict| verdict.about("engine.adapters", facts.title())));
    findings
}

/// Returns the findings about the KV handoff of a prefill worker.
pub(super) fn check_prefill(facts: &WorkerFacts) -> Vec<Finding> {
    let rows = [
        row("engine.bootstrap", check_bootstrap),
        row("engine.kv_handoff", check_kv_handoff),
    ];
    run_checks(facts, &rows)
}

/// Returns whether the engine responds, so that further checks are possible.
pub fn is_reachable(facts: &WorkerFacts) -> bool {
    let health = &facts.health;
    !matches!(
        health,
        Err(EngineError::Unreachable(_) | EngineError::Timeout)
    )
}

fn judge_health(facts: &WorkerFacts) -> CheckVerdict {
    let failure = match &facts.health {
        // Some engines have no health endpoint.
        Ok(()) | Err(EngineError::NotOffered(_)) => return ok("the engine answers"),
        Err(failure) => failure,
    };
    let reason = describe_error(failure);
    if is_reachable(facts) {
        let fix = if facts.is_pod() {
            "check the engine's log; its readiness probe should fail until it is healthy"
        } else {
            "check the engine's log; set `draining: true` for this worker until it is healthy"
        };
        return error(
            format!("the engine reports that it is unhealthy: {reason}"),
            fix,
        );
    }
    let fix = match &facts.origin {
        WorkerOrigin::Listed => "start the engine at this address, \
            or write its `--host` and `--port` as `endpoint` of the worker"
            .to_owned(),
        WorkerOrigin::Pod { pool, .. } => format!(
            "check the log of the pod, and compare the port of its engine with the ports \
            of the pool {pool}; its readiness probe should fail while the engine does not respond"
        ),
    };
    error(format!("the engine does not respond: {reason}"), fix)
}

/// Reports a check that reached the deadline. An engine may accept requests and never complete
/// them.
fn check_deadline(facts: &WorkerFacts) -> Option<CheckVerdict> {
    let step = facts.overdue_step.as_ref()?;
    let message = format!(
        "not complete within {}: {}; later steps were not run",
        DurationSetting(step.deadline),
        step.name
    );
    let fix = "check the engine's log for this request; if the engine needs this long, \
        set a longer `--timeout`";
    Some(error(message, fix))
}

fn check_model(facts: &WorkerFacts) -> Option<CheckVerdict> {
    let name = facts.worker.model.as_str();
    let served = match &facts.models {
        Ok(models) => models,
        Err(failure) if failure.is_unauthorized() => {
            return Some(error(
                "the engine requires a token (--api-key), and warmroute has none",
                "set its file \
                as `engines: {http: {token_file: ..}}` in the configuration of warmroute",
            ));
        }
        Err(_) if !is_reachable(facts) => return None,
        Err(failure) => {
            return Some(skipped(format!("/v1/models: {}", describe_error(failure))));
        }
    };
    if served.iter().any(|model| model.id == name) {
        return Some(ok(format!("it serves {name}")));
    }
    let names: Vec<&str> = served.iter().map(|model| model.id.as_str()).collect();
    let other = names.first().unwrap_or(&"..");
    let names = names.join(", ");
    Some(error(
        format!("it serves {names}, but is configured with {name}: every request gets 404"),
        format!(
            "start the engine with `--served-model-name {name}`, \
            or write `model: {other}` for {} and the same `name` under `models`",
            facts.config_section()
        ),
    ))
}

/// Compares the model names in the cache keys of images. In the engine, it is the model path.
fn check_images(facts: &WorkerFacts) -> Option<CheckVerdict> {
    let ours = facts.image_model.as_deref()?;
    let model = facts.worker.model.as_str();
    let mut served = facts.models.as_ref().ok()?.iter();
    let theirs = served.find(|one| one.id == model)?.root.as_deref()?;
    Some(if theirs == ours {
        ok(format!(
            "images are hashed with the model name {ours} on both sides"
        ))
    } else {
        error(
            format!(
                "the engine hashes images with the model name {theirs}, warmroute with {ours}: \
                no block is found from the first image on"
            ),
            format!("write `multimodal: {{model: {theirs}, ..}}` for the model {model}"),
        )
    })
}

/// Compares the configured adapters with those that the engine serves. Requests for an adapter go only to workers that list it or are configured
/// with it.
fn check_adapters(facts: &WorkerFacts) -> Vec<CheckVerdict> {
    let Ok(models) = &facts.models else {
        return Vec::new();
    };
    let is_adapter = |model: &&EngineModel| {
        let parent = model.parent.as_deref();
        parent.is_some_and(|parent| parent != model.id)
    };
    let served = models.iter().filter(is_adapter);
    let served: Vec<&str> = served.map(|model| model.id.as_str()).collect();
    let is_listed = |name: &str| models.iter().any(|model| model.id == name);
    let mut absent: Vec<&str> = facts.worker.adapters.iter().map(String::as_str).collect();
    let mut elsewhere: Vec<&str> = facts.adapters.iter().map(ModelName::as_str).collect();
    let mut unlisted = served.clone();
    unlisted
        .retain(|name| !facts.has_discovery && !absent.contains(name) && !elsewhere.contains(name));
    absent.retain(|name| !is_listed(name));
    elsewhere.retain(|name| !is_listed(name) && !absent.contains(name));
    let section = facts.config_section();
    let mut verdicts = Vec::new();
    if let Some(first) = absent.first() {
        let names = absent.join(", ");
        verdicts.push(error(
            format!(
                "it is configured with {names}, which it has not loaded: such requests get 404"
            ),
            format!(
                "start the engine with `--enable-lora --lora-modules {first}=..`, \
                or remove it from the `adapters` of {section}"
            ),
        ));
    }
    if !unlisted.is_empty() {
        let names = unlisted.join(", ");
        let model = &facts.worker.model;
        verdicts.push(warning(
            format!("it serves {names}, which the configuration does not list for this worker"),
            format!(
                "write `adapters: [{names}]` for the model {model} and for {section}, \
                or enable `engines.discovery`"
            ),
        ));
    }
    if !elsewhere.is_empty() {
        let names = elsewhere.join(", ");
        verdicts.push(note(format!(
            "it does not list {names}: requests for them go only to workers that do"
        )));
    }
    if verdicts.is_empty() && !served.is_empty() {
        verdicts.push(ok(served.join(", ")));
    }
    verdicts
}

fn check_clock(facts: &WorkerFacts) -> Option<CheckVerdict> {
    // A `date` header has a resolution of one second; event timestamps are finer.
    let mut messages = facts.ranks.iter().flat_map(|rank| &rank.messages);
    let event_time = messages.find_map(|received| {
        let seconds = received.batch.as_ref().ok()?.timestamp;
        let age = Duration::try_from_secs_f64(seconds).ok()?;
        let event_time = SystemTime::UNIX_EPOCH.checked_add(age)?;
        (seconds > 0.0).then_some((event_time, received.received_at))
    });
    let (theirs, ours) = event_time.or(facts.clock)?;
    let (skew, which) = match theirs.duration_since(ours) {
        Ok(ahead) => (ahead, "ahead of"),
        Err(behind) => (behind.duration(), "behind"),
    };
    let seconds = skew.as_secs();
    Some(if skew <= MAX_CLOCK_SKEW {
        let limit = seconds + 1;
        ok(format!(
            "its clock differs by less than {limit} s from the local one"
        ))
    } else {
        warning(
            format!(
                "its clock is {seconds} s {which} the local one: \
                templates with a date and the age of events are wrong"
            ),
            "synchronize both machines with one time server, for example with chrony",
        )
    })
}

/// Checks that decode workers can reach the bootstrap server of a prefill worker.
fn check_bootstrap(facts: &WorkerFacts) -> Option<CheckVerdict> {
    let (host, port) = facts.worker.bootstrap_address();
    let fix = format!(
        "start the engine \
        with `--disaggregation-mode prefill --disaggregation-bootstrap-port {port}`, \
        or write `bootstrap: {{host: .., port: ..}}` for {}",
        facts.config_section()
    );
    let server = format!("its bootstrap port {port} at {host}");
    Some(match facts.bootstrap.as_ref()? {
        BootstrapReachability::Listening => ok(format!("decode workers can reach {server}")),
        BootstrapReachability::Refused => error(format!("{server} refuses connections"), fix),
        BootstrapReachability::Unknown(why) => {
            warning(format!("{server} is unreachable from here: {why}"), fix)
        }
    })
}

/// Checks that a prefill worker hands over its KV blocks to workers on other machines.
fn check_kv_handoff(facts: &WorkerFacts) -> Option<CheckVerdict> {
    let answer = match facts.kv_handoff.as_ref()? {
        Ok(answer) => answer,
        Err(failure) => {
            let reason = describe_error(failure);
            let message = format!("it does not prefill for other workers: {reason}");
            return Some(match failure {
                EngineError::Status { .. } => error(
                    message,
                    "check the engine's log and its `--kv-transfer-config`",
                ),
                _ => skipped(format!("the prefill request failed: {reason}")),
            });
        }
    };
    let params = &answer["kv_transfer_params"];
    if !params.is_object() {
        return Some(error(
            "its response to a prefill with KV handoff has no kv_transfer_params: \
            every prompt is computed twice",
            "start it with `--kv-transfer-config \
            '{\"kv_connector\":\"NixlConnector\",\"kv_role\":\"kv_both\",\
             \"kv_load_failure_policy\":\"recompute\"}'`",
        ));
    }
    let Some(host) = params["remote_host"].as_str() else {
        return Some(ok("it hands over KV"));
    };
    if is_loopback(host) && facts.has_remote_decoders {
        return Some(error(
            format!(
                "it makes decode workers fetch KV from {host}, \
                which on other machines is not this engine"
            ),
            format!(
                "start it with `VLLM_NIXL_SIDE_CHANNEL_HOST={}`, \
                or another address that decode workers can reach",
                facts.worker.endpoint.0.ip()
            ),
        ));
    }
    let port = &params["remote_port"];
    let port = if port.is_null() {
        String::new()
    } else {
        format!(", port {port}")
    };
    Some(ok(format!("it hands over KV at {host}{port}")))
}

fn is_loopback(host: &str) -> bool {
    let address = host.trim_matches(['[', ']']).parse();
    host == "localhost" || address.is_ok_and(|ip: IpAddr| ip.is_loopback())
}
