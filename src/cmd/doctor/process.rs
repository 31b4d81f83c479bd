//! Checks of the running process by its admin pages: its configuration, and the health of its
//! workers.

use std::time::Duration;

use anyhow::Context as _;
use serde_json::Value;
use warmroute_doctor::finding::{CheckVerdict, Finding, error, ok, skipped, warning};
use warmroute_server::config::Config;

use super::probes::reachable_address;
use crate::cmd::admin_client::AdminClient;

/// Number of differing keys that a message names.
const MAX_NAMED_KEYS: usize = 5;

/// Checks the process at the configured admin address. `file` is the absolute path of the
/// configuration, and `listens` states whether the ext_proc address accepts connections.
pub(super) async fn check_process(
    config: &Config,
    file: &str,
    timeout: Duration,
    listens: bool,
) -> Vec<Finding> {
    let address = reachable_address(config.listeners.admin.address);
    let connected = tokio::time::timeout(timeout, tokio::net::TcpStream::connect(address)).await;
    if let Ok(Err(error)) = connected {
        let reason = format!("not running: the admin address {address}: {error}");
        return vec![unreadable_process(reason, listens, true)];
    }
    let address = address.to_string();
    let read = tokio::time::timeout(timeout, check_pages(config, file, &address));
    let findings = read.await.unwrap_or_else(|_| {
        let seconds = timeout.as_secs();
        Err(anyhow::anyhow!(
            "no response from {address} within {seconds} s"
        ))
    });
    findings.unwrap_or_else(|error| vec![unreadable_process(format!("{error:#}"), listens, false)])
}

async fn check_pages(config: &Config, file: &str, address: &str) -> anyhow::Result<Vec<Finding>> {
    let admin = &config.listeners.admin;
    let scheme = if admin.tls.is_some() { "https" } else { "http" };
    let client = AdminClient::new(
        &format!("{scheme}://{address}"),
        admin.token_file.as_deref(),
        None,
    )?;
    let page = async |path: &str| -> anyhow::Result<Value> {
        let text = client.get(path).await?;
        serde_json::from_str(&text).with_context(|| format!("{path} is not JSON"))
    };
    let settings = page("/debug/config").await?;
    let fleet = page("/debug/fleet").await?;
    let members = fleet["members"].as_array().context("no members")?;
    let differing_keys = config.differing_keys(&settings["config"]);
    let verdict = judge_keys(file, &settings, &differing_keys);
    let mut findings = vec![verdict.about("warmroute.config", "warmroute")];
    findings.extend(check_health(members));
    Ok(findings)
}

/// Judges the keys whose values differ between the process and the file. The page names those that
/// apply after a restart.
fn judge_keys(file: &str, page: &Value, keys: &[String]) -> CheckVerdict {
    if keys.is_empty() {
        return ok("the running process has the configuration of the file");
    }
    let mut named = keys[..keys.len().min(MAX_NAMED_KEYS)].join(", ");
    if keys.len() > MAX_NAMED_KEYS {
        named = format!("{named} and {} more", keys.len() - MAX_NAMED_KEYS);
    }
    let pending = page["needs_restart"].as_array().into_iter().flatten();
    let needs_restart = pending.eq(keys);
    match page["file"].as_str() {
        Some(running) if running != file => error(
            format!(
                "the running process uses another configuration file, {running}; \
                these keys differ: {named}"
            ),
            format!(
                "stop the process that uses {running}, or check its file: \
                `warmroute doctor {running}`"
            ),
        ),
        _ if needs_restart => warning(
            format!("the running process applies these keys after a restart: {named}"),
            "restart the process",
        ),
        _ => warning(
            format!("the running process has other values for these keys: {named}"),
            "reload the file with SIGHUP, and look for an error in /debug/config; \
            flags of `serve` replace values of the file",
        ),
    }
}

/// Checks the health of the members of the fleet.
fn check_health(members: &[Value]) -> Vec<Finding> {
    let unhealthy = members.iter().filter_map(|member| {
        let worker = member["rank"]["worker"].as_str().unwrap_or_default();
        let rank = format!("worker {worker} rank {}", member["rank"]["rank"]);
        Some(judge_member(member)?.about("warmroute.health", rank))
    });
    let mut findings: Vec<Finding> = unhealthy.collect();
    if findings.is_empty() {
        let ranks = members.len();
        let verdict = ok(format!(
            "no rank of {ranks} is suspect, ejected, slow or unreachable"
        ));
        findings.push(verdict.about("warmroute.health", "warmroute"));
    }
    findings
}

/// Judges a member, unless it is healthy and answers in the usual time.
fn judge_member(member: &Value) -> Option<CheckVerdict> {
    if let Some(age) = member["unreachable_seconds"].as_u64() {
        let endpoint = member["worker"]["endpoint"].as_str().unwrap_or_default();
        let evidence = format!("no answer from {endpoint}");
        return Some(judge_state("unreachable", age, &evidence));
    }
    let health = member["health"]["health"].as_str().unwrap_or("healthy");
    if health == "healthy" {
        let slow = &member["slow"];
        let evidence = format!(
            "{} factor {:.1}, median of the model {:.1}",
            slow["phase"].as_str()?,
            slow["factor"].as_f64()?,
            slow["median"].as_f64()?
        );
        return Some(judge_state(
            "slow",
            slow["age_seconds"].as_u64()?,
            &evidence,
        ));
    }
    let evidence = &member["health"]["evidence"];
    let failures = evidence["failures"].as_object();
    let failures = failures.into_iter().flatten();
    let failures: Vec<String> = failures
        .map(|(kind, count)| format!("{kind}={count}"))
        .collect();
    let evidence = format!(
        "{} peers_delivered={} peers_failed={}",
        failures.join(" "),
        evidence["peers_delivered"],
        evidence["peers_failed"]
    );
    let age = member["health"]["age_seconds"].as_u64().unwrap_or_default();
    Some(judge_state(&health.replace('_', " "), age, &evidence))
}

/// Returns the verdict on a rank that has had this state for `age` seconds.
fn judge_state(state: &str, age: u64, evidence: &str) -> CheckVerdict {
    let message = format!("{state} for {age} s; evidence: {evidence}");
    let fix = match state {
        "unreachable" => "start the engine, or remove the worker",
        "slow" => {
            "compare the clock, the temperature and the other processes of its GPU with those \
            of another worker; a worker on slower hardware needs no change"
        }
        _ => {
            "look for these failures in the log of the engine; \
            warmroute sends single requests to the rank and uses it again after one is delivered"
        }
    };
    match state {
        "suspect" | "slow" => warning(message, fix),
        _ => error(message, fix),
    }
}

/// Returns the finding for a process whose admin pages cannot be read. `listens` states whether the
/// ext_proc address accepts connections, and `is_refused` whether the admin address refuses them.
fn unreadable_process(reason: String, listens: bool, is_refused: bool) -> Finding {
    let verdict = if listens && is_refused {
        error(
            format!(
                "the ext_proc address accepts connections, \
                but the admin address does not ({reason}): another process listens there"
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
    use serde_json::json;
    use warmroute_doctor::finding::FindingLevel;

    use super::*;

    #[test]
    fn differing_configurations_are_reported() {
        use FindingLevel::{Error, Ok, Warning};
        let all = ["a", "b", "c", "d", "e", "f", "g"];
        let cases: [(&str, &[&str], FindingLevel, &str); 4] = [
            ("/other", &[], Ok, "has the configuration"),
            (
                "/other",
                &["b"],
                Error,
                "another configuration file, /other",
            ),
            ("/own", &["a"], Warning, "after a restart"),
            (
                "/own",
                &all,
                Warning,
                "other values for these keys: a, b, c, d, e and 2 more",
            ),
        ];
        for (file, keys, level, text) in cases {
            let page = json!({"file": file, "needs_restart": ["a"]});
            let keys: Vec<String> = keys.iter().map(ToString::to_string).collect();
            let finding = judge_keys("/own", &page, &keys).about("", "");
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
    fn unhealthy_ranks_are_reported_with_evidence() {
        let member = |state: Value| {
            let mut member = json!({
                "rank": {"worker": "1", "rank": 0},
                "worker": {"endpoint": "10.0.0.1:8000"},
            });
            let fields = member.as_object_mut().unwrap();
            fields.extend(state.as_object().unwrap().clone());
            member
        };
        let failing = |health: &str| {
            let evidence = json!({
                "failures": {"rejected": 4}, "peers_delivered": 9, "peers_failed": 0,
            });
            member(json!({
                "health": {"health": health, "age_seconds": 12, "evidence": evidence},
            }))
        };
        let slow = json!({"phase": "decode", "factor": 7.96, "median": 1.0, "age_seconds": 12});
        let members = [
            member(json!({"health": null, "unreachable_seconds": null})),
            failing("suspect"),
            member(json!({"health": null, "slow": slow})),
            failing("ejected"),
            member(json!({"health": null, "unreachable_seconds": 40})),
        ];
        use FindingLevel::{Error, Warning};
        let failures = "rejected=4 peers_delivered=9 peers_failed=0";
        let expected = [
            (Warning, format!("suspect for 12 s; evidence: {failures}")),
            (
                Warning,
                "slow for 12 s; evidence: decode factor 8.0, median of the model 1.0".to_owned(),
            ),
            (Error, format!("ejected for 12 s; evidence: {failures}")),
            (
                Error,
                "unreachable for 40 s; evidence: no answer from 10.0.0.1:8000".to_owned(),
            ),
        ];
        let findings = check_health(&members);
        assert_eq!(findings[0].subject, "worker 1 rank 0");
        let found = findings.into_iter().map(|one| (one.level, one.message));
        assert_eq!(found.collect::<Vec<_>>(), expected);
        assert_eq!(check_health(&members[..1])[0].level, FindingLevel::Ok);
    }
}
