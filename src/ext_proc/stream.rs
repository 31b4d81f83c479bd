//! One HTTP exchange over its gRPC stream: the task that feeds the state machine and carries out its effects.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tonic::{Code, Status, Streaming};

use super::exchange::{Effect, Exchange, Inbound, Start};
use super::first_tokens::Awaited;
use super::gateway::{GatewayTraits, ResponseAttribution};
use super::held::Share;
use super::message::{Incoming, Message};
use super::pipeline::Routed;
use super::record::Record;
use super::reject;
use super::replies::Replies;
use super::retries::{Again, Listening, Try};
use super::service::{Kept, Live};
use super::wire::{Asked, Part};
use crate::intake::Body;
use crate::openai;
use crate::prefill::{Retried, Turn};

/// Messages that are read ahead while a route is looked for; beyond it Envoy has to wait.
const EARLY: usize = 64;

/// Bytes of bodies that are read ahead meanwhile.
const EARLY_BYTES: usize = 256 << 10;

/// How much longer than a request may wait Envoy is asked to wait for it.
const HOLD_MARGIN: Duration = Duration::from_millis(500);

/// One HTTP exchange.
pub(super) struct Stream {
    kept: Arc<Kept>,
    live: Arc<Live>,
    gateway: GatewayTraits,
    /// The messages of Envoy; `None` after a message that exceeds the size limit, behind which no message can be read.
    incoming: Option<Streaming<Asked>>,
    replies: Replies,
    exchange: Exchange,
    record: Record,
    first_token: Option<Awaited>,
    /// By which name other filters know the exchange.
    name: Option<String>,
    retries: Option<Listening>,
    /// Whether the prefill of the try under way failed, so that whoever decodes was told to end.
    aborted: bool,
    held: Share,
    /// When the request's body has to be there.
    deadline: Instant,
}

/// The reason why a stream closes before the exchange has ended.
enum StreamClose {
    /// The client has sent its last message, and all replies to its messages were made.
    ByClient,
    /// No further message can be read.
    Failed(Status),
}

impl StreamClose {
    fn status(self) -> Result<(), Status> {
        match self {
            StreamClose::ByClient => Ok(()),
            StreamClose::Failed(status) => Err(status),
        }
    }
}

impl From<Status> for StreamClose {
    fn from(status: Status) -> Self {
        StreamClose::Failed(status)
    }
}

/// What happens next.
enum Event {
    Message(Box<Asked>),
    /// Another filter saw the first token.
    FirstToken,
    /// The body has not come in time.
    Deadline,
    /// Something is known of the prefill of two workers that meet.
    Turn(Turn),
    /// Envoy sends the request to another worker.
    Try(Box<Try>),
}

impl Stream {
    pub(super) fn new(
        kept: Arc<Kept>,
        live: Arc<Live>,
        (incoming, replies): (Streaming<Asked>, Replies),
        start: Start,
        gateway: GatewayTraits,
    ) -> Self {
        let name = start.probed_as.clone();
        let first_token = name.clone().map(|name| kept.first_tokens.expect(name));
        Self {
            incoming: Some(incoming),
            replies,
            exchange: Exchange::new(live.options.clone(), start),
            record: Record::open(
                kept.metrics.clone(),
                live.pipeline.router().clone(),
                kept.audit.clone(),
            ),
            first_token,
            name,
            retries: None,
            aborted: false,
            held: kept.held.share(),
            deadline: Instant::now() + live.upload,
            live,
            kept,
            gateway,
        }
    }

    /// Runs to the end of the stream, and returns its status.
    pub(super) async fn run(mut self, first: Incoming) -> Result<(), Status> {
        // Messages that came while a route was looked for.
        let mut early = VecDeque::new();
        if let Err(closed) = self.take(first, &mut early).await {
            return closed.status();
        }
        loop {
            // Many messages may be there at once, and others want their turn.
            tokio::task::consume_budget().await;
            let next = match early.pop_front() {
                Some(message) => Ok(Event::Message(Box::new(message))),
                None => self.next().await,
            };
            let done = match next {
                Ok(Event::Message(message)) => {
                    self.take(Incoming::read(*message), &mut early).await
                }
                Ok(Event::FirstToken) => {
                    self.first_token = None;
                    let effects = self.exchange.on_first_token();
                    self.carry_out(effects, &mut early).await
                }
                Ok(Event::Deadline) => {
                    let effects = self.exchange.on_deadline();
                    let done = self.carry_out(effects, &mut early).await;
                    self.held.set(self.exchange.held(), usize::MAX);
                    done
                }
                Ok(Event::Turn(turn)) => {
                    self.aborted = matches!(turn, Turn::Failed(_));
                    if self.record.turned(&turn) {
                        self.give_up(&mut early).await
                    } else {
                        Ok(())
                    }
                }
                Ok(Event::Try(again)) => match self.try_again(*again).await {
                    true => Ok(()),
                    false => self.give_up(&mut early).await,
                },
                Err(closed) => Err(closed),
            };
            match done {
                Ok(()) => {}
                // The code of a message that exceeds the size limit.
                Err(StreamClose::Failed(status)) if status.code() == Code::OutOfRange => {
                    return self.end_at_oversize_message(status, &mut early).await;
                }
                Err(closed) => return closed.status(),
            }
        }
    }

    /// Replies to a message that exceeds the size limit. The stream ends, because no further message can be read. Envoy continues
    /// the request without it, and its load is not known from then on.
    async fn end_at_oversize_message(
        mut self,
        status: Status,
        early: &mut VecDeque<Asked>,
    ) -> Result<(), Status> {
        // The rest of the message would be read as the next one. Without a reader its bytes are discarded.
        self.incoming = None;
        let effects = self.exchange.on_oversize_message().ok_or(status)?;
        self.carry_out(effects, early)
            .await
            .or_else(StreamClose::status)
    }

    async fn next(&mut self) -> Result<Event, StreamClose> {
        let first_token = async {
            match &self.first_token {
                Some(awaited) => awaited.seen().await,
                None => std::future::pending().await,
            }
        };
        let tries = async {
            match &mut self.retries {
                Some(listening) => listening.next().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            // Before the end of the stream, which may be there already: what nobody awaits any more is polled once.
            () = first_token => Ok(Event::FirstToken),
            message = self.kept.receive_from(self.incoming.as_mut()) => match message? {
                Some(message) => Ok(Event::Message(Box::new(message))),
                None => Err(StreamClose::ByClient),
            },
            () = tokio::time::sleep_until(self.deadline), if self.exchange.is_gathering() => Ok(Event::Deadline),
            again = tries => Ok(Event::Try(Box::new(again))),
            turn = self.record.turn() => Ok(Event::Turn(turn)),
        }
    }

    async fn take(
        &mut self,
        incoming: Incoming,
        early: &mut VecDeque<Asked>,
    ) -> Result<(), StreamClose> {
        if let Some(modes) = incoming.modes {
            self.exchange.configure(modes);
            self.kept.warn_of(modes.request);
        }
        self.exchange.hear(incoming.told);
        let Some(mut message) = incoming.message else {
            return Ok(());
        };
        if let Message::ResponseHeaders { head, .. } = &mut message
            && self.gateway.attribute(head) == ResponseAttribution::Undecided
        {
            self.kept.warn_of_undecided_source();
        }
        // Envoy has no try left, and the engine says no more than that we told it to end.
        if let Message::ResponseHeaders { head, .. } = &message
            && self.aborted
            && head.status >= 500
        {
            return self.give_up(early).await;
        }
        if let Message::ResponseHeaders { head, .. } = &message
            && let Some(by) = self.record.served_elsewhere(head)
        {
            self.exchange.on_served_elsewhere(by);
        }
        let effects = self.exchange.on_message(message);
        self.carry_out(effects, early).await?;
        if self.held.set(self.exchange.held(), self.live.held) {
            let effects = self.exchange.on_deadline();
            self.carry_out(effects, early).await?;
            self.held.set(self.exchange.held(), usize::MAX);
        }
        Ok(())
    }

    async fn carry_out(
        &mut self,
        effects: Vec<Effect>,
        early: &mut VecDeque<Asked>,
    ) -> Result<(), StreamClose> {
        let mut effects = VecDeque::from(effects);
        while let Some(effect) = effects.pop_front() {
            match effect {
                Effect::Reply(reply) => self.replies.send(*reply).await,
                Effect::Route(inbound) => match self.route(inbound, early).await? {
                    None => {}
                    Some(Routed::Answered(answer)) => {
                        effects.extend(self.exchange.on_immediate(&answer));
                        self.record.own_answer();
                    }
                    Some(Routed::Steered {
                        directions,
                        admitted,
                        remote,
                    }) => {
                        if let (Some(remote), Some(name)) = (&remote, &self.name) {
                            self.retries =
                                Some(self.kept.retries.listen(name.clone(), remote.longest()));
                        }
                        effects.extend(self.exchange.on_route(*directions));
                        self.record.routed(admitted, remote);
                    }
                },
                Effect::Answered(head) => self.record.answered(head),
                Effect::FirstToken { seen } => self.record.first_token(seen),
                Effect::Answer(chunk) => self.record.answer(&chunk),
                Effect::Finished => self.record.finished(),
            }
        }
        Ok(())
    }

    /// Has a request prefilled anew that Envoy sends to another worker; whether anything can come of it. A client that leaves
    /// meanwhile takes it all back.
    async fn try_again(
        &mut self,
        Try {
            head,
            to,
            body,
            answer,
        }: Try,
    ) -> bool {
        let prefills = self.live.pipeline.prefills();
        let retried = Retried {
            to,
            path: head.path.clone(),
            headers: prefills.headers(&head),
            body,
        };
        self.aborted = false;
        let again = self
            .record
            .tried_again(self.live.pipeline.entrance(), retried)
            .await;
        let goes_on = !matches!(again, Again::GivenUp);
        // Where the try is over by now, so is what was begun for it.
        _ = answer.send(again);
        goes_on
    }

    /// Nothing can come of the request any longer.
    async fn give_up(&mut self, early: &mut VecDeque<Asked>) -> Result<(), StreamClose> {
        let effects = self.exchange.on_give_up(&reject::never_met());
        self.carry_out(effects, early).await
    }

    /// Counts a body as long as anybody has it. What the exchange itself holds of it counts already.
    fn keep(&mut self, body: Body) -> Body {
        let kept = |bytes: Bytes| self.kept.held.keep(bytes, self.live.held);
        self.held.set(self.exchange.held(), usize::MAX);
        match body {
            body if self.exchange.held() > 0 => body,
            Body::Whole(bytes) => kept(bytes.clone()).map_or_else(|| shed(&bytes), Body::Whole),
            Body::Cut { shown, length } => kept(shown.clone())
                .map_or_else(|| shed(&shown), |shown| Body::Cut { shown, length }),
            Body::TooLarge { shown, bytes } => kept(shown.clone())
                .map_or_else(|| shed(&shown), |shown| Body::TooLarge { shown, bytes }),
            body => body,
        }
    }

    /// Looks for a route while watching the stream: a client that leaves meanwhile leaves nothing booked. `None` when
    /// Envoy began to answer by itself meanwhile, so that no route is wanted any longer.
    async fn route(
        &mut self,
        inbound: Inbound,
        early: &mut VecDeque<Asked>,
    ) -> Result<Option<Routed>, StreamClose> {
        let inbound = Inbound {
            body: self.keep(inbound.body),
            ..inbound
        };
        let pipeline = self.live.pipeline.clone();
        let (tell, mut told) = oneshot::channel();
        let route = pipeline.route(inbound, move |wait| _ = tell.send(wait));
        tokio::pin!(route);
        let mut holding = false;
        let mut waiting = 0;
        let mut half_closed = false;
        loop {
            let room = early.len() < EARLY && waiting < EARLY_BYTES && !half_closed;
            tokio::select! {
                biased;
                routed = &mut route => return Ok(Some(routed)),
                Ok(wait) = &mut told, if !holding => {
                    holding = true;
                    self.hold(wait).await;
                }
                message = self.kept.receive_from(self.incoming.as_mut()), if room => {
                    // The replies to earlier messages are still due. If its client has left, Envoy resets the stream
                    // afterwards, which drops the exchange.
                    let Some(message) = message? else {
                        half_closed = true;
                        continue;
                    };
                    waiting += body_bytes(&message);
                    early.push_back(message);
                    if early.back().is_some_and(begins_response) {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Asks Envoy, once, to wait until the request has had its turn; a little longer, so that our answer is there first.
    async fn hold(&self, wait: Duration) {
        if let Some(Effect::Reply(reply)) = self.exchange.hold(wait + HOLD_MARGIN) {
            self.replies.send(*reply).await;
        }
    }
}

/// What is left of a body that cannot be kept.
fn shed(body: &[u8]) -> Body {
    Body::Shed {
        bytes: body.len(),
        model: openai::model_quickly(body),
    }
}

fn body_bytes(wire: &Asked) -> usize {
    match &wire.part {
        Some(Part::RequestBody(piece) | Part::ResponseBody(piece)) => piece.body.len(),
        _ => 0,
    }
}

fn begins_response(wire: &Asked) -> bool {
    matches!(wire.part, Some(Part::ResponseHeaders(_)))
}
