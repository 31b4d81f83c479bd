//! One simulated engine: the vLLM scheduler of `aisimulate-core` with chunked prefill, prefix cache,
//! eviction, preemption and KV events.

use std::num::NonZeroU32;
use std::sync::Arc;

use aisimulate_core::engine::generalized::{EngineIdentity, PassId, SchedulerCommand};
use aisimulate_core::engine::{
    Command, Engine, EngineConfig, EngineFactory, HandoffId, KvEvent, KvEventData, LifecycleEvent,
    Output, Request, WorkerType,
};
use anyhow::{Context, Result};
use uuid::Uuid;
use warmroute_core::worker::WorkerRole;

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

    fn to_handoff(self) -> HandoffId {
        HandoffId::new(self.to_uuid())
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

/// Request to submit to an engine.
pub(crate) struct EngineRequest {
    /// Number in the simulation.
    pub(crate) number: RequestNumber,
    /// Tokens of the prompt.
    pub(crate) prompt: Vec<u32>,
    /// Tokens to generate.
    pub(crate) output_tokens: usize,
}

/// Step of a request at an engine.
pub(crate) enum EngineCommand {
    /// Computes the prompt and generates the answer.
    Submit(EngineRequest),
    /// Computes the prompt, and holds its KV blocks until [`EngineCommand::ReleasePrefill`].
    Prefill(EngineRequest),
    /// Reserves KV blocks for the prompt. The engine reports a [`KvTransfer`] when it has them.
    Reserve(EngineRequest),
    /// Generates the answer, because the KV blocks have arrived.
    Activate(RequestNumber),
    /// Releases the KV blocks of a prefill, because they were transferred.
    ReleasePrefill(RequestNumber),
    /// Aborts a request, because its client has disconnected.
    Abort(RequestNumber),
}

impl EngineCommand {
    fn into_command(self) -> Command {
        match self {
            EngineCommand::Submit(request) => Command::Submit(request.into_request()),
            EngineCommand::Prefill(request) => Command::SubmitHandoffPrefill {
                handoff_id: request.number.to_handoff(),
                request: request.into_request(),
            },
            EngineCommand::Reserve(request) => Command::ReserveDestination {
                handoff_id: request.number.to_handoff(),
                request: request.into_request(),
            },
            EngineCommand::Activate(number) => Command::ActivateDestination {
                handoff_id: number.to_handoff(),
            },
            EngineCommand::ReleasePrefill(number) => Command::ReleaseSource {
                handoff_id: number.to_handoff(),
            },
            EngineCommand::Abort(number) => Command::CancelRequest {
                request_id: number.to_uuid(),
                discard_pending_output: true,
            },
        }
    }
}

impl EngineRequest {
    fn into_request(self) -> Request {
        Request {
            request_id: self.number.to_uuid(),
            tokens: self.prompt,
            max_output_tokens: self.output_tokens,
            output_token_ids: None,
        }
    }
}

/// KV transfer for which the decode engine has reserved blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvTransfer {
    /// The request.
    pub(crate) request: RequestNumber,
    /// Prompt tokens that the decode engine does not have cached.
    pub(crate) tokens: usize,
}

/// Immediate effects of a command.
pub(crate) struct CommandEffects {
    /// Changes of the cache.
    pub(crate) kv_events: Vec<KvEventData>,
    /// Transfers that may start.
    pub(crate) transfers: Vec<KvTransfer>,
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
    /// Transfers that may start.
    pub(crate) transfers: Vec<KvTransfer>,
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
    pub(crate) fn new(worker: usize, role: WorkerRole, timing: EngineTiming) -> Result<Self> {
        let config = EngineConfig {
            // An engine of type `WorkerType::Decode` computes prefills in zero time, so `learned`
            // would always choose a local prefill.
            worker_type: match role {
                WorkerRole::Aggregated | WorkerRole::Decode => WorkerType::Aggregated,
                WorkerRole::Prefill => WorkerType::Prefill,
            },
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

    /// Applies a command.
    pub(crate) fn apply(&mut self, command: EngineCommand, now_ms: f64) -> Result<CommandEffects> {
        let command = SchedulerCommand::new(DP_RANK, command.into_command());
        let effects = self.engine.apply_command_effects(command, now_ms)?;
        let mut applied = CommandEffects {
            kv_events: Vec::new(),
            transfers: Vec::new(),
        };
        for rank in effects.into_by_rank() {
            applied.kv_events.extend(event_data(rank.effects.kv_events));
            let transfers = reserved_transfers(&rank.effects.lifecycle_events);
            applied.transfers.extend(transfers);
        }
        Ok(applied)
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
            let transfers = reserved_transfers(&rank.effects.lifecycle_events);
            finished.transfers.extend(transfers);
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

fn reserved_transfers(events: &[LifecycleEvent]) -> impl Iterator<Item = KvTransfer> {
    events.iter().filter_map(|event| match *event {
        LifecycleEvent::DestinationReserved {
            request_id,
            transferable_prompt_tokens,
            ..
        } => Some(KvTransfer {
            request: RequestNumber::from_uuid(request_id),
            tokens: transferable_prompt_tokens,
        }),
        LifecycleEvent::SourceHeld { .. } => None,
    })
}
