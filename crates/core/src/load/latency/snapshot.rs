//! Copy of the learned latency, from which another process continues to learn.

use serde::{Deserialize, Serialize};

use super::model::ModelLatency;
use super::registry::MAX_COPIED_MODELS;
use super::slowdown::RankSlowdown;
use crate::load::tracker::LoadTracker;
use crate::worker::{ModelName, WorkerRank};

/// Version of the format. Another version is not restored.
const VERSION: u32 = 3;

/// Learned latency of all models and ranks, without the request rates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatencySnapshot {
    version: u32,
    models: Vec<ModelLatencySnapshot>,
    ranks: Vec<RankSlowdownSnapshot>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct ModelLatencySnapshot {
    model: ModelName,
    latency: ModelLatency,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct RankSlowdownSnapshot {
    rank: WorkerRank,
    model: ModelName,
    slowdown: RankSlowdown,
}

impl LatencySnapshot {
    /// Returns whether no prefill was observed.
    pub fn is_empty(&self) -> bool {
        self.models.is_empty()
    }
}

impl LoadTracker {
    /// Returns a copy of the learned latency, including that of ranks that left.
    pub fn latency_snapshot(&self) -> LatencySnapshot {
        let table = self.table.lock();
        let latency = &table.latency;
        let learned = latency
            .models()
            .filter(|(_, latency)| latency.prefill_observations() > 0);
        let models = learned.map(|(model, latency)| ModelLatencySnapshot {
            model: model.clone(),
            latency: latency.clone(),
        });
        let departed =
            latency
                .departed_slowdowns()
                .map(|(rank, model, slowdown)| RankSlowdownSnapshot {
                    rank,
                    model: latency.model_name(model).clone(),
                    slowdown: *slowdown,
                });
        let present = table
            .rank_calibrations(self.now())
            .map(|rank| RankSlowdownSnapshot {
                rank: rank.rank,
                model: rank.model,
                slowdown: rank.slowdown,
            });
        LatencySnapshot {
            version: VERSION,
            models: models.collect(),
            ranks: departed.chain(present).collect(),
        }
    }

    /// Continues from the learned latency of another process. Models and ranks with observations of
    /// their own keep them. Returns the number of restored models; invalid parts are ignored.
    pub fn restore_latency(&self, snapshot: LatencySnapshot) -> usize {
        if snapshot.version != VERSION {
            return 0;
        }
        let mut table = self.table.lock();
        let valid = snapshot
            .models
            .into_iter()
            .filter(|model| model.latency.is_valid())
            .take(MAX_COPIED_MODELS);
        let mut restored = 0;
        for ModelLatencySnapshot { model, latency } in valid {
            let id = table.latency.model_id(&model);
            restored += usize::from(table.latency.model_mut(id).restore(&latency));
        }
        for RankSlowdownSnapshot {
            rank,
            model,
            slowdown,
        } in snapshot.ranks
        {
            let known = table.latency.find_model(&model);
            if let (Some(model), Some(slowdown)) = (known, slowdown.restored()) {
                table.restore_slowdown(rank, model, slowdown);
            }
        }
        restored
    }
}
