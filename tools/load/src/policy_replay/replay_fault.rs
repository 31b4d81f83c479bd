//! Faults during a run: an engine that becomes slower, or a restart of warmroute.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::watch;
use warmroute_testbed::deployment::LocalDeployment;
use warmroute_testbed::replay::RequestSample;

use super::engine_monitor::{EngineReading, watch_engines};

/// Time before and after a restart that the report compares.
const RESTART_WINDOW: Duration = Duration::from_secs(5);
/// Time between two readings of the learned factors.
const CALIBRATION_INTERVAL: Duration = Duration::from_millis(250);
/// The slow engine counts as detected when its learned factor, divided by the mean factor of the
/// others, reaches this share of the injected slowdown.
const DETECTED_SHARE: f64 = 0.75;

/// Fault during a run.
#[derive(Clone, Copy, Debug)]
pub enum ReplayFault {
    /// The steps of the first engine take longer.
    SlowEngine {
        /// Number of finished requests after which the engine becomes slow.
        after: usize,
        /// Factor on the duration of steps.
        factor: f64,
    },
    /// warmroute is killed and started again.
    RouterRestart {
        /// Number of finished requests after which it is killed.
        after: usize,
    },
}

/// Deployment in which a fault is injected.
pub(super) struct FaultContext<'a> {
    pub(super) deployment: &'a mut LocalDeployment,
    pub(super) config: &'a Value,
    pub(super) began: Instant,
}

/// Observations of the processes around a fault.
pub(super) enum FaultObservation {
    SlowEngine {
        engine: String,
        changed_at: Duration,
        detected_at: Option<Duration>,
        calibration: Option<Value>,
    },
    RouterRestart {
        killed_at: Duration,
        ready_at: Duration,
        readings: Vec<EngineReading>,
    },
}

/// Effect of a fault.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "fault", rename_all = "snake_case")]
pub enum FaultReport {
    /// An engine became slower.
    SlowEngine(SlowEngineReport),
    /// warmroute was restarted.
    RouterRestart(RestartReport),
}

/// Requests of an engine that became slower.
#[derive(Clone, Debug, Serialize)]
pub struct SlowEngineReport {
    /// Id of the engine.
    pub engine: String,
    /// Time of the change in seconds.
    pub changed_at_s: f64,
    /// Its share of the requests that were sent before the change.
    pub share_before: f64,
    /// Its share of the requests that were sent after the change.
    pub share_after: f64,
    /// Number of requests that it received after the change until its learned prefill factor was
    /// near the real one, relative to the other engines.
    pub requests_until_detected: Option<usize>,
    /// Seconds from the change until then.
    pub seconds_until_detected: Option<f64>,
    /// Learned latency of the engine at the end of the run, from `/debug/calibration`.
    pub calibration: Option<Value>,
}

/// Spread of requests over the engines around a restart.
#[derive(Clone, Debug, Serialize)]
pub struct RestartReport {
    /// Time of the kill in seconds.
    pub killed_at_s: f64,
    /// Time without warmroute in seconds.
    pub down_s: f64,
    /// Before the kill.
    pub before: EngineSpread,
    /// After warmroute was ready again.
    pub after: EngineSpread,
}

/// Requests of the engines in one period.
#[derive(Clone, Debug, Serialize)]
pub struct EngineSpread {
    /// Requests that were sent in the period, by engine.
    pub requests_per_engine: BTreeMap<String, usize>,
    /// Largest share of one engine.
    pub largest_share: f64,
    /// Outstanding requests of the busiest engine at each reading, as a mean over time.
    pub busiest_outstanding_mean: f64,
    /// Outstanding requests of one engine: mean over engines and time.
    pub outstanding_mean: f64,
    /// Largest number of outstanding requests of one engine.
    pub outstanding_peak: f64,
}

impl ReplayFault {
    /// Waits until it is due and applies it. `finished` counts finished requests, and closes after
    /// the last one.
    pub(super) async fn apply(
        self,
        context: FaultContext<'_>,
        mut finished: watch::Receiver<usize>,
    ) -> anyhow::Result<FaultObservation> {
        let (Self::SlowEngine { after, .. } | Self::RouterRestart { after }) = self;
        finished
            .wait_for(|finished| *finished >= after)
            .await
            .context("the run ended before the fault")?;
        match self {
            Self::SlowEngine { factor, .. } => slow_engine(context, factor, finished).await,
            Self::RouterRestart { .. } => restart_router(context).await,
        }
    }
}

async fn slow_engine(
    context: FaultContext<'_>,
    factor: f64,
    finished: watch::Receiver<usize>,
) -> anyhow::Result<FaultObservation> {
    let engine = context.deployment.engines.first().context("no engine")?;
    let client = warmroute_runtime::tls::http_client_builder().build()?;
    let fault = json!({"slow_steps": factor});
    let request = client.post(engine.url("/sim/misbehave")).json(&fault);
    request.send().await?.error_for_status()?;
    let changed_at = context.began.elapsed();
    let mut detected_at = None;
    let mut calibration = None;
    while finished.has_changed().is_ok() {
        tokio::time::sleep(CALIBRATION_INTERVAL).await;
        let Ok(page) = context.deployment.debug_page("calibration").await else {
            continue;
        };
        let factors = prefill_factors(&page);
        if let Some((slow, others)) = factors.split_first()
            && !others.is_empty()
        {
            let mean = others.iter().sum::<f64>() / others.len() as f64;
            if slow / mean >= factor * DETECTED_SHARE {
                detected_at.get_or_insert(context.began.elapsed());
            }
        }
        calibration = Some(page);
    }
    Ok(FaultObservation::SlowEngine {
        engine: engine.spec.id.to_string(),
        changed_at,
        detected_at,
        calibration,
    })
}

/// Returns the prefill factors of all ranks, in the order of the workers.
fn prefill_factors(calibration: &Value) -> Vec<f64> {
    let ranks = calibration["ranks"].as_array().into_iter().flatten();
    ranks
        .filter_map(|rank| rank["prefill_factor"].as_f64())
        .collect()
}

async fn restart_router(context: FaultContext<'_>) -> anyhow::Result<FaultObservation> {
    let addresses = super::addresses(context.deployment);
    let mut readings = watch_engines(&addresses, context.began, RESTART_WINDOW).await?;
    let killed_at = context.began.elapsed();
    context.deployment.kill9_router();
    context.deployment.start_router(context.config).await?;
    let ready_at = context.began.elapsed();
    readings.extend(watch_engines(&addresses, context.began, RESTART_WINDOW).await?);
    Ok(FaultObservation::RouterRestart {
        killed_at,
        ready_at,
        readings,
    })
}

impl FaultObservation {
    /// Computes the effect on the requests of the run.
    pub(super) fn report(self, samples: &[RequestSample]) -> FaultReport {
        match self {
            Self::SlowEngine {
                engine,
                changed_at,
                detected_at,
                calibration,
            } => {
                let requests_until = |time: Duration| {
                    let received = samples.iter().filter(|sample| {
                        changed_at <= sample.sent
                            && sample.sent < time
                            && sample.engine.as_ref() == Some(&engine)
                    });
                    received.count()
                };
                let [before, after] = split_at(samples, changed_at);
                FaultReport::SlowEngine(SlowEngineReport {
                    changed_at_s: changed_at.as_secs_f64(),
                    share_before: share_of(&engine, &before),
                    share_after: share_of(&engine, &after),
                    requests_until_detected: detected_at.map(requests_until),
                    seconds_until_detected: detected_at.map(|at| (at - changed_at).as_secs_f64()),
                    calibration: calibration.map(|page| page["ranks"][0].clone()),
                    engine,
                })
            }
            Self::RouterRestart {
                killed_at,
                ready_at,
                readings,
            } => {
                let before = killed_at.saturating_sub(RESTART_WINDOW);
                FaultReport::RouterRestart(RestartReport {
                    killed_at_s: killed_at.as_secs_f64(),
                    down_s: (ready_at - killed_at).as_secs_f64(),
                    before: EngineSpread::new(before, killed_at, samples, &readings),
                    after: EngineSpread::new(
                        ready_at,
                        ready_at + RESTART_WINDOW,
                        samples,
                        &readings,
                    ),
                })
            }
        }
    }
}

/// Returns the samples that were sent before and after a time, in the order of sending.
fn split_at(samples: &[RequestSample], time: Duration) -> [Vec<&RequestSample>; 2] {
    let mut sorted: Vec<&RequestSample> = samples.iter().collect();
    sorted.sort_by_key(|sample| sample.sent);
    let after = sorted.split_off(sorted.partition_point(|sample| sample.sent < time));
    [sorted, after]
}

/// Returns the share of the samples that an engine served.
fn share_of(engine: &String, samples: &[&RequestSample]) -> f64 {
    let served = samples
        .iter()
        .filter(|sample| sample.engine.as_ref() == Some(engine));
    served.count() as f64 / samples.len().max(1) as f64
}

impl EngineSpread {
    fn new(
        from: Duration,
        to: Duration,
        samples: &[RequestSample],
        readings: &[EngineReading],
    ) -> Self {
        let mut requests_per_engine = BTreeMap::new();
        let sent = samples
            .iter()
            .filter(|sample| from <= sample.sent && sample.sent < to);
        for engine in sent.filter_map(|sample| sample.engine.clone()) {
            *requests_per_engine.entry(engine).or_insert(0) += 1;
        }
        let all: usize = requests_per_engine.values().sum();
        let most = requests_per_engine.values().max().copied().unwrap_or(0);
        let readings = readings
            .iter()
            .filter(|reading| from <= reading.at && reading.at < to);
        let outstanding: Vec<&[f64]> = readings.map(|reading| &reading.outstanding[..]).collect();
        let busiest: Vec<f64> = outstanding
            .iter()
            .map(|engines| engines.iter().copied().fold(0.0, f64::max))
            .collect();
        Self {
            largest_share: most as f64 / all.max(1) as f64,
            requests_per_engine,
            busiest_outstanding_mean: mean(&busiest),
            outstanding_mean: mean(&outstanding.concat()),
            outstanding_peak: busiest.into_iter().fold(0.0, f64::max),
        }
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(engines: &[&str]) -> Vec<RequestSample> {
        let sample = |(second, engine): (usize, &&str)| RequestSample {
            sent: Duration::from_secs(second as u64),
            engine: Some((*engine).to_owned()),
            ..RequestSample::default()
        };
        engines.iter().enumerate().map(sample).collect()
    }

    #[test]
    fn requests_to_slow_engine_are_counted() {
        let engines = [vec!["1"; 6], vec!["2"; 80]].concat();
        let observed = FaultObservation::SlowEngine {
            engine: "1".into(),
            changed_at: Duration::from_secs(2),
            detected_at: Some(Duration::from_secs(5)),
            calibration: None,
        };
        let FaultReport::SlowEngine(report) = observed.report(&samples(&engines)) else {
            panic!("wrong report")
        };
        assert_eq!(report.share_before, 1.0);
        assert_eq!(report.requests_until_detected, Some(3));
    }

    #[test]
    fn spread_covers_only_its_period() {
        let readings = [0, 3].map(|second| EngineReading {
            at: Duration::from_secs(second),
            outstanding: vec![second as f64, 1.0],
        });
        let spread = EngineSpread::new(
            Duration::from_secs(1),
            Duration::from_secs(4),
            &samples(&["1", "1", "1", "2", "2"]),
            &readings,
        );
        assert_eq!(
            spread.requests_per_engine,
            BTreeMap::from([("1".into(), 2), ("2".into(), 1)])
        );
        assert_eq!(
            (spread.busiest_outstanding_mean, spread.outstanding_mean),
            (3.0, 2.0)
        );
    }
}
