//! Standard cases: fleets and loads under which policies are compared.

use warmroute_core::worker::WorkerRole;

use crate::gpu_timing::{
    GpuModel, LLAMA_8B_L40S, QWEN_32B_H100, QWEN_32B_H100_SLOW_PASSES, QWEN_32B_H100_SMALL_CACHE,
    QWEN_32B_H200, QWEN_32B_H200_SMALL_CACHE,
};
use crate::traces::coding_agent::SessionSelection;
use crate::traces::mooncake::ArrivalSelection;
use crate::traces::{RecordedTrace, ReplayWorkload, TraceHalf};
use crate::worker_faults::{FaultPeriod, WorkerFault};

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

/// Source from which the router knows the caches of the engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheSource {
    /// KV events.
    Events,
    /// Predictions by the number of KV blocks, corrected by the cached tokens of the responses.
    Predictions,
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
    /// Number of prefill workers among them. The others are decode workers, or aggregated workers
    /// if there is no prefill worker.
    pub(crate) prefill_workers: usize,
    /// Speed of the workers.
    pub(crate) speed: FleetSpeed,
    /// Source of the knowledge about caches.
    pub(crate) cache_source: CacheSource,
    /// Fault of the first worker.
    pub(crate) fault: Option<FaultPeriod>,
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
    prefill_workers: 0,
    speed: FleetSpeed::Uniform,
    cache_source: CacheSource::Events,
    fault: None,
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

const CONVERSATION_CASES: [JudgeCase; 14] = [
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
        fault: Some(FaultPeriod {
            fault: WorkerFault::Loss,
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
    JudgeCase {
        name: "conv-8w-slow-passes",
        load: arrivals(0.6),
        gpu: QWEN_32B_H100_SLOW_PASSES,
        ..CONVERSATION
    },
    JudgeCase {
        name: "conv-8w-small-cache",
        load: arrivals(0.5),
        gpu: QWEN_32B_H100_SMALL_CACHE,
        ..CONVERSATION
    },
    JudgeCase {
        name: "conv-8w-predicted",
        cache_source: CacheSource::Predictions,
        ..CONVERSATION
    },
    JudgeCase {
        name: "conv-8w-predicted-small-cache",
        load: arrivals(0.5),
        gpu: QWEN_32B_H100_SMALL_CACHE,
        cache_source: CacheSource::Predictions,
        ..CONVERSATION
    },
];

const CODING_AGENT_CASES: [JudgeCase; 11] = [
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
        fault: Some(FaultPeriod {
            fault: WorkerFault::Loss,
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
    JudgeCase {
        name: "agent-8w-small-cache",
        load: sessions(20),
        gpu: QWEN_32B_H200_SMALL_CACHE,
        ..CODING_AGENT
    },
    JudgeCase {
        name: "agent-8w-predicted",
        cache_source: CacheSource::Predictions,
        ..CODING_AGENT
    },
    JudgeCase {
        name: "agent-8w-predicted-small-cache",
        load: sessions(20),
        gpu: QWEN_32B_H200_SMALL_CACHE,
        cache_source: CacheSource::Predictions,
        ..CODING_AGENT
    },
];

/// Prefix of the names of the cases that compare disaggregated with aggregated fleets.
const DISAGGREGATED_PREFIX: &str = "pd-";
/// Prefix of the names of the cases with a faulty worker that stays in the fleet.
const FAULT_PREFIX: &str = "fault-";

/// Fleets with a faulty worker. They run only if selected by name.
const FAULTY_CONVERSATION_CASES: [JudgeCase; 3] = [
    faulty("fault-conv-rejects", REJECTS, &conversations(1.0)),
    faulty("fault-conv-hangs", WorkerFault::Hang, &conversations(1.0)),
    faulty("fault-conv-slow", SLOW, &conversations(1.0)),
];

const FAULTY_AGENT_CASES: [JudgeCase; 3] = [
    faulty("fault-agent-rejects", REJECTS, &agents(28)),
    faulty("fault-agent-hangs", WorkerFault::Hang, &agents(28)),
    faulty("fault-agent-slow", SLOW, &agents(28)),
];

const REJECTS: WorkerFault = WorkerFault::ImmediateResponse { status: 404 };
const SLOW: WorkerFault = WorkerFault::Slowdown { factor: 8.0 };

/// Fleets with as many prefill as decode workers, and aggregated fleets of the same size and load.
/// They run only if selected by name.
const DISAGGREGATED_CONVERSATION_CASES: [JudgeCase; 8] = [
    disaggregated("pd-conv-2+2-light", 4, &conversations(0.25)),
    disaggregated("pd-conv-2+2", 4, &conversations(0.4)),
    disaggregated("pd-conv-4+4-light", 8, &conversations(0.5)),
    disaggregated("pd-conv-4+4", 8, &conversations(0.8)),
    aggregated("pd-conv-aggregated-4-light", 4, &conversations(0.25)),
    aggregated("pd-conv-aggregated-4", 4, &conversations(0.4)),
    aggregated("pd-conv-aggregated-8-light", 8, &conversations(0.5)),
    aggregated("pd-conv-aggregated-8", 8, &conversations(0.8)),
];

const DISAGGREGATED_AGENT_CASES: [JudgeCase; 8] = [
    disaggregated("pd-agent-2+2-light", 4, &agents(8)),
    disaggregated("pd-agent-2+2", 4, &agents(16)),
    disaggregated("pd-agent-4+4-light", 8, &agents(16)),
    disaggregated("pd-agent-4+4", 8, &agents(32)),
    aggregated("pd-agent-aggregated-4-light", 4, &agents(8)),
    aggregated("pd-agent-aggregated-4", 4, &agents(16)),
    aggregated("pd-agent-aggregated-8-light", 8, &agents(16)),
    aggregated("pd-agent-aggregated-8", 8, &agents(32)),
];

const fn conversations(speed: f64) -> JudgeCase {
    JudgeCase {
        load: arrivals(speed),
        ..CONVERSATION
    }
}

const fn agents(concurrency: usize) -> JudgeCase {
    JudgeCase {
        load: sessions(concurrency),
        ..CODING_AGENT
    }
}

/// Creates a case whose fault begins 100 s after the warm-up.
const fn faulty(name: &'static str, fault: WorkerFault, case: &JudgeCase) -> JudgeCase {
    let start_s = case.warmup_s + 100.0;
    let duration_s = match fault {
        WorkerFault::Slowdown { .. } => 30.0,
        _ => 60.0,
    };
    JudgeCase {
        name,
        fault: Some(FaultPeriod {
            fault,
            start_s,
            end_s: start_s + duration_s,
        }),
        ..*case
    }
}

const fn disaggregated(name: &'static str, workers: usize, case: &JudgeCase) -> JudgeCase {
    JudgeCase {
        prefill_workers: workers / 2,
        ..aggregated(name, workers, case)
    }
}

const fn aggregated(name: &'static str, workers: usize, case: &JudgeCase) -> JudgeCase {
    JudgeCase {
        name,
        workers,
        ..*case
    }
}

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

    /// Returns the role of a worker. Prefill workers have the first numbers.
    pub(crate) fn role(&self, worker: usize) -> WorkerRole {
        if worker < self.prefill_workers {
            WorkerRole::Prefill
        } else if self.prefill_workers > 0 {
            WorkerRole::Decode
        } else {
            WorkerRole::Aggregated
        }
    }

    /// Returns whether the case is selected by one of these texts. Without texts, the standard cases
    /// are. Disaggregated and faulty cases are selected only by texts that begin like their names.
    pub(crate) fn is_selected(&self, texts: &[String]) -> bool {
        let prefix = [DISAGGREGATED_PREFIX, FAULT_PREFIX]
            .into_iter()
            .find(|prefix| self.name.starts_with(prefix));
        let is_match = |text: &String| {
            self.name.contains(text.as_str())
                && prefix.is_none_or(|prefix| text.starts_with(prefix))
        };
        texts.iter().any(is_match) || (texts.is_empty() && prefix.is_none())
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

/// Returns all cases for a trace, and the half that they replay by default.
pub(crate) fn cases_for(trace: &RecordedTrace) -> TraceCases {
    match trace {
        RecordedTrace::Mooncake(_) => TraceCases {
            cases: [
                &CONVERSATION_CASES[..],
                &DISAGGREGATED_CONVERSATION_CASES,
                &FAULTY_CONVERSATION_CASES,
            ]
            .concat(),
            half: TraceHalf::Second,
        },
        RecordedTrace::CodingAgent(_) => TraceCases {
            cases: [
                &CODING_AGENT_CASES[..],
                &DISAGGREGATED_AGENT_CASES,
                &FAULTY_AGENT_CASES,
            ]
            .concat(),
            half: TraceHalf::All,
        },
    }
}

/// Cases for one trace format.
pub(crate) struct TraceCases {
    /// All cases.
    pub(crate) cases: Vec<JudgeCase>,
    /// Half of the trace that they replay by default.
    pub(crate) half: TraceHalf,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_cases_run_only_if_selected() {
        let selected = |text: &str| {
            let texts = match text {
                "" => Vec::new(),
                text => vec![text.to_owned()],
            };
            let standard = CONVERSATION_CASES.iter().chain(&CODING_AGENT_CASES);
            let disaggregated = DISAGGREGATED_CONVERSATION_CASES
                .iter()
                .chain(&DISAGGREGATED_AGENT_CASES);
            let faulty = FAULTY_CONVERSATION_CASES.iter().chain(&FAULTY_AGENT_CASES);
            [
                standard.filter(|case| case.is_selected(&texts)).count(),
                disaggregated
                    .filter(|case| case.is_selected(&texts))
                    .count(),
                faulty.filter(|case| case.is_selected(&texts)).count(),
            ]
        };
        assert_eq!(selected(""), [25, 0, 0]);
        assert_eq!(selected("conv"), [14, 0, 0]);
        assert_eq!(selected("pd-"), [0, 16, 0]);
        assert_eq!(selected("pd-agent-2+2"), [0, 2, 0]);
        assert_eq!(selected("fault-"), [0, 0, 6]);
    }
}
