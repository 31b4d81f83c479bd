//! Compares the fast path of each tokenizer on pieces of real prompts with the library that engines
//! use. A difference disables the fast path permanently.

use std::sync::Arc;
use std::time::Duration;

use tracing::{error, info};
use warmroute_core::worker::ModelName;
use warmroute_metrics::{Metrics, ModelOutcomeLabels};
use warmroute_runtime::lifecycle::ticks;
use warmroute_tokens::prompt::Encoder;

use super::background::BackgroundTasks;
use super::reload::Reloader;

/// Interval of comparisons per model; each takes milliseconds of CPU time.
const COMPARE_INTERVAL: Duration = Duration::from_secs(5);

/// Starts the comparison.
pub(super) fn start(tasks: &mut BackgroundTasks, reloader: &Arc<Reloader>) {
    let reloader = reloader.clone();
    tasks.supervise("tokenizers", move || compare(reloader.clone()));
}

async fn compare(reloader: Arc<Reloader>) -> anyhow::Result<()> {
    let mut tick = ticks(COMPARE_INTERVAL);
    let mut before: Vec<(Arc<Encoder>, Option<&str>)> = Vec::new();
    loop {
        tick.tick().await;
        let mut now = Vec::new();
        for (model, encoder) in reloader.tokenizers() {
            let reason = compare_one(&reloader.metrics, &model, &encoder).await;
            let known = before
                .iter()
                .find(|(known, _)| Arc::ptr_eq(known, &encoder))
                .map(|(_, reason)| *reason);
            match (known, reason) {
                (Some(None), Some(reason)) => {
                    error!(%model, reason, "tokenizer fast path disabled, because it differs from the library; tokenization is many times slower. Please report this");
                }
                (None, Some(reason)) => {
                    info!(%model, reason, "tokenizer has no fast path; tokenization is many times slower");
                }
                _ => {}
            }
            if let Some(status) = reloader.router().parity().model_status(&model) {
                status.set_slow_reason(reason);
            }
            now.push((encoder, reason));
        }
        before = now;
    }
}

/// Compares one tokenizer with the library. Returns the reason if its fast path is disabled.
async fn compare_one(
    metrics: &Metrics,
    model: &ModelName,
    encoder: &Arc<Encoder>,
) -> Option<&'static str> {
    let compared = encoder.clone();
    let compare = move || {
        compared
            .enable_fast_path()
            .ok()
            .and_then(|()| compared.verify_sample())
    };
    // A panic of one comparison does not end the others.
    if let Ok(Some(differs)) = tokio::task::spawn_blocking(compare).await {
        let outcome = if differs { "differs" } else { "agrees" };
        metrics
            .tokens
            .tokenizer_comparisons
            .get_or_create(&ModelOutcomeLabels::new(model, outcome))
            .inc();
    }
    encoder.fast_path_disabled_reason()
}
