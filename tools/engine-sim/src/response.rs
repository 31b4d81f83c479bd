//! Responses in the formats of vLLM's APIs, as one JSON document or as events of a stream. The
//! builder receives every token and counts the usage. The cached tokens are those that the block
//! cache reused.

mod messages;
mod responses;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use warmroute_tokens::openai::ApiKind;

use super::SimEngine;
use super::kv_origin::{self, WorstOrigin};
use super::request::GenerationRequest;
use super::scheduler::TokenOutput;
use super::tokens::SimTokenizer;

/// A comment that keeps a connection alive.
const PING_COMMENT: &str = ": ping\n\n";

/// State of one choice.
#[derive(Debug, Default)]
struct ChoiceState {
    prompt: usize,
    tokens: Vec<u32>,
    text: String,
    cached: usize,
    has_ended: bool,
}

impl ChoiceState {
    fn finish_reason(&self, has_stopped: bool) -> &'static str {
        match (self.has_ended, has_stopped) {
            (false, _) => "abort",
            (true, false) => "length",
            (true, true) => "stop",
        }
    }
}

/// Fields of the response that describe blocks leased to a decode engine.
#[derive(Debug, Default)]
pub(crate) enum TransferFields {
    /// The engine's protocol has no such fields.
    #[default]
    Absent,
    /// vLLM's `kv_transfer_params`; `null` for a request that leases no blocks.
    KvTransferParams(Value),
    /// TensorRT-LLM's `disaggregated_params` of the first choice.
    DisaggregatedParams(Value),
}

/// The response to one request.
#[derive(Debug)]
pub(crate) struct ResponseBuilder {
    api: ApiKind,
    id: String,
    created: u64,
    model: String,
    wants_usage: bool,
    wants_token_ids: bool,
    reports_cached_tokens: bool,
    /// Number of cached tokens to report in place of the local number.
    remote_cached_tokens: Option<usize>,
    transfer_fields: TransferFields,
    /// True if the finish reason is `stop` instead of `length`.
    has_stopped: bool,
    /// Origin of the keys and values, if the response reports it.
    worst_origin: Option<WorstOrigin>,
    /// True if the events that precede the content were sent.
    has_opened: bool,
    /// Number of the next event of the Responses API.
    sequence_number: u64,
    tokenizer: Arc<SimTokenizer>,
    prompts: Vec<Vec<u32>>,
    choices: Vec<ChoiceState>,
}

impl ResponseBuilder {
    /// Creates a builder. `request_id` becomes part of the response id, as vLLM uses
    /// `x-request-id`.
    pub(crate) fn new(
        engine: &SimEngine,
        api: ApiKind,
        request: &GenerationRequest,
        request_id: &str,
        prompts: Vec<Vec<u32>>,
    ) -> Self {
        let prefix = match api {
            ApiKind::ChatCompletions | ApiKind::Messages => "chatcmpl-",
            ApiKind::Responses => "resp_",
            _ => "cmpl-",
        };
        let choices = (0..prompts.len() * request.choices())
            .map(|at| ChoiceState {
                prompt: at / request.choices(),
                ..ChoiceState::default()
            })
            .collect();
        Self {
            api,
            id: format!("{prefix}{request_id}"),
            created: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs(),
            model: request
                .model
                .clone()
                .unwrap_or_else(|| engine.config.model.clone()),
            wants_usage: request.wants_usage(),
            wants_token_ids: request.wants_token_ids(),
            reports_cached_tokens: !engine.config.api.no_prompt_tokens_details,
            remote_cached_tokens: None,
            transfer_fields: TransferFields::default(),
            has_stopped: false,
            worst_origin: None,
            has_opened: false,
            sequence_number: 0,
            tokenizer: engine.tokenizer.clone(),
            prompts,
            choices,
        }
    }

    /// Sets the number of prompt tokens cached on another engine, if known.
    pub(crate) fn with_remote_cached_tokens(self, cached: Option<usize>) -> Self {
        Self {
            remote_cached_tokens: cached,
            ..self
        }
    }

    /// Sets the origin of the keys and values to report.
    pub(crate) fn with_kv_origin(self, worst_origin: Option<WorstOrigin>) -> Self {
        Self {
            worst_origin,
            ..self
        }
    }

    /// Sets the finish reason to `stop` instead of `length`.
    pub(crate) fn stop(&mut self) {
        self.has_stopped = true;
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    pub(crate) fn set_transfer_fields(&mut self, transfer_fields: TransferFields) {
        self.transfer_fields = transfer_fields;
    }

    /// Returns the cached prompt tokens of the first choice and its first token.
    pub(crate) fn first_choice(&self) -> (usize, Option<u32>) {
        self.choices.first().map_or((0, None), |choice| {
            (choice.cached, choice.tokens.first().copied())
        })
    }

    /// Returns true if no token was generated yet.
    pub(crate) fn is_empty(&self) -> bool {
        self.choices.iter().all(|choice| choice.tokens.is_empty())
    }

    /// Appends a token to the choice at index `at` and returns its text.
    pub(crate) fn push(&mut self, at: usize, output: TokenOutput) -> String {
        let text = self
            .tokenizer
            .text(output.token, output.is_first)
            .to_owned();
        let choice = &mut self.choices[at];
        choice.tokens.push(output.token);
        choice.text += &text;
        choice.cached = output.cached;
        choice.has_ended = output.is_last;
        text
    }

    fn prompt_len(&self) -> usize {
        self.prompts.iter().map(Vec::len).sum()
    }

    fn output_len(&self) -> usize {
        self.choices.iter().map(|choice| choice.tokens.len()).sum()
    }

    fn cached_len(&self) -> usize {
        // If a prompt has several choices, the first one computes the blocks that the others hit.
        // vLLM reports these hits.
        let cached = |prompt| {
            self.choices
                .iter()
                .filter(move |choice| choice.prompt == prompt)
                .map(|choice| choice.cached)
                .max()
        };
        let cached: usize = (0..self.prompts.len()).filter_map(cached).sum();
        self.remote_cached_tokens.unwrap_or(cached)
    }

    fn usage(&self) -> Value {
        let prompt = self.prompt_len();
        let completion = self.output_len();
        let cached = self.cached_len();
        json!({
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": self.reports_cached_tokens.then(|| json!({"cached_tokens": cached})),
        })
    }

    fn envelope(&self, object: &str, choices: &Value) -> Value {
        let mut envelope = json!({"id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices});
        if let Some(worst_origin) = &self.worst_origin {
            envelope[kv_origin::KV_ORIGIN_FIELD] = json!(worst_origin.label());
        }
        envelope
    }

    /// Returns the whole response as one document.
    pub(crate) fn document(&self) -> Value {
        match self.api {
            ApiKind::Responses => return responses::document(self),
            ApiKind::Messages => return messages::document(self),
            _ => {}
        }
        let choices = self
            .choices
            .iter()
            .enumerate()
            .map(|(at, choice)| self.choice(at, choice))
            .collect();
        let object = match self.api {
            ApiKind::ChatCompletions => "chat.completion",
            _ => "text_completion",
        };
        let mut document = self.envelope(object, &Value::Array(choices));
        document["usage"] = self.usage();
        if self.wants_token_ids && self.api == ApiKind::ChatCompletions {
            document["prompt_token_ids"] = json!(self.prompts.first());
        }
        match &self.transfer_fields {
            TransferFields::Absent => {}
            TransferFields::KvTransferParams(params) => {
                document["kv_transfer_params"] = params.clone()
            }
            TransferFields::DisaggregatedParams(params) => {
                document["choices"][0]["disaggregated_params"] = params.clone();
                document["prompt_token_ids"] = json!(self.prompts.first());
            }
        }
        document
    }

    fn choice(&self, at: usize, choice: &ChoiceState) -> Value {
        let mut value = json!({"index": at, "logprobs": null, "finish_reason": choice.finish_reason(self.has_stopped), "stop_reason": null});
        match self.api {
            ApiKind::ChatCompletions => {
                value["message"] = json!({"role": "assistant", "content": choice.text})
            }
            _ => value["text"] = json!(choice.text),
        }
        if self.wants_token_ids {
            value["token_ids"] = json!(choice.tokens);
            if self.api == ApiKind::Completions {
                value["prompt_token_ids"] = json!(self.prompts[choice.prompt]);
            }
        }
        value
    }

    /// Returns the events that vLLM sends before the computation.
    pub(crate) fn opening_events(&mut self) -> Option<String> {
        (self.api == ApiKind::Responses).then(|| responses::opening_events(self))
    }

    /// Returns the events that a front end may send before the computation: pings, and events that
    /// vLLM sends with the first token.
    pub(crate) fn early_events(&mut self) -> String {
        let is_open = std::mem::replace(&mut self.has_opened, true);
        match self.api {
            ApiKind::Messages => {
                messages::opening_events(self) + &typed_event(&json!({"type": "ping"}))
            }
            ApiKind::ChatCompletions if !is_open => {
                let roles = (0..self.choices.len()).map(|at| self.role_chunk(at));
                roles.collect::<String>() + PING_COMMENT
            }
            _ => PING_COMMENT.to_owned(),
        }
    }

    fn role_chunk(&self, at: usize) -> String {
        let role = json!({"role": "assistant", "content": ""});
        let opening =
            json!([{"index": at, "delta": role, "logprobs": null, "finish_reason": null}]);
        event(&self.envelope("chat.completion.chunk", &opening))
    }

    /// Returns the stream events for one token.
    pub(crate) fn chunk(&mut self, at: usize, output: TokenOutput) -> String {
        let text = self.push(at, output);
        match self.api {
            ApiKind::Responses => return responses::token_events(self, &text, output),
            ApiKind::Messages => return messages::token_events(self, &text, output),
            _ => {}
        }
        let finish = if output.is_last {
            json!("length")
        } else {
            Value::Null
        };
        let mut events = String::new();
        let mut value = json!({"index": at, "logprobs": null, "finish_reason": finish});
        let object = match self.api {
            ApiKind::ChatCompletions => {
                if output.is_first && !self.has_opened {
                    events += &self.role_chunk(at);
                }
                value["delta"] = json!({"content": text});
                "chat.completion.chunk"
            }
            _ => {
                value["text"] = json!(text);
                "text_completion"
            }
        };
        if self.wants_token_ids {
            value["token_ids"] = json!([output.token]);
        }
        events + &event(&self.envelope(object, &json!([value])))
    }

    /// Returns the final chunks of the stream.
    pub(crate) fn final_chunks(&mut self) -> String {
        match self.api {
            ApiKind::Responses => return responses::final_events(self),
            ApiKind::Messages => return messages::final_events(self),
            _ => {}
        }
        let object = match self.api {
            ApiKind::ChatCompletions => "chat.completion.chunk",
            _ => "text_completion",
        };
        let mut events = String::new();
        for (at, choice) in self
            .choices
            .iter()
            .enumerate()
            .filter(|(_, choice)| !choice.has_ended)
        {
            let mut last = json!({"index": at, "logprobs": null, "finish_reason": choice.finish_reason(self.has_stopped)});
            match self.api {
                ApiKind::ChatCompletions => last["delta"] = json!({}),
                _ => last["text"] = json!(""),
            }
            events += &event(&self.envelope(object, &json!([last])));
        }
        if self.wants_usage {
            let mut last = self.envelope(object, &json!([]));
            last["usage"] = self.usage();
            events += &event(&last);
        }
        events + "data: [DONE]\n\n"
    }
}

pub(crate) fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// Returns an event with its type as its name.
fn typed_event(value: &Value) -> String {
    let kind = value["type"].as_str().unwrap_or_default();
    format!("event: {kind}\n{}", event(value))
}
