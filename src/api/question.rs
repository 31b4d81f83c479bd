//! From a call to a question for the router. A caller is trusted, but checked: what makes no sense is refused here, by
//! name, before anything is looked up.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use serde::Deserialize;

use super::fault::Fault;
use super::pb;
use crate::block::{BlockHashes, LocalHash, SequenceHash};
use crate::entrance::SessionWord;
use crate::intake::{Body, Intake, Named};
use crate::load::ledger::Attempt;
use crate::router::{Priority, Prompt, Reason, RouteRequest};
use crate::schedule::{Overrides, Pin};
use crate::worker::{DpRank, WorkerId, WorkerRank};

/// Longest id of a request, in bytes.
const LONGEST_ID: usize = 512;

/// A question, read.
pub(super) struct Asked {
    pub(super) request: RouteRequest,
    /// What a body says of its session.
    pub(super) session: Option<SessionWord>,
    /// The tokens of each prompt, where they are known.
    pub(super) tokens: Vec<Vec<u32>>,
}

/// How questions are read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Most blocks of a prompt. Each is looked up several times while others wait.
    pub(super) most_blocks: usize,
    /// Whether the cache that all workers share is asked as well.
    pub(super) shared: bool,
}

impl Shape {
    fn bound(self, blocks: usize) -> Result<(), Fault> {
        let most = self.most_blocks;
        let text = || format!("the prompt has {blocks} blocks; `api.most_blocks` allows {most}");
        if blocks > most {
            Err(Fault::Argument(text()))
        } else {
            Ok(())
        }
    }
}

/// The model, as a body names it.
#[derive(Deserialize)]
struct Naming {
    model: Option<String>,
}

/// Reads a prompt and what belongs to it.
pub(super) async fn read(
    intake: &Arc<Intake>,
    question: Option<pb::Question>,
    shape: Shape,
) -> Result<Asked, Fault> {
    let Some(mut question) = question else {
        return Err(Fault::argument("the question is missing"));
    };
    let prompt = question
        .prompt
        .take()
        .ok_or_else(|| Fault::argument("the question has no prompt"))?;
    let mut asked = match prompt {
        pb::question::Prompt::Body(body) => return of_body(intake, &question, body, shape).await,
        pb::question::Prompt::Tokens(tokens) => of_tokens(intake, question, tokens.ids, shape)?,
        pb::question::Prompt::Blocks(blocks) => of_blocks(intake, &question, blocks, shape)?,
    };
    intake.ask_others(&mut asked.request, shape.shared).await;
    Ok(asked)
}

async fn of_body(
    intake: &Arc<Intake>,
    question: &pb::Question,
    body: pb::Body,
    shape: Shape,
) -> Result<Asked, Fault> {
    if [&question.model, &question.adapter, &question.cache_salt]
        .into_iter()
        .any(|text| !text.is_empty())
    {
        return Err(Fault::argument(
            "a body names its own model, adapter and cache salt; leave the others out",
        ));
    }
    let mut headers = body.headers;
    headers = headers
        .into_iter()
        .map(|(name, value)| (name.to_ascii_lowercase(), value))
        .collect();
    let find = |name: &str| headers.get(name).map(|value| Cow::Borrowed(value.as_str()));
    let json = Bytes::from(body.json);
    let taken = intake
        .take(&body.path, &find, &Body::Whole(json.clone()))
        .await;
    if let Prompt::Estimated { because, .. } = &taken.request.prompt {
        match because {
            // Envoy would have forwarded these somewhere; a caller who asks for a choice is better told.
            Reason::NotInference | Reason::NoBody | Reason::Unreadable => {
                return Err(Fault::Body(*because));
            }
            Reason::UnknownModel => {
                let naming = serde_json::from_slice::<Naming>(&json)
                    .ok()
                    .and_then(|naming| naming.model);
                return Err(naming.map_or_else(unnamed, Fault::UnknownModel));
            }
            _ => {}
        }
    }
    shape.bound(
        taken
            .request
            .prompt
            .blocks()
            .iter()
            .map(BlockHashes::len)
            .sum(),
    )?;
    Ok(Asked {
        request: taken.request,
        session: taken.session,
        tokens: taken.tokens,
    })
}

fn of_tokens(
    intake: &Arc<Intake>,
    question: pb::Question,
    tokens: Vec<u32>,
    shape: Shape,
) -> Result<Asked, Fault> {
    if tokens.is_empty() {
        return Err(Fault::argument("the prompt has no tokens"));
    }
    let named = named(intake, &question)?;
    shape.bound(tokens.len() / named.model.block_size.tokens())?;
    let salt = Some(question.cache_salt).filter(|salt| !salt.is_empty());
    let request = intake.take_tokens(&named, tokens.clone(), salt);
    Ok(Asked {
        request,
        session: None,
        tokens: vec![tokens],
    })
}

fn of_blocks(
    intake: &Arc<Intake>,
    question: &pb::Question,
    blocks: pb::BlockHashes,
    shape: Shape,
) -> Result<Asked, Fault> {
    if !question.cache_salt.is_empty() {
        return Err(Fault::argument(
            "block hashes contain the cache salt; leave `cache_salt` out",
        ));
    }
    let named = named(intake, question)?;
    let size = named.model.block_size;
    let (count, names) = (blocks.local_hashes.len(), blocks.sequence_hashes.len());
    if names != 0 && names != count {
        return Err(Fault::argument(format!(
            "there are {count} local hashes but {names} sequence hashes"
        )));
    }
    shape.bound(count)?;
    let tokens = usize::try_from(blocks.isl_tokens).unwrap_or(usize::MAX);
    if tokens == 0 || tokens / size.tokens() < count {
        let text = format!(
            "{count} blocks of {size} tokens do not fit into isl_tokens {tokens}",
            size = size.tokens()
        );
        return Err(Fault::argument(text));
    }
    let locals = blocks.local_hashes.into_iter().map(LocalHash).collect();
    let hashes = BlockHashes::chain(tokens, size, locals);
    let mut request =
        RouteRequest::new(Some(named.model.name.clone()), Prompt::Hashed(vec![hashes]));
    request.constraints.adapter = named.adapter;
    if names != 0 {
        request.tracked = Some(vec![
            blocks
                .sequence_hashes
                .into_iter()
                .map(SequenceHash)
                .collect(),
        ]);
    }
    Ok(Asked {
        request,
        session: None,
        tokens: Vec::new(),
    })
}

fn named(intake: &Intake, question: &pb::Question) -> Result<Named, Fault> {
    let name = Some(question.model.as_str()).filter(|name| !name.is_empty());
    let mut named = intake.named(name).ok_or_else(|| match name {
        Some(name) => Fault::UnknownModel(name.to_owned()),
        None => unnamed(),
    })?;
    if !question.adapter.is_empty() {
        named.adapter = Some(question.adapter.clone());
    }
    Ok(named)
}

fn unnamed() -> Fault {
    Fault::argument("several models are configured; name one")
}

/// Enters what the caller wishes. What is not set stays as it is.
pub(super) fn wish(request: &mut RouteRequest, wishes: pb::Wishes) -> Result<(), Fault> {
    let constraints = &mut request.constraints;
    constraints.pin = wishes.pin.map(pin).or(constraints.pin);
    request.prefill_pin = wishes.prefill_pin.map(pin).or(request.prefill_pin);
    if let Some(allowed) = wishes.allowed_workers {
        constraints.allowed = Some(allowed.ids.into_iter().map(WorkerId).collect());
    }
    if !wishes.required_taints.is_empty() {
        constraints.required_taints = wishes.required_taints.into_iter().collect();
    }
    if let Some((taint, weight)) = wishes
        .preferred_taints
        .iter()
        .find(|(_, weight)| !weight.is_finite())
    {
        return Err(Fault::argument(format!(
            "the weight of the taint `{taint}` is {weight}; give a finite number"
        )));
    }
    if !wishes.preferred_taints.is_empty() {
        constraints.preferred_taints = BTreeMap::from_iter(wishes.preferred_taints);
    }
    if let Some(priority) = wishes.priority {
        request.priority = read_priority(priority)?;
    }
    apply_overrides(request, wishes.overrides.as_ref())?;
    request.expected_output_tokens = wishes
        .expected_output_tokens
        .or(request.expected_output_tokens);
    Ok(())
}

fn pin(pin: pb::Pin) -> Pin {
    Pin {
        worker: WorkerId(pin.worker_id),
        rank: pin.dp_rank.map(DpRank),
    }
}

fn read_priority(priority: pb::Priority) -> Result<Priority, Fault> {
    let pb::Priority {
        strict,
        jump,
        class,
    } = priority;
    if !(jump.is_finite() && jump >= 0.0) {
        return Err(Fault::argument(format!(
            "the priority jump is {jump}; give seconds, 0 or more"
        )));
    }
    Ok(Priority {
        strict: strict.into(),
        jump,
        class: Some(class).filter(|class| !class.is_empty()),
    })
}

/// Applies the overrides of this request, if there are any.
pub(super) fn apply_overrides(
    request: &mut RouteRequest,
    overrides: Option<&pb::Overrides>,
) -> Result<(), Fault> {
    let Some(overrides) = overrides else {
        return Ok(());
    };
    override_weights(&mut request.overrides, overrides);
    request
        .overrides
        .validate()
        .map_err(|(name, text)| Fault::argument(format!("`{name}` {text}")))
}

fn override_weights(overrides: &mut Overrides, set: &pb::Overrides) {
    *overrides = Overrides {
        overlap_score_credit: set.overlap_score_credit.or(overrides.overlap_score_credit),
        prefill_load_scale: set.prefill_load_scale.or(overrides.prefill_load_scale),
        router_temperature: set.router_temperature.or(overrides.router_temperature),
        shared_cache_multiplier: set
            .shared_cache_multiplier
            .or(overrides.shared_cache_multiplier),
        assume_kv_reuse: set.assume_kv_reuse.or(overrides.assume_kv_reuse),
        track_prefill_tokens: set.track_prefill_tokens.or(overrides.track_prefill_tokens),
        overlap_score_weight: overrides.overlap_score_weight,
    };
}

/// Reads a session.
pub(super) fn session(session: pb::Session) -> Result<SessionWord, Fault> {
    let pb::Session { id, parent, last } = session;
    if id.is_empty() {
        return Err(Fault::argument("the session has no id"));
    }
    let parent = Some(parent).filter(|parent| !parent.is_empty());
    Ok(SessionWord {
        id,
        parent,
        tenant: None,
        last,
        idle: None,
    })
}

/// Reads the name of an attempt.
pub(super) fn attempt(attempt: Option<&pb::Attempt>) -> Result<Attempt<'_>, Fault> {
    match attempt {
        None => Err(Fault::argument("the attempt is missing")),
        Some(attempt) if attempt.id.is_empty() => {
            Err(Fault::argument("the id of the request is empty"))
        }
        Some(attempt) if attempt.id.len() > LONGEST_ID => {
            let text = format!(
                "the id of the request has {} bytes; at most {LONGEST_ID} will do",
                attempt.id.len()
            );
            Err(Fault::Argument(text))
        }
        Some(attempt) => Ok(Attempt {
            request: &attempt.id,
            number: attempt.number,
        }),
    }
}

/// Reads an HTTP status.
pub(super) fn status(status: u32) -> Result<u16, Fault> {
    let known = u16::try_from(status)
        .ok()
        .filter(|status| (100..600).contains(status));
    known.ok_or_else(|| Fault::Argument(format!("{status} is no HTTP status; give 100 to 599")))
}

/// Reads the name of a worker rank.
pub(super) fn rank(rank: Option<pb::WorkerRank>) -> Result<WorkerRank, Fault> {
    let rank = rank.ok_or_else(|| Fault::argument("the worker rank is missing"))?;
    Ok(WorkerRank {
        worker: WorkerId(rank.worker_id),
        rank: DpRank(rank.dp_rank),
    })
}
