//! Checks of the Kubernetes pools: pure functions from reports of the pools to findings.

use warmroute_settings::format_count;

use super::finding::{
    CheckFacts, CheckVerdict, Finding, error, ok, row, run_checks, skipped, warning,
};

/// Maximum number of pods that one finding names.
const MAX_NAMES: usize = 5;

/// State of one pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolReport {
    /// Name in the configuration.
    pub title: String,
    /// Reason why its pods are unknown, with its fix.
    pub failure: Option<CheckVerdict>,
    /// Missing permissions.
    pub missing_rights: Vec<MissingRight>,
    /// Reason why the permissions are unknown.
    pub rights_error: Option<String>,
    /// Number of pods.
    pub pods: usize,
    /// Number of workers: one for each port of each usable pod.
    pub workers: usize,
    /// Pods that are not ready, with the reason.
    pub unready: Vec<(String, String)>,
    /// Errors of pods that cannot become workers.
    pub unusable: Vec<String>,
}

/// Verb that a Role lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingRight {
    /// `list` or `watch`.
    pub verb: &'static str,
    /// Plural of the kind.
    pub resource: &'static str,
    /// API group; empty for pods.
    pub group: &'static str,
}

impl CheckFacts for PoolReport {
    fn subject(&self) -> String {
        format!("pool {}", self.title)
    }
}

/// Returns the findings about all pools, and about conflicts between their workers.
pub fn check_pools(pools: &[PoolReport], conflicts: &[String]) -> Vec<Finding> {
    let conflicts = conflicts.iter().map(|conflict| {
        let verdict = warning(
            format!("not used: {conflict}"),
            "give each pod an address, a port and an id of its own, \
            and let each pod be selected by one pool only",
        );
        verdict.about("kubernetes.pods", "all pools")
    });
    pools.iter().flat_map(check_pool).chain(conflicts).collect()
}

fn check_pool(pool: &PoolReport) -> Vec<Finding> {
    let rows = [
        row("kubernetes.pool", check_pods),
        row("kubernetes.pods", check_unready),
    ];
    let mut findings = run_checks(pool, &rows);
    findings.extend(pool.unusable.iter().map(|reason| {
        let fix = "correct the label, the annotation or the status that is named";
        let verdict = warning(format!("not used: {reason}"), fix);
        verdict.about("kubernetes.pods", pool.subject())
    }));
    findings.push(judge_rights(pool).about("kubernetes.rights", pool.subject()));
    findings
}

fn check_pods(pool: &PoolReport) -> Option<CheckVerdict> {
    if let Some(failure) = &pool.failure {
        return Some(failure.clone());
    }
    let pods = format_count(pool.pods, "pod");
    Some(match (pool.pods, pool.workers) {
        (0, _) => error(
            "no pod has the labels of its selector",
            "compare the selector with the labels of the pods (`kubectl get pods --show-labels`), \
            and the namespace",
        ),
        (_, 0) => error(
            format!("none of its {pods} can be a worker"),
            "see the findings about its pods, and `kubectl describe pods`",
        ),
        (_, workers) => ok(format!("{pods}, {}", format_count(workers, "worker"))),
    })
}

fn check_unready(pool: &PoolReport) -> Option<CheckVerdict> {
    let (first, _) = pool.unready.first()?;
    let count = pool.unready.len();
    let shown = pool.unready.iter().take(MAX_NAMES);
    let mut named: Vec<String> = shown
        .map(|(pod, reason)| format!("{pod}: {reason}"))
        .collect();
    if count > MAX_NAMES {
        named.push(format!("and {} more", count - MAX_NAMES));
    }
    let (namespace, name) = first.split_once('/').unwrap_or(("", first));
    Some(warning(
        format!(
            "{count} of {} not ready: {}",
            format_count(pool.pods, "pod"),
            named.join("; ")
        ),
        format!("see why: `kubectl -n {namespace} describe pod {name}`, and the log of its engine"),
    ))
}

fn judge_rights(pool: &PoolReport) -> CheckVerdict {
    if let Some(reason) = &pool.rights_error {
        return skipped(format!(
            "the API server does not say what the ServiceAccount may do: {reason}"
        ));
    }
    let rights = &pool.missing_rights;
    if rights.is_empty() {
        return ok("the ServiceAccount may list and watch what it needs");
    }
    let named = rights.iter().map(|right| {
        let separator = if right.group.is_empty() { "" } else { "." };
        format!(
            "{} {}{separator}{}",
            right.verb, right.resource, right.group
        )
    });
    let named: Vec<String> = named.collect();
    error(
        format!(
            "the ServiceAccount may not {}: changes are seen late or not at all",
            named.join(", ")
        ),
        format!("add to the rules of its Role: {}", role_rules(rights)),
    )
}

/// Formats the missing rules of a Role.
fn role_rules(missing: &[MissingRight]) -> String {
    let kind = |right: &MissingRight| (right.group, right.resource);
    let rules = missing
        .chunk_by(|right, next| kind(right) == kind(next))
        .map(|rights| {
            let (group, resource) = kind(&rights[0]);
            let verbs: Vec<&str> = rights.iter().map(|right| right.verb).collect();
            let verbs = verbs.join(", ");
            format!("`{{apiGroups: [\"{group}\"], resources: [{resource}], verbs: [{verbs}]}}`")
        });
    rules.collect::<Vec<_>>().join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::FindingLevel;

    fn pool(title: &str) -> PoolReport {
        PoolReport {
            title: title.to_owned(),
            pods: 2,
            workers: 2,
            ..PoolReport::default()
        }
    }

    fn found(pools: &[PoolReport]) -> Vec<(FindingLevel, &'static str, String, String)> {
        let findings = check_pools(pools, &[]);
        findings
            .into_iter()
            .map(|one| {
                (
                    one.level,
                    one.check,
                    one.subject,
                    one.message + " | " + &one.fix.unwrap_or_default(),
                )
            })
            .collect()
    }

    #[test]
    fn failure_of_pool_leaves_others_healthy() {
        let failed = PoolReport {
            failure: Some(error("cannot list pods", "add the verb")),
            ..pool("other/p")
        };
        let findings = found(&[failed, pool("q")]);
        for (level, subject, text) in [
            (
                FindingLevel::Error,
                "pool other/p",
                "cannot list pods | add the verb",
            ),
            (FindingLevel::Ok, "pool q", "2 pods, 2 workers | "),
        ] {
            let subject = subject.to_owned();
            let expected = (level, "kubernetes.pool", subject, text.to_owned());
            assert!(findings.contains(&expected), "{findings:#?}");
        }
    }

    #[test]
    fn unready_and_unusable_pods_are_named() {
        let unready: Vec<_> = (0..7)
            .map(|n| (format!("n/p{n}"), "its phase is Pending".to_owned()))
            .collect();
        let unusable = vec!["pod n/odd: its role `encode` ..".to_owned()];
        let findings = found(&[PoolReport {
            pods: 9,
            workers: 1,
            unready,
            unusable,
            ..pool("p")
        }]);
        let texts: Vec<&str> = findings
            .iter()
            .filter(|one| one.0 == FindingLevel::Warning)
            .map(|one| one.3.as_str())
            .collect();
        let first = "7 of 9 pods not ready: n/p0: its phase is Pending; \
        n/p1: its phase is Pending; n/p2: its phase is Pending; n/p3: its phase is Pending; n/p4: \
        its phase is Pending; and 2 more | see why: `kubectl -n n describe pod p0`";
        assert!(texts[0].starts_with(first), "{texts:#?}");
        assert!(
            texts[1].contains("not used: pod n/odd: its role `encode`"),
            "{texts:#?}"
        );
    }

    #[test]
    fn pool_without_usable_pods_is_an_error() {
        let none = found(&[PoolReport {
            pods: 0,
            workers: 0,
            ..pool("p")
        }]);
        assert!(
            none[0].0 == FindingLevel::Error && none[0].3.contains("no pod has the labels"),
            "{none:#?}"
        );
        let unusable = found(&[PoolReport {
            workers: 0,
            ..pool("p")
        }]);
        assert!(
            unusable[0].0 == FindingLevel::Error && unusable[0].3.contains("none of its 2 pods"),
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
        let findings = found(&[PoolReport {
            missing_rights,
            ..pool("p")
        }]);
        let (level, check, _, text) = findings.last().unwrap();
        assert_eq!((*level, *check), (FindingLevel::Error, "kubernetes.rights"));
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
