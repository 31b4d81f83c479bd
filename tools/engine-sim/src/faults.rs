//! Injected faults for router tests: failures of real engines, enabled by flag or at run time.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::publisher::BatchDrops;

/// The injected faults. A JSON patch changes only the fields present.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct FaultConfig {
    /// The process exits abruptly.
    pub(crate) crash: Option<CrashTrigger>,
    /// Requests are accepted but get no response.
    pub(crate) hang: bool,
    /// Requests are refused with this status.
    pub(crate) refuse: Option<u16>,
    /// Requests get a response with status 200 and an empty body.
    pub(crate) empty_responses: bool,
    /// The metrics page is refused with status 500.
    pub(crate) refuse_metrics: bool,
    /// Factor on the duration of every step; the engine runs at its normal speed without it.
    pub(crate) slow_steps: Option<f64>,
    /// Delay of every first token.
    pub(crate) slow_first_token_ms: u64,
    /// First tokens are computed but withheld until the fault is cleared.
    pub(crate) hold_first_tokens: bool,
    /// Streams begin at once with the events that a front end may send before the first token.
    pub(crate) early_stream_events: bool,
    /// Connections are cut after this many tokens of a stream.
    pub(crate) cut_stream_after_tokens: Option<u64>,
    /// Prefills for another engine are refused with this status.
    pub(crate) refuse_prefills: Option<u16>,
    /// Delay before such a prefill begins.
    pub(crate) slow_prefill_ms: u64,
    /// Prefills are accepted and never begin.
    pub(crate) hang_prefills: bool,
    /// Prefill responses omit the location of the blocks.
    pub(crate) omit_transfer_params: bool,
    /// Prefills get a response with status 200 and an error body.
    pub(crate) fail_prefills_with_200: bool,
    /// Prefill responses stop with the first token, as when the model generates nothing more.
    pub(crate) stop_prefills: bool,
    /// The next batches of KV events are dropped, on every rank.
    pub(crate) drop_events: Option<BatchDrops>,
}

/// Time of the crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CrashTrigger {
    /// At the next scheduler step.
    NextStep,
    /// At the next accepted request.
    NextRequest,
    /// At the step after this many requests were accepted.
    AfterRequests(u64),
}

/// The active faults.
#[derive(Debug, Default)]
pub(crate) struct FaultState {
    faults: Mutex<FaultConfig>,
    requests: AtomicU64,
}

impl FaultState {
    pub(crate) fn new(faults: FaultConfig) -> Self {
        Self {
            faults: Mutex::new(faults),
            requests: AtomicU64::new(0),
        }
    }

    pub(crate) fn current(&self) -> FaultConfig {
        self.faults.lock().clone()
    }

    /// Changes the fields present in `patch`.
    pub(crate) fn patch(&self, patch: Value) -> Result<FaultConfig, String> {
        let Value::Object(patch) = patch else {
            return Err("an object is expected".into());
        };
        let mut faults = self.faults.lock();
        let mut merged = serde_json::to_value(&*faults).map_err(|error| error.to_string())?;
        for (key, value) in patch {
            merged[key] = value;
        }
        *faults = serde_json::from_value(merged).map_err(|error| error.to_string())?;
        Ok(faults.clone())
    }

    /// Counts an accepted request and crashes if it is due.
    pub(crate) fn count_request(&self) {
        let accepted = self.requests.fetch_add(1, Ordering::Relaxed) + 1;
        let mut faults = self.faults.lock();
        match faults.crash {
            Some(CrashTrigger::AfterRequests(limit)) if accepted >= limit => {
                faults.crash = Some(CrashTrigger::NextStep)
            }
            Some(CrashTrigger::NextRequest) => crash(),
            _ => {}
        }
    }

    /// Returns the factor on the duration of the next step.
    pub(crate) fn step_factor(&self) -> f64 {
        self.faults.lock().slow_steps.unwrap_or(1.0).max(0.0)
    }

    /// Ends the process if a crash is due. Every scheduler step calls it.
    pub(crate) fn crash_if_due(&self) {
        if self.faults.lock().crash == Some(CrashTrigger::NextStep) {
            crash();
        }
    }
}

fn crash() -> ! {
    tracing::warn!("injected fault: crash");
    std::process::exit(134);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn patch_changes_only_present_fields() {
        let faults = FaultState::new(FaultConfig {
            hang: true,
            ..FaultConfig::default()
        });
        let changed = faults
            .patch(json!({"refuse": 503, "drop_events": {"batches": 2}}))
            .unwrap();
        assert!(changed.hang);
        assert_eq!(changed.refuse, Some(503));
        assert_eq!(
            changed.drop_events,
            Some(BatchDrops {
                batches: 2,
                keep_for_replay: false
            })
        );
        assert_eq!(
            faults
                .patch(json!({"hang": false, "refuse": null}))
                .unwrap()
                .refuse,
            None
        );
    }

    #[test]
    fn unknown_and_invalid_fields_change_nothing() {
        let faults = FaultState::new(FaultConfig::default());
        for patch in [
            json!({"explode": true}),
            json!({"hang": 3}),
            json!({"crash": "now"}),
            json!(7),
        ] {
            assert!(faults.patch(patch.clone()).is_err(), "{patch}");
        }
        assert_eq!(faults.current(), FaultConfig::default());
    }

    #[test]
    fn crash_is_due_after_last_counted_request() {
        let faults = FaultState::default();
        faults
            .patch(json!({"crash": {"after_requests": 2}}))
            .unwrap();
        faults.count_request();
        assert_eq!(faults.current().crash, Some(CrashTrigger::AfterRequests(2)));
        faults.count_request();
        assert_eq!(faults.current().crash, Some(CrashTrigger::NextStep));
    }
}
