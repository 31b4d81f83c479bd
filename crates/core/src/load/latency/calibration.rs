//! Report of the learned latency, with the accuracy of its predictions.

use std::time::Instant;

use serde::Serialize;

use super::model::LatencyEstimate;
use super::slow_rank::{SlowRank, SpeedTransition};
use super::slowdown::RankSlowdown;
use super::totals::PredictionTotals;
use crate::load::table::{LoadTable, RankRow};
use crate::load::tracker::LoadTracker;
use crate::worker::{ModelName, RankSlot, WorkerRank};

/// Learned latency of all models and ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CalibrationReport {
    /// Models that were ever served, in the order in which they were first served.
    pub models: Vec<ModelCalibration>,
    /// Ranks of the fleet, in slot order.
    pub ranks: Vec<RankCalibration>,
}

/// Learned latency of one model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelCalibration {
    /// Model.
    pub model: ModelName,
    /// State that decisions read.
    #[serde(flatten)]
    pub estimate: LatencyEstimate,
    /// Number of observed prefills.
    pub prefill_observations: u64,
    /// Number of observations of decode steps.
    pub decode_observations: u64,
    /// Predicted and observed times to first token.
    pub time_to_first_token: PredictionTotals,
}

/// Learned slowdown of one rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankCalibration {
    /// Slot in the fleet.
    pub slot: RankSlot,
    /// Worker id and data-parallel rank.
    pub rank: WorkerRank,
    /// Model that the rank serves.
    pub model: ModelName,
    /// Factors relative to the model.
    #[serde(flatten)]
    pub slowdown: RankSlowdown,
    /// Seconds since the last observation; `None` before the first one of this process.
    pub age_seconds: Option<f64>,
}

impl LoadTracker {
    /// Returns the learned latency of all models and ranks.
    pub fn calibration(&self) -> CalibrationReport {
        let table = self.table.lock();
        let now = self.now();
        let models = table
            .latency
            .models()
            .map(|(model, latency)| ModelCalibration {
                model: model.clone(),
                estimate: latency.estimate(now),
                prefill_observations: latency.prefill_observations(),
                decode_observations: latency.decode_observations(),
                time_to_first_token: latency.time_to_first_token(),
            });
        CalibrationReport {
            models: models.collect(),
            ranks: table.rank_calibrations(now).collect(),
        }
    }
}

impl LoadTracker {
    /// Updates which ranks are slow. Returns the changes since the last call.
    pub fn update_speeds(&self) -> Vec<SpeedTransition> {
        let mut table = self.table.lock();
        let LoadTable { rows, latency, .. } = &mut *table;
        let now = self.now();
        let transition = |row: &mut RankRow| {
            let model = latency.model(row.model);
            let (speed, change) = model.update_speed(&mut row.slowdown, now)?;
            Some(SpeedTransition {
                rank: row.rank,
                change,
                speed,
            })
        };
        rows.iter_mut().filter_map(transition).collect()
    }

    /// Returns the slow ranks, as of the last update.
    pub fn slow_ranks(&self) -> Vec<SlowRank> {
        let table = self.table.lock();
        let now = self.now();
        let slow_rank = |(_, row): (RankSlot, &RankRow)| {
            Some(SlowRank {
                rank: row.rank,
                speed: table.latency.model(row.model).slow_speed(&row.slowdown)?,
                age_seconds: row.slowdown.slow_age(now)?.as_secs(),
            })
        };
        table.open_rows().filter_map(slow_rank).collect()
    }
}

impl LoadTable {
    /// Returns the learned slowdown of each rank.
    pub(super) fn rank_calibrations(&self, now: Instant) -> impl Iterator<Item = RankCalibration> {
        self.open_rows().map(move |(slot, row)| RankCalibration {
            slot,
            rank: row.rank,
            model: self.latency.model_name(row.model).clone(),
            slowdown: row.slowdown,
            age_seconds: row.slowdown.age(now).map(|age| age.as_secs_f64()),
        })
    }
}
