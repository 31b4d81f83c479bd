//! Checks of the running process: its configuration and the health of its workers.

use super::finding::{CheckVerdict, Finding, error, ok, skipped, warning};

/// Number of differing keys that a message names.
const MAX_NAMED_KEYS: usize = 5;

/// State of a running process, read from its admin pages.
#[derive(Clone, Debug, Default)]
pub struct RunningProcess {
    /// Configuration file of the process; `None` if it has none.
    pub file: Option<String>,
    /// Keys whose values differ between the process and the file.
    pub differing_keys: Vec<String>,
    /// Differing keys that the process read but applies only after a restart.
    pub pending_keys: Vec<String>,
    /// Number of worker ranks.
    pub ranks: usize,
    /// Ranks that are not healthy, or slow.
    pub unhealthy: Vec<ReportedHealth>,
}

/// Health of a worker rank that is not healthy, or slow.
#[derive(Clone, Debug)]
pub struct ReportedHealth {
    /// Worker, rank and name.
    pub rank: String,
    /// Name of the health on the page.
    pub health: String,
    /// Seconds since the health changed.
    pub age_seconds: u64,
    /// Failures by kind, and the results of the other ranks.
    pub evidence: String,
}

/// Checks the configuration of the running process against the absolute path of a file.
pub fn check_process_config(file: &str, process: &RunningProcess) -> Finding {
    judge_keys(file, process).about("warmroute.config", "warmroute")
}

fn judge_keys(file: &str, process: &RunningProcess) -> CheckVerdict {
    let keys = &process.differing_keys;
    if keys.is_empty() {
        return ok("the running process has the configuration of the file");
    }
    let mut named = keys[..keys.len().min(MAX_NAMED_KEYS)].join(", ");
    if keys.len() > MAX_NAMED_KEYS {
        named = format!("{named} and {} more", keys.len() - MAX_NAMED_KEYS);
    }
    match &process.file {
        Some(running) if running != file => error(
            format!(
                "the running process uses another configuration file, {running}; these keys \
                differ: {named}"
            ),
            format!(
                "stop the process that uses {running}, or check its file: `warmroute doctor \
                {running}`"
            ),
        ),
        _ if *keys == process.pending_keys => warning(
            format!("the running process applies these keys after a restart: {named}"),
            "restart the process",
        ),
        _ => warning(
            format!("the running process has other values for these keys: {named}"),
            "reload the file with SIGHUP, and look for an error in /debug/config; flags of `serve` \
            replace values of the file",
        ),
    }
}

/// Checks the health of the worker ranks.
pub fn check_process_health(process: &RunningProcess) -> Vec<Finding> {
    if process.unhealthy.is_empty() {
        let ranks = process.ranks;
        let verdict = ok(format!(
            "no rank of {ranks} is suspect, ejected, slow or unreachable"
        ));
        return vec![verdict.about("warmroute.health", "warmroute")];
    }
    let finding = |rank: &ReportedHealth| {
        let health = rank.health.as_str();
        let message = format!(
            "{health} for {} s; evidence: {}",
            rank.age_seconds, rank.evidence
        );
        let fix = match health {
            "unreachable" => "start the engine, or remove the worker",
            "slow" => {
                "compare the clock, the temperature and the other processes of its GPU with those \
                of another worker; a worker on slower hardware needs no change"
            }
            _ => {
                "look for these failures in the log of the engine; warmroute sends single requests \
                to the rank and uses it again after one is delivered"
            }
        };
        let verdict = match health {
            "suspect" | "slow" => warning(message, fix),
            _ => error(message, fix),
        };
        verdict.about("warmroute.health", rank.rank.as_str())
    };
    process.unhealthy.iter().map(finding).collect()
}

/// Returns the finding for a process whose admin pages cannot be read. `listens` states whether the
/// ext_proc address accepts connections, and `is_refused` whether the admin address refuses them.
pub fn unreadable_process(reason: String, listens: bool, is_refused: bool) -> Finding {
    let verdict = if listens && is_refused {
        error(
            format!(
                "the ext_proc address accepts connections, but the admin address does not \
                ({reason}): another process listens there"
            ),
            "find the process with `ss -ltxp`, and stop it; then start warmroute with this file",
        )
    } else {
        skipped(reason)
    };
    verdict.about("warmroute.config", "warmroute")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::FindingLevel;

    fn process(file: &str, differing: &[&str], pending: &[&str]) -> RunningProcess {
        let keys = |keys: &[&str]| keys.iter().map(|&key| key.to_owned()).collect();
        RunningProcess {
            file: Some(file.to_owned()),
            differing_keys: keys(differing),
            pending_keys: keys(pending),
            ..RunningProcess::default()
        }
    }

    #[test]
    fn differing_configurations_are_reported() {
        let cases: [(RunningProcess, FindingLevel, &str); 4] = [
            (
                process("/other", &[], &[]),
                FindingLevel::Ok,
                "has the configuration",
            ),
            (
                process("/other", &["models"], &[]),
                FindingLevel::Error,
                "another configuration file, /other",
            ),
            (
                process("/own", &["queue.timeout"], &["queue.timeout"]),
                FindingLevel::Warning,
                "after a restart",
            ),
            (
                process("/own", &["a", "b", "c", "d", "e", "f", "g"], &["a"]),
                FindingLevel::Warning,
                "other values for these keys: a, b, c, d, e and 2 more",
            ),
        ];
        for (process, level, text) in cases {
            let finding = check_process_config("/own", &process);
            assert_eq!(finding.level, level, "{finding:?}");
            assert!(finding.message.contains(text), "{finding:?}");
        }
    }

    #[test]
    fn foreign_listener_is_an_error() {
        let level = |listens, is_refused| {
            unreadable_process("connection refused".to_owned(), listens, is_refused).level
        };
        assert_eq!(level(true, true), FindingLevel::Error);
        assert_eq!(level(true, false), FindingLevel::Skipped);
        assert_eq!(level(false, true), FindingLevel::Skipped);
    }

    #[test]
    fn ejected_rank_is_an_error() {
        let rank = |health: &str| ReportedHealth {
            rank: "worker 1 rank 0".to_owned(),
            health: health.to_owned(),
            age_seconds: 12,
            evidence: "rejected=4 peers_delivered=9 peers_failed=0".to_owned(),
        };
        let process = RunningProcess {
            ranks: 3,
            unhealthy: ["suspect", "slow", "ejected", "unreachable"]
                .map(rank)
                .to_vec(),
            ..RunningProcess::default()
        };
        let levels: Vec<_> = check_process_health(&process)
            .iter()
            .map(|one| one.level)
            .collect();
        use FindingLevel::{Error, Warning};
        assert_eq!(levels, [Warning, Warning, Error, Error]);
        assert_eq!(
            check_process_health(&RunningProcess::default())[0].level,
            FindingLevel::Ok
        );
    }
}
