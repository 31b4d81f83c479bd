//! Checks of Envoy's counters: requests that circuit breakers refuse now, and requests that
//! bypass warmroute. Limits alone do not show whether they are reached.

use std::collections::BTreeMap;
use std::time::Duration;

use super::dump::ConfigDump;
use super::expected::ExpectedEnvoy;
use super::ext_proc_cluster::rejects_overflow;
use super::site::FilterSite;
use crate::finding::{CheckFacts as _, CheckVerdict, Finding, add_new, error, note, ok};

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

    fn value(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or_default()
    }

    fn of_cluster(&self, cluster: &str, names: &[&str]) -> u64 {
        let values = names
            .iter()
            .map(|name| self.value(&format!("cluster.{cluster}.{name}")));
        values.sum()
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
        let of_clusters = dump.clusters().filter_map(|cluster| {
            let verdict = judge_overflow(site, cluster.name(), samples)?;
            Some(verdict.about("envoy.overflow", format!("cluster {}", cluster.name())))
        });
        add_new(&mut findings, of_clusters);
        let bypass = judge_bypass(site, samples);
        add_new(
            &mut findings,
            [bypass.about("envoy.bypass", site.subject())],
        );
    }
    findings
}

/// Judges the refused requests of a cluster; `None` if no request was refused.
fn judge_overflow(
    site: &FilterSite<'_>,
    cluster: &str,
    samples: &CounterSamples,
) -> Option<CheckVerdict> {
    let (growth, total) = samples.count(|sample| sample.of_cluster(cluster, &OVERFLOWS));
    let is_full = samples.last.of_cluster(cluster, &OPEN_BREAKERS) > 0;
    if total == 0 && !is_full {
        return None;
    }
    let effect = if site.callers_of(cluster).next().is_none() {
        "answered with 503, or dropped if they are mirrored"
    } else if rejects_overflow(site, cluster) {
        "answered with 500"
    } else {
        "served without warmroute"
    };
    let since_start = format!(
        "since its start Envoy refused {total} because of a circuit breaker; they were {effect}"
    );
    if growth == 0 && !is_full {
        return Some(note(format!("requests are not refused now; {since_start}")));
    }
    Some(error(
        format!("requests are refused now; {since_start}"),
        format!("raise the thresholds under `circuit_breakers` of cluster `{cluster}` to 100000"),
    ))
}

/// Judges the requests that a connection manager served although their stream to warmroute failed.
fn judge_bypass(site: &FilterSite<'_>, samples: &CounterSamples) -> CheckVerdict {
    let prefix = site.listener.manager().text("stat_prefix");
    let filter = site.main.config.node().text("stat_prefix");
    let separator = if filter.is_empty() { "" } else { "." };
    let allowed = format!("http.{prefix}.ext_proc.{filter}{separator}failure_mode_allowed");
    let (growth, total) = samples.count(|sample| sample.value(&allowed));
    if total == 0 {
        return ok("no request bypassed warmroute");
    }
    let requests = samples
        .last
        .value(&format!("http.{prefix}.downstream_rq_total"));
    let share = if requests > 0 {
        let percent = 100.0 * total as f64 / requests as f64;
        format!(" of {requests} requests ({percent:.1} %)")
    } else {
        String::new()
    };
    // Counters are 0 when Envoy starts.
    let start = samples
        .last
        .0
        .get("server.uptime")
        .map_or(String::new(), |seconds| {
            format!(
                " {} ago",
                humantime::format_duration(Duration::from_secs(*seconds))
            )
        });
    let since_start = format!(
        "since its start{start} Envoy served {total}{share} after a failure of their ext_proc \
        stream"
    );
    if growth == 0 {
        return note(format!("no request bypasses warmroute now; {since_start}"));
    }
    error(
        format!("requests bypass warmroute now; {since_start}"),
        "see whether `envoy.overflow` or `envoy.message_timeout` has a finding, and whether \
        warmroute runs; docs/troubleshooting.md has the steps under \"Requests bypass warmroute\"",
    )
}
