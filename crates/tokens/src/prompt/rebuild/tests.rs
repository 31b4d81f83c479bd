//! Tokenizer classes compared with those that transformers chooses.

use std::collections::HashMap;

use super::*;

#[derive(serde::Deserialize)]
struct ExpectedClasses {
    models: Vec<String>,
    classes: Vec<String>,
    /// Index into `classes` by model type, for each class named in the files.
    chosen: HashMap<String, Vec<usize>>,
}

/// Model types that are not supported unless the files name a class. They are rare, or their files
/// usually name one.
const UNSUPPORTED_MODEL_TYPES: [&str; 22] = [
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

fn class_of(name: &str) -> Result<TokenizerClass, String> {
    if name == "TokenizersBackend" {
        Ok(TokenizerClass::AsWritten)
    } else {
        TokenizerClass::from_name(name)
    }
}

#[test]
fn tokenizer_class_is_chosen_as_in_transformers() {
    let expected: ExpectedClasses = serde_json::from_slice(include_bytes!(
        "../../../../../tests/data/tokens/classes/chosen.json"
    ))
    .unwrap();
    let mut compared = 0;
    let mut unsupported = Vec::new();
    for (named, row) in &expected.chosen {
        for (model, place) in expected.models.iter().zip(row) {
            let real = expected.classes[*place].as_str();
            let metadata = TokenizerMetadata {
                class: Some(named.as_str()).filter(|named| !named.is_empty()),
                model_type: Some(model),
                ..TokenizerMetadata::default()
            };
            let ours = metadata.resolve_class();
            match (real.starts_with('!'), ours) {
                // transformers fails, so the engine does not start.
                (true, _) => {}
                (false, ours) if ours.as_ref().ok() == class_of(real).as_ref().ok() => {
                    compared += 1
                }
                (false, Err(_)) if named.is_empty() => unsupported.push(model.as_str()),
                (false, ours) => panic!("{model} {named}: {ours:?}, transformers has {real}"),
            }
        }
    }
    assert!(compared > 6000, "{compared}");
    assert_eq!(
        unsupported, UNSUPPORTED_MODEL_TYPES,
        "model types that are rejected if the files name no class, although transformers has one"
    );
}

#[test]
fn rebuilding_class_requires_model_type_or_configuration() {
    let written = Some(TokenizerClass::AsWritten);
    let llama = Some("LlamaTokenizer");
    let as_written = Some("TokenizersBackend");
    let of_llama = Some("llama");
    for (class, model_type, configured_class, expected) in [
        (llama, None, None, None),
        (Some("Qwen2TokenizerFast"), None, None, None),
        (llama, None, llama, Some(TokenizerClass::Llama)),
        (llama, None, as_written, written),
        (llama, of_llama, as_written, written),
        (Some("PreTrainedTokenizerFast"), None, None, written),
        (Some("NotInTransformers"), None, None, written),
        (None, None, None, None),
        (None, None, as_written, written),
        (None, None, Some("PreTrainedTokenizerFast"), written),
        (None, of_llama, None, written),
        (
            None,
            None,
            Some("CachedLlamaTokenizer"),
            Some(TokenizerClass::Llama),
        ),
        (
            None,
            None,
            Some("CachedQwen2TokenizerFast"),
            Some(TokenizerClass::Qwen2),
        ),
        (llama, of_llama, Some("LLamaTokenizer"), None),
        (llama, of_llama, Some("Nonsense"), None),
        (
            Some("LlamaTokenizerFast"),
            Some("deepseek_v3"),
            None,
            written,
        ),
        (
            Some("Qwen2Tokenizer"),
            Some("qwen3_5_moe"),
            None,
            Some(TokenizerClass::Qwen3_5),
        ),
        (Some("CodeLlamaTokenizer"), of_llama, None, None),
        (Some("T5Tokenizer"), of_llama, None, None),
        (Some("ByT5Tokenizer"), of_llama, None, None),
    ] {
        let metadata = TokenizerMetadata {
            configured_class,
            class,
            model_type,
            ..TokenizerMetadata::default()
        };
        assert_eq!(
            metadata.resolve_class().ok(),
            expected,
            "{class:?} {model_type:?} {configured_class:?}"
        );
    }
}

#[test]
fn transformers_4_builds_as_written() {
    let old = TokenizerMetadata {
        class: Some("LlamaTokenizer"),
        transformers: TransformersVersion::V4,
        ..TokenizerMetadata::default()
    };
    assert_eq!(
        (old.resolve_class(), old.lacks_model_type()),
        (Ok(TokenizerClass::AsWritten), false)
    );
}

/// `check_without_model_type` assumes that model types override the named class only for byte-level
/// vocabularies.
#[test]
fn forced_classes_are_byte_level() {
    let mut found = std::collections::BTreeSet::new();
    for model_type in CLASS_TABLE.forced() {
        let class = CLASS_TABLE
            .choose_class(model_type, Some("PreTrainedTokenizerFast"))
            .map_or(Ok(TokenizerClass::AsWritten), TokenizerClass::from_name);
        found.insert(format!("{:?}", class.unwrap()));
    }
    assert_eq!(
        found.into_iter().collect::<Vec<_>>(),
        ["AsWritten", "Gpt2", "Qwen2", "Qwen3_5"]
    );
}

#[test]
fn sglang_reloads_as_written_tokenizer_by_named_class() {
    let metadata = TokenizerMetadata {
        class: Some("LlamaTokenizerFast"),
        model_type: Some("deepseek_v3"),
        engine: EngineKind::Sglang,
        ..TokenizerMetadata::default()
    };
    assert_eq!(metadata.resolve_class(), Ok(TokenizerClass::Llama));
}
