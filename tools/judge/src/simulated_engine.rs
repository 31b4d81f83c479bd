//! One simulated engine: the vLLM scheduler of `aisimulate-core` with chunked prefill, prefix cache,
//! eviction, preemption and KV events.

use std::num::NonZeroU32;
use std::sync::Arc;

use aisimulate_core::engine::generalized::{EngineIdentity, PassId, SchedulerCommand};
use aisimulate_core::engine::{
    Command, Engine, EngineConfig, EngineFactory, KvEvent, KvEventData, Output, Request,
};
use anyhow::{Context, Result};
use uuid::Uuid;

use crate::gpu_timing::EngineTiming;
use crate::traces::BLOCK_TOKENS;

/// Maximum number of sequences in a pass.
const MAX_SEQUENCES: usize = 256;
/// The only data-parallel rank.
const DP_RANK: u32 = 0;

/// Number of a request in its simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RequestNumber(pub(crate) u32);

impl RequestNumber {
    /// Returns the request as an array index.
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }

    fn to_uuid(self) -> Uuid {
        // The nil UUID is reserved.
        Uuid::from_u128(u128::from(self.0) + 1)
    }

    fn from_uuid(id: Uuid) -> Self {
        Self((id.as_u128() - 1) as u32)
    }
}

/// Engine of one worker.
pub(crate) struct SimulatedEngine {
    engine: Engine,
    /// Pass that is being computed.
    pass: Option<PassId>,
}

/// Pass that was started.
pub(crate) struct StartedPass {
    /// Time at which the pass ends.
    pub(crate) end_ms: f64,
    /// Whether the engine can compute nothing at present.
    pub(crate) is_empty: bool,
    /// Changes of the cache at the start.
    pub(crate) kv_events: Vec<KvEventData>,
}

/// Pass that was computed.
#[derive(Default)]
pub(crate) struct FinishedPass {
    /// Changes of the cache at the end.
    pub(crate) kv_events: Vec<KvEventData>,
    /// Results of the requests in the pass.
    pub(crate) outputs: Vec<RequestOutput>,
}

/// Result of one request in one pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestOutput {
    /// The request.
    pub(crate) request: RequestNumber,
    /// Whether the pass generated a token.
    pub(crate) has_token: bool,
    /// Whether the request ended.
    pub(crate) is_last: bool,
    /// Prompt tokens that were in the cache, reported once.
    pub(crate) cached_tokens: Option<usize>,
}

impl SimulatedEngine {
    /// Creates an engine with an empty cache.
    pub(crate) fn new(worker: usize, timing: EngineTiming) -> Result<Self> {
        let config = EngineConfig {
            num_gpu_blocks: timing.gpu.kv_tokens / BLOCK_TOKENS,
            block_size: BLOCK_TOKENS,
            max_num_seqs: MAX_SEQUENCES,
            max_num_batched_tokens: timing.gpu.max_batched_tokens,
            enable_prefix_caching: true,
            enable_chunked_prefill: true,
            emit_kv_events: true,
            ..EngineConfig::default()
        };
        let factory = EngineFactory::with_timing_model(config, Arc::new(timing))?;
        let engine = factory.build(EngineIdentity::new(worker as u64), NonZeroU32::MIN)?;
        Ok(Self { engine, pass: None })
    }

    /// Adds a request. Returns the changes of the cache.
    pub(crate) fn submit(
        &mut self,
        request: RequestNumber,
        prompt: Vec<u32>,
        output_tokens: usize,
        now_ms: f64,
    ) -> Result<Vec<KvEventData>> {
        let submitted = Command::Submit(Request {
            request_id: request.to_uuid(),
            tokens: prompt,
            max_output_tokens: output_tokens,
            output_token_ids: None,
        });
        let command = SchedulerCommand::new(DP_RANK, submitted);
        let effects = self.engine.apply_command_effects(command, now_ms)?;
        let ranks = effects.into_by_rank().into_iter();
        Ok(event_data(ranks.flat_map(|rank| rank.effects.kv_events)))
    }

    /// Starts the next pass. Returns `None` if one is being computed or there is no request.
    pub(crate) fn start_pass(&mut self, now_ms: f64) -> Result<Option<StartedPass>> {
        if self.pass.is_some() || !self.engine.is_ready() {
            return Ok(None);
        }
        let Some(started) = self.engine.execute_pass(now_ms)? else {
            return Ok(None);
        };
        self.pass = Some(started.pass_id);
        let mut ranks = started.by_rank.iter();
        let is_empty = started.end_ms <= now_ms
            && ranks.all(|rank| rank.effects.committed_requests.is_empty());
        let ranks = started.by_rank.into_iter();
        Ok(Some(StartedPass {
            end_ms: started.end_ms,
            is_empty,
            kv_events: event_data(ranks.flat_map(|rank| rank.effects.kv_events)),
        }))
    }

    /// Ends the current pass.
    pub(crate) fn finish_pass(&mut self, now_ms: f64) -> Result<FinishedPass> {
        let pass = self.pass.take().context("the engine has no pass")?;
        let completed = self.engine.complete_pass(pass, now_ms)?;
        let mut finished = FinishedPass::default();
        for rank in completed.effects.into_by_rank() {
            finished
                .kv_events
                .extend(event_data(rank.effects.kv_events));
            let outputs = rank.effects.outputs.iter();
            finished.outputs.extend(outputs.map(RequestOutput::from));
        }
        Ok(finished)
    }
}

impl From<&Output> for RequestOutput {
    fn from(output: &Output) -> Self {
        Self {
            request: RequestNumber::from_uuid(output.request_id),
            has_token: output.token_id.is_some(),
            is_last: output.completed || output.rejected,
            cached_tokens: output.cached_tokens,
        }
    }
}

fn event_data(events: impl IntoIterator<Item = KvEvent>) -> Vec<KvEventData> {
    events.into_iter().map(|event| event.data).collect()
}
