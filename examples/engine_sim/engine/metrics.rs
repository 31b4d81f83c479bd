//! The metrics page under vLLM's names, so that whatever scrapes a real engine can scrape this one. Written by hand: the
//! text must have vLLM's labels and number format, and no registry is shared between ranks.

use std::fmt::Write as _;

use super::handover::Counts;
use super::scheduler::Totals;

const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const BETWEEN_TOKENS: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
const WHOLE_REQUEST: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];

/// Counts of observations by upper bound.
#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    bounds: &'static [f64],
    counts: Vec<u64>,
    sum: f64,
    count: u64,
}

impl Histogram {
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

/// Durations seen by one rank.
#[derive(Clone, Debug)]
pub(crate) struct Durations {
    pub(crate) first_token: Histogram,
    pub(crate) between_tokens: Histogram,
    pub(crate) whole_request: Histogram,
    pub(crate) queue: Histogram,
}

impl Default for Durations {
    fn default() -> Self {
        Self {
            first_token: Histogram::new(FIRST_TOKEN),
            between_tokens: Histogram::new(BETWEEN_TOKENS),
            whole_request: Histogram::new(WHOLE_REQUEST),
            queue: Histogram::new(WHOLE_REQUEST),
        }
    }
}

/// One rank at the moment of a scrape.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub(crate) rank: u32,
    pub(crate) running: usize,
    pub(crate) waiting: usize,
    /// Those of them that wait for blocks of another engine.
    pub(crate) deferred: usize,
    pub(crate) used_blocks: usize,
    pub(crate) num_blocks: usize,
    pub(crate) block_size: usize,
    pub(crate) prefix_caching: bool,
    pub(crate) totals: Totals,
    pub(crate) durations: Durations,
    pub(crate) leases: usize,
    pub(crate) leases_expired: u64,
}

/// A metric: name, kind, help.
type Family = (&'static str, &'static str, &'static str);
/// A figure of one rank: its extra labels and its value.
type Figures = Vec<(&'static str, f64)>;

fn figures(sample: &Sample) -> Vec<(Family, Figures)> {
    let (totals, usage) = (
        sample.totals,
        sample.used_blocks as f64 / sample.num_blocks as f64,
    );
    let one = |value: f64| vec![("", value)];
    let count = |value: u64| vec![("", value as f64)];
    let computed = totals
        .prompt_tokens
        .saturating_sub(totals.prefix_hits + totals.fetched);
    let by_source = |source, value: u64| (source, value as f64);
    vec![
        (
            ("num_requests_running", "gauge", "Requests in the batch."),
            one(sample.running as f64),
        ),
        (
            ("num_requests_waiting", "gauge", "Requests in the queue."),
            one(sample.waiting as f64),
        ),
        (
            (
                "num_requests_waiting_by_reason",
                "gauge",
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
            (
                "kv_cache_usage_perc",
                "gauge",
                "Share of blocks held by requests.",
            ),
            one(usage),
        ),
        (
            (
                "prefix_cache_queries_total",
                "counter",
                "Prompt tokens looked up.",
            ),
            count(totals.prefix_queries),
        ),
        (
            (
                "prefix_cache_hits_total",
                "counter",
                "Prompt tokens found cached.",
            ),
            count(totals.prefix_hits),
        ),
        (
            ("num_preemptions_total", "counter", "Preempted requests."),
            count(totals.preemptions),
        ),
        (
            ("prompt_tokens_total", "counter", "Prompt tokens processed."),
            count(totals.prompt_tokens),
        ),
        (
            (
                "prompt_tokens_by_source_total",
                "counter",
                "Prompt tokens by source.",
            ),
            vec![
                by_source(",source=\"local_compute\"", computed),
                by_source(",source=\"local_cache_hit\"", totals.prefix_hits),
                by_source(",source=\"external_kv_transfer\"", totals.fetched),
            ],
        ),
        (
            (
                "prompt_tokens_cached_total",
                "counter",
                "Prompt tokens not computed.",
            ),
            count(totals.prefix_hits),
        ),
        (
            ("generation_tokens_total", "counter", "Generated tokens."),
            count(totals.generation_tokens),
        ),
        (
            ("request_success_total", "counter", "Finished requests."),
            vec![
                by_source(",finished_reason=\"length\"", totals.finished),
                by_source(",finished_reason=\"abort\"", totals.aborted),
            ],
        ),
    ]
}

fn histograms(durations: &Durations) -> [(Family, &Histogram); 4] {
    let family = |name, help| (name, "histogram", help);
    [
        (
            family("time_to_first_token_seconds", "Time to first token."),
            &durations.first_token,
        ),
        (
            family("inter_token_latency_seconds", "Time between tokens."),
            &durations.between_tokens,
        ),
        (
            family("e2e_request_latency_seconds", "Time of a whole request."),
            &durations.whole_request,
        ),
        (
            family("request_queue_time_seconds", "Time in the queue."),
            &durations.queue,
        ),
    ]
}

/// What no real engine counts, under the simulator's own name.
pub(crate) fn render_own(
    model: &str,
    samples: &[Sample],
    (counts, rooms_waiting): (&Counts, usize),
) -> String {
    let read =
        |counter: &std::sync::atomic::AtomicU64| counter.load(std::sync::atomic::Ordering::Relaxed);
    let leases = samples.iter().map(|sample| sample.leases as u64).sum();
    let expired = samples.iter().map(|sample| sample.leases_expired).sum();
    let mut page = String::new();
    for (name, kind, help, value) in [
        (
            "kv_leases",
            "gauge",
            "Prompts whose blocks wait for another engine.",
            leases,
        ),
        (
            "kv_leases_expired_total",
            "counter",
            "Prompts nobody came for in time.",
            expired,
        ),
        (
            "kv_transfers_total",
            "counter",
            "Prompts fetched from another engine.",
            read(&counts.kv_transfers),
        ),
        (
            "kv_mismatches_total",
            "counter",
            "Fetched blocks of another prompt.",
            read(&counts.kv_mismatches),
        ),
        (
            "kv_stale_reads_total",
            "counter",
            "Prompts read from blocks that nobody kept for them any more.",
            read(&counts.kv_stale_reads),
        ),
        (
            "rooms_waiting",
            "gauge",
            "Rooms of this prefill engine in which one side waits.",
            rooms_waiting as u64,
        ),
        (
            "rooms_met_total",
            "counter",
            "Rooms in which both sides met.",
            read(&counts.rooms_met),
        ),
        (
            "rooms_unmet_total",
            "counter",
            "Rooms in which one side stayed alone.",
            read(&counts.rooms_unmet),
        ),
        (
            "rooms_mismatched_total",
            "counter",
            "Rooms of another prompt, of another rank or taken twice.",
            read(&counts.rooms_mismatched),
        ),
        (
            "aborted_total",
            "counter",
            "Requests aborted by name.",
            read(&counts.aborted),
        ),
        (
            "prefills_asked_total",
            "counter",
            "Requests that only prefill, whatever becomes of them.",
            read(&counts.prefills),
        ),
    ] {
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

/// The page.
pub(crate) fn render(model: &str, samples: &[Sample]) -> String {
    let mut page = String::new();
    let Some(first) = samples.first() else {
        return page;
    };
    for (at, (family, _)) in figures(first).iter().enumerate() {
        header(&mut page, *family);
        for sample in samples {
            for (labels, value) in &figures(sample)[at].1 {
                line(
                    &mut page,
                    family.0,
                    &format!("engine=\"{}\",model_name=\"{model}\"{labels}", sample.rank),
                    *value,
                );
            }
        }
    }
    for (at, (family, _)) in histograms(&first.durations).iter().enumerate() {
        header(&mut page, *family);
        for sample in samples {
            histogram(
                &mut page,
                family.0,
                (sample.rank, model),
                histograms(&sample.durations)[at].1,
            );
        }
    }
    header(
        &mut page,
        ("cache_config_info", "gauge", "Cache configuration."),
    );
    // As in vLLM, each line has the blocks of all ranks and the tokens of its own rank.
    let all_blocks: usize = samples.iter().map(|sample| sample.num_blocks).sum();
    for sample in samples {
        let Sample {
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
fn header(page: &mut String, (name, kind, help): Family) {
    writeln!(page, "# HELP vllm:{name} {help}\n# TYPE vllm:{name} {kind}").ok();
}

fn line(page: &mut String, name: &str, labels: &str, value: f64) {
    writeln!(page, "vllm:{name}{{{labels}}} {value:?}").ok();
}

fn histogram(page: &mut String, name: &str, (rank, model): (u32, &str), histogram: &Histogram) {
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

    fn sample(rank: u32) -> Sample {
        let mut durations = Durations::default();
        for seconds in [0.001, 0.015, 9000.0] {
            durations.first_token.observe(seconds);
        }
        let totals = Totals {
            prefix_queries: 40,
            prefix_hits: 16,
            prompt_tokens: 40,
            ..Totals::default()
        };
        Sample {
            rank,
            running: 2,
            waiting: 3,
            deferred: 2,
            used_blocks: 8,
            num_blocks: 32,
            block_size: 16,
            prefix_caching: true,
            totals,
            durations,
            leases: 1,
            leases_expired: 2,
        }
    }

    #[test]
    fn what_only_a_simulator_knows_has_its_own_prefix() {
        let counts = Counts::default();
        super::super::handover::count(&counts.rooms_met);
        let page = render_own("m", &[sample(0), sample(1)], (&counts, 3));
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
    fn the_page_reads_like_vllms() {
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
