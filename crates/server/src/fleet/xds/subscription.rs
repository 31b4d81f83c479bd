//! Subscription state of one xDS stream: sent and pending resources.
//!
//! Only one response is unacknowledged at a time. Later changes are combined into the next
//! response, so a slow Envoy causes no queue. A request contains all names in the
//! state-of-the-world variant, and the difference in the delta variant.
//!
//! Decision 0011.

use std::collections::{BTreeMap, BTreeSet};

use super::assignments::{AssignmentSnapshot, ClusterAssignment, ResourceVersion};

/// Content of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SubscriptionRequest {
    /// Nonce of the acknowledged response; empty if there is none.
    pub(super) nonce: String,
    /// Error if the response was rejected.
    pub(super) error_detail: Option<String>,
    pub(super) change: SubscriptionChange,
}

/// Change of the requested clusters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SubscriptionChange {
    /// Replace the requested names.
    Replace(BTreeSet<String>),
    /// Add and remove requested names.
    Delta {
        subscribe: Vec<String>,
        unsubscribe: Vec<String>,
        /// Resources from an earlier stream, with their versions.
        initial_versions: BTreeMap<String, String>,
    },
}

impl Default for SubscriptionChange {
    fn default() -> Self {
        Self::Replace(BTreeSet::new())
    }
}

/// Meaning of a request for the last response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AckOutcome {
    /// A query without acknowledgment.
    Query,
    /// The last response is in use.
    Ack,
    /// The last response was rejected.
    Nack(String),
    /// The request refers to an older response and is ignored.
    Stale,
    /// The stream requests too many clusters.
    TooManyNames,
}

/// Content of the next response.
#[derive(Debug)]
pub(super) struct EndpointUpdate<'a> {
    pub(super) nonce: String,
    pub(super) clusters: Vec<(String, &'a ClusterAssignment)>,
    /// Requested clusters that do not exist.
    pub(super) missing: Vec<String>,
}

/// Wildcard for all clusters.
const ALL: &str = "*";

/// Maximum number of cluster names of one stream, and maximum size of the names.
pub(super) const MAX_NAMES: usize = if cfg!(test) { 16 } else { 4096 };
const MAX_NAME_BYTES: usize = 1 << 20;

/// Subscription of one stream.
#[derive(Clone, Debug, Default)]
pub(super) struct EndpointSubscription {
    names: BTreeSet<String>,
    /// Sent resources with their versions; `None` for a missing resource.
    sent: BTreeMap<String, Option<String>>,
    /// Nonce of the last response.
    last_nonce: u64,
    /// True if the last response is unacknowledged.
    awaiting_ack: bool,
    started: bool,
}

impl EndpointSubscription {
    /// Handles a request.
    pub(super) fn on_request(&mut self, request: SubscriptionRequest) -> AckOutcome {
        let outcome = match request.nonce.as_str() {
            "" => AckOutcome::Query,
            nonce if nonce != self.last_nonce.to_string() => return AckOutcome::Stale,
            _ => request
                .error_detail
                .map_or(AckOutcome::Ack, AckOutcome::Nack),
        };
        // A repeated acknowledgment is a query: Envoy has recreated the cluster and waits for its
        // endpoints.
        let is_repeated = outcome == AckOutcome::Ack && !self.awaiting_ack;
        if outcome != AckOutcome::Query {
            self.awaiting_ack = false;
        }
        match request.change {
            SubscriptionChange::Replace(names) => {
                self.replace_names(names, is_repeated || outcome == AckOutcome::Query)
            }
            SubscriptionChange::Delta {
                subscribe,
                unsubscribe,
                initial_versions,
            } => self.change_names(subscribe, &unsubscribe, initial_versions),
        }
        self.started = true;
        if self.exceeds_limits() {
            AckOutcome::TooManyNames
        } else {
            outcome
        }
    }

    fn exceeds_limits(&self) -> bool {
        let bytes: usize = self
            .names
            .iter()
            .chain(self.sent.keys())
            .map(String::len)
            .sum();
        self.names.len() > MAX_NAMES || self.sent.len() > MAX_NAMES || bytes > MAX_NAME_BYTES
    }

    /// Replaces the requested names. A query for the same names requests their resources again.
    fn replace_names(&mut self, mut names: BTreeSet<String>, is_query: bool) {
        if names.is_empty() && !self.started {
            names.insert(ALL.to_owned());
        }
        if is_query && names == self.names {
            self.sent.clear();
        }
        self.sent
            .retain(|name, _| names.contains(name) || names.contains(ALL));
        self.names = names;
    }

    fn change_names(
        &mut self,
        subscribe: Vec<String>,
        unsubscribe: &[String],
        initial_versions: BTreeMap<String, String>,
    ) {
        if !self.started {
            self.sent = initial_versions
                .into_iter()
                .map(|(name, version)| (name, Some(version)))
                .collect();
            if subscribe.is_empty() && unsubscribe.is_empty() {
                self.names.insert(ALL.to_owned());
            }
        }
        for name in unsubscribe {
            self.names.remove(name);
            self.sent.remove(name);
        }
        for name in subscribe {
            // A subscription requests the resource again, except in the first request, which lists
            // the versions that Envoy has.
            if self.started {
                self.sent.remove(&name);
            }
            self.names.insert(name);
        }
    }

    /// Returns whether any cluster is requested.
    pub(super) fn has_names(&self) -> bool {
        !self.names.is_empty()
    }

    /// Returns the requested names.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }

    /// Returns whether every requested resource was sent and acknowledged.
    pub(super) fn is_synced(&self, now: &AssignmentSnapshot) -> bool {
        !self.awaiting_ack && self.pending(now).next().is_none()
    }

    /// Returns the next response and records it as sent. Missing clusters alone cause a response
    /// only if `reports_missing` is set.
    pub(super) fn next_update<'a>(
        &mut self,
        now: &'a AssignmentSnapshot,
        reports_missing: bool,
    ) -> Option<EndpointUpdate<'a>> {
        if self.awaiting_ack {
            return None;
        }
        let pending: Vec<(String, Option<&ClusterAssignment>)> = self
            .pending(now)
            .map(|(name, pending)| (name.to_owned(), pending))
            .collect();
        let mut clusters = Vec::new();
        let mut missing = Vec::new();
        for (name, assignment) in pending {
            self.sent.insert(
                name.clone(),
                assignment.map(|assignment| assignment.version.to_string()),
            );
            match assignment {
                Some(assignment) => clusters.push((name, assignment)),
                None => missing.push(name),
            }
        }
        if clusters.is_empty() && (missing.is_empty() || !reports_missing) {
            return None;
        }
        self.awaiting_ack = true;
        self.last_nonce += 1;
        Some(EndpointUpdate {
            nonce: self.last_nonce.to_string(),
            clusters,
            missing,
        })
    }

    /// Returns the requested resources whose sent version is outdated.
    fn pending<'s, 'a: 's>(
        &'s self,
        now: &'a AssignmentSnapshot,
    ) -> impl Iterator<Item = (&'s str, Option<&'a ClusterAssignment>)> + 's {
        let all = self.names.contains(ALL);
        let wildcard = now.clusters.keys().map(String::as_str).filter(move |_| all);
        let named = self
            .names()
            .filter(move |name| *name != ALL && !(all && now.clusters.contains_key(*name)));
        wildcard.chain(named).filter_map(|name| {
            let assignment = now.clusters.get(name);
            let version = assignment.map(|assignment: &ClusterAssignment| assignment.version);
            let is_current = self
                .sent
                .get(name)
                .is_some_and(|known| matches_version(known.as_deref(), version));
            (!is_current).then_some((name, assignment))
        })
    }
}

fn matches_version(known: Option<&str>, version: Option<ResourceVersion>) -> bool {
    match (known, version) {
        (Some(known), Some(version)) => known == version.to_string(),
        (None, None) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
