//! Checks that the engine responds and serves the configured model.

use std::time::{Duration, SystemTime};

use warmroute_core::worker::ModelName;
use warmroute_engines::engine_client::{EngineError, EngineModel};
use warmroute_settings::DurationSetting;

use super::facts::{WorkerFacts, WorkerOrigin, describe_error};
use crate::finding::{Finding, FindingBuilder};

/// Maximum clock difference. With a larger one, events look late, and chat templates with a date
/// may render differently.
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(5);

/// Returns the findings about how a worker serves requests.
pub(super) fn check(facts: &WorkerFacts) -> Vec<Finding> {
    let checks = [
        Some(check_reachable(facts)),
        check_deadline(facts),
        check_model(facts),
        check_images(facts),
        check_clock(facts),
    ];
    checks
        .into_iter()
        .flatten()
        .chain(check_adapters(facts))
        .collect()
}

/// Returns whether the engine responds, so that further checks are possible.
pub fn is_reachable(facts: &WorkerFacts) -> bool {
    !matches!(
        facts.health,
        Err(EngineError::Unreachable(_) | EngineError::Timeout)
    )
}

fn check_reachable(facts: &WorkerFacts) -> Finding {
    // Equal messages and fixes of several engines are printed once, so neither contains the address.
    let subject = format!("{} at {}", facts.subject(), facts.worker.endpoint);
    let at = FindingBuilder::new("engine.reachable", subject);
    match &facts.health {
        // Some engines have no health endpoint.
        Ok(()) | Err(EngineError::NotOffered(_)) => at.ok("the engine answers"),
        Err(error) if is_reachable(facts) => at.error(
            format!(
                "the engine reports that it is unhealthy: {}",
                describe_error(error)
            ),
            match facts.origin {
                WorkerOrigin::Listed => {
                    "check the engine's log; set `draining: true` for this \
                worker until it is healthy"
                }
                WorkerOrigin::Pod { .. } => {
                    "check the engine's log; its readiness probe should \
                fail until it is healthy"
                }
            },
        ),
        Err(error) => at.error(
            format!("the engine does not respond: {}", describe_error(error)),
            match &facts.origin {
                WorkerOrigin::Listed => {
                    "start the engine at this address, or write its `--host` and `--port` as \
                    `endpoint` of the worker"
                        .to_owned()
                }
                WorkerOrigin::Pod { pool, .. } => format!(
                    "check the log of the pod, and compare the port of its engine with the ports \
                    of the pool {pool}; its readiness probe should fail while the engine does not \
                    respond"
                ),
            },
        ),
    }
}

/// Reports a check that reached the deadline. An engine may accept requests and never complete
/// them.
fn check_deadline(facts: &WorkerFacts) -> Option<Finding> {
    let step = facts.overdue_step.as_ref()?;
    Some(
        FindingBuilder::new("engine.deadline", facts.subject()).error(
            format!(
                "not complete within {}: {}; later steps were not run",
                DurationSetting(step.deadline),
                step.name
            ),
            "check the engine's log for this request; if the engine needs this long, set a longer \
        `--timeout`",
        ),
    )
}

fn check_model(facts: &WorkerFacts) -> Option<Finding> {
    let at = FindingBuilder::new("engine.model", facts.subject());
    let name = facts.worker.model.as_str();
    let section = facts.config_section();
    let served = match &facts.models {
        Ok(models) => models,
        Err(error) if error.is_unauthorized() => {
            return Some(at.error(
                "the engine requires a token (--api-key), and warmroute has none",
                "set its file as `engines: {http: {token_file: ..}}` in the configuration of warmroute",
            ));
        }
        Err(_) if !is_reachable(facts) => return None,
        Err(error) => return Some(at.skipped(format!("/v1/models: {}", describe_error(error)))),
    };
    if served.iter().any(|model| model.id == name) {
        return Some(at.ok(format!("it serves {name}")));
    }
    let names = served
        .iter()
        .map(|model| model.id.as_str())
        .collect::<Vec<_>>()
        .join(", ");
    let other = served.first().map_or("..", |model| &model.id);
    Some(at.error(
        format!("it serves {names}, but is configured with {name}: every request gets 404"),
        format!(
            "start the engine with `--served-model-name {name}`, or write `model: {other}` for \
            {section} and the same `name` \
             under `models`"
        ),
    ))
}

/// Compares the model names in the cache keys of images. In the engine, it is the model path.
fn check_images(facts: &WorkerFacts) -> Option<Finding> {
    let ours = facts.image_model.as_deref()?;
    let at = FindingBuilder::new("engine.image_names", facts.subject());
    let served = facts
        .models
        .as_ref()
        .ok()?
        .iter()
        .find(|model| model.id == facts.worker.model.as_str())?;
    let theirs = served.root.as_deref()?;
    Some(if theirs == ours {
        at.ok(format!(
            "images are hashed with the model name {ours} on both sides"
        ))
    } else {
        at.error(
            format!(
                "the engine hashes images with the model name {theirs}, warmroute with \
            {ours}: no block is found from the first image on"
            ),
            format!(
                "write `multimodal: {{model: {theirs}, ..}}` for the model {}",
                facts.worker.model
            ),
        )
    })
}

/// Checks the adapters. Requests for an adapter go only to workers that list it or are configured
/// with it.
fn check_adapters(facts: &WorkerFacts) -> Vec<Finding> {
    let Ok(models) = &facts.models else {
        return Vec::new();
    };
    let served = served_adapters(models);
    let is_listed = |name: &&str| models.iter().any(|model| model.id == *name);
    let of_worker = || facts.worker.adapters.iter().map(String::as_str);
    let of_model = || facts.adapters.iter().map(ModelName::as_str);
    let absent: Vec<&str> = of_worker().filter(|name| !is_listed(name)).collect();
    let elsewhere: Vec<&str> = of_model()
        .filter(|name| !is_listed(name) && !absent.contains(name))
        .collect();
    let is_unknown = |name: &&str| {
        !facts.has_discovery && !of_worker().chain(of_model()).any(|known| known == *name)
    };
    let unlisted: Vec<&str> = served.iter().copied().filter(is_unknown).collect();
    let findings: Vec<Finding> = absent_adapters(facts, &absent)
        .into_iter()
        .chain(unlisted_adapters(facts, &unlisted))
        .chain(adapters_elsewhere(facts, &elsewhere))
        .collect();
    if findings.is_empty() && !served.is_empty() {
        let at = FindingBuilder::new("engine.adapters", facts.subject());
        return vec![at.ok(served.join(", "))];
    }
    findings
}

/// Returns the names of the adapters among the served models.
fn served_adapters(models: &[EngineModel]) -> Vec<&str> {
    let is_adapter = |model: &&EngineModel| {
        model
            .parent
            .as_deref()
            .is_some_and(|parent| parent != model.id)
    };
    models
        .iter()
        .filter(is_adapter)
        .map(|model| model.id.as_str())
        .collect()
}

fn absent_adapters(facts: &WorkerFacts, absent: &[&str]) -> Option<Finding> {
    let first = absent.first()?;
    let at = FindingBuilder::new("engine.adapters", facts.subject());
    Some(at.error(
        format!(
            "it is configured with {}, which it has not loaded: such requests get 404",
            absent.join(", ")
        ),
        format!(
            "start the engine with `--enable-lora --lora-modules {first}=..`, or remove it from \
            the `adapters` of {}",
            facts.config_section()
        ),
    ))
}

fn unlisted_adapters(facts: &WorkerFacts, unlisted: &[&str]) -> Option<Finding> {
    if unlisted.is_empty() {
        return None;
    }
    let names = unlisted.join(", ");
    let at = FindingBuilder::new("engine.adapters", facts.subject());
    Some(at.warning(
        format!("it serves {names}, which the configuration does not list for this worker"),
        format!(
            "write `adapters: [{names}]` for the model {} and for {}, or enable \
            `engines.discovery`",
            facts.worker.model,
            facts.config_section()
        ),
    ))
}

fn adapters_elsewhere(facts: &WorkerFacts, names: &[&str]) -> Option<Finding> {
    if names.is_empty() {
        return None;
    }
    let at = FindingBuilder::new("engine.adapters", facts.subject());
    Some(at.note(format!(
        "it does not list {}: requests for them go only to workers that do",
        names.join(", ")
    )))
}

fn check_clock(facts: &WorkerFacts) -> Option<Finding> {
    let at = FindingBuilder::new("engine.clock", facts.subject());
    // A `date` header has a resolution of one second; event timestamps are finer.
    let event_time = facts
        .ranks
        .iter()
        .flat_map(|rank| &rank.messages)
        .find_map(|received| {
            let seconds = received.batch.as_ref().ok()?.timestamp;
            let event_time =
                SystemTime::UNIX_EPOCH.checked_add(Duration::try_from_secs_f64(seconds).ok()?)?;
            (seconds > 0.0).then_some((event_time, received.received_at))
        });
    let (theirs, ours) = event_time.or(facts.clock)?;
    let (skew, which) = match theirs.duration_since(ours) {
        Ok(ahead) => (ahead, "ahead of"),
        Err(behind) => (behind.duration(), "behind"),
    };
    Some(if skew <= MAX_CLOCK_SKEW {
        at.ok(format!(
            "its clock differs by less than {} s from the local one",
            skew.as_secs() + 1
        ))
    } else {
        at.warning(
            format!(
                "its clock is {} s {which} the local one: templates with a date and the age of \
                events are wrong",
                skew.as_secs()
            ),
            "synchronize both machines with one time server, for example with chrony",
        )
    })
}
