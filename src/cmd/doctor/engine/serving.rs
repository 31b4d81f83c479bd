//! Whether the engine is there and serves what it is listed with.

use std::time::{Duration, SystemTime};

use super::facts::{WorkerFacts, WorkerOrigin, why};
use crate::cmd::doctor::finding::{At, Finding};
use crate::engine_client::{EngineError, EngineModel};
use crate::settings::Period;

/// Clocks that differ by more than this make events look late, and templates that ask for the day render another one.
const SKEW: Duration = Duration::from_secs(5);

/// Every check of it.
pub(super) fn check(facts: &WorkerFacts) -> Vec<Finding> {
    let checks = [
        Some(reachable(facts)),
        overdue(facts),
        model(facts),
        images(facts),
        clock(facts),
    ];
    checks
        .into_iter()
        .flatten()
        .chain(adapters(facts))
        .collect()
}

/// Whether anything else can be looked at.
pub fn is_there(facts: &WorkerFacts) -> bool {
    !matches!(
        facts.health,
        Err(EngineError::Unreachable(_) | EngineError::Timeout)
    )
}

fn reachable(facts: &WorkerFacts) -> Finding {
    let at = At::new("engine.reachable", facts.subject());
    let endpoint = facts.worker.endpoint;
    match &facts.health {
        // An engine without the page answers all the same.
        Ok(()) | Err(EngineError::NotOffered(_)) => at.ok(format!("{endpoint} answers")),
        Err(error) if is_there(facts) => at.error(
            format!("{endpoint} says that it is not well: {}", why(error)),
            match facts.origin {
                WorkerOrigin::Listed => "look in the engine's log; until it is well write `draining: true` for this worker",
                WorkerOrigin::Pod { .. } => "look in the engine's log; its readiness probe should fail until it is well",
            },
        ),
        Err(error) => at.error(
            format!("{endpoint} does not answer: {}", why(error)),
            match &facts.origin {
                WorkerOrigin::Listed => format!(
                    "start the engine there, or write its `--host` and `--port` as `endpoint` of worker {}",
                    facts.worker.id
                ),
                WorkerOrigin::Pod { pod, pool } => format!(
                    "look in the log of the pod {pod}, and compare the port of its engine with the ports of the pool {pool}; its \
                     readiness probe should fail while the engine does not answer"
                ),
            },
        ),
    }
}

/// An engine that accepts requests and does not complete them.
fn overdue(facts: &WorkerFacts) -> Option<Finding> {
    let step = facts.overdue.as_ref()?;
    Some(At::new("engine.deadline", facts.subject()).error(
        format!("not complete within {}: {}; later steps were not run", Period(step.deadline), step.name),
        "check the engine's log for this request; if the engine needs this long, set a longer `--patience`",
    ))
}

fn model(facts: &WorkerFacts) -> Option<Finding> {
    let at = At::new("engine.model", facts.subject());
    let name = facts.worker.model.as_str();
    let section = facts.section();
    let served = match &facts.models {
        Ok(models) => models,
        Err(error) if error.is_denied() => {
            return Some(at.error(
                "the engine wants a token (--api-key), which we do not have",
                "write the file that holds it as `engines: {token_file: ..}` in our configuration",
            ));
        }
        Err(_) if !is_there(facts) => return None,
        Err(error) => return Some(at.skipped(format!("/v1/models: {}", why(error)))),
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
        format!("it serves {names}, and is listed with {name}: every request is a 404"),
        format!(
            "start the engine with `--served-model-name {name}`, or write `model: {other}` for {section} and the same `name` \
             under `models`"
        ),
    ))
}

/// The name that an engine was started with enters its names for images.
fn images(facts: &WorkerFacts) -> Option<Finding> {
    let ours = facts.images_of.as_deref()?;
    let at = At::new("engine.image_names", facts.subject());
    let served = facts
        .models
        .as_ref()
        .ok()?
        .iter()
        .find(|model| model.id == facts.worker.model.as_str())?;
    let theirs = served.root.as_deref()?;
    Some(if theirs == ours {
        at.ok(format!("images are those of {ours} on both sides"))
    } else {
        at.error(
            format!("its images are those of {theirs}, and for us of {ours}: no block from an image on is ever found"),
            format!("write `media: {{model: {theirs}, ..}}` for the model {}", facts.worker.model),
        )
    })
}

fn adapters(facts: &WorkerFacts) -> Vec<Finding> {
    let Ok(models) = &facts.models else {
        return Vec::new();
    };
    let worker = &facts.worker;
    let is_adapter = |model: &&EngineModel| {
        model
            .parent
            .as_deref()
            .is_some_and(|parent| parent != model.id)
    };
    let served: Vec<&str> = models
        .iter()
        .filter(is_adapter)
        .map(|model| model.id.as_str())
        .collect();
    let absent: Vec<&str> = worker
        .adapters
        .iter()
        .map(String::as_str)
        .filter(|name| !models.iter().any(|model| model.id == *name))
        .collect();
    let listed = |name: &str| {
        worker.adapters.contains(name) && facts.adapters.iter().any(|one| one.as_str() == name)
    };
    let unlisted: Vec<&str> = served
        .iter()
        .copied()
        .filter(|name| !listed(name))
        .collect();
    let at = || At::new("engine.adapters", facts.subject());
    let mut findings = Vec::new();
    if !absent.is_empty() {
        let names = absent.join(", ");
        findings.push(at().error(
            format!("it is listed with {names}, which it has not loaded: such requests are a 404"),
            format!(
                "start the engine with `--enable-lora --lora-modules {}=..`, or take it out of the `adapters` of {}",
                absent[0],
                facts.section()
            ),
        ));
    }
    if !unlisted.is_empty() {
        let names = unlisted.join(", ");
        findings.push(at().warning(
            format!("it serves {names}, of which our configuration does not know that this worker has them"),
            format!("write `adapters: [{names}]` for the model {} and for {}", worker.model, facts.section()),
        ));
    }
    if findings.is_empty() && !(served.is_empty() && worker.adapters.is_empty()) {
        findings.push(at().ok(served.join(", ")));
    }
    findings
}

fn clock(facts: &WorkerFacts) -> Option<Finding> {
    let at = At::new("engine.clock", facts.subject());
    // A date has whole seconds, an event has better ones.
    let told = facts
        .ranks
        .iter()
        .flat_map(|rank| &rank.heard)
        .find_map(|heard| {
            let seconds = heard.batch.as_ref().ok()?.timestamp;
            let told =
                SystemTime::UNIX_EPOCH.checked_add(Duration::try_from_secs_f64(seconds).ok()?)?;
            (seconds > 0.0).then_some((told, heard.at))
        });
    let (theirs, ours) = told.or(facts.date)?;
    let (skew, which) = match theirs.duration_since(ours) {
        Ok(ahead) => (ahead, "ahead of"),
        Err(behind) => (behind.duration(), "behind"),
    };
    Some(if skew <= SKEW {
        at.ok(format!(
            "its clock and ours differ by less than {} s",
            skew.as_secs() + 1
        ))
    } else {
        at.warning(
            format!(
                "its clock is {} s {which} ours: templates that ask for the day differ, and so does the age of events",
                skew.as_secs()
            ),
            "have both machines follow one time server, for example with chrony",
        )
    })
}
