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
        settings.as_object_mut().unwrap().remove("added_tokens_decoder");
        format!("{} {} {settings} ({})", self.tokenizer, self.config["model_type"], self.class)
    }
}

fn made() -> Made {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens/classes/encodings.json.gz");
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
    let config = Config { tokenizer, tokenizer_config: None, chat_template: None };
    Encoder::load_as(&config, traits).map_err(|error| error.to_string())
}

fn tokens(encoder: &Encoder, text: &str, special: bool) -> Result<Vec<u32>, EncodeError> {
    let body = serde_json::json!({"prompt": [text, "x"], "add_special_tokens": special});
    let request = openai::parse(Api::Completions, &serde_json::to_vec(&body).unwrap()).unwrap();
    encoder.encode(&request).map(|mut encoded| encoded.prompts.remove(0))
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
                    Ok(ours) => wrong.push(format!("{}: {text:?} {special}: {ours:?}, not {theirs:?}", case.name())),
                    Err(EncodeError::Uncertain(_)) if special => doubted += 1,
                    Err(error) => wrong.push(format!("{}: {text:?} {special}: {error}", case.name())),
                }
            }
        }
    }
    let some = wrong.iter().take(12).cloned().collect::<Vec<_>>().join("\n");
    assert!(wrong.is_empty(), "{} of {equal}:\n{some}", wrong.len());
    assert!(equal > 6000 && doubted < 600, "{equal} equal, {doubted} doubted");
}

#[test]
fn what_is_not_known_to_be_built_as_the_engine_builds_it_is_refused_by_name() {
    let made = made();
    let case = |tokenizer: &str, class: &str, model: Option<&str>, more: Value| {
        let mut tokenizer_config = serde_json::json!({"tokenizer_class": class});
        tokenizer_config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let config = model.map_or(Value::Null, |model| serde_json::json!({"model_type": model}));
        let tokenizer = tokenizer.to_owned();
        Case { tokenizer, tokenizer_config, config, class: class.to_owned(), bare: Vec::new(), special: Vec::new() }
    };
    let nothing = serde_json::json!({});
    let code = serde_json::json!({"auto_map": {"AutoTokenizer": [null, "tokenization.Own"]}});
    for (case, named, told) in [
        (case("bytes", "Qwen2TokenizerFast", None, nothing.clone()), "config.json", "Qwen2Tokenizer"),
        (case("pieces", "CodeLlamaTokenizer", Some("llama"), nothing.clone()), "CodeLlamaTokenizer", "LlamaTokenizer"),
        (
            case("bytes", "RobertaTokenizerFast", Some("roberta"), nothing.clone()),
            "RobertaTokenizer",
            "TokenizersBackend",
        ),
        // Distilled from one family into another, and loaded by a name that only the engine knows.
        (case("bytes", "LlamaTokenizerFast", Some("llama"), nothing), "tokenizer_class", "TokenizersBackend"),
        (case("bytes", "TokenizersBackend", Some("own"), code), "auto_map", "TokenizersBackend"),
    ] {
        let refused = load(&made, &case, &Traits::default()).unwrap_err();
        assert!(refused.contains(named), "{}: {refused}", case.name());
        let traits = Traits { tokenizer_class: Some(told.to_owned()), ..Traits::default() };
        load(&made, &case, &traits).unwrap();
    }
}
