//! Checks of Envoy's counters: requests that circuit breakers refuse now, and requests that
//! bypass warmroute. Limits alone do not show whether they are reached.

use std::collections::BTreeMap;
use std::time::Duration;

use super::dump::ConfigDump;
use super::expected::ExpectedEnvoy;
use super::ext_proc_cluster::OverflowEffect;
use super::site::FilterSite;
use crate::finding::{Finding, FindingBuilder};

/// Regular expression of the counters, for the parameter `filter` of Envoy's page `/stats`.
pub const COUNTER_FILTER: &str = r"(upstream_rq_(active|pending)_overflow|default\.rq_(pending_)?open|failure_mode_allowed|http\..*\.downstream_rq_total|^server\.uptime)$";

/// Counters of a cluster that grow when a circuit breaker refuses a request.
const OVERFLOWS: [&str; 2] = [
    "upstream_rq_active_overflow",
    "upstream_rq_pending_overflow",
];
/// Gauges of a cluster that are 1 while a circuit breaker is open.
const OPEN_BREAKERS: [&str; 2] = [
    "circuit_breakers.default.rq_open",
    "circuit_breakers.default.rq_pending_open",
];

/// Values of Envoy's page `/stats` by name.
#[derive(Clone, Debug, Default)]
pub struct EnvoyCounters(BTreeMap<String, u64>);

impl EnvoyCounters {
    /// Parses the page, which has one `name: value` per line. Other lines are ignored.
    pub fn parse(page: &str) -> Self {
        let values = page.lines().filter_map(|line| {
            let (name, value) = line.rsplit_once(": ")?;
            Some((name.to_owned(), value.trim().parse().ok()?))
        });
        Self(values.collect())
    }

    fn of_cluster(&self, cluster: &str, names: &[&str]) -> u64 {
        let value = |name| self.0.get(&format!("cluster.{cluster}.{name}"));
        names.iter().filter_map(value).sum()
    }

    /// Returns the requests of a connection manager.
    fn requests(&self, stat_prefix: &str) -> u64 {
        let name = format!("http.{stat_prefix}.downstream_rq_total");
        self.0.get(&name).copied().unwrap_or_default()
    }

    /// Returns the time since the start of Envoy, when its counters were 0.
    fn uptime(&self) -> Option<Duration> {
        self.0
            .get("server.uptime")
            .copied()
            .map(Duration::from_secs)
    }

    /// Returns the requests that were served although their stream failed, for the filter with a
    /// prefix of statistics.
    fn allowed_failures(&self, stat_prefix: &str, filter_prefix: &str) -> u64 {
        let separator = if filter_prefix.is_empty() { "" } else { "." };
        let name =
            format!("http.{stat_prefix}.ext_proc.{filter_prefix}{separator}failure_mode_allowed");
        self.0.get(&name).copied().unwrap_or_default()
    }
}

/// Counters at two instants.
#[derive(Clone, Debug, Default)]
pub struct CounterSamples {
    /// Earlier sample.
    pub first: EnvoyCounters,
    /// Later sample.
    pub last: EnvoyCounters,
}

impl CounterSamples {
    /// Returns the growth between the samples, and the last value.
    fn count(&self, value: impl Fn(&EnvoyCounters) -> u64) -> (u64, u64) {
        let last = value(&self.last);
        (last.saturating_sub(value(&self.first)), last)
    }
}

/// Returns the findings about requests that fail or bypass warmroute.
pub fn check_counters(
    dump: &ConfigDump,
    expected: &ExpectedEnvoy,
    samples: &CounterSamples,
) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    for site in &FilterSite::find_all(dump, expected) {
        let of_clusters = dump
            .clusters
            .keys()
            .filter_map(|cluster| check_cluster(site, cluster, samples));
        let of_listener = check_bypass(site, samples);
        for finding in of_clusters.chain([of_listener]) {
            if !findings.contains(&finding) {
                findings.push(finding);
            }
        }
    }
    findings
}

/// Checks the refused requests of a cluster; `None` if no request was refused.
fn check_cluster(
    site: &FilterSite<'_>,
    cluster: &str,
    samples: &CounterSamples,
) -> Option<Finding> {
    let (growth, total) = samples.count(|sample| sample.of_cluster(cluster, &OVERFLOWS));
    let is_full = samples.last.of_cluster(cluster, &OPEN_BREAKERS) > 0;
    if total == 0 && !is_full {
        return None;
    }
    let at = FindingBuilder::new("envoy.overflow", format!("cluster {cluster}"));
    let effect = if site.callers_of(cluster).next().is_none() {
        "answered with 503, or dropped if they are mirrored"
    } else {
        match OverflowEffect::of_cluster(site, cluster) {
            OverflowEffect::Unrouted => "served without warmroute",
            OverflowEffect::Rejected => "answered with 500",
        }
    };
    let since_start = format!(
        "since its start Envoy refused {total} because of a circuit breaker; they were {effect}"
    );
    if growth == 0 && !is_full {
        return Some(at.note(format!("requests are not refused now; {since_start}")));
    }
    Some(at.error(
        format!("requests are refused now; {since_start}"),
        format!("raise the thresholds under `circuit_breakers` of cluster `{cluster}` to 100000"),
    ))
}

/// Checks the requests that a connection manager served although their stream to warmroute failed.
fn check_bypass(site: &FilterSite<'_>, samples: &CounterSamples) -> Finding {
    let prefix = &site.listener.hcm.stat_prefix;
    let filter_prefix = &site.main.config.stat_prefix;
    let (growth, total) = samples.count(|sample| sample.allowed_failures(prefix, filter_prefix));
    let at = site.listener_check("envoy.bypass");
    if total == 0 {
        return at.ok("no request bypassed warmroute");
    }
    let requests = samples.last.requests(prefix);
    let share = if requests > 0 {
        let percent = 100.0 * total as f64 / requests as f64;
        format!(" of {requests} requests ({percent:.1} %)")
    } else {
        String::new()
    };
    let start = samples.last.uptime().map_or_else(String::new, |uptime| {
        format!(" {} ago", humantime::format_duration(uptime))
    });
    let since_start = format!(
        "since its start{start} Envoy served {total}{share} after a failure of their ext_proc stream"
    );
    if growth == 0 {
        return at.note(format!("no request bypasses warmroute now; {since_start}"));
    }
    at.error(
        format!("requests bypass warmroute now; {since_start}"),
        "see whether `envoy.overflow` or `envoy.message_timeout` has a finding, and whether \
        warmroute runs; docs/troubleshooting.md has the steps under \"Requests bypass warmroute\"",
    )
}
