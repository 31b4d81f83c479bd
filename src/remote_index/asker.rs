//! Asking: one server in turn, another one beside it when it is slow, and nobody any longer than the deadline. The first
//! good answer wins, and what is still under way then is dropped, which cancels it.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tracing::{debug, info, warn};

use super::choice::{Ended, News, Pick, Servers};
use super::config::RemoteIndexConfig;
use super::pb::index_client::IndexClient;
use super::{pb, wire};
use crate::block::BlockHashes;
use crate::metrics::{Metrics, OutcomeLabel};
use crate::router::{Remote, RemoteAnswer, RemoteRanks};
use crate::worker::ModelName;

/// The longest answer in bytes: what a hundred thousand worker ranks hold of a prompt fits.
const LONGEST_ANSWER: usize = 16 << 20;

/// How long a connection may take to be made, and be silent before it is asked whether it is still there.
const CONNECT: Duration = Duration::from_secs(1);
const SILENCE: Duration = Duration::from_secs(5);

/// How long a trial may take, and how often it is looked whether one is due.
const TRIAL: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(100);

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// The model; none: whoever has the prompts.
    pub model: Option<&'a ModelName>,
    /// What our way of hashing makes of the prompt that everybody knows.
    pub hashing: u64,
    /// The prompts; all have blocks of one size.
    pub prompts: &'a [BlockHashes],
}

/// Those who serve the index, and how they do.
pub struct Asker {
    servers: Vec<Server>,
    choice: Mutex<Servers>,
    pub(super) permits: Semaphore,
    deadline: Duration,
    hedge: Option<Duration>,
    metrics: Arc<Metrics>,
    /// Whether nobody answers.
    away: AtomicBool,
}

/// One of them.
struct Server {
    url: String,
    client: IndexClient<Channel>,
    /// What it said last of the worker ranks. Of each server for itself, because they need not believe sources alike.
    known: ArcSwapOption<Known>,
    /// Whether it has refused what is asked, which is a mistake of somebody's configuration.
    refuses: AtomicBool,
}

/// What a server says of the worker ranks.
#[derive(Debug)]
struct Known {
    version: u64,
    ranks: Arc<RemoteRanks>,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Missed {
    /// As many questions are under way as may be.
    Busy,
    /// All servers are left out.
    Out,
    /// The deadline passed.
    Late,
    /// Whoever was asked could not be reached, or said nonsense.
    Failed,
    /// Whoever was asked has other blocks than we have.
    Refused,
}

impl Missed {
    fn as_str(self) -> &'static str {
        match self {
            Missed::Busy => "busy",
            Missed::Out => "out",
            Missed::Late => "late",
            Missed::Failed => "failed",
            Missed::Refused => "refused",
        }
    }
}

impl Asker {
    /// Connects with the first questions.
    pub fn new(settings: &RemoteIndexConfig, metrics: Arc<Metrics>) -> anyhow::Result<Self> {
        let servers: Vec<Server> = settings
            .servers
            .iter()
            .map(|url| Server::new(url, settings))
            .collect::<anyhow::Result<_>>()?;
        Ok(Self {
            choice: Mutex::new(Servers::new(servers.len())),
            servers,
            permits: Semaphore::new((settings.in_flight as usize).min(Semaphore::MAX_PERMITS)),
            deadline: settings.deadline.get(),
            hedge: settings.hedge.map(|hedge| hedge.get()),
            metrics,
            away: AtomicBool::new(false),
        })
    }

    /// What of prompts is cached where.
    pub async fn ask(&self, question: Question<'_>) -> Remote {
        let Some(block_size) = question
            .prompts
            .first()
            .map(|prompt| prompt.block_size().0.get())
        else {
            return Remote::NotAsked;
        };
        let started = Instant::now();
        let answer = match self.permits.try_acquire() {
            _ if question.prompts.len() > wire::MOST_PROMPTS => Err(Missed::Refused),
            Ok(_permit) => self.race(question, block_size, started).await,
            Err(_) => Err(Missed::Busy),
        };
        let outcome = match &answer {
            Ok((_, false)) => "answered",
            Ok((_, true)) => "hedged_won",
            Err(missed) => missed.as_str(),
        };
        self.metrics
            .remote_index_questions
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
        self.metrics
            .remote_index_seconds
            .observe(started.elapsed().as_secs_f64());
        match answer {
            Ok((answer, _)) => Remote::Told(Arc::new(answer)),
            Err(_) => Remote::Away(self.known_last()),
        }
    }

    /// What any server said of the worker ranks; of their sizes, all that is used of it, they say the same.
    fn known_last(&self) -> Arc<RemoteRanks> {
        let known = self
            .servers
            .iter()
            .find_map(|server| server.known.load_full());
        known.map(|known| known.ranks.clone()).unwrap_or_default()
    }

    /// The first good answer, and whether it is of somebody who was asked because others were slow.
    async fn race(
        &self,
        question: Question<'_>,
        block_size: u32,
        started: Instant,
    ) -> Result<(RemoteAnswer, bool), Missed> {
        let deadline = sleep_until(started + self.deadline);
        let hedge = sleep_until(started + self.hedge.unwrap_or(self.deadline));
        tokio::pin!(deadline, hedge);
        let mut race = Race::new(self);
        let mut under_way = FuturesUnordered::new();
        let begin = |pick: Pick| self.put(pick, question, block_size);
        under_way.push(begin(race.begin(Servers::first).ok_or(Missed::Out)?));
        let mut may_hedge = self.hedge.is_some();
        loop {
            tokio::select! {
                // An answer that is here counts, however late we come to look.
                biased;
                Some((pick, answer)) = under_way.next() => match answer {
                    Ok(answer) => return Ok((answer, race.won(pick))),
                    Err(missed) => match race.instead(pick, missed) {
                        Some(next) => under_way.push(begin(next)),
                        None if under_way.is_empty() => return Err(missed),
                        None => {}
                    },
                },
                () = &mut deadline => {
                    race.late();
                    return Err(Missed::Late);
                }
                () = &mut hedge, if may_hedge => {
                    may_hedge = false;
                    under_way.extend(race.beside().map(begin));
                }
            }
        }
    }

    /// Puts a question to a server.
    async fn put(
        &self,
        pick: Pick,
        question: Question<'_>,
        block_size: u32,
    ) -> (Pick, Result<RemoteAnswer, Missed>) {
        let server = &self.servers[pick.server];
        let known = server.known.load_full();
        let asked = pb::OverlapsRequest {
            model: question
                .model
                .map(|model| model.as_str().to_owned())
                .unwrap_or_default(),
            block_size,
            hashing: question.hashing,
            known_ranks: known.as_ref().map_or(0, |known| known.version),
            prompts: wire::asked(question.prompts),
        };
        let answer = match server.client.clone().overlaps(asked).await {
            Ok(answer) => server.read(&answer.into_inner(), known, question.prompts).map_err(|nonsense| {
                warn!(server = server.url, %nonsense, "an answer of a server of the index cannot be used");
                Missed::Failed
            }),
            Err(status) => Err(server.refused(&status)),
        };
        (pick, answer)
    }

    /// Connects, and tries again and again those who are left out, for ever. A connection is made only while somebody waits
    /// for it, and requests do not wait for long.
    pub async fn keep(&self) -> Infallible {
        let all = (0..self.servers.len()).map(|server| {
            self.try_out(Pick {
                server,
                trial: false,
            })
        });
        futures_util::future::join_all(all).await;
        let mut trials = FuturesUnordered::new();
        let mut looks = tokio::time::interval(LOOK);
        loop {
            tokio::select! {
                _ = looks.tick() => {
                    while let Some(pick) = self.due() {
                        trials.push(self.try_out(pick));
                    }
                }
                Some(()) = trials.next() => {}
            }
        }
    }

    fn due(&self) -> Option<Pick> {
        self.choice.lock().due(Instant::now().into_std())
    }

    /// Asks something that nobody answers but everybody refuses who is ready.
    async fn try_out(&self, pick: Pick) {
        let mut trial = Race::new(self);
        trial.open.push(pick);
        let mut client = self.servers[pick.server].client.clone();
        let ended = match timeout(TRIAL, client.overlaps(pb::OverlapsRequest::default())).await {
            Err(_) => Ended::Late,
            Ok(Err(status)) if !is_refusal(status.code()) => Ended::Failed,
            Ok(_) => Ended::Answered,
        };
        trial.end(pick, ended);
    }

    fn tell(&self, news: Option<News>) {
        let url = |server: usize| self.servers[server].url.as_str();
        match news {
            None => {}
            Some(News::Out(server)) => {
                warn!(
                    server = url(server),
                    "a server of the index does not answer in time and is left out for a while"
                );
            }
            Some(News::AllOut(server)) => {
                self.away.store(true, Ordering::Relaxed);
                warn!(
                    server = url(server),
                    "no server of the index answers in time; requests are routed by what was routed before"
                );
            }
            Some(News::Back(server)) => {
                let server = url(server);
                match self.away.swap(false, Ordering::Relaxed) {
                    true => info!(
                        server,
                        "a server of the index answers again, where none did before"
                    ),
                    false => info!(server, "a server of the index answers again"),
                }
            }
        }
    }

    /// For the pages.
    pub fn shown(&self) -> Value {
        let choice = self.choice.lock();
        let shown = |(at, server): (usize, &Server)| {
            let known = server.known.load();
            let ranks = known.as_ref().map_or(0, |known| known.ranks.rows().len());
            json!({"server": server.url, "asked": choice.is_well(at), "ranks": ranks})
        };
        json!(
            self.servers
                .iter()
                .enumerate()
                .map(shown)
                .collect::<Vec<_>>()
        )
    }
}

/// Whether a server is well that answers so: the question is not for it.
fn is_refusal(code: Code) -> bool {
    use Code::{FailedPrecondition, InvalidArgument, OutOfRange, ResourceExhausted, Unimplemented};
    // The codes of tonic itself for a message that is too long are among them.
    matches!(
        code,
        FailedPrecondition | InvalidArgument | OutOfRange | ResourceExhausted | Unimplemented
    )
}

impl Server {
    fn new(url: &str, settings: &RemoteIndexConfig) -> anyhow::Result<Self> {
        let mut endpoint = Endpoint::from_shared(url.to_owned())?
            .connect_timeout(CONNECT)
            .http2_keep_alive_interval(SILENCE)
            .keep_alive_timeout(SILENCE);
        if url.starts_with("https://") {
            endpoint = endpoint.tls_config(settings.files().read()?)?;
        }
        let client =
            IndexClient::new(endpoint.connect_lazy()).max_decoding_message_size(LONGEST_ANSWER);
        Ok(Self {
            url: url.to_owned(),
            client,
            known: ArcSwapOption::empty(),
            refuses: AtomicBool::new(false),
        })
    }

    /// Reads an answer to a question in which we knew that.
    fn read(
        &self,
        answer: &pb::OverlapsResponse,
        known: Option<Arc<Known>>,
        asked: &[BlockHashes],
    ) -> Result<RemoteAnswer, wire::Nonsense> {
        let version = answer.ranks_version;
        let prompts = wire::found(&answer.prompts, asked)?;
        let newest = self
            .known
            .load_full()
            .filter(|newest| newest.version == version);
        let ranks = match (&answer.ranks, newest) {
            // Another answer has brought them meanwhile.
            (_, Some(newest)) => newest.ranks.clone(),
            (Some(said), None) => {
                let ranks = Arc::new(wire::ranks(said)?);
                self.known.store(Some(Arc::new(Known {
                    version,
                    ranks: ranks.clone(),
                })));
                ranks
            }
            (None, None) => {
                let same = known
                    .filter(|known| known.version == version)
                    .ok_or(wire::Nonsense::Version(version))?;
                same.ranks.clone()
            }
        };
        self.refuses.store(false, Ordering::Relaxed);
        Ok(RemoteAnswer { ranks, prompts })
    }

    fn refused(&self, status: &Status) -> Missed {
        let refused = is_refusal(status.code());
        // Once, and not with every request, until it answers something.
        if refused && !self.refuses.swap(true, Ordering::Relaxed) {
            let (code, because) = (status.code(), status.message());
            warn!(
                server = self.url,
                ?code,
                because,
                "a server of the index refuses to answer"
            );
        } else {
            debug!(server = self.url, %status, "a server of the index does not answer");
        }
        if refused {
            Missed::Refused
        } else {
            Missed::Failed
        }
    }
}

/// Who was asked one question. What is still open when it is dropped is taken back: the request has left.
struct Race<'a> {
    asker: &'a Asker,
    asked: Vec<Pick>,
    open: Vec<Pick>,
}

impl<'a> Race<'a> {
    fn new(asker: &'a Asker) -> Self {
        Self {
            asker,
            asked: Vec::new(),
            open: Vec::new(),
        }
    }

    fn begin(&mut self, first: impl FnOnce(&mut Servers) -> Option<Pick>) -> Option<Pick> {
        let pick = first(&mut self.asker.choice.lock())?;
        self.asked.push(pick);
        self.open.push(pick);
        Some(pick)
    }

    fn beside(&mut self) -> Option<Pick> {
        let asked = self.asked.clone();
        self.begin(|servers| servers.beside(&asked))
    }

    /// Somebody did not answer; whom to ask in its place.
    fn instead(&mut self, pick: Pick, missed: Missed) -> Option<Pick> {
        // Who refuses is well.
        self.end(
            pick,
            if missed == Missed::Refused {
                Ended::Answered
            } else {
                Ended::Failed
            },
        );
        let asked = self.asked.clone();
        self.begin(|servers| servers.instead(&asked))
    }

    /// Somebody has answered; whether it was not the first who was asked. Who was asked before and has not is slow.
    fn won(&mut self, winner: Pick) -> bool {
        self.end(winner, Ended::Answered);
        let before = self.asked.iter().take_while(|pick| **pick != winner);
        let slow: Vec<Pick> = before
            .filter(|pick| self.open.contains(pick))
            .copied()
            .collect();
        slow.iter().for_each(|pick| self.end(*pick, Ended::Late));
        !slow.is_empty()
    }

    fn late(&mut self) {
        std::mem::take(&mut self.open)
            .into_iter()
            .for_each(|pick| self.note(pick, Ended::Late));
    }

    fn end(&mut self, pick: Pick, ended: Ended) {
        self.open.retain(|open| *open != pick);
        self.note(pick, ended);
    }

    fn note(&self, pick: Pick, ended: Ended) {
        let news = self
            .asker
            .choice
            .lock()
            .ended(pick, ended, Instant::now().into_std());
        self.asker.tell(news);
    }
}

impl Drop for Race<'_> {
    fn drop(&mut self) {
        std::mem::take(&mut self.open)
            .into_iter()
            .for_each(|pick| self.note(pick, Ended::Left));
    }
}
