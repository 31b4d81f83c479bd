//! Parser of metrics pages in the Prometheus text format, and the cache settings of an engine. vLLM
//! publishes these settings as labels of a gauge whose value is always 1, one gauge per
//! data-parallel engine.

use std::num::NonZeroU32;

use warmroute_core::engine_settings::EngineSettings;
use warmroute_core::worker::{BlockSize, RankRange};

/// One line of a page.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricSample {
    /// Metric name.
    pub name: String,
    /// Labels, in the order of the page.
    pub labels: Vec<(String, String)>,
    /// Value.
    pub value: f64,
}

impl MetricSample {
    /// Returns the value of a label.
    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels
            .iter()
            .find(|(label, _)| label == name)
            .map(|(_, value)| value.as_str())
    }
}

/// Cache settings of one engine. `None` means that the engine does not report the value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Data-parallel engine, as its rank number.
    pub engine: String,
    /// Tokens per block.
    pub block_size: Option<u32>,
    /// Blocks on the device. vLLM reports the sum of all data-parallel ranks for each rank.
    pub num_gpu_blocks: Option<u64>,
    /// Capacity of this rank's device cache in tokens.
    pub size_tokens: Option<u64>,
    /// True if prefix caching is enabled.
    pub prefix_caching: Option<bool>,
    /// Hash algorithm of block hashes.
    pub hash_algorithm: Option<String>,
}

impl CacheConfig {
    /// Returns the data-parallel rank.
    pub fn rank(&self) -> Option<u32> {
        self.engine.parse().ok()
    }
}

/// A page of metrics.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MetricsPage {
    samples: Vec<MetricSample>,
}

impl MetricsPage {
    /// Parses a page. Malformed lines are skipped.
    pub fn parse(text: &str) -> Self {
        let lines = text
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with('#'));
        Self {
            samples: lines.filter_map(parse_sample).collect(),
        }
    }

    /// Returns the lines of one metric.
    pub fn samples(&self, name: &str) -> impl Iterator<Item = &MetricSample> {
        self.samples
            .iter()
            .filter(move |sample| sample.name == name)
    }

    /// Returns the sum over the lines of one metric; `None` if there is none.
    pub fn sum(&self, name: &str) -> Option<f64> {
        let mut lines = self.samples(name).map(|sample| sample.value).peekable();
        lines.peek()?;
        Some(lines.sum())
    }

    /// Returns the cache settings of each data-parallel engine. vLLM writes `None` for a missing
    /// value.
    pub fn caches(&self) -> Vec<CacheConfig> {
        let cache = |sample: &MetricSample| {
            let text = |name| sample.label(name).filter(|value| *value != "None");
            CacheConfig {
                engine: text("engine").unwrap_or("0").to_owned(),
                block_size: text("block_size")
                    .and_then(|value| value.parse().ok())
                    .filter(|size| *size > 0),
                num_gpu_blocks: text("num_gpu_blocks").and_then(|value| value.parse().ok()),
                size_tokens: text("kv_cache_size_tokens").and_then(|value| value.parse().ok()),
                prefix_caching: text("enable_prefix_caching").and_then(parse_bool),
                hash_algorithm: text("prefix_caching_hash_algo").map(str::to_owned),
            }
        };
        self.samples("vllm:cache_config_info").map(cache).collect()
    }

    /// Returns true if all engines enable prefix caching; `None` if none reports it.
    pub fn prefix_caching(&self) -> Option<bool> {
        self.caches()
            .iter()
            .filter_map(|cache| cache.prefix_caching)
            .reduce(|all, one| all && one)
    }
}

fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "True" | "true" => Some(true),
        "False" | "false" => Some(false),
        _ => None,
    }
}

pub(super) fn parse_sample(line: &str) -> Option<MetricSample> {
    let end = line.find(|sign: char| sign == '{' || sign.is_whitespace())?;
    let (name, rest) = line.split_at(end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => parse_labels(rest)?,
        None => (Vec::new(), rest),
    };
    // A timestamp may follow.
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(MetricSample {
        name: name.to_owned(),
        labels,
        value,
    })
}

/// Parses the labels up to the closing brace. Returns them and the rest of the line.
fn parse_labels(text: &str) -> Option<(Vec<(String, String)>, &str)> {
    let mut labels = Vec::new();
    let mut rest = text.trim_start();
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, quoted) = rest.split_once('=')?;
        let (value, after) = parse_quoted(quoted.trim_start().strip_prefix('"')?)?;
        labels.push((name.trim().to_owned(), value));
        rest = after;
    }
}

/// Parses the text up to the closing quote. Returns it and the rest of the line.
fn parse_quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut signs = text.char_indices();
    while let Some((at, sign)) = signs.next() {
        match sign {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match signs.next()?.1 {
                'n' => value.push('\n'),
                sign => value.push(sign),
            },
            sign => value.push(sign),
        }
    }
    None
}

/// Returns the settings that the caches of an engine report: block size, capacity and ranks.
pub fn cache_settings(caches: &[CacheConfig]) -> EngineSettings {
    let mut sizes = caches.iter().map(|cache| cache.block_size);
    let size = sizes
        .next()
        .flatten()
        .filter(|first| sizes.all(|size| size == Some(*first)));
    EngineSettings {
        block_size: size.and_then(BlockSize::new),
        total_kv_blocks: blocks_per_rank(caches),
        ranks: ranks(caches.iter().filter_map(CacheConfig::rank), caches.len()),
        ..EngineSettings::default()
    }
}

/// Returns the smallest number of KV blocks of a rank. If several ranks share a metrics page, each
/// line of vLLM has the sum of their blocks, but the tokens of its own rank.
fn blocks_per_rank(caches: &[CacheConfig]) -> Option<u64> {
    let count = caches.len() as u64;
    let is_sum = count > 1
        && caches
            .windows(2)
            .all(|pair| pair[0].num_gpu_blocks == pair[1].num_gpu_blocks);
    let of_rank = |cache: &CacheConfig| match cache.size_tokens.zip(cache.block_size) {
        Some((tokens, size)) if is_sum => Some(tokens / u64::from(size)),
        _ if is_sum => cache.num_gpu_blocks.map(|sum| sum / count),
        _ => cache.num_gpu_blocks,
    };
    caches
        .iter()
        .filter_map(of_rank)
        .filter(|blocks| *blocks > 0)
        .min()
}

/// Returns the ranks if they are consecutive.
fn ranks(reported: impl Iterator<Item = u32>, count: usize) -> Option<RankRange> {
    let mut all: Vec<u32> = reported.collect();
    all.sort_unstable();
    all.dedup();
    let start = *all.first()?;
    let is_whole = count <= RankRange::MAX_SIZE as usize
        && all.len() == count
        && all.iter().zip(start..).all(|(rank, at)| *rank == at);
    let size = NonZeroU32::new(u32::try_from(all.len()).ok()?)?;
    is_whole.then_some(RankRange { start, size })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn real_pages_report_cache_config_per_engine() {
        let inst_a = MetricsPage::parse(include_str!(
            "../../../../tests/data/engines/metrics-vllm.txt"
        ));
        let expected = |engine: &str, hash: &str| CacheConfig {
            engine: engine.into(),
            block_size: Some(32),
            num_gpu_blocks: Some(512),
            size_tokens: Some(if hash == "sha256" { 16384 } else { 8192 }),
            prefix_caching: Some(true),
            hash_algorithm: Some(hash.into()),
        };
        assert_eq!(inst_a.caches(), [expected("0", "sha256")]);
        assert_eq!(inst_a.prefix_caching(), Some(true));
        assert!(
            inst_a
                .sum("vllm:prefix_cache_queries_total")
                .is_some_and(|tokens| tokens > 0.0)
        );
        let dp2 = MetricsPage::parse(include_str!(
            "../../../../tests/data/engines/metrics-vllm-dp2.txt"
        ));
        assert_eq!(
            dp2.caches(),
            [expected("0", "sha256_cbor"), expected("1", "sha256_cbor")]
        );
        assert_eq!(
            dp2.caches()
                .iter()
                .map(CacheConfig::rank)
                .collect::<Vec<_>>(),
            [Some(0), Some(1)]
        );
    }

    #[test]
    fn malformed_metric_lines_are_skipped() {
        let page = "a{x=\"1\"} 2 1700000000\nb 3\n# TYPE c\nc{\nd{x=1} 1\ne{x=\"1\" 4\nf{x=\"\\\"\\\\\\n\",y=\"}\",} 5\ng\nh x\n\n";
        let page = MetricsPage::parse(page);
        let names: Vec<_> = page
            .samples
            .iter()
            .map(|sample| sample.name.as_str())
            .collect();
        assert_eq!(names, ["a", "b", "f"]);
        assert_eq!(page.samples[2].label("x"), Some("\"\\\n"));
        assert_eq!(page.samples[2].label("y"), Some("}"));
        assert_eq!((page.sum("a"), page.sum("z")), (Some(2.0), None));
        assert_eq!((page.caches(), page.prefix_caching()), (vec![], None));
    }

    #[test]
    fn none_values_are_unknown() {
        let page = MetricsPage::parse(
            "vllm:cache_config_info{block_size=\"0\",num_gpu_blocks=\"None\",enable_prefix_caching=\"False\"} 1.0",
        );
        let [cache] = &page.caches()[..] else {
            panic!("one cache")
        };
        assert_eq!(
            (
                cache.block_size,
                cache.num_gpu_blocks,
                cache.engine.as_str()
            ),
            (None, None, "0")
        );
        assert_eq!(page.prefix_caching(), Some(false));
    }
}
