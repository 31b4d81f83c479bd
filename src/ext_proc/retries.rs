//! Tries of a request that Envoy makes after one that failed, shown by a filter on its way to the next worker. Where two
//! workers were to meet, the room of the first try is of no use to the second, so the exchange that the try belongs to is
//! asked for another body. Every other try goes on as it is, and nothing here may hold one up for long.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dashmap::DashMap;
use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;
use tokio::sync::{mpsc, oneshot};

use super::headers::RequestHead;
use super::message::{BodyMode, Incoming, Message};
use super::mutation::{self, HeaderChanges, To};
use crate::worker::Endpoint;

/// How much longer Envoy is asked to wait than another prefill may take.
const HOLD_MARGIN: Duration = Duration::from_secs(1);

/// One try after the first.
#[derive(Debug)]
pub(super) struct Try {
    /// Its head.
    pub(super) head: RequestHead,
    /// Who gets it.
    pub(super) to: Endpoint,
    /// Its body.
    pub(super) body: Bytes,
    /// Where it goes what is to become of it.
    pub(super) answer: oneshot::Sender<Again>,
}

/// What is to become of a try.
#[derive(Debug)]
pub(super) enum Again {
    /// It goes on as it is.
    AsItIs,
    /// It goes on with this body.
    With(Bytes),
    /// Nothing can come of it, and the client has been told.
    GivenUp,
}

/// The exchanges that want to know of further tries.
#[derive(Debug, Default)]
pub(super) struct Retries {
    listening: DashMap<String, (Duration, mpsc::Sender<Try>)>,
}

/// One exchange that wants to know of further tries; forgotten by drop.
#[derive(Debug)]
pub(super) struct Listening {
    name: String,
    tries: mpsc::Receiver<Try>,
    among: Arc<Retries>,
}

impl Retries {
    /// Listens under a name that nobody else has. What is to become of a try may take so long.
    pub(super) fn listen(self: &Arc<Self>, name: String, longest: Duration) -> Listening {
        // Envoy makes one try after another.
        let (sender, tries) = mpsc::channel(1);
        self.listening.insert(name.clone(), (longest, sender));
        Listening { name, tries, among: self.clone() }
    }

    /// Whether anybody wants to know of tries under this name, and how long it may take to hear what is to become of one.
    pub(super) fn wants(&self, name: &str) -> Option<Duration> {
        Some(self.listening.get(name)?.0)
    }

    /// What is to become of a try.
    async fn ask(&self, name: &str, (head, to, body): (RequestHead, Endpoint, Bytes)) -> Again {
        let Some(listening) = self.listening.get(name).map(|entry| entry.1.clone()) else { return Again::AsItIs };
        let (answer, answered) = oneshot::channel();
        match listening.send(Try { head, to, body, answer }).await {
            // Whoever leaves takes its exchange along.
            Ok(()) => answered.await.unwrap_or(Again::GivenUp),
            Err(_) => Again::AsItIs,
        }
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
    longest: Duration,
}

/// What is told to Envoy, and what became of the try where that was the last of it.
pub(super) struct Answered {
    pub(super) reply: Option<ProcessingResponse>,
    pub(super) outcome: Option<&'static str>,
}

impl Retry {
    /// What Envoy has to hear before a message is taken, because it will take long.
    pub(super) fn hold(&self, incoming: &Incoming) -> Option<ProcessingResponse> {
        let asks = matches!(incoming.message, Some(Message::RequestBody { .. })) && self.whose.is_some();
        (asks && !self.longest.is_zero()).then(|| mutation::hold(self.longest + HOLD_MARGIN))
    }

    /// Takes one message.
    pub(super) async fn on_message(&mut self, retries: &Retries, incoming: Incoming) -> Answered {
        let go_on = |to, outcome| Answered { reply: Some(mutation::go_on(to, HeaderChanges::default())), outcome };
        let Incoming { modes, told, message } = incoming;
        match message {
            Some(Message::RequestHeaders { head, end }) => {
                let whole = modes.is_none_or(|modes| modes.request == BodyMode::Buffered) && !end;
                let name = told.exchange.filter(|_| whole);
                let wanted = name.and_then(|name| Some((retries.wants(&name)?, name)));
                let name = wanted.map(|(longest, name)| {
                    self.longest = longest;
                    name
                });
                let Some((name, to)) = name.zip(told.to) else { return go_on(To::RequestHeaders, Some("as_it_is")) };
                self.whose = Some((name, head, to));
                go_on(To::RequestHeaders, None)
            }
            Some(Message::RequestBody { body, .. }) => {
                let Some((name, head, to)) = self.whose.take() else {
                    return go_on(To::RequestBody, Some("as_it_is"));
                };
                let (body, outcome) = match retries.ask(&name, (head, to, body)).await {
                    Again::AsItIs => return go_on(To::RequestBody, Some("as_it_is")),
                    // Of no use to anybody, so that nobody takes over what is not for him.
                    Again::GivenUp => (Bytes::from_static(b"{}"), "given_up"),
                    Again::With(body) => (body, "prefilled_anew"),
                };
                let mut changes = HeaderChanges::default();
                changes.set("content-length", body.len().to_string());
                let reply = mutation::with_body(mutation::go_on(To::RequestBody, changes), body.into());
                Answered { reply: Some(reply), outcome: Some(outcome) }
            }
            Some(Message::RequestTrailers) => {
                Answered { reply: Some(mutation::request_trailers()), outcome: Some("as_it_is") }
            }
            Some(_) => Answered { reply: None, outcome: Some("as_it_is") },
            None => Answered { reply: None, outcome: None },
        }
    }
}
