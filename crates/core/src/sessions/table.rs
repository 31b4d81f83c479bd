//! State table of the sessions: every transition as a function of the time at which it happens.

use std::collections::HashMap;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::key::{SessionKey, SessionName};
use super::rules::{MAX_ID_LENGTH, SessionError, SessionRules};
use super::store::SessionRecording;
use super::tenants::TenantTable;
use super::updates::{BindingVersion, ChangeLog, SessionBinding, SessionMove, SessionUpdate};
use crate::worker::{WorkerId, WorkerRank};

/// Size of the session store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SessionCounts {
    /// Retained sessions.
    pub sessions: usize,
    /// Requests that hold a lease.
    pub running: usize,
    /// Requests that wait for the first request of their session.
    pub waiting: usize,
}

/// Transition when a request enters its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EnterStep {
    Bound { number: u64, target: WorkerRank },
    Decide { number: u64 },
    Wait,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BindingState {
    /// No request is deciding, although one should; only while earlier requests of the session run.
    Unbound,
    /// A request is deciding. Another replica may have bound the session to this rank meanwhile.
    Deciding(Option<WorkerRank>),
    Bound(WorkerRank),
}

#[derive(Debug)]
pub(super) struct SessionRecord {
    pub(super) number: u64,
    pub(super) binding: BindingState,
    pub(super) running: usize,
    /// Time at which the last request ended, if none runs.
    pub(super) idle_since: Option<Instant>,
    /// Whether the last request has arrived.
    pub(super) is_ending: bool,
    pub(super) waiters: Vec<(u64, Waker)>,
    /// Version of the last known binding.
    pub(super) version: BindingVersion,
    /// Time at which its use was last announced to the other replicas.
    pub(super) announced_at: Option<Instant>,
    /// Idle timeout that the client set for the engine.
    pub(super) engine_idle_timeout: Option<Duration>,
}

/// Table of all sessions.
#[derive(Debug)]
pub(super) struct SessionTable {
    pub(super) rules: SessionRules,
    pub(super) sessions: HashMap<Arc<SessionKey>, SessionRecord>,
    /// Session counts per tenant, and the idle sessions.
    pub(super) tenants: TenantTable,
    /// Moves for the engines.
    pub(super) moves: ChangeLog<SessionMove>,
    /// Updates for other replicas.
    pub(super) updates: ChangeLog<SessionUpdate>,
    /// Id of this replica.
    pub(super) own_router: u64,
    last_number: u64,
    running: usize,
    waiting: usize,
}

impl SessionTable {
    pub(super) fn new(rules: SessionRules, recording: SessionRecording) -> Self {
        Self {
            moves: ChangeLog::new(recording.moves, &rules),
            updates: ChangeLog::new(recording.updates_by.is_some(), &rules),
            own_router: recording.updates_by.unwrap_or_default(),
            rules,
            sessions: HashMap::new(),
            tenants: TenantTable::default(),
            last_number: 0,
            running: 0,
            waiting: 0,
        }
    }

    pub(super) fn key(&self, name: SessionName<'_>) -> Result<SessionKey, SessionError> {
        let ids = [Some(name.id), name.parent, name.tenant];
        if let Some(id) = ids.into_iter().flatten().find(|id| !is_valid_id(id)) {
            return Err(SessionError::IdLength { bytes: id.len() });
        }
        Ok(SessionKey {
            model: name.model.map(Into::into),
            tenant: name.tenant.map(Into::into),
            group: name.parent.is_some(),
            id: name.parent.unwrap_or(name.id).into(),
        })
    }

    pub(super) fn enter(
        &mut self,
        key: &Arc<SessionKey>,
        now: Instant,
    ) -> Result<EnterStep, SessionError> {
        self.expire(now);
        if let Some(session) = self.sessions.get_mut(key) {
            let number = session.number;
            return Ok(match session.binding {
                BindingState::Bound(target) => {
                    session.running += 1;
                    session.is_ending = false;
                    self.running += 1;
                    if let Some(since) = session.idle_since.take() {
                        self.tenants.unset_idle((since, number));
                    }
                    self.announce_use(key, now);
                    EnterStep::Bound { number, target }
                }
                BindingState::Unbound => {
                    session.binding = BindingState::Deciding(None);
                    session.is_ending = false;
                    EnterStep::Decide { number }
                }
                BindingState::Deciding(_) => EnterStep::Wait,
            });
        }
        self.make_room(key)?;
        let number = self.next_number();
        self.insert(
            key,
            SessionRecord::new(number, BindingState::Deciding(None)),
        );
        Ok(EnterStep::Decide { number })
    }

    /// Returns the rank that a session is bound to, unless it has expired.
    pub(super) fn target(&self, key: &SessionKey, now: Instant) -> Option<WorkerRank> {
        let session = self.sessions.get(key)?;
        let is_expired = session
            .idle_since
            .is_some_and(|since| now.saturating_duration_since(since) >= self.rules.ttl);
        match session.binding {
            BindingState::Bound(target) if !is_expired => Some(target),
            _ => None,
        }
    }

    /// Binds the session on behalf of the deciding request, which runs from now on. Returns the
    /// wakers to wake.
    pub(super) fn bind(
        &mut self,
        key: &Arc<SessionKey>,
        number: u64,
        target: WorkerRank,
        now: Instant,
    ) -> Vec<Waker> {
        let Some(session) = self.session(key, number) else {
            return Vec::new();
        };
        session.binding = BindingState::Bound(target);
        session.running += 1;
        let waiters = session.wakers();
        self.running += 1;
        self.record_binding(key, now);
        self.push_move(SessionMove::Bound, key, target);
        waiters
    }

    /// Handles a deciding request that gave up. A binding that another replica made meanwhile takes
    /// effect. Returns the wakers to wake.
    pub(super) fn unbind(
        &mut self,
        key: &Arc<SessionKey>,
        number: u64,
        now: Instant,
    ) -> Vec<Waker> {
        let Some(session) = self.session(key, number) else {
            return Vec::new();
        };
        let remote_target = match session.binding {
            BindingState::Deciding(remote_target) => remote_target,
            BindingState::Unbound | BindingState::Bound(_) => None,
        };
        session.binding = remote_target.map_or(BindingState::Unbound, BindingState::Bound);
        let waiters = session.wakers();
        match (session.running, remote_target) {
            (0, Some(_)) => self.mark_idle(key, number, now),
            (0, None) => drop(self.remove_record(key)),
            _ => {}
        }
        waiters
    }

    /// Handles the end of a request.
    pub(super) fn release(&mut self, key: &Arc<SessionKey>, number: u64, now: Instant) {
        let Some(session) = self.session(key, number) else {
            return;
        };
        session.running -= 1;
        let is_last = session.running == 0;
        let binding = session.binding;
        let is_ending = session.is_ending;
        self.running -= 1;
        match binding {
            // Other replicas know only the start of a long request, so its end is announced as
            // well.
            BindingState::Bound(_) if is_last && !is_ending => {
                self.mark_idle(key, number, now);
                self.announce_use(key, now);
            }
            BindingState::Deciding(_) => {}
            BindingState::Bound(_) if is_last => {
                self.announce_end(key);
                self.remove(key);
            }
            BindingState::Unbound if is_last => self.remove(key),
            BindingState::Bound(_) | BindingState::Unbound => {}
        }
    }

    pub(super) fn rebind(
        &mut self,
        key: &Arc<SessionKey>,
        number: u64,
        target: WorkerRank,
        now: Instant,
    ) {
        let Some(session) = self.session(key, number) else {
            return;
        };
        match session.binding {
            BindingState::Deciding(_) => {}
            BindingState::Bound(left) if left == target => {}
            binding => {
                session.binding = BindingState::Bound(target);
                let was_own = session.version.router == self.own_router;
                if let BindingState::Bound(left) = binding
                    && was_own
                {
                    self.push_move(SessionMove::Unbound, key, left);
                }
                self.record_binding(key, now);
                self.push_move(SessionMove::Bound, key, target);
            }
        }
    }

    /// Unbinds a session from a rank that has left.
    pub(super) fn unbind_from(&mut self, key: &Arc<SessionKey>, number: u64, gone: WorkerRank) {
        let own = self.own_router;
        let Some(session) = self
            .session(key, number)
            .filter(|session| session.binding == BindingState::Bound(gone))
        else {
            return;
        };
        session.binding = BindingState::Unbound;
        if session.version.router == own {
            self.push_move(SessionMove::Unbound, key, gone);
        }
    }

    pub(super) fn finish(&mut self, key: &Arc<SessionKey>, number: u64) {
        if let Some(session) = self.session(key, number).filter(|_| !key.group) {
            session.is_ending = true;
        }
    }

    pub(super) fn set_idle(&mut self, key: &Arc<SessionKey>, number: u64, idle: Duration) {
        if let Some(session) = self.session(key, number) {
            session.engine_idle_timeout = Some(idle);
        }
    }

    /// Marks a session without running requests as idle.
    fn mark_idle(&mut self, key: &Arc<SessionKey>, number: u64, now: Instant) {
        if let Some(session) = self.session(key, number) {
            session.idle_since = Some(now);
            self.tenants.set_idle((now, number), key.clone());
        }
    }

    /// Makes room for one more session. At a limit, removes the least recently used idle session,
    /// of the same tenant if its limit is reached.
    pub(super) fn make_room(&mut self, key: &SessionKey) -> Result<(), SessionError> {
        let limit = self.rules.max_sessions_per_tenant;
        if let Some(tenant) = key
            .tenant
            .as_deref()
            .filter(|tenant| self.tenants.count(tenant) >= limit)
        {
            let oldest = self.tenants.oldest_of(tenant);
            return self
                .evict(oldest)
                .then_some(())
                .ok_or(SessionError::TenantFull { limit });
        }
        let limit = self.rules.max_sessions;
        if self.sessions.len() < limit || self.evict(self.tenants.oldest()) {
            return Ok(());
        }
        Err(SessionError::Full { limit })
    }

    /// Removes an idle session. Returns false if there is none.
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

    pub(super) fn insert(&mut self, key: &Arc<SessionKey>, session: SessionRecord) {
        self.tenants.add(key);
        self.sessions.insert(key.clone(), session);
    }

    fn remove_record(&mut self, key: &SessionKey) -> Option<SessionRecord> {
        let session = self.sessions.remove(key)?;
        self.tenants.remove(key);
        Some(session)
    }

    pub(super) fn retain(&mut self, is_known: impl Fn(WorkerId) -> bool) {
        for session in self.sessions.values_mut() {
            if let BindingState::Deciding(remote_target) = &mut session.binding {
                *remote_target = remote_target.filter(|target| is_known(target.worker));
            }
        }
        let lost = |session: &SessionRecord| match session.binding {
            BindingState::Bound(target) if !is_known(target.worker) => Some(target),
            _ => None,
        };
        let lost: Vec<_> = self
            .sessions
            .iter()
            .filter_map(|(key, session)| {
                Some((
                    key.clone(),
                    session.number,
                    session.idle_since,
                    lost(session)?,
                ))
            })
            .collect();
        for (key, number, idle_since, target) in lost {
            match idle_since {
                Some(since) => {
                    self.tenants.unset_idle((since, number));
                    self.remove(&key);
                }
                None => self.unbind_from(&key, number, target),
            }
        }
    }

    /// Returns the number of one more waiting request.
    pub(super) fn add_waiter(&mut self) -> u64 {
        self.waiting += 1;
        self.next_number()
    }

    /// Sets the waker of a waiting request. Returns the previous one.
    pub(super) fn set_waker(
        &mut self,
        key: &Arc<SessionKey>,
        waiter: u64,
        waker: &Waker,
    ) -> Option<Waker> {
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

    /// Removes a waiting request. Returns its waker.
    pub(super) fn remove_waiter(&mut self, key: &Arc<SessionKey>, waiter: u64) -> Option<Waker> {
        self.waiting -= 1;
        let waiters = &mut self.sessions.get_mut(key)?.waiters;
        let at = waiters.iter().position(|(number, _)| *number == waiter)?;
        Some(waiters.swap_remove(at).1)
    }

    pub(super) fn counts(&self) -> SessionCounts {
        SessionCounts {
            sessions: self.sessions.len(),
            running: self.running,
            waiting: self.waiting,
        }
    }

    fn session(&mut self, key: &Arc<SessionKey>, number: u64) -> Option<&mut SessionRecord> {
        self.sessions
            .get_mut(key)
            .filter(|session| session.number == number)
    }

    pub(super) fn remove(&mut self, key: &Arc<SessionKey>) {
        if let Some(SessionRecord {
            binding: BindingState::Bound(target),
            version,
            ..
        }) = self.remove_record(key)
            && version.router == self.own_router
        {
            self.push_move(SessionMove::Unbound, key, target);
        }
    }

    /// Records a move to report to the engines.
    pub(super) fn push_move(
        &mut self,
        to_move: fn(SessionBinding) -> SessionMove,
        key: &SessionKey,
        target: WorkerRank,
    ) {
        let session = self.sessions.get(key);
        self.moves.push(to_move(SessionBinding {
            id: key.id.to_string(),
            group: key.group,
            tenant: key.tenant.clone(),
            target,
            idle: session.and_then(|session| session.engine_idle_timeout),
        }));
    }

    pub(super) fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }
}

/// Returns whether an id has a valid length.
pub(super) fn is_valid_id(id: &str) -> bool {
    (1..=MAX_ID_LENGTH).contains(&id.len())
}

impl SessionRecord {
    pub(super) fn new(number: u64, binding: BindingState) -> Self {
        Self {
            number,
            binding,
            running: 0,
            idle_since: None,
            is_ending: false,
            waiters: Vec::new(),
            version: BindingVersion::default(),
            announced_at: None,
            engine_idle_timeout: None,
        }
    }

    fn wakers(&mut self) -> Vec<Waker> {
        self.waiters.drain(..).map(|(_, waker)| waker).collect()
    }
}
