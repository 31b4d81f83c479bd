//! The sessions as a table of states: everything that happens to a session, as a function of the time it happens at.

use std::collections::HashMap;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::tenants::TenantTable;
use super::words::{Stamp, Word};
use super::{Counts, Moved, Refused, SessionName, SessionRules, Stay};
use crate::worker::{WorkerId, WorkerRank};

/// What names an entry. A group and a session never meet, whatever clients call them, and neither do sessions of different
/// models, because no worker could serve both, or sessions of different tenants.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionKey {
    /// The model it is for.
    pub model: Option<Box<str>>,
    /// The tenant of the session, if `clients.tenant_header` is set.
    pub tenant: Option<Arc<str>>,
    /// Whether it is a group.
    pub group: bool,
    /// The id, or the parent's where it is a group.
    pub id: Box<str>,
}

pub(super) use SessionKey as Key;

/// How a request comes into its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Bound { number: u64, target: WorkerRank },
    First { number: u64 },
    Wait,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bond {
    /// Nobody decides, and somebody should: only while earlier requests of the session still run.
    Loose,
    /// A request is deciding; meanwhile another router has bound it there.
    Deciding(Option<WorkerRank>),
    Bound(WorkerRank),
}

#[derive(Debug)]
pub(super) struct Session {
    pub(super) number: u64,
    pub(super) bond: Bond,
    pub(super) running: usize,
    /// When the last request ended, if none runs.
    pub(super) idle: Option<Instant>,
    /// Whether its last request has been seen.
    pub(super) ending: bool,
    pub(super) waiters: Vec<(u64, Waker)>,
    /// Of the bond that is the last one known.
    pub(super) stamp: Stamp,
    /// When other routers were last told that it is in use.
    pub(super) told: Option<Instant>,
    /// The idle time that its client set for the engine.
    pub(super) engine_idle: Option<Duration>,
}

/// All sessions.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) rules: SessionRules,
    pub(super) sessions: HashMap<Arc<Key>, Session>,
    /// The sessions of each tenant, and those of which no request runs.
    pub(super) tenants: TenantTable,
    /// What moved and was not asked for yet; none while nobody wants to know.
    moves: Option<Vec<Moved>>,
    /// The same for other routers, which are told less, and what lets them agree.
    pub(super) words: Option<Vec<Word>>,
    /// Our number among them.
    pub(super) own: u64,
    numbers: u64,
    running: usize,
    waiting: usize,
}

impl Table {
    pub(super) fn new(rules: SessionRules) -> Self {
        Self {
            rules,
            sessions: HashMap::new(),
            tenants: TenantTable::default(),
            moves: None,
            words: None,
            own: 0,
            numbers: 0,
            running: 0,
            waiting: 0,
        }
    }

    pub(super) fn key(&self, name: SessionName<'_>) -> Result<Key, Refused> {
        let most = self.rules.longest_id;
        let wrong = |id: &&str| !self.may_be_called(id);
        if let Some(id) = [Some(name.id), name.parent, name.tenant]
            .into_iter()
            .flatten()
            .find(wrong)
        {
            return Err(Refused::IdLength {
                bytes: id.len(),
                most,
            });
        }
        Ok(Key {
            model: name.model.map(Into::into),
            tenant: name.tenant.map(Into::into),
            group: name.parent.is_some(),
            id: name.parent.unwrap_or(name.id).into(),
        })
    }

    pub(super) fn enter(&mut self, key: &Arc<Key>, now: Instant) -> Result<Step, Refused> {
        self.expire(now);
        if let Some(session) = self.sessions.get_mut(key) {
            let number = session.number;
            return Ok(match session.bond {
                Bond::Bound(target) => {
                    session.running += 1;
                    session.ending = false;
                    self.running += 1;
                    if let Some(since) = session.idle.take() {
                        self.tenants.unset_idle((since, number));
                    }
                    self.tell_again(key, now);
                    Step::Bound { number, target }
                }
                Bond::Loose => {
                    session.bond = Bond::Deciding(None);
                    session.ending = false;
                    Step::First { number }
                }
                Bond::Deciding(_) => Step::Wait,
            });
        }
        self.make_room(key)?;
        let number = self.next_number();
        self.insert(key, Session::new(number, Bond::Deciding(None)));
        Ok(Step::First { number })
    }

    /// Where a session is bound, as far as it is not forgotten by now.
    pub(super) fn target(&self, key: &Key, now: Instant) -> Option<WorkerRank> {
        let session = self.sessions.get(key)?;
        let over = session
            .idle
            .is_some_and(|since| now.saturating_duration_since(since) >= self.rules.ttl);
        match session.bond {
            Bond::Bound(target) if !over => Some(target),
            _ => None,
        }
    }

    /// The request that decided runs in the session from now on. Gives out who has to be woken.
    pub(super) fn bind(
        &mut self,
        key: &Arc<Key>,
        number: u64,
        target: WorkerRank,
        now: Instant,
    ) -> Vec<Waker> {
        let Some(session) = self.session(key, number) else {
            return Vec::new();
        };
        session.bond = Bond::Bound(target);
        session.running += 1;
        let waiters = session.wakers();
        self.running += 1;
        self.stamp(key, target, now);
        self.note(Moved::Came, key, target);
        waiters
    }

    /// The request that should have decided gave up, so what another router has decided meanwhile holds. Gives out who has
    /// to be woken.
    pub(super) fn unbind(&mut self, key: &Arc<Key>, number: u64, now: Instant) -> Vec<Waker> {
        let Some(session) = self.session(key, number) else {
            return Vec::new();
        };
        let elsewhere = match session.bond {
            Bond::Deciding(elsewhere) => elsewhere,
            Bond::Loose | Bond::Bound(_) => None,
        };
        session.bond = elsewhere.map_or(Bond::Loose, Bond::Bound);
        let waiters = session.wakers();
        match (session.running, elsewhere) {
            (0, Some(_)) => self.rest(key, number, now),
            (0, None) => drop(self.take_out(key)),
            _ => {}
        }
        waiters
    }

    /// A request of the session has ended.
    pub(super) fn release(&mut self, key: &Arc<Key>, number: u64, now: Instant) {
        let Some(session) = self.session(key, number) else {
            return;
        };
        session.running -= 1;
        let (last, bond, ending) = (session.running == 0, session.bond, session.ending);
        self.running -= 1;
        match bond {
            // A long request was in use until now, whoever else knows only that it began.
            Bond::Bound(_) if last && !ending => {
                self.rest(key, number, now);
                self.tell_again(key, now);
            }
            Bond::Deciding(_) => {}
            Bond::Bound(_) if last => {
                self.tell_end(key);
                self.remove(key);
            }
            Bond::Loose if last => self.remove(key),
            Bond::Bound(_) | Bond::Loose => {}
        }
    }

    pub(super) fn rebind(&mut self, key: &Arc<Key>, number: u64, target: WorkerRank, now: Instant) {
        let Some(session) = self.session(key, number) else {
            return;
        };
        match session.bond {
            Bond::Deciding(_) => {}
            Bond::Bound(left) if left == target => {}
            bond => {
                session.bond = Bond::Bound(target);
                let was_ours = session.stamp.by == self.own;
                if let Bond::Bound(left) = bond
                    && was_ours
                {
                    self.note(Moved::Left, key, left);
                }
                self.stamp(key, target, now);
                self.note(Moved::Came, key, target);
            }
        }
    }

    /// The session must not go to `gone` any more.
    pub(super) fn loosen(&mut self, key: &Arc<Key>, number: u64, gone: WorkerRank) {
        let own = self.own;
        let Some(session) = self
            .session(key, number)
            .filter(|session| session.bond == Bond::Bound(gone))
        else {
            return;
        };
        session.bond = Bond::Loose;
        if session.stamp.by == own {
            self.note(Moved::Left, key, gone);
        }
    }

    pub(super) fn finish(&mut self, key: &Arc<Key>, number: u64) {
        if let Some(session) = self.session(key, number).filter(|_| !key.group) {
            session.ending = true;
        }
    }

    pub(super) fn set_idle(&mut self, key: &Arc<Key>, number: u64, idle: Duration) {
        if let Some(session) = self.session(key, number) {
            session.engine_idle = Some(idle);
        }
    }

    /// No request of the session runs from now on.
    fn rest(&mut self, key: &Arc<Key>, number: u64, now: Instant) {
        if let Some(session) = self.session(key, number) {
            session.idle = Some(now);
            self.tenants.set_idle((now, number), key.clone());
        }
    }

    /// Whether an id may be so long.
    pub(super) fn may_be_called(&self, id: &str) -> bool {
        (1..=self.rules.longest_id).contains(&id.len())
    }

    /// Makes room for one more session, if need be by removing the one that is idle for longest: of the same tenant where
    /// the tenant has as many as it may, else of all.
    pub(super) fn make_room(&mut self, key: &Key) -> Result<(), Refused> {
        let most = self.rules.most_sessions_per_tenant;
        if let Some(tenant) = key
            .tenant
            .as_deref()
            .filter(|tenant| self.tenants.count(tenant) >= most)
        {
            let oldest = self.tenants.oldest_of(tenant);
            return self
                .evict(oldest)
                .then_some(())
                .ok_or(Refused::TenantFull { most });
        }
        let most = self.rules.most_sessions;
        if self.sessions.len() < most || self.evict(self.tenants.oldest()) {
            return Ok(());
        }
        Err(Refused::Full { most })
    }

    /// Removes an idle session; false where there is none.
    fn evict(&mut self, last_use: Option<(Instant, u64)>) -> bool {
        let key = last_use.and_then(|last_use| self.tenants.unset_idle(last_use));
        key.iter().for_each(|key| self.remove(key));
        key.is_some()
    }

    pub(super) fn expire(&mut self, now: Instant) {
        let ttl = self.rules.ttl;
        let is_due = |(since, _): &(Instant, u64)| now.saturating_duration_since(*since) >= ttl;
        while self.evict(self.tenants.oldest().filter(is_due)) {}
    }

    pub(super) fn insert(&mut self, key: &Arc<Key>, session: Session) {
        self.tenants.add(key);
        self.sessions.insert(key.clone(), session);
    }

    fn take_out(&mut self, key: &Key) -> Option<Session> {
        let session = self.sessions.remove(key)?;
        self.tenants.remove(key);
        Some(session)
    }

    pub(super) fn retain(&mut self, known: impl Fn(WorkerId) -> bool) {
        for session in self.sessions.values_mut() {
            if let Bond::Deciding(elsewhere) = &mut session.bond {
                *elsewhere = elsewhere.filter(|target| known(target.worker));
            }
        }
        let lost = |session: &Session| match session.bond {
            Bond::Bound(target) if !known(target.worker) => Some(target),
            _ => None,
        };
        let lost: Vec<_> = self
            .sessions
            .iter()
            .filter_map(|(key, session)| {
                Some((key.clone(), session.number, session.idle, lost(session)?))
            })
            .collect();
        for (key, number, idle, target) in lost {
            match idle {
                Some(since) => {
                    self.tenants.unset_idle((since, number));
                    self.remove(&key);
                }
                None => self.loosen(&key, number, target),
            }
        }
    }

    /// A number for one more request that waits.
    pub(super) fn wait(&mut self) -> u64 {
        self.waiting += 1;
        self.next_number()
    }

    /// Whom to wake for a request that waits; gives out whom it was before.
    pub(super) fn listen(&mut self, key: &Arc<Key>, waiter: u64, waker: &Waker) -> Option<Waker> {
        let session = self.sessions.get_mut(key)?;
        match session
            .waiters
            .iter_mut()
            .find(|(number, _)| *number == waiter)
        {
            Some((_, known)) => Some(std::mem::replace(known, waker.clone())),
            None => {
                session.waiters.push((waiter, waker.clone()));
                None
            }
        }
    }

    /// A request waits no longer.
    pub(super) fn leave(&mut self, key: &Arc<Key>, waiter: u64) -> Option<Waker> {
        self.waiting -= 1;
        let waiters = &mut self.sessions.get_mut(key)?.waiters;
        let at = waiters.iter().position(|(number, _)| *number == waiter)?;
        Some(waiters.swap_remove(at).1)
    }

    pub(super) fn note_moves(&mut self) {
        self.moves.get_or_insert_default();
    }

    pub(super) fn notes_moves(&self) -> bool {
        self.moves.is_some()
    }

    pub(super) fn has_moved(&self) -> bool {
        self.moves.as_ref().is_some_and(|moves| !moves.is_empty())
    }

    pub(super) fn take_moves(&mut self) -> Vec<Moved> {
        self.moves.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub(super) fn counts(&self) -> Counts {
        Counts {
            sessions: self.sessions.len(),
            running: self.running,
            waiting: self.waiting,
        }
    }

    fn session(&mut self, key: &Arc<Key>, number: u64) -> Option<&mut Session> {
        self.sessions
            .get_mut(key)
            .filter(|session| session.number == number)
    }

    pub(super) fn remove(&mut self, key: &Arc<Key>) {
        if let Some(Session {
            bond: Bond::Bound(target),
            stamp,
            ..
        }) = self.take_out(key)
            && stamp.by == self.own
        {
            self.note(Moved::Left, key, target);
        }
    }

    /// Notes a move, unless nobody has asked for so long that the notes have become several for each session there can be.
    pub(super) fn note(&mut self, moved: fn(Stay) -> Moved, key: &Key, target: WorkerRank) {
        let most = self.most_notes();
        let idle = self
            .sessions
            .get(key)
            .and_then(|session| session.engine_idle);
        let moved = moved(Stay {
            id: key.id.to_string(),
            group: key.group,
            tenant: key.tenant.clone(),
            target,
            idle,
        });
        let Some(moves) = self.moves.as_mut().filter(|moves| moves.len() < most) else {
            return;
        };
        moves.push(moved);
    }

    pub(super) fn most_notes(&self) -> usize {
        self.rules.most_sessions.saturating_mul(4)
    }

    pub(super) fn next_number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }
}

impl Session {
    pub(super) fn new(number: u64, bond: Bond) -> Self {
        let (waiters, stamp) = (Vec::new(), Stamp::default());
        Self {
            number,
            bond,
            running: 0,
            idle: None,
            ending: false,
            waiters,
            stamp,
            told: None,
            engine_idle: None,
        }
    }

    fn wakers(&mut self) -> Vec<Waker> {
        self.waiters.drain(..).map(|(_, waker)| waker).collect()
    }
}
