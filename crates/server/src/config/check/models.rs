//! Checks of the models and their names.

use std::collections::HashMap;

use warmroute_settings::{PathStep, Problem, all_within};

use crate::config::ModelConfig;

/// Returns the problems of the models, and duplicate names.
pub(super) fn models(models: &[ModelConfig]) -> Vec<Problem> {
    let mut problems = Vec::new();
    if models.is_empty() {
        problems.push(Problem::of(
            "models",
            "no model is given; name at least one, with its tokenizer",
        ));
    }
    let names = models
        .iter()
        .enumerate()
        .map(|(at, model)| (at, "name", None, &model.name));
    let aliases = models.iter().enumerate().flat_map(|(at, model)| {
        model
            .aliases
            .iter()
            .enumerate()
            .map(move |(index, alias)| (at, "aliases", Some(index), alias))
    });
    let adapters = models.iter().enumerate().flat_map(|(at, model)| {
        model
            .adapters
            .iter()
            .enumerate()
            .map(move |(index, adapter)| (at, "adapters", Some(index), adapter))
    });
    let mut owners: HashMap<&str, &str> = HashMap::new();
    for (at, key, index, name) in names.chain(aliases).chain(adapters) {
        let owner = models[at].name.as_str();
        if let Some(other_model) = owners.insert(name.as_str(), owner) {
            let text = format!(
                "`{name}` already names the model {other_model}; every name, alias and adapter \
                must identify one model"
            );
            let steps = ["models".into(), at.into(), key.into()]
                .into_iter()
                .chain(index.map(PathStep::from));
            problems.push(Problem::at(steps, text));
        }
    }
    for (at, model) in models.iter().enumerate() {
        problems.extend(all_within("models", all_within(at, model.problems())));
    }
    problems
}
