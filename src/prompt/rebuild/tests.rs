//! The class that is chosen, against the class that transformers chose.

use std::collections::HashMap;

use super::*;

#[derive(serde::Deserialize)]
struct Chosen {
    models: Vec<String>,
    classes: Vec<String>,
    /// By the class that the files name: for each type of model, the place of the class in `classes`.
    chosen: HashMap<String, Vec<usize>>,
}

fn class_of(name: &str) -> Result<Class, String> {
    if name == "TokenizersBackend" { Ok(Class::AsWritten) } else { Class::named(name) }
}

#[test]
fn the_class_is_chosen_as_transformers_chooses_it() {
    let truth: Chosen =
        serde_json::from_slice(include_bytes!("../../../tests/data/tokens/classes/chosen.json")).unwrap();
    let mut compared = 0;
    for (named, row) in &truth.chosen {
        for (model, place) in truth.models.iter().zip(row) {
            let real = truth.classes[*place].as_str();
            let said = Said {
                class: Some(named.as_str()).filter(|named| !named.is_empty()),
                model_type: Some(model),
                ..Said::default()
            };
            let ours = said.class();
            match (real.starts_with('!'), ours) {
                // The engine does not start.
                (true, _) => {}
                (false, ours) if ours.as_ref().ok() == class_of(real).as_ref().ok() => compared += 1,
                // Of types of models that nobody serves, refused without need.
                (false, Err(_)) if named.is_empty() => {}
                (false, ours) => panic!("{model} {named}: {ours:?}, transformers has {real}"),
            }
        }
    }
    assert!(compared > 6000, "{compared}");
}

#[test]
fn a_class_that_builds_anew_needs_the_type_of_the_model_or_the_operators_word() {
    for (class, model_type, told, expected) in [
        (Some("LlamaTokenizer"), None, None, None),
        (Some("Qwen2TokenizerFast"), None, None, None),
        (Some("LlamaTokenizer"), None, Some("LlamaTokenizer"), Some(Class::Llama)),
        (Some("LlamaTokenizer"), None, Some("TokenizersBackend"), Some(Class::AsWritten)),
        (Some("LlamaTokenizer"), Some("llama"), Some("TokenizersBackend"), Some(Class::AsWritten)),
        (Some("PreTrainedTokenizerFast"), None, None, Some(Class::AsWritten)),
        (None, None, None, Some(Class::AsWritten)),
        (Some("LlamaTokenizerFast"), Some("deepseek_v3"), None, Some(Class::AsWritten)),
        (Some("Qwen2Tokenizer"), Some("qwen3_5_moe"), None, Some(Class::Qwen3_5)),
        (Some("CodeLlamaTokenizer"), Some("llama"), None, None),
        (Some("T5Tokenizer"), Some("llama"), None, None),
        (Some("ByT5Tokenizer"), Some("llama"), None, None),
    ] {
        let said = Said { told, class, model_type, ..Said::default() };
        assert_eq!(said.class().ok(), expected, "{class:?} {model_type:?} {told:?}");
    }
}

#[test]
fn sglang_loads_anew_by_the_named_class_what_came_out_as_written() {
    let said = Said {
        class: Some("LlamaTokenizerFast"),
        model_type: Some("deepseek_v3"),
        engine: Engine::Sglang,
        ..Said::default()
    };
    assert_eq!(said.class(), Ok(Class::Llama));
}
