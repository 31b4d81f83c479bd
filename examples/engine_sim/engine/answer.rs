//! Answers in OpenAI's shapes with vLLM's fields: one JSON document, or chunks of an event stream. Fed token by token, it
//! also keeps the usage, whose cached tokens are what the cache really gave.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use warmroute::openai::Api;

use super::ask::Ask;
use super::origin::{self, Worst};
use super::scheduler::Output;
use super::tokens::Tokens;

/// One choice as far as it has come.
#[derive(Debug, Default)]
struct Choice {
    prompt: usize,
    tokens: Vec<u32>,
    text: String,
    cached: usize,
    has_ended: bool,
}

impl Choice {
    fn finish_reason(&self, has_stopped: bool) -> &'static str {
        match (self.has_ended, has_stopped) {
            (false, _) => "abort",
            (true, false) => "length",
            (true, true) => "stop",
        }
    }
}

/// What the answer says of blocks that are kept for another engine.
#[derive(Debug, Default)]
pub(crate) enum HandedOver {
    /// Not a word: this engine has no such fields.
    #[default]
    Unheard,
    /// vLLM's `kv_transfer_params`, `null` for a request that leaves nothing.
    Transfer(Value),
    /// TensorRT-LLM's `disaggregated_params` of the first choice.
    Disaggregated(Value),
}

/// The answer to one request: see the module.
#[derive(Debug)]
pub(crate) struct Answer {
    api: Api,
    id: String,
    created: u64,
    model: String,
    wants_usage: bool,
    wants_token_ids: bool,
    tells_cached: bool,
    /// What to tell instead of what was cached here.
    cached_elsewhere: Option<usize>,
    handed_over: HandedOver,
    /// Whether it ended by itself.
    has_stopped: bool,
    /// Where the keys and values came from, if that is to be told.
    worst: Option<Worst>,
    vocabulary: Arc<Tokens>,
    prompts: Vec<Vec<u32>>,
    choices: Vec<Choice>,
}

impl Answer {
    /// `model` is the one asked for; `name` makes the id, as vLLM takes it from `x-request-id`.
    pub(crate) fn new(
        (api, ask): (Api, &Ask),
        (model, name): (String, &str),
        prompts: Vec<Vec<u32>>,
        vocabulary: Arc<Tokens>,
    ) -> Self {
        let prefix = match api {
            Api::ChatCompletions => "chatcmpl",
            _ => "cmpl",
        };
        let choices = (0..prompts.len() * ask.choices())
            .map(|at| Choice {
                prompt: at / ask.choices(),
                ..Choice::default()
            })
            .collect();
        Self {
            api,
            id: format!("{prefix}-{name}"),
            created: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs(),
            model,
            wants_usage: ask.wants_usage(),
            wants_token_ids: ask.wants_token_ids(),
            tells_cached: true,
            cached_elsewhere: None,
            handed_over: HandedOver::default(),
            has_stopped: false,
            worst: None,
            vocabulary,
            prompts,
            choices,
        }
    }

    /// The same without a word on what was cached.
    pub(crate) fn silent_on_cache(self) -> Self {
        Self {
            tells_cached: false,
            ..self
        }
    }

    /// The same with what another engine had cached of the prompt, if that is known.
    pub(crate) fn cached_elsewhere(self, cached: Option<usize>) -> Self {
        Self {
            cached_elsewhere: cached,
            ..self
        }
    }

    /// The same with a word on where the keys and values came from.
    pub(crate) fn telling(self, worst: Option<Worst>) -> Self {
        Self { worst, ..self }
    }

    /// It ended by itself, not because it was long enough.
    pub(crate) fn stop(&mut self) {
        self.has_stopped = true;
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    pub(crate) fn hand_over(&mut self, handed_over: HandedOver) {
        self.handed_over = handed_over;
    }

    /// Prompt tokens of the first choice that were cached, and its first token.
    pub(crate) fn beginning(&self) -> (usize, Option<u32>) {
        self.choices.first().map_or((0, None), |choice| {
            (choice.cached, choice.tokens.first().copied())
        })
    }

    /// Whether nothing was generated yet.
    pub(crate) fn is_empty(&self) -> bool {
        self.choices.iter().all(|choice| choice.tokens.is_empty())
    }

    /// Notes a token of the choice at `at`; returns its text.
    pub(crate) fn note(&mut self, at: usize, output: Output) -> String {
        let text = self
            .vocabulary
            .text(output.token, output.is_first)
            .to_owned();
        let choice = &mut self.choices[at];
        choice.tokens.push(output.token);
        choice.text += &text;
        choice.cached = output.cached;
        choice.has_ended = output.is_last;
        text
    }

    fn usage(&self) -> Value {
        let prompt: usize = self.prompts.iter().map(Vec::len).sum();
        let completion: usize = self.choices.iter().map(|choice| choice.tokens.len()).sum();
        // Of several choices of one prompt the first computes what the others find; vLLM reports what they found.
        let cached = |prompt| {
            self.choices
                .iter()
                .filter(move |choice| choice.prompt == prompt)
                .map(|choice| choice.cached)
                .max()
        };
        let cached: usize = (0..self.prompts.len()).filter_map(cached).sum();
        let cached = self.cached_elsewhere.unwrap_or(cached);
        json!({
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": self.tells_cached.then(|| json!({"cached_tokens": cached})),
        })
    }

    fn envelope(&self, object: &str, choices: &Value) -> Value {
        let mut envelope = json!({"id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices});
        if let Some(worst) = &self.worst {
            envelope[origin::FIELD] = json!(worst.word());
        }
        envelope
    }

    /// The whole answer as one document.
    pub(crate) fn document(&self) -> Value {
        let choices = self
            .choices
            .iter()
            .enumerate()
            .map(|(at, choice)| self.choice(at, choice))
            .collect();
        let object = match self.api {
            Api::ChatCompletions => "chat.completion",
            _ => "text_completion",
        };
        let mut document = self.envelope(object, &Value::Array(choices));
        document["usage"] = self.usage();
        if self.wants_token_ids && self.api == Api::ChatCompletions {
            document["prompt_token_ids"] = json!(self.prompts.first());
        }
        match &self.handed_over {
            HandedOver::Unheard => {}
            HandedOver::Transfer(params) => document["kv_transfer_params"] = params.clone(),
            HandedOver::Disaggregated(params) => {
                document["choices"][0]["disaggregated_params"] = params.clone();
                document["prompt_token_ids"] = json!(self.prompts.first());
            }
        }
        document
    }

    fn choice(&self, at: usize, choice: &Choice) -> Value {
        let mut value = json!({"index": at, "logprobs": null, "finish_reason": choice.finish_reason(self.has_stopped), "stop_reason": null});
        match self.api {
            Api::ChatCompletions => {
                value["message"] = json!({"role": "assistant", "content": choice.text})
            }
            _ => value["text"] = json!(choice.text),
        }
        if self.wants_token_ids {
            value["token_ids"] = json!(choice.tokens);
            if self.api == Api::Completions {
                value["prompt_token_ids"] = json!(self.prompts[choice.prompt]);
            }
        }
        value
    }

    /// The stream's text for one token.
    pub(crate) fn chunk(&mut self, at: usize, output: Output) -> String {
        let text = self.note(at, output);
        let finish = if output.is_last {
            json!("length")
        } else {
            Value::Null
        };
        let mut events = String::new();
        let mut value = json!({"index": at, "logprobs": null, "finish_reason": finish});
        let object = match self.api {
            Api::ChatCompletions => {
                if output.is_first {
                    let role = json!({"role": "assistant", "content": ""});
                    let opening = json!([{"index": at, "delta": role, "logprobs": null, "finish_reason": null}]);
                    events += &event(&self.envelope("chat.completion.chunk", &opening));
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

    /// The end of the stream.
    pub(crate) fn closing(&self) -> String {
        let object = match self.api {
            Api::ChatCompletions => "chat.completion.chunk",
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
                Api::ChatCompletions => last["delta"] = json!({}),
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
