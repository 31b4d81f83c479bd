//! Log lines about the comparison of the tokens of engines.

use tracing::{info, warn};
use warmroute_core::parity::CanaryVerdict;
use warmroute_core::worker::Worker;

/// Logs a new verdict about a worker. `has_agreeing_worker` is true if the tokens of some worker of
/// the model agree.
pub(super) fn log_verdict(
    worker: &Worker,
    before: &CanaryVerdict,
    verdict: &CanaryVerdict,
    has_agreeing_worker: bool,
) {
    let model = &worker.model;
    let id = worker.id;
    let name = worker.display_name();
    match verdict {
        CanaryVerdict::Differs { difference: d }
        | CanaryVerdict::GenerationPromptDiffers { difference: d, .. } => {
            warn!(
                %model,
                worker = %id,
                name,
                canary = d.canary.as_deref().unwrap_or_default(),
                position = d.position,
                block = d.block,
                warmroute_token = d.warmroute_token,
                engine_token = d.engine_token,
                warmroute_text = d.warmroute_text.as_deref().unwrap_or_default(),
                engine_text = d.engine_text.as_deref().unwrap_or_default(),
                matching_settings = d.matching_settings.as_deref(),
                only_generation_prompt_differs = matches!(verdict, CanaryVerdict::GenerationPromptDiffers { .. }),
                fix = suggest_fix(d.matching_settings.as_deref(), has_agreeing_worker),
                "engine tokens differ"
            );
        }
        CanaryVerdict::Agrees { compared, skipped } => {
            let skipped = skipped
                .keys()
                .map(String::as_str)
                .collect::<Vec<_>>()
                .join(" ");
            let skipped = (!skipped.is_empty()).then_some(skipped);
            info!(%model, worker = %id, name, compared, skipped, "engine tokens match");
        }
        // Logged once, because a starting worker is queried often.
        CanaryVerdict::CannotTest { .. } | CanaryVerdict::Untested
            if matches!(before, CanaryVerdict::CannotTest { .. }) => {}
        CanaryVerdict::CannotTest {
            reason,
            is_transient: true,
        } => {
            let endpoint = worker.endpoint;
            warn!(%model, worker = %id, name, %endpoint, reason, "engine does not answer; its tokens cannot be compared");
        }
        CanaryVerdict::CannotTest { reason, .. } => {
            info!(%model, worker = %id, name, reason, "engine tokens cannot be compared");
        }
        CanaryVerdict::Untested => {}
    }
}

/// Returns the fix of a difference. Settings of the model apply to all of its workers.
fn suggest_fix(matching_settings: Option<&str>, has_agreeing_worker: bool) -> &'static str {
    match matching_settings {
        _ if has_agreeing_worker => "start all workers of the model with the same options",
        Some(_) => "set `matching_settings` for the model",
        None => "compare tokenizer and chat template",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fix_of_difference_fits_the_model() {
        let matching = Some("exclude_tools_when_tool_choice_none: true");
        for (settings, has_agreeing_worker, words) in [
            (None, false, "compare tokenizer"),
            (matching, false, "set `matching_settings`"),
            (matching, true, "same options"),
            (None, true, "same options"),
        ] {
            let fix = suggest_fix(settings, has_agreeing_worker);
            assert!(fix.contains(words), "{fix}");
        }
    }
}
