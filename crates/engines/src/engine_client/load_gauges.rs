//! Load counters on the metrics page of an engine: running and waiting requests, and KV usage, by
//! data-parallel rank. The page is scanned while it is received and never stored. Real pages have
//! 64 KB, of which a few lines matter.

use std::time::Duration;

use warmroute_core::worker::{DpRank, RankRange};

use super::body::check_status;
use super::error::{EngineError, transport_error};
use super::metrics::{MetricSample, parse_sample};
use super::{EngineClient, EngineUrl};

/// Maximum size of a page. A page of 64 data-parallel ranks has less than 1 MB.
const MAX_PAGE: usize = 4 << 20;
/// Maximum length of a line that is parsed.
const MAX_LINE: usize = 4 << 10;
/// Maximum number of requests that an engine can report.
const MAX_REQUESTS: f64 = 1e9;
/// SGLang updates its gauges after a batch, and every 30 seconds while it is idle.
const SGLANG_LAG: Duration = Duration::from_secs(31);

/// Path of a metrics page in the Prometheus text format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsPath {
    /// `/metrics`: vLLM and SGLang.
    Metrics,
    /// `/prometheus/metrics`: TensorRT-LLM, which serves JSON under `/metrics`.
    PrometheusMetrics,
}

impl MetricsPath {
    /// All paths, in the order in which they are tried.
    pub const ALL: [MetricsPath; 2] = [MetricsPath::Metrics, MetricsPath::PrometheusMetrics];

    fn as_str(self) -> &'static str {
        match self {
            MetricsPath::Metrics => "metrics",
            MetricsPath::PrometheusMetrics => "prometheus/metrics",
        }
    }
}

/// Names of the counters of an engine.
struct GaugeNames {
    running: &'static str,
    waiting: &'static str,
    /// Current name, and the name in older versions.
    kv_usage: &'static [&'static str],
    rank_label: &'static str,
    max_lag: Option<Duration>,
}

const VLLM: GaugeNames = GaugeNames {
    running: "vllm:num_requests_running",
    waiting: "vllm:num_requests_waiting",
    kv_usage: &["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"],
    rank_label: "engine",
    max_lag: Some(Duration::ZERO),
};

const SGLANG: GaugeNames = GaugeNames {
    running: "sglang:num_running_reqs",
    waiting: "sglang:num_queue_reqs",
    kv_usage: &["sglang:token_usage"],
    rank_label: "dp_rank",
    max_lag: Some(SGLANG_LAG),
};

/// TensorRT-LLM updates its gauges only in iterations, so an idle engine keeps the last values.
const TENSORRT_LLM: GaugeNames = GaugeNames {
    running: "trtllm_num_requests_running",
    waiting: "trtllm_num_requests_waiting",
    kv_usage: &["trtllm_kv_cache_utilization"],
    rank_label: "dp_rank",
    max_lag: None,
};

/// Counters of one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RankGauges {
    /// Requests in the batch.
    pub running: u64,
    /// Requests in the queue.
    pub waiting: u64,
    /// Share of KV blocks that requests hold, from 0 to 1.
    pub kv_usage: Option<f64>,
}

/// Counters of an engine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineGauges {
    /// Counters by the rank label of the page; `None` if the lines have none.
    ranks: Vec<(Option<DpRank>, RankGauges)>,
    max_lag: Option<Duration>,
}

impl EngineGauges {
    /// Returns whether the page has no counters.
    pub fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// Returns the maximum time that the engine reports outdated values; `None` if there is no
    /// bound.
    pub fn max_lag(&self) -> Option<Duration> {
        self.max_lag
    }

    /// Returns the counters of a rank of a worker. A worker with one rank receives all requests of
    /// its engine, so the counters of all ranks are combined.
    pub fn for_rank(&self, ranks: RankRange, rank: DpRank) -> Option<RankGauges> {
        if ranks.size.get() == 1 {
            let all = self.ranks.iter().map(|(_, counters)| *counters);
            return all.reduce(RankGauges::combine);
        }
        let labelled = self.ranks.iter().find(|(label, _)| *label == Some(rank));
        labelled.map(|(_, counters)| *counters)
    }
}

impl RankGauges {
    fn combine(self, other: Self) -> Self {
        Self {
            running: self.running + other.running,
            waiting: self.waiting + other.waiting,
            kv_usage: self
                .kv_usage
                .into_iter()
                .chain(other.kv_usage)
                .reduce(f64::max),
        }
    }
}

impl EngineClient {
    /// Reads the load gauges of an engine. The call does not count against the limit of
    /// concurrent calls.
    pub async fn load_gauges(
        &self,
        engine: &EngineUrl,
        path: MetricsPath,
        deadline: Duration,
    ) -> Result<EngineGauges, EngineError> {
        tokio::time::timeout(deadline, self.scan_page(engine, path))
            .await
            .map_err(|_| EngineError::Timeout)?
    }

    async fn scan_page(
        &self,
        engine: &EngineUrl,
        path: MetricsPath,
    ) -> Result<EngineGauges, EngineError> {
        let request = self.shared.client.get(engine.join(path.as_str()));
        let response = check_status(self.send(request).await).await;
        if response.as_ref().is_err_and(EngineError::is_unauthorized) {
            // The token file may have changed. The next call uses the new token.
            self.shared.reload_token().await;
        }
        let mut response = response?;
        let mut scanner = GaugeScanner::default();
        let mut size = 0;
        while let Some(chunk) = response
            .chunk()
            .await
            .map_err(|error| transport_error(&error))?
        {
            size += chunk.len();
            if size > MAX_PAGE {
                return Err(EngineError::TooLarge(MAX_PAGE));
            }
            scanner.scan(&chunk);
        }
        Ok(scanner.into_counters())
    }
}

/// Counters of one rank while the page is scanned.
#[derive(Clone, Copy, Debug, Default)]
struct PartialGauges {
    rank: Option<DpRank>,
    running: Option<u64>,
    waiting: Option<u64>,
    kv_usage: Option<f64>,
}

/// Finds the load gauges of a page that arrives in pieces. Lines that are malformed, too long or
/// incomplete are skipped.
#[derive(Default)]
struct GaugeScanner {
    /// Beginning of a line whose end has not arrived.
    partial_line: Vec<u8>,
    /// Whether the current line exceeds the maximum length.
    is_too_long: bool,
    ranks: Vec<PartialGauges>,
    max_lag: Option<Duration>,
}

impl GaugeScanner {
    fn scan(&mut self, mut page: &[u8]) {
        while let Some(end) = memchr::memchr(b'\n', page) {
            let (line, rest) = page.split_at(end);
            page = &rest[1..];
            if self.partial_line.is_empty() && !self.is_too_long {
                self.scan_line(line);
                continue;
            }
            self.append(line);
            let whole = std::mem::take(&mut self.partial_line);
            if !std::mem::take(&mut self.is_too_long) {
                self.scan_line(&whole);
            }
        }
        self.append(page);
    }

    fn append(&mut self, part: &[u8]) {
        self.is_too_long |= self.partial_line.len() + part.len() > MAX_LINE;
        if self.is_too_long {
            self.partial_line.clear();
        } else {
            self.partial_line.extend_from_slice(part);
        }
    }

    fn scan_line(&mut self, line: &[u8]) {
        let names = match line.first() {
            Some(b'v') => &VLLM,
            Some(b's') => &SGLANG,
            Some(b't') => &TENSORRT_LLM,
            _ => return,
        };
        let end = memchr::memchr2(b'{', b' ', line).unwrap_or(line.len());
        let counters = [names.running, names.waiting];
        let mut known = counters.iter().chain(names.kv_usage);
        let is_counter = known.any(|name| name.as_bytes() == &line[..end]);
        if !is_counter || line.len() > MAX_LINE {
            return;
        }
        let sample = std::str::from_utf8(line).ok().and_then(parse_sample);
        if let Some(sample) = sample {
            self.add_sample(names, &sample);
        }
    }

    fn add_sample(&mut self, names: &GaugeNames, sample: &MetricSample) {
        // With priority scheduling, SGLang also reports a part of the requests for each priority.
        let is_part = sample
            .label("priority")
            .is_some_and(|value| !value.is_empty());
        if is_part || !sample.value.is_finite() || sample.value < 0.0 {
            return;
        }
        let rank = sample
            .label(names.rank_label)
            .and_then(|rank| rank.parse().ok())
            .map(DpRank);
        let Some(counters) = self.rank_entry(rank) else {
            return;
        };
        // Several lines of a rank come from its tensor-parallel or pipeline ranks, which run the
        // same requests.
        if sample.name == names.running || sample.name == names.waiting {
            if sample.value > MAX_REQUESTS {
                return;
            }
            let field = if sample.name == names.running {
                &mut counters.running
            } else {
                &mut counters.waiting
            };
            *field = (*field).max(Some(sample.value as u64));
        } else {
            let usage = sample.value.min(1.0);
            counters.kv_usage = counters
                .kv_usage
                .into_iter()
                .chain([usage])
                .reduce(f64::max);
        }
        self.max_lag = names.max_lag;
    }

    /// Returns the entry of a rank, or `None` beyond the maximum number of ranks.
    fn rank_entry(&mut self, rank: Option<DpRank>) -> Option<&mut PartialGauges> {
        let position = self.ranks.iter().position(|counters| counters.rank == rank);
        let index = position.unwrap_or(self.ranks.len());
        if index >= RankRange::MAX_SIZE as usize {
            return None;
        }
        if position.is_none() {
            self.ranks.push(PartialGauges {
                rank,
                ..PartialGauges::default()
            });
        }
        self.ranks.get_mut(index)
    }

    /// Returns the ranks that report both running and waiting requests.
    fn into_counters(self) -> EngineGauges {
        let complete = |counters: PartialGauges| {
            let values = RankGauges {
                running: counters.running?,
                waiting: counters.waiting?,
                kv_usage: counters.kv_usage,
            };
            Some((counters.rank, values))
        };
        EngineGauges {
            ranks: self.ranks.into_iter().filter_map(complete).collect(),
            max_lag: self.max_lag,
        }
    }
}

#[cfg(test)]
mod tests;
