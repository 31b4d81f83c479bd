//! A running request: converts the tokens of its choices into the response, as a JSON document or
//! as server-sent events.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream::{self, BoxStream, Stream, StreamExt as _};
use serde_json::Value;

use super::SimEngine;
use super::aborts::AbortRegistration;
use super::choices::RunningChoices;
use super::disaggregation::{DisaggregationFields, TransferProtocol};
use super::error::OpenAiError;
use super::kv_origin;
use super::rank::EngineRank;
use super::response::{ResponseBuilder, TransferFields, event};
use super::scheduler::TokenOutput;

/// Poll interval of a withheld first token.
const HOLD_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A request whose choices are running.
pub(crate) struct RunningRequest {
    pub(crate) engine: Arc<SimEngine>,
    pub(crate) rank: Arc<EngineRank>,
    pub(crate) disaggregation_fields: DisaggregationFields,
    pub(crate) choices: RunningChoices,
    pub(crate) abort_registration: AbortRegistration,
    pub(crate) response: ResponseBuilder,
}

type TokenOutputs = BoxStream<'static, Result<(usize, TokenOutput), OpenAiError>>;

impl RunningRequest {
    /// Returns the response as one document.
    pub(crate) async fn document(self) -> Result<Response, OpenAiError> {
        let Self {
            engine,
            rank,
            disaggregation_fields,
            choices,
            abort_registration,
            mut response,
        } = self;
        let aborted = abort_registration.aborted.clone();
        let mut outputs = choices
            .outputs
            .take_until(aborted.clone().cancelled_owned())
            .boxed();
        while let Some(output) = outputs.next().await {
            let (at, output) = output?;
            apply_first_token_faults(&engine, output).await;
            response.push(at, output);
        }
        if aborted.is_cancelled() && response.is_empty() {
            return Err(aborted_error());
        }
        let leased = choices.leased.and_then(|mut leased| leased.try_recv().ok());
        let (cached, first_token) = response.first_choice();
        let faults = engine.faults.current();
        let protocol = engine.config.disaggregation.protocol();
        if let Some(leased) = leased.as_ref().filter(|_| faults.stop_prefills) {
            response.stop();
            // vLLM holds the blocks nevertheless. With TensorRT-LLM, no engine will fetch them.
            if protocol == Some(TransferProtocol::Trtllm) {
                rank.end_lease(&leased.name);
            }
        }
        let leased = leased
            .zip(engine.side_channel(&rank))
            .filter(|_| !faults.omit_transfer_params);
        response.set_transfer_fields(match (protocol, leased) {
            (Some(TransferProtocol::Nixl), Some((leased, side_channel))) => {
                TransferFields::KvTransferParams(side_channel.transfer_params(&leased, cached))
            }
            (Some(TransferProtocol::Nixl), None) => TransferFields::KvTransferParams(Value::Null),
            (Some(TransferProtocol::Trtllm), Some((leased, side_channel))) => {
                TransferFields::DisaggregatedParams(disaggregation_fields.response_params(
                    side_channel,
                    &leased,
                    rank.number,
                    first_token,
                ))
            }
            _ => TransferFields::Absent,
        });
        let headers = [(kv_origin::KV_ORIGIN_HEADER, choices.worst_origin.label())];
        Ok((headers, Json(response.document())).into_response())
    }

    /// Returns the response as server-sent events. SGLang delays it until the first token, so that
    /// the request can still fail. vLLM begins at once and reports a failure as an event. If blocks
    /// must still be fetched, only the events can report the result.
    pub(crate) async fn event_stream(self) -> Result<Response, OpenAiError> {
        let Self {
            engine,
            choices,
            abort_registration,
            response,
            ..
        } = self;
        let aborted = abort_registration.aborted.clone().cancelled_owned();
        let mut outputs = choices.outputs.take_until(aborted).boxed();
        let mut is_origin_known = !choices.fetches;
        if engine
            .config
            .disaggregation
            .protocol()
            .is_some_and(TransferProtocol::is_sglang)
        {
            let first = outputs.next().await.ok_or_else(aborted_error)??;
            outputs = stream::iter([Ok(first)]).chain(outputs).boxed();
            is_origin_known = true;
        }
        let content = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")];
        let events = events(engine, outputs, abort_registration, response);
        let mut response = (content, Body::from_stream(events)).into_response();
        if is_origin_known {
            response.headers_mut().insert(
                kv_origin::KV_ORIGIN_HEADER,
                HeaderValue::from_static(choices.worst_origin.label()),
            );
        }
        Ok(response)
    }
}

fn aborted_error() -> OpenAiError {
    OpenAiError::internal("Aborted by AbortReq.")
}

async fn apply_first_token_faults(engine: &SimEngine, output: TokenOutput) {
    let delay_ms = engine.faults.current().slow_first_token_ms;
    if output.is_first && delay_ms > 0 {
        tokio::time::sleep(Duration::from_millis(delay_ms)).await;
    }
    while output.is_first && engine.faults.current().hold_first_tokens {
        tokio::time::sleep(HOLD_POLL_INTERVAL).await;
    }
}

/// Returns the stream of server-sent events. On an error, hyper closes the connection without the
/// final chunk, as if the engine had crashed.
fn events(
    engine: Arc<SimEngine>,
    outputs: TokenOutputs,
    abort_registration: AbortRegistration,
    mut response: ResponseBuilder,
) -> impl Stream<Item = io::Result<Bytes>> {
    let faults = engine.faults.current();
    let cut_after = faults.cut_stream_after_tokens;
    let opening = response.opening_events();
    let early = faults.early_stream_events.then(|| response.early_events());
    let opening = opening.into_iter().chain(early).map(|text| Ok(text.into()));
    let initial = Some((outputs, abort_registration, response, 0_u64));
    let rest = stream::unfold(initial, move |state| {
        let engine = engine.clone();
        async move {
            let (mut outputs, abort_registration, mut response, sent) = state?;
            if cut_after == Some(sent) {
                return Some((Err(io::Error::other("injected fault: stream cut")), None));
            }
            let text = match outputs.next().await {
                None => return Some((Ok(Bytes::from(response.final_chunks())), None)),
                Some(Err(error)) => {
                    let text = event(&error.body()) + "data: [DONE]\n\n";
                    return Some((Ok(Bytes::from(text)), None));
                }
                Some(Ok((at, output))) => {
                    apply_first_token_faults(&engine, output).await;
                    response.chunk(at, output)
                }
            };
            Some((
                Ok(Bytes::from(text)),
                Some((outputs, abort_registration, response, sent + 1)),
            ))
        }
    });
    stream::iter(opening.collect::<Vec<_>>()).chain(rest)
}
