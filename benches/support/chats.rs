//! Chats as benches send them: prose and code of this repository, no two messages alike.

use std::io::Read as _;

use serde_json::{Value, json};
use warmroute::prompt::{Config, Encoder, PromptCache};

const FILE: &str = "examples/models/qwen2.5/tokenizer.json.gz";

/// The encoder of the shipped model, which keeps so many bytes of what it has seen. One thread, as many requests are encoded
/// beside one another.
pub(crate) fn encoder(cached: usize) -> Encoder {
    let config = Config {
        tokenizer: FILE.into(),
        tokenizer_config: None,
        chat_template: None,
    };
    let encoder = Encoder::load(&config).expect("the shipped files");
    encoder.quicken().expect("one that the fast library takes");
    let (encoder, resumes) = encoder.resuming(PromptCache::new(cached, std::sync::Arc::default()));
    assert_eq!(resumes, Ok(()));
    encoder
}

fn written() -> impl std::io::Read {
    flate2::read::GzDecoder::new(std::fs::File::open(FILE).expect("the shipped file"))
}

/// The tokenizer of the same model as the fast library has it.
pub(crate) fn fast_library() -> fastokens::Tokenizer {
    let written = serde_json::from_reader(written()).expect("the shipped file");
    fastokens::Tokenizer::from_json(written).expect("a tokenizer that it takes")
}

/// The same as the engines' library has it.
pub(crate) fn library() -> tokenizers::Tokenizer {
    let mut plain = Vec::new();
    written().read_to_end(&mut plain).expect("the shipped file");
    tokenizers::Tokenizer::from_bytes(plain).expect("the shipped file")
}

/// Messages of some bytes each, beginning with a number that sets this chat apart from others.
pub(crate) fn messages(chat: usize, count: usize, bytes: usize) -> Vec<Value> {
    let pages = include_str!("../../README.md").to_owned()
        + include_str!("../../src/prompt/resume/cache.rs");
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

/// The body of a request.
pub(crate) fn body(messages: &[Value]) -> Vec<u8> {
    json!({"model": "m", "stream": true, "messages": messages})
        .to_string()
        .into_bytes()
}

/// The same prompt, written by hand for this one template.
pub(crate) fn by_hand<'m>(
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
