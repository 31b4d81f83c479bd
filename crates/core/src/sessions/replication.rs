//! Session updates between replicas. Each replica decides for itself, so two may bind one session
//! concurrently. The binding with the highest version wins, and all replicas agree on it in
//! whatever order the updates arrive.

use std::sync::Arc;
use std::time::Instant;

use super::key::SessionKey;
use super::store::SessionStore;
use super::table::{BindingState, SessionRecord, SessionTable, is_valid_id};
use super::updates::{BindingVersion, SessionMove, SessionUpdate, UpdateKind};
use crate::worker::WorkerRank;

/// Number of sessions taken over under one lock.
const TAKEOVER_BATCH: usize = 1024;

impl SessionStore {
    /// Returns the updates since the last call, in order.
    pub fn take_updates(&self) -> Vec<SessionUpdate> {
        std::mem::take(&mut self.table.lock().updates.pending)
    }

    /// Returns all bindings, for a replica that has just joined.
    pub fn snapshot_updates(&self) -> Vec<SessionUpdate> {
        self.table.lock().snapshot_updates()
    }

    /// Applies an update of another replica.
    pub fn apply_update(&self, update: SessionUpdate, kind: UpdateKind) {
        let now = (self.clock)();
        self.change(|table| match update {
            SessionUpdate::Bound {
                session,
                target,
                version,
            } => table.apply_binding(&session, RemoteBinding { target, version }, kind, now),
            SessionUpdate::Ended { session, version } => table.apply_end(&session, version),
        });
    }

    /// Takes over the bindings of replicas that have left, so that the end of their sessions is
    /// reported to the engines. Does nothing if moves are not recorded. Returns the number of
    /// sessions.
    pub fn take_over_orphans(&self, is_present: impl Fn(u64) -> bool) -> usize {
        let now = (self.clock)();
        let orphans = self.table.lock().find_orphans(is_present);
        // In batches, so that requests do not wait for the whole takeover.
        orphans
            .chunks(TAKEOVER_BATCH)
            .for_each(|batch| self.change(|table| table.take_over(batch, now)));
        orphans.len()
    }
}

/// Binding that another replica reports.
#[derive(Clone, Copy)]
pub(super) struct RemoteBinding {
    target: WorkerRank,
    version: BindingVersion,
}

impl SessionUpdate {
    /// Returns the binding of a session, if it is bound.
    fn of_session((key, session): (&Arc<SessionKey>, &SessionRecord)) -> Option<Self> {
        let BindingState::Bound(target) = session.binding else {
            return None;
        };
        Some(SessionUpdate::Bound {
            session: key.clone(),
            target,
            version: session.version,
        })
    }
}

impl SessionTable {
    pub(super) fn snapshot_updates(&self) -> Vec<SessionUpdate> {
        let sessions = self.sessions.iter();
        sessions.filter_map(SessionUpdate::of_session).collect()
    }

    /// Announces that a session is in use, unless it was announced recently.
    pub(super) fn announce_use(&mut self, key: &Arc<SessionKey>, now: Instant) {
        let interval = self.rules.ttl / 4;
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        let is_due = session
            .announced_at
            .is_none_or(|announced| now.saturating_duration_since(announced) >= interval);
        if is_due && matches!(session.binding, BindingState::Bound(_)) {
            session.announced_at = Some(now);
            self.announce_binding(key);
        }
    }

    /// Gives a new binding of this replica the next version and announces it.
    pub(super) fn record_binding(&mut self, key: &Arc<SessionKey>, now: Instant) {
        let router = self.own_router;
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        session.version = BindingVersion {
            version: session.version.version.saturating_add(1),
            router,
        };
        session.announced_at = Some(now);
        self.announce_binding(key);
    }

    fn announce_binding(&mut self, key: &Arc<SessionKey>) {
        let binding = self.sessions.get_key_value(key);
        if let Some(update) = binding.and_then(SessionUpdate::of_session) {
            self.updates.push(update);
        }
    }

    pub(super) fn announce_end(&mut self, key: &Arc<SessionKey>) {
        let Some(version) = self.sessions.get(key).map(|session| session.version) else {
            return;
        };
        self.updates.push(SessionUpdate::Ended {
            session: key.clone(),
            version,
        });
    }

    /// Applies the binding of another replica.
    pub(super) fn apply_binding(
        &mut self,
        key: &Arc<SessionKey>,
        remote: RemoteBinding,
        kind: UpdateKind,
        now: Instant,
    ) {
        self.expire(now);
        let own = self.own_router;
        let RemoteBinding { target, version } = remote;
        let Some(session) = self.sessions.get_mut(key) else {
            return self.insert_remote(key, remote, now);
        };
        if session.version > version {
            // The sender does not know the newer binding yet.
            return self.announce_binding(key);
        }
        if session.version == version && !matches!(session.binding, BindingState::Bound(_)) {
            // This replica has unbound the session since, which the sender does not know.
            return;
        }
        let number = session.number;
        let before = std::mem::replace(&mut session.version, version);
        let left = match session.binding {
            // The running decision will get a later version.
            BindingState::Deciding(_) => {
                session.binding = BindingState::Deciding(Some(target));
                None
            }
            BindingState::Unbound => {
                session.binding = BindingState::Bound(target);
                None
            }
            BindingState::Bound(left) => {
                session.binding = BindingState::Bound(target);
                (before.router == own).then_some(left)
            }
        };
        let is_used = kind == UpdateKind::InUse || before < version;
        if let Some(since) = session.idle_since.as_mut().filter(|_| is_used) {
            let since = std::mem::replace(since, now);
            self.tenants.unset_idle((since, number));
            self.tenants.set_idle((now, number), key.clone());
        }
        match left {
            Some(left) if left != target => self.push_move(SessionMove::Unbound, key, left),
            Some(_) if version.router != own => {
                self.push_move(SessionMove::HandedOver, key, target);
            }
            _ => {}
        }
    }

    /// Returns the sessions that were bound by replicas that have left.
    fn find_orphans(
        &self,
        is_present: impl Fn(u64) -> bool,
    ) -> Vec<(Arc<SessionKey>, BindingVersion)> {
        if !self.moves.is_recorded() {
            return Vec::new();
        }
        let is_orphan = |(_, session): &(&Arc<SessionKey>, &SessionRecord)| {
            let router = session.version.router;
            matches!(session.binding, BindingState::Bound(_))
                && router != self.own_router
                && !is_present(router)
        };
        self.sessions
            .iter()
            .filter(is_orphan)
            .map(|(key, session)| (key.clone(), session.version))
            .collect()
    }

    /// Takes over those of these bindings that still hold.
    fn take_over(&mut self, orphans: &[(Arc<SessionKey>, BindingVersion)], now: Instant) {
        for (key, version) in orphans {
            let binding = self
                .sessions
                .get(key)
                .filter(|session| session.version == *version)
                .map(|session| session.binding);
            if let Some(BindingState::Bound(target)) = binding {
                self.record_binding(key, now);
                self.push_move(SessionMove::TakenOver, key, target);
            }
        }
    }

    fn insert_remote(&mut self, key: &Arc<SessionKey>, remote: RemoteBinding, now: Instant) {
        let RemoteBinding { target, version } = remote;
        let names = [Some(&*key.id), key.tenant.as_deref()];
        if !names.into_iter().flatten().all(is_valid_id) || self.make_room(key).is_err() {
            return;
        }
        let number = self.next_number();
        let session = SessionRecord {
            idle_since: Some(now),
            version,
            ..SessionRecord::new(number, BindingState::Bound(target))
        };
        self.insert(key, session);
        self.tenants.set_idle((now, number), key.clone());
        if version.router == self.own_router && self.moves.is_recorded() {
            // This replica made the binding and removed the session while others used it.
            self.record_binding(key, now);
            self.push_move(SessionMove::Bound, key, target);
        }
    }

    /// Applies the end of a session at another replica.
    pub(super) fn apply_end(&mut self, key: &Arc<SessionKey>, version: BindingVersion) {
        let Some(session) = self
            .sessions
            .get_mut(key)
            .filter(|session| session.version <= version)
        else {
            return;
        };
        let number = session.number;
        match session.idle_since {
            Some(since) => {
                self.tenants.unset_idle((since, number));
                self.remove(key);
            }
            // Another request has started the session again.
            None if matches!(session.binding, BindingState::Deciding(_)) => {
                session.binding = BindingState::Deciding(None)
            }
            None => session.is_ending = true,
        }
    }
}
