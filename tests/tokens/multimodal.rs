//! Prompts with images.

use super::*;

/// Encodes a conversation with an image for a model without media rules.
fn encode_media(encoder: &Encoder, request: &Value) -> MultimodalPrompt {
    let request = openai::parse(
        ApiKind::ChatCompletions,
        &serde_json::to_vec(request).unwrap(),
    )
    .unwrap();
    encoder
        .encode_multimodal(
            &request,
            None,
            &TokenBudget::UNLIMITED,
            &EngineModelName::Unreported,
        )
        .unwrap()
}

#[test]
fn prompt_ends_before_first_unknown_image() {
    let config = model("qwen2.5").join("tokenizer.json.gz");
    let vision = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/tokens/qwen2-vl/tokenizer_config.json");
    let config = Config {
        tokenizer: config,
        tokenizer_config: Some(vision),
        chat_template: None,
    };
    let plain = Encoder::load(&config).unwrap();
    let image = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
    let user = |parts: Value| json!({"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]});
    let request = user(
        json!([{"type": "text", "text": "look at"}, image("https://a/b.png"), {"type": "text", "text": "and"}]),
    );
    let ours = encode_media(&plain, &request);
    let text =
        json!({"prompt": "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nlook at"});
    assert_eq!(
        vec![ours.tokens.to_vec()],
        completion(&plain, &text).unwrap()
    );
    assert!(!ours.is_complete && ours.items.is_empty() && ours.min_tokens > ours.tokens.len());

    // For string content, the engine inserts text before the message.
    let strings = json!({"messages": [{"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "look"}, image("https://a/b.png")]}]});
    let ours = encode_media(&QWEN, &strings);
    let text = json!({"prompt": "<|im_start|>system\nS<|im_end|>\n<|im_start|>"});
    assert_eq!(
        vec![ours.tokens.to_vec()],
        completion(&QWEN, &text).unwrap(),
        "up to the last token that no later text can change"
    );
    assert_eq!(
        chat(&QWEN, &strings),
        Err(EncodeError::Multimodal("image_url".to_owned()))
    );
}

/// Returns the encoder of a vision model whose images have five tokens.
fn vision_encoder() -> Encoder {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens/qwen2-vl");
    let image: ImageRule =
        serde_json::from_value(json!({"token": "<|image_pad|>", "tokens_per_item": 5})).unwrap();
    let traits = ModelTraits {
        media: Some(MediaConfig {
            image: Some(image),
            ..MediaConfig::default()
        }),
        ..ModelTraits::default()
    };
    let tokenizer_config = Some(directory.join("tokenizer_config.json"));
    let config = Config {
        tokenizer: model("qwen2.5").join("tokenizer.json.gz"),
        tokenizer_config,
        chat_template: None,
    };
    Encoder::load_with_traits(&config, &traits).unwrap()
}

#[test]
fn images_before_first_unknown_are_expanded() {
    let encoder = vision_encoder();
    let named =
        json!({"type": "image_url", "image_url": {"url": "https://a/b.png"}, "uuid": "first"});
    let other = json!({"type": "image_url", "image_url": {"url": "https://a/c.png"}});
    let conversation = |second: &Value| {
        json!({"messages": [
        {"role": "user", "content": [named, {"type": "text", "text": "what is this?"}]},
        {"role": "assistant", "content": "a cat"},
        {"role": "user", "content": [second, {"type": "text", "text": "and this?"}]}]})
    };
    let partial = encode_media(&encoder, &conversation(&other));
    let mut second = named.clone();
    second["uuid"] = json!("second");
    let whole = encode_media(&encoder, &conversation(&second));
    assert!(whole.is_complete && !partial.is_complete);
    assert_eq!(
        whole
            .items
            .iter()
            .map(|item| item.id.as_str())
            .collect::<Vec<_>>(),
        ["first", "second"]
    );
    assert_eq!(partial.items, whole.items[..1]);
    assert!(whole.tokens.starts_with(&partial.tokens));
    // The prompt is known up to the token that begins the second image.
    assert_eq!(partial.tokens.len(), whole.items[1].range.start - 1);
    for options in ["mm_processor_kwargs", "media_io_kwargs"] {
        let mut request = conversation(&second);
        request[options] = json!({"max_pixels": 1});
        assert!(
            encode_media(&encoder, &request).items.is_empty(),
            "{options} change the media items"
        );
    }
    let mut truncated = conversation(&second);
    truncated["truncate_prompt_tokens"] = json!(4);
    let request = openai::parse(
        ApiKind::ChatCompletions,
        &serde_json::to_vec(&truncated).unwrap(),
    )
    .unwrap();
    assert!(
        encoder
            .encode_multimodal(
                &request,
                None,
                &TokenBudget::UNLIMITED,
                &EngineModelName::Unreported
            )
            .is_err()
    );
}
