//! What is read from request bodies, and changed in them.

use serde::de::IgnoredAny;
use serde_json::{Map, Value};
use warmroute::openai::cut::{Cut, mend};
use warmroute::openai::edit::set_model;
use warmroute::openai::{self, Api};

use crate::input::Input;

/// Stands for what clients would not like to see in logs.
pub(crate) const CANARY: &str = "CANARY";

/// Every API.
pub(crate) const APIS: [Api; 23] = [
    Api::ChatCompletions,
    Api::Completions,
    Api::Embeddings,
    Api::Pooling,
    Api::Classify,
    Api::Responses,
    Api::Messages,
    Api::CountTokens,
    Api::Conversations,
    Api::Score,
    Api::Rerank,
    Api::Tokenize,
    Api::Detokenize,
    Api::Render,
    Api::Models,
    Api::Transcriptions,
    Api::Translations,
    Api::Speech,
    Api::ImageGenerations,
    Api::ImageEdits,
    Api::ImageVariations,
    Api::SglangGenerate,
    Api::VllmGenerate,
];

/// Bodies of every API are read, mended and edited, whatever they are.
pub(crate) fn bodies(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let api = input.pick(&APIS);
    let cut = usize::from(input.byte()) << 8 | usize::from(input.byte());
    let model = ["other", "\"\u{1f600}\\\n", ""][input.below(3)];
    let body = input.rest();
    read(api, body);
    edited(body, model);
    mended(api, body, cut);
}

fn read(api: Api, body: &[u8]) {
    let json = openai::parse_body(api, None, body);
    let form = openai::parse_body(
        api,
        openai::boundary("multipart/form-data; boundary=B").as_deref(),
        body,
    );
    for error in [json, form].into_iter().filter_map(Result::err) {
        assert!(
            !error.to_string().contains(CANARY),
            "`{error}` quotes the body"
        );
    }
    let _text = openai::text_of(body, "metadata.session");
    let _boundary = std::str::from_utf8(body).ok().and_then(openai::boundary);
}

/// Nothing but the model has changed, and that everywhere.
fn edited(body: &[u8], model: &str) {
    let edited = set_model(body, model);
    let Ok(before) = serde_json::from_slice::<Map<String, Value>>(body) else {
        return;
    };
    let edited = edited.expect("an object can be edited");
    let after: Map<String, Value> = serde_json::from_slice(&edited).expect("an object stays one");
    assert_eq!(after["model"], model);
    let others = |fields: Map<String, Value>| -> Vec<_> {
        fields
            .into_iter()
            .filter(|(key, _)| key != "model")
            .collect()
    };
    assert_eq!(others(after), others(before));
    assert_eq!(set_model(&edited, model), Some(edited), "edited twice");
}

/// The beginning of a document is one when it is mended, and stays one however much is dropped.
fn mended(api: Api, body: &[u8], cut: usize) {
    let shown = &body[..cut.min(body.len())];
    let sound = serde_json::from_slice::<IgnoredAny>(body).is_ok()
        && body.trim_ascii_start().starts_with(b"{");
    let begun = !shown.trim_ascii_start().is_empty();
    let mut mended = mend(shown);
    assert!(
        !(sound && begun) || mended.is_some(),
        "the beginning of an object is not mended"
    );
    let mut length = usize::MAX;
    for _ in 0..300 {
        let Some(now) = mended else { return };
        if now.cut == Cut::Nowhere {
            assert_eq!(now.json, shown);
        }
        assert!(
            !sound || serde_json::from_slice::<IgnoredAny>(&now.json).is_ok(),
            "a mended object is none"
        );
        assert!(now.json.len() <= length, "it grows");
        length = now.json.len();
        let _read = openai::parse(api, &now.json);
        mended = now.shorter();
    }
    panic!("something can always be dropped");
}
