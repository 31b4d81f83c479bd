//! A request under way: from the tokens of its choices to the response, as a document or as a stream.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream::{self, BoxStream, Stream, StreamExt as _};
use serde_json::Value;

use super::Engine;
use super::aborts::Abortable;
use super::answer::{Answer, HandedOver, event};
use super::choices::Choices;
use super::handover::{Protocol, Wishes};
use super::http::Refusal;
use super::origin;
use super::rank::Rank;
use super::scheduler::Output;

/// How often a first token that is kept back looks whether it may go.
const HELD_LOOK: Duration = Duration::from_millis(5);

/// See the module.
pub(crate) struct UnderWay {
    pub(crate) engine: Arc<Engine>,
    pub(crate) rank: Arc<Rank>,
    pub(crate) wishes: Wishes,
    pub(crate) choices: Choices,
    pub(crate) abortable: Abortable,
    pub(crate) answer: Answer,
}

type Outputs = BoxStream<'static, Result<(usize, Output), Refusal>>;

impl UnderWay {
    /// The response as one document.
    pub(crate) async fn document(self) -> Result<Response, Refusal> {
        let Self {
            engine,
            rank,
            wishes,
            choices,
            abortable,
            mut answer,
        } = self;
        let aborted = abortable.aborted.clone();
        let mut outputs = choices
            .outputs
            .take_until(aborted.clone().cancelled_owned())
            .boxed();
        while let Some(output) = outputs.next().await {
            let (at, output) = output?;
            delay_first(&engine, output).await;
            answer.note(at, output);
        }
        if aborted.is_cancelled() && answer.is_empty() {
            return Err(aborted_early());
        }
        let lent = choices.lent.and_then(|mut lent| lent.try_recv().ok());
        let (cached, first) = answer.beginning();
        let faults = engine.mood.faults();
        let protocol = engine.config.handover.protocol();
        if let Some(lent) = lent.as_ref().filter(|_| faults.stop_prefills) {
            answer.stop();
            // vLLM keeps the blocks all the same; with TensorRT-LLM nobody is to come.
            if protocol == Some(Protocol::Trtllm) {
                rank.end_lease(&lent.name);
            }
        }
        let omits = faults.omit_transfer_params;
        let lent = lent.zip(engine.door(&rank)).filter(|_| !omits);
        answer.hand_over(match (protocol, lent) {
            (Some(Protocol::Nixl), Some((lent, door))) => {
                HandedOver::Transfer(door.transfer_params(&lent, cached))
            }
            (Some(Protocol::Nixl), None) => HandedOver::Transfer(Value::Null),
            (Some(Protocol::Trtllm), Some((lent, door))) => {
                HandedOver::Disaggregated(wishes.disaggregated(door, &lent, (rank.number, first)))
            }
            _ => HandedOver::Unheard,
        });
        let told = [(origin::HEADER, choices.worst.word())];
        Ok((told, Json(answer.document())).into_response())
    }

    /// The response as server-sent events. SGLang holds it back until there is a token, so that it can still fail; vLLM
    /// begins at once and tells a failure as an event. Where blocks are still to be fetched, only the events can tell how
    /// that went.
    pub(crate) async fn stream(self) -> Result<Response, Refusal> {
        let Self {
            engine,
            choices,
            abortable,
            answer,
            ..
        } = self;
        let aborted = abortable.aborted.clone().cancelled_owned();
        let mut outputs = choices.outputs.take_until(aborted).boxed();
        let mut is_known = !choices.fetches;
        if engine
            .config
            .handover
            .protocol()
            .is_some_and(Protocol::is_sglang)
        {
            let first = outputs.next().await.ok_or_else(aborted_early)??;
            outputs = stream::iter([Ok(first)]).chain(outputs).boxed();
            is_known = true;
        }
        let content = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")];
        let mut response = (
            content,
            Body::from_stream(events(engine, (outputs, abortable), answer)),
        )
            .into_response();
        if is_known {
            response.headers_mut().insert(
                origin::HEADER,
                HeaderValue::from_static(choices.worst.word()),
            );
        }
        Ok(response)
    }
}

fn aborted_early() -> Refusal {
    Refusal::failed("Aborted by AbortReq.")
}

async fn delay_first(engine: &Engine, output: Output) {
    let slow = engine.mood.faults().slow_first_token_ms;
    if output.is_first && slow > 0 {
        tokio::time::sleep(Duration::from_millis(slow)).await;
    }
    while output.is_first && engine.mood.faults().hold_first_tokens {
        tokio::time::sleep(HELD_LOOK).await;
    }
}

/// The stream of server-sent events. An error in it makes hyper close the connection without the closing chunk, which
/// is how a died engine looks to its client.
fn events(
    engine: Arc<Engine>,
    (outputs, abortable): (Outputs, Abortable),
    answer: Answer,
) -> impl Stream<Item = io::Result<Bytes>> {
    let cut_after = engine.mood.faults().cut_stream_after_tokens;
    let start = Some((outputs, abortable, answer, 0_u64));
    stream::unfold(start, move |state| {
        let engine = engine.clone();
        async move {
            let (mut outputs, abortable, mut answer, sent) = state?;
            if cut_after == Some(sent) {
                return Some((Err(io::Error::other("told to cut the stream")), None));
            }
            let text = match outputs.next().await {
                None => return Some((Ok(Bytes::from(answer.closing())), None)),
                Some(Err(refusal)) => {
                    let text = event(&refusal.error()) + "data: [DONE]\n\n";
                    return Some((Ok(Bytes::from(text)), None));
                }
                Some(Ok((at, output))) => {
                    delay_first(&engine, output).await;
                    answer.chunk(at, output)
                }
            };
            Some((
                Ok(Bytes::from(text)),
                Some((outputs, abortable, answer, sent + 1)),
            ))
        }
    })
}
