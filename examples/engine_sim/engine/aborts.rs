//! SGLang's `POST /abort_request`: ends requests by the names (`rid`) their bodies gave them.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use parking_lot::Mutex;
use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use super::Engine;
use super::handover::count;

#[derive(Debug, Default)]
struct Table {
    next: u64,
    requests: HashMap<u64, (Vec<String>, CancellationToken)>,
}

/// Requests that can be aborted.
#[derive(Debug, Default)]
pub(crate) struct Aborts(Arc<Mutex<Table>>);

/// One of them, while it lasts.
#[derive(Debug)]
pub(crate) struct Abortable {
    table: Arc<Mutex<Table>>,
    key: u64,
    pub(crate) aborted: CancellationToken,
}

impl Aborts {
    pub(crate) fn enter(&self, names: Vec<String>) -> Abortable {
        let aborted = CancellationToken::new();
        let mut table = self.0.lock();
        let key = table.next;
        table.next += 1;
        table.requests.insert(key, (names, aborted.clone()));
        Abortable {
            table: self.0.clone(),
            key,
            aborted,
        }
    }

    /// Aborts the requests of that name, or all; returns how many. As in SGLang a name must be one that is there (its
    /// front end looks for that) and then means all that begin with it (its scheduler has it so).
    fn abort(&self, which: &Which) -> usize {
        let mut table = self.0.lock();
        let rid = which.rid.as_ref().filter(|rid| {
            table
                .requests
                .values()
                .any(|(names, _)| names.contains(rid))
        });
        let rid = rid.cloned();
        let named = |names: &[String]| {
            rid.as_ref()
                .is_some_and(|rid| names.iter().any(|name| name.starts_with(rid.as_str())))
        };
        let aborted = table
            .requests
            .extract_if(|_, (names, _)| which.abort_all || named(names));
        aborted.map(|(_, (_, token))| token.cancel()).count()
    }
}

impl Drop for Abortable {
    fn drop(&mut self) {
        self.table.lock().requests.remove(&self.key);
    }
}

/// SGLang's `AbortReq`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Which {
    rid: Option<String>,
    abort_all: bool,
}

/// As SGLang, 200 without a word, also for a name that nobody has.
pub(crate) async fn abort(
    State(engine): State<Arc<Engine>>,
    Json(which): Json<Which>,
) -> StatusCode {
    if !engine
        .config
        .handover
        .protocol()
        .is_some_and(|protocol| protocol.is_sglang())
    {
        return StatusCode::NOT_FOUND;
    }
    for _ in 0..engine.aborts.abort(&which) {
        count(&engine.counts.aborted);
    }
    StatusCode::OK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requests_of_the_name_are_aborted_unless_all_are_meant() {
        let aborts = Aborts::default();
        let which = |rid: Option<&str>, abort_all| Which {
            rid: rid.map(str::to_owned),
            abort_all,
        };
        let one = aborts.enter(vec!["a".into()]);
        let two = aborts.enter(vec!["b".into(), "a2".into()]);
        let three = aborts.enter(vec!["c".into(), "ba".into()]);
        let unnamed = aborts.enter(Vec::new());
        let gone = aborts.enter(vec!["x".into()]);
        drop(gone);
        let prefix_of_one = aborts.enter(vec!["long name".into()]);
        for (rid, aborted) in [
            (Some("x"), 0),
            (Some(""), 0),
            (None, 0),
            (Some("long"), 0),
            (Some("b"), 2),
            (Some("a"), 1),
            (Some("long name"), 1),
        ] {
            assert_eq!(aborts.abort(&which(rid, false)), aborted, "{rid:?}");
        }
        assert!(prefix_of_one.aborted.is_cancelled());
        assert_eq!(
            [&one, &two, &three, &unnamed].map(|it| it.aborted.is_cancelled()),
            [true, true, true, false]
        );
        assert_eq!(aborts.abort(&which(None, true)), 1);
        assert!(aborts.0.lock().requests.is_empty());
    }
}
