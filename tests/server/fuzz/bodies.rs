//! Parsing and editing of request bodies.

use serde::de::IgnoredAny;
use serde_json::{Map, Value};
use warmroute_tokens::openai::json_edit::set_model;
use warmroute_tokens::openai::json_repair::{CutPoint, repair};
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

/// Parses, repairs and edits bodies for every API.
pub(crate) fn bodies(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let api = input.pick(&APIS);
    let cut = usize::from(input.byte()) << 8 | usize::from(input.byte());
    let model = ["other", "\"\u{1f600}\\\n", ""][input.below(3)];
    let body = input.rest();
    read(api, body);
    check_edited(body, model);
    check_repaired(api, body, cut);
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

/// Checks that a repaired prefix is a complete document, also after dropping its innermost parts.
fn check_repaired(api: ApiKind, body: &[u8], cut: usize) {
    let shown = &body[..cut.min(body.len())];
    let valid = serde_json::from_slice::<IgnoredAny>(body).is_ok()
        && body.trim_ascii_start().starts_with(b"{");
    let begun = !shown.trim_ascii_start().is_empty();
    let mut repaired = repair(shown);
    assert!(
        !(valid && begun) || repaired.is_some(),
        "the prefix of an object is not repaired"
    );
    let mut length = usize::MAX;
    for _ in 0..300 {
        let Some(now) = repaired else { return };
        if now.cut == CutPoint::Complete {
            assert_eq!(now.json, shown);
        }
        assert!(
            !valid || serde_json::from_slice::<IgnoredAny>(&now.json).is_ok(),
            "a repaired object is not valid"
        );
        assert!(
            now.json.len() <= length,
            "dropping a part makes the document longer"
        );
        length = now.json.len();
        let _read = openai::parse(api, &now.json);
        repaired = now.drop_innermost();
    }
    panic!("dropping parts does not end");
}
