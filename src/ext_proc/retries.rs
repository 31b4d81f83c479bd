//! Tries of a request that Envoy makes after one that failed, shown by a filter on its way to the next worker. Where two
//! workers were to meet, the room of the first try is of no use to the second, so the exchange that the try belongs to is
//! asked for another body. Every other try goes on as it is, and nothing here may hold one up for long.

use std::sync::Arc;

use bytes::Bytes;
use dashmap::DashMap;
use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;
use tokio::sync::{mpsc, oneshot};

use super::headers::RequestHead;
use super::message::{BodyMode, Incoming, Message};
use super::mutation::{self, HeaderChanges, To};
use crate::worker::Endpoint;

/// One try after the first.
#[derive(Debug)]
pub(super) struct Try {
    /// Its head.
    pub(super) head: RequestHead,
    /// Who gets it.
    pub(super) to: Endpoint,
    /// Its body.
    pub(super) body: Bytes,
    /// Where the body goes that it is to have instead.
    pub(super) answer: oneshot::Sender<Option<Bytes>>,
}

/// The exchanges that want to know of further tries.
#[derive(Debug, Default)]
pub(super) struct Retries {
    listening: DashMap<String, mpsc::Sender<Try>>,
}

/// One exchange that wants to know of further tries; forgotten by drop.
#[derive(Debug)]
pub(super) struct Listening {
    name: String,
    tries: mpsc::Receiver<Try>,
    among: Arc<Retries>,
}

impl Retries {
    /// Listens under a name that nobody else has.
    pub(super) fn listen(self: &Arc<Self>, name: String) -> Listening {
        // Envoy makes one try after another.
        let (sender, tries) = mpsc::channel(1);
        self.listening.insert(name.clone(), sender);
        Listening { name, tries, among: self.clone() }
    }

    /// Whether anybody wants to know of tries under this name.
    fn wants(&self, name: &str) -> bool {
        self.listening.contains_key(name)
    }

    /// The body that a try is to have, if it is to have another.
    async fn ask(&self, name: &str, (head, to, body): (RequestHead, Endpoint, Bytes)) -> Option<Bytes> {
        let listening = self.listening.get(name)?.clone();
        let (answer, answered) = oneshot::channel();
        listening.send(Try { head, to, body, answer }).await.ok()?;
        answered.await.ok()?
    }
}

impl Listening {
    /// The next try.
    pub(super) async fn next(&mut self) -> Try {
        match self.tries.recv().await {
            Some(next) => next,
            None => std::future::pending().await,
        }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.among.listening.remove(&self.name);
    }
}

/// One stream of the filter.
#[derive(Debug, Default)]
pub(super) struct Retry {
    whose: Option<(String, RequestHead, Endpoint)>,
}

/// What is told to Envoy, and what became of the try where that was the last of it.
pub(super) struct Answered {
    pub(super) reply: Option<ProcessingResponse>,
    pub(super) outcome: Option<&'static str>,
}

impl Retry {
    /// Takes one message.
    pub(super) async fn on_message(&mut self, retries: &Retries, incoming: Incoming) -> Answered {
        let go_on = |to, outcome| Answered { reply: Some(mutation::go_on(to, HeaderChanges::default())), outcome };
        let Incoming { modes, told, message } = incoming;
        match message {
            Some(Message::RequestHeaders { head, end }) => {
                let whole = modes.is_none_or(|modes| modes.request == BodyMode::Buffered) && !end;
                let name = told.exchange.filter(|name| whole && retries.wants(name));
                let Some((name, to)) = name.zip(told.to) else { return go_on(To::RequestHeaders, Some("as_it_is")) };
                self.whose = Some((name, head, to));
                go_on(To::RequestHeaders, None)
            }
            Some(Message::RequestBody { body, .. }) => {
                let Some((name, head, to)) = self.whose.take() else {
                    return go_on(To::RequestBody, Some("as_it_is"));
                };
                let Some(body) = retries.ask(&name, (head, to, body)).await else {
                    return go_on(To::RequestBody, Some("given_up"));
                };
                let mut changes = HeaderChanges::default();
                changes.set("content-length", body.len().to_string());
                let reply = mutation::with_body(mutation::go_on(To::RequestBody, changes), body.into());
                Answered { reply: Some(reply), outcome: Some("met_again") }
            }
            Some(Message::RequestTrailers) => {
                Answered { reply: Some(mutation::request_trailers()), outcome: Some("as_it_is") }
            }
            Some(_) => Answered { reply: None, outcome: Some("as_it_is") },
            None => Answered { reply: None, outcome: None },
        }
    }
}
