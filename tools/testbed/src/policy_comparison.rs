//! Result of the quickstart: the same requests with Envoy's round robin and with two policies of
//! warmroute, and findings in words.

use serde::{Deserialize, Serialize};

use crate::machine::{self, CpuUsage, MachineDescription};
use crate::replay::{PredictionAccuracy, ReplaySummary};

/// Relative difference below which two times count as equal.
const NOISE: f64 = 0.03;

/// Figures of the runs with three policies.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PolicyComparison {
    /// Date of the runs, such as `2026-11-27`.
    pub date: String,
    /// The machine of all processes.
    pub machine: MachineDescription,
    /// Version of warmroute.
    pub warmroute_version: String,
    /// Version of Envoy.
    pub envoy_version: String,
    /// Number of simulated engines.
    pub engines: usize,
    /// Number of requests of each of the three runs.
    pub requests: usize,
    /// Number of errors of all runs.
    pub errors: usize,
    /// Default policy of warmroute.
    pub default_policy: String,
    /// Envoy alone.
    pub round_robin: PolicyFigures,
    /// warmroute with the policy `linear`.
    pub linear: PolicyFigures,
    /// warmroute with its default policy.
    #[serde(rename = "default")]
    pub default_run: PolicyFigures,
    /// Predictions with the default policy, as measured by the clients.
    pub prediction: PredictionAccuracy,
}

/// Figures of the run with one policy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PolicyFigures {
    /// Figures that clients observe.
    #[serde(flatten)]
    pub clients: ReplaySummary,
    /// CPU usage of the machine during the run.
    pub cpu: CpuUsage,
}

/// A figure in milliseconds that should be low.
struct ComparedTime {
    name: &'static str,
    of: fn(&ReplaySummary) -> f64,
    /// Possible reason of a higher value with one policy than with another.
    reason: &'static str,
}

const COMPARED_TIMES: [ComparedTime; 5] = [
    ComparedTime {
        name: "time to first token p50",
        of: |clients| clients.ttft_ms.p50,
        reason: "requests queue at the engine that has their prefix cached",
    },
    ComparedTime {
        name: "time to first token p95",
        of: |clients| clients.ttft_ms.p95,
        reason: "requests queue at the engine that has their prefix cached",
    },
    ComparedTime {
        name: "time to first token p99",
        of: |clients| clients.ttft_ms.p99,
        reason: "p99 depends on few requests, so one pause of the machine changes it",
    },
    ComparedTime {
        name: "time per further token mean",
        of: |clients| clients.token_ms.mean,
        reason: "engines with warm caches run more requests at a time and generate more slowly",
    },
    ComparedTime {
        name: "time to last token mean",
        of: |clients| clients.e2e_ms.mean,
        reason: "slower generation outweighs the earlier first token",
    },
];

impl PolicyComparison {
    /// Returns a warning if the machine was busy, then the differences between the runs.
    pub fn findings(&self) -> Vec<String> {
        let runs = [&self.round_robin, &self.linear, &self.default_run];
        let warning = machine::overload_warning(&runs.map(|run| run.cpu));
        let is_overloaded = warning.is_some();
        let mut findings: Vec<String> = warning.into_iter().collect();
        findings.extend([self.cache_finding(), self.first_token_finding()]);
        let worse = [
            self.worse_times("round robin", &self.round_robin.clients, is_overloaded),
            self.worse_times("`linear`", &self.linear.clients, is_overloaded),
        ];
        if worse.iter().all(Option::is_none) {
            findings.push(format!(
                "No time with `{}` is more than {} longer than with round robin or `linear`.",
                self.default_policy,
                percent(NOISE)
            ));
        }
        findings.extend(worse.into_iter().flatten());
        findings.extend(self.distribution_finding());
        findings
    }

    /// Compares the computed prompt tokens.
    fn cache_finding(&self) -> String {
        let computed = |run: &PolicyFigures| 1.0 - run.clients.hit_rate;
        let [before, now] = [computed(&self.round_robin), computed(&self.default_run)];
        let policy = &self.default_policy;
        if now < before {
            format!(
                "With `{policy}`, the engines computed {} fewer prompt tokens than with round robin, because more of them were in the KV caches.",
                percent(1.0 - now / before)
            )
        } else {
            format!(
                "With `{policy}`, the engines computed as many prompt tokens as with round robin, or more. \
                 This happens if few of the {} requests share a prefix.",
                self.requests
            )
        }
    }

    /// Compares the times to first token.
    fn first_token_finding(&self) -> String {
        let default = &self.default_run.clients.ttft_ms;
        let before = &self.round_robin.clients.ttft_ms;
        format!(
            "The median time to first token is {} than with round robin, and the 95th percentile is {}.",
            describe_change(before.p50, default.p50),
            describe_change(before.p95, default.p95)
        )
    }

    /// Returns the times that are longer with the default policy than with another one, with possible
    /// reasons.
    fn worse_times(
        &self,
        other_name: &str,
        other: &ReplaySummary,
        is_overloaded: bool,
    ) -> Option<String> {
        let mut times = Vec::new();
        let mut reasons = Vec::new();
        if is_overloaded {
            reasons.push("the machine was busy (see the warning)");
        }
        for ComparedTime { name, of, reason } in COMPARED_TIMES {
            let [ours, theirs] = [of(&self.default_run.clients), of(other)];
            if ours > theirs * (1.0 + NOISE) {
                times.push(format!("{name} ({ours:.1} ms instead of {theirs:.1} ms)"));
                reasons.push(reason);
            }
        }
        reasons.dedup();
        (!times.is_empty()).then(|| {
            format!(
                "`{}` is worse than {other_name} in: {}. Possible reasons: {}.",
                self.default_policy,
                times.join(", "),
                reasons.join("; ")
            )
        })
    }

    /// Explains an uneven distribution of the requests.
    fn distribution_finding(&self) -> Option<String> {
        let counts = &self.default_run.clients.requests_per_worker;
        let least = counts.values().min()?;
        let most = counts.values().max()?;
        (*most as f64 > 1.5 * *least as f64).then(|| {
            format!(
                "`{}` sent {least} to {most} requests to each worker. A follow-up request goes to the worker that has its conversation cached, \
                 unless another worker is predicted to be faster.",
                self.default_policy
            )
        })
    }
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// Describes the change of a time, such as `37 % lower (33 ms instead of 52 ms)`.
pub fn describe_change(before: f64, now: f64) -> String {
    let (share, direction) = if now <= before {
        (1.0 - now / before, "lower")
    } else {
        (now / before - 1.0, "higher")
    };
    let digits = if before < 10.0 { 1 } else { 0 };
    format!(
        "{} {direction} ({now:.digits$} ms instead of {before:.digits$} ms)",
        percent(share)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::LatencySummary;

    fn latency(ms: f64) -> LatencySummary {
        LatencySummary::of(vec![ms])
    }

    fn figures(hit_rate: f64, ttft_ms: f64, token_ms: f64) -> PolicyFigures {
        let workers = [("1".to_owned(), 40), ("2".to_owned(), 60)];
        PolicyFigures {
            clients: ReplaySummary {
                hit_rate,
                ttft_ms: latency(ttft_ms),
                token_ms: latency(token_ms),
                e2e_ms: latency(200.0),
                requests_per_worker: workers.into(),
            },
            cpu: CpuUsage {
                busy: 0.5,
                other_processes: 0.02,
                stolen: 0.0,
                waited: 0.1,
            },
        }
    }

    fn comparison() -> PolicyComparison {
        PolicyComparison {
            date: "2026-11-27".into(),
            machine: MachineDescription {
                cpu: "CPU".into(),
                cores: 2,
                memory_gib: 8,
            },
            warmroute_version: "0.1.0".into(),
            envoy_version: "1.40.0".into(),
            engines: 2,
            requests: 100,
            errors: 0,
            default_policy: "seconds".into(),
            round_robin: figures(0.2, 50.0, 5.0),
            linear: figures(0.5, 45.0, 5.0),
            default_run: figures(0.6, 40.0, 5.0),
            prediction: crate::replay::measure_predictions(&[]),
        }
    }

    #[test]
    fn findings_describe_gains() {
        assert_eq!(
            comparison().findings(),
            [
                "With `seconds`, the engines computed 50 % fewer prompt tokens than with round robin, because more of them \
                 were in the KV caches.",
                "The median time to first token is 20 % lower (40 ms instead of 50 ms) than with round robin, and the 95th \
                 percentile is 20 % lower (40 ms instead of 50 ms).",
                "No time with `seconds` is more than 3 % longer than with round robin or `linear`.",
            ]
        );
    }

    #[test]
    fn findings_name_worse_times() {
        let mut worse = comparison();
        worse.default_run = figures(0.1, 60.0, 4.9);
        worse.linear = figures(0.5, 60.0, 4.0);
        let workers = &mut worse.default_run.clients.requests_per_worker;
        workers.insert("1".into(), 20);
        let findings = worse.findings();
        let has = |part: &str| findings.iter().any(|text| text.contains(part));
        for part in [
            "as many prompt tokens as with round robin, or more",
            "20 % higher (60 ms instead of 50 ms)",
            "worse than round robin in: time to first token p50 (60.0 ms instead of 50.0 ms), time to first token p95",
            "Possible reasons: requests queue at the engine that has their prefix cached; p99 depends on few requests",
            "worse than `linear` in: time per further token mean (4.9 ms instead of 4.0 ms). Possible",
            "sent 20 to 60 requests to each worker",
        ] {
            assert!(has(part), "{part:?} is not in {findings:#?}");
        }
        for part in ["WARNING", "machine was busy"] {
            assert!(!has(part), "{part:?} is in {findings:#?}");
        }
    }

    #[test]
    fn overload_is_a_reason_for_worse_times() {
        let mut busy = comparison();
        busy.default_run = figures(0.6, 60.0, 5.0);
        busy.default_run.cpu.other_processes = 0.6;
        busy.default_run.cpu.waited = 1.5;
        let findings = busy.findings();
        assert!(findings[0].starts_with("WARNING: other processes used 2 %, 2 %, 60 %"));
        assert!(
            findings[3]
                .contains("Possible reasons: the machine was busy (see the warning); requests")
        );
    }
}
