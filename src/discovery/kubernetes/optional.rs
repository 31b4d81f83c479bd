//! The objects beside InferencePools. Their kinds need not be installed, and the Role need not allow them: then warmroute goes on
//! without them and tries again after `look_again`. Objects that cannot be reached stay as they were received last.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, join_all};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{info, warn};

use super::client::{ApiClient, ObjectQuery};
use super::config::KubernetesConfig;
use super::error::{ApiVerb, RequestError};
use super::list_watch::{FailureKind, RetryBackoff};
use super::objects::{GROUPS, Kind, OBJECTIVES, Objective, REWRITES, Rewrite};
use super::reflector::{ObjectReflector, WatchHealth, WatchUpdate};
use super::rules::{self, Followed, Objects, OurPool, Rules};
use super::store::ObjectStore;

/// The status of a kind that is not installed, and of one that the Role does not allow.
const ABSENT: u16 = 404;
const FORBIDDEN: u16 = 403;

/// Time for which a kind that was listed before is retried with backoff. A restarting API server responds with 403 until its caches
/// are filled.
const FORBIDDEN_GRACE: Duration = Duration::from_secs(60);
const ABSENT_GRACE: Duration = Duration::from_secs(3);
/// The same of a kind that was not listed before, for an API server that starts together with warmroute.
const START_GRACE: Duration = Duration::from_secs(10);
/// A failure of this length is logged for each kind.
const LASTING_FAILURE: Duration = Duration::from_secs(60);

/// Watches the objects beside the pools for ever, and reports each change. Nothing is reported before the condition of each kind is
/// known.
pub async fn watch_rules(
    config: &KubernetesConfig,
    mut on_rules: impl FnMut(Rules),
) -> anyhow::Result<Infallible> {
    if config.pools.iter().all(|pool| pool.name.is_none()) {
        // Labels and ports have no objects beside them.
        on_rules(Rules::default());
        return std::future::pending().await;
    }
    let client = ApiClient::new(config);
    let ours = ours(config, &client).await;
    let namespaces: BTreeSet<&str> = ours.iter().map(|pool| pool.namespace.as_str()).collect();
    let (report_tx, mut report_rx) = mpsc::unbounded_channel();
    let mut watches: Vec<BoxFuture<'_, Infallible>> = Vec::new();
    for namespace in &namespaces {
        let watch = |kind| KindWatch::new(&client, config, namespace, kind);
        let (objectives_tx, rewrites_tx) = (report_tx.clone(), report_tx.clone());
        let on_objectives =
            move |followed, all| _ = objectives_tx.send(KindReport::Objectives(followed, all));
        watches.push(watch(OBJECTIVES).run(on_objectives).boxed());
        let on_rewrites =
            move |followed, all| _ = rewrites_tx.send(KindReport::Rewrites(followed, all));
        watches.push(watch(REWRITES).run(on_rewrites).boxed());
    }
    let expected = watches.len();
    let collected = async {
        let mut known = KnownObjects::default();
        while let Some(report) = report_rx.recv().await {
            known.take(report);
            if known.followed.len() == expected
                && known.followed.values().any(|kind| kind.standing != UNKNOWN)
            {
                on_rules(known.rules(&ours));
            }
        }
    };
    tokio::select! {
        _ = join_all(watches) => anyhow::bail!("the watches of Kubernetes have ended"),
        () = collected => anyhow::bail!("the watches of Kubernetes have ended"),
    }
}

/// The named pools. Their namespace may be that of the credentials, which are waited for.
async fn ours(config: &KubernetesConfig, client: &ApiClient) -> Vec<OurPool> {
    let mut backoff = RetryBackoff::default();
    let default = loop {
        match client.default_namespace().await {
            Ok(namespace) => break namespace,
            // The watch of the pools reports the reason.
            Err(_) => tokio::time::sleep(backoff.next_delay(None, rand::random())).await,
        }
    };
    let named = config
        .pools
        .iter()
        .filter_map(|pool| Some((pool, pool.name.clone()?)));
    let pool = |(pool, name): (&super::PodsConfig, String)| OurPool {
        title: pool.title().into(),
        namespace: pool.namespace.clone().unwrap_or_else(|| default.clone()),
        name,
    };
    named.map(pool).collect()
}

/// The objects of one kind in one namespace, and their condition.
enum KindReport {
    Objectives(Followed, BTreeMap<String, Objective>),
    Rewrites(Followed, BTreeMap<String, Rewrite>),
}

/// The last report of each kind.
#[derive(Default)]
struct KnownObjects {
    followed: BTreeMap<(&'static str, String), Followed>,
    objectives: Objects<Objective>,
    rewrites: Objects<Rewrite>,
}

impl KnownObjects {
    fn take(&mut self, report: KindReport) {
        let (KindReport::Objectives(followed, _) | KindReport::Rewrites(followed, _)) = &report;
        let (namespace, followed) = (followed.namespace.clone(), followed.clone());
        self.followed
            .insert((followed.kind, namespace.clone()), followed);
        match report {
            KindReport::Objectives(_, all) => drop(self.objectives.insert(namespace, all)),
            KindReport::Rewrites(_, all) => drop(self.rewrites.insert(namespace, all)),
        }
    }

    fn rules(&self, ours: &[OurPool]) -> Rules {
        Rules {
            objects: self.followed.values().cloned().collect(),
            objectives: rules::objectives(ours, &self.objectives),
            rewrites: rules::rewrites(ours, &self.rewrites),
        }
    }
}

/// The condition of a kind that was neither read nor refused yet.
const UNKNOWN: &str = "not read yet";

/// Why a kind is not watched.
enum KindError {
    /// No group of it can be read: 404 or 403.
    Refused(u16),
    Failed(RequestError),
}

/// The watch of one kind in one namespace.
struct KindWatch<'a> {
    client: &'a ApiClient,
    config: &'a KubernetesConfig,
    kind: Kind,
    followed: Followed,
    /// The error that was logged last.
    reported_error: Option<RequestError>,
    /// Since when requests have failed.
    failed_since: Option<Instant>,
}

impl<'a> KindWatch<'a> {
    fn new(
        client: &'a ApiClient,
        config: &'a KubernetesConfig,
        namespace: &str,
        kind: Kind,
    ) -> Self {
        let followed = Followed {
            kind: kind.kind,
            namespace: namespace.to_owned(),
            standing: UNKNOWN.to_owned(),
            error: None,
            unreadable: Vec::new(),
        };
        Self {
            client,
            config,
            kind,
            followed,
            reported_error: None,
            failed_since: None,
        }
    }

    /// Watches for ever, and reports each change of the objects or of their condition.
    async fn run<K>(
        mut self,
        mut on_change: impl FnMut(Followed, BTreeMap<String, K>),
    ) -> Infallible
    where
        K: DeserializeOwned + Clone + Send + 'static,
    {
        let mut store: ObjectStore<K> = ObjectStore::default();
        let mut backoff = RetryBackoff::default();
        // Since when the API server has refused the kind.
        let mut refused_since: Option<Instant> = None;
        loop {
            let wait = match self.find_group().await {
                Ok(group) => {
                    backoff.reset();
                    refused_since = None;
                    let look_again = self.config.look_again();
                    let watch = self.watch(group, &mut store, &mut on_change);
                    if group == GROUPS[0] {
                        watch.await;
                    } else {
                        // The other group may be installed meanwhile.
                        _ = tokio::time::timeout(look_again, watch).await;
                    }
                    continue;
                }
                Err(KindError::Refused(status)) => {
                    if status == ABSENT {
                        store.clear();
                    }
                    self.set_standing(
                        if status == ABSENT {
                            "not installed"
                        } else {
                            "forbidden"
                        }
                        .to_owned(),
                    );
                    self.set_error(None);
                    let since = *refused_since.get_or_insert_with(Instant::now);
                    let look_again = self.config.look_again();
                    if status == FORBIDDEN && since.elapsed() < START_GRACE.min(look_again) {
                        backoff.next_delay(None, rand::random())
                    } else {
                        look_again
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

    /// Watches the objects of a group until these can no longer be listed.
    async fn watch<K>(
        &mut self,
        group: &'static str,
        store: &mut ObjectStore<K>,
        on_change: &mut impl FnMut(Followed, BTreeMap<String, K>),
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
            self.take_health(reflector.health(), group);
            on_change(self.describe(store), store.objects().clone());
        }
    }

    fn is_followed(&self, group: &str) -> bool {
        self.followed.error.is_none() && self.followed.standing == followed_as(group)
    }

    fn take_health(&mut self, health: &WatchHealth, group: &str) {
        match health {
            WatchHealth::Starting => {}
            WatchHealth::Up => {
                self.set_error(None);
                self.set_standing(followed_as(group));
            }
            WatchHealth::Failed(error) => {
                // Without a watch the lists still have the objects.
                if error.verb == ApiVerb::Watch && self.followed.standing == UNKNOWN {
                    self.set_standing(format!("listed as {group}/v1alpha2, and not watched"));
                }
                self.set_error(Some(error));
            }
        }
    }

    /// Time for which a rejected request is retried with backoff; `None`: without limit.
    fn grace(&self, error: &RequestError) -> Option<Duration> {
        let grace = match (error.verb, error.code()) {
            (_, Some(ABSENT)) => ABSENT_GRACE,
            (ApiVerb::List, Some(FORBIDDEN)) => FORBIDDEN_GRACE,
            _ => return None,
        };
        Some(grace.min(self.config.look_again.get()))
    }

    /// The group that is installed and may be read.
    async fn find_group(&self) -> Result<&'static str, KindError> {
        let mut refused = ABSENT;
        for group in GROUPS {
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
        let (resource, namespace) = (self.kind.of(group), Some(self.followed.namespace.clone()));
        ObjectQuery {
            resource,
            namespace,
            labels: None,
            fields: None,
        }
    }

    fn set_standing(&mut self, standing: String) {
        let Followed {
            kind, namespace, ..
        } = &self.followed;
        if self.followed.standing != standing {
            info!(
                kind,
                namespace, standing, "what InferencePools say of requests"
            );
            self.followed.standing = standing;
        }
    }

    /// The watches of the pools log an API server that is unreachable or unavailable. It is logged here if the failure of this kind
    /// lasts longer.
    fn set_error(&mut self, error: Option<&RequestError>) {
        let kind = self.followed.kind;
        let failed_since = error.map(|_| self.failed_since.unwrap_or_else(Instant::now));
        self.failed_since = failed_since;
        let is_lasting = failed_since.is_some_and(|since| since.elapsed() >= LASTING_FAILURE);
        self.followed.error = error.map(ToString::to_string);
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

    /// The condition, with the objects that cannot be read. Each of these is logged once.
    fn describe<K>(&mut self, store: &ObjectStore<K>) -> Followed {
        let unreadable: Vec<String> = store
            .unreadable()
            .map(|object| object.describe(self.kind.kind))
            .collect();
        for reason in unreadable
            .iter()
            .filter(|reason| !self.followed.unreadable.contains(reason))
        {
            warn!(reason, "Kubernetes object ignored");
        }
        self.followed.unreadable = unreadable;
        self.followed.clone()
    }
}

fn followed_as(group: &str) -> String {
    format!("followed as {group}/v1alpha2")
}
