//! The canaries of all models. They are tokenized once per tokenizer, on blocking threads, because
//! that takes milliseconds.

use std::collections::HashMap;
use std::sync::Arc;

use warmroute_core::worker::ModelName;

use crate::config::Config;
use crate::request::ModelRegistry;
use crate::self_test::CanarySuite;

/// Canaries by model.
pub(super) type Subjects = HashMap<ModelName, Arc<CanarySuite>>;

/// Loads the subjects of a configuration. Unchanged ones are reused from `before`. There are none
/// if the self-test is disabled.
pub(super) async fn load(
    config: &Config,
    models: &ModelRegistry,
    before: &Subjects,
) -> anyhow::Result<Subjects> {
    let mut subjects = Subjects::new();
    if !config.engines.parity_check.enabled {
        return Ok(subjects);
    }
    let named = config
        .models
        .iter()
        .filter_map(|model| Some((&model.name, models.resolve(Some(model.name.as_str()))?)));
    let loading: Vec<_> = named
        .map(|(name, named)| {
            let known = before
                .get(name)
                .filter(|subject| subject.is_current(&named.model))
                .cloned();
            let prepare = move || known.or_else(|| CanarySuite::new(&named.model).map(Arc::new));
            (name, tokio::task::spawn_blocking(prepare))
        })
        .collect();
    for (name, subject) in loading {
        subjects.extend(subject.await?.map(|subject| (name.clone(), subject)));
    }
    Ok(subjects)
}
