//! A parsed request, independent of its API.

use serde::Deserialize;

use super::chat::ChatPrompt;

/// One request with the fields that routing needs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ApiRequest {
    /// Requested model or LoRA adapter.
    pub model: Option<String>,
    /// True if the response is a stream of server-sent events.
    pub stream: bool,
    /// The input that the engine continues.
    pub prompt: PromptInput,
    /// Cache salt that separates equal prompts of different tenants.
    pub cache_salt: Option<String>,
    /// Maximum number of output tokens; `None` means as many as the context allows.
    pub max_output_tokens: Option<u64>,
    /// Options of the conversion from text to tokens.
    pub tokenization: TokenizationOptions,
    /// Raw JSON of `nvext`, if present. It is parsed later, because most clients are not trusted.
    pub nvext: Option<Box<str>>,
    /// Id of the stored response that the request continues.
    pub previous_response_id: Option<String>,
    /// True if the engine may store the response under its id.
    pub stores_response: bool,
    /// True if a parameter of vLLM requests log probabilities of prompt tokens. vLLM then computes
    /// the whole prompt. Not detected in SGLang's own API.
    pub returns_prompt_logprobs: bool,
}

impl ApiRequest {
    pub(super) fn with_prompt(model: Option<String>, prompt: PromptInput) -> Self {
        Self {
            model,
            prompt,
            ..Self::default()
        }
    }

    /// Replaces `truncate_prompt_tokens: -1` by the number of prompt tokens that vLLM keeps.
    /// `max_model_len` is the model's context length in tokens, output included.
    pub fn resolve_truncation(&mut self, max_model_len: u64) {
        if self.tokenization.truncate_prompt_tokens != Some(-1) {
            return;
        }
        let room = match self.max_output_tokens {
            None | Some(0) => max_model_len,
            // vLLM reserves one token for the output if its length was requested.
            Some(_) => max_model_len.saturating_sub(1),
        };
        // Without room for the prompt, the engine decides how to reject the request.
        self.tokenization.truncate_prompt_tokens = i64::try_from(room)
            .ok()
            .filter(|room| *room > 0)
            .or(Some(-1));
    }

    /// Creates a request whose tokens cannot be known, with `text_bytes` bytes of text.
    pub(super) fn untokenized(model: Option<String>, text_bytes: usize) -> Self {
        Self::with_prompt(
            model,
            PromptInput::unknown(text_bytes, UnknownPromptReason::BuiltByEngine),
        )
    }
}

impl PromptInput {
    pub(super) fn unknown(text_bytes: usize, reason: UnknownPromptReason) -> Self {
        Self::Unknown(UnknownPrompt { text_bytes, reason })
    }

    /// Returns the number of bytes of text in the prompt.
    pub(super) fn text_bytes(&self) -> usize {
        match self {
            Self::Chat(chat) => chat.text_bytes(),
            Self::Texts(texts) => texts.iter().map(String::len).sum(),
            Self::Unknown(unknown) => unknown.text_bytes,
            Self::Tokens(_) | Self::Embeddings | Self::OverLimit | Self::NoPrompt => 0,
        }
    }
}

/// The input that the engine continues.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum PromptInput {
    /// A conversation, rendered by the chat template.
    Chat(Box<ChatPrompt>),
    /// One or several texts.
    Texts(Vec<String>),
    /// One or several lists of token ids.
    Tokens(Vec<Vec<u32>>),
    /// Embeddings instead of tokens, or in addition to them.
    Embeddings,
    /// More prompts or JSON values than warmroute reads.
    OverLimit,
    /// A prompt whose tokens only the engine knows.
    Unknown(UnknownPrompt),
    /// No prompt: the request needs no computation.
    #[default]
    NoPrompt,
}

/// A prompt whose tokens cannot be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownPrompt {
    /// Number of bytes of text in the prompt.
    pub text_bytes: usize,
    /// Reason why the tokens are unknown.
    pub reason: UnknownPromptReason,
}

/// Reason why the tokens of a request cannot be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnknownPromptReason {
    /// The engine or the model builds the prompt in its own way.
    BuiltByEngine,
    /// The prompt continues from state stored in an engine.
    StoredInEngine,
}

/// Request options that change the conversion from text to tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenizationOptions {
    /// Overrides whether the tokenizer adds its special tokens. By default it does for completions
    /// and not for chats.
    pub add_special_tokens: Option<bool>,
    /// Maximum number of prompt tokens; -1 means the model's context length.
    pub truncate_prompt_tokens: Option<i64>,
    /// Side that truncation removes, special tokens included. `None` means the tokenizer's side,
    /// where special tokens are never removed.
    pub truncation_side: Option<TruncationSide>,
    /// Truncation side of the engine's tokenizer.
    pub tokenizer_side: TruncationSide,
}

impl TokenizationOptions {
    /// Returns the side that truncation removes.
    pub fn removed_side(&self) -> TruncationSide {
        self.truncation_side.unwrap_or(self.tokenizer_side)
    }
}

/// The side of a prompt that truncation removes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TruncationSide {
    /// Truncation removes the beginning.
    #[default]
    Left,
    /// Truncation removes the end.
    Right,
}
