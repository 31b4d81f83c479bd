//! Reads the admin pages of the running process.

use std::time::Duration;

use anyhow::Context as _;
use serde_json::Value;
use warmroute_doctor::finding::Finding;
use warmroute_doctor::process::{
    ReportedHealth, RunningProcess, check_process_config, check_process_health, unreadable_process,
};
use warmroute_server::config::Config;

use super::probes::reachable_address;
use crate::cmd::admin_client::AdminClient;

/// Checks the process at the configured admin address. `listens` states whether the ext_proc address
/// accepts connections.
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
    let read = tokio::time::timeout(timeout, read_process(config, &address));
    let process = read.await.unwrap_or_else(|_| {
        let seconds = timeout.as_secs();
        Err(anyhow::anyhow!(
            "no response from {address} within {seconds} s"
        ))
    });
    match process {
        Ok(process) => {
            let mut findings = vec![check_process_config(file, &process)];
            findings.extend(check_process_health(&process));
            findings
        }
        Err(error) => vec![unreadable_process(format!("{error:#}"), listens, false)],
    }
}

async fn read_process(config: &Config, address: &str) -> anyhow::Result<RunningProcess> {
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
    Ok(RunningProcess {
        file: settings["file"].as_str().map(str::to_owned),
        differing_keys: config.differing_keys(&settings["config"]),
        pending_keys: serde_json::from_value(settings["needs_restart"].clone()).unwrap_or_default(),
        ranks: members.len(),
        unhealthy: members.iter().filter_map(reported_health).collect(),
    })
}

/// Returns the health of a member of the fleet, unless it is healthy and answers in the usual time.
fn reported_health(member: &Value) -> Option<ReportedHealth> {
    let worker = member["rank"]["worker"].as_str().unwrap_or_default();
    let rank = format!("worker {worker} rank {}", member["rank"]["rank"]);
    if let Some(age_seconds) = member["unreachable_seconds"].as_u64() {
        let endpoint = member["worker"]["endpoint"].as_str().unwrap_or_default();
        return Some(ReportedHealth {
            rank,
            health: "unreachable".to_owned(),
            age_seconds,
            evidence: format!("no answer from {endpoint}"),
        });
    }
    let health = member["health"]["health"].as_str().unwrap_or("healthy");
    if health == "healthy" {
        let slow = &member["slow"];
        return Some(ReportedHealth {
            rank,
            health: "slow".to_owned(),
            age_seconds: slow["age_seconds"].as_u64()?,
            evidence: format!(
                "{} factor {:.1}, median of the model {:.1}",
                slow["phase"].as_str()?,
                slow["factor"].as_f64()?,
                slow["median"].as_f64()?
            ),
        });
    }
    let evidence = &member["health"]["evidence"];
    let failures = evidence["failures"].as_object();
    let failures = failures.into_iter().flatten();
    let failures: Vec<String> = failures
        .map(|(kind, count)| format!("{kind}={count}"))
        .collect();
    Some(ReportedHealth {
        rank,
        health: health.replace('_', " "),
        age_seconds: member["health"]["age_seconds"].as_u64().unwrap_or_default(),
        evidence: format!(
            "{} peers_delivered={} peers_failed={}",
            failures.join(" "),
            evidence["peers_delivered"],
            evidence["peers_failed"]
        ),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn slow_rank_is_reported_with_its_factor() {
        let found = reported_health(&json!({
            "rank": {"worker": "1", "rank": 0},
            "health": null,
            "slow": {"phase": "decode", "factor": 7.96, "median": 1.0, "age_seconds": 12},
        }));
        let found = found.unwrap();
        assert_eq!((found.health.as_str(), found.age_seconds), ("slow", 12));
        assert_eq!(found.evidence, "decode factor 8.0, median of the model 1.0");
    }

    #[test]
    fn unreachable_rank_is_reported_without_failures() {
        let member = |seconds: Option<u64>| {
            json!({
                "rank": {"worker": "1", "rank": 0},
                "worker": {"endpoint": "10.0.0.1:8000"},
                "health": null,
                "unreachable_seconds": seconds,
            })
        };
        assert!(reported_health(&member(None)).is_none());
        let found = reported_health(&member(Some(40))).unwrap();
        assert_eq!(
            (found.health.as_str(), found.age_seconds),
            ("unreachable", 40)
        );
        assert_eq!(found.evidence, "no answer from 10.0.0.1:8000");
        assert_eq!(found.rank, "worker 1 rank 0");
    }
}
