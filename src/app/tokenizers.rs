//! Makes the fast way of each tokenizer beside the first requests, and holds it against the library, on pieces of real
//! prompts, for as long as the process runs. What differs once is done by the library from then on.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::MissedTickBehavior;
use tracing::{error, info};

use super::App;
use super::reload::Reloader;
use crate::lifecycle::supervise;
use crate::metrics::{Metrics, ModelOutcomeLabels};
use crate::prompt::Encoder;
use crate::router::Router;
use crate::worker::ModelName;

/// How often a piece of a prompt is compared, for each model: some milliseconds of one core.
const EVERY: Duration = Duration::from_secs(5);

impl App {
    /// Compares from now on.
    pub(super) fn compare_tokenizers(&mut self, router: &Arc<Router>) {
        let (router, reloader, stop) = (router.clone(), self.reloader.clone(), self.stop.clone());
        let metrics = reloader.metrics.clone();
        self.background.spawn(async move {
            supervise("tokenizers", &metrics, stop, || {
                compare(reloader.clone(), router.clone())
            })
            .await;
        });
    }
}

async fn compare(reloader: Arc<Reloader>, router: Arc<Router>) -> anyhow::Result<()> {
    let mut tick = tokio::time::interval(EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut before: Vec<(Arc<Encoder>, Option<&str>)> = Vec::new();
    loop {
        tick.tick().await;
        let mut now = Vec::new();
        for (model, encoder) in reloader.tokenizers() {
            let because = compare_one(&reloader.metrics, &model, &encoder).await;
            let known = before
                .iter()
                .find(|(known, _)| Arc::ptr_eq(known, &encoder))
                .map(|(_, because)| *because);
            match (known, because) {
                (Some(None), Some(because)) => {
                    error!(%model, because, "its texts are tokenised by the library from now on, many times slower: please report this");
                }
                (None, Some(because)) => {
                    info!(%model, because, "its texts are tokenised by the library, many times slower than others");
                }
                _ => {}
            }
            if let Some(standing) = router.parity().of(&model) {
                standing.tokenized(because);
            }
            now.push((encoder, because));
        }
        before = now;
    }
}

/// Why texts of a model are tokenised by the library for good.
async fn compare_one(
    metrics: &Metrics,
    model: &ModelName,
    encoder: &Arc<Encoder>,
) -> Option<&'static str> {
    let compared = encoder.clone();
    let compare = move || compared.quicken().ok().and_then(|()| compared.compare());
    // The others are compared even where this one panics.
    if let Ok(Some(differs)) = tokio::task::spawn_blocking(compare).await {
        let outcome = if differs { "differs" } else { "agrees" };
        metrics
            .tokenizer_comparisons
            .get_or_create(&ModelOutcomeLabels::new(model, outcome))
            .inc();
    }
    encoder.slow_because()
}
