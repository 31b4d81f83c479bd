//! Converts bodies of LLM requests to the exact token ids that the engine computes.
//!
//! [`openai`] parses the request of an API into messages and tools. [`prompt`] renders the chat
//! template of the model, tokenizes the text as the engine does, and hashes the tokens into blocks.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod openai;
pub mod prompt;
mod prompt_cache;
