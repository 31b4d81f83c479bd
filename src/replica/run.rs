//! One replica at work: what happens here goes out in batches, what comes in is counted, and now and then it is looked at
//! what time has changed. All of it is done in one task, beside the requests.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::bail;
use parking_lot::Mutex;
use prost::Message as _;
use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc};
use tracing::{debug, info, warn};

use super::config::ReplicasConfig;
use super::gate::Gate;
use super::link::{Heard, Link};
use super::mirror::World;
use super::own::Own;
use super::peers::{Noted, Outcome, Peers, Wish};
use super::proto::{Batch, SnapshotPart};
use super::rates::{Kind, Rates};
use super::{ReplicaId, Told};
use crate::block::tracking::Key;
use crate::entrance::Entrance;
use crate::fleet::Member;
use crate::lifecycle::{Readiness, ReadyGuard};
use crate::load::Until;
use crate::metrics::{Metrics, OutcomeLabel};
use crate::router::Routed;
use crate::worker::Role;

/// Events that are taken in at one go.
const AT_ONCE: usize = 1024;

/// Signs of life during a lease, so that one that is lost is no silence.
const SIGNS: u32 = 4;

/// At the start, others may take so long to say that they are there.
const GREETING: Duration = Duration::from_millis(300);

/// How often it is looked what time has changed.
const LOOK: Duration = Duration::from_millis(100);

/// When it is tried again where there is something to be mended.
const AGAIN: Duration = Duration::from_secs(5);

type HearFirstToken = Box<dyn Fn(&str) + Send + Sync>;

/// This process among its peers.
pub struct Replica {
    pub(super) settings: ReplicasConfig,
    id: ReplicaId,
    pub(super) entrance: Arc<Entrance>,
    metrics: Arc<Metrics>,
    pub(super) state: Mutex<State>,
    gate: Arc<Gate>,
    pub(super) readiness: Readiness,
    /// Since when there is a connection.
    pub(super) connected: Mutex<Option<Instant>>,
    link: Mutex<Option<Arc<Link>>>,
    words: Notify,
    tell: mpsc::UnboundedSender<Told>,
    first_token: OnceLock<HearFirstToken>,
    /// What happened here and is not told yet. Whoever runs holds it.
    news: tokio::sync::Mutex<mpsc::UnboundedReceiver<Told>>,
    starting: Mutex<Option<Starting>>,
    began: Instant,
    rates: Mutex<(Rates, Instant)>,
    key: Option<Key>,
    /// What NATS refused last.
    complained: Mutex<String>,
}

pub(super) struct State {
    pub(super) own: Own,
    pub(super) peers: Peers,
    random: SmallRng,
}

/// We have not heard of all others.
struct Starting {
    guard: ReadyGuard,
    until: Instant,
    greeted: Option<Instant>,
}

impl Replica {
    /// Begins to note what happens here.
    pub fn new(
        settings: &ReplicasConfig,
        name: String,
        (entrance, metrics): (Arc<Entrance>, Arc<Metrics>),
        (ready, readiness): (ReadyGuard, Readiness),
        key: Option<Key>,
    ) -> Arc<Self> {
        let id = ReplicaId(rand::random());
        let (tell, news) = mpsc::unbounded_channel();
        let router = entrance.router().clone();
        let (of_load, of_router) = (tell.clone(), tell.clone());
        router
            .load()
            .on_news(move |news| _ = of_load.send(Told::Load(news)));
        router
            .on_overloaded(move |worker, left| _ = of_router.send(Told::Overloaded(worker, left)));
        let (of_predictions, gate) = (tell.clone(), Arc::<Gate>::default());
        let admits = gate.clone();
        router.on_routed(move |member, prompts| {
            if admits.admits() {
                _ = of_predictions.send(Told::Routed(Routed::of(member, prompts)));
            }
        });
        let peers = Peers::new(id, settings.lease.get());
        let random = SmallRng::seed_from_u64(rand::random());
        let state = State {
            own: Own::new(id, name).with_key(key.clone()),
            peers,
            random,
        };
        let starting = Starting {
            guard: ready,
            until: Instant::now() + settings.wait.get(),
            greeted: None,
        };
        let replica = Arc::new(Self {
            settings: settings.clone(),
            id,
            entrance,
            metrics,
            state: Mutex::new(state),
            gate,
            readiness,
            connected: Mutex::new(None),
            link: Mutex::new(None),
            words: Notify::new(),
            tell,
            first_token: OnceLock::new(),
            news: tokio::sync::Mutex::new(news),
            starting: Mutex::new(Some(starting)),
            began: Instant::now(),
            rates: Mutex::new((Rates::default(), Instant::now())),
            complained: Mutex::default(),
            key,
        });
        if let Some(sessions) = replica.entrance.sessions() {
            let heard = Arc::downgrade(&replica);
            sessions.on_word(id.0, move || {
                if let Some(replica) = heard.upgrade() {
                    replica.words.notify_one();
                }
            });
        }
        replica
    }

    /// From now on `hear` is told the names of exchanges whose first token another replica has seen.
    pub fn on_first_token(&self, hear: impl Fn(&str) + Send + Sync + 'static) {
        self.first_token.set(Box::new(hear)).ok();
    }

    /// The first token of an exchange of this name was seen, and it is none of ours.
    pub fn first_token_of(&self, name: &str) {
        self.tell.send(Told::FirstTokenOf(name.to_owned())).ok();
    }

    /// How it stands, for people.
    pub fn shown(&self) -> Value {
        let state = self.state.lock();
        json!({
            "replica": self.id,
            "group": self.settings.group,
            "connected": self.is_connected(),
            "reservations": state.own.len(),
            "peers": state.peers.shown(Instant::now()),
            "word_takes_ms": self.rates.lock().0.delay().map(|seconds| seconds * 1e3),
            "bookings_under_way": self.entrance.router().unheard(),
        })
    }

    /// Talks with the others, for ever.
    pub async fn run(&self) -> anyhow::Result<()> {
        let mut news = self.news.lock().await;
        let (link, mut ears) = loop {
            match Link::open(&self.settings, self.id).await {
                Ok(opened) => break opened,
                Err(error) => self.alone(&mut news, &error).await?,
            }
        };
        let link = Arc::new(link);
        *self.link.lock() = Some(link.clone());
        let (mut ticks, mut looks) = (every(self.settings.lease.get() / SIGNS), every(LOOK));
        let (mut taken, mut due) = (Vec::with_capacity(AT_ONCE), None::<tokio::time::Instant>);
        loop {
            let flush = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = flush => {
                    due = None;
                    self.tell(&link).await;
                }
                count = news.recv_many(&mut taken, AT_ONCE) => {
                    if count == 0 {
                        bail!("nobody tells what happens here any more");
                    }
                    self.note(taken.drain(..));
                    due.get_or_insert_with(|| tokio::time::Instant::now() + self.settings.batch.get());
                }
                () = self.words.notified() => {
                    self.note_words();
                    due.get_or_insert_with(|| tokio::time::Instant::now() + self.settings.batch.get());
                }
                heard = ears.next() => self.hear(&link, heard).await?,
                _ = ticks.tick() => self.sign(&link, Batch::default()).await,
                _ = looks.tick() => {
                    let outcome = self.look();
                    self.settle(&link, outcome).await;
                    if self.begins_to_drain() {
                        self.sign(&link, Batch::default()).await;
                    }
                    link.echo(self.began.elapsed().as_nanos() as u64).await;
                }
            }
        }
    }

    /// There is no way to the others, because of something that has to be mended. Nothing of what happens here is kept for
    /// longer than needed, and nobody waits for anybody.
    async fn alone(
        &self,
        news: &mut mpsc::UnboundedReceiver<Told>,
        error: &anyhow::Error,
    ) -> anyhow::Result<()> {
        warn!(
            error = format!("{error:#}"),
            "NATS cannot be used; decisions know only of bookings of this replica"
        );
        let until = tokio::time::Instant::now() + AGAIN;
        let (mut looks, mut taken) = (every(LOOK), Vec::with_capacity(AT_ONCE));
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(until) => return Ok(()),
                count = news.recv_many(&mut taken, AT_ONCE) => {
                    if count == 0 {
                        bail!("nobody tells what happens here any more");
                    }
                    self.note(taken.drain(..));
                }
                _ = looks.tick() => {
                    self.note_words();
                    drop(self.state.lock().own.batches());
                    drop(self.look());
                }
            }
        }
    }

    pub(super) fn is_connected(&self) -> bool {
        self.connected.lock().is_some()
    }

    /// Says goodbye, once nothing is booked here any more.
    pub async fn farewell(&self) {
        let link = self.link.lock().take();
        let Some(link) = link else { return };
        self.sign(
            &link,
            Batch {
                leaving: true,
                ..Batch::default()
            },
        )
        .await;
        link.flush().await;
    }

    /// Does what is to be done about something heard.
    async fn hear(&self, link: &Link, heard: Heard) -> anyhow::Result<()> {
        match heard {
            Heard::State(Some(state)) => self.changed(link, &state).await,
            Heard::Echo(Some(message)) => {
                let sent = message.payload[..]
                    .try_into()
                    .map(u64::from_be_bytes)
                    .map(Duration::from_nanos);
                let took = sent
                    .ok()
                    .and_then(|sent| self.began.elapsed().checked_sub(sent));
                took.into_iter()
                    .for_each(|took| self.rates.lock().0.took(took));
            }
            Heard::Batch(Some(message)) if link.is_own(&message.subject) => {}
            Heard::Batch(Some(message)) => match Batch::decode(message.payload) {
                Ok(batch) if !link.is_of(&message.subject, ReplicaId(batch.replica)) => {
                    self.count("garbage")
                }
                Ok(batch) => {
                    self.count("received");
                    let outcome = self.within(|State { peers, random, .. }, world, now| {
                        peers.hear(batch, world, now, random)
                    });
                    self.settle(link, outcome).await;
                }
                Err(error) => self.garbage(&error),
            },
            Heard::Answer(Some(message)) => match SnapshotPart::decode(message.payload) {
                Ok(part) => {
                    let outcome = self.within(|State { peers, random, .. }, world, now| {
                        peers.take(part, world, now, random)
                    });
                    self.settle(link, outcome).await;
                }
                Err(error) => self.garbage(&error),
            },
            Heard::Ask(Some(message)) => {
                if let Some(reply) = message.reply {
                    self.answer(link, reply.to_string()).await;
                }
            }
            Heard::Batch(None)
            | Heard::Ask(None)
            | Heard::Answer(None)
            | Heard::Echo(None)
            | Heard::State(None) => {
                bail!("the connection has ended for good")
            }
        }
        Ok(())
    }

    /// Takes note of what happened here.
    fn note(&self, told: impl Iterator<Item = Told>) {
        let own = &mut self.state.lock().own;
        for told in told {
            if matches!(told, Told::Routed(_)) {
                self.gate.taken();
            }
            own.note(&told);
        }
    }

    fn note_words(&self) {
        let words: Vec<_> = self
            .entrance
            .sessions()
            .into_iter()
            .flat_map(|sessions| sessions.words())
            .collect();
        self.note(words.into_iter().map(Told::Session));
    }

    /// A sign of life, of one kind or another. It says how much was told, so that has to be told before.
    async fn sign(&self, link: &Link, kind: Batch) {
        self.tell(link).await;
        let sign = self.state.lock().own.sign();
        self.send(
            link,
            &Batch {
                hello: kind.hello,
                leaving: kind.leaving,
                ..sign
            },
        )
        .await;
    }

    /// Tells what happened here.
    async fn tell(&self, link: &Link) {
        let batches = self.state.lock().own.batches();
        for batch in &batches {
            self.send(link, batch).await;
        }
    }

    async fn send(&self, link: &Link, batch: &Batch) {
        let sent = link.tell(batch).await;
        self.count(if sent { "sent" } else { "lost" });
    }

    /// Tells one who asked how everything stands.
    async fn answer(&self, link: &Link, to: String) {
        let mut sessions = self
            .entrance
            .sessions()
            .map(|sessions| sessions.all_words())
            .unwrap_or_default();
        let marks = self.entrance.router().overload_marks();
        self.tell(link).await;
        let parts = {
            let State { own, peers, .. } = &*self.state.lock();
            // Who is there tells of its own sessions itself.
            sessions.retain(|word| !peers.knows(ReplicaId(word.by())));
            let marks = marks
                .into_iter()
                .map(|(worker, left)| Told::Overloaded(worker, left));
            own.snapshot(
                &sessions
                    .into_iter()
                    .map(Told::Session)
                    .chain(marks)
                    .collect::<Vec<_>>(),
            )
        };
        for part in &parts {
            if !link.answer(to.clone(), part).await {
                return;
            }
        }
        self.count("snapshot_given");
    }

    /// What happened to the connection.
    async fn changed(&self, link: &Link, event: &async_nats::Event) {
        let was_up = self.is_connected();
        let is_up = match event {
            async_nats::Event::Connected => true,
            async_nats::Event::Disconnected | async_nats::Event::Closed => false,
            async_nats::Event::ServerError(_) | async_nats::Event::ClientError(_) => {
                self.complain(&event.to_string());
                was_up
            }
            _ => was_up,
        };
        if is_up != was_up {
            *self.connected.lock() = is_up.then(Instant::now);
        }
        self.metrics.replica_connected.set(i64::from(is_up));
        match (was_up, is_up) {
            (false, true) => {
                info!(replica = %self.id, group = self.settings.group, "connected to NATS")
            }
            (true, false) => {
                warn!(%event, "NATS is gone; decisions know only of bookings of this replica until it is back");
            }
            _ => debug!(%event, "NATS"),
        }
        if !matches!(event, async_nats::Event::Connected) {
            return;
        }
        self.complained.lock().clear();
        self.state.lock().own.limit(link.most_bytes());
        self.sign(
            link,
            Batch {
                hello: true,
                ..Batch::default()
            },
        )
        .await;
        if let Some(starting) = &mut *self.starting.lock() {
            starting.greeted.get_or_insert_with(Instant::now);
        }
    }

    /// Says what NATS refuses, once.
    fn complain(&self, problem: &str) {
        let mut complained = self.complained.lock();
        if *complained != problem {
            warn!(problem, "NATS");
            problem.clone_into(&mut complained);
        }
    }

    /// Looks what time has changed.
    fn look(&self) -> Outcome {
        let outcome = self.within(|State { peers, .. }, world, now| peers.look(world, now));
        self.reckon();
        self.inherit();
        let mut starting = self.starting.lock();
        let now = Instant::now();
        let is_over = |starting: &mut Starting| {
            let greeted = starting.greeted.is_some_and(|at| now >= at + GREETING);
            now >= starting.until || greeted && self.state.lock().peers.are_level()
        };
        let ended = starting.take_if(is_over);
        drop(starting);
        if let Some(Starting { guard, until, .. }) = ended {
            if now >= until {
                guard.give_up()
            } else {
                guard.done()
            }
        }
        outcome
    }

    /// Lets the router reckon with what is under way to us.
    fn reckon(&self) {
        let (rates, looked) = &mut *self.rates.lock();
        let elapsed = std::mem::replace(looked, Instant::now()).elapsed();
        if !self.is_connected() {
            rates.forget();
        }
        let router = self.entrance.router();
        let fleet = router.fleet();
        let ranks = |(model, until): &Kind| {
            let is_asked = |member: &&Member| {
                member.worker.model == *model
                    && (member.worker.role == Role::Prefill) == (*until == Until::FirstToken)
            };
            fleet.members().filter(is_asked).count()
        };
        router.expect_unheard(rates.look(elapsed, self.settings.batch.get(), ranks));
    }

    fn within(&self, work: impl FnOnce(&mut State, &World<'_>, Instant) -> Outcome) -> Outcome {
        let router = self.entrance.router();
        let fleet = router.fleet();
        let world = World {
            load: router.load(),
            generation: fleet.generation(),
            slot: &|rank| fleet.slot(rank),
            key: self.key.as_ref(),
            sessions: self.entrance.sessions().map(|sessions| &**sessions),
            overloaded: &|worker, left| router.mark_overloaded(worker, left),
            booked: &|booking| {
                if let Some(member) = fleet.slot(booking.rank).and_then(|slot| fleet.member(slot)) {
                    self.rates
                        .lock()
                        .0
                        .note((member.worker.model.clone(), booking.until), booking);
                }
            },
            routed: &|routed| router.routed_elsewhere(routed),
            first_token: &|name| {
                self.first_token
                    .get()
                    .into_iter()
                    .for_each(|hear| hear(name))
            },
        };
        let mut state = self.state.lock();
        let outcome = work(&mut state, &world, Instant::now());
        self.metrics.replica_peers.set(state.peers.len() as i64);
        self.gate.heard_by(state.peers.len());
        self.metrics
            .replica_reservations
            .set(state.peers.reservations() as i64);
        outcome
    }

    /// Says what was noted, and does what is wished.
    async fn settle(&self, link: &Link, outcome: Outcome) {
        for noted in outcome.noted {
            match noted {
                Noted::Came(peer, name) => info!(%peer, name, "another replica is there"),
                Noted::Left(peer, name) => info!(%peer, name, "another replica has left"),
                Noted::Level(peer, reservations) => {
                    self.count("snapshot_taken");
                    debug!(%peer, reservations, "everything of another replica is known");
                }
                Noted::Gap(peer) => {
                    self.count("gap");
                    debug!(%peer, "words of another replica were lost; it is asked how it stands");
                }
                Noted::Silent(peer, name, reservations) => {
                    warn!(%peer, name, reservations, "another replica has fallen silent; its reservations do not count any more");
                }
            }
        }
        for wish in outcome.wishes {
            match wish {
                Wish::Ask(peer) => _ = link.ask_all(peer).await,
                Wish::Sign => self.sign(link, Batch::default()).await,
            }
        }
    }

    fn garbage(&self, error: &prost::DecodeError) {
        self.count("garbage");
        debug!(%error, "a message is none of ours");
    }

    fn count(&self, outcome: &'static str) {
        self.metrics
            .replica_messages
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
    }
}

/// Ticks that do not come in a burst after a pause.
fn every(period: Duration) -> tokio::time::Interval {
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    ticks
}
