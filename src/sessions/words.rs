//! What routers of the same workers tell each other of sessions. Each decides for itself, so two may bind one session at
//! the same time; of several bonds the one with the highest stamp holds, and everybody sees the same one as highest,
//! in whatever order they hear of them.

use std::sync::Arc;
use std::time::Instant;

use super::table::{Bond, Key, Session, Table};
use super::{Moved, SessionKey, Sessions};
use crate::worker::WorkerRank;

/// Which of two bonds holds: the one that knew of the other, else that of the router with the higher number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp {
    /// How many bonds came before it, as far as its maker knew.
    pub version: u64,
    /// Who made it.
    pub by: u64,
}

/// Sessions that are inherited at one go.
const AT_ONCE: usize = 1024;

/// Whether a session is told of because it is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// It is, now.
    Now,
    /// It was some time ago: all sessions are told.
    Sometime,
}

/// What is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// The session is there, and in use.
    Bound {
        /// Which.
        session: Arc<SessionKey>,
        /// Where.
        target: WorkerRank,
        /// Of the bond.
        stamp: Stamp,
    },
    /// The last request of the session has ended.
    Ended {
        /// Which.
        session: Arc<SessionKey>,
        /// Of its last bond.
        stamp: Stamp,
    },
}

impl Word {
    /// Who made the bond.
    pub fn by(&self) -> u64 {
        let (Word::Bound { stamp, .. } | Word::Ended { stamp, .. }) = self;
        stamp.by
    }
}

impl Sessions {
    /// From now on notes for [`Sessions::words`] what others have to know, under our number, and calls `hear` whenever there
    /// is something, with no lock of ours held. Who called first is the one who hears.
    pub fn on_word(&self, own: u64, hear: impl Fn() + Send + Sync + 'static) {
        if self.hear_words.set(Box::new(hear)).is_ok() {
            self.table.lock().note_words(own);
        }
    }

    /// What is to be told since the last call, in its order.
    pub fn words(&self) -> Vec<Word> {
        self.table.lock().take_words()
    }

    /// All that is known, for who knows nothing yet.
    pub fn all_words(&self) -> Vec<Word> {
        self.table.lock().all_words()
    }

    /// Takes what another router tells.
    pub fn take(&self, word: Word, is: Use) {
        let now = (self.clock)();
        self.change(|table| match word {
            Word::Bound {
                session,
                target,
                stamp,
            } => table.adopt(session, (target, stamp), is, now),
            Word::Ended { session, stamp } => table.end(&session, stamp),
        });
    }

    /// Makes the bonds ours whose makers are gone, so that somebody sees to the ends of their sessions; how many. Where nobody
    /// asks for moves, nothing has to be seen to.
    pub fn inherit(&self, is_there: impl Fn(u64) -> bool) -> usize {
        let now = (self.clock)();
        let orphans = self.table.lock().orphans(is_there);
        // Requests of sessions do not wait for all of them.
        orphans
            .chunks(AT_ONCE)
            .for_each(|some| self.change(|table| table.inherit(some, now)));
        orphans.len()
    }
}

impl Table {
    pub(super) fn note_words(&mut self, own: u64) {
        self.own = own;
        self.words.get_or_insert_default();
        // What was bound before is ours.
        self.sessions
            .values_mut()
            .for_each(|session| session.stamp.by = own);
    }

    pub(super) fn has_words(&self) -> bool {
        self.words.as_ref().is_some_and(|words| !words.is_empty())
    }

    pub(super) fn take_words(&mut self) -> Vec<Word> {
        self.words.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub(super) fn all_words(&self) -> Vec<Word> {
        let bound = |(key, session): (&Arc<Key>, &Session)| match session.bond {
            Bond::Bound(target) => Some(Word::Bound {
                session: key.clone(),
                target,
                stamp: session.stamp,
            }),
            Bond::Loose | Bond::Deciding(_) => None,
        };
        self.sessions.iter().filter_map(bound).collect()
    }

    /// Tells that a session is still in use, unless that was told not so long ago.
    pub(super) fn tell_again(&mut self, key: &Arc<Key>, now: Instant) {
        let every = self.rules.ttl / 4;
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        let Bond::Bound(target) = session.bond else {
            return;
        };
        if session
            .told
            .is_none_or(|told| now.saturating_duration_since(told) >= every)
        {
            session.told = Some(now);
            let stamp = session.stamp;
            self.word(Word::Bound {
                session: key.clone(),
                target,
                stamp,
            });
        }
    }

    /// A bond of ours, after all that we know of; it is told.
    pub(super) fn stamp(&mut self, key: &Arc<Key>, target: WorkerRank, now: Instant) {
        let own = self.own;
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        session.stamp = Stamp {
            version: session.stamp.version.saturating_add(1),
            by: own,
        };
        session.told = Some(now);
        let stamp = session.stamp;
        self.word(Word::Bound {
            session: key.clone(),
            target,
            stamp,
        });
    }

    pub(super) fn tell_end(&mut self, key: &Arc<Key>) {
        let Some(stamp) = self.sessions.get(key).map(|session| session.stamp) else {
            return;
        };
        self.word(Word::Ended {
            session: key.clone(),
            stamp,
        });
    }

    /// Another router has bound a session, or uses it.
    pub(super) fn adopt(
        &mut self,
        key: Arc<Key>,
        (target, stamp): (WorkerRank, Stamp),
        is: Use,
        now: Instant,
    ) {
        self.expire(now);
        let own = self.own;
        let Some(session) = self.sessions.get_mut(&key) else {
            return self.adopt_new(&key, target, stamp, now);
        };
        if session.stamp > stamp {
            // Who tells of an older bond does not know of this one.
            if let Bond::Bound(target) = session.bond {
                let stamp = session.stamp;
                self.word(Word::Bound {
                    session: key,
                    target,
                    stamp,
                });
            }
            return;
        }
        if session.stamp == stamp && !matches!(session.bond, Bond::Bound(_)) {
            // That one was given up here, which whoever tells of it does not know.
            return;
        }
        let number = session.number;
        let before = std::mem::replace(&mut session.stamp, stamp);
        let left = match session.bond {
            // Who decides here does so after this bond.
            Bond::Deciding(_) => {
                session.bond = Bond::Deciding(Some(target));
                None
            }
            Bond::Loose => {
                session.bond = Bond::Bound(target);
                None
            }
            Bond::Bound(left) => {
                session.bond = Bond::Bound(target);
                (before.by == own).then_some(left)
            }
        };
        let is_news = is == Use::Now || before < stamp;
        if let Some(since) = session
            .idle
            .as_mut()
            .filter(|_| is_news)
            .map(|since| std::mem::replace(since, now))
        {
            self.tenants.unset_idle((since, number));
            self.tenants.set_idle((now, number), key.clone());
        }
        match left {
            Some(left) if left != target => self.note(Moved::Left, &key, left),
            Some(_) if stamp.by != own => self.note(Moved::HandedOver, &key, target),
            _ => {}
        }
    }

    /// The sessions that were bound by those who are gone.
    fn orphans(&self, is_there: impl Fn(u64) -> bool) -> Vec<(Arc<Key>, Stamp)> {
        if !self.notes_moves() {
            return Vec::new();
        }
        let is_orphan = |(_, Session { bond, stamp, .. }): &(&Arc<Key>, &Session)| {
            matches!(bond, Bond::Bound(_)) && stamp.by != self.own && !is_there(stamp.by)
        };
        self.sessions
            .iter()
            .filter(is_orphan)
            .map(|(key, session)| (key.clone(), session.stamp))
            .collect()
    }

    /// Makes those of these bonds ours that still hold.
    fn inherit(&mut self, orphans: &[(Arc<Key>, Stamp)], now: Instant) {
        for (key, stamp) in orphans {
            let holds = self
                .sessions
                .get(key)
                .filter(|session| session.stamp == *stamp)
                .map(|session| session.bond);
            if let Some(Bond::Bound(target)) = holds {
                self.stamp(key, target, now);
                self.note(Moved::Inherited, key, target);
            }
        }
    }

    fn adopt_new(&mut self, key: &Arc<Key>, target: WorkerRank, stamp: Stamp, now: Instant) {
        let names = [Some(&*key.id), key.tenant.as_deref()];
        if !names
            .into_iter()
            .flatten()
            .all(|name| self.may_be_called(name))
            || self.make_room(key).is_err()
        {
            return;
        }
        let number = self.next_number();
        let session = Session {
            idle: Some(now),
            stamp,
            ..Session::new(number, Bond::Bound(target))
        };
        self.insert(key, session);
        self.tenants.set_idle((now, number), key.clone());
        if stamp.by == self.own && self.notes_moves() {
            // It was ours, and we have forgotten it while others used it.
            self.stamp(key, target, now);
            self.note(Moved::Came, key, target);
        }
    }

    /// The last request of a session has ended at another router.
    pub(super) fn end(&mut self, key: &Arc<Key>, stamp: Stamp) {
        let Some(session) = self
            .sessions
            .get_mut(key)
            .filter(|session| session.stamp <= stamp)
        else {
            return;
        };
        let number = session.number;
        match session.idle {
            Some(since) => {
                self.tenants.unset_idle((since, number));
                self.remove(key);
            }
            // Another request has begun it anew.
            None if matches!(session.bond, Bond::Deciding(_)) => {
                session.bond = Bond::Deciding(None)
            }
            None => session.ending = true,
        }
    }

    /// Keeps a word to be told, unless nobody has asked for so long that there are several for each session there can be.
    fn word(&mut self, word: Word) {
        let most = self.most_notes();
        if let Some(words) = self.words.as_mut().filter(|words| words.len() < most) {
            words.push(word);
        }
    }
}
