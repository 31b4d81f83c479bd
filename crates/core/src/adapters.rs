//! LoRA adapters of all workers by name. The workers of an adapter follow from the lists of the
//! engines and from the configuration, so a request can name an adapter that is configured nowhere.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::worker::{ModelName, Worker};

/// Table of adapters that is replaced whenever the workers or their lists change.
pub type SharedAdapters = Arc<ArcSwap<AdapterTable>>;

/// Base models of the adapters that workers have loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdapterTable {
    base_models: HashMap<String, ModelName>,
}

impl AdapterTable {
    /// Creates the table of these workers. A name that is also a model, or that workers of several
    /// models have loaded, is not an adapter.
    pub fn of_workers(workers: &[Worker]) -> Self {
        let mut excluded: HashSet<&str> =
            workers.iter().map(|worker| worker.model.as_str()).collect();
        let mut base_models: HashMap<String, ModelName> = HashMap::new();
        for worker in workers {
            for name in &worker.adapters {
                let base = base_models
                    .entry(name.clone())
                    .or_insert_with(|| worker.model.clone());
                if *base != worker.model {
                    excluded.insert(name);
                }
            }
        }
        base_models.retain(|name, _| !excluded.contains(name.as_str()));
        Self { base_models }
    }

    /// Returns the base model of an adapter.
    pub fn base_model(&self, adapter: &str) -> Option<&ModelName> {
        self.base_models.get(adapter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::{BlockSize, WorkerId};

    #[test]
    fn ambiguous_name_is_not_an_adapter() {
        let worker = |id: u64, model: &str, adapters: &[&str]| Worker {
            adapters: adapters.iter().map(|name| (*name).to_owned()).collect(),
            ..Worker::new(
                WorkerId(id),
                "127.0.0.1:8000".parse().unwrap(),
                model.into(),
                BlockSize::new(16).unwrap(),
            )
        };
        let table = AdapterTable::of_workers(&[
            worker(1, "m", &["one", "both", "other"]),
            worker(2, "m", &["one", "two"]),
            worker(3, "other", &["both"]),
        ]);
        let cases = [
            ("one", Some("m")),
            ("two", Some("m")),
            ("both", None),
            ("other", None),
            ("m", None),
        ];
        for (name, base) in cases {
            assert_eq!(
                table.base_model(name).map(ModelName::as_str),
                base,
                "{name}"
            );
        }
    }
}
