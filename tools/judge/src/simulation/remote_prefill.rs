//! Remote prefills of a simulation: the handoff from a prefill worker to a decode worker. The router
//! chooses the decode worker when the prefill has completed. The KV transfer starts when that worker
//! has reserved blocks.

use anyhow::Result;
use warmroute_core::worker::WorkerRole;

use super::{FleetSimulation, SimulationEvent};
use crate::simulated_engine::{
    EngineCommand, EngineRequest, KvTransfer, RequestNumber, RequestOutput,
};

impl FleetSimulation<'_> {
    pub(super) fn is_prefill_worker(&self, worker: usize) -> bool {
        self.case.role(worker) == WorkerRole::Prefill
    }

    pub(super) fn set_prefill_worker(&mut self, request: RequestNumber, worker: usize) {
        if let Some(progress) = &mut self.requests[request.index()].progress {
            progress.prefill_worker = Some(worker);
        }
    }

    pub(super) fn record_cached_tokens(&mut self, output: &RequestOutput) {
        let progress = &mut self.requests[output.request.index()].progress;
        if let (Some(progress), Some(cached_tokens)) = (progress, output.cached_tokens) {
            progress.cached_tokens = cached_tokens;
        }
    }

    /// Reports outputs to the router. The output of a prefill worker completes the prefill, so the
    /// decode is routed.
    pub(super) fn report_outputs(
        &mut self,
        worker: usize,
        outputs: &[RequestOutput],
        now_ms: f64,
    ) -> Result<()> {
        for output in outputs {
            if self.is_prefill_worker(worker) {
                self.place_decode(output.request, now_ms)?;
            } else {
                self.driver.on_output(output);
            }
        }
        Ok(())
    }

    /// Routes the decode of a request after its prefill, and reserves its KV blocks.
    fn place_decode(&mut self, number: RequestNumber, now_ms: f64) -> Result<()> {
        let request = self.requests[number.index()].request;
        let prompt = request.tokens();
        let worker = self.driver.place_decode(number, &prompt)?;
        self.workers[worker].running.push(number);
        let request = EngineRequest {
            number,
            prompt,
            output_tokens: request.output_tokens,
        };
        self.apply(worker, EngineCommand::Reserve(request), now_ms)
    }

    /// Starts KV transfers to a decode worker. A prefill worker sends one at a time.
    pub(super) fn start_transfers(&mut self, to: usize, transfers: &[KvTransfer], now_ms: f64) {
        for transfer in transfers {
            let progress = self.requests[transfer.request.index()].progress.as_ref();
            let Some(from) = progress.and_then(|progress| progress.prefill_worker) else {
                continue;
            };
            let duration_ms = 1e3 * self.case.gpu.per_transferred_token * transfer.tokens as f64;
            let last_ms = &mut self.workers[from].last_transfer_ms;
            let end_ms = last_ms.max(now_ms) + duration_ms;
            *last_ms = end_ms;
            let event = SimulationEvent::TransferEnd {
                to: self.workers[to].current,
                request: transfer.request,
            };
            self.timeline.push(end_ms, event);
        }
    }

    /// Releases the KV blocks of the prefill and starts the decode.
    pub(super) fn finish_transfer(
        &mut self,
        to: usize,
        request: RequestNumber,
        now_ms: f64,
    ) -> Result<()> {
        let progress = self.requests[request.index()].progress.as_ref();
        if let Some(from) = progress.and_then(|progress| progress.prefill_worker) {
            self.apply(from, EngineCommand::ReleasePrefill(request), now_ms)?;
            self.start_pass(from, now_ms)?;
        }
        self.apply(to, EngineCommand::Activate(request), now_ms)?;
        self.start_pass(to, now_ms)
    }
}
