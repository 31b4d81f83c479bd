//! SGLang's `POST /abort_request`: ends requests by the id (`rid`) of their bodies.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use parking_lot::Mutex;
use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use super::SimEngine;
use super::disaggregation::increment;

#[derive(Debug, Default)]
struct AbortTable {
    next: u64,
    requests: HashMap<u64, (Vec<String>, CancellationToken)>,
}

/// Table of the requests that can be aborted.
#[derive(Debug, Default)]
pub(crate) struct AbortRegistry(Arc<Mutex<AbortTable>>);

/// Registration of one abortable request; dropping it removes the request.
#[derive(Debug)]
pub(crate) struct AbortRegistration {
    table: Arc<Mutex<AbortTable>>,
    key: u64,
    pub(crate) aborted: CancellationToken,
}

impl AbortRegistry {
    pub(crate) fn register(&self, rids: Vec<String>) -> AbortRegistration {
        let aborted = CancellationToken::new();
        let mut table = self.0.lock();
        let key = table.next;
        table.next += 1;
        table.requests.insert(key, (rids, aborted.clone()));
        AbortRegistration {
            table: self.0.clone(),
            key,
            aborted,
        }
    }

    /// Aborts the requests with that id, or all of them, and returns their number. As in SGLang,
    /// the id must exist, which its front end checks. Then every id that begins with it matches,
    /// which is the rule of its scheduler.
    fn abort(&self, request: &AbortBody) -> usize {
        let mut table = self.0.lock();
        let rid = request
            .rid
            .as_ref()
            .filter(|rid| table.requests.values().any(|(rids, _)| rids.contains(rid)));
        let rid = rid.cloned();
        let matches = |rids: &[String]| {
            rid.as_ref()
                .is_some_and(|rid| rids.iter().any(|other| other.starts_with(rid.as_str())))
        };
        let aborted = table
            .requests
            .extract_if(|_, (rids, _)| request.abort_all || matches(rids));
        aborted.map(|(_, (_, token))| token.cancel()).count()
    }
}

impl Drop for AbortRegistration {
    fn drop(&mut self) {
        self.table.lock().requests.remove(&self.key);
    }
}

/// SGLang's `AbortReq`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct AbortBody {
    rid: Option<String>,
    abort_all: bool,
}

/// Handles an abort request. As in SGLang, the response is 200 with an empty body, even for an
/// unknown id.
pub(crate) async fn abort(
    State(engine): State<Arc<SimEngine>>,
    Json(request): Json<AbortBody>,
) -> StatusCode {
    if !engine
        .config
        .disaggregation
        .protocol()
        .is_some_and(|protocol| protocol.is_sglang())
    {
        return StatusCode::NOT_FOUND;
    }
    for _ in 0..engine.aborts.abort(&request) {
        increment(&engine.transfer_counters.aborted);
    }
    StatusCode::OK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn abort_ends_matching_requests_or_all() {
        let aborts = AbortRegistry::default();
        let request = |rid: Option<&str>, abort_all| AbortBody {
            rid: rid.map(str::to_owned),
            abort_all,
        };
        let one = aborts.register(vec!["a".into()]);
        let two = aborts.register(vec!["b".into(), "a2".into()]);
        let three = aborts.register(vec!["c".into(), "ba".into()]);
        let unnamed = aborts.register(Vec::new());
        let finished = aborts.register(vec!["x".into()]);
        drop(finished);
        let prefix_of_one = aborts.register(vec!["long name".into()]);
        for (rid, aborted) in [
            (Some("x"), 0),
            (Some(""), 0),
            (None, 0),
            (Some("long"), 0),
            (Some("b"), 2),
            (Some("a"), 1),
            (Some("long name"), 1),
        ] {
            assert_eq!(aborts.abort(&request(rid, false)), aborted, "{rid:?}");
        }
        assert!(prefix_of_one.aborted.is_cancelled());
        assert_eq!(
            [&one, &two, &three, &unnamed].map(|it| it.aborted.is_cancelled()),
            [true, true, true, false]
        );
        assert_eq!(aborts.abort(&request(None, true)), 1);
        assert!(aborts.0.lock().requests.is_empty());
    }
}
