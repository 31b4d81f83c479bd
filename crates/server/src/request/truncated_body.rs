//! Prefix of a prompt whose body is truncated. The last tokens before the end are dropped, because
//! the missing text may merge with them. An incomplete block is dropped as well. If the beginning
//! of the prompt is uncertain, the request is routed by load only.

use bytes::Bytes;
use tracing::debug;
use warmroute_core::router::{Reason, RoutePrompt};
use warmroute_tokens::openai::json_repair::{CutPoint, PathSegment, RepairedJson, repair};
use warmroute_tokens::openai::{
    self, ApiKind, ApiWorkload, ChatMessage, ChatPrompt, MessageContent, PartMeaning,
};
use warmroute_tokens::prompt::PromptTokens;

use super::body::BodyTruncation;
use super::header_context::HeaderContext;
use super::models::SaltedModel;
use super::partial_request::{PartialRequest, estimate_tokens};
use super::preprocessor::RequestPreprocessor;
use super::tokenized::{ParsedRequest, StageTimer, TokenizedPrompts};

/// Tokens before the end that the missing text may change.
const UNSTABLE_TOKENS: usize = 8;

/// Maximum number of times that an open element is dropped until the JSON parses.
const MAX_REPAIRS: usize = 4;

/// Sizes of a truncated body in bytes, and the reason for the truncation.
#[derive(Clone, Copy)]
struct TruncatedBody {
    shown: usize,
    whole: usize,
    reason: Reason,
}

impl RequestPreprocessor {
    /// Encodes a truncated body.
    pub(super) fn encode_truncated(
        &self,
        api: ApiKind,
        context: &HeaderContext,
        shown: &Bytes,
        truncation: BodyTruncation,
    ) -> PartialRequest {
        let BodyTruncation { length, reason } = truncation;
        let whole = usize::try_from(length.unwrap_or(0))
            .unwrap_or(usize::MAX)
            .max(shown.len());
        let mut partial = PartialRequest::without_body(api, whole, reason);
        let shown = &shown.slice_ref(openai::without_byte_order_mark(shown));
        let requested = openai::read_model_from_prefix(shown);
        if requested.is_some() {
            partial.set_model(requested, &self.parts.models);
        }
        if let (Some(boundary), false) = (context.form_boundary.as_deref(), api.has_text_body()) {
            // A form may name its model before its files.
            let form = openai::parse_body(api, Some(boundary), shown);
            partial.set_model(form.ok().and_then(|form| form.model), &self.parts.models);
            return partial;
        }
        let Some(repaired) = repair(shown).and_then(without_partial_name) else {
            return partial;
        };
        if repaired.cut == CutPoint::Complete {
            let partial = self.encode_whole(api, context, shown);
            return if reason == Reason::BodyTooLarge {
                partial.into_too_large()
            } else {
                partial
            };
        }
        partial.session = self.session_in_body(context, &repaired.json);
        if api.workload() != ApiWorkload::Prompt {
            return partial;
        }
        let Some((repaired, request)) = parse_truncated(api, context, repaired) else {
            return partial;
        };
        partial.set_response_reference(&request);
        if let Some(request) = stable_prefix(request, &repaired.cut) {
            let body = TruncatedBody {
                shown: shown.len(),
                whole,
                reason,
            };
            self.encode_prefix(context, request, body, &mut partial);
        }
        partial
    }

    /// Encodes the known prefix of a prompt.
    fn encode_prefix(
        &self,
        context: &HeaderContext,
        mut request: openai::ApiRequest,
        body: TruncatedBody,
        partial: &mut PartialRequest,
    ) {
        let Some(resolved) = self.parts.models.resolve(request.model.as_deref()) else {
            return partial.set_reason(Reason::UnknownModel);
        };
        let mut clock = StageTimer::start(context.deadline);
        let cache =
            partial.take_cache_salt(context.tenant.as_deref(), &mut request, self.parts.nvext);
        let model = SaltedModel::new(resolved, cache);
        let parsed = ParsedRequest::from(request);
        let Ok(tokenized) = self.tokenize(&model, &parsed, partial, &mut clock) else {
            return;
        };
        let TokenizedPrompts {
            mut prompts,
            stop_reason,
        } = tokenized;
        let Some(mut tokens) = prompts.pop() else {
            return;
        };
        if let Some(stop_reason) = stop_reason {
            // The configured limit on bodies takes precedence as the reason.
            if body.reason != Reason::BodyTooLarge {
                partial.set_reason(stop_reason);
            }
            // The rest of the body may change the last tokens, even if the limit truncates the
            // prompt.
            tokens.truncate(tokens.len().saturating_sub(UNSTABLE_TOKENS));
            return self.set_prefix(&model, tokens, partial);
        }
        let estimated = tokens.len() as f64 * body.whole as f64 / body.shown.max(1) as f64;
        let size = model.resolved.model.block_size.tokens();
        tokens.truncate(tokens.len().saturating_sub(UNSTABLE_TOKENS) / size * size);
        if tokens.is_empty() {
            return;
        }
        let known = model.resumed_block_hashes(&tokens);
        let prompts = [tokens.into_ids()];
        partial.tracked_blocks =
            self.tracked_blocks(&model, &prompts, std::slice::from_ref(&known));
        let tokens = (estimated as u64).min(estimate_tokens(usize::MAX).max(known.tokens() as u64));
        partial.prompt = RoutePrompt::Truncated {
            known,
            tokens,
            reason: body.reason,
        };
    }

    /// Sets the first tokens of an estimated prompt. The estimate and its reason do not change.
    pub(super) fn set_prefix(
        &self,
        model: &SaltedModel,
        mut tokens: PromptTokens,
        partial: &mut PartialRequest,
    ) {
        let Some(reason) = partial.prompt.reason() else {
            return;
        };
        let size = model.resolved.model.block_size.tokens();
        tokens.truncate(tokens.len() / size * size);
        if tokens.is_empty() {
            return;
        }
        let known = model.resumed_block_hashes(&tokens);
        let prompts = [tokens.into_ids()];
        partial.tracked_blocks = self.tracked_blocks(model, &prompts, std::slice::from_ref(&known));
        let tokens = partial.prompt.tokens().max(known.tokens() as u64);
        partial.prompt = RoutePrompt::Truncated {
            known,
            tokens,
            reason,
        };
    }
}

/// Parses the longest valid prefix.
fn parse_truncated(
    api: ApiKind,
    context: &HeaderContext,
    mut repaired: RepairedJson,
) -> Option<(RepairedJson, openai::ApiRequest)> {
    for _ in 0..MAX_REPAIRS {
        match openai::parse_body(api, context.form_boundary.as_deref(), &repaired.json) {
            Ok(request) => return Some((repaired, request)),
            Err(error) => debug!(%error, "truncated body unreadable"),
        }
        repaired = repaired.drop_innermost()?;
    }
    None
}

/// Returns the request, if its prompt is a prefix of the complete prompt. Parts that precede the
/// prompt or change all of it may follow the truncation: tools, `system`, developer messages,
/// template arguments, effort, documents, and a salt. They are assumed to be absent unless the
/// received part suggests them, because most requests have none. The result therefore does not
/// count as evidence about the engine's tokens.
fn stable_prefix(
    mut request: openai::ApiRequest,
    truncation: &CutPoint,
) -> Option<openai::ApiRequest> {
    let path = match truncation {
        CutPoint::Complete => return Some(request),
        CutPoint::InText(path) | CutPoint::BetweenValues(path) => path,
    };
    let in_prompt = match path.first() {
        Some(first) => is_key(
            first,
            &[
                "messages",
                "prompt",
                "input",
                "text",
                "input_ids",
                "token_ids",
            ],
        ),
        // The truncation is after the prompt, or before it. In the second case, there is no prompt.
        _ => path.is_empty(),
    };
    match &mut request.prompt {
        _ if !in_prompt => return None,
        openai::PromptInput::Chat(chat) => {
            truncate_chat(
                chat,
                matches!(truncation, CutPoint::InText(path) if is_message_text(path)),
            )?;
        }
        openai::PromptInput::Texts(texts) if texts.len() == 1 => {}
        openai::PromptInput::Tokens(tokens) if tokens.len() == 1 => {}
        _ => return None,
    }
    // Truncation at the front depends on the length of the whole prompt.
    request
        .tokenization
        .truncate_prompt_tokens
        .is_none()
        .then_some(request)
}

/// Returns whether the path is the text of a message. Arguments of tool calls are excluded, because
/// they may have any name.
fn is_message_text(path: &[PathSegment]) -> bool {
    let argument = |step: &PathSegment| is_key(step, &["input", "arguments", "tool_calls"]);
    path.last()
        .is_some_and(|step| is_key(step, &["content", "text"]))
        && !path.iter().skip(1).any(argument)
}

/// Drops a partial role, name or id, which would be a different value.
fn without_partial_name(repaired: RepairedJson) -> Option<RepairedJson> {
    const NAMES: [&str; 6] = [
        "role",
        "name",
        "id",
        "tool_call_id",
        "tool_use_id",
        "call_id",
    ];
    let is_partial_name = match &repaired.cut {
        CutPoint::InText(path) => {
            path.len() > 1 && path.last().is_some_and(|step| is_key(step, &NAMES))
        }
        _ => false,
    };
    if is_partial_name {
        repaired.drop_innermost()
    } else {
        Some(repaired)
    }
}

fn is_key(step: &PathSegment, keys: &[&str]) -> bool {
    matches!(step, PathSegment::Key(key) if keys.contains(&key.as_str()))
}

/// Reduces a conversation to a prefix of a longer one.
fn truncate_chat(chat: &mut ChatPrompt, open_text: bool) -> Option<()> {
    let uses_tools = |message: &ChatMessage| message.role == "tool" || message.tool_calls.is_some();
    if chat.tools.is_none() && chat.messages.iter().any(|message| uses_tools(message)) {
        return None;
    }
    // Other APIs have a field for the system prompt, and nearly all requests set it.
    if chat.is_converted
        && chat
            .messages
            .first()
            .is_none_or(|first| first.role != "system")
    {
        return None;
    }
    chat.is_partial = true;
    chat.add_generation_prompt = false;
    chat.continue_final_message = open_text;
    // The truncation may be inside a media item, which changes it. The messages before the item are
    // certain.
    let has_media = |message: &ChatMessage| match &message.content {
        Some(MessageContent::Parts(parts)) => parts
            .iter()
            .any(|part| !matches!(part.meaning(), PartMeaning::Text(_) | PartMeaning::Skipped)),
        _ => false,
    };
    if let Some(first) = chat.messages.iter().position(|message| has_media(message)) {
        chat.messages.truncate(first);
        chat.continue_final_message = false;
    }
    (!chat.messages.is_empty()).then_some(())
}
