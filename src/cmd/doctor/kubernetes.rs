//! The pools of Kubernetes: pure, from a report of the cluster to findings.

use super::finding::{At, Finding};
use crate::discovery::kubernetes::{
    ClusterReport, MissingRight, PoolFailure, PoolReport, RequestCause,
};

/// Pods that one finding names.
const MAX_NAMES: usize = 5;

/// The findings about all pools.
pub fn examine(report: &ClusterReport) -> Vec<Finding> {
    let of_pools = report.pools.iter().flat_map(examine_pool);
    let conflicts = report.conflicts.iter().map(|conflict| {
        At::new("kubernetes.pods", "all pools").warning(
            format!("not used: {conflict}"),
            "give each pod an address, a port and an id of its own, and let each pod be selected by one pool only",
        )
    });
    of_pools.chain(conflicts).collect()
}

fn examine_pool(pool: &PoolReport) -> Vec<Finding> {
    let mut findings = vec![pods(pool)];
    findings.extend(unready(pool));
    findings.extend(pool.unusable.iter().map(|reason| {
        at("kubernetes.pods", pool).warning(
            format!("not used: {reason}"),
            "correct the label, the annotation or the status that is named",
        )
    }));
    findings.push(rights(pool));
    findings
}

fn at(check: &'static str, pool: &PoolReport) -> At {
    At::new(check, format!("pool {}", pool.title))
}

fn pods(pool: &PoolReport) -> Finding {
    let at = at("kubernetes.pool", pool);
    if let Some(failure) = &pool.failure {
        return at.error(failure.to_string(), failure_fix(pool, failure));
    }
    let PoolReport { pods, workers, .. } = pool;
    match (pods, workers) {
        (0, _) => at.error(
            "no pod has the labels of its selector",
            "compare the selector with the labels of the pods (`kubectl get pods --show-labels`), and the namespace",
        ),
        (_, 0) => at.error(
            format!("none of its {} can be a worker", count(*pods, "pod")),
            "see the findings about its pods, and `kubectl describe pods`",
        ),
        _ => at.ok(format!("{}, {}", count(*pods, "pod"), count(*workers, "worker"))),
    }
}

fn failure_fix(pool: &PoolReport, failure: &PoolFailure) -> String {
    let fix = match failure {
        PoolFailure::Missing => {
            return format!(
                "create the InferencePool, or correct `name` and `namespace` of the pool {} under `kubernetes.pools`",
                pool.title
            );
        }
        PoolFailure::NoSelector => "set `spec.selector.matchLabels` of the InferencePool",
        PoolFailure::Unreadable(_) => {
            "correct the InferencePool (`kubectl get inferencepools -o yaml`)"
        }
        PoolFailure::Request(_, cause) => match cause {
            RequestCause::Credentials => {
                "set `automountServiceAccountToken: true` in the pod of warmroute, or `kubernetes.kubeconfig`"
            }
            RequestCause::Unauthorized => {
                "write a valid token to that file (`kubectl create token SERVICEACCOUNT`); the ServiceAccount must still exist"
            }
            RequestCause::Forbidden => {
                "add the verb to the Role, and bind the Role to the ServiceAccount (examples/kubernetes/warmroute/rbac.yaml)"
            }
            RequestCause::NotInstalled => {
                "install the CustomResourceDefinitions of the Gateway API inference extension, or write `selector` and `ports` \
                 in place of `name`"
            }
            RequestCause::Certificate => {
                "write the certificate authority of the API server to that file, as `kubectl get configmap kube-root-ca.crt -o \
                 yaml` shows it"
            }
            RequestCause::Unreachable => {
                "check that the API server answers there (`kubectl get --raw /readyz`), and the NetworkPolicies of the pod of warmroute"
            }
            RequestCause::Other => "check the log of the API server, and of any proxy before it",
        },
    };
    fix.to_owned()
}

fn unready(pool: &PoolReport) -> Option<Finding> {
    if pool.unready.is_empty() {
        return None;
    }
    let named = pool
        .unready
        .iter()
        .take(MAX_NAMES)
        .map(|(pod, reason)| format!("{pod}: {reason}"));
    let mut named: Vec<String> = named.collect();
    if pool.unready.len() > MAX_NAMES {
        named.push(format!("and {} more", pool.unready.len() - MAX_NAMES));
    }
    let seen = format!(
        "{} of {} not ready: {}",
        pool.unready.len(),
        count(pool.pods, "pod"),
        named.join("; ")
    );
    let (pod, _) = pool.unready.first()?;
    let (namespace, name) = pod.split_once('/').unwrap_or(("", pod));
    let fix =
        format!("see why: `kubectl -n {namespace} describe pod {name}`, and the log of its engine");
    Some(at("kubernetes.pods", pool).warning(seen, fix))
}

fn rights(pool: &PoolReport) -> Finding {
    let at = at("kubernetes.rights", pool);
    if let Some(error) = &pool.rights_error {
        return at.skipped(format!(
            "the API server does not say what the ServiceAccount may do: {error}"
        ));
    }
    let named = |right: &MissingRight| match right.group {
        "" => format!("{} {}", right.verb, right.resource),
        group => format!("{} {}.{group}", right.verb, right.resource),
    };
    let missing: Vec<String> = pool.missing_rights.iter().map(named).collect();
    if missing.is_empty() {
        return at.ok("the ServiceAccount may list and watch what it needs");
    }
    at.error(
        format!(
            "the ServiceAccount may not {}: changes are seen late or not at all",
            missing.join(", ")
        ),
        format!(
            "add to the rules of its Role: {}",
            rules(&pool.missing_rights)
        ),
    )
}

/// The missing rules of a Role.
fn rules(missing: &[MissingRight]) -> String {
    let mut resources: Vec<(&str, &str)> = missing
        .iter()
        .map(|right| (right.group, right.resource))
        .collect();
    resources.dedup();
    let rule = |(group, resource): &(&str, &str)| {
        let verbs = missing
            .iter()
            .filter(|right| (right.group, right.resource) == (*group, *resource));
        let verbs = verbs.map(|right| right.verb).collect::<Vec<_>>().join(", ");
        format!("`{{apiGroups: [\"{group}\"], resources: [{resource}], verbs: [{verbs}]}}`")
    };
    resources.iter().map(rule).collect::<Vec<_>>().join(" and ")
}

fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::doctor::finding::Level;

    fn pool(title: &str) -> PoolReport {
        PoolReport {
            title: title.to_owned(),
            pods: 2,
            workers: 2,
            ..PoolReport::default()
        }
    }

    fn found(pools: Vec<PoolReport>) -> Vec<(Level, &'static str, String, String)> {
        let findings = examine(&ClusterReport {
            pools,
            ..ClusterReport::default()
        });
        findings
            .into_iter()
            .map(|one| {
                (
                    one.level,
                    one.check,
                    one.subject,
                    one.seen + " | " + &one.mend.unwrap_or_default(),
                )
            })
            .collect()
    }

    #[test]
    fn each_failure_is_an_error_with_fix() {
        let request = |cause| PoolFailure::Request("cannot list pods".to_owned(), cause);
        let cases = [
            (
                PoolFailure::Missing,
                "correct `name` and `namespace` of the pool other/p",
            ),
            (PoolFailure::NoSelector, "spec.selector.matchLabels"),
            (
                PoolFailure::Unreadable("port".to_owned()),
                "correct the InferencePool",
            ),
            (
                request(RequestCause::Credentials),
                "automountServiceAccountToken: true",
            ),
            (request(RequestCause::Unauthorized), "kubectl create token"),
            (request(RequestCause::Forbidden), "add the verb to the Role"),
            (
                request(RequestCause::NotInstalled),
                "install the CustomResourceDefinitions",
            ),
            (request(RequestCause::Certificate), "certificate authority"),
            (
                request(RequestCause::Unreachable),
                "kubectl get --raw /readyz",
            ),
            (request(RequestCause::Other), "log of the API server"),
        ];
        for (failure, fix) in cases {
            let findings = found(vec![
                PoolReport {
                    failure: Some(failure),
                    ..pool("other/p")
                },
                pool("q"),
            ]);
            let (level, check, subject, text) = &findings[0];
            assert_eq!(
                (*level, *check, subject.as_str()),
                (Level::Error, "kubernetes.pool", "pool other/p")
            );
            assert!(text.contains(fix), "{text}: not {fix}");
            let healthy = (
                Level::Ok,
                "kubernetes.pool",
                "pool q".to_owned(),
                "2 pods, 2 workers | ".to_owned(),
            );
            assert!(findings.contains(&healthy), "{findings:#?}");
        }
    }

    #[test]
    fn unready_and_unusable_pods_are_named() {
        let unready: Vec<_> = (0..7)
            .map(|n| (format!("n/p{n}"), "its phase is Pending".to_owned()))
            .collect();
        let unusable = vec!["pod n/odd: its role `encode` ..".to_owned()];
        let findings = found(vec![PoolReport {
            pods: 9,
            workers: 1,
            unready,
            unusable,
            ..pool("p")
        }]);
        let texts: Vec<&str> = findings
            .iter()
            .filter(|one| one.0 == Level::Warning)
            .map(|one| one.3.as_str())
            .collect();
        let first = "7 of 9 pods not ready: n/p0: its phase is Pending; n/p1: its phase is Pending; n/p2: its phase is Pending; \
                     n/p3: its phase is Pending; n/p4: its phase is Pending; and 2 more | see why: `kubectl -n n describe pod p0`";
        assert!(texts[0].starts_with(first), "{texts:#?}");
        assert!(
            texts[1].contains("not used: pod n/odd: its role `encode`"),
            "{texts:#?}"
        );
    }

    #[test]
    fn pool_without_usable_pods_is_an_error() {
        let none = found(vec![PoolReport {
            pods: 0,
            workers: 0,
            ..pool("p")
        }]);
        assert!(
            none[0].0 == Level::Error && none[0].3.contains("no pod has the labels"),
            "{none:#?}"
        );
        let unusable = found(vec![PoolReport {
            workers: 0,
            ..pool("p")
        }]);
        assert!(
            unusable[0].0 == Level::Error && unusable[0].3.contains("none of its 2 pods"),
            "{unusable:#?}"
        );
    }

    #[test]
    fn missing_verbs_are_named_with_the_rule() {
        let right = |verb, resource, group| MissingRight {
            verb,
            resource,
            group,
        };
        let group = "inference.networking.k8s.io";
        let missing_rights = vec![
            right("watch", "pods", ""),
            right("list", "inferencepools", group),
            right("watch", "inferencepools", group),
        ];
        let findings = found(vec![PoolReport {
            missing_rights,
            ..pool("p")
        }]);
        let (level, check, _, text) = findings.last().unwrap();
        assert_eq!((*level, *check), (Level::Error, "kubernetes.rights"));
        assert!(
            text.contains(
                "may not watch pods, list inferencepools.inference.networking.k8s.io, watch"
            ),
            "{text}"
        );
        assert!(
            text.contains(r#"`{apiGroups: [""], resources: [pods], verbs: [watch]}`"#),
            "{text}"
        );
        assert!(
            text.contains("resources: [inferencepools], verbs: [list, watch]"),
            "{text}"
        );
    }
}
