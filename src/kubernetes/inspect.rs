//! One-time inspection of the pools for the subcommands: their pods, missing permissions and
//! failures.

use std::time::Duration;

use futures_util::future::join_all;
use warmroute_core::worker::Worker;
use warmroute_doctor::finding::{CheckVerdict, error};
use warmroute_doctor::kubernetes::{MissingRight, PoolReport};
use warmroute_server::fleet::discovery::config::WorkerConfig;
use warmroute_server::fleet::discovery::kubernetes::{KubernetesConfig, PodsConfig};
use warmroute_server::fleet::discovery::{WorkerModel, resolve_each};

use super::client::{ApiClient, ObjectQuery, ResourceAccess};
use super::error::{RequestError, RequestFailure};
use super::objects::{self, InferencePool};
use super::pool::{PoolMembership, PoolPods};
use super::store::ObjectChange;

/// Pools and the workers of their pods.
#[derive(Clone, Debug, Default)]
pub struct ClusterReport {
    /// Pools in configuration order.
    pub pools: Vec<PoolReport>,
    /// Workers of all pools.
    pub workers: Vec<Worker>,
    /// Workers that cannot be used, with the reason, for example conflicts between workers.
    pub conflicts: Vec<String>,
}

impl From<RequestError> for CheckVerdict {
    fn from(failed: RequestError) -> Self {
        let fix = match &failed.failure {
            RequestFailure::Credentials(_) => {
                "set `automountServiceAccountToken: true` in the pod of warmroute, \
                or `workers.kubernetes.kubeconfig`"
            }
            RequestFailure::Status { code: 401, .. } => {
                "write a valid token to that file (`kubectl create token SERVICEACCOUNT`); \
                the ServiceAccount must still exist"
            }
            RequestFailure::Status { code: 403, .. } => {
                "add the verb to the Role, and bind the Role to the ServiceAccount \
                (deploy/base/rbac.yaml)"
            }
            RequestFailure::Status { code: 404, .. } => {
                "install the CustomResourceDefinitions of the Gateway API inference extension, \
                or write `selector` and `ports` in place of `name`"
            }
            RequestFailure::Transport(reason) if reason.contains("certificate") => {
                "write the certificate authority of the API server to that file, \
                as `kubectl get configmap kube-root-ca.crt -o yaml` shows it"
            }
            RequestFailure::Transport(_) | RequestFailure::Timeout(_) => {
                "check that the API server answers there (`kubectl get --raw /readyz`), \
                and the NetworkPolicies of the pod of warmroute"
            }
            RequestFailure::Status { .. } | RequestFailure::Malformed(_) => {
                "check the log of the API server, and of any proxy before it"
            }
        };
        error(failed.to_string(), fix)
    }
}

/// Inspects all pools concurrently. `deadline` applies to each request.
pub async fn inspect(
    config: &KubernetesConfig,
    models: &[WorkerModel],
    deadline: Duration,
) -> ClusterReport {
    let client = ApiClient::with_deadline(config, deadline);
    let read = join_all(config.pools.iter().map(|pool| inspect_pool(&client, pool))).await;
    let mut report = ClusterReport::default();
    let mut all = Vec::new();
    for (pool, workers) in read {
        report.pools.push(pool);
        all.extend(workers);
    }
    (report.workers, report.conflicts) = resolve_each(all, models);
    report
}

async fn inspect_pool(client: &ApiClient, pool: &PodsConfig) -> (PoolReport, Vec<WorkerConfig>) {
    let (pods, rights) = tokio::join!(read_pods(client, pool), missing_rights(client, pool));
    let mut report = PoolReport {
        title: pool.title(),
        ..PoolReport::default()
    };
    match rights {
        Ok(missing) => report.missing_rights = missing,
        Err(reason) => report.rights_error = Some(reason),
    }
    let workers = match pods {
        Ok((membership, mut pods)) => {
            let (workers, problems) = pods.workers(&membership, pool).unwrap_or_default();
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
) -> Result<(PoolMembership, PoolPods), CheckVerdict> {
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
            let found = client.list::<InferencePool>(&query).await?.objects;
            let Some(found) = found.into_iter().next() else {
                let fix = format!(
                    "create the InferencePool, or correct `name` and `namespace` of the pool {} \
                    under `workers.kubernetes.pools`",
                    pool.title()
                );
                return Err(error("there is no such InferencePool", fix));
            };
            let found = found.object.map_err(|object| {
                error(
                    format!("the InferencePool cannot be read: {}", object.reason),
                    "correct the InferencePool (`kubectl get inferencepools -o yaml`)",
                )
            })?;
            PoolMembership::from_pool(&found).ok_or_else(|| {
                error(
                    "the InferencePool has no selector",
                    "set `spec.selector.matchLabels` of the InferencePool",
                )
            })?
        }
        None => PoolMembership::from_config(pool).unwrap_or_default(),
    };
    let query = ObjectQuery {
        labels: Some(membership.label_selector()),
        ..query(objects::pods())
    };
    let mut pods = PoolPods::default();
    pods.apply(ObjectChange::Listed(client.list(&query).await?.objects));
    Ok((membership, pods))
}

/// Returns the missing permissions. For an optional kind, a missing permission is only reported if
/// the other one of list and watch is granted; without both, the kind is not used.
async fn missing_rights(
    client: &ApiClient,
    pool: &PodsConfig,
) -> Result<Vec<MissingRight>, String> {
    let name = pool.name.as_deref();
    let mut resources = vec![("", "pods", None)];
    if name.is_some() {
        resources.push((objects::POOL_GROUP, "inferencepools", name));
        resources
            .extend(objects::RULE_GROUPS.map(|group| (group, objects::OBJECTIVES.plural, None)));
        resources.extend(objects::RULE_GROUPS.map(|group| (group, objects::REWRITES.plural, None)));
    }
    let missing = resources.into_iter().map(async |(group, resource, name)| {
        let access = |verb| ResourceAccess {
            namespace: pool.namespace.as_deref(),
            verb,
            group,
            resource,
            name,
        };
        let lists = access("list");
        let watches = access("watch");
        let (lists, watches) =
            tokio::try_join!(client.is_allowed(&lists), client.is_allowed(&watches))?;
        let is_optional = objects::RULE_GROUPS.contains(&group);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubernetes::error::ApiVerb;

    #[test]
    fn each_failed_request_has_a_fix() {
        let status = |code| RequestFailure::Status {
            code,
            message: String::new(),
            retry_after: None,
        };
        let transport = |reason: &str| RequestFailure::Transport(reason.to_owned());
        let cases = [
            (
                RequestFailure::Credentials(String::new()),
                "automountServiceAccountToken: true",
            ),
            (status(401), "kubectl create token"),
            (status(403), "add the verb to the Role"),
            (status(404), "install the CustomResourceDefinitions"),
            (
                transport("invalid peer certificate"),
                "certificate authority",
            ),
            (transport("refused"), "kubectl get --raw /readyz"),
            (
                RequestFailure::Timeout(Duration::from_secs(1)),
                "kubectl get --raw /readyz",
            ),
            (status(500), "log of the API server"),
        ];
        for (failure, fix) in cases {
            let failed = RequestError {
                verb: ApiVerb::List,
                resource: "pods".to_owned(),
                kind: "Pod, v1".to_owned(),
                namespace: String::new(),
                address: "https://10.0.0.1".to_owned(),
                token_file: String::new(),
                authority_file: String::new(),
                failure,
            };
            let verdict = format!("{:?}", CheckVerdict::from(failed));
            assert!(verdict.contains(fix), "{verdict}: not {fix}");
        }
    }
}
