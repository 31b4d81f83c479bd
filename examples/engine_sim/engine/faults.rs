//! Misbehaviour on request: what real engines do on their bad days, switched on by flag or at run time so that tests can
//! see what a router makes of it.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::publisher::Drops;

/// What is wrong with the engine. In JSON only the fields that are present change something.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Faults {
    /// The process ends without a word.
    pub(crate) crash: Option<Crash>,
    /// Requests are accepted and never answered.
    pub(crate) hang: bool,
    /// Requests are refused with this status.
    pub(crate) refuse: Option<u16>,
    /// Every first token comes so much later.
    pub(crate) slow_first_token_ms: u64,
    /// First tokens are computed and kept back, until this is taken back.
    pub(crate) hold_first_tokens: bool,
    /// Connections are cut after this many tokens of a stream.
    pub(crate) cut_stream_after_tokens: Option<u64>,
    /// Prefills for another engine are refused with this status.
    pub(crate) refuse_prefills: Option<u16>,
    /// They begin so much later.
    pub(crate) slow_prefill_ms: u64,
    /// They are accepted and never begin.
    pub(crate) hang_prefills: bool,
    /// Their answers do not say where the blocks are.
    pub(crate) omit_transfer_params: bool,
    /// They are answered with status 200 and an error.
    pub(crate) fail_prefills_with_200: bool,
    /// Their answers end by themselves with the first token, as when the model has nothing to say.
    pub(crate) stop_prefills: bool,
    /// The next batches of KV events get lost, on every rank.
    pub(crate) drop_events: Option<Drops>,
}

/// When to crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Crash {
    /// With the next scheduler step.
    NextStep,
    /// With the next request that is accepted.
    NextRequest,
    /// With the step after this many requests were accepted.
    AfterRequests(u64),
}

/// The faults in force.
#[derive(Debug, Default)]
pub(crate) struct Mood {
    faults: Mutex<Faults>,
    requests: AtomicU64,
}

impl Mood {
    pub(crate) fn new(faults: Faults) -> Self {
        Self {
            faults: Mutex::new(faults),
            requests: AtomicU64::new(0),
        }
    }

    pub(crate) fn faults(&self) -> Faults {
        self.faults.lock().clone()
    }

    /// Changes the fields that `patch` has.
    pub(crate) fn change(&self, patch: Value) -> Result<Faults, String> {
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

    /// Notes an accepted request.
    pub(crate) fn accepted(&self) {
        let accepted = self.requests.fetch_add(1, Ordering::Relaxed) + 1;
        let mut faults = self.faults.lock();
        match faults.crash {
            Some(Crash::AfterRequests(limit)) if accepted >= limit => {
                faults.crash = Some(Crash::NextStep)
            }
            Some(Crash::NextRequest) => crash(),
            _ => {}
        }
    }

    /// Ends the process if it is due; called by every scheduler step.
    pub(crate) fn crash_if_due(&self) {
        if self.faults.lock().crash == Some(Crash::NextStep) {
            crash();
        }
    }
}

fn crash() -> ! {
    tracing::warn!("crashing as told");
    std::process::exit(134);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_patch_changes_only_the_fields_it_has() {
        let mood = Mood::new(Faults {
            hang: true,
            ..Faults::default()
        });
        let changed = mood
            .change(json!({"refuse": 503, "drop_events": {"batches": 2}}))
            .unwrap();
        assert!(changed.hang);
        assert_eq!(changed.refuse, Some(503));
        assert_eq!(
            changed.drop_events,
            Some(Drops {
                batches: 2,
                keep_for_replay: false
            })
        );
        assert_eq!(
            mood.change(json!({"hang": false, "refuse": null}))
                .unwrap()
                .refuse,
            None
        );
    }

    #[test]
    fn unknown_and_wrong_fields_are_refused_and_change_nothing() {
        let mood = Mood::new(Faults::default());
        for patch in [
            json!({"explode": true}),
            json!({"hang": 3}),
            json!({"crash": "now"}),
            json!(7),
        ] {
            assert!(mood.change(patch.clone()).is_err(), "{patch}");
        }
        assert_eq!(mood.faults(), Faults::default());
    }

    #[test]
    fn a_crash_after_requests_falls_due_with_the_last_of_them() {
        let mood = Mood::default();
        mood.change(json!({"crash": {"after_requests": 2}}))
            .unwrap();
        mood.accepted();
        assert_eq!(mood.faults().crash, Some(Crash::AfterRequests(2)));
        mood.accepted();
        assert_eq!(mood.faults().crash, Some(Crash::NextStep));
    }
}
