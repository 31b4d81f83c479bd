//! Standard cases: fleets and loads under which policies are compared.

use crate::gpu_timing::{GpuModel, LLAMA_8B_L40S, QWEN_32B_H100, QWEN_32B_H200};
use crate::traces::coding_agent::SessionSelection;
use crate::traces::mooncake::ArrivalSelection;
use crate::traces::{RecordedTrace, ReplayWorkload, TraceHalf};

/// Maximum length of prompt and answer, as a share of the KV cache.
const MAX_REQUEST_SHARE: f64 = 0.6;
/// Slowdown of the slow half of a mixed fleet.
const SLOW_WORKER_FACTOR: f64 = 2.0;

/// Requests of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum CaseLoad {
    /// Requests at the recorded times.
    Arrivals {
        /// Divisor of the recorded times.
        speed: f64,
        /// Copies of each burst prompt; 0 without bursts.
        burst_copies: usize,
    },
    /// Sessions.
    Sessions {
        /// Sessions that are active at any time.
        concurrency: usize,
    },
}

/// Speed of the workers of a fleet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum FleetSpeed {
    /// All workers are equal.
    Uniform,
    /// The second half of the workers is slower.
    HalfSlow,
}

/// Loss and return of the first worker, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct WorkerOutage {
    /// Time at which the worker and its cache are lost.
    pub(crate) start_s: f64,
    /// Time at which the worker returns with an empty cache.
    pub(crate) end_s: f64,
}

/// Delays with which the router receives information from the engines, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ObservationDelay {
    /// Minimum delay of KV events. The delay is uniformly distributed.
    pub(crate) min_event_ms: f64,
    /// Maximum delay of KV events.
    pub(crate) max_event_ms: f64,
    /// Mean delay of tokens. The delay is exponentially distributed.
    pub(crate) mean_token_ms: f64,
}

/// One case.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct JudgeCase {
    /// Unique name.
    pub(crate) name: &'static str,
    /// Requests.
    pub(crate) load: CaseLoad,
    /// GPU of all workers.
    pub(crate) gpu: GpuModel,
    /// Number of workers.
    pub(crate) workers: usize,
    /// Speed of the workers.
    pub(crate) speed: FleetSpeed,
    /// Loss of a worker.
    pub(crate) outage: Option<WorkerOutage>,
    /// Delays between engines and router.
    pub(crate) delay: ObservationDelay,
    /// Requests that arrive earlier are not measured, in seconds.
    pub(crate) warmup_s: f64,
    /// End of the simulation, in seconds.
    pub(crate) end_s: f64,
}

const DEFAULT_DELAY: ObservationDelay = ObservationDelay {
    min_event_ms: 5.0,
    max_event_ms: 50.0,
    mean_token_ms: 3.0,
};

/// Common part of the cases for traces with arrival times.
const CONVERSATION: JudgeCase = JudgeCase {
    name: "",
    load: arrivals(1.2),
    gpu: QWEN_32B_H100,
    workers: 8,
    speed: FleetSpeed::Uniform,
    outage: None,
    delay: DEFAULT_DELAY,
    warmup_s: 100.0,
    end_s: 400.0,
};

/// Common part of the cases for traces of sessions.
const CODING_AGENT: JudgeCase = JudgeCase {
    load: sessions(32),
    gpu: QWEN_32B_H200,
    warmup_s: 150.0,
    end_s: 500.0,
    ..CONVERSATION
};

const CONVERSATION_CASES: [JudgeCase; 10] = [
    JudgeCase {
        name: "conv-8w-loaded",
        ..CONVERSATION
    },
    JudgeCase {
        name: "conv-8w-near-saturation",
        load: arrivals(1.5),
        ..CONVERSATION
    },
    JudgeCase {
        name: "conv-8w-light",
        load: arrivals(0.7),
        ..CONVERSATION
    },
    JudgeCase {
        name: "conv-8w-half-slow",
        load: arrivals(0.9),
        speed: FleetSpeed::HalfSlow,
        ..CONVERSATION
    },
    JudgeCase {
        name: "conv-8w-bursts",
        load: CaseLoad::Arrivals {
            speed: 1.2,
            burst_copies: 16,
        },
        ..CONVERSATION
    },
    JudgeCase {
        name: "conv-8w-lost",
        load: arrivals(1.0),
        outage: Some(WorkerOutage {
            start_s: 200.0,
            end_s: 300.0,
        }),
        ..CONVERSATION
    },
    JudgeCase {
        name: "conv-4w-loaded",
        load: arrivals(0.6),
        workers: 4,
        ..CONVERSATION
    },
    JudgeCase {
        name: "conv-16w-loaded",
        load: arrivals(2.6),
        workers: 16,
        ..CONVERSATION
    },
    JudgeCase {
        name: "conv-8w-l40s",
        load: arrivals(0.35),
        gpu: LLAMA_8B_L40S,
        ..CONVERSATION
    },
    JudgeCase {
        name: "conv-8w-cold",
        warmup_s: 0.0,
        end_s: 120.0,
        ..CONVERSATION
    },
];

const CODING_AGENT_CASES: [JudgeCase; 8] = [
    JudgeCase {
        name: "agent-8w-loaded",
        ..CODING_AGENT
    },
    JudgeCase {
        name: "agent-8w-near-saturation",
        load: sessions(48),
        ..CODING_AGENT
    },
    JudgeCase {
        name: "agent-8w-light",
        load: sessions(16),
        ..CODING_AGENT
    },
    JudgeCase {
        name: "agent-8w-half-slow",
        load: sessions(28),
        speed: FleetSpeed::HalfSlow,
        ..CODING_AGENT
    },
    JudgeCase {
        name: "agent-8w-lost",
        load: sessions(28),
        outage: Some(WorkerOutage {
            start_s: 250.0,
            end_s: 350.0,
        }),
        ..CODING_AGENT
    },
    JudgeCase {
        name: "agent-4w-loaded",
        load: sessions(18),
        workers: 4,
        ..CODING_AGENT
    },
    JudgeCase {
        name: "agent-16w-loaded",
        load: sessions(80),
        workers: 16,
        ..CODING_AGENT
    },
    JudgeCase {
        name: "agent-8w-lag50-noise20",
        delay: ObservationDelay {
            min_event_ms: 50.0,
            max_event_ms: 50.0,
            mean_token_ms: 20.0,
        },
        ..CODING_AGENT
    },
];

const fn arrivals(speed: f64) -> CaseLoad {
    CaseLoad::Arrivals {
        speed,
        burst_copies: 0,
    }
}

const fn sessions(concurrency: usize) -> CaseLoad {
    CaseLoad::Sessions { concurrency }
}

impl JudgeCase {
    /// Returns the slowdown of a worker.
    pub(crate) fn slowdown(&self, worker: usize) -> f64 {
        if self.speed == FleetSpeed::HalfSlow && worker >= self.workers / 2 {
            SLOW_WORKER_FACTOR
        } else {
            1.0
        }
    }

    /// Creates the requests of the case. Returns `None` if the trace has another format.
    pub(crate) fn workload(
        &self,
        trace: &RecordedTrace,
        half: TraceHalf,
        seed: u64,
    ) -> Option<ReplayWorkload> {
        let max_tokens = (self.gpu.kv_tokens as f64 * MAX_REQUEST_SHARE) as usize;
        match (self.load, trace) {
            (
                CaseLoad::Arrivals {
                    speed,
                    burst_copies,
                },
                RecordedTrace::Mooncake(trace),
            ) => Some(trace.workload(&ArrivalSelection {
                half,
                speed,
                max_tokens,
                end_ms: self.end_s * 1e3,
                burst_copies,
            })),
            (CaseLoad::Sessions { concurrency }, RecordedTrace::CodingAgent(trace)) => {
                Some(trace.workload(&SessionSelection {
                    half,
                    concurrency,
                    max_tokens,
                    seed,
                }))
            }
            _ => None,
        }
    }
}

/// Returns the standard cases for a trace, and the half that they replay by default.
pub(crate) fn standard_cases(trace: &RecordedTrace) -> StandardCases {
    match trace {
        RecordedTrace::Mooncake(_) => StandardCases {
            cases: CONVERSATION_CASES.to_vec(),
            half: TraceHalf::Second,
        },
        RecordedTrace::CodingAgent(_) => StandardCases {
            cases: CODING_AGENT_CASES.to_vec(),
            half: TraceHalf::All,
        },
    }
}

/// Cases for one trace format.
pub(crate) struct StandardCases {
    /// All cases.
    pub(crate) cases: Vec<JudgeCase>,
    /// Half of the trace that they replay by default.
    pub(crate) half: TraceHalf,
}
