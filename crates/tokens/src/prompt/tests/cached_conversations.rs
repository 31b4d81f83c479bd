//! Conversations whose beginning is cached.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::json;
use warmroute_metrics::Metrics;

use super::render_options::root;
use crate::openai::{self, ApiKind, ApiRequest, MessageCache, MessageContent, PromptInput};
use crate::prompt::{Config, Encoder, PromptCache, TokenBudget};

/// Returns for each message whether its text was unescaped.
fn unescaped(request: &ApiRequest) -> Vec<bool> {
    let PromptInput::Chat(chat) = &request.prompt else {
        panic!("{request:?}")
    };
    let is_unescaped = |content: &Option<MessageContent>| match content {
        Some(MessageContent::Text(text)) => text.is_unescaped(),
        other => panic!("{other:?}"),
    };
    let messages = chat.messages.iter();
    messages
        .map(|message| is_unescaped(&message.content))
        .collect()
}

#[test]
fn only_new_texts_are_unescaped() {
    let prompt_cache = PromptCache::new(64 << 20, Arc::new(Metrics::new()));
    let message_cache = MessageCache::new(prompt_cache.clone());
    let files = root().join("examples/models/qwen2.5");
    let config = Config {
        tokenizer: files.join("tokenizer.json.gz"),
        tokenizer_config: Some(files.join("tokenizer_config.json")),
        chat_template: None,
    };
    let encoder = Encoder::load(&config).unwrap();
    let (encoder, resumes) = encoder.with_prompt_cache(prompt_cache);
    assert_eq!(resumes, Ok(()));
    let long = "a \"quoted\" text\n".repeat(1_000);
    let turns = ["system", "user", "assistant", "user", "assistant", "user"]
        .map(|role| json!({"role": role, "content": long}));
    let encode = |count: usize| {
        let body = json!({"messages": turns[..count]}).to_string();
        let body = Bytes::from(body);
        let api = ApiKind::ChatCompletions;
        let (request, reuse) =
            openai::parse_body_cached(api, None, &body, &message_cache, None).unwrap();
        assert_eq!(unescaped(&request)[1..], vec![false; count - 1]);
        let rendered = encoder.render_cached(&request, reuse).unwrap();
        encoder
            .tokenize_bounded(&rendered, None, &TokenBudget::UNLIMITED)
            .unwrap();
        unescaped(&request)
    };
    assert_eq!(encode(4), [true; 4]);
    // The system message is cached with its text. The last chunk of the first turn was not complete,
    // so the message that ends in it is read again.
    assert_eq!(encode(6), [true, false, false, true, true, true]);
}
