//! Duration of the forward passes of an engine on a GPU.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aisimulate_core::engine::TimingModel;
use anyhow::Result;

/// Timing coefficients and capacity of a model on a GPU. Times are in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GpuModel {
    /// Fixed part of a pass with prefills.
    prefill_base: f64,
    /// Per computed prompt token.
    per_prefill_token: f64,
    /// Per pair of a computed prompt token and a token before it.
    per_attention_pair: f64,
    /// Fixed part of a pass with decoding, which reads all weights.
    decode_base: f64,
    /// Per token of context that decoding reads.
    per_context_token: f64,
    /// Per decoding sequence.
    per_sequence: f64,
    /// KV transfer to another worker, per token.
    pub(crate) per_transferred_token: f64,
    /// Capacity of the KV cache in tokens.
    pub(crate) kv_tokens: usize,
    /// Maximum number of tokens per pass.
    pub(crate) max_batched_tokens: usize,
}

/// Qwen3-32B on two H100. 48.8 us per token is the published prefill peak of 20,480 tokens/s. An
/// attention pair is 4 x 64 layers x 64 heads x 128 = 2.1 MFLOP, at 1.2 PFLOP/s for both GPUs.
/// Decoding reads 64 GB of weights and 262 kB of KV per token, at about 70 % of the bandwidth. A KV
/// transfer over a network adapter of 400 Gbit/s takes 6.6 us per token, at 80 % of its bandwidth.
pub(crate) const QWEN_32B_H100: GpuModel = GpuModel {
    prefill_base: 4e-3,
    per_prefill_token: 48.8e-6,
    per_attention_pair: 1.7e-9,
    decode_base: 13e-3,
    per_context_token: 60e-9,
    per_sequence: 20e-6,
    per_transferred_token: 6.6e-6,
    kv_tokens: 282_000,
    max_batched_tokens: 8192,
};

/// Qwen3-32B on two H200.
pub(crate) const QWEN_32B_H200: GpuModel = GpuModel {
    decode_base: 9.5e-3,
    per_context_token: 42e-9,
    kv_tokens: 700_000,
    ..QWEN_32B_H100
};

/// Qwen3-32B on two H100 that keep about five prompts of the conversations cached.
pub(crate) const QWEN_32B_H100_SMALL_CACHE: GpuModel = GpuModel {
    kv_tokens: 96_000,
    ..QWEN_32B_H100
};

/// Qwen3-32B on two H200 that keep about five prompts of the coding agents cached.
pub(crate) const QWEN_32B_H200_SMALL_CACHE: GpuModel = GpuModel {
    kv_tokens: 300_000,
    ..QWEN_32B_H200
};

/// Qwen3-32B on two H100 with a large fixed time per pass.
pub(crate) const QWEN_32B_H100_SLOW_PASSES: GpuModel = GpuModel {
    prefill_base: 60e-3,
    decode_base: 30e-3,
    ..QWEN_32B_H100
};

/// Llama-3.1-8B on one L40S: 16 GFLOP per token at 160 TFLOP/s. Decoding reads 16 GB of weights and
/// 131 kB of KV per token, at 75 % of 864 GB/s. A KV transfer uses 80 % of 100 Gbit/s.
pub(crate) const LLAMA_8B_L40S: GpuModel = GpuModel {
    prefill_base: 4e-3,
    per_prefill_token: 100e-6,
    per_attention_pair: 3.3e-9,
    decode_base: 24e-3,
    per_context_token: 200e-9,
    per_sequence: 30e-6,
    per_transferred_token: 13e-6,
    kv_tokens: 180_000,
    max_batched_tokens: 4096,
};

/// GPU with long passes, so that a simulation has few of them.
#[cfg(test)]
pub(crate) const LONG_PASSES: GpuModel = GpuModel {
    decode_base: 0.1,
    ..QWEN_32B_H100
};

/// Timing of one engine.
#[derive(Clone, Debug)]
pub(crate) struct EngineTiming {
    /// GPU of the engine.
    pub(crate) gpu: GpuModel,
    /// Factor on every duration.
    pub(crate) slowdown: EngineSlowdown,
}

/// Factor on every duration of an engine; 1 is the speed of the GPU. Clones share the factor.
#[derive(Clone, Debug)]
pub(crate) struct EngineSlowdown(Arc<AtomicU64>);

impl EngineSlowdown {
    /// Creates a factor.
    pub(crate) fn new(factor: f64) -> Self {
        Self(Arc::new(AtomicU64::new(factor.to_bits())))
    }

    /// Replaces the factor. It applies to the next pass.
    pub(crate) fn set(&self, factor: f64) {
        self.0.store(factor.to_bits(), Ordering::Relaxed);
    }

    fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Ordering::Relaxed))
    }
}

impl TimingModel for EngineTiming {
    fn prefill_batch_validation_can_fail(&self) -> bool {
        false
    }

    fn prefill_prediction_can_fail(&self) -> bool {
        false
    }

    fn predict_prefill_ms(
        &self,
        batch_size: usize,
        mean_isl: usize,
        mean_prefix: usize,
    ) -> Result<f64> {
        let computed = mean_isl.saturating_sub(mean_prefix) as f64;
        let pairs = computed * (mean_prefix as f64 + computed / 2.0);
        let gpu = &self.gpu;
        let per_request = gpu.per_prefill_token * computed + gpu.per_attention_pair * pairs;
        Ok(self.slowdown.get() * 1e3 * (gpu.prefill_base + batch_size as f64 * per_request))
    }

    fn predict_decode_ms(
        &self,
        batch_size: usize,
        active_kv_tokens: usize,
        _mean_context_length: usize,
        _total_kv_tokens: usize,
    ) -> Result<f64> {
        let gpu = &self.gpu;
        let context = gpu.per_context_token * active_kv_tokens as f64;
        let sequences = gpu.per_sequence * batch_size as f64;
        Ok(self.slowdown.get() * 1e3 * (gpu.decode_base + context + sequences))
    }
}
