//! Pure mapping from pods to workers: each port of each pod is one worker.

use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU16;

use warmroute_core::worker::{WorkerId, WorkerRole, pool_taint};
use warmroute_server::fleet::discovery::config::WorkerConfig;
use warmroute_server::fleet::discovery::kubernetes::WorkerIdSource;
use warmroute_server::fleet::discovery::template::TemplateConfig;
use xxhash_rust::xxh3::xxh3_64;

use super::objects::Pod;

/// Topology labels of Kubernetes, with the topology domain of each.
const TOPOLOGY_LABELS: [(&str, &str); 2] = [
    ("topology.kubernetes.io/zone", "zone"),
    ("topology.kubernetes.io/region", "region"),
];

/// Worker settings shared by the pods of a pool.
pub(super) struct PoolWorkerSpec<'a> {
    /// Ports in rank order.
    pub(super) ports: &'a [NonZeroU16],
    pub(super) template: &'a TemplateConfig,
    /// Display name of the pool.
    pub(super) pool: &'a str,
    pub(super) ids: WorkerIdSource,
}

/// Label with the role: `prefill`, `decode`, `both`.
const ROLE: &str = "llm-d.ai/role";

/// Label with the engine, which becomes the taint `engine=..`.
const ENGINE: &str = "llm-d.ai/engine-type";

/// Label with the worker id; several ids, one per port, are separated by dots.
const WORKER_ID: &str = "warmroute.dev/worker-id";

/// Annotation with the active ports.
const ACTIVE_PORTS: &str = "llm-d.ai/active-ports";

/// Older name of the active-ports annotation, which llm-d also reads.
const OLD_ACTIVE_PORTS: &str = "inference.networking.k8s.io/active-ports";

/// Availability of a pod for requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PodAvailability {
    Active,
    /// The pod gets no new requests, but running ones continue.
    Draining,
    Unavailable,
}

/// Returns the workers of the pods, and the errors of pods that cannot be workers.
///
/// `used` contains the uids of pods that were workers before. If these are no longer ready, they
/// stay as draining workers while they finish their requests.
pub(super) fn workers(
    pods: &BTreeMap<String, Pod>,
    spec: &PoolWorkerSpec<'_>,
    used: &mut HashSet<String>,
) -> (Vec<WorkerConfig>, Vec<String>) {
    used.retain(|uid| pods.contains_key(uid));
    let mut found = Vec::new();
    let mut errors = Vec::new();
    for (uid, pod) in pods {
        let availability = availability(pod, used.contains(uid));
        let Some(address) = pod
            .status
            .as_ref()
            .and_then(|status| status.pod_ip)
            .filter(|_| availability != PodAvailability::Unavailable)
        else {
            used.remove(uid);
            continue;
        };
        match workers_of_pod(uid, pod, address, spec) {
            Ok(workers) => {
                used.insert(uid.clone());
                found.extend(workers.into_iter().map(|worker| WorkerConfig {
                    draining: availability == PodAvailability::Draining,
                    ..worker
                }));
            }
            Err(reason) => errors.push(format!("pod {}: {reason}", qualified_name(pod))),
        }
    }
    (found, errors)
}

fn availability(pod: &Pod, is_used: bool) -> PodAvailability {
    let Some(status) = &pod.status else {
        return PodAvailability::Unavailable;
    };
    let is_ready = status
        .conditions
        .iter()
        .any(|condition| condition.kind == "Ready" && condition.status == "True");
    let is_terminating = pod.metadata.deletion_timestamp.is_some();
    match (status.phase.as_str(), is_ready && !is_terminating) {
        ("Running", true) => PodAvailability::Active,
        ("Running", false) if is_used => PodAvailability::Draining,
        _ => PodAvailability::Unavailable,
    }
}

/// Returns the reason in its status why a pod accepts no requests.
pub(super) fn unready_reason(pod: &Pod) -> Option<String> {
    let Some(status) = &pod.status else {
        return Some("it has no status yet".to_owned());
    };
    if pod.metadata.deletion_timestamp.is_some() {
        return Some("it is being deleted".to_owned());
    }
    if status.phase != "Running" {
        let phase = if status.phase.is_empty() {
            "unknown"
        } else {
            &status.phase
        };
        return Some(format!("its phase is {phase}"));
    }
    match status
        .conditions
        .iter()
        .find(|condition| condition.kind == "Ready")
    {
        None => Some("it has no condition Ready".to_owned()),
        Some(condition) if condition.status != "True" => {
            let details = [&condition.reason, &condition.message]
                .into_iter()
                .flatten()
                .cloned()
                .collect::<Vec<_>>();
            let details = if details.is_empty() {
                String::new()
            } else {
                format!(" ({})", details.join(": "))
            };
            Some(format!(
                "its condition Ready is {}{details}",
                condition.status
            ))
        }
        Some(_) if status.pod_ip.is_none() => Some("it has no podIP".to_owned()),
        Some(_) => None,
    }
}

/// Returns `namespace/name`.
pub(super) fn qualified_name(pod: &Pod) -> String {
    let part = |part: &Option<String>| part.clone().unwrap_or_default();
    format!(
        "{}/{}",
        part(&pod.metadata.namespace),
        part(&pod.metadata.name)
    )
}

fn workers_of_pod(
    uid: &str,
    pod: &Pod,
    address: IpAddr,
    spec: &PoolWorkerSpec<'_>,
) -> Result<Vec<WorkerConfig>, String> {
    let label = |name: &str| pod.metadata.labels.as_ref()?.get(name).map(String::as_str);
    let role = label(ROLE).map(parse_role).transpose()?;
    let ids = match label(WORKER_ID) {
        Some(ids) => parse_worker_ids(ids, spec.ports.len())?,
        None => derive_worker_ids(uid, pod, spec)?,
    };
    let annotations = pod.metadata.annotations.as_ref();
    let active =
        annotations.and_then(|all| all.get(ACTIVE_PORTS).or_else(|| all.get(OLD_ACTIVE_PORTS)));
    let active = active.map(|list| parse_ports(list)).transpose()?;
    let mut workers = Vec::new();
    for (rank, port) in (0u32..).zip(spec.ports) {
        if active.as_ref().is_some_and(|active| !active.contains(port)) {
            continue;
        }
        let id = ids[rank as usize];
        let rank = (spec.ports.len() > 1).then_some(rank);
        let mut worker = spec.template.worker(
            id,
            SocketAddr::new(address.to_canonical(), port.get()),
            rank,
        );
        worker.name = Some(qualified_name(pod));
        worker.role = role.unwrap_or(worker.role);
        worker.taints.insert(pool_taint(spec.pool));
        worker
            .taints
            .extend(label(ENGINE).map(|engine| format!("engine={engine}")));
        let topology = TOPOLOGY_LABELS
            .into_iter()
            .filter_map(|(name, domain)| Some((domain, label(name)?)));
        let node = pod.spec.node_name.as_deref().map(|node| ("node", node));
        for (domain, value) in topology.chain(node) {
            worker
                .topology
                .entry(domain.to_owned())
                .or_insert_with(|| value.to_owned());
        }
        workers.push(worker);
    }
    Ok(workers)
}

fn parse_role(label: &str) -> Result<WorkerRole, String> {
    match label {
        "prefill" => Ok(WorkerRole::Prefill),
        "decode" => Ok(WorkerRole::Decode),
        "both" | "prefill-decode" | "encode-prefill-decode" | "aggregated" => {
            Ok(WorkerRole::Aggregated)
        }
        other => Err(format!(
            "its role `{other}` is not one of prefill, decode and both, so it receives no requests"
        )),
    }
}

fn parse_worker_ids(text: &str, ports: usize) -> Result<Vec<WorkerId>, String> {
    let ids: Result<Vec<WorkerId>, _> =
        text.split('.').map(|id| id.parse().map(WorkerId)).collect();
    match ids {
        Ok(ids) if ids.len() == ports => Ok(ids),
        Ok(ids) => Err(format!(
            "its label contains {} ids, but it has {ports} ports; set one id for each",
            ids.len()
        )),
        Err(_) => Err(format!(
            "its label contains the id `{text}`, which is not a number"
        )),
    }
}

fn derive_worker_ids(
    uid: &str,
    pod: &Pod,
    spec: &PoolWorkerSpec<'_>,
) -> Result<Vec<WorkerId>, String> {
    match (spec.ids, spec.ports.len()) {
        (WorkerIdSource::PodUid, _) => Ok(spec
            .ports
            .iter()
            .map(|port| worker_id(uid, *port))
            .collect()),
        (WorkerIdSource::Dynamo, 0 | 1) => Ok(vec![dynamo_id(
            pod.metadata.name.as_deref().unwrap_or_default(),
        )]),
        (WorkerIdSource::Dynamo, ports) => Err(format!(
            "Dynamo has one id per pod, but it has {ports} ports"
        )),
    }
}

fn parse_ports(list: &str) -> Result<Vec<NonZeroU16>, String> {
    let port = |port: &str| {
        port.trim()
            .parse()
            .map_err(|_| format!("its annotation of active ports is not a list of ports: `{list}`"))
    };
    list.split(',')
        .filter(|port| !port.trim().is_empty())
        .map(port)
        .collect()
}

/// Returns the worker id of a pod's port: a hash of the port and of the pod uid, which is never
/// reused. It is stable across restarts and equal on all replicas. It is below 2^53, because JSON
/// readers may not represent larger integers.
pub fn worker_id(uid: &str, port: NonZeroU16) -> WorkerId {
    WorkerId(xxh3_64(format!("{uid}/{port}").as_bytes()) >> 11)
}

/// Returns the id of a Dynamo worker that Kubernetes discovery finds. As in Dynamo, it is the
/// default hash of the Rust standard library over the pod name, limited to 53 bits for JSON.
pub fn dynamo_id(name: &str) -> WorkerId {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    WorkerId(hasher.finish() & 0x001F_FFFF_FFFF_FFFF)
}

#[cfg(test)]
mod tests;
