//! Small tokenizers that transformers built, class by class (`tests/data/tokens/make_classes.py`),
//! compared with those built here.

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};
use warmroute_tokens::openai::{self, ApiKind};
use warmroute_tokens::prompt::{Config, EncodeError, Encoder, ModelTraits};

use super::further::contents;

#[derive(Deserialize)]
struct MadeTokenizers {
    tokenizers: HashMap<String, Value>,
    texts: Vec<String>,
    cases: Vec<ClassCase>,
}

#[derive(Deserialize)]
struct ClassCase {
    tokenizer: String,
    tokenizer_config: Value,
    config: Value,
    class: String,
    bare: Vec<Vec<u32>>,
    special: Vec<Vec<u32>>,
}

impl ClassCase {
    fn name(&self) -> String {
        let mut settings = self.tokenizer_config.clone();
        settings
            .as_object_mut()
            .unwrap()
            .remove("added_tokens_decoder");
        format!(
            "{} {} {settings} ({})",
            self.tokenizer, self.config["model_type"], self.class
        )
    }
}

fn made() -> MadeTokenizers {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens/classes/encodings.json.gz");
    serde_json::from_slice(&contents(&path)).unwrap()
}

fn load(made: &MadeTokenizers, case: &ClassCase, traits: &ModelTraits) -> Result<Encoder, String> {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &Value| {
        let path = directory.path().join(name);
        std::fs::write(&path, serde_json::to_vec(content).unwrap()).unwrap();
        path
    };
    let tokenizer = file("tokenizer.json", &made.tokenizers[&case.tokenizer]);
    file("tokenizer_config.json", &case.tokenizer_config);
    if !case.config.is_null() {
        file("config.json", &case.config);
    }
    let config = Config {
        tokenizer,
        tokenizer_config: None,
        chat_template: None,
    };
    Encoder::load_with_traits(&config, traits).map_err(|error| error.to_string())
}

fn tokens(encoder: &Encoder, text: &str, special: bool) -> Result<Vec<u32>, EncodeError> {
    let body = json!({"prompt": [text, "x"], "add_special_tokens": special});
    let request = openai::parse(ApiKind::Completions, &serde_json::to_vec(&body).unwrap()).unwrap();
    encoder
        .encode(&request)
        .map(|mut encoded| encoded.prompts.remove(0))
}

#[test]
fn every_tokenizer_class_matches_transformers() {
    let made = made();
    let mut equal = 0;
    let mut rejected = 0;
    let mut wrong = Vec::new();
    for case in &made.cases {
        let encoder = match load(&made, case, &ModelTraits::default()) {
            Ok(encoder) => encoder,
            Err(error) => {
                wrong.push(format!("{}: {error}", case.name()));
                continue;
            }
        };
        for (special, theirs) in [(false, &case.bare), (true, &case.special)] {
            for (text, theirs) in made.texts.iter().zip(theirs) {
                match tokens(&encoder, text, special) {
                    Ok(ours) if ours == *theirs => equal += 1,
                    Ok(ours) => wrong.push(format!(
                        "{}: {text:?} {special}: {ours:?}, not {theirs:?}",
                        case.name()
                    )),
                    Err(EncodeError::Uncertain(_)) if special => rejected += 1,
                    Err(error) => {
                        wrong.push(format!("{}: {text:?} {special}: {error}", case.name()))
                    }
                }
            }
        }
    }
    let some = wrong
        .iter()
        .take(12)
        .cloned()
        .collect::<Vec<_>>()
        .join("\n");
    assert!(wrong.is_empty(), "{} of {equal}:\n{some}", wrong.len());
    assert!(
        equal > 6000 && rejected < 600,
        "{equal} equal, {rejected} rejected"
    );
}

/// Class of a tokenizer that is built as its file is written.
const AS_WRITTEN: &str = "TokenizersBackend";

/// Returns the settings of a tokenizer whose class is defined in the model's own code.
fn own_code() -> Value {
    json!({"auto_map": {"AutoTokenizer": [null, "tokenization.Own"]}})
}

impl MadeTokenizers {
    /// Returns a case with this class and model type. An empty string means no class.
    fn case(&self, tokenizer: &str, class: &str, model: Option<&str>, more: &Value) -> ClassCase {
        let mut tokenizer_config = self.of(tokenizer, None).tokenizer_config.clone();
        let fields = tokenizer_config.as_object_mut().unwrap();
        fields.insert("tokenizer_class".to_owned(), class.into());
        fields.extend(more.as_object().unwrap().clone());
        if class.is_empty() {
            fields.remove("tokenizer_class").unwrap();
        }
        ClassCase {
            tokenizer: tokenizer.to_owned(),
            tokenizer_config,
            config: model.map_or(Value::Null, |model| json!({"model_type": model})),
            class: class.to_owned(),
            bare: Vec::new(),
            special: Vec::new(),
        }
    }
}

#[test]
fn tokenizer_without_model_type_is_rejected() {
    let made = made();
    assert_rejected(
        &made,
        vec![
            (
                made.case("bytes", "Qwen2TokenizerFast", None, &json!({})),
                "config.json",
                "Qwen2Tokenizer",
            ),
            (
                made.case("bytes", "GPTNeoXTokenizer", None, &json!({})),
                "config.json",
                "CachedGPTNeoXTokenizerFast",
            ),
            // The model type qwen2 implies Qwen2Tokenizer. Without a class, no tokenizer is built
            // as written for every model type.
            (
                made.case("bytes", "PreTrainedTokenizerFast", None, &json!({})),
                "config.json",
                AS_WRITTEN,
            ),
            (
                made.case("bytes", "NotInTransformers", None, &json!({})),
                "config.json",
                AS_WRITTEN,
            ),
            (
                made.case("bytes", "", None, &json!({})),
                "config.json",
                "GPT2Tokenizer",
            ),
            (
                made.case("pieces", "", None, &json!({})),
                "config.json",
                "GemmaTokenizer",
            ),
        ],
    );
}

#[test]
fn unsupported_tokenizer_class_is_rejected() {
    let made = made();
    assert_rejected(
        &made,
        vec![
            (
                made.case("pieces", "CodeLlamaTokenizer", Some("llama"), &json!({})),
                "CodeLlamaTokenizer",
                "LlamaTokenizer",
            ),
            (
                made.case("bytes", "RobertaTokenizerFast", Some("roberta"), &json!({})),
                "RobertaTokenizer",
                AS_WRITTEN,
            ),
            // A model distilled from another family, with a class that only the engine knows.
            (
                made.case("bytes", "LlamaTokenizerFast", Some("llama"), &json!({})),
                "tokenizer_class",
                AS_WRITTEN,
            ),
            (
                made.case("bytes", "TokenizersBackend", Some("own"), &own_code()),
                "auto_map",
                AS_WRITTEN,
            ),
        ],
    );
}

/// Asserts that each tokenizer is rejected with a text, and loads with the configured class.
fn assert_rejected(made: &MadeTokenizers, cases: Vec<(ClassCase, &str, &str)>) {
    for (case, named, configured) in cases {
        let refused = load(made, &case, &ModelTraits::default()).unwrap_err();
        assert!(refused.contains(named), "{}: {refused}", case.name());
        let traits = |configured: &str| ModelTraits {
            tokenizer_class: Some(configured.to_owned()),
            ..ModelTraits::default()
        };
        made.agrees(
            &load(made, &case, &traits(configured)).unwrap(),
            &case.tokenizer,
            configured,
        );
        let nonsense = load(made, &case, &traits("LLamaTokenizer")).unwrap_err();
        assert!(
            nonsense.contains("LLamaTokenizer"),
            "{}: {nonsense}",
            case.name()
        );
    }
}

#[test]
fn tokenizer_of_unknown_class_is_built_as_written() {
    let made = made();
    for case in [
        // Built as written for every model type, because no forced class fits this file.
        made.case("pieces", "PreTrainedTokenizerFast", None, &json!({})),
        // vLLM does not run the code of these models.
        made.case(
            "bytes",
            "InternLM2Tokenizer",
            Some("internlm2"),
            &own_code(),
        ),
    ] {
        made.agrees(
            &load(&made, &case, &ModelTraits::default()).unwrap(),
            &case.tokenizer,
            AS_WRITTEN,
        );
    }
}

impl MadeTokenizers {
    /// Returns the case of a tokenizer and class with default settings.
    fn of(&self, tokenizer: &str, class: Option<&str>) -> &ClassCase {
        let cases = self.cases.iter().filter(|case| case.tokenizer == tokenizer);
        cases
            .into_iter()
            .find(|case| class.is_none_or(|class| case.class == class))
            .unwrap()
    }

    /// Asserts that an encoder has the tokens of a class.
    fn agrees(&self, encoder: &Encoder, tokenizer: &str, class: &str) {
        let class = class.trim_start_matches("Cached").trim_end_matches("Fast");
        for (text, theirs) in self.texts.iter().zip(&self.of(tokenizer, Some(class)).bare) {
            assert_eq!(
                tokens(encoder, text, false).as_ref(),
                Ok(theirs),
                "{tokenizer} {class} {text:?}"
            );
        }
    }
}
