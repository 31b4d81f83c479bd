//! Work of a rank in the units of the latency model.

use serde::Serialize;

use super::latency::RankSlowdown;

/// Work booked on a rank, and its slowdown.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RankTiming {
    /// Outstanding prefills.
    pub prefills: u32,
    /// Uncached prompt tokens of these prefills.
    pub prefill_tokens: f64,
    /// Attention pairs of these prefills.
    pub prefill_pairs: f64,
    /// Seconds since the engine can have started the oldest of them.
    pub prefill_elapsed: f64,
    /// Seconds by which the oldest of them is delayed, while the rank delivered nothing.
    pub delay: f64,
    /// Prompt and answer tokens of all running requests.
    pub context_tokens: f64,
    /// Factor on the prefill time of the model.
    pub prefill_factor: f64,
    /// Factor on the decode step time of the model.
    pub decode_factor: f64,
}

impl Default for RankTiming {
    fn default() -> Self {
        let slowdown = RankSlowdown::default();
        Self {
            prefills: 0,
            prefill_tokens: 0.0,
            prefill_pairs: 0.0,
            prefill_elapsed: 0.0,
            delay: 0.0,
            context_tokens: 0.0,
            prefill_factor: slowdown.prefill_factor,
            decode_factor: slowdown.decode_factor,
        }
    }
}
