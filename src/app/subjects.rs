//! The canaries of all models as we tokenise them. That takes some milliseconds a model, so it is done beside the async
//! threads, and once for a tokenizer.

use std::collections::HashMap;
use std::sync::Arc;

use crate::config::Config;
use crate::intake::Models;
use crate::self_test::Subject;
use crate::worker::ModelName;

/// What is tested, by model.
pub(super) type Subjects = HashMap<ModelName, Arc<Subject>>;

/// The subjects of a configuration, those that stay as they are from `before`; none where nothing is tested.
pub(super) async fn load(
    config: &Config,
    models: &Models,
    before: &Subjects,
) -> anyhow::Result<Subjects> {
    let mut subjects = Subjects::new();
    if !config.self_test.enabled {
        return Ok(subjects);
    }
    let named = config
        .models
        .iter()
        .filter_map(|model| Some((&model.name, models.find(Some(model.name.as_str()))?)));
    let loading: Vec<_> = named
        .map(|(name, named)| {
            let known = before
                .get(name)
                .filter(|subject| subject.is_of(&named.model))
                .cloned();
            let prepare = move || known.or_else(|| Subject::new(&named.model).map(Arc::new));
            (name, tokio::task::spawn_blocking(prepare))
        })
        .collect();
    for (name, subject) in loading {
        subjects.extend(subject.await?.map(|subject| (name.clone(), subject)));
    }
    Ok(subjects)
}
