//! The list and watch of each pool: one of its InferencePool, one of its pods. Failures are retried for ever and leave the fleet as
//! it is.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::client::{ApiClient, ObjectQuery};
use super::config::{KubernetesConfig, PodsConfig};
use super::error::RequestError;
use super::inspect::inspect;
use super::objects::{self, InferencePool, Pod};
use super::pool::{Membership, Pods};
use super::reflector::{ObjectReflector, WatchHealth, WatchUpdate};
use super::store::ObjectStore;
use crate::discovery::config::WorkerConfig;
use crate::discovery::found::{Found, tell};
use crate::discovery::{ServedModel, Standing};
use crate::metrics::Metrics;
use crate::worker::Worker;

/// Changes that come within this time are one.
const TOGETHER: Duration = Duration::from_millis(20);

/// Watches for ever and reports each new fleet, the first one when any pool is known.
pub async fn watch(
    config: KubernetesConfig,
    models: Vec<ServedModel>,
    metrics: Arc<Metrics>,
    mut on_fleet: impl FnMut(Vec<Worker>),
) -> anyhow::Result<Infallible> {
    let client = ApiClient::new(&config);
    let (workers_tx, mut workers_rx) = mpsc::unbounded_channel();
    let pools = config.pools.iter().enumerate().map(|(at, pool)| {
        let watch = PoolWatch::new(&config, pool, &client, &metrics);
        let workers_tx = workers_tx.clone();
        watch.run(move |workers| _ = workers_tx.send((at, workers)))
    });
    let gathered = async {
        let mut all: Vec<Vec<WorkerConfig>> = vec![Vec::new(); config.pools.len()];
        let mut found = Found::new("kubernetes", models);
        while let Some((at, workers)) = workers_rx.recv().await {
            all[at] = workers;
            found.take(all.concat()).into_iter().for_each(&mut on_fleet);
        }
    };
    tokio::select! {
        _ = join_all(pools) => anyhow::bail!("the watches of Kubernetes have ended"),
        () = gathered => anyhow::bail!("the watches of Kubernetes have ended"),
    }
}

/// Lists the workers once.
pub async fn look(
    config: &KubernetesConfig,
    models: &[ServedModel],
) -> anyhow::Result<Vec<Worker>> {
    let report = inspect(config, models, config.silence.get()).await;
    match report
        .pools
        .iter()
        .find_map(|pool| Some((pool, pool.failure.as_ref()?)))
    {
        Some((pool, failure)) => anyhow::bail!("pool {}: {failure}", pool.title),
        None => Ok(report.workers),
    }
}

/// The next update; pending where there is no list and watch.
async fn next<K>(reflector: &mut Option<ObjectReflector<K>>) -> WatchUpdate<K>
where
    K: DeserializeOwned + Send + 'static,
{
    match reflector {
        Some(reflector) => reflector.next().await,
        None => std::future::pending().await,
    }
}

/// Why the InferencePool selects no pods.
enum PoolProblem {
    /// The known workers stay in use.
    WorkersKept(String),
    /// The known workers were removed.
    WorkersRemoved(String),
}

/// The list and watch of one pool.
struct PoolWatch<'a> {
    config: &'a KubernetesConfig,
    pool: &'a PodsConfig,
    client: &'a ApiClient,
    /// None where no InferencePool is named.
    pools: Option<ObjectReflector<InferencePool>>,
    /// None where the selector is not known.
    pods: Option<ObjectReflector<Pod>>,
    membership: Option<Membership>,
    pool_problem: Option<PoolProblem>,
    inference_pools: ObjectStore<InferencePool>,
    /// The error that was logged last, until all works again.
    reported_error: Option<RequestError>,
    found: Pods,
    standing: Standing,
    odd: Vec<String>,
}

impl<'a> PoolWatch<'a> {
    fn new(
        config: &'a KubernetesConfig,
        pool: &'a PodsConfig,
        client: &'a ApiClient,
        metrics: &Arc<Metrics>,
    ) -> Self {
        let query = |name: &String| ObjectQuery {
            resource: objects::inference_pools(),
            namespace: pool.namespace.clone(),
            labels: None,
            fields: Some(format!("metadata.name={name}")),
        };
        let mut watch = Self {
            config,
            pool,
            client,
            pools: pool
                .name
                .as_ref()
                .map(|name| ObjectReflector::new(client.clone(), query(name))),
            pods: None,
            membership: None,
            pool_problem: None,
            inference_pools: ObjectStore::default(),
            reported_error: None,
            found: Pods::default(),
            standing: Standing::new(format!("kubernetes {}", pool.title()), metrics),
            odd: Vec::new(),
        };
        if let Some(membership) = Membership::configured(pool) {
            watch.select(membership);
        }
        watch
    }

    /// Reports the workers whenever they may have changed.
    async fn run(mut self, mut on_workers: impl FnMut(Vec<WorkerConfig>)) {
        let mut due: Option<Instant> = None;
        loop {
            let wait = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            let may_have_changed = tokio::select! {
                update = next(&mut self.pools) => self.on_pool(update),
                update = next(&mut self.pods) => self.on_pods(update),
                () = wait => {
                    due = None;
                    self.workers().into_iter().for_each(&mut on_workers);
                    false
                }
            };
            self.report_health();
            if may_have_changed {
                due.get_or_insert_with(|| Instant::now() + TOGETHER);
            }
        }
    }

    fn on_pool(&mut self, update: WatchUpdate<InferencePool>) -> bool {
        let WatchUpdate::Changed(change) = update else {
            return false;
        };
        self.inference_pools.apply(change);
        let unreadable = self
            .inference_pools
            .unreadable()
            .next()
            .map(|object| object.reason.clone());
        let membership = self
            .inference_pools
            .objects()
            .values()
            .next()
            .map(Membership::of);
        match (unreadable, membership) {
            (Some(reason), _) => {
                // The last known selector stays in use.
                let problem = format!("the InferencePool cannot be read: {reason}");
                self.pool_problem = Some(PoolProblem::WorkersKept(problem));
            }
            (None, Some(Some(membership))) => self.select(membership),
            (None, Some(None)) => self.clear("the InferencePool has no selector"),
            (None, None) => self.clear("there is no such InferencePool"),
        }
        true
    }

    fn on_pods(&mut self, update: WatchUpdate<Pod>) -> bool {
        let WatchUpdate::Changed(change) = update else {
            return false;
        };
        self.found.apply(change);
        true
    }

    /// Publishes the condition of the watches, with the first problem.
    fn report_health(&mut self) {
        let none = WatchHealth::Starting;
        let pools = self
            .pools
            .as_ref()
            .map_or(&WatchHealth::Up, ObjectReflector::health);
        let pods = self.pods.as_ref().map_or(&none, ObjectReflector::health);
        match (pools, &self.pool_problem, pods) {
            (WatchHealth::Failed(error), ..) | (_, None, WatchHealth::Failed(error)) => {
                if !self
                    .reported_error
                    .as_ref()
                    .is_some_and(|reported| error.has_cause_of(reported))
                {
                    self.standing.bad(&error.to_string());
                    self.reported_error = Some(error.clone());
                }
                return;
            }
            (_, Some(PoolProblem::WorkersRemoved(problem)), _) => self.standing.removed(problem),
            (_, Some(PoolProblem::WorkersKept(problem)), _) => self.standing.bad(problem),
            (WatchHealth::Up, None, WatchHealth::Up) => self.standing.good(),
            _ => return,
        }
        self.reported_error = None;
    }

    /// Selects other pods. The known ones stay until the others are listed.
    fn select(&mut self, membership: Membership) {
        self.pool_problem = None;
        let selector = membership.label_selector();
        if self.pods.is_none()
            || self
                .membership
                .as_ref()
                .map(Membership::label_selector)
                .as_ref()
                != Some(&selector)
        {
            let query = ObjectQuery {
                resource: objects::pods(),
                namespace: self.pool.namespace.clone(),
                labels: Some(selector),
                fields: None,
            };
            self.pods = Some(ObjectReflector::new(self.client.clone(), query));
        }
        self.membership = Some(membership);
    }

    /// Selects no pods.
    fn clear(&mut self, reason: &str) {
        let removed_before = matches!(self.pool_problem, Some(PoolProblem::WorkersRemoved(_)));
        let removed = self.found.clear() || removed_before;
        let problem = if removed {
            PoolProblem::WorkersRemoved
        } else {
            PoolProblem::WorkersKept
        };
        self.pool_problem = Some(problem(reason.to_owned()));
        self.membership = None;
        self.pods = None;
    }

    fn workers(&mut self) -> Option<Vec<WorkerConfig>> {
        let membership = self.membership.clone().unwrap_or_default();
        let (workers, odd) = self
            .found
            .workers(&membership, self.pool, &self.config.labels)?;
        tell(&mut self.odd, odd);
        Some(workers)
    }
}
