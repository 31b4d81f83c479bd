//! Parsing and editing of request bodies.

use serde_json::{Map, Value};
use warmroute_tokens::openai::json_edit::set_model;
use warmroute_tokens::openai::{self, ApiKind};

use super::input::Input;

/// Text of clients that must not appear in errors.
pub(crate) const CANARY: &str = "CANARY";

/// All APIs.
pub(crate) const APIS: [ApiKind; 23] = [
    ApiKind::ChatCompletions,
    ApiKind::Completions,
    ApiKind::Embeddings,
    ApiKind::Pooling,
    ApiKind::Classify,
    ApiKind::Responses,
    ApiKind::Messages,
    ApiKind::CountTokens,
    ApiKind::Conversations,
    ApiKind::Score,
    ApiKind::Rerank,
    ApiKind::Tokenize,
    ApiKind::Detokenize,
    ApiKind::Render,
    ApiKind::Models,
    ApiKind::Transcriptions,
    ApiKind::Translations,
    ApiKind::Speech,
    ApiKind::ImageGenerations,
    ApiKind::ImageEdits,
    ApiKind::ImageVariations,
    ApiKind::SglangGenerate,
    ApiKind::VllmGenerate,
];

/// Parses and edits bodies for every API.
pub(crate) fn bodies(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let api = input.pick(&APIS);
    let cut = usize::from(input.byte()) << 8 | usize::from(input.byte());
    let model = ["other", "\"\u{1f600}\\\n", ""][input.below(3)];
    let body = input.rest();
    read(api, body);
    check_edited(body, model);
    check_beginning(body, cut);
}

fn read(api: ApiKind, body: &[u8]) {
    let json = openai::parse_body(api, None, body);
    let form = openai::parse_body(
        api,
        openai::multipart_boundary("multipart/form-data; boundary=B").as_deref(),
        body,
    );
    for error in [json, form].into_iter().filter_map(Result::err) {
        assert!(
            !error.to_string().contains(CANARY),
            "`{error}` quotes the body"
        );
    }
    let _text = openai::text_at_path(body, "metadata.session");
    let _boundary = std::str::from_utf8(body)
        .ok()
        .and_then(openai::multipart_boundary);
}

/// Checks that an edit changes the model and nothing else.
fn check_edited(body: &[u8], model: &str) {
    let edited = set_model(body, model);
    let Ok(before) = serde_json::from_slice::<Map<String, Value>>(body) else {
        return;
    };
    let edited = edited.expect("an object can be edited");
    let after: Map<String, Value> =
        serde_json::from_slice(&edited).expect("the object stays valid");
    assert_eq!(after["model"], model);
    let others = |fields: Map<String, Value>| -> Vec<_> {
        fields
            .into_iter()
            .filter(|(key, _)| key != "model")
            .collect()
    };
    assert_eq!(others(after), others(before));
    assert_eq!(
        set_model(&edited, model),
        Some(edited),
        "a second edit changes nothing"
    );
}

/// Checks that the model in the beginning of a body is the model of the body, unless its key is
/// repeated.
fn check_beginning(body: &[u8], cut: usize) {
    let shown = &body[..cut.min(body.len())];
    let model = openai::read_model_from_prefix(shown);
    let fields = openai::json_edit::find_values(body, &["model"]);
    if let (Some(model), Some([(_, value)])) = (model, fields.as_deref()) {
        assert_eq!(serde_json::from_slice(value).ok(), Some(model));
    }
}
