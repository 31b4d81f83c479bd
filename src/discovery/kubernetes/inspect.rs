//! One look at the pools, for commands: their pods, the rights, and every failure, pool by pool.

use std::fmt;
use std::time::Duration;

use futures_util::future::join_all;

use super::client::{ApiClient, ObjectQuery, ResourceAccess};
use super::config::{KubernetesConfig, PodsConfig};
use super::error::{RequestError, RequestFailure};
use super::objects::{self, InferencePool};
use super::pool::{Membership, Pods};
use super::store::ObjectChange;
use crate::discovery::config::WorkerConfig;
use crate::discovery::{ServedModel, resolve_each};
use crate::worker::Worker;

/// All pools, and the workers that their pods are.
#[derive(Clone, Debug, Default)]
pub struct ClusterReport {
    /// In the order of the configuration.
    pub pools: Vec<PoolReport>,
    /// The workers of all pools.
    pub workers: Vec<Worker>,
    /// Why single ones cannot be workers beside the others.
    pub conflicts: Vec<String>,
}

/// One pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolReport {
    /// As the configuration names it.
    pub title: String,
    /// Why its pods are not known.
    pub failure: Option<PoolFailure>,
    /// The rights that it needs and does not have.
    pub missing_rights: Vec<MissingRight>,
    /// Why the rights are not known.
    pub rights_error: Option<String>,
    /// The number of its pods.
    pub pods: usize,
    /// The number of its workers: one for each port of each usable pod.
    pub workers: usize,
    /// Pods that take no requests, and why.
    pub unready: Vec<(String, String)>,
    /// Why single pods cannot be workers.
    pub unusable: Vec<String>,
}

/// The reason why the pods of a pool are not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolFailure {
    /// There is no InferencePool of this name.
    Missing,
    /// The InferencePool has no selector.
    NoSelector,
    /// The InferencePool does not have the expected form.
    Unreadable(String),
    /// A request failed: its error, and the kind of cause.
    Request(String, RequestCause),
}

/// The kind of cause of a failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestCause {
    /// There are no usable credentials.
    Credentials,
    /// 401.
    Unauthorized,
    /// 403.
    Forbidden,
    /// 404: the kind is not installed.
    NotInstalled,
    /// The certificate of the API server is not accepted.
    Certificate,
    /// The API server cannot be reached, or does not answer.
    Unreachable,
    /// It answers with another error.
    Other,
}

/// A verb that a Role lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingRight {
    /// `list` or `watch`.
    pub verb: &'static str,
    /// The plural of the kind.
    pub resource: &'static str,
    /// Empty for pods.
    pub group: &'static str,
}

impl fmt::Display for PoolFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("there is no such InferencePool"),
            Self::NoSelector => f.write_str("the InferencePool has no selector"),
            Self::Unreadable(reason) => write!(f, "the InferencePool cannot be read: {reason}"),
            Self::Request(error, _) => f.write_str(error),
        }
    }
}

impl From<RequestError> for PoolFailure {
    fn from(error: RequestError) -> Self {
        let cause = match &error.failure {
            RequestFailure::Credentials(_) => RequestCause::Credentials,
            RequestFailure::Status { code: 401, .. } => RequestCause::Unauthorized,
            RequestFailure::Status { code: 403, .. } => RequestCause::Forbidden,
            RequestFailure::Status { code: 404, .. } => RequestCause::NotInstalled,
            RequestFailure::Transport(reason) if reason.contains("certificate") => {
                RequestCause::Certificate
            }
            RequestFailure::Transport(_) | RequestFailure::Timeout(_) => RequestCause::Unreachable,
            RequestFailure::Status { .. } | RequestFailure::Malformed(_) => RequestCause::Other,
        };
        Self::Request(error.to_string(), cause)
    }
}

/// Reads all pools at the same time. Each request has this deadline.
pub async fn inspect(
    config: &KubernetesConfig,
    models: &[ServedModel],
    deadline: Duration,
) -> ClusterReport {
    let client = ApiClient::with_deadline(config, deadline);
    let read = join_all(
        config
            .pools
            .iter()
            .map(|pool| inspect_pool(&client, config, pool)),
    )
    .await;
    let mut report = ClusterReport::default();
    let mut all = Vec::new();
    for (pool, workers) in read {
        report.pools.push(pool);
        all.extend(workers);
    }
    (report.workers, report.conflicts) = resolve_each(all, models);
    report
}

async fn inspect_pool(
    client: &ApiClient,
    config: &KubernetesConfig,
    pool: &PodsConfig,
) -> (PoolReport, Vec<WorkerConfig>) {
    let (pods, rights) = tokio::join!(read_pods(client, pool), missing_rights(client, pool));
    let mut report = PoolReport {
        title: pool.title(),
        ..PoolReport::default()
    };
    match rights {
        Ok(missing) => report.missing_rights = missing,
        Err(error) => report.rights_error = Some(error),
    }
    let workers = match pods {
        Ok((membership, mut pods)) => {
            let (workers, problems) = pods
                .workers(&membership, pool, &config.labels)
                .unwrap_or_default();
            report.pods = pods.len();
            report.unready = pods.unready();
            report.unusable = problems;
            workers
        }
        Err(failure) => {
            report.failure = Some(failure);
            Vec::new()
        }
    };
    report.workers = workers.len();
    (report, workers)
}

async fn read_pods(
    client: &ApiClient,
    pool: &PodsConfig,
) -> Result<(Membership, Pods), PoolFailure> {
    let query = |resource| ObjectQuery {
        resource,
        namespace: pool.namespace.clone(),
        labels: None,
        fields: None,
    };
    let membership = match &pool.name {
        Some(name) => {
            let fields = Some(format!("metadata.name={name}"));
            let query = ObjectQuery {
                fields,
                ..query(objects::inference_pools())
            };
            let found = client
                .list::<InferencePool>(&query)
                .await?
                .objects
                .into_iter()
                .next();
            let found = found.ok_or(PoolFailure::Missing)?.object;
            let found = found.map_err(|object| PoolFailure::Unreadable(object.reason))?;
            Membership::of(&found).ok_or(PoolFailure::NoSelector)?
        }
        None => Membership::configured(pool).unwrap_or_default(),
    };
    let query = ObjectQuery {
        labels: Some(membership.label_selector()),
        ..query(objects::pods())
    };
    let mut pods = Pods::default();
    pods.apply(ObjectChange::Listed(client.list(&query).await?.objects));
    Ok((membership, pods))
}

/// The rights to list and to watch that are missing. Of the kinds beside the pools only one right without the other counts: without
/// both, warmroute goes on without these objects.
async fn missing_rights(
    client: &ApiClient,
    pool: &PodsConfig,
) -> Result<Vec<MissingRight>, String> {
    let name = pool.name.as_deref();
    let mut resources = vec![("", "pods", None)];
    if name.is_some() {
        resources.push((objects::POOLS, "inferencepools", name));
        resources.extend(objects::GROUPS.map(|group| (group, objects::OBJECTIVES.plural, None)));
        resources.extend(objects::GROUPS.map(|group| (group, objects::REWRITES.plural, None)));
    }
    let missing = resources.into_iter().map(async |(group, resource, name)| {
        let access = |verb| ResourceAccess {
            namespace: pool.namespace.as_deref(),
            verb,
            group,
            resource,
            name,
        };
        let (lists, watches) = (access("list"), access("watch"));
        let (lists, watches) =
            tokio::try_join!(client.is_allowed(&lists), client.is_allowed(&watches))?;
        let is_optional = objects::GROUPS.contains(&group);
        let missing = [("list", lists), ("watch", watches)]
            .into_iter()
            .filter(|(_, allowed)| !allowed);
        let missing: Vec<_> = missing
            .map(|(verb, _)| MissingRight {
                verb,
                resource,
                group,
            })
            .collect();
        Ok::<_, String>(if is_optional && missing.len() == 2 {
            Vec::new()
        } else {
            missing
        })
    });
    let missing: Result<Vec<_>, String> = join_all(missing).await.into_iter().collect();
    missing.map(|missing| missing.concat())
}
