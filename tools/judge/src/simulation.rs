//! Simulation of a fleet of engines behind a router, in virtual time. The router sees only what a
//! real one sees: prompts when they arrive, and KV events and tokens after a delay.

mod fault_events;
mod remote_prefill;

use aisimulate_core::engine::KvEventData;
use anyhow::{Context, Result};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use warmroute_core::router::RouterSettings;

use crate::cases::JudgeCase;
use crate::gpu_timing::{EngineSlowdown, EngineTiming};
use crate::router_driver::{PromptPlacement, RouterDriver};
use crate::simulated_engine::{
    CommandEffects, EngineCommand, EngineRequest, FinishedPass, RequestNumber, RequestOutput,
    SimulatedEngine,
};
use crate::simulated_request::{
    CompletedRequest, RequestProgress, RequestState, SessionPosition, SimulationResult,
    UnfinishedRequest,
};
use crate::traces::{ReplayWorkload, ReplayedRequest};
use crate::virtual_clock::{EventTimeline, TimedEvent, VirtualClock};
use crate::worker_faults::{FaultLog, SentRequest, WorkerFault};

/// Maximum shift of arrivals, which differs between seeds, in milliseconds.
const ARRIVAL_JITTER_MS: f64 = 500.0;
/// Time over which the first sessions start, in milliseconds.
const SESSION_START_MS: f64 = 30_000.0;
/// Pause between the end of a session and the start of the next one, in milliseconds.
const SESSION_PAUSE_MS: f64 = 2000.0;
/// Pause before an engine that could not compute anything tries again, in milliseconds.
const RETRY_MS: f64 = 1.0;
/// Minimum of the uniform draw from which an exponential delay is computed.
const MIN_UNIFORM_DRAW: f64 = 1e-9;
/// Separates the random numbers of the router from those of the simulation.
const ROUTER_SEED_MASK: u64 = 0x5eed;

enum SimulationEvent {
    Arrival(RequestNumber),
    PassEnd(EngineIncarnation),
    /// The engine could not compute anything and tries again.
    Retry(EngineIncarnation),
    /// The router receives KV events.
    KvEvents {
        from: EngineIncarnation,
        events: Vec<KvEventData>,
    },
    /// The router receives the tokens of a pass.
    Outputs {
        from: EngineIncarnation,
        outputs: Vec<RequestOutput>,
    },
    /// The KV blocks of a remote prefill have arrived at the decode worker.
    TransferEnd {
        to: EngineIncarnation,
        request: RequestNumber,
    },
    FaultStart,
    FaultEnd,
    /// The router receives a response without content.
    Answer {
        request: RequestNumber,
        status: u16,
    },
    /// The client disconnects if there is no first token.
    ClientTimeout(RequestNumber),
    /// The router handles the passage of time. The number counts the ticks.
    HealthTick(u64),
}

/// Engine between two losses of its worker. Events of earlier incarnations are ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct EngineIncarnation {
    worker: usize,
    incarnation: u32,
}

/// Worker with its engine.
struct WorkerState {
    /// `None` while the worker is lost.
    engine: Option<SimulatedEngine>,
    slowdown: EngineSlowdown,
    fault: Option<WorkerFault>,
    current: EngineIncarnation,
    running: Vec<RequestNumber>,
    /// Time at which the router receives the latest KV events. They arrive in order.
    last_kv_events_ms: f64,
    /// Time at which the router receives the latest tokens. They arrive in order.
    last_outputs_ms: f64,
    /// Time at which the latest KV transfer from this worker ends. They are sent one by one.
    last_transfer_ms: f64,
}

/// The simulation.
pub(crate) struct FleetSimulation<'w> {
    case: &'w JudgeCase,
    /// Sessions of the workload; empty for independent requests.
    sessions: &'w [Vec<ReplayedRequest>],
    next_session: usize,
    requests: Vec<RequestState<'w>>,
    timeline: EventTimeline<SimulationEvent>,
    workers: Vec<WorkerState>,
    clock: VirtualClock,
    driver: RouterDriver,
    rng: StdRng,
    completed: Vec<CompletedRequest>,
    fault_log: FaultLog,
}

impl<'w> FleetSimulation<'w> {
    /// Creates a simulation at time 0.
    pub(crate) fn new(
        case: &'w JudgeCase,
        workload: &'w ReplayWorkload,
        settings: RouterSettings,
        seed: u64,
    ) -> Result<Self> {
        let clock = VirtualClock::new();
        let mut driver = RouterDriver::new(
            settings,
            case.cache_source,
            clock.clone(),
            seed ^ ROUTER_SEED_MASK,
        )?;
        driver.add_workers(case);
        let workers = (0..case.workers).map(|worker| WorkerState::new(case, worker));
        let mut simulation = Self {
            case,
            sessions: &[],
            next_session: 0,
            requests: Vec::new(),
            timeline: EventTimeline::new(),
            workers: workers.collect::<Result<_>>()?,
            clock,
            driver,
            rng: StdRng::seed_from_u64(seed),
            completed: Vec::new(),
            fault_log: FaultLog::default(),
        };
        simulation.schedule_workload(workload);
        simulation.schedule_fault();
        simulation
            .timeline
            .push(0.0, SimulationEvent::HealthTick(0));
        Ok(simulation)
    }

    fn schedule_workload(&mut self, workload: &'w ReplayWorkload) {
        match workload {
            ReplayWorkload::Arrivals(requests) => {
                for request in requests {
                    let jitter_ms = self.rng.random_range(0.0..ARRIVAL_JITTER_MS);
                    self.schedule_arrival(request, None, request.time_ms + jitter_ms);
                }
            }
            ReplayWorkload::Sessions {
                sessions,
                concurrency,
            } => {
                self.sessions = sessions;
                for _ in 0..*concurrency {
                    let start_ms = self.rng.random_range(0.0..SESSION_START_MS);
                    self.start_session(start_ms);
                }
            }
        }
    }

    fn schedule_arrival(
        &mut self,
        request: &'w ReplayedRequest,
        position: Option<SessionPosition>,
        time_ms: f64,
    ) {
        let number = RequestNumber(self.requests.len() as u32);
        self.requests.push(RequestState {
            request,
            position,
            progress: None,
        });
        self.timeline
            .push(time_ms, SimulationEvent::Arrival(number));
    }

    /// Starts the next session. After the last one, the first session is replayed again; by then,
    /// little of it is still cached.
    fn start_session(&mut self, start_ms: f64) {
        if self.sessions.is_empty() {
            return;
        }
        let session = self.next_session % self.sessions.len();
        self.next_session += 1;
        let position = SessionPosition { session, turn: 0 };
        self.schedule_arrival(&self.sessions[session][0], Some(position), start_ms);
    }

    /// Runs the simulation to the end of the case.
    pub(crate) fn run(&mut self) -> Result<()> {
        while let Some(TimedEvent { time_ms, event, .. }) = self.timeline.pop() {
            if time_ms > self.case.end_s * 1e3 {
                break;
            }
            self.clock.set_ms(time_ms);
            self.handle(event, time_ms)?;
        }
        Ok(())
    }

    fn handle(&mut self, event: SimulationEvent, now_ms: f64) -> Result<()> {
        match event {
            SimulationEvent::Arrival(request) => self.place(request, now_ms, now_ms)?,
            SimulationEvent::PassEnd(engine) if self.is_hung(engine.worker) => {
                self.postpone_pass_end(engine);
            }
            SimulationEvent::PassEnd(engine) if self.is_current(engine) => {
                self.finish_pass(engine.worker, now_ms)?;
                self.start_pass(engine.worker, now_ms)?;
            }
            SimulationEvent::Retry(engine) if self.is_current(engine) => {
                self.start_pass(engine.worker, now_ms)?;
            }
            SimulationEvent::KvEvents { from, events } if self.is_current(from) => {
                self.driver.apply_kv_events(from.worker, &events);
            }
            SimulationEvent::Outputs { from, outputs } if self.is_current(from) => {
                self.report_outputs(from.worker, &outputs, now_ms)?;
            }
            SimulationEvent::TransferEnd { to, request } if self.is_current(to) => {
                self.finish_transfer(to.worker, request, now_ms)?;
            }
            SimulationEvent::FaultStart => self.start_fault(now_ms)?,
            SimulationEvent::FaultEnd => self.end_fault(now_ms)?,
            SimulationEvent::Answer { request, status } => {
                self.driver.on_answer(request, status);
                self.fail(request, now_ms);
            }
            SimulationEvent::ClientTimeout(request) => self.time_out(request, now_ms)?,
            SimulationEvent::HealthTick(count) => self.check_health(count, now_ms),
            SimulationEvent::PassEnd(_)
            | SimulationEvent::Retry(_)
            | SimulationEvent::KvEvents { .. }
            | SimulationEvent::Outputs { .. }
            | SimulationEvent::TransferEnd { .. } => {}
        }
        Ok(())
    }

    fn is_current(&self, engine: EngineIncarnation) -> bool {
        self.workers[engine.worker].current == engine
    }

    /// Routes a request and sends it to the chosen engine.
    fn place(&mut self, number: RequestNumber, arrival_ms: f64, now_ms: f64) -> Result<()> {
        let state = &mut self.requests[number.index()];
        state.progress = Some(RequestProgress::new(arrival_ms));
        let mut request = EngineRequest {
            number,
            prompt: state.request.tokens(),
            output_tokens: state.request.output_tokens,
        };
        let (worker, command) = match self.driver.place(number, &request.prompt)? {
            PromptPlacement::SingleWorker { worker } => (worker, EngineCommand::Submit(request)),
            PromptPlacement::RemotePrefill { worker } => {
                request.output_tokens = 1;
                self.set_prefill_worker(number, worker);
                (worker, EngineCommand::Prefill(request))
            }
        };
        let time_ms = now_ms;
        self.fault_log.sent.push(SentRequest { time_ms, worker });
        if let Some(WorkerFault::ImmediateResponse { status }) = self.workers[worker].fault {
            self.schedule_answer(number, status, now_ms);
            return Ok(());
        }
        self.schedule_client_timeout(number, now_ms);
        self.workers[worker].running.push(number);
        self.apply(worker, command, now_ms)?;
        self.start_pass(worker, now_ms)
    }

    /// Sends a command to an engine and handles its immediate effects.
    fn apply(&mut self, worker: usize, command: EngineCommand, now_ms: f64) -> Result<()> {
        let engine = self.workers[worker].engine.as_mut();
        let engine = engine.context("the router chose a lost worker")?;
        let CommandEffects {
            kv_events,
            transfers,
        } = engine.apply(command, now_ms)?;
        self.publish_kv_events(worker, kv_events, now_ms);
        self.start_transfers(worker, &transfers, now_ms);
        Ok(())
    }

    /// Schedules the arrival of KV events at the router.
    fn publish_kv_events(&mut self, worker: usize, events: Vec<KvEventData>, now_ms: f64) {
        if events.is_empty() {
            return;
        }
        let delay = self.case.delay;
        let delay_ms = if delay.max_event_ms > delay.min_event_ms {
            self.rng
                .random_range(delay.min_event_ms..delay.max_event_ms)
        } else {
            delay.min_event_ms
        };
        let state = &mut self.workers[worker];
        let time_ms = state.last_kv_events_ms.max(now_ms + delay_ms);
        state.last_kv_events_ms = time_ms;
        let from = state.current;
        self.timeline
            .push(time_ms, SimulationEvent::KvEvents { from, events });
    }

    /// Schedules the arrival of the tokens of a pass at the router. All of them have the same
    /// delay. Returns the time of arrival.
    fn publish_outputs(&mut self, worker: usize, outputs: Vec<RequestOutput>, now_ms: f64) -> f64 {
        let mean_ms = self.case.delay.mean_token_ms;
        let delay_ms = if mean_ms > 0.0 {
            -self.rng.random_range(MIN_UNIFORM_DRAW..1.0).ln() * mean_ms
        } else {
            0.0
        };
        let state = &mut self.workers[worker];
        let time_ms = state.last_outputs_ms.max(now_ms + delay_ms);
        state.last_outputs_ms = time_ms;
        let from = state.current;
        if !outputs.is_empty() {
            self.timeline
                .push(time_ms, SimulationEvent::Outputs { from, outputs });
        }
        time_ms
    }

    fn start_pass(&mut self, worker: usize, now_ms: f64) -> Result<()> {
        if self.is_hung(worker) {
            return Ok(());
        }
        let state = &mut self.workers[worker];
        let engine = state.current;
        let Some(started) = state
            .engine
            .as_mut()
            .map(|engine| engine.start_pass(now_ms))
            .transpose()?
            .flatten()
        else {
            return Ok(());
        };
        self.publish_kv_events(worker, started.kv_events, now_ms);
        if started.is_empty {
            self.finish_pass(worker, now_ms)?;
            self.timeline
                .push(now_ms + RETRY_MS, SimulationEvent::Retry(engine));
        } else {
            self.timeline
                .push(started.end_ms, SimulationEvent::PassEnd(engine));
        }
        Ok(())
    }

    fn finish_pass(&mut self, worker: usize, now_ms: f64) -> Result<()> {
        let Some(engine) = self.workers[worker].engine.as_mut() else {
            return Ok(());
        };
        let FinishedPass {
            kv_events,
            outputs,
            transfers,
        } = engine.finish_pass(now_ms)?;
        self.publish_kv_events(worker, kv_events, now_ms);
        self.start_transfers(worker, &transfers, now_ms);
        let seen_ms = self.publish_outputs(worker, outputs.clone(), now_ms);
        for output in outputs {
            if output.is_last {
                let running = &mut self.workers[worker].running;
                running.retain(|&request| request != output.request);
            }
            if self.is_prefill_worker(worker) {
                self.record_cached_tokens(&output);
                continue;
            }
            self.record_output(&output, now_ms);
            if output.is_last {
                self.complete(output.request, now_ms, seen_ms);
            }
        }
        Ok(())
    }

    /// Records the result of a request in one pass.
    fn record_output(&mut self, output: &RequestOutput, now_ms: f64) {
        let state = &mut self.requests[output.request.index()];
        let Some(progress) = &mut state.progress else {
            return;
        };
        // After a remote prefill, the cache of the prefill worker counts.
        if let Some(cached_tokens) = output.cached_tokens
            && progress.prefill_worker.is_none()
        {
            progress.cached_tokens = cached_tokens;
        }
        if output.has_token {
            progress.output_tokens += 1;
            progress.first_token_ms.get_or_insert(now_ms);
        }
    }

    /// Records the end of a request, and schedules the next one of its session. The client receives
    /// the end through the router, so the next request does not arrive before `seen_ms`.
    fn complete(&mut self, number: RequestNumber, now_ms: f64, seen_ms: f64) {
        let state = &mut self.requests[number.index()];
        let Some(progress) = state.progress.take() else {
            return;
        };
        if is_measured(self.case, progress.arrival_ms) {
            self.completed.push(CompletedRequest {
                arrival_ms: progress.arrival_ms,
                first_token_ms: progress.first_token_ms.unwrap_or(now_ms),
                end_ms: now_ms,
                input_tokens: state.request.input_tokens,
                output_tokens: progress.output_tokens.max(1),
                cached_tokens: progress.cached_tokens,
            });
        }
        let Some(position) = state.position else {
            return;
        };
        let turn = position.turn + 1;
        match self.sessions[position.session].get(turn) {
            Some(next) => {
                let position = SessionPosition { turn, ..position };
                let arrival_ms = seen_ms.max(now_ms + next.time_ms);
                self.schedule_arrival(next, Some(position), arrival_ms);
            }
            None => self.start_session(now_ms + SESSION_PAUSE_MS),
        }
    }

    /// Returns the measured requests.
    pub(crate) fn into_result(mut self) -> SimulationResult {
        self.fault_log.ejected = self.driver.take_ejected();
        let running = self
            .requests
            .iter()
            .filter_map(|state| state.progress.as_ref());
        let unfinished = running
            .filter(|progress| is_measured(self.case, progress.arrival_ms))
            .map(|progress| UnfinishedRequest {
                arrival_ms: progress.arrival_ms,
                first_token_ms: progress.first_token_ms,
            })
            .collect();
        SimulationResult {
            completed: self.completed,
            unfinished,
            decisions: self.driver.decisions(),
            predictions: self.driver.predictions(),
            fault_log: self.fault_log,
        }
    }
}

impl WorkerState {
    fn new(case: &JudgeCase, worker: usize) -> Result<Self> {
        let slowdown = EngineSlowdown::new(case.slowdown(worker));
        Ok(Self {
            engine: Some(new_engine(case, worker, &slowdown)?),
            slowdown,
            fault: None,
            current: EngineIncarnation {
                worker,
                incarnation: 0,
            },
            running: Vec::new(),
            last_kv_events_ms: 0.0,
            last_outputs_ms: 0.0,
            last_transfer_ms: 0.0,
        })
    }
}

fn new_engine(
    case: &JudgeCase,
    worker: usize,
    slowdown: &EngineSlowdown,
) -> Result<SimulatedEngine> {
    let timing = EngineTiming {
        gpu: case.gpu,
        slowdown: slowdown.clone(),
    };
    SimulatedEngine::new(worker, case.role(worker), timing)
}

/// Returns whether a request is measured: it arrived after the warm-up.
fn is_measured(case: &JudgeCase, arrival_ms: f64) -> bool {
    arrival_ms >= case.warmup_s * 1e3
}

#[cfg(test)]
mod tests;
