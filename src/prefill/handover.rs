//! What the prefill worker is asked, and how its answer becomes part of what the decode worker is asked. An engine believes
//! whatever it is handed: the blocks of another request are a wrong answer with status 200. So a handover is made of one
//! request and used up by it, cannot be copied, and never leaves this module but as the body it was put into.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use thiserror::Error;

use super::config::Protocol;
use crate::openai::Api;
use crate::openai::edit::{self, Change};

/// What the field of a request means to vLLM: keep the KV of this prompt for somebody who will fetch it.
const REMOTE_DECODE: &[u8] = br#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

const CONTEXT_ONLY: &[u8] = br#"{"request_type":"context_only"}"#;

const KV_TRANSFER: &str = "kv_transfer_params";
const DISAGGREGATED: &str = "disaggregated_params";

/// Where vLLM's clients may put anything, which the engine then finds among its own.
const EXTRA: &str = "vllm_xargs";

/// Fields by which engines are told whose KV to take, and which rank shall look for it. From a client they would be a way
/// to another client's.
const HANDOVERS: [&str; 11] = [
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

/// Why a request is not for two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Unfit {
    /// Engines hand over for chats and completions only.
    #[error("its API is handed over by no engine")]
    Api,
    /// Its body was not shown, or is no JSON object.
    #[error("its body cannot be changed")]
    Body,
    /// One prefill for several answers or prompts.
    #[error("it asks for several answers")]
    Several,
    /// Its prompt is cut, for one token more than for its answer.
    #[error("its prompt is cut to what the engine can take")]
    Cut,
    /// The answer tells of the prompt, which the decode worker does not compute.
    #[error("its answer tells of the prompt")]
    TellsPrompt,
}

/// Why the decode worker has nothing to take over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NotHandedOver {
    /// The prefill worker said nothing of it: the answer ended with its first token, or the engine keeps nothing.
    #[error("the prefill worker handed nothing over")]
    Nothing,
    /// What it said cannot be read.
    #[error("what the prefill worker said cannot be read")]
    Unreadable,
    /// It is the answer to another request.
    #[error("the answer belongs to another request")]
    Others,
}

impl NotHandedOver {
    /// The name in metrics.
    pub fn label(self) -> &'static str {
        match self {
            NotHandedOver::Nothing => "nothing_handed_over",
            NotHandedOver::Unreadable => "unreadable",
            NotHandedOver::Others => "others",
        }
    }
}

/// Which request something belongs to.
#[derive(Debug, PartialEq, Eq)]
struct Number(u64);

impl Number {
    fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// What a prefill worker is asked.
#[derive(Debug)]
pub struct Question {
    body: Bytes,
    of: Number,
}

impl Question {
    /// A question whose answer nobody takes over.
    pub fn alone(body: Bytes) -> Self {
        Self {
            body,
            of: Number::next(),
        }
    }

    /// The body, and what makes its answer the answer to it.
    pub(super) fn send(self) -> (Bytes, Pending) {
        (self.body, Pending { of: self.of })
    }
}

/// A question on its way.
#[derive(Debug)]
pub(super) struct Pending {
    of: Number,
}

impl Pending {
    /// Its answer.
    pub(super) fn answered(self, answer: Bytes) -> HandedOver {
        HandedOver {
            answer,
            of: self.of,
        }
    }
}

/// What a prefill worker answered: there is one of it, for one request, and it is gone when that has taken it over.
///
/// ```compile_fail
/// fn twice(handed: warmroute::prefill::HandedOver) -> [warmroute::prefill::HandedOver; 2] {
///     [handed.clone(), handed]
/// }
/// ```
#[derive(Debug)]
pub struct HandedOver {
    answer: Bytes,
    of: Number,
}

impl HandedOver {
    /// The response, to be read only.
    pub(crate) fn body(&self) -> &[u8] {
        &self.answer
    }
}

/// One request on its way through two workers. It is made of the request's body and ends as the body that the decode worker
/// gets. It cannot be copied:
///
/// ```compile_fail
/// fn twice(handing: warmroute::prefill::Handing) -> [warmroute::prefill::Handing; 2] {
///     [handing.clone(), handing]
/// }
/// ```
///
/// nor used again:
///
/// ```compile_fail
/// fn again(handing: warmroute::prefill::Handing, answers: [warmroute::prefill::HandedOver; 2]) {
///     let [one, other] = answers;
///     let _ = handing.decode_body(one);
///     let _ = handing.decode_body(other);
/// }
/// ```
#[derive(Debug)]
pub struct Handing {
    api: Api,
    protocol: Protocol,
    body: Bytes,
    number: Number,
}

impl Handing {
    /// A request that can be handed over.
    pub fn new(api: Option<Api>, protocol: Protocol, body: &Bytes) -> Result<Self, Unfit> {
        let api = api
            .filter(|api| matches!(api, Api::ChatCompletions | Api::Completions))
            .ok_or(Unfit::Api)?;
        fit(body)?;
        Ok(Self {
            api,
            protocol,
            body: body.clone(),
            number: Number::next(),
        })
    }

    /// The engine's own path for it.
    pub fn path(&self) -> &'static str {
        path(self.api)
    }

    /// What the prefill worker is asked: the same prompt, one token, in one piece.
    pub fn question(&self) -> Option<Question> {
        let (field, asked) = match self.protocol {
            Protocol::Vllm => (KV_TRANSFER, REMOTE_DECODE),
            Protocol::Trtllm => (DISAGGREGATED, CONTEXT_ONLY),
        };
        let mut changes = vec![
            Change::set("max_tokens", b"1"),
            Change::set("stream", b"false"),
            Change::set(field, asked),
            // Both are refused beside the three above.
            Change::replace("stream_options", b"null"),
            Change::replace("min_tokens", b"0"),
        ];
        if self.api == Api::ChatCompletions {
            changes.push(Change::set("max_completion_tokens", b"1"));
        }
        Some(Question {
            body: edit::change(&self.body, &changes)?.into(),
            of: Number(self.number.0),
        })
    }

    /// What the decode worker is asked, given what the prefill worker answered: the request as it came, and what it takes
    /// over, byte for byte.
    pub fn decode_body(
        self,
        HandedOver { answer, of }: HandedOver,
    ) -> Result<Bytes, NotHandedOver> {
        if of != self.number {
            return Err(NotHandedOver::Others);
        }
        let (field, taken_over) = match self.protocol {
            Protocol::Vllm => (KV_TRANSFER, transfer_params(&answer)?.to_vec()),
            Protocol::Trtllm => (DISAGGREGATED, disaggregated_params(&answer)?),
        };
        let body =
            edit::set_field(&self.body, field, &taken_over).ok_or(NotHandedOver::Unreadable)?;
        Ok(body.into())
    }
}

/// The engine's own path for requests that can be divided, whatever stands before it at the gateway.
pub fn path(api: Api) -> &'static str {
    match api {
        Api::Completions => "/v1/completions",
        Api::SglangGenerate => "/generate",
        _ => "/v1/chat/completions",
    }
}

/// Whether two workers can share a request.
fn fit(body: &[u8]) -> Result<(), Unfit> {
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
    let found = edit::look(body, &KEYS).ok_or(Unfit::Body)?;
    for (of, json) in found {
        match KEYS[of] {
            _ if json == b"null" => {}
            "n" | "best_of" if json != b"1" => return Err(Unfit::Several),
            "use_beam_search" if json != b"false" => return Err(Unfit::Several),
            "prompt" | "text" | "input_ids" if prompts(json) != 1 => return Err(Unfit::Several),
            // It is one prompt more.
            "prompt_embeds" => return Err(Unfit::Several),
            // How long the prompt may be then depends on how long the answer may be.
            "truncate_prompt_tokens" if json.first() == Some(&b'-') => return Err(Unfit::Cut),
            "echo" if json != b"false" => return Err(Unfit::TellsPrompt),
            "prompt_logprobs" => return Err(Unfit::TellsPrompt),
            _ => {}
        }
    }
    Ok(())
}

/// How many prompts stand in a field: a text, the tokens of one, or a list of either.
pub(super) fn prompts(json: &[u8]) -> usize {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Item {
        Token(#[expect(dead_code, reason = "only what it is matters")] u64),
        Other(IgnoredAny),
    }
    match json.first() {
        Some(b'"') => 1,
        Some(b'[') => match serde_json::from_slice::<Vec<Item>>(json) {
            Ok(items) if items.iter().all(|item| matches!(item, Item::Token(_))) => 1,
            Ok(items) => items.len(),
            Err(_) => 0,
        },
        _ => 0,
    }
}

fn transfer_params(answer: &[u8]) -> Result<&[u8], NotHandedOver> {
    let found = edit::look(answer, &[KV_TRANSFER]).ok_or(NotHandedOver::Unreadable)?;
    match found[..] {
        [] | [(_, b"null")] => Err(NotHandedOver::Nothing),
        [(_, params)] if params.starts_with(b"{") => Ok(params),
        // Which of several the engine means nobody knows.
        _ => Err(NotHandedOver::Unreadable),
    }
}

/// TensorRT-LLM's parameters stand in the choice, and are handed on as those of the other phase.
fn disaggregated_params(answer: &[u8]) -> Result<Vec<u8>, NotHandedOver> {
    #[derive(Deserialize)]
    struct Answer<'a> {
        #[serde(borrow)]
        choices: Vec<Choice<'a>>,
    }
    #[derive(Deserialize)]
    struct Choice<'a> {
        #[serde(borrow, default)]
        disaggregated_params: Option<&'a RawValue>,
        #[serde(borrow, default)]
        finish_reason: Option<Cow<'a, str>>,
    }
    let answer: Answer<'_> =
        serde_json::from_slice(answer).map_err(|_| NotHandedOver::Unreadable)?;
    let [
        Choice {
            disaggregated_params,
            finish_reason,
        },
    ] = &answer.choices[..]
    else {
        return Err(NotHandedOver::Unreadable);
    };
    // An answer that is over with its first token must not go on; whoever decodes finds its end for himself.
    if finish_reason
        .as_deref()
        .is_some_and(|reason| !matches!(reason, "length" | "not_finished"))
    {
        return Err(NotHandedOver::Nothing);
    }
    let params = disaggregated_params
        .ok_or(NotHandedOver::Nothing)?
        .get()
        .as_bytes();
    let named = edit::look(params, &["ctx_request_id"]).ok_or(NotHandedOver::Unreadable)?;
    match named[..] {
        [(_, id)] if id != b"null" => {}
        _ => return Err(NotHandedOver::Nothing),
    }
    edit::set_field(params, "request_type", br#""generation_only""#)
        .ok_or(NotHandedOver::Unreadable)
}

/// What became of a body from which everything was to be taken that a client says of KV to take over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cleaned {
    /// It says nothing of that kind.
    Clean,
    /// It says nothing of that kind any longer.
    Changed(Bytes),
    /// It cannot be read as engines may read it.
    Unreadable,
}

/// Takes out what a client says of KV to take over.
pub fn clean(body: &[u8]) -> Cleaned {
    let keys: Vec<&str> = HANDOVERS.into_iter().chain([EXTRA]).collect();
    let Some(said) = edit::look(body, &keys) else {
        return Cleaned::Unreadable;
    };
    let forged = |(of, json): &(usize, &[u8])| match keys[*of] {
        EXTRA => edit::look(json, &HANDOVERS).is_none_or(|inside| !inside.is_empty()),
        _ => true,
    };
    let forged: Vec<usize> = said
        .iter()
        .filter(|(_, json)| *json != b"null")
        .filter(|said| forged(said))
        .map(|(of, _)| *of)
        .collect();
    if forged.is_empty() {
        return Cleaned::Clean;
    }
    let changes: Vec<Change<'_>> = keys
        .iter()
        .enumerate()
        .filter(|(of, _)| forged.contains(of))
        .map(|(_, key)| Change::replace(key, b"null"))
        .collect();
    edit::change(body, &changes).map_or(Cleaned::Unreadable, |body| Cleaned::Changed(body.into()))
}

#[cfg(test)]
mod tests;
