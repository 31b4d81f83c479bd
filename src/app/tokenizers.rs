//! Makes the fast way of each tokenizer beside the first requests, and holds it against the library, on pieces of real
//! prompts, for as long as the process runs. What differs once is done by the library from then on.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::MissedTickBehavior;
use tracing::{error, info};

use super::App;
use super::reload::Reloader;
use crate::lifecycle::supervise;
use crate::metrics::ModelOutcomeLabels;
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
            supervise("tokenizers", &metrics, stop, || compare(reloader.clone(), router.clone())).await;
        });
    }
}

async fn compare(reloader: Arc<Reloader>, router: Arc<Router>) -> anyhow::Result<()> {
    let mut tick = tokio::time::interval(EVERY);
    let mut told: HashMap<ModelName, Option<&str>> = HashMap::new();
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        for (model, encoder) in reloader.tokenizers() {
            let compared = encoder.clone();
            let (because, differs) = tokio::task::spawn_blocking(move || {
                let differs = compared.quicken().ok().and_then(|()| compared.compare());
                (compared.slow_because(), differs)
            })
            .await?;
            if let Some(differs) = differs {
                let outcome = if differs { "differs" } else { "agrees" };
                reloader.metrics.tokenizer_comparisons.get_or_create(&ModelOutcomeLabels::new(&model, outcome)).inc();
            }
            match (told.insert(model.clone(), because), because) {
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
        }
    }
}
