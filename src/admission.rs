//! The waiting room. A request for which every worker is busy waits here for its turn instead of piling up in an engine,
//! where its place could no longer be chosen. The order is the pure [`Queue`]'s; this part gives it a lock, a clock and
//! those who wait.
//!
//! Nobody is in charge of the queue. A nudge wakes two, independently of one another: the pump, and one of those who wait;
//! whoever runs first looks who may go. So no single slow task can hold the queue up, and the nudge itself does no more
//! than count and wake, because it is called from drops, under other people's locks, and out of `place` itself.

mod answer;
mod classes;
pub mod config;
mod lanes;
mod policy;
mod queue;
mod rounds;
mod turn;
mod waiting;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval_at};
use tracing::error;

pub use answer::{Attempt, Placing, Rejected, Standing, Tally};
pub use classes::{Class, ClassId, Classes, Gate, LimitKind, Limits};
pub use lanes::Pending;
pub use policy::Policy;
pub use queue::{Full, Queue, Ticket};
pub use turn::{Entry, Lane, Turn};
pub use waiting::{Entered, Waiting};

use config::QueueConfig;

/// Most requests placed in one go, so that whoever happens to look does not work for everybody.
const MOST_PER_PASS: usize = 16;

/// What came of a request.
pub type Outcome<P> = Result<<P as Placing>::Placed, Rejected<<P as Placing>::Refusal>>;

/// Whether prefill that is outstanding shrinks by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefill {
    /// It changes only when somebody says so; only marks and rests of workers end by time.
    #[default]
    Steady,
    /// It is estimated to shrink with time, and nobody says so.
    Shrinks,
}

impl Prefill {
    /// How often those who wait are looked at without a nudge.
    fn recheck(self) -> Duration {
        match self {
            Self::Steady => Duration::from_secs(1),
            Self::Shrinks => Duration::from_millis(100),
        }
    }
}

/// Decides who is placed when.
pub struct Admission<P: Placing> {
    placing: Arc<P>,
    classes: Arc<Classes>,
    settings: Settings,
    state: Mutex<State<P>>,
    /// Counts the nudges, so that one that comes while somebody looks is not lost.
    nudges: AtomicU64,
    /// How many wait, to be read without the lock.
    waiting: AtomicUsize,
    for_pump: Notify,
    for_waiting: Notify,
}

struct Settings {
    deadline: Duration,
    refresh_after: Duration,
    retry_after: Duration,
    recheck: Duration,
}

struct State<P: Placing> {
    queue: Queue<Pended<P>>,
    /// The nudges that were followed.
    followed: u64,
    tallies: Vec<Tally>,
}

/// What waits, and whom to tell.
struct Pended<P: Placing> {
    request: P::Request,
    looked_up: Instant,
    tell: oneshot::Sender<Outcome<P>>,
}

type Decided<P> = Vec<(Pended<P>, Outcome<P>)>;

impl<P: Placing> Admission<P> {
    /// A waiting room in which nobody waits. `config` must be without problems.
    pub fn new(placing: Arc<P>, config: &QueueConfig, prefill: Prefill) -> Arc<Self> {
        let classes = Arc::new(Classes::new(config));
        let state = State {
            queue: Queue::new(classes.clone(), Instant::now().into_std()),
            followed: 0,
            tallies: classes.ids().map(|_| Tally::default()).collect(),
        };
        Arc::new(Self {
            placing,
            classes,
            settings: Settings {
                deadline: config.deadline.get(),
                refresh_after: config.refresh_after.get(),
                retry_after: config.retry_after.get(),
                recheck: prefill.recheck(),
            },
            state: Mutex::new(state),
            nudges: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            for_pump: Notify::new(),
            for_waiting: Notify::new(),
        })
    }

    /// Who places the requests.
    pub fn placing(&self) -> &Arc<P> {
        &self.placing
    }

    /// Places a request at once, or lets it wait.
    pub fn enter(self: &Arc<Self>, mut request: P::Request, turn: Turn) -> Entered<P> {
        let class = self.classes.resolve(turn.class.as_deref(), turn.uncached());
        if self.goes_at_once(class)
            && let Some(outcome) = self.attempt(&mut request, class)
        {
            return Entered::Done(outcome);
        }
        self.wait(request, turn, class)
    }

    /// The class that a request would wait in.
    pub fn class_of(&self, turn: &Turn) -> &Class {
        self.classes
            .get(self.classes.resolve(turn.class.as_deref(), turn.uncached()))
    }

    /// Whether there is a class whose requests may have to wait.
    pub fn may_wait(&self) -> bool {
        self.classes.iter().any(|class| !class.gate.never_busy())
    }

    /// Load went down or the fleet changed: those who wait are looked at again. Cheap, and may be called from anywhere.
    pub fn nudge(&self) {
        // Whoever begins to wait counts itself first and only then looks for its place; we changed the load first and only
        // then look who waits. So one of the two sees the other.
        self.nudges.fetch_add(1, Ordering::SeqCst);
        self.wake();
    }

    /// Looks at those who wait, at every nudge and from time to time without one. Runs until it is dropped.
    pub async fn run(&self) {
        let recheck = self.settings.recheck;
        let mut clock = interval_at(Instant::now() + recheck, recheck);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = self.for_pump.notified() => {}
                _ = clock.tick() => {
                    if self.waiting.load(Ordering::SeqCst) == 0 {
                        continue;
                    }
                    self.nudges.fetch_add(1, Ordering::SeqCst);
                }
            }
            self.look();
        }
    }

    /// How each class stands.
    pub fn standing(&self) -> Vec<Standing> {
        let state = self.state.lock();
        let standing = |id: ClassId| Standing {
            class: self.classes.get(id).name.clone(),
            pending: state.queue.pending(id),
            tally: state.tallies[id.at()],
        };
        self.classes.ids().map(standing).collect()
    }

    /// Whether a request need not ask the queue: its class makes no worker busy, nobody waits, or there is nothing to wait
    /// for.
    fn goes_at_once(&self, class: ClassId) -> bool {
        self.classes.get(class).gate.never_busy()
            || self.waiting.load(Ordering::SeqCst) == 0
            || self.placing.workers() == 0
    }

    fn wait(self: &Arc<Self>, request: P::Request, turn: Turn, class: ClassId) -> Entered<P> {
        let workers = self.placing.workers();
        let now = Instant::now();
        let (tell, mut result) = oneshot::channel();
        let payload = Pended {
            request,
            looked_up: now,
            tell,
        };
        let entry = Entry {
            turn,
            class,
            arrived: now.into_std(),
            payload,
        };
        let mut state = self.state.lock();
        let full = state.queue.full(class, workers);
        let ticket = state.queue.push(entry);
        self.count(&state);
        let decided = self.pass(&mut state);
        // Only who really has to wait is counted, or turned away.
        let full = full.filter(|_| state.queue.contains(ticket));
        let removed = full.and_then(|full| {
            state.tallies[class.at()].overflow(full.kind);
            state.queue.remove(ticket)
        });
        state.tallies[class.at()].waited += u64::from(state.queue.contains(ticket));
        self.count(&state);
        drop(state);
        deliver(decided);
        if let Some(full) = full {
            // Those behind it are looked at again, because they had somebody else in front.
            self.wake();
            drop(removed);
            return Entered::Done(Err(self.overflow(class, full)));
        }
        match result.try_recv() {
            Ok(outcome) => Entered::Done(outcome),
            Err(_) => Entered::Waiting(Waiting {
                admission: self.clone(),
                ticket,
                since: now,
                until: now + self.settings.deadline,
                result,
            }),
        }
    }

    fn overflow(
        &self,
        class: ClassId,
        Full {
            kind,
            current,
            limit,
        }: Full,
    ) -> Rejected<P::Refusal> {
        let class = self.classes.get(class).name.clone();
        Rejected::Overflow {
            class,
            kind,
            current,
            limit,
            retry_after: self.settings.retry_after,
        }
    }

    /// Places those who may go.
    fn look(&self) {
        let decided = self.pass(&mut self.state.lock());
        deliver(decided);
    }

    /// Lets those go who may, in their order. What came of them is told without the lock: it may wake, and it may drop.
    fn pass(&self, state: &mut State<P>) -> Decided<P> {
        // Read before anything is placed: a nudge from now on leads to another pass.
        let nudges = self.nudges.load(Ordering::SeqCst);
        if state.followed != nudges {
            state.followed = nudges;
            state.queue.reopen();
        }
        let mut decided = Vec::new();
        while decided.len() < MOST_PER_PASS
            && let Some((entry, outcome)) = state.queue.next(|entry| self.turn_of(entry))
        {
            decided.push((entry.payload, outcome));
        }
        self.count(state);
        if decided.len() == MOST_PER_PASS {
            self.wake();
        }
        decided
    }

    fn turn_of(&self, entry: &mut Entry<Pended<P>>) -> Option<Outcome<P>> {
        let Pended {
            request, looked_up, ..
        } = &mut entry.payload;
        let refresh_after = self.settings.refresh_after;
        if !refresh_after.is_zero() && looked_up.elapsed() >= refresh_after {
            *looked_up = Instant::now();
            let refreshed = catch_unwind(AssertUnwindSafe(|| self.placing.refresh(request)));
            if refreshed.is_err() {
                error!("refreshing a waiting request panicked; it goes on with what it knew");
            }
        }
        self.attempt(request, entry.class)
    }

    /// One try to place a request; `None`: busy. A panic concerns this request alone.
    fn attempt(&self, request: &mut P::Request, class: ClassId) -> Option<Outcome<P>> {
        let gate = &self.classes.get(class).gate;
        match catch_unwind(AssertUnwindSafe(|| self.placing.place(request, gate))) {
            Ok(Attempt::Placed(placed)) => Some(Ok(placed)),
            Ok(Attempt::Refused(refusal)) => Some(Err(Rejected::Refused(refusal))),
            Ok(Attempt::Busy) => None,
            Err(_) => {
                error!("placing a request panicked");
                Some(Err(Rejected::Failed))
            }
        }
    }

    /// Takes one out whose time is up; `None` if it has left the queue already.
    fn expire(&self, ticket: Ticket, since: Instant) -> Option<Rejected<P::Refusal>> {
        let entry = self.take(ticket, |tally| tally.expired += 1)?;
        let class = self.classes.get(entry.class).name.clone();
        Some(Rejected::Deadline {
            class,
            waited: since.elapsed(),
            retry_after: self.settings.retry_after,
        })
    }

    /// Takes one out whose client has left.
    fn leave(&self, ticket: Ticket) {
        self.take(ticket, |tally| tally.left += 1);
    }

    fn take(&self, ticket: Ticket, tally: impl FnOnce(&mut Tally)) -> Option<Entry<Pended<P>>> {
        let mut state = self.state.lock();
        let entry = state.queue.remove(ticket)?;
        tally(&mut state.tallies[entry.class.at()]);
        self.count(&state);
        drop(state);
        // It may have stood in front of somebody who can go.
        self.wake();
        Some(entry)
    }

    fn count(&self, state: &State<P>) {
        self.waiting.store(state.queue.len(), Ordering::SeqCst);
    }

    fn wake(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.for_pump.notify_one();
            self.for_waiting.notify_one();
        }
    }
}

/// Tells what was decided. What cannot be told, because its client has left, is dropped and thereby given back.
fn deliver<P: Placing>(decided: Decided<P>) {
    for (pended, outcome) in decided {
        drop(pended.tell.send(outcome));
    }
}

#[cfg(test)]
mod tests;
