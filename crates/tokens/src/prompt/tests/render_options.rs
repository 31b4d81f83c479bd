//! Rendering options of vLLM, and encodings of bodies, compared with its render server.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use crate::openai::{self, ApiKind};
use crate::prompt::{Config, Encoder, ModelTraits, RenderOptions};

pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[derive(Deserialize)]
struct RecordedOptions {
    options: RenderOptions,
    cases: Vec<RecordedCase>,
    bodies: Vec<RecordedBody>,
}

#[derive(Deserialize)]
struct RecordedCase {
    name: String,
    path: String,
    body: Value,
    tokens: Vec<u32>,
}

/// A body in hexadecimal digits. It has no tokens if the engine rejects it.
#[derive(Deserialize)]
struct RecordedBody {
    name: String,
    path: String,
    hex: String,
    tokens: Option<Vec<u32>>,
}

fn recorded_options() -> (Encoder, RecordedOptions) {
    let directory = root().join("tests/data/tokens");
    let file = std::fs::read(directory.join("render_options.json")).unwrap();
    let recorded: RecordedOptions = serde_json::from_slice(&file).unwrap();
    let config = Config {
        tokenizer: root().join("examples/models/qwen2.5/tokenizer.json.gz"),
        tokenizer_config: None,
        chat_template: Some(directory.join("render_options.jinja")),
    };
    let traits = ModelTraits {
        render: recorded.options.clone(),
        ..ModelTraits::default()
    };
    (
        Encoder::load_with_traits(&config, &traits).unwrap(),
        recorded,
    )
}

fn encode_body(encoder: &Encoder, path: &str, body: &[u8]) -> Result<Vec<u32>, String> {
    let request = openai::parse(ApiKind::from_path(path).unwrap(), body);
    let request = request.map_err(|error| error.to_string())?;
    let encoded = encoder.encode(&request).map_err(|error| error.to_string());
    encoded.map(|encoded| encoded.prompts.concat())
}

#[test]
fn render_options_equal_those_of_vllm() {
    let (encoder, recorded) = recorded_options();
    assert_eq!(encoder.render_options(), Some(&recorded.options));
    for RecordedCase {
        name,
        path,
        body,
        tokens,
    } in recorded.cases
    {
        let ours = encode_body(&encoder, &path, body.to_string().as_bytes());
        assert_eq!(ours, Ok(tokens), "{name}");
    }
}

#[test]
fn pooling_prompts_have_no_default_variables() {
    let (encoder, recorded) = recorded_options();
    let body = br#"{"messages": [{"role": "user", "content": "hi"}]}"#;
    let mut options = recorded.options;
    let request = openai::parse(ApiKind::Embeddings, body).unwrap();
    let with_defaults = encoder.encode(&request).unwrap();
    options.default_chat_template_kwargs.clear();
    let without = encoder.encode_with_options(&request, &options).unwrap();
    assert_eq!(with_defaults, without);
}

#[test]
fn bodies_are_decoded_as_in_python() {
    let (encoder, recorded) = recorded_options();
    for RecordedBody {
        name,
        path,
        hex,
        tokens,
    } in recorded.bodies
    {
        let digits = hex.as_bytes().chunks(2);
        let body: Vec<u8> = digits
            .map(|digits| u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap())
            .collect();
        let ours = encode_body(&encoder, &path, &body);
        match tokens {
            Some(tokens) => assert_eq!(ours, Ok(tokens), "{name}"),
            None => assert!(ours.is_err(), "{name}"),
        }
    }
}
