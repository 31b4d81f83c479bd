//! From pods to workers: each port of each pod is one. Pure, so that what a pod has to look like is tested without a cluster.

use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU16;

use xxhash_rust::xxh3::xxh3_64;

use super::config::{Ids, LabelsConfig};
use super::objects::Pod;
use crate::discovery::config::WorkerConfig;
use crate::discovery::template::TemplateConfig;
use crate::worker::{Role, WorkerId, pool_taint};

/// Where Kubernetes says by labels that a pod stands, and what the place is called here.
const PLACES: [(&str, &str); 2] = [
    ("topology.kubernetes.io/zone", "zone"),
    ("topology.kubernetes.io/region", "region"),
];

/// What pods of a pool have in common.
pub(super) struct Likeness<'a> {
    /// In the order of their ranks.
    pub(super) ports: &'a [NonZeroU16],
    pub(super) template: &'a TemplateConfig,
    pub(super) labels: &'a LabelsConfig,
    /// What the pool is called.
    pub(super) pool: &'a str,
    pub(super) ids: Ids,
}

/// The older name of the annotation with the active ports. llm-d reads it as well.
const OLD_ACTIVE_PORTS: &str = "inference.networking.k8s.io/active-ports";

/// How far a pod takes requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Takes {
    All,
    /// What it has goes on.
    NoMore,
    None,
}

/// The workers of some pods, and what is odd with those that are not. `used` are the pods that were workers before; they stay
/// while they go on with what they have.
pub(super) fn workers(
    pods: &BTreeMap<String, Pod>,
    like: &Likeness<'_>,
    used: &mut HashSet<String>,
) -> (Vec<WorkerConfig>, Vec<String>) {
    used.retain(|uid| pods.contains_key(uid));
    let (mut found, mut odd) = (Vec::new(), Vec::new());
    for (uid, pod) in pods {
        let takes = takes(pod, used.contains(uid));
        let Some(address) = pod
            .status
            .as_ref()
            .and_then(|status| status.pod_ip)
            .filter(|_| takes != Takes::None)
        else {
            used.remove(uid);
            continue;
        };
        match of_pod((uid, pod), address, like) {
            Ok(workers) => {
                used.insert(uid.clone());
                found.extend(workers.into_iter().map(|worker| WorkerConfig {
                    draining: takes == Takes::NoMore,
                    ..worker
                }));
            }
            Err(reason) => odd.push(format!("pod {}: {reason}", name(pod))),
        }
    }
    (found, odd)
}

fn takes(pod: &Pod, is_used: bool) -> Takes {
    let Some(status) = &pod.status else {
        return Takes::None;
    };
    let is_ready = status
        .conditions
        .iter()
        .any(|condition| condition.kind == "Ready" && condition.status == "True");
    let ends = pod.metadata.deletion_timestamp.is_some();
    match (status.phase.as_str(), is_ready && !ends) {
        ("Running", true) => Takes::All,
        ("Running", false) if is_used => Takes::NoMore,
        _ => Takes::None,
    }
}

/// Why a pod takes no requests, apart from labels and annotations.
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

/// Namespace and name.
pub(super) fn name(pod: &Pod) -> String {
    let part = |part: &Option<String>| part.clone().unwrap_or_default();
    format!(
        "{}/{}",
        part(&pod.metadata.namespace),
        part(&pod.metadata.name)
    )
}

fn of_pod(
    (uid, pod): (&str, &Pod),
    address: IpAddr,
    like: &Likeness<'_>,
) -> Result<Vec<WorkerConfig>, String> {
    let label = |name: &str| pod.metadata.labels.as_ref()?.get(name).map(String::as_str);
    let role = label(&like.labels.role).map(role).transpose()?;
    let ids = match label(&like.labels.worker_id) {
        Some(ids) => told_ids(ids, like.ports.len())?,
        None => made_ids((uid, pod), like)?,
    };
    let annotations = pod.metadata.annotations.as_ref();
    let active = annotations.and_then(|all| {
        all.get(&like.labels.active_ports)
            .or_else(|| all.get(OLD_ACTIVE_PORTS))
    });
    let active = active.map(|list| ports(list)).transpose()?;
    let mut workers = Vec::new();
    for (rank, port) in (0u32..).zip(like.ports) {
        if active.as_ref().is_some_and(|active| !active.contains(port)) {
            continue;
        }
        let id = ids[rank as usize];
        let rank = (like.ports.len() > 1).then_some(rank);
        let mut worker = like.template.worker(
            id,
            SocketAddr::new(address.to_canonical(), port.get()),
            rank,
        );
        worker.name = Some(name(pod));
        worker.role = role.unwrap_or(worker.role);
        worker.taints.insert(pool_taint(like.pool));
        worker
            .taints
            .extend(label(&like.labels.engine).map(|engine| format!("engine={engine}")));
        let places = PLACES
            .into_iter()
            .filter_map(|(place, domain)| Some((domain, label(place)?)));
        let node = pod.spec.node_name.as_deref().map(|node| ("node", node));
        for (domain, value) in places.chain(node) {
            worker
                .topology
                .entry(domain.to_owned())
                .or_insert_with(|| value.to_owned());
        }
        workers.push(worker);
    }
    Ok(workers)
}

fn role(label: &str) -> Result<Role, String> {
    match label {
        "prefill" => Ok(Role::Prefill),
        "decode" => Ok(Role::Decode),
        "both" | "prefill-decode" | "encode-prefill-decode" | "aggregated" => Ok(Role::Aggregated),
        other => Err(format!(
            "its role `{other}` is none of prefill, decode and both, so it gets no requests"
        )),
    }
}

fn told_ids(text: &str, ports: usize) -> Result<Vec<WorkerId>, String> {
    let ids: Result<Vec<WorkerId>, _> =
        text.split('.').map(|id| id.parse().map(WorkerId)).collect();
    match ids {
        Ok(ids) if ids.len() == ports => Ok(ids),
        Ok(ids) => Err(format!(
            "its label tells {} ids, and it has {ports} ports; give one id for each",
            ids.len()
        )),
        Err(_) => Err(format!(
            "its label tells the id `{text}`, which is no number"
        )),
    }
}

fn made_ids((uid, pod): (&str, &Pod), like: &Likeness<'_>) -> Result<Vec<WorkerId>, String> {
    match (like.ids, like.ports.len()) {
        (Ids::PodUid, _) => Ok(like
            .ports
            .iter()
            .map(|port| worker_id(uid, *port))
            .collect()),
        (Ids::Dynamo, 0 | 1) => Ok(vec![dynamo_id(
            pod.metadata.name.as_deref().unwrap_or_default(),
        )]),
        (Ids::Dynamo, ports) => Err(format!(
            "Dynamo has one id for a pod, and it has {ports} ports"
        )),
    }
}

fn ports(list: &str) -> Result<Vec<NonZeroU16>, String> {
    let port = |port: &str| {
        port.trim()
            .parse()
            .map_err(|_| format!("its annotation says that `{list}` are its active ports"))
    };
    list.split(',')
        .filter(|port| !port.trim().is_empty())
        .map(port)
        .collect()
}

/// Who a pod's port is: of the pod's uid, which no other pod ever has, and the port. The same after a restart of ours and on every
/// replica; another when the pod is another. Below 2^53, so that no reader of JSON changes it.
pub fn worker_id(uid: &str, port: NonZeroU16) -> WorkerId {
    WorkerId(xxh3_64(format!("{uid}/{port}").as_bytes()) >> 11)
}

/// Who a worker of Dynamo is that is found by Kubernetes: of the pod's name, by the hash that the standard library has by default,
/// which Dynamo takes, too, and as far as readers of JSON leave it as it is.
pub fn dynamo_id(name: &str) -> WorkerId {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    WorkerId(hasher.finish() & 0x001F_FFFF_FFFF_FFFF)
}

#[cfg(test)]
mod tests;
