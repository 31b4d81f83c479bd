//! Watches of the optional kinds that configure InferencePools.
//!
//! A kind may not be installed, or the Role may not allow it. warmroute then works without it and
//! probes again after `resync_interval`. While objects cannot be read, the last received ones stay
//! in use.
//!
//! Decision 0014.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, join_all};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{info, warn};
use warmroute_server::fleet::discovery::kubernetes::{KubernetesConfig, PodsConfig};

use super::client::{ApiClient, ObjectQuery};
use super::error::{ApiVerb, RequestError};
use super::list_watch::{FailureKind, RetryBackoff};
use super::objects::{
    InferenceModelRewrite, InferenceObjective, OBJECTIVES, OptionalKind, REWRITES, RULE_GROUPS,
};
use super::reflector::{ObjectReflector, WatchHealth, WatchUpdate};
use super::rules::{self, KindStatus, KubernetesRules, ObjectsByNamespace, ServedPool};
use super::store::ObjectStore;

/// Response status for a kind that is not installed, and for one that the Role does not allow.
const ABSENT: u16 = 404;
const FORBIDDEN: u16 = 403;

/// Time for which a rejected request for a kind that was listed before is retried with backoff. A
/// restarting API server returns 403 until its caches are filled.
const FORBIDDEN_GRACE: Duration = Duration::from_secs(60);
const ABSENT_GRACE: Duration = Duration::from_secs(3);
/// The same for a kind that was not listed before, because the API server may start at the same
/// time as warmroute.
const START_GRACE: Duration = Duration::from_secs(10);
/// Duration after which a failure is logged for each kind, in addition to the logs of the pools.
const LASTING_FAILURE: Duration = Duration::from_secs(60);

/// Watches the optional kinds and reports each change. Nothing is reported before the first reports
/// of all kinds.
pub async fn watch_rules(
    config: &KubernetesConfig,
    mut on_rules: impl FnMut(KubernetesRules),
) -> anyhow::Result<Infallible> {
    if config.pools.iter().all(|pool| pool.name.is_none()) {
        // Only InferencePools can have such objects.
        on_rules(KubernetesRules::default());
        return std::future::pending().await;
    }
    let client = ApiClient::new(config);
    let served = served_pools(config, &client).await;
    let namespaces: BTreeSet<&str> = served.iter().map(|pool| pool.namespace.as_str()).collect();
    let (report_tx, mut report_rx) = mpsc::unbounded_channel();
    let mut watches: Vec<BoxFuture<'_, Infallible>> = Vec::new();
    for namespace in &namespaces {
        let watch = |kind| KindWatch::new(&client, config, namespace, kind);
        let objectives_tx = report_tx.clone();
        let rewrites_tx = report_tx.clone();
        let on_objectives =
            move |status, all| _ = objectives_tx.send(KindReport::Objectives(status, all));
        watches.push(watch(OBJECTIVES).run(on_objectives).boxed());
        let on_rewrites =
            move |status, all| _ = rewrites_tx.send(KindReport::Rewrites(status, all));
        watches.push(watch(REWRITES).run(on_rewrites).boxed());
    }
    let expected = watches.len();
    let reporting = async {
        let mut known = KnownObjects::default();
        while let Some(report) = report_rx.recv().await {
            known.apply(report);
            if known.statuses.len() == expected
                && known.statuses.values().any(|kind| kind.state != NOT_READ)
            {
                on_rules(known.rules(&served));
            }
        }
    };
    tokio::select! {
        _ = join_all(watches) => anyhow::bail!("the watches of Kubernetes have ended"),
        () = reporting => anyhow::bail!("the watches of Kubernetes have ended"),
    }
}

/// Returns the pools that are configured by name. Waits for the default namespace of the
/// credentials.
async fn served_pools(config: &KubernetesConfig, client: &ApiClient) -> Vec<ServedPool> {
    let mut backoff = RetryBackoff::default();
    let default = loop {
        match client.default_namespace().await {
            Ok(namespace) => break namespace,
            // The watch of the pools logs the reason.
            Err(_) => tokio::time::sleep(backoff.next_delay(None, rand::random())).await,
        }
    };
    let named = config
        .pools
        .iter()
        .filter_map(|pool| Some((pool, pool.name.clone()?)));
    let pool = |(pool, name): (&PodsConfig, String)| ServedPool {
        title: pool.title().into(),
        namespace: pool.namespace.clone().unwrap_or_else(|| default.clone()),
        name,
    };
    named.map(pool).collect()
}

/// Objects of one kind in one namespace, and their status.
enum KindReport {
    Objectives(KindStatus, BTreeMap<String, InferenceObjective>),
    Rewrites(KindStatus, BTreeMap<String, InferenceModelRewrite>),
}

/// Last report of each kind.
#[derive(Default)]
struct KnownObjects {
    statuses: BTreeMap<(&'static str, String), KindStatus>,
    objectives: ObjectsByNamespace<InferenceObjective>,
    rewrites: ObjectsByNamespace<InferenceModelRewrite>,
}

impl KnownObjects {
    fn apply(&mut self, report: KindReport) {
        let (KindReport::Objectives(status, _) | KindReport::Rewrites(status, _)) = &report;
        let namespace = status.namespace.clone();
        let status = status.clone();
        self.statuses
            .insert((status.kind, namespace.clone()), status);
        match report {
            KindReport::Objectives(_, all) => drop(self.objectives.insert(namespace, all)),
            KindReport::Rewrites(_, all) => drop(self.rewrites.insert(namespace, all)),
        }
    }

    fn rules(&self, served: &[ServedPool]) -> KubernetesRules {
        KubernetesRules {
            objects: self.statuses.values().cloned().collect(),
            objectives: rules::objectives(served, &self.objectives),
            rewrites: rules::rewrites(served, &self.rewrites),
        }
    }
}

/// State of a kind before the first response.
const NOT_READ: &str = "not read yet";

/// Reason why a kind is not watched.
enum KindError {
    /// No API group can be read. The status is 404 or 403.
    Refused(u16),
    Failed(RequestError),
}

/// Watch of one kind in one namespace.
struct KindWatch<'a> {
    client: &'a ApiClient,
    config: &'a KubernetesConfig,
    kind: OptionalKind,
    status: KindStatus,
    /// Last logged error.
    reported_error: Option<RequestError>,
    /// Start of the current failure.
    failed_since: Option<Instant>,
}

impl<'a> KindWatch<'a> {
    fn new(
        client: &'a ApiClient,
        config: &'a KubernetesConfig,
        namespace: &str,
        kind: OptionalKind,
    ) -> Self {
        let status = KindStatus {
            kind: kind.kind,
            namespace: namespace.to_owned(),
            state: NOT_READ.to_owned(),
            error: None,
            unreadable: Vec::new(),
        };
        Self {
            client,
            config,
            kind,
            status,
            reported_error: None,
            failed_since: None,
        }
    }

    /// Watches the kind and reports each change of its objects or status.
    async fn run<K>(
        mut self,
        mut on_change: impl FnMut(KindStatus, BTreeMap<String, K>),
    ) -> Infallible
    where
        K: DeserializeOwned + Clone + Send + 'static,
    {
        let mut store: ObjectStore<K> = ObjectStore::default();
        let mut backoff = RetryBackoff::default();
        // Time since which the API server rejects the requests.
        let mut refused_since: Option<Instant> = None;
        loop {
            let wait = match self.find_group().await {
                Ok(group) => {
                    backoff.reset();
                    refused_since = None;
                    let probe_delay = self.config.probe_delay();
                    let watch = self.watch(group, &mut store, &mut on_change);
                    if group == RULE_GROUPS[0] {
                        watch.await;
                    } else {
                        // The other API group may have been installed.
                        _ = tokio::time::timeout(probe_delay, watch).await;
                    }
                    continue;
                }
                Err(KindError::Refused(status)) => {
                    if status == ABSENT {
                        store.clear();
                    }
                    self.set_state(
                        if status == ABSENT {
                            "not installed"
                        } else {
                            "forbidden"
                        }
                        .to_owned(),
                    );
                    self.set_error(None);
                    let since = *refused_since.get_or_insert_with(Instant::now);
                    let probe_delay = self.config.probe_delay();
                    if status == FORBIDDEN && since.elapsed() < START_GRACE.min(probe_delay) {
                        backoff.next_delay(None, rand::random())
                    } else {
                        probe_delay
                    }
                }
                Err(KindError::Failed(error)) => {
                    self.set_error(Some(&error));
                    backoff.next_delay(None, rand::random())
                }
            };
            on_change(self.describe(&store), store.objects().clone());
            tokio::time::sleep(wait).await;
        }
    }

    /// Watches the objects of an API group until listing fails.
    async fn watch<K>(
        &mut self,
        group: &'static str,
        store: &mut ObjectStore<K>,
        on_change: &mut impl FnMut(KindStatus, BTreeMap<String, K>),
    ) where
        K: DeserializeOwned + Clone + Send + 'static,
    {
        let mut reflector = ObjectReflector::new(self.client.clone(), self.query(group));
        let mut refused_since: Option<Instant> = None;
        loop {
            match reflector.next().await {
                WatchUpdate::Changed(change) => {
                    refused_since = None;
                    store.apply(change);
                }
                WatchUpdate::Alive if self.is_followed(group) => continue,
                WatchUpdate::Alive => {}
                WatchUpdate::Failed(error) => {
                    let grace = self.grace(&error);
                    let since = *refused_since.get_or_insert_with(Instant::now);
                    if grace.is_some_and(|grace| since.elapsed() >= grace) {
                        return;
                    }
                    if grace.is_none() {
                        refused_since = None;
                    }
                }
            }
            self.apply_health(reflector.health(), group);
            on_change(self.describe(store), store.objects().clone());
        }
    }

    fn is_followed(&self, group: &str) -> bool {
        self.status.error.is_none() && self.status.state == watched_state(group)
    }

    fn apply_health(&mut self, health: &WatchHealth, group: &str) {
        match health {
            WatchHealth::Starting => {}
            WatchHealth::Up => {
                self.set_error(None);
                self.set_state(watched_state(group));
            }
            WatchHealth::Failed(error) => {
                // If only the watch fails, lists still return the objects.
                if error.verb == ApiVerb::Watch && self.status.state == NOT_READ {
                    self.set_state(format!("listed as {group}/v1alpha2, and not watched"));
                }
                self.set_error(Some(error));
            }
        }
    }

    /// Returns the time for which a failed request is retried with backoff. `None`: without limit.
    fn grace(&self, error: &RequestError) -> Option<Duration> {
        let grace = match (error.verb, error.code()) {
            (_, Some(ABSENT)) => ABSENT_GRACE,
            (ApiVerb::List, Some(FORBIDDEN)) => FORBIDDEN_GRACE,
            _ => return None,
        };
        Some(grace.min(self.config.resync_interval.get()))
    }

    /// Returns the first API group that is installed and readable.
    async fn find_group(&self) -> Result<&'static str, KindError> {
        let mut refused = ABSENT;
        for group in RULE_GROUPS {
            match self.client.try_list(&self.query(group)).await {
                Ok(()) => return Ok(group),
                Err(error) if error.code() == Some(FORBIDDEN) => refused = FORBIDDEN,
                Err(error) if error.code() == Some(ABSENT) => {}
                Err(error) => return Err(KindError::Failed(error)),
            }
        }
        Err(KindError::Refused(refused))
    }

    fn query(&self, group: &str) -> ObjectQuery {
        let resource = self.kind.in_group(group);
        let namespace = Some(self.status.namespace.clone());
        ObjectQuery {
            resource,
            namespace,
            labels: None,
            fields: None,
        }
    }

    fn set_state(&mut self, state: String) {
        let KindStatus {
            kind, namespace, ..
        } = &self.status;
        if self.status.state != state {
            info!(
                kind,
                namespace, state, "state of optional InferencePool objects changed"
            );
            self.status.state = state;
        }
    }

    /// Sets the error. An unreachable API server is logged by the watches of the pools, and here
    /// only if the failure lasts longer.
    fn set_error(&mut self, error: Option<&RequestError>) {
        let kind = self.status.kind;
        let failed_since = error.map(|_| self.failed_since.unwrap_or_else(Instant::now));
        self.failed_since = failed_since;
        let is_lasting = failed_since.is_some_and(|since| since.elapsed() >= LASTING_FAILURE);
        self.status.error = error.map(ToString::to_string);
        match (error, &self.reported_error) {
            (Some(error), Some(reported)) if error.has_cause_of(reported) => {}
            (Some(error), _)
                if is_lasting
                    || error.failure_kind() == FailureKind::Rejected
                    || error.code() == Some(500) =>
            {
                let reason = error.to_string();
                warn!(
                    kind,
                    reason, "objects cannot be watched; the last known ones stay in use"
                );
                self.reported_error = Some(error.clone());
            }
            (Some(_), _) => {}
            (None, _) => self.reported_error = None,
        }
    }

    /// Returns the status, with the unreadable objects. Each of these is logged once.
    fn describe<K>(&mut self, store: &ObjectStore<K>) -> KindStatus {
        let unreadable: Vec<String> = store
            .unreadable()
            .map(|object| object.describe(self.kind.kind))
            .collect();
        for reason in unreadable
            .iter()
            .filter(|reason| !self.status.unreadable.contains(reason))
        {
            warn!(reason, "Kubernetes object ignored");
        }
        self.status.unreadable = unreadable;
        self.status.clone()
    }
}

fn watched_state(group: &str) -> String {
    format!("watched as {group}/v1alpha2")
}
