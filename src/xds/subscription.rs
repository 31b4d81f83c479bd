//! What one Envoy was told of the clusters that it asked for, and what it is owed. One answer is under way at a time: changes
//! that come meanwhile are told together once it was heard, so that an Envoy that is slow takes no memory. The two variants
//! of the protocol come to the same here: in one each request names all that is wanted, in the other what is wanted more and
//! what less.

use std::collections::{BTreeMap, BTreeSet};

use super::assignments::{Assignment, Assignments, Version};

/// What a request says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Heard {
    /// Which answer it is about; empty: none.
    pub(super) nonce: String,
    /// Why that cannot be used.
    pub(super) refusal: Option<String>,
    pub(super) wants: Wants,
}

/// Which clusters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wants {
    /// These.
    Exactly(BTreeSet<String>),
    /// Others than before.
    Change {
        more: Vec<String>,
        less: Vec<String>,
        /// What it has from an earlier conversation, and in which version.
        has: BTreeMap<String, String>,
    },
}

impl Default for Wants {
    fn default() -> Self {
        Self::Exactly(BTreeSet::new())
    }
}

/// What a request came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// A question, no answer.
    Asks,
    /// What was told is in use.
    Accepts,
    /// What was told is not.
    Refuses(String),
    /// It is about an answer that is not the last; nothing follows from it.
    Stale,
    /// It names more clusters than a stream may.
    TooManyNames,
}

/// What Envoy is told next.
#[derive(Debug)]
pub(super) struct News<'a> {
    pub(super) nonce: String,
    pub(super) clusters: Vec<(String, &'a Assignment)>,
    /// Asked for, and nothing that we know.
    pub(super) absent: Vec<String>,
}

/// All clusters.
const ALL: &str = "*";

/// Most clusters that one stream may name, and most bytes of their names.
pub(super) const MOST_NAMES: usize = if cfg!(test) { 16 } else { 4096 };
const MOST_NAME_BYTES: usize = 1 << 20;

/// One conversation.
#[derive(Clone, Debug, Default)]
pub(super) struct Subscription {
    names: BTreeSet<String>,
    /// In which version; `None`: that we do not know it.
    told: BTreeMap<String, Option<String>>,
    /// The number of the last answer.
    last: u64,
    /// Whether it was not heard of yet.
    under_way: bool,
    begun: bool,
}

impl Subscription {
    /// Takes a request.
    pub(super) fn hear(&mut self, heard: Heard) -> Word {
        let word = match heard.nonce.as_str() {
            "" => Word::Asks,
            nonce if nonce != self.last.to_string() => return Word::Stale,
            _ => heard.refusal.map_or(Word::Accepts, Word::Refuses),
        };
        // Whoever answers a second time asks: Envoy has made the cluster anew, and waits to be told of it.
        let again = word == Word::Accepts && !self.under_way;
        if word != Word::Asks {
            self.under_way = false;
        }
        match heard.wants {
            Wants::Exactly(names) => self.want(names, again || word == Word::Asks),
            Wants::Change { more, less, has } => self.change(more, &less, has),
        }
        self.begun = true;
        if self.exceeds_limits() {
            Word::TooManyNames
        } else {
            word
        }
    }

    fn exceeds_limits(&self) -> bool {
        let bytes: usize = self
            .names
            .iter()
            .chain(self.told.keys())
            .map(String::len)
            .sum();
        self.names.len() > MOST_NAMES || self.told.len() > MOST_NAMES || bytes > MOST_NAME_BYTES
    }

    fn want(&mut self, mut names: BTreeSet<String>, again: bool) {
        if names.is_empty() && !self.begun {
            names.insert(ALL.to_owned());
        }
        if again && names == self.names {
            self.told.clear();
        }
        self.told
            .retain(|name, _| names.contains(name) || names.contains(ALL));
        self.names = names;
    }

    fn change(&mut self, more: Vec<String>, less: &[String], has: BTreeMap<String, String>) {
        if !self.begun {
            self.told = has
                .into_iter()
                .map(|(name, version)| (name, Some(version)))
                .collect();
            if more.is_empty() && less.is_empty() {
                self.names.insert(ALL.to_owned());
            }
        }
        for name in less {
            self.names.remove(name);
            self.told.remove(name);
        }
        for name in more {
            // Who asks for what it has wants it again, unless it has just said so.
            if self.begun {
                self.told.remove(&name);
            }
            self.names.insert(name);
        }
    }

    /// Whether anything is wanted.
    pub(super) fn wants_something(&self) -> bool {
        !self.names.is_empty()
    }

    /// The names that are wanted.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }

    /// Whether all that is wanted was told and heard.
    pub(super) fn is_settled(&self, now: &Assignments) -> bool {
        !self.under_way && self.owed(now).next().is_none()
    }

    /// What is to be told now, which counts as told from here on. Where clusters are not told of that we do not know, they
    /// are no reason to say anything.
    pub(super) fn next<'a>(
        &mut self,
        now: &'a Assignments,
        tells_absent: bool,
    ) -> Option<News<'a>> {
        if self.under_way {
            return None;
        }
        let owed: Vec<(String, Option<&Assignment>)> = self
            .owed(now)
            .map(|(name, owed)| (name.to_owned(), owed))
            .collect();
        let (mut clusters, mut absent) = (Vec::new(), Vec::new());
        for (name, assignment) in owed {
            self.told.insert(
                name.clone(),
                assignment.map(|assignment| assignment.version.to_string()),
            );
            match assignment {
                Some(assignment) => clusters.push((name, assignment)),
                None => absent.push(name),
            }
        }
        if clusters.is_empty() && (absent.is_empty() || !tells_absent) {
            return None;
        }
        self.under_way = true;
        self.last += 1;
        Some(News {
            nonce: self.last.to_string(),
            clusters,
            absent,
        })
    }

    /// What is wanted and known otherwise than it is.
    fn owed<'s, 'a: 's>(
        &'s self,
        now: &'a Assignments,
    ) -> impl Iterator<Item = (&'s str, Option<&'a Assignment>)> + 's {
        let all = self.names.contains(ALL);
        let every = now.clusters.keys().map(String::as_str).filter(move |_| all);
        let named = self
            .names()
            .filter(move |name| *name != ALL && !(all && now.clusters.contains_key(*name)));
        every.chain(named).filter_map(|name| {
            let is = now.clusters.get(name);
            let version = is.map(|assignment: &Assignment| assignment.version);
            let same = self
                .told
                .get(name)
                .is_some_and(|told| is_version(told.as_deref(), version));
            (!same).then_some((name, is))
        })
    }
}

fn is_version(told: Option<&str>, version: Option<Version>) -> bool {
    match (told, version) {
        (Some(told), Some(version)) => told == version.to_string(),
        (None, None) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
