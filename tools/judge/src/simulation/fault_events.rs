//! Faults of a simulated worker, the clients whose requests fail, and the health checks of the
//! router.

use anyhow::Result;

use super::{EngineIncarnation, FleetSimulation, SimulationEvent, new_engine};
use crate::simulated_engine::{EngineCommand, RequestNumber};
use crate::worker_faults::{FAULTY_WORKER, WorkerFault};

/// Time of an answer without computation, in milliseconds.
const ANSWER_MS: f64 = 2.0;
/// Time for which a client waits for the first token in cases with a fault, in milliseconds.
const CLIENT_TIMEOUT_MS: f64 = 20_000.0;
/// Time after which the client of a session repeats a failed request, in milliseconds.
const REPEAT_MS: f64 = 1000.0;
/// Interval of the health ticks of the server, in milliseconds.
const TICK_MS: f64 = 250.0;
/// Number of ticks per health check of ejected workers.
const TICKS_PER_CHECK: u64 = 4;

impl FleetSimulation<'_> {
    pub(super) fn schedule_fault(&mut self) {
        if let Some(period) = self.case.fault {
            self.timeline
                .push(period.start_s * 1e3, SimulationEvent::FaultStart);
            self.timeline
                .push(period.end_s * 1e3, SimulationEvent::FaultEnd);
        }
    }

    pub(super) fn start_fault(&mut self, now_ms: f64) -> Result<()> {
        let fault = self.case.fault.map(|period| period.fault);
        let worker = &mut self.workers[FAULTY_WORKER];
        worker.fault = fault;
        match fault {
            Some(WorkerFault::Loss) => self.lose_worker(FAULTY_WORKER, now_ms)?,
            Some(WorkerFault::Slowdown { factor }) => {
                let slowdown = factor * self.case.slowdown(FAULTY_WORKER);
                worker.slowdown.set(slowdown);
            }
            Some(WorkerFault::ImmediateResponse { .. } | WorkerFault::Hang) | None => {}
        }
        Ok(())
    }

    pub(super) fn end_fault(&mut self, now_ms: f64) -> Result<()> {
        let worker = &mut self.workers[FAULTY_WORKER];
        worker.slowdown.set(self.case.slowdown(FAULTY_WORKER));
        if worker.fault.take() == Some(WorkerFault::Loss) {
            worker.engine = Some(new_engine(self.case, FAULTY_WORKER, &worker.slowdown)?);
            self.driver.restore_workers();
        }
        self.start_pass(FAULTY_WORKER, now_ms)
    }

    /// Removes a worker. Its requests are placed again and keep their arrival time.
    fn lose_worker(&mut self, worker: usize, now_ms: f64) -> Result<()> {
        let state = &mut self.workers[worker];
        state.engine = None;
        state.current.incarnation += 1;
        let interrupted = std::mem::take(&mut state.running);
        self.driver.remove_worker(worker);
        for number in interrupted {
            let progress = self.requests[number.index()].progress.take();
            if let Some(progress) = progress {
                self.place(number, progress.arrival_ms, now_ms)?;
            }
        }
        Ok(())
    }

    pub(super) fn is_hung(&self, worker: usize) -> bool {
        self.workers[worker].fault == Some(WorkerFault::Hang)
    }

    /// Lets a pass of a hung engine end when the fault does.
    pub(super) fn postpone_pass_end(&mut self, engine: EngineIncarnation) {
        if let Some(period) = self.case.fault {
            let event = SimulationEvent::PassEnd(engine);
            self.timeline.push(period.end_s * 1e3, event);
        }
    }

    pub(super) fn schedule_answer(&mut self, request: RequestNumber, status: u16, now_ms: f64) {
        let event = SimulationEvent::Answer { request, status };
        self.timeline.push(now_ms + ANSWER_MS, event);
    }

    /// Schedules the timeout of a client. Without a fault, clients wait until the end. The requests
    /// of a lost worker are interrupted, and do not wait.
    pub(super) fn schedule_client_timeout(&mut self, request: RequestNumber, now_ms: f64) {
        let fault = self.case.fault.map(|period| period.fault);
        if fault.is_some_and(|fault| fault != WorkerFault::Loss) {
            let event = SimulationEvent::ClientTimeout(request);
            self.timeline.push(now_ms + CLIENT_TIMEOUT_MS, event);
        }
    }

    pub(super) fn time_out(&mut self, number: RequestNumber, now_ms: f64) -> Result<()> {
        let progress = self.requests[number.index()].progress.as_ref();
        if progress.is_none_or(|progress| progress.first_token_ms.is_some()) {
            return Ok(());
        }
        let runs_request = |worker: &usize| self.workers[*worker].running.contains(&number);
        if let Some(worker) = (0..self.workers.len()).find(runs_request) {
            self.workers[worker]
                .running
                .retain(|&running| running != number);
            self.apply(worker, EngineCommand::Abort(number), now_ms)?;
        }
        self.driver.on_disconnect(number);
        self.fail(number, now_ms);
        Ok(())
    }

    /// Records a failed request. The client of a session repeats it.
    pub(super) fn fail(&mut self, number: RequestNumber, now_ms: f64) {
        let state = &mut self.requests[number.index()];
        let Some(progress) = state.progress.take() else {
            return;
        };
        self.fault_log.failed_ms.push(progress.arrival_ms);
        let (request, position) = (state.request, state.position);
        if position.is_some() {
            self.schedule_arrival(request, position, now_ms + REPEAT_MS);
        }
    }

    /// Passes the time to the router, and checks the health of ejected workers. The API server of a
    /// hung engine does not answer; that of an engine which answers at once does.
    pub(super) fn check_health(&mut self, ticks: u64, now_ms: f64) {
        self.driver.on_tick();
        if ticks.is_multiple_of(TICKS_PER_CHECK) {
            let workers = &self.workers;
            let is_healthy = |worker: usize| {
                let is_hung = workers[worker].fault == Some(WorkerFault::Hang);
                workers[worker].engine.is_some() && !is_hung
            };
            self.driver.check_health(is_healthy);
        }
        let next = SimulationEvent::HealthTick(ticks + 1);
        self.timeline.push(now_ms + TICK_MS, next);
    }
}
