//! The running choices of a request. Each choice is a stream of tokens from a rank. It may first
//! fetch its prompt from another engine, or may end only when another engine has fetched its
//! blocks.

use std::sync::Arc;

use futures_util::stream::{self, BoxStream, SelectAll, Stream, StreamExt as _, TryStreamExt as _};
use tokio::sync::oneshot;

use super::SimEngine;
use super::bootstrap::{self, RoomAddress, SequenceTask};
use super::cache::{BlockKeys, TokenSequence};
use super::disaggregation::{KvSource, RequestPhase};
use super::error::OpenAiError;
use super::fetch::{self, ExpectedPrompt};
use super::kv_origin::WorstOrigin;
use super::leases::LeasedBlocks;
use super::rank::{EngineRank, SequenceHandle};
use super::request::GenerationRequest;
use super::scheduler::{RemotePhase, TokenOutput};

/// Stream of tokens, each with the index of its choice.
pub(crate) type ChoiceOutputs =
    SelectAll<BoxStream<'static, Result<(usize, TokenOutput), OpenAiError>>>;

/// The started choices of a request.
pub(crate) struct RunningChoices {
    pub(crate) outputs: ChoiceOutputs,
    /// Receives the description of the blocks held for the first choice. As with vLLM, other
    /// choices are not reported.
    pub(crate) leased: Option<oneshot::Receiver<LeasedBlocks>>,
    /// Worst origin of the keys and values of all choices.
    pub(crate) worst_origin: WorstOrigin,
    /// True if the origin is known only after the fetch.
    pub(crate) fetches: bool,
}

/// A validated request and the data to start its choices.
#[derive(Debug)]
pub(crate) struct ValidatedRequest<'a> {
    pub(crate) request: &'a GenerationRequest,
    pub(crate) phase: &'a RequestPhase,
    pub(crate) keys: &'a BlockKeys,
    pub(crate) prompts: &'a [Vec<u32>],
    pub(crate) response_id: &'a str,
    pub(crate) answer_len: usize,
    pub(crate) worst_origin: WorstOrigin,
}

/// Starts every choice on the given rank.
pub(crate) fn start(
    engine: &Arc<SimEngine>,
    validated: &ValidatedRequest<'_>,
    rank: impl Fn(usize) -> Arc<EngineRank>,
) -> RunningChoices {
    let mut choices = RunningChoices {
        outputs: SelectAll::new(),
        leased: None,
        worst_origin: validated.worst_origin.clone(),
        fetches: matches!(validated.phase, RequestPhase::RemotePrefill(_)),
    };
    let n = validated.request.choices();
    for at in 0..validated.prompts.len() * n {
        let prompt = &validated.prompts[at / n];
        let answer = engine
            .tokenizer
            .answer(prompt, at % n, validated.answer_len);
        let task = SequenceTask {
            index: at,
            sequence: TokenSequence::new(prompt.clone(), validated.keys.clone())
                .with_cache_reading(validated.request.reads_prefix_cache()),
            answer,
        };
        let (tokens, leased) = start_choice(engine, rank(at), validated, task);
        choices
            .outputs
            .push(tokens.map(move |output| Ok((at, output?))).boxed());
        choices.leased = choices.leased.or(leased);
    }
    choices
}

type TokenStream = BoxStream<'static, Result<TokenOutput, OpenAiError>>;

/// Starts one choice; returns its tokens and the receiver for its leased blocks.
fn start_choice(
    engine: &Arc<SimEngine>,
    rank: Arc<EngineRank>,
    validated: &ValidatedRequest<'_>,
    task: SequenceTask,
) -> (TokenStream, Option<oneshot::Receiver<LeasedBlocks>>) {
    let engine = engine.clone();
    match validated.phase {
        RequestPhase::Local => (
            token_stream(rank.submit(task.sequence, task.answer, RemotePhase::None)).boxed(),
            None,
        ),
        RequestPhase::RemoteDecode(request_id) => {
            let name = engine.lease_id(validated.response_id, *request_id).into();
            let remote_phase = RemotePhase::Decode {
                name,
                can_be_aborted: false,
            };
            let mut handle = rank.submit(task.sequence, task.answer, remote_phase);
            let leased = handle.take_leased();
            (token_stream(handle).boxed(), leased)
        }
        RequestPhase::RemotePrefill(source) => (
            fetch_choice(engine, &rank, validated, source.clone(), task),
            None,
        ),
        RequestPhase::BootstrapPrefill(rooms) => {
            let prefill = bootstrap::run_prefill(engine, rank, rooms[task.index], task);
            let outputs = async { Ok(stream::iter(prefill.await?).map(Ok)) };
            (stream::once(outputs).try_flatten().boxed(), None)
        }
        RequestPhase::BootstrapDecode(server, rooms) => {
            let address = RoomAddress {
                server: server.clone(),
                room: rooms[task.index],
            };
            let decode =
                bootstrap::run_decode(engine, rank, address, task, validated.worst_origin.clone());
            (
                stream::once(async { Ok(token_stream(decode.await?)) })
                    .try_flatten()
                    .boxed(),
                None,
            )
        }
    }
}

fn fetch_choice(
    engine: Arc<SimEngine>,
    rank: &Arc<EngineRank>,
    validated: &ValidatedRequest<'_>,
    source: KvSource,
    task: SequenceTask,
) -> TokenStream {
    let choice = task.index % validated.request.choices();
    let prompt = ExpectedPrompt {
        tokens: task.sequence.tokens().to_vec(),
        keys: validated.keys.clone(),
        first: task.answer.first().copied().filter(|_| choice == 0),
        choice,
        answer_len: task.answer.len(),
    };
    let handle = rank.submit(task.sequence, task.answer, RemotePhase::Prefill);
    let worst_origin = validated.worst_origin.clone();
    // With block numbers, the ids of two requests cannot collide.
    let id_guard = source.blocks.is_none().then(|| {
        engine
            .ctx_request_ids
            .acquire(&source.request, &source.engine)
    });
    let fetched = async move {
        let is_collision = id_guard.as_ref().is_some_and(|guard| guard.is_collision);
        let handle = if is_collision {
            fetch::fetch_collided(engine, prompt, handle, worst_origin).await?
        } else {
            fetch::fetch(engine, source, prompt, handle, worst_origin).await?
        };
        Ok(token_stream(handle).inspect(move |_| {
            // The request id stays in use until the last token.
            let _ = &id_guard;
        }))
    };
    stream::once(fetched).try_flatten().boxed()
}

fn token_stream(
    handle: SequenceHandle,
) -> impl Stream<Item = Result<TokenOutput, OpenAiError>> + Send {
    stream::unfold(handle, |mut handle| async {
        Some((Ok(handle.next().await?), handle))
    })
}
