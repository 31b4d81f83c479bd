//! Latency models by model name, and the slowdown of ranks that left the fleet.

use std::collections::HashMap;
use std::time::Instant;

use super::model::{LatencyEstimate, ModelLatency};
use super::slowdown::RankSlowdown;
use crate::worker::{ModelName, WorkerRank};

/// Maximum number of departed ranks whose slowdown is kept.
const MAX_DEPARTED: usize = 1 << 16;

/// Maximum number of models that a copy of another process can add.
pub(super) const MAX_COPIED_MODELS: usize = 1024;

/// Position of a model in the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ModelId(u32);

/// Latency models of all models that were ever served. The learned latency of a model is kept while
/// it has no ranks.
#[derive(Debug, Default)]
pub(crate) struct LatencyRegistry {
    models: Vec<NamedModel>,
    ids: HashMap<ModelName, ModelId>,
    /// Speed of ranks that left.
    departed: HashMap<(WorkerRank, ModelId), RankSlowdown>,
}

#[derive(Debug)]
struct NamedModel {
    name: ModelName,
    latency: ModelLatency,
}

impl LatencyRegistry {
    /// Returns the id of a model, which is added if it is new.
    pub(crate) fn model_id(&mut self, model: &ModelName) -> ModelId {
        if let Some(id) = self.ids.get(model) {
            return *id;
        }
        let id = ModelId(self.models.len() as u32);
        self.models.push(NamedModel {
            name: model.clone(),
            latency: ModelLatency::default(),
        });
        self.ids.insert(model.clone(), id);
        id
    }

    /// Returns the id of a model, or `None` if it is unknown.
    pub(crate) fn find_model(&self, model: &ModelName) -> Option<ModelId> {
        self.ids.get(model).copied()
    }

    /// Returns the latency model with an id of this registry.
    #[inline]
    pub(crate) fn model(&self, ModelId(id): ModelId) -> &ModelLatency {
        &self.models[id as usize].latency
    }

    /// Returns the latency model with an id of this registry.
    pub(crate) fn model_mut(&mut self, ModelId(id): ModelId) -> &mut ModelLatency {
        &mut self.models[id as usize].latency
    }

    /// Returns the name of the model with an id of this registry.
    pub(crate) fn model_name(&self, ModelId(id): ModelId) -> &ModelName {
        &self.models[id as usize].name
    }

    /// Returns all latency models, in the order in which they were first served.
    pub(crate) fn models(&self) -> impl Iterator<Item = (&ModelName, &ModelLatency)> {
        self.models
            .iter()
            .map(|model| (&model.name, &model.latency))
    }

    /// Returns the kept slowdowns of ranks that left.
    pub(crate) fn departed_slowdowns(
        &self,
    ) -> impl Iterator<Item = (WorkerRank, ModelId, &RankSlowdown)> {
        self.departed
            .iter()
            .map(|((rank, model), slowdown)| (*rank, *model, slowdown))
    }

    /// Returns the estimate of a model, or the prior if the model is unknown.
    pub(crate) fn estimate(&self, model: &ModelName, now: Instant) -> LatencyEstimate {
        self.ids
            .get(model)
            .map_or_else(LatencyEstimate::default, |ModelId(id)| {
                self.models[*id as usize].latency.estimate(now)
            })
    }

    /// Keeps the slowdown of a rank that leaves. At the limit, that of an arbitrary other rank is
    /// discarded.
    pub(crate) fn store_departed_slowdown(
        &mut self,
        rank: WorkerRank,
        model: ModelId,
        slowdown: RankSlowdown,
    ) {
        if self.departed.len() >= MAX_DEPARTED
            && let Some(other) = self.departed.keys().next().copied()
        {
            self.departed.remove(&other);
        }
        self.departed.insert((rank, model), slowdown);
    }

    /// Returns the slowdown of a rank that joins: the kept one if it served the same model before.
    pub(crate) fn take_departed_slowdown(
        &mut self,
        rank: WorkerRank,
        model: ModelId,
    ) -> RankSlowdown {
        self.departed.remove(&(rank, model)).unwrap_or_default()
    }
}
