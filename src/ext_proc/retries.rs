//! Tries of a request that Envoy makes after one that failed, shown by a filter on its way to the next worker. Where
//! another worker did the prefill, what was prepared for the first try is of no use to the second, so the exchange that the
//! try belongs to is asked for another body. Every other try goes on as it is, and nothing here may hold one up for long.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dashmap::DashMap;
use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;
use tokio::sync::{mpsc, oneshot};

use super::headers::RequestHead;
use super::message::{BodyMode, Incoming, Message};
use super::mutation::{self, HeaderChanges, To};
use super::wire::Piece;
use crate::prefill::{Cleaned, clean};
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
        Listening {
            name,
            tries,
            among: self.clone(),
        }
    }

    /// Whether anybody wants to know of tries under this name, and how long it may take to hear what is to become of one.
    pub(super) fn wants(&self, name: &str) -> Option<Duration> {
        Some(self.listening.get(name)?.0)
    }

    /// What is to become of a try.
    async fn ask(&self, name: &str, (head, to, body): (RequestHead, Endpoint, Bytes)) -> Again {
        let Some(listening) = self.listening.get(name).map(|entry| entry.1.clone()) else {
            return Again::AsItIs;
        };
        let (answer, answered) = oneshot::channel();
        match listening
            .send(Try {
                head,
                to,
                body,
                answer,
            })
            .await
        {
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
#[derive(Debug)]
pub(super) struct Retry {
    /// Whether clients may say whose KV is to be taken.
    trusting: bool,
    whose: Whose,
    longest: Duration,
}

/// Whom a try belongs to.
#[derive(Debug)]
enum Whose {
    /// To nobody of ours.
    Foreign,
    /// To an exchange that prepared something for it, and for whom it goes now.
    Prepared(String, RequestHead, Endpoint),
    /// To an exchange of ours that is not there any longer, or prepared nothing.
    Unprepared,
}

/// What is told to Envoy, and what became of the try where that was the last of it.
pub(super) struct Answered {
    pub(super) reply: Option<ProcessingResponse>,
    pub(super) outcome: Option<&'static str>,
}

impl Retry {
    pub(super) fn new(trusting: bool) -> Self {
        Self {
            trusting,
            whose: Whose::Foreign,
            longest: Duration::ZERO,
        }
    }

    /// What Envoy has to hear before a message is taken, because it will take long.
    pub(super) fn hold(&self, incoming: &Incoming) -> Option<ProcessingResponse> {
        let asks = matches!(incoming.message, Some(Message::RequestBody(_)))
            && matches!(self.whose, Whose::Prepared(..));
        (asks && !self.longest.is_zero()).then(|| mutation::hold(self.longest + HOLD_MARGIN))
    }

    /// Takes one message.
    pub(super) async fn on_message(&mut self, retries: &Retries, incoming: Incoming) -> Answered {
        let go_on = |to, outcome| Answered {
            reply: Some(mutation::go_on(to, HeaderChanges::default())),
            outcome,
        };
        let Incoming {
            modes,
            told,
            message,
        } = incoming;
        match message {
            Some(Message::RequestHeaders { head, end }) => {
                let whole = modes.is_none_or(|modes| modes.request == BodyMode::Buffered) && !end;
                let Some(name) = told.exchange.filter(|_| whole) else {
                    return go_on(To::RequestHeaders, Some("as_it_is"));
                };
                self.whose = match (retries.wants(&name), told.to) {
                    (Some(longest), Some(to)) => {
                        self.longest = longest;
                        Whose::Prepared(name, head, to)
                    }
                    _ => Whose::Unprepared,
                };
                go_on(To::RequestHeaders, None)
            }
            Some(Message::RequestBody(Piece { body, .. })) => {
                let again = match std::mem::replace(&mut self.whose, Whose::Foreign) {
                    Whose::Foreign => return go_on(To::RequestBody, Some("as_it_is")),
                    Whose::Prepared(name, head, to) => {
                        retries.ask(&name, (head, to, body.clone())).await
                    }
                    Whose::Unprepared => Again::AsItIs,
                };
                let (body, outcome) = match again {
                    // What an exchange prepared that has ended with an earlier warmroute is nobody's any longer.
                    Again::AsItIs => match clean(&body) {
                        Cleaned::Changed(body) if !self.trusting => (body, "taken_out"),
                        _ => return go_on(To::RequestBody, Some("as_it_is")),
                    },
                    // Of no use to anybody, so that nobody takes over what is not for him.
                    Again::GivenUp => (Bytes::from_static(b"{}"), "given_up"),
                    Again::With(body) => (body, "prefilled_anew"),
                };
                let mut changes = HeaderChanges::default();
                changes.set("content-length", body.len().to_string());
                let reply =
                    mutation::with_body(mutation::go_on(To::RequestBody, changes), body.into());
                Answered {
                    reply: Some(reply),
                    outcome: Some(outcome),
                }
            }
            Some(Message::RequestTrailers) => Answered {
                reply: Some(mutation::request_trailers()),
                outcome: Some("as_it_is"),
            },
            Some(_) => Answered {
                reply: None,
                outcome: Some("as_it_is"),
            },
            None => Answered {
                reply: None,
                outcome: None,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
    use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;

    use super::*;
    use crate::ext_proc::metadata::Told;

    fn incoming(message: Message, exchange: Option<&str>) -> Incoming {
        let to = Some(Endpoint("127.0.0.1:1".parse().unwrap()));
        Incoming {
            modes: None,
            told: Told {
                exchange: exchange.map(str::to_owned),
                to,
                ..Told::default()
            },
            message: Some(message),
        }
    }

    fn sent(answered: &Answered) -> Option<&[u8]> {
        let Some(Response::RequestBody(body)) = answered.reply.as_ref()?.response.as_ref() else {
            return None;
        };
        match body
            .response
            .as_ref()?
            .body_mutation
            .as_ref()?
            .mutation
            .as_ref()?
        {
            Mutation::Body(body) => Some(body),
            _ => None,
        }
    }

    const HANDED: &str = r#"{"kv_transfer_params":{"remote_host":"x"},"prompt":"y"}"#;

    /// What becomes of a try whose body hands something over.
    async fn tried(
        retries: &Retries,
        exchange: Option<&str>,
        trusting: bool,
    ) -> (Option<Vec<u8>>, Option<&'static str>) {
        let mut retry = Retry::new(trusting);
        let head = Message::RequestHeaders {
            head: RequestHead::default(),
            end: false,
        };
        let first = retry.on_message(retries, incoming(head, exchange)).await;
        if first.outcome.is_some() {
            return (None, first.outcome);
        }
        let body = Message::RequestBody(Piece::new(HANDED, true));
        let answered = retry.on_message(retries, incoming(body, exchange)).await;
        (sent(&answered).map(<[u8]>::to_vec), answered.outcome)
    }

    #[tokio::test]
    async fn what_was_prepared_by_nobody_we_know_is_taken_out() {
        let retries = Arc::new(Retries::default());
        let taken_out = br#"{"kv_transfer_params":null,"prompt":"y"}"#.to_vec();
        assert_eq!(
            tried(&retries, Some("gone"), false).await,
            (Some(taken_out), Some("taken_out"))
        );
        assert_eq!(
            tried(&retries, Some("gone"), true).await,
            (None, Some("as_it_is"))
        );
        assert_eq!(tried(&retries, None, false).await, (None, Some("as_it_is")));
    }

    #[tokio::test]
    async fn whoever_prepared_the_first_try_prepares_the_next() {
        let retries = Arc::new(Retries::default());
        for (again, expected) in [
            (
                Again::With("{\"new\":1}".into()),
                (Some(b"{\"new\":1}".to_vec()), Some("prefilled_anew")),
            ),
            (Again::GivenUp, (Some(b"{}".to_vec()), Some("given_up"))),
        ] {
            let mut listening = retries.listen("a".to_owned(), Duration::ZERO);
            let prepares = async {
                let Try { body, answer, .. } = listening.next().await;
                assert_eq!(&body[..], HANDED.as_bytes());
                answer.send(again).unwrap();
            };
            let (became, ()) = tokio::join!(tried(&retries, Some("a"), false), prepares);
            assert_eq!(became, expected);
        }
        let leaves = retries.listen("b".to_owned(), Duration::ZERO);
        drop(leaves);
        assert!(retries.wants("b").is_none());
    }
}
