//! The metrics page under vLLM's names, so that a scraper for a real engine also works here. The
//! text is written without a registry, because it must have vLLM's labels and number format.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

use super::disaggregation::TransferCounters;
use super::scheduler::SchedulerTotals;

const FIRST_TOKEN_BUCKETS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const INTER_TOKEN_BUCKETS: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
const REQUEST_BUCKETS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];

/// Latency histogram: observation counts by upper bound.
#[derive(Clone, Debug)]
pub(crate) struct LatencyHistogram {
    bounds: &'static [f64],
    counts: Vec<u64>,
    sum: f64,
    count: u64,
}

impl LatencyHistogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self {
            bounds,
            counts: vec![0; bounds.len()],
            sum: 0.0,
            count: 0,
        }
    }

    pub(crate) fn observe(&mut self, seconds: f64) {
        if let Some(count) = self
            .counts
            .get_mut(self.bounds.partition_point(|&bound| bound < seconds))
        {
            *count += 1;
        }
        self.sum += seconds;
        self.count += 1;
    }
}

/// Durations observed by one rank.
#[derive(Clone, Debug)]
pub(crate) struct LatencyHistograms {
    pub(crate) first_token: LatencyHistogram,
    pub(crate) inter_token: LatencyHistogram,
    pub(crate) request: LatencyHistogram,
    pub(crate) queue: LatencyHistogram,
}

impl Default for LatencyHistograms {
    fn default() -> Self {
        Self {
            first_token: LatencyHistogram::new(FIRST_TOKEN_BUCKETS),
            inter_token: LatencyHistogram::new(INTER_TOKEN_BUCKETS),
            request: LatencyHistogram::new(REQUEST_BUCKETS),
            queue: LatencyHistogram::new(REQUEST_BUCKETS),
        }
    }
}

/// State of one rank at the time of a scrape.
#[derive(Clone, Debug)]
pub(crate) struct RankSample {
    pub(crate) rank: u32,
    pub(crate) running: usize,
    pub(crate) waiting: usize,
    /// Waiting requests that need blocks of another engine.
    pub(crate) deferred: usize,
    pub(crate) used_blocks: usize,
    pub(crate) num_blocks: usize,
    pub(crate) block_size: usize,
    pub(crate) prefix_caching: bool,
    pub(crate) totals: SchedulerTotals,
    pub(crate) latencies: LatencyHistograms,
    pub(crate) leases: usize,
    pub(crate) leases_expired: u64,
}

/// A metric family.
#[derive(Clone, Copy)]
struct MetricFamily {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
}

fn gauge(name: &'static str, help: &'static str) -> MetricFamily {
    MetricFamily {
        name,
        kind: "gauge",
        help,
    }
}

fn counter(name: &'static str, help: &'static str) -> MetricFamily {
    MetricFamily {
        name,
        kind: "counter",
        help,
    }
}

/// Values of one rank, with the value of an additional label.
type MetricValues = Vec<(&'static str, f64)>;

fn metric_families(sample: &RankSample) -> Vec<(MetricFamily, MetricValues)> {
    let mut families = scheduler_families(sample);
    families.extend(token_families(sample));
    families
}

/// Returns the metrics of the batch, the queue and the cache.
fn scheduler_families(sample: &RankSample) -> Vec<(MetricFamily, MetricValues)> {
    let totals = sample.totals;
    let usage = sample.used_blocks as f64 / sample.num_blocks as f64;
    let one = |value: f64| vec![("", value)];
    let count = |value: u64| vec![("", value as f64)];
    vec![
        (
            gauge("num_requests_running", "Requests in the batch."),
            one(sample.running as f64),
        ),
        (
            gauge("num_requests_waiting", "Requests in the queue."),
            one(sample.waiting as f64),
        ),
        (
            gauge(
                "num_requests_waiting_by_reason",
                "Requests in the queue by reason.",
            ),
            vec![
                (
                    ",reason=\"capacity\"",
                    (sample.waiting - sample.deferred) as f64,
                ),
                (",reason=\"deferred\"", sample.deferred as f64),
            ],
        ),
        (
            gauge("kv_cache_usage_perc", "Share of blocks held by requests."),
            one(usage),
        ),
        (
            counter("prefix_cache_queries_total", "Prompt tokens looked up."),
            count(totals.prefix_queries),
        ),
        (
            counter("prefix_cache_hits_total", "Prompt tokens found cached."),
            count(totals.prefix_hits),
        ),
        (
            counter("num_preemptions_total", "Preempted requests."),
            count(totals.preemptions),
        ),
    ]
}

/// Returns the metrics of tokens and finished requests.
fn token_families(sample: &RankSample) -> Vec<(MetricFamily, MetricValues)> {
    let totals = sample.totals;
    let count = |value: u64| vec![("", value as f64)];
    let computed = totals
        .prompt_tokens
        .saturating_sub(totals.prefix_hits + totals.fetched);
    let by_source = |source, value: u64| (source, value as f64);
    vec![
        (
            counter("prompt_tokens_total", "Prompt tokens processed."),
            count(totals.prompt_tokens),
        ),
        (
            counter("prompt_tokens_by_source_total", "Prompt tokens by source."),
            vec![
                by_source(",source=\"local_compute\"", computed),
                by_source(",source=\"local_cache_hit\"", totals.prefix_hits),
                by_source(",source=\"external_kv_transfer\"", totals.fetched),
            ],
        ),
        (
            counter("prompt_tokens_cached_total", "Prompt tokens not computed."),
            count(totals.prefix_hits),
        ),
        (
            counter("generation_tokens_total", "Generated tokens."),
            count(totals.generation_tokens),
        ),
        (
            counter("request_success_total", "Finished requests."),
            vec![
                by_source(",finished_reason=\"length\"", totals.finished),
                by_source(",finished_reason=\"abort\"", totals.aborted),
            ],
        ),
    ]
}

fn histograms(latencies: &LatencyHistograms) -> [(MetricFamily, &LatencyHistogram); 4] {
    let family = |name, help| MetricFamily {
        name,
        kind: "histogram",
        help,
    };
    [
        (
            family("time_to_first_token_seconds", "Time to first token."),
            &latencies.first_token,
        ),
        (
            family("inter_token_latency_seconds", "Time between tokens."),
            &latencies.inter_token,
        ),
        (
            family("e2e_request_latency_seconds", "Time of a whole request."),
            &latencies.request,
        ),
        (
            family("request_queue_time_seconds", "Time in the queue."),
            &latencies.queue,
        ),
    ]
}

/// Renders the simulator's own metrics, which no real engine has.
pub(crate) fn render_sim_metrics(
    model: &str,
    samples: &[RankSample],
    counters: &TransferCounters,
    rooms_waiting: usize,
) -> String {
    let mut page = String::new();
    let transfers = transfer_metrics(samples, counters);
    let rooms = room_metrics(counters, rooms_waiting);
    for (family, value) in transfers.into_iter().chain(rooms) {
        let MetricFamily { name, kind, help } = family;
        // Writing to a String cannot fail.
        writeln!(
            page,
            "# HELP engine_sim:{name} {help}\n# TYPE engine_sim:{name} {kind}"
        )
        .ok();
        writeln!(
            page,
            "engine_sim:{name}{{model_name=\"{model}\"}} {:?}",
            value as f64
        )
        .ok();
    }
    page
}

/// Returns the metrics of leases and fetched blocks.
fn transfer_metrics(
    samples: &[RankSample],
    counters: &TransferCounters,
) -> [(MetricFamily, u64); 5] {
    let leases = samples.iter().map(|sample| sample.leases as u64).sum();
    let expired = samples.iter().map(|sample| sample.leases_expired).sum();
    [
        (gauge("kv_leases", "Prompts with leased blocks."), leases),
        (
            counter(
                "kv_leases_expired_total",
                "Prompts whose blocks were not fetched before the lease expired.",
            ),
            expired,
        ),
        (
            counter("kv_transfers_total", "Prompts fetched from another engine."),
            read(&counters.kv_transfers),
        ),
        (
            counter("kv_mismatches_total", "Fetched blocks of another prompt."),
            read(&counters.kv_mismatches),
        ),
        (
            counter(
                "kv_stale_reads_total",
                "Prompts read from blocks after their lease had ended.",
            ),
            read(&counters.kv_stale_reads),
        ),
    ]
}

/// Returns the metrics of bootstrap rooms, aborts and prefills.
fn room_metrics(counters: &TransferCounters, rooms_waiting: usize) -> [(MetricFamily, u64); 6] {
    [
        (
            gauge(
                "rooms_waiting",
                "Bootstrap rooms of this prefill engine in which one side waits.",
            ),
            rooms_waiting as u64,
        ),
        (
            counter("rooms_met_total", "Bootstrap rooms that both sides joined."),
            read(&counters.rooms_met),
        ),
        (
            counter(
                "rooms_unmet_total",
                "Bootstrap rooms that only one side joined.",
            ),
            read(&counters.rooms_unmet),
        ),
        (
            counter(
                "rooms_mismatched_total",
                "Bootstrap rooms with another prompt, another rank or a duplicate request.",
            ),
            read(&counters.rooms_mismatched),
        ),
        (
            counter("aborted_total", "Requests aborted by id."),
            read(&counters.aborted),
        ),
        (
            counter(
                "prefills_asked_total",
                "Accepted requests that only prefill, with any result.",
            ),
            read(&counters.prefills),
        ),
    ]
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// Renders the page.
pub(crate) fn render(model: &str, samples: &[RankSample]) -> String {
    let mut page = String::new();
    let Some(first) = samples.first() else {
        return page;
    };
    for (at, (family, _)) in metric_families(first).iter().enumerate() {
        header(&mut page, *family);
        for sample in samples {
            for (labels, value) in &metric_families(sample)[at].1 {
                line(
                    &mut page,
                    family.name,
                    &format!("engine=\"{}\",model_name=\"{model}\"{labels}", sample.rank),
                    *value,
                );
            }
        }
    }
    for (at, (family, _)) in histograms(&first.latencies).iter().enumerate() {
        header(&mut page, *family);
        for sample in samples {
            histogram(
                &mut page,
                family.name,
                sample.rank,
                model,
                histograms(&sample.latencies)[at].1,
            );
        }
    }
    header(
        &mut page,
        gauge("cache_config_info", "Cache configuration."),
    );
    // As in vLLM, each line has the blocks of all ranks and the tokens of its own rank.
    let all_blocks: usize = samples.iter().map(|sample| sample.num_blocks).sum();
    for sample in samples {
        let RankSample {
            rank,
            block_size,
            num_blocks,
            ..
        } = sample;
        let caching = if sample.prefix_caching {
            "True"
        } else {
            "False"
        };
        let labels = format!(
            "block_size=\"{block_size}\",enable_prefix_caching=\"{caching}\",engine=\"{rank}\",\
             kv_cache_size_tokens=\"{}\",num_gpu_blocks=\"{all_blocks}\",prefix_caching_hash_algo=\"xxh3\"",
            block_size * num_blocks
        );
        line(&mut page, "cache_config_info", &labels, 1.0);
    }
    page
}

// Writing to a String cannot fail.
fn header(page: &mut String, family: MetricFamily) {
    let MetricFamily { name, kind, help } = family;
    writeln!(page, "# HELP vllm:{name} {help}\n# TYPE vllm:{name} {kind}").ok();
}

fn line(page: &mut String, name: &str, labels: &str, value: f64) {
    writeln!(page, "vllm:{name}{{{labels}}} {value:?}").ok();
}

fn histogram(page: &mut String, name: &str, rank: u32, model: &str, histogram: &LatencyHistogram) {
    let bucket = format!("{name}_bucket");
    let mut below = 0;
    let bounds = histogram.bounds.iter().map(|bound| format!("{bound:?}"));
    for (bound, count) in bounds.zip(&histogram.counts) {
        below += count;
        let labels = format!("engine=\"{rank}\",le=\"{bound}\",model_name=\"{model}\"");
        line(page, &bucket, &labels, below as f64);
    }
    let labels = format!("engine=\"{rank}\",le=\"+Inf\",model_name=\"{model}\"");
    line(page, &bucket, &labels, histogram.count as f64);
    let labels = format!("engine=\"{rank}\",model_name=\"{model}\"");
    line(
        page,
        &format!("{name}_count"),
        &labels,
        histogram.count as f64,
    );
    line(page, &format!("{name}_sum"), &labels, histogram.sum);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(rank: u32) -> RankSample {
        let mut latencies = LatencyHistograms::default();
        for seconds in [0.001, 0.015, 9000.0] {
            latencies.first_token.observe(seconds);
        }
        let totals = SchedulerTotals {
            prefix_queries: 40,
            prefix_hits: 16,
            prompt_tokens: 40,
            ..SchedulerTotals::default()
        };
        RankSample {
            rank,
            running: 2,
            waiting: 3,
            deferred: 2,
            used_blocks: 8,
            num_blocks: 32,
            block_size: 16,
            prefix_caching: true,
            totals,
            latencies,
            leases: 1,
            leases_expired: 2,
        }
    }

    #[test]
    fn simulator_metrics_have_their_own_prefix() {
        let counters = TransferCounters::default();
        super::super::disaggregation::increment(&counters.rooms_met);
        let page = render_sim_metrics("m", &[sample(0), sample(1)], &counters, 3);
        for expected in [
            "# TYPE engine_sim:kv_leases gauge",
            "engine_sim:kv_leases{model_name=\"m\"} 2.0",
            "engine_sim:kv_leases_expired_total{model_name=\"m\"} 4.0",
            "engine_sim:rooms_waiting{model_name=\"m\"} 3.0",
            "engine_sim:rooms_met_total{model_name=\"m\"} 1.0",
            "engine_sim:aborted_total{model_name=\"m\"} 0.0",
        ] {
            assert!(
                page.lines().any(|line| line == expected),
                "{expected}\n{page}"
            );
        }
    }

    #[test]
    fn page_matches_vllm_format() {
        let page = render("m", &[sample(0), sample(1)]);
        for expected in [
            "# TYPE vllm:num_requests_running gauge",
            "vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 2.0",
            "vllm:num_requests_waiting{engine=\"1\",model_name=\"m\"} 3.0",
            "vllm:num_requests_waiting_by_reason{engine=\"1\",model_name=\"m\",reason=\"capacity\"} 1.0",
            "vllm:num_requests_waiting_by_reason{engine=\"1\",model_name=\"m\",reason=\"deferred\"} 2.0",
            "vllm:kv_cache_usage_perc{engine=\"1\",model_name=\"m\"} 0.25",
            "vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"m\"} 16.0",
            "vllm:prompt_tokens_by_source_total{engine=\"0\",model_name=\"m\",source=\"local_compute\"} 24.0",
            "vllm:time_to_first_token_seconds_bucket{engine=\"0\",le=\"0.001\",model_name=\"m\"} 1.0",
            "vllm:time_to_first_token_seconds_bucket{engine=\"0\",le=\"0.01\",model_name=\"m\"} 1.0",
            "vllm:time_to_first_token_seconds_bucket{engine=\"0\",le=\"2560.0\",model_name=\"m\"} 2.0",
            "vllm:time_to_first_token_seconds_bucket{engine=\"0\",le=\"+Inf\",model_name=\"m\"} 3.0",
            "vllm:time_to_first_token_seconds_count{engine=\"1\",model_name=\"m\"} 3.0",
        ] {
            assert!(
                page.lines().any(|line| line == expected),
                "{expected}\n{page}"
            );
        }
        // vLLM reports the sum of the blocks over all ranks, and the tokens of one rank.
        assert!(page.contains("block_size=\"16\"") && page.contains("num_gpu_blocks=\"64\""));
        assert!(page.contains("kv_cache_size_tokens=\"512\""));
        let families: Vec<_> = page
            .lines()
            .filter(|line| line.starts_with("# TYPE"))
            .collect();
        let unique: std::collections::BTreeSet<_> = families.iter().collect();
        assert_eq!(families.len(), unique.len(), "a family is announced once");
    }
}
