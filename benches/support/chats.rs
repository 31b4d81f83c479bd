//! Chats for benches, made of prose and code of this repository. No two messages are equal.

use std::io::Read as _;

use serde_json::{Value, json};
use warmroute_tokens::prompt::{Config, Encoder, PromptCache};

const FILE: &str = "examples/models/qwen2.5/tokenizer.json.gz";

/// Returns the encoder of the shipped model with a prompt cache of this size. It uses one thread,
/// because requests are encoded concurrently.
pub(crate) fn encoder(cached: usize) -> Encoder {
    let config = Config {
        tokenizer: FILE.into(),
        tokenizer_config: None,
        chat_template: None,
    };
    let encoder = Encoder::load(&config).expect("the shipped files");
    encoder
        .enable_fast_path()
        .expect("the fast library supports it");
    let (encoder, resumes) =
        encoder.with_prompt_cache(PromptCache::new(cached, std::sync::Arc::default()));
    assert_eq!(resumes, Ok(()));
    encoder
}

fn decompress() -> impl std::io::Read {
    flate2::read::GzDecoder::new(std::fs::File::open(FILE).expect("the shipped file"))
}

/// Returns the tokenizer of the same model from the `fastokens` library.
pub(crate) fn fast_library() -> fastokens::Tokenizer {
    let json = serde_json::from_reader(decompress()).expect("the shipped file");
    fastokens::Tokenizer::from_json(json).expect("the fast library supports it")
}

/// Returns the tokenizer of the same model from the engines' library.
pub(crate) fn library() -> tokenizers::Tokenizer {
    let mut plain = Vec::new();
    decompress()
        .read_to_end(&mut plain)
        .expect("the shipped file");
    tokenizers::Tokenizer::from_bytes(plain).expect("the shipped file")
}

/// Returns messages of about `bytes` bytes each. They contain the number of the chat, so that chats
/// differ.
pub(crate) fn messages(chat: usize, count: usize, bytes: usize) -> Vec<Value> {
    let pages = include_str!("../../README.md").to_owned()
        + include_str!("../../crates/tokens/src/prompt_cache.rs");
    let words: Vec<&str> = pages.split_inclusive(' ').collect();
    let message = |number: usize| {
        let mut content = format!("Chat {chat}, message {number}: ");
        let mut at = chat * 104_729 + number * 7919;
        while content.len() < bytes {
            content.push_str(words[at % words.len()]);
            at += if at.is_multiple_of(11) { 137 } else { 1 };
        }
        let role = if number.is_multiple_of(2) {
            "user"
        } else {
            "assistant"
        };
        json!({"role": role, "content": content})
    };
    (0..count).map(message).collect()
}

/// Returns a request body.
pub(crate) fn body(messages: &[Value]) -> Vec<u8> {
    json!({"model": "m", "stream": true, "messages": messages})
        .to_string()
        .into_bytes()
}

/// Renders the same prompt with hand-written code for this template.
pub(crate) fn render_by_hand<'m>(
    messages: impl Iterator<Item = (&'m str, &'m str)>,
    bytes: usize,
) -> String {
    let mut text = String::with_capacity(bytes + 4096);
    text.push_str(
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n",
    );
    for (role, content) in messages {
        text.push_str("<|im_start|>");
        text.push_str(role);
        text.push('\n');
        text.push_str(content);
        text.push_str("<|im_end|>\n");
    }
    text.push_str("<|im_start|>assistant\n");
    text
}
