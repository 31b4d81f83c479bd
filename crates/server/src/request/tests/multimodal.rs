//! Conversations with images.

use serde_json::json;
use warmroute_core::engine_settings::CommonSettings;
use warmroute_core::parity::{CanaryVerdict, ComparedItem, TokenDifference};

use super::*;

/// Returns a preprocessor for a vision model, with a system prompt before every image so that some
/// blocks precede it.
fn vision_preprocessor() -> Arc<RequestPreprocessor> {
    vision_preprocessor_with(
        |encoder| encoder,
        MediaTokens::default(),
        BlockWindows::Plain,
    )
}

fn vision_preprocessor_with(
    change: impl Fn(Encoder) -> Encoder,
    media_tokens: MediaTokens,
    windows: BlockWindows,
) -> Arc<RequestPreprocessor> {
    let vision_model = format!("{REPOSITORY}/tests/data/tokens/qwen2-vl");
    let files = prompt::Config {
        tokenizer: format!("{REPOSITORY}/examples/models/qwen2.5/tokenizer.json.gz").into(),
        tokenizer_config: Some(format!("{vision_model}/tokenizer_config.json").into()),
        chat_template: None,
    };
    let image = json!({
        "token": "<|image_pad|>",
        "preprocessor_config": format!("{vision_model}/preprocessor_config.json"),
    });
    let image = Some(serde_json::from_value(image).unwrap());
    let media = Some(prompt::MediaConfig {
        image,
        ..prompt::MediaConfig::default()
    });
    let traits = prompt::ModelTraits {
        name: "m".into(),
        media,
        ..prompt::ModelTraits::default()
    };
    let model = ConfiguredModel {
        name: "m".into(),
        block_size: BlockSize::new(4).unwrap(),
        windows,
        media: media_tokens,
        encoder: Some(Arc::new(change(
            Encoder::load_with_traits(&files, &traits).unwrap(),
        ))),
    };
    let mut models = ModelRegistry::default();
    models.add(model, &[], &[]);
    let limits = EncodeLimits {
        inline: 1 << 20,
        queue: 1,
        deadline: Duration::from_secs(60),
    };
    let source = engine_tokens::TokenSource {
        parity: Arc::default(),
        engine_tokens: None,
        engine_settings: Default::default(),
    };
    let tokens = TokenSources::from([("m".into(), source)]);
    RequestPreprocessor::new(PreprocessorParts {
        token_sources: tokens,
        ..preprocessor_parts(models, ClientsConfig::default(), limits)
    })
}

fn image_conversation(url: &str, after: &str) -> String {
    serde_json::json!({"model": "m", "messages": [
        {"role": "system", "content": "one two three four five six seven eight nine ten"},
        {"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": after}]}]})
    .to_string()
}

#[test]
fn images_separate_prompts_behind_shared_prefix() {
    let preprocessor = vision_preprocessor();
    let path = "/v1/chat/completions";
    let preprocess = |body: &str| {
        preprocessor
            .preprocess_blocking(None, path, &|_| None, body.as_bytes())
            .route_request
            .prompt
    };
    let complete = |url: &str| match preprocess(&image_conversation(url, "what is it?")) {
        RoutePrompt::Hashed(prompts) => prompts[0].locals().to_vec(),
        prompt => panic!("{prompt:?}"),
    };
    let one = complete(&png_data_url(2));
    let same = complete(&png_data_url(2));
    let other = complete(&png_data_url(0));
    assert_eq!(one, same);
    let shared = one
        .iter()
        .zip(&other)
        .take_while(|(one, other)| one == other)
        .count();
    assert!(
        shared > 0 && shared < one.len(),
        "{shared} of {}",
        one.len()
    );
    // An image by URL: only the part before it is known.
    let RoutePrompt::Truncated {
        known,
        tokens,
        reason,
    } = preprocess(&image_conversation("https://a/b.png", "what is it?"))
    else {
        panic!()
    };
    assert_eq!(
        (reason, known.locals()),
        (Reason::Multimodal, &one[..known.len()])
    );
    assert!(
        known.len() == shared && tokens > known.tokens() as u64,
        "{} of {shared} blocks",
        known.len()
    );
}

#[test]
fn multimodal_prompts_are_no_parity_evidence() {
    let preprocessor = vision_preprocessor();
    let preprocess = |body: &str| {
        preprocessor
            .preprocess_blocking(None, "/v1/chat/completions", &|_| None, body.as_bytes())
            .route_request
    };
    let shown = image_conversation(&png_data_url(2), "what is it?");
    let text = r#"{"model": "m", "messages": [{"role": "user", "content": "one two three four five six seven"}]}"#;
    assert!(matches!(preprocess(text).parity, ParityExpectation::Prompt));
    assert!(matches!(
        preprocess(&shown).parity,
        ParityExpectation::Multimodal
    ));
    let differs = warmroute_core::parity::BlockEvidence::Unconfirmed { block: 0 };
    let (_, parity) = preprocessor.parity_statuses().next().unwrap();
    (0..8).for_each(|_| _ = parity.record_evidence(warmroute_core::worker::WorkerId(1), differs));
    assert!(matches!(
        preprocess(text).parity,
        ParityExpectation::Shadow(_)
    ));
    let degraded = preprocess(&shown);
    assert!(
        matches!(degraded.parity, ParityExpectation::NotPredicted),
        "{:?}",
        degraded.parity
    );
    assert_eq!(degraded.prompt.reason(), Some(Reason::ParityMismatch));
}

/// Records that the generation prompt of an engine, the last three tokens, differs.
fn record_differing_end(preprocessor: &RequestPreprocessor) {
    let (_, parity) = preprocessor.parity_statuses().next().unwrap();
    let difference = TokenDifference {
        compared: ComparedItem::Length,
        canary: None,
        position: 0,
        block: 0,
        warmroute_token: None,
        engine_token: None,
        warmroute_text: None,
        engine_text: None,
        matching_settings: None,
    };
    let verdict = CanaryVerdict::GenerationPromptDiffers {
        difference: Box::new(difference),
        end_tokens: 3,
    };
    parity.record_canaries(warmroute_core::worker::WorkerId(1), verdict);
}

#[test]
fn left_truncation_with_differing_end_hides_prompt() {
    let preprocessor = vision_preprocessor();
    let preprocess = |truncation: serde_json::Value| {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "one two three four five six seven"}], "truncate_prompt_tokens": 12});
        body.as_object_mut()
            .unwrap()
            .extend(truncation.as_object().unwrap().clone());
        preprocessor
            .preprocess_blocking(
                None,
                "/v1/chat/completions",
                &|_| None,
                body.to_string().as_bytes(),
            )
            .route_request
            .prompt
    };
    let left = [json!({}), json!({"truncation_side": "left"})];
    for truncation in &left {
        let prompt = preprocess(truncation.clone());
        assert!(matches!(prompt, RoutePrompt::Hashed(_)), "{prompt:?}");
    }
    record_differing_end(&preprocessor);
    for truncation in left {
        let prompt = preprocess(truncation);
        let RoutePrompt::Estimated { tokens, reason } = prompt else {
            panic!("{prompt:?}")
        };
        assert_eq!((tokens, reason), (12, Reason::ParityMismatch));
    }
    let prompt = preprocess(json!({"truncation_side": "right"}));
    let RoutePrompt::Truncated { known, .. } = prompt else {
        panic!("{prompt:?}")
    };
    assert_eq!(known.len(), 2);
}

#[test]
fn differing_generation_prompt_ends_known_prefix() {
    let preprocessor = vision_preprocessor();
    let preprocess = |path: &str, body: &str| {
        preprocessor
            .preprocess_blocking(None, path, &|_| None, body.as_bytes())
            .route_request
            .prompt
    };
    let chat = "/v1/chat/completions";
    let shown = image_conversation(&png_data_url(2), "what is it?");
    let text = r#"{"model": "m", "messages": [{"role": "user", "content": "one two three four five six seven"}]}"#;
    let open = text.replace("}]}", r#"}], "add_generation_prompt": false}"#);
    let bodies = [shown.as_str(), text];
    let whole = bodies.map(|body| preprocess(chat, body));
    record_differing_end(&preprocessor);
    for (body, whole) in bodies.into_iter().zip(whole) {
        let RoutePrompt::Truncated {
            known,
            tokens,
            reason,
        } = preprocess(chat, body)
        else {
            panic!("the whole prompt is used")
        };
        let [whole] = whole.blocks() else {
            panic!("no whole prompt")
        };
        assert_eq!(reason, Reason::ParityMismatch);
        assert_eq!(tokens, whole.tokens() as u64);
        assert_eq!(known.len(), (whole.tokens() - 3) / 4);
        assert!(whole.sequences().starts_with(known.sequences()));
    }
    // Only generation prompts differ.
    let others = [
        preprocess(chat, &open),
        preprocess("/v1/completions", r#"{"model": "m", "prompt": "one two"}"#),
    ];
    assert!(
        others
            .iter()
            .all(|prompt| matches!(prompt, RoutePrompt::Hashed(_)))
    );
}

fn image_part(url: &str) -> serde_json::Value {
    serde_json::json!({"type": "image_url", "image_url": {"url": url}})
}

/// Returns four messages, the last of which has an image.
fn messages_with_image() -> Vec<serde_json::Value> {
    use serde_json::json;
    let words = |from: usize| {
        (from..from + 40)
            .map(|n| format!("w{n} "))
            .collect::<String>()
    };
    let text = json!({"type": "text", "text": words(300)});
    vec![
        json!({"role": "system", "content": words(0)}),
        json!({"role": "user", "content": words(100)}),
        json!({"role": "assistant", "content": words(200)}),
        json!({"role": "user", "content": [text, image_part(&png_data_url(2))]}),
    ]
}

#[test]
fn multimodal_conversation_resumes_cached_prefix() {
    use serde_json::json;
    let mut messages = messages_with_image();
    for (pads, windows) in [
        (None, BlockWindows::Plain),
        (Some(151_655), BlockWindows::Plain),
        (None, BlockWindows::Eagle),
    ] {
        let media = MediaTokens {
            image: pads,
            video: None,
        };
        let metrics = Arc::new(warmroute_metrics::Metrics::new());
        let cache = prompt::PromptCache::new(1 << 20, metrics.clone());
        let cached = vision_preprocessor_with(
            |encoder| encoder.with_prompt_cache(cache.clone()).0,
            media,
            windows,
        );
        let plain = vision_preprocessor_with(|encoder| encoder, media, windows);
        let compare = |messages: &[serde_json::Value]| {
            let body = json!({"model": "m", "messages": messages}).to_string();
            let preprocess = |preprocessor: &Arc<RequestPreprocessor>| {
                preprocessor.preprocess_blocking(
                    None,
                    "/v1/chat/completions",
                    &|_| None,
                    body.as_bytes(),
                )
            };
            let from_cache = preprocess(&cached);
            let computed = preprocess(&plain);
            assert_eq!(from_cache.tokens, computed.tokens);
            assert_eq!(
                from_cache.route_request.prompt.blocks(),
                computed.route_request.prompt.blocks(),
                "{pads:?} {windows:?}"
            );
            assert!(!from_cache.route_request.prompt.blocks()[0].is_empty());
        };
        let cached_tokens = || metrics.tokens.prompt_cache_hit_tokens.get();
        // Text alone, then a known image, then an unknown one.
        compare(&messages[..2]);
        assert_eq!(cached_tokens(), 0);
        let mut before = 0;
        for count in [4, 4] {
            compare(&messages[..count]);
            let resumed = cached_tokens() - before;
            assert!(resumed > 100, "{resumed} tokens from the cache");
            before += resumed;
        }
        messages.push(json!({"role": "user", "content": [image_part("https://a/b.png")]}));
        compare(&messages);
        let resumed = cached_tokens() - before;
        assert!(resumed > 200, "{resumed} tokens from the cache");
        messages.pop();
    }
}

/// Reports settings of the engines.
fn report_settings(preprocessor: &RequestPreprocessor, settings: CommonSettings) {
    preprocessor.parts.token_sources[&"m".into()]
        .engine_settings
        .store(Arc::new([("m".into(), settings)].into()));
}

#[test]
fn reported_model_name_is_part_of_image_hashes() {
    let preprocessor = vision_preprocessor();
    let preprocess = |body: &str| {
        preprocessor
            .preprocess_blocking(None, "/v1/chat/completions", &|_| None, body.as_bytes())
            .route_request
            .prompt
    };
    let locals = |prompt: RoutePrompt| match prompt {
        RoutePrompt::Hashed(prompts) => prompts[0].locals().to_vec(),
        prompt => panic!("{prompt:?}"),
    };
    let image = image_conversation(&png_data_url(2), "what is it?");
    let by_name = locals(preprocess(&image));
    let different_names = CommonSettings {
        roots_differ: true,
        ..CommonSettings::default()
    };
    report_settings(&preprocessor, different_names);
    match preprocess(&image) {
        RoutePrompt::Truncated {
            known,
            reason: Reason::Multimodal,
            ..
        } => {
            assert!(known.locals().len() < by_name.len() && by_name.starts_with(known.locals()));
        }
        prompt => panic!("an image with several names is unknown: {prompt:?}"),
    }
    let with_uuid = image.replace(r#""image_url":{"#, r#""uuid":"mine","image_url":{"#);
    assert!(
        matches!(preprocess(&with_uuid), RoutePrompt::Hashed(_)),
        "{with_uuid}"
    );
    let common_name = CommonSettings {
        root: Some("org/m".to_owned()),
        ..CommonSettings::default()
    };
    report_settings(&preprocessor, common_name);
    assert_ne!(
        locals(preprocess(&image)),
        by_name,
        "image names include the model that the engine was started with"
    );
}

#[test]
fn reported_length_limits_truncated_prompts() {
    let preprocessor = vision_preprocessor();
    let preprocess = |path: &str, body: &str| {
        preprocessor.preprocess_blocking(None, path, &|_| None, body.as_bytes())
    };
    let text = |fields: &str| {
        format!(r#"{{"model": "m", "prompt": "one two three four five six"{fields}}}"#)
    };
    let chat = |fields: &str| {
        format!(
            r#"{{"model": "m", "messages": [{{"role": "user", "content": "one two"}}]{fields}}}"#
        )
    };
    let truncated = text(r#", "truncate_prompt_tokens": -1"#);
    let prompt = preprocess("/v1/completions", &truncated)
        .route_request
        .prompt;
    assert_eq!(prompt.reason(), Some(Reason::EncodeFailed));
    let text_tokens = preprocess("/v1/completions", &text("")).tokens[0].clone();
    assert_eq!(text_tokens.len(), 6);
    let chat_tokens = preprocess("/v1/chat/completions", &chat("")).tokens[0].clone();
    let settings = CommonSettings {
        root: Some("org/m".to_owned()),
        max_model_len: Some(5),
        ..CommonSettings::default()
    };
    report_settings(&preprocessor, settings);
    for (fields, kept) in [
        ("", 4),
        (r#", "max_tokens": null"#, 4),
        (r#", "max_tokens": 2"#, 4),
        (r#", "max_tokens": 0"#, 5),
    ] {
        let body = text(&format!(r#", "truncate_prompt_tokens": -1{fields}"#));
        let preprocessed = preprocess("/v1/completions", &body);
        assert_eq!(preprocessed.tokens, [&text_tokens[6 - kept..]], "{fields}");
    }
    // Without `max_tokens` a chat may be as long as the model accepts.
    for (fields, kept) in [
        ("", 5),
        (r#", "max_tokens": 0"#, 5),
        (r#", "max_completion_tokens": 2"#, 4),
    ] {
        let body = chat(&format!(r#", "truncate_prompt_tokens": -1{fields}"#));
        let preprocessed = preprocess("/v1/chat/completions", &body);
        let expected = &chat_tokens[chat_tokens.len() - kept..];
        assert_eq!(preprocessed.tokens, [expected], "{fields}");
    }
}
