//! Responses of the Messages API. vLLM sends `message_start` with the first token.

use serde_json::{Value, json};

use super::{ResponseBuilder, typed_event};
use crate::scheduler::TokenOutput;

fn message(builder: &ResponseBuilder, content: &Value, stop_reason: Option<&str>) -> Value {
    json!({
        "id": builder.id,
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": builder.model,
        "stop_reason": stop_reason,
        "stop_sequence": null,
        "usage": {"input_tokens": builder.prompt_len(), "output_tokens": builder.output_len()},
    })
}

fn stop_reason(builder: &ResponseBuilder) -> &'static str {
    let has_ended = builder.choices.iter().all(|choice| choice.has_ended);
    if has_ended && !builder.has_stopped {
        "max_tokens"
    } else {
        "end_turn"
    }
}

/// Returns the whole response.
pub(super) fn document(builder: &ResponseBuilder) -> Value {
    let text = builder.choices.first().map(|choice| &choice.text);
    let content = json!([{"type": "text", "text": text}]);
    message(builder, &content, Some(stop_reason(builder)))
}

/// Returns `message_start`, which reports no output token.
pub(super) fn opening_events(builder: &ResponseBuilder) -> String {
    let mut message = message(builder, &json!([]), None);
    message["usage"]["output_tokens"] = json!(0);
    typed_event(&json!({"type": "message_start", "message": message}))
}

pub(super) fn token_events(
    builder: &mut ResponseBuilder,
    text: &str,
    output: TokenOutput,
) -> String {
    let mut events = String::new();
    if output.is_first {
        if !std::mem::replace(&mut builder.has_opened, true) {
            events += &opening_events(builder);
        }
        let block = json!({"type": "text", "text": ""});
        events += &typed_event(
            &json!({"type": "content_block_start", "index": 0, "content_block": block}),
        );
    }
    let delta = json!({"type": "text_delta", "text": text});
    events + &typed_event(&json!({"type": "content_block_delta", "index": 0, "delta": delta}))
}

pub(super) fn final_events(builder: &ResponseBuilder) -> String {
    let mut events = String::new();
    if !builder.is_empty() {
        events += &typed_event(&json!({"type": "content_block_stop", "index": 0}));
    }
    let usage =
        json!({"input_tokens": builder.prompt_len(), "output_tokens": builder.output_len()});
    let delta = json!({"stop_reason": stop_reason(builder)});
    events += &typed_event(&json!({"type": "message_delta", "delta": delta, "usage": usage}));
    events + &typed_event(&json!({"type": "message_stop"}))
}
