//! Small tokenizers as transformers really built them, class by class (`tests/data/tokens/make_classes.py`), against ours.

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use warmroute::openai::{self, Api};
use warmroute::prompt::{Config, EncodeError, Encoder, Traits};

use super::further::contents;

#[derive(Deserialize)]
struct Made {
    tokenizers: HashMap<String, Value>,
    texts: Vec<String>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    tokenizer: String,
    tokenizer_config: Value,
    config: Value,
    class: String,
    bare: Vec<Vec<u32>>,
    special: Vec<Vec<u32>>,
}

impl Case {
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

fn made() -> Made {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens/classes/encodings.json.gz");
    serde_json::from_slice(&contents(&path)).unwrap()
}

fn load(made: &Made, case: &Case, traits: &Traits) -> Result<Encoder, String> {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &Value| {
        let path = folder.path().join(name);
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
    Encoder::load_as(&config, traits).map_err(|error| error.to_string())
}

fn tokens(encoder: &Encoder, text: &str, special: bool) -> Result<Vec<u32>, EncodeError> {
    let body = serde_json::json!({"prompt": [text, "x"], "add_special_tokens": special});
    let request = openai::parse(Api::Completions, &serde_json::to_vec(&body).unwrap()).unwrap();
    encoder
        .encode(&request)
        .map(|mut encoded| encoded.prompts.remove(0))
}

#[test]
fn tokenizers_of_every_class_make_the_tokens_that_transformers_makes() {
    let made = made();
    let (mut equal, mut doubted, mut wrong) = (0, 0, Vec::new());
    for case in &made.cases {
        let encoder = match load(&made, case, &Traits::default()) {
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
                    Err(EncodeError::Uncertain(_)) if special => doubted += 1,
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
        equal > 6000 && doubted < 600,
        "{equal} equal, {doubted} doubted"
    );
}

#[test]
fn what_is_not_known_to_be_built_as_the_engine_builds_it_is_refused_by_name() {
    let made = made();
    let case = |tokenizer: &str, class: &str, model: Option<&str>, more: Value| {
        let mut tokenizer_config = made.of(tokenizer, None).tokenizer_config.clone();
        tokenizer_config["tokenizer_class"] = class.into();
        tokenizer_config
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        if class.is_empty() {
            tokenizer_config
                .as_object_mut()
                .unwrap()
                .remove("tokenizer_class");
        }
        let config = model.map_or(
            Value::Null,
            |model| serde_json::json!({"model_type": model}),
        );
        let tokenizer = tokenizer.to_owned();
        Case {
            tokenizer,
            tokenizer_config,
            config,
            class: class.to_owned(),
            bare: Vec::new(),
            special: Vec::new(),
        }
    };
    let nothing = || serde_json::json!({});
    let code = || serde_json::json!({"auto_map": {"AutoTokenizer": [null, "tokenization.Own"]}});
    let written = "TokenizersBackend";
    for (case, named, told) in [
        (
            case("bytes", "Qwen2TokenizerFast", None, nothing()),
            "config.json",
            "Qwen2Tokenizer",
        ),
        (
            case("bytes", "GPTNeoXTokenizer", None, nothing()),
            "config.json",
            "CachedGPTNeoXTokenizerFast",
        ),
        // Of qwen2 these are Qwen2Tokenizer, and without a class nothing is as written for every type.
        (
            case("bytes", "PreTrainedTokenizerFast", None, nothing()),
            "config.json",
            written,
        ),
        (
            case("bytes", "NotInTransformers", None, nothing()),
            "config.json",
            written,
        ),
        (
            case("bytes", "", None, nothing()),
            "config.json",
            "GPT2Tokenizer",
        ),
        (
            case("pieces", "", None, nothing()),
            "config.json",
            "GemmaTokenizer",
        ),
        (
            case("pieces", "CodeLlamaTokenizer", Some("llama"), nothing()),
            "CodeLlamaTokenizer",
            "LlamaTokenizer",
        ),
        (
            case("bytes", "RobertaTokenizerFast", Some("roberta"), nothing()),
            "RobertaTokenizer",
            written,
        ),
        // Distilled from one family into another, and loaded by a name that only the engine knows.
        (
            case("bytes", "LlamaTokenizerFast", Some("llama"), nothing()),
            "tokenizer_class",
            written,
        ),
        (
            case("bytes", "TokenizersBackend", Some("own"), code()),
            "auto_map",
            written,
        ),
    ] {
        let refused = load(&made, &case, &Traits::default()).unwrap_err();
        assert!(refused.contains(named), "{}: {refused}", case.name());
        let traits = |told: &str| Traits {
            tokenizer_class: Some(told.to_owned()),
            ..Traits::default()
        };
        made.agrees(
            &load(&made, &case, &traits(told)).unwrap(),
            &case.tokenizer,
            told,
        );
        let nonsense = load(&made, &case, &traits("LLamaTokenizer")).unwrap_err();
        assert!(
            nonsense.contains("LLamaTokenizer"),
            "{}: {nonsense}",
            case.name()
        );
    }
    for case in [
        // As written whatever the type: nothing that is taken in spite of the name fits this file.
        case("pieces", "PreTrainedTokenizerFast", None, nothing()),
        // vLLM never looks at the code of these.
        case("bytes", "InternLM2Tokenizer", Some("internlm2"), code()),
    ] {
        made.agrees(
            &load(&made, &case, &Traits::default()).unwrap(),
            &case.tokenizer,
            written,
        );
    }
}

impl Made {
    /// The plainest case of a tokenizer, and of a class of it.
    fn of(&self, tokenizer: &str, class: Option<&str>) -> &Case {
        let cases = self.cases.iter().filter(|case| case.tokenizer == tokenizer);
        cases
            .into_iter()
            .find(|case| class.is_none_or(|class| case.class == class))
            .unwrap()
    }

    /// Holds an encoder against the tokens of a class.
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
