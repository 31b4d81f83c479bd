//! Ids of the active requests of a TensorRT-LLM generation engine. The context engines assign them
//! (`ctx_request_id`), so equal ids of two context engines collide on the generation engine.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use parking_lot::Mutex;

/// The use of one request id.
#[derive(Debug)]
struct IdUse {
    /// The context engine that assigned the id.
    engine: String,
    active_requests: usize,
}

type IdTable = HashMap<String, IdUse>;

#[derive(Debug, Default)]
pub(crate) struct CtxRequestIds(Arc<Mutex<IdTable>>);

/// Use of a request id; dropping it ends the use.
#[derive(Debug)]
pub(crate) struct CtxRequestIdGuard {
    table: Arc<Mutex<IdTable>>,
    id: String,
    /// True if the id is in use for a request of another context engine.
    pub(crate) is_collision: bool,
}

impl CtxRequestIds {
    pub(crate) fn acquire(&self, id: &str, engine: &str) -> CtxRequestIdGuard {
        let mut table = self.0.lock();
        let id_use = table.entry(id.to_owned()).or_insert_with(|| IdUse {
            engine: engine.to_owned(),
            active_requests: 0,
        });
        id_use.active_requests += 1;
        CtxRequestIdGuard {
            table: self.0.clone(),
            id: id.to_owned(),
            is_collision: id_use.engine != engine,
        }
    }
}

impl Drop for CtxRequestIdGuard {
    fn drop(&mut self) {
        if let Entry::Occupied(mut entry) = self.table.lock().entry(self.id.clone()) {
            entry.get_mut().active_requests -= 1;
            if entry.get().active_requests == 0 {
                entry.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_belongs_to_first_engine_until_released() {
        let ids = CtxRequestIds::default();
        let first = ids.acquire("17", "a");
        let same = ids.acquire("17", "a");
        let other = ids.acquire("17", "b");
        assert_eq!(
            [&first, &same, &other].map(|guard| guard.is_collision),
            [false, false, true]
        );
        assert!(!ids.acquire("18", "b").is_collision);
        drop((first, same));
        assert!(ids.acquire("17", "b").is_collision, "one use is left");
        drop(other);
        assert!(!ids.acquire("17", "b").is_collision);
        assert!(ids.0.lock().is_empty());
    }
}
