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

/// Types of models whose prompts hardly anybody routes, or whose files name a class.
const REFUSED: [&str; 22] = [
    "barthez",
    "bartpho",
    "bert-japanese",
    "bertweet",
    "byt5",
    "code_llama",
    "cpm",
    "gpt-sw3",
    "herbert",
    "mbart50",
    "mega",
    "mluke",
    "myt5",
    "nezha",
    "nllb",
    "nougat",
    "phobert",
    "qdqbert",
    "rag",
    "realm",
    "retribert",
    "wav2vec2_phoneme",
];

fn class_of(name: &str) -> Result<Class, String> {
    if name == "TokenizersBackend" {
        Ok(Class::AsWritten)
    } else {
        Class::named(name)
    }
}

#[test]
fn the_class_is_chosen_as_transformers_chooses_it() {
    let truth: Chosen = serde_json::from_slice(include_bytes!(
        "../../../tests/data/tokens/classes/chosen.json"
    ))
    .unwrap();
    let (mut compared, mut needless) = (0, Vec::new());
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
                (false, ours) if ours.as_ref().ok() == class_of(real).as_ref().ok() => {
                    compared += 1
                }
                (false, Err(_)) if named.is_empty() => needless.push(model.as_str()),
                (false, ours) => panic!("{model} {named}: {ours:?}, transformers has {real}"),
            }
        }
    }
    assert!(compared > 6000, "{compared}");
    assert_eq!(
        needless, REFUSED,
        "types of models that are refused without need where the files name no class"
    );
}

#[test]
fn a_class_that_builds_anew_needs_the_type_of_the_model_or_the_operators_word() {
    for (class, model_type, told, expected) in [
        (Some("LlamaTokenizer"), None, None, None),
        (Some("Qwen2TokenizerFast"), None, None, None),
        (
            Some("LlamaTokenizer"),
            None,
            Some("LlamaTokenizer"),
            Some(Class::Llama),
        ),
        (
            Some("LlamaTokenizer"),
            None,
            Some("TokenizersBackend"),
            Some(Class::AsWritten),
        ),
        (
            Some("LlamaTokenizer"),
            Some("llama"),
            Some("TokenizersBackend"),
            Some(Class::AsWritten),
        ),
        (
            Some("PreTrainedTokenizerFast"),
            None,
            None,
            Some(Class::AsWritten),
        ),
        (
            Some("NotInTransformers"),
            None,
            None,
            Some(Class::AsWritten),
        ),
        (None, None, None, None),
        (
            None,
            None,
            Some("TokenizersBackend"),
            Some(Class::AsWritten),
        ),
        (
            None,
            None,
            Some("PreTrainedTokenizerFast"),
            Some(Class::AsWritten),
        ),
        (None, Some("llama"), None, Some(Class::AsWritten)),
        (None, None, Some("CachedLlamaTokenizer"), Some(Class::Llama)),
        (
            None,
            None,
            Some("CachedQwen2TokenizerFast"),
            Some(Class::Qwen2),
        ),
        (
            Some("LlamaTokenizer"),
            Some("llama"),
            Some("LLamaTokenizer"),
            None,
        ),
        (
            Some("LlamaTokenizer"),
            Some("llama"),
            Some("Nonsense"),
            None,
        ),
        (
            Some("LlamaTokenizerFast"),
            Some("deepseek_v3"),
            None,
            Some(Class::AsWritten),
        ),
        (
            Some("Qwen2Tokenizer"),
            Some("qwen3_5_moe"),
            None,
            Some(Class::Qwen3_5),
        ),
        (Some("CodeLlamaTokenizer"), Some("llama"), None, None),
        (Some("T5Tokenizer"), Some("llama"), None, None),
        (Some("ByT5Tokenizer"), Some("llama"), None, None),
    ] {
        let said = Said {
            told,
            class,
            model_type,
            ..Said::default()
        };
        assert_eq!(
            said.class().ok(),
            expected,
            "{class:?} {model_type:?} {told:?}"
        );
    }
}

#[test]
fn transformers_4_takes_what_is_written() {
    let old = Said {
        class: Some("LlamaTokenizer"),
        transformers: Transformers::V4,
        ..Said::default()
    };
    assert_eq!(
        (old.class(), old.is_of_any_type()),
        (Ok(Class::AsWritten), false)
    );
}

/// Otherwise vocabularies of pieces would not be as written for every type.
#[test]
fn what_is_taken_in_spite_of_the_name_is_for_vocabularies_of_bytes() {
    let mut found = std::collections::BTreeSet::new();
    for model_type in TABLE.forced() {
        let class = TABLE
            .chosen(model_type, Some("PreTrainedTokenizerFast"))
            .map_or(Ok(Class::AsWritten), Class::named);
        found.insert(format!("{:?}", class.unwrap()));
    }
    assert_eq!(
        found.into_iter().collect::<Vec<_>>(),
        ["AsWritten", "Gpt2", "Qwen2", "Qwen3_5"]
    );
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
