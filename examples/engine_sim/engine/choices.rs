//! The choices of a request under way: each a stream of tokens from a rank, which may first have to get its prompt from
//! another engine, or may end only when another engine has it.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::stream::{self, SelectAll, Stream, StreamExt as _, TryStreamExt as _};
use tokio::sync::oneshot;

use super::Engine;
use super::ask::Ask;
use super::cache::{Keys, Sequence};
use super::fetch::{self, Prompt};
use super::handover::{Hand, Source};
use super::http::Refusal;
use super::leases::Lent;
use super::origin::Worst;
use super::rank::{Rank, Ticket};
use super::rooms::{self, Task};
use super::scheduler::{Output, Part};

/// Each token with the place of its choice.
pub(crate) type Outputs =
    SelectAll<Pin<Box<dyn Stream<Item = Result<(usize, Output), Refusal>> + Send>>>;

/// What a request became.
pub(crate) struct Choices {
    pub(crate) outputs: Outputs,
    /// Where it is told what is kept of the first of them. As with vLLM nobody is told of the others.
    pub(crate) lent: Option<oneshot::Receiver<Lent>>,
    /// Where their keys and values come from.
    pub(crate) worst: Worst,
    /// Whether that shows only later.
    pub(crate) fetches: bool,
}

/// A request that was understood.
#[derive(Debug)]
pub(crate) struct Order<'a> {
    pub(crate) ask: &'a Ask,
    pub(crate) hand: &'a Hand,
    pub(crate) keys: &'a Keys,
    pub(crate) prompts: &'a [Vec<u32>],
    pub(crate) name: &'a str,
    pub(crate) answer_len: usize,
    pub(crate) worst: Worst,
}

/// Puts every choice to work; `rank` says where.
pub(crate) fn start(
    engine: &Arc<Engine>,
    order: &Order<'_>,
    rank: impl Fn(usize) -> Arc<Rank>,
) -> Choices {
    let mut choices = Choices {
        outputs: SelectAll::new(),
        lent: None,
        worst: order.worst.clone(),
        fetches: matches!(order.hand, Hand::Fetch(_)),
    };
    let n = order.ask.choices();
    for at in 0..order.prompts.len() * n {
        let prompt = &order.prompts[at / n];
        let answer = engine.tokens.answer(prompt, at % n, order.answer_len);
        let task = Task {
            sequence: Sequence::new(prompt.clone(), order.keys.clone()),
            answer,
        };
        let (tokens, lent) = one(engine, rank(at), order, (at, task));
        choices
            .outputs
            .push(tokens.map(move |output| Ok((at, output?))).boxed());
        choices.lent = choices.lent.or(lent);
    }
    choices
}

type Tokens = Pin<Box<dyn Stream<Item = Result<Output, Refusal>> + Send>>;

fn one(
    engine: &Arc<Engine>,
    rank: Arc<Rank>,
    order: &Order<'_>,
    (at, task): (usize, Task),
) -> (Tokens, Option<oneshot::Receiver<Lent>>) {
    let engine = engine.clone();
    match order.hand {
        Hand::Whole => (
            tokens(rank.submit(task.sequence, task.answer, Part::Whole)).boxed(),
            None,
        ),
        Hand::Lend(number) => {
            let name = engine.lease_name(order.name, *number).into();
            let part = Part::Lend {
                name,
                can_be_aborted: false,
            };
            let mut ticket = rank.submit(task.sequence, task.answer, part);
            let lent = ticket.take_lent();
            (tokens(ticket).boxed(), lent)
        }
        Hand::Fetch(source) => (
            fetched((engine, rank), order, source.clone(), (at, task)),
            None,
        ),
        Hand::Host(rooms) => {
            let hosted = rooms::host(engine, rank, rooms[at], task);
            let outputs = async { Ok(stream::iter(hosted.await?).map(Ok)) };
            (stream::once(outputs).try_flatten().boxed(), None)
        }
        Hand::Visit(address, rooms) => {
            let visited = rooms::visit(
                engine,
                rank,
                (address.clone(), rooms[at]),
                task,
                order.worst.clone(),
            );
            (
                stream::once(async { Ok(tokens(visited.await?)) })
                    .try_flatten()
                    .boxed(),
                None,
            )
        }
    }
}

fn fetched(
    (engine, rank): (Arc<Engine>, Arc<Rank>),
    order: &Order<'_>,
    source: Source,
    (at, task): (usize, Task),
) -> Tokens {
    let choice = at % order.ask.choices();
    let prompt = Prompt {
        tokens: task.sequence.tokens().to_vec(),
        keys: order.keys.clone(),
        first: task.answer.first().copied().filter(|_| choice == 0),
        choice,
        answer_len: task.answer.len(),
    };
    let ticket = rank.submit(task.sequence, task.answer, Part::Fetch);
    let worst = order.worst.clone();
    // Who goes by the numbers of blocks cannot take one request's for another's.
    let claim = source
        .blocks
        .is_none()
        .then(|| engine.claims.enter(&source.request, &source.engine));
    let fetched = async move {
        let ticket = match claim.as_ref().is_some_and(|claim| claim.is_taken) {
            true => fetch::fetch_in_vain((engine, rank), prompt, ticket, worst).await?,
            false => fetch::fetch((engine, rank), source, prompt, ticket, worst).await?,
        };
        Ok(tokens(ticket).inspect(move |_| {
            // It is the number's until the answer has ended.
            let _ = &claim;
        }))
    };
    stream::once(fetched).try_flatten().boxed()
}

fn tokens(ticket: Ticket) -> impl Stream<Item = Result<Output, Refusal>> + Send {
    stream::unfold(ticket, |mut ticket| async {
        Some((Ok(ticket.next().await?), ticket))
    })
}
