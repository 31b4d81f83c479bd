//! Responses of the Responses API. vLLM sends `response.created` and `response.in_progress` before
//! the computation.

use serde_json::{Value, json};

use super::{ResponseBuilder, typed_event};
use crate::scheduler::TokenOutput;

fn response(builder: &ResponseBuilder, status: &str, output: &Value, usage: &Value) -> Value {
    let details = match status {
        "incomplete" => json!({"reason": "max_output_tokens"}),
        _ => Value::Null,
    };
    json!({
        "id": builder.id,
        "created_at": builder.created,
        "error": null,
        "incomplete_details": details,
        "instructions": null,
        "model": builder.model,
        "object": "response",
        "output": output,
        "status": status,
        "usage": usage,
    })
}

fn usage(builder: &ResponseBuilder) -> Value {
    let input = builder.prompt_len();
    let output = builder.output_len();
    json!({
        "input_tokens": input,
        "input_tokens_details": {
            "cached_tokens": builder.cached_len(),
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": output,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": input + output,
    })
}

fn item_id(builder: &ResponseBuilder) -> String {
    format!("msg_{}", builder.id)
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn output_item(builder: &ResponseBuilder, status: &str, content: &Value) -> Value {
    json!({
        "id": item_id(builder),
        "type": "message",
        "role": "assistant",
        "content": content,
        "status": status,
    })
}

fn text(builder: &ResponseBuilder) -> &str {
    builder
        .choices
        .first()
        .map_or("", |choice| choice.text.as_str())
}

/// Returns the whole response.
pub(super) fn document(builder: &ResponseBuilder) -> Value {
    let is_cut = builder.choices.iter().all(|choice| choice.has_ended) && !builder.has_stopped;
    let status = if is_cut { "incomplete" } else { "completed" };
    let item = output_item(builder, "completed", &json!([text_part(text(builder))]));
    response(builder, status, &json!([item]), &usage(builder))
}

/// Returns an event with the next sequence number.
fn numbered(builder: &mut ResponseBuilder, mut event: Value) -> String {
    event["sequence_number"] = json!(builder.sequence_number);
    builder.sequence_number += 1;
    typed_event(&event)
}

/// Returns an event of the only content part.
fn part_event(builder: &mut ResponseBuilder, kind: &str, field: &str, value: Value) -> String {
    let mut event = json!({
        "type": kind,
        "item_id": item_id(builder),
        "output_index": 0,
        "content_index": 0,
    });
    event[field] = value;
    numbered(builder, event)
}

fn item_event(builder: &mut ResponseBuilder, kind: &str, item: &Value) -> String {
    numbered(
        builder,
        json!({"type": kind, "output_index": 0, "item": item}),
    )
}

pub(super) fn opening_events(builder: &mut ResponseBuilder) -> String {
    let initial = response(builder, "in_progress", &json!([]), &Value::Null);
    let kinds = ["response.created", "response.in_progress"];
    kinds
        .map(|kind| numbered(builder, json!({"type": kind, "response": initial})))
        .concat()
}

pub(super) fn token_events(
    builder: &mut ResponseBuilder,
    text: &str,
    output: TokenOutput,
) -> String {
    let mut events = String::new();
    if output.is_first {
        let item = output_item(builder, "in_progress", &json!([]));
        events += &item_event(builder, "response.output_item.added", &item);
        events += &part_event(
            builder,
            "response.content_part.added",
            "part",
            text_part(""),
        );
    }
    events + &part_event(builder, "response.output_text.delta", "delta", json!(text))
}

pub(super) fn final_events(builder: &mut ResponseBuilder) -> String {
    let mut events = String::new();
    if !builder.is_empty() {
        let text = text(builder).to_owned();
        let part = text_part(&text);
        let item = output_item(builder, "completed", &json!([part]));
        events += &part_event(builder, "response.output_text.done", "text", json!(text));
        events += &part_event(builder, "response.content_part.done", "part", part);
        events += &item_event(builder, "response.output_item.done", &item);
    }
    let whole = document(builder);
    events
        + &numbered(
            builder,
            json!({"type": "response.completed", "response": whole}),
        )
}
