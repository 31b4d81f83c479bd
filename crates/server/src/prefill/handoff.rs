//! KV handoff: the body for the prefill worker, and the body for the decode worker with the KV
//! transfer parameters. An engine trusts these parameters: the blocks of another request produce a
//! wrong response with status 200. A handoff therefore belongs to one request, is consumed by it,
//! cannot be cloned, and leaves this module only as a finished body.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use thiserror::Error;
use warmroute_tokens::openai::json_edit::{self, FieldEdit};
use warmroute_tokens::openai::usage::TokenUsage;
use warmroute_tokens::openai::{self, ApiKind};

use super::config::KvTransferProtocol;

/// vLLM's instruction to keep the KV of this prompt until a decode worker fetches it.
const REMOTE_DECODE: &[u8] = br#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

const CONTEXT_ONLY: &[u8] = br#"{"request_type":"context_only"}"#;

const KV_TRANSFER: &str = "kv_transfer_params";
const DISAGGREGATED: &str = "disaggregated_params";

/// vLLM's field for arbitrary arguments, which the engine merges with its own.
const EXTRA_ARGS: &str = "vllm_xargs";

/// Fields that select the KV to transfer and the rank that fetches it. Clients must not set them,
/// because they give access to the KV of other clients.
const KV_FIELDS: [&str; 11] = [
    KV_TRANSFER,
    "ec_transfer_params",
    DISAGGREGATED,
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "disagg_prefill_dp_rank",
    "disagg_transfer_id",
    "routed_dp_rank",
    "data_parallel_rank",
];

/// Reason why a request cannot be split between two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SplitError {
    /// Engines support the handoff only for chats and completions.
    #[error("no engine hands over requests of its API")]
    Api,
    /// The body was not received, or is not a JSON object.
    #[error("its body cannot be changed")]
    Body,
    /// One prefill cannot serve several responses or prompts.
    #[error("it requests several outputs")]
    MultipleChoices,
    /// The limit of the prompt depends on the output length, which differs between the two phases.
    #[error("its prompt is truncated to the context length")]
    TruncatedPrompt,
    /// The response includes data of the prompt, which the decode worker does not compute.
    #[error("its response includes data of the prompt")]
    ReportsPrompt,
}

/// Error of a handoff.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum HandoffError {
    /// The response has no KV transfer parameters: the output ended with its first token, or the
    /// engine keeps no KV.
    #[error("the prefill worker returned no KV transfer parameters")]
    NoParams,
    /// The parameters are unreadable.
    #[error("the response of the prefill worker is unreadable")]
    Unreadable,
    /// The response belongs to another request.
    #[error("the response belongs to another request")]
    OtherRequest,
}

impl HandoffError {
    /// Returns the metric label.
    pub fn label(self) -> &'static str {
        match self {
            HandoffError::NoParams => "no_handoff",
            HandoffError::Unreadable => "unreadable",
            HandoffError::OtherRequest => "other_request",
        }
    }
}

/// Number that ties a response to its request.
#[derive(Debug, PartialEq, Eq)]
struct HandoffNumber(u64);

impl HandoffNumber {
    fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Body of a prefill call.
#[derive(Debug)]
pub struct PrefillBody {
    body: Bytes,
    number: HandoffNumber,
}

impl PrefillBody {
    /// Creates a body whose response is not handed over.
    pub fn without_handoff(body: Bytes) -> Self {
        Self {
            body,
            number: HandoffNumber::next(),
        }
    }

    /// Returns the body, and a function that ties the response to it.
    pub(super) fn into_parts(self) -> (Bytes, impl FnOnce(Bytes) -> PrefillResponse) {
        let number = self.number;
        (self.body, |body| PrefillResponse { body, number })
    }
}

/// Response of a prefill worker. It exists once, belongs to one request, and is consumed by it:
///
/// ```compile_fail
/// fn twice(
///     response: warmroute::prefill::PrefillResponse,
/// ) -> [warmroute::prefill::PrefillResponse; 2] {
///     [response.clone(), response]
/// }
/// ```
#[derive(Debug)]
pub struct PrefillResponse {
    body: Bytes,
    number: HandoffNumber,
}

impl PrefillResponse {
    /// Returns the response body, for reading only.
    pub(crate) fn body(&self) -> &[u8] {
        &self.body
    }

    /// Returns the usage that the prefill worker reports; `None` if it reports no prompt tokens.
    pub(super) fn usage(&self) -> Option<TokenUsage> {
        TokenUsage::from_document(self.body()).filter(|usage| usage.prompt_tokens > 0)
    }
}

/// One request that is split between two workers. It is created from the request's body, and
/// consumed to create the body for the decode worker. It cannot be cloned:
///
/// ```compile_fail
/// fn twice(handoff: warmroute::prefill::KvHandoff) -> [warmroute::prefill::KvHandoff; 2] {
///     [handoff.clone(), handoff]
/// }
/// ```
///
/// It cannot be used twice either:
///
/// ```compile_fail
/// fn reuse(
///     handoff: warmroute::prefill::KvHandoff,
///     responses: [warmroute::prefill::PrefillResponse; 2],
/// ) {
///     let [one, other] = responses;
///     let _ = handoff.decode_body(one);
///     let _ = handoff.decode_body(other);
/// }
/// ```
#[derive(Debug)]
pub struct KvHandoff {
    api: ApiKind,
    protocol: KvTransferProtocol,
    body: Bytes,
    number: HandoffNumber,
}

impl KvHandoff {
    /// Creates the handoff of a request that can be split.
    pub fn new(
        api: Option<ApiKind>,
        protocol: KvTransferProtocol,
        body: &Bytes,
    ) -> Result<Self, SplitError> {
        let api = api
            .filter(|api| matches!(api, ApiKind::ChatCompletions | ApiKind::Completions))
            .ok_or(SplitError::Api)?;
        check_splittable(body)?;
        Ok(Self {
            api,
            protocol,
            body: body.clone(),
            number: HandoffNumber::next(),
        })
    }

    /// Returns the engine's path for the request.
    pub fn path(&self) -> &'static str {
        engine_path(self.api)
    }

    /// Returns the body for the prefill worker: the same prompt, one output token, no stream.
    pub fn prefill_body(&self) -> Option<PrefillBody> {
        let (field, instruction) = match self.protocol {
            KvTransferProtocol::Vllm => (KV_TRANSFER, REMOTE_DECODE),
            KvTransferProtocol::Trtllm => (DISAGGREGATED, CONTEXT_ONLY),
        };
        let mut changes = vec![
            FieldEdit::set("max_tokens", b"1"),
            FieldEdit::set("stream", b"false"),
            FieldEdit::set(field, instruction),
            // Engines reject both next to the fields above.
            FieldEdit::replace("stream_options", b"null"),
            FieldEdit::replace("min_tokens", b"0"),
        ];
        if self.api == ApiKind::ChatCompletions {
            changes.push(FieldEdit::set("max_completion_tokens", b"1"));
        }
        Some(PrefillBody {
            body: json_edit::apply_edits(&self.body, &changes)?.into(),
            number: HandoffNumber(self.number.0),
        })
    }

    /// Returns the body for the decode worker: the request, with the KV transfer parameters of the
    /// response, byte for byte.
    pub fn decode_body(self, response: PrefillResponse) -> Result<Bytes, HandoffError> {
        let PrefillResponse {
            body: answer,
            number,
        } = response;
        if number != self.number {
            return Err(HandoffError::OtherRequest);
        }
        let (field, params) = match self.protocol {
            KvTransferProtocol::Vllm => (KV_TRANSFER, transfer_params(&answer)?.to_vec()),
            KvTransferProtocol::Trtllm => (DISAGGREGATED, disaggregated_params(&answer)?),
        };
        let body =
            json_edit::set_field(&self.body, field, &params).ok_or(HandoffError::Unreadable)?;
        Ok(body.into())
    }
}

/// Returns the engine's path for requests that can be split, without the gateway's prefix.
pub(super) fn engine_path(api: ApiKind) -> &'static str {
    match api {
        ApiKind::Completions => "/v1/completions",
        ApiKind::SglangGenerate => "/generate",
        _ => "/v1/chat/completions",
    }
}

/// Checks whether two workers can share a request.
fn check_splittable(body: &[u8]) -> Result<(), SplitError> {
    const KEYS: [&str; 10] = [
        "n",
        "best_of",
        "use_beam_search",
        "prompt",
        "text",
        "input_ids",
        "echo",
        "prompt_logprobs",
        "prompt_embeds",
        "truncate_prompt_tokens",
    ];
    let found = json_edit::find_values(body, &KEYS).ok_or(SplitError::Body)?;
    for (index, json) in found {
        match KEYS[index] {
            _ if json == b"null" => {}
            "n" | "best_of" if json != b"1" => return Err(SplitError::MultipleChoices),
            "use_beam_search" if json != b"false" => return Err(SplitError::MultipleChoices),
            "prompt" | "text" | "input_ids" if count_prompts(json) != 1 => {
                return Err(SplitError::MultipleChoices);
            }
            // Embeddings count as a further prompt.
            "prompt_embeds" => return Err(SplitError::MultipleChoices),
            // A negative limit depends on the output length.
            "truncate_prompt_tokens" if json.first() == Some(&b'-') => {
                return Err(SplitError::TruncatedPrompt);
            }
            "echo" if json != b"false" => return Err(SplitError::ReportsPrompt),
            "prompt_logprobs" => return Err(SplitError::ReportsPrompt),
            _ => {}
        }
    }
    Ok(())
}

/// Returns the number of prompts in a field: a text, the tokens of one prompt, or a list of either.
pub(super) fn count_prompts(json: &[u8]) -> usize {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum PromptItem {
        Token(#[expect(dead_code, reason = "only the variant is used")] u64),
        Other(IgnoredAny),
    }
    match json.first() {
        Some(b'"') => 1,
        Some(b'[') => match serde_json::from_slice::<Vec<PromptItem>>(json) {
            Ok(items)
                if items
                    .iter()
                    .all(|item| matches!(item, PromptItem::Token(_))) =>
            {
                1
            }
            Ok(items) => items.len(),
            Err(_) => 0,
        },
        _ => 0,
    }
}

fn transfer_params(answer: &[u8]) -> Result<&[u8], HandoffError> {
    let found = json_edit::find_values(answer, &[KV_TRANSFER]).ok_or(HandoffError::Unreadable)?;
    match found[..] {
        [] | [(_, b"null")] => Err(HandoffError::NoParams),
        [(_, params)] if params.starts_with(b"{") => Ok(params),
        // The engine's choice among several fields is unknown.
        _ => Err(HandoffError::Unreadable),
    }
}

/// Returns TensorRT-LLM's parameters from the choice, with the request type of the decode phase.
fn disaggregated_params(answer: &[u8]) -> Result<Vec<u8>, HandoffError> {
    #[derive(Deserialize)]
    struct TrtllmResponse<'a> {
        #[serde(borrow)]
        choices: Vec<TrtllmChoice<'a>>,
    }
    #[derive(Deserialize)]
    struct TrtllmChoice<'a> {
        #[serde(borrow, default)]
        disaggregated_params: Option<&'a RawValue>,
        #[serde(borrow, default)]
        finish_reason: Option<Cow<'a, str>>,
    }
    let answer: TrtllmResponse<'_> =
        serde_json::from_slice(answer).map_err(|_| HandoffError::Unreadable)?;
    let [
        TrtllmChoice {
            disaggregated_params,
            finish_reason,
        },
    ] = &answer.choices[..]
    else {
        return Err(HandoffError::Unreadable);
    };
    // An output that ended with its first token must not continue. The decode worker computes the
    // same end.
    if finish_reason
        .as_deref()
        .is_some_and(|reason| !matches!(reason, "length" | "not_finished"))
    {
        return Err(HandoffError::NoParams);
    }
    let params = disaggregated_params
        .ok_or(HandoffError::NoParams)?
        .get()
        .as_bytes();
    let ids =
        json_edit::find_values(params, &["ctx_request_id"]).ok_or(HandoffError::Unreadable)?;
    match ids[..] {
        [(_, id)] if id != b"null" => {}
        _ => return Err(HandoffError::NoParams),
    }
    json_edit::set_field(params, "request_type", br#""generation_only""#)
        .ok_or(HandoffError::Unreadable)
}

/// Result of removing the KV transfer fields from a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StrippedBody {
    /// The body has none.
    Unchanged,
    /// The body without them.
    Changed(Bytes),
    /// The body is ambiguous or unreadable.
    Unreadable,
}

/// Removes the KV transfer fields that a client has set.
pub fn strip_kv_fields(body: &[u8]) -> StrippedBody {
    let keys: Vec<&str> = KV_FIELDS.into_iter().chain([EXTRA_ARGS]).collect();
    let Ok(body) = &openai::decode_body(body) else {
        return StrippedBody::Unreadable;
    };
    let Some(fields) = json_edit::find_values(body, &keys) else {
        return StrippedBody::Unreadable;
    };
    let is_forged = |(index, json): &(usize, &[u8])| match keys[*index] {
        EXTRA_ARGS => {
            json_edit::find_values(json, &KV_FIELDS).is_none_or(|inside| !inside.is_empty())
        }
        _ => true,
    };
    let forged: Vec<usize> = fields
        .iter()
        .filter(|(_, json)| *json != b"null")
        .filter(|field| is_forged(field))
        .map(|(index, _)| *index)
        .collect();
    if forged.is_empty() {
        return StrippedBody::Unchanged;
    }
    let changes: Vec<FieldEdit<'_>> = keys
        .iter()
        .enumerate()
        .filter(|(index, _)| forged.contains(index))
        .map(|(_, key)| FieldEdit::replace(key, b"null"))
        .collect();
    json_edit::apply_edits(body, &changes).map_or(StrippedBody::Unreadable, |body| {
        StrippedBody::Changed(body.into())
    })
}

#[cfg(test)]
mod tests;
