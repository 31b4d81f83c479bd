//! Checks of the models and their names.

use std::collections::HashMap;

use warmroute_settings::{Problem, Step};

use crate::config::ModelConfig;

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
            .map(move |(nth, alias)| (at, "aliases", Some(nth), alias))
    });
    let adapters = models.iter().enumerate().flat_map(|(at, model)| {
        model
            .adapters
            .iter()
            .enumerate()
            .map(move |(nth, adapter)| (at, "adapters", Some(nth), adapter))
    });
    let mut owners: HashMap<&str, &str> = HashMap::new();
    for (at, key, nth, name) in names.chain(aliases).chain(adapters) {
        let owner = models[at].name.as_str();
        if let Some(taken) = owners.insert(name.as_str(), owner) {
            let text = format!(
                "`{name}` already names the model {taken}; every name, alias and adapter must lead to one model"
            );
            let steps = ["models".into(), at.into(), key.into()]
                .into_iter()
                .chain(nth.map(Step::from));
            problems.push(Problem::at(steps, text));
        }
    }
    for (at, model) in models.iter().enumerate() {
        problems.extend(
            model
                .problems()
                .into_iter()
                .map(|problem| problem.within(at).within("models")),
        );
    }
    problems
}
