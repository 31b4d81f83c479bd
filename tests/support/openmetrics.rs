//! Minimal OpenMetrics parser that rejects invalid pages as Prometheus does.

use std::collections::{BTreeMap, BTreeSet};

/// Value of the `Accept` header for this format.
pub(crate) const ACCEPT: &str = "application/openmetrics-text; version=1.0.0";

type MetricLabels = BTreeMap<String, String>;

/// A line with a value.
#[derive(Clone, Debug)]
pub(crate) struct MetricSample {
    pub(crate) name: String,
    pub(crate) labels: MetricLabels,
    pub(crate) value: f64,
}

/// A valid metrics page.
#[derive(Clone, Debug)]
pub(crate) struct OpenMetricsPage {
    text: String,
    /// Type of each family by name.
    pub(crate) families: BTreeMap<String, String>,
    samples: Vec<MetricSample>,
}

impl OpenMetricsPage {
    /// Parses a page. Panics at the first invalid line.
    pub(crate) fn read(text: &str) -> Self {
        let lines = text
            .strip_suffix("# EOF\n")
            .unwrap_or_else(|| panic!("no `# EOF` in {text}"))
            .lines();
        let mut families = BTreeMap::<String, String>::new();
        let mut helped = BTreeSet::new();
        let mut samples = Vec::new();
        let mut family = String::new();
        for line in lines {
            let Some(comment) = line.strip_prefix("# ") else {
                let sample = sample(line);
                let suffixes = suffixes(&families[&family]);
                let own = sample
                    .name
                    .strip_prefix(&family)
                    .is_some_and(|suffix| suffixes.contains(&suffix));
                assert!(
                    own,
                    "{line:?} is not a sample of {family}, a {}",
                    families[&family]
                );
                samples.push(sample);
                continue;
            };
            let mut words = comment.splitn(3, ' ');
            let keyword = words.next().unwrap();
            let name = words.next().unwrap();
            let rest = words.next().unwrap();
            assert!(is_name(name), "{line}");
            match keyword {
                "HELP" => assert!(helped.insert(name.to_owned()) && rest.len() > 2, "{line}"),
                "TYPE" => {
                    suffixes(rest);
                    assert!(
                        families.insert(name.to_owned(), rest.to_owned()).is_none(),
                        "family {name} is repeated"
                    );
                    name.clone_into(&mut family);
                }
                _ => panic!("{line}"),
            }
        }
        assert_eq!(
            helped,
            families.keys().cloned().collect(),
            "a family has no HELP line"
        );
        let page = Self {
            text: text.to_owned(),
            families,
            samples,
        };
        page.check_uniqueness();
        page.check_histograms();
        page
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Returns all samples of a metric, whose name is given without `warmroute_`.
    pub(crate) fn samples<'p>(&'p self, name: &'p str) -> impl Iterator<Item = &'p MetricSample> {
        self.samples
            .iter()
            .filter(move |sample| sample.name.strip_prefix("warmroute_") == Some(name))
    }

    /// Returns the sum of the samples of a metric that have these labels.
    pub(crate) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let wanted = |sample: &&MetricSample| {
            labels
                .iter()
                .all(|(key, value)| sample.labels.get(*key).is_some_and(|is| is == value))
        };
        self.samples(name)
            .filter(wanted)
            .map(|sample| sample.value)
            .sum()
    }

    fn check_uniqueness(&self) {
        let mut seen = BTreeSet::new();
        for MetricSample { name, labels, .. } in &self.samples {
            assert!(seen.insert((name, labels)), "{name}{labels:?} is repeated");
        }
    }

    /// Asserts that bucket counts are cumulative and the last one equals the total.
    fn check_histograms(&self) {
        let histograms = self
            .families
            .iter()
            .filter(|(_, kind)| *kind == "histogram");
        for (family, _) in histograms {
            self.check_histogram(family);
        }
    }

    fn check_histogram(&self, family: &str) {
        let mut series: BTreeMap<MetricLabels, Vec<(f64, f64)>> = BTreeMap::new();
        for sample in self.named(&format!("{family}_bucket")) {
            let mut labels = sample.labels.clone();
            let bound = labels
                .remove("le")
                .expect("every bucket has a bound")
                .parse()
                .unwrap();
            let buckets = series.entry(labels).or_default();
            buckets.push((bound, sample.value));
        }
        let count_name = format!("{family}_count");
        let counts: BTreeMap<&MetricLabels, f64> = self
            .named(&count_name)
            .map(|sample| (&sample.labels, sample.value))
            .collect();
        for (labels, buckets) in series {
            assert!(
                buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1),
                "{family}{labels:?}: {buckets:?}"
            );
            let count = counts.get(&labels).expect("every histogram has a count");
            assert_eq!(
                buckets.last(),
                Some(&(f64::INFINITY, *count)),
                "{family}{labels:?}"
            );
        }
    }

    fn named<'p>(&'p self, name: &'p str) -> impl Iterator<Item = &'p MetricSample> {
        self.samples
            .iter()
            .filter(move |sample| sample.name == name)
    }
}

/// Returns the suffixes that sample names of a family may have.
fn suffixes(kind: &str) -> &'static [&'static str] {
    match kind {
        "counter" => &["_total", "_created"],
        "gauge" => &[""],
        "histogram" => &["_bucket", "_count", "_sum", "_created"],
        other => panic!("unexpected metric type {other}"),
    }
}

fn sample(line: &str) -> MetricSample {
    let name_len = line
        .find(['{', ' '])
        .unwrap_or_else(|| panic!("{line:?} has no value"));
    let (name, rest) = line.split_at(name_len);
    assert!(is_name(name), "{line:?}");
    let (labels, value) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest),
        None => (MetricLabels::new(), rest),
    };
    let value = value
        .strip_prefix(' ')
        .unwrap_or_else(|| panic!("{line:?}"))
        .parse();
    MetricSample {
        name: name.to_owned(),
        labels,
        value: value.unwrap_or_else(|_| panic!("{line:?}")),
    }
}

/// Parses labels up to the closing brace. Returns them and the rest of the line.
fn labels(mut rest: &str) -> (MetricLabels, &str) {
    let mut labels = MetricLabels::new();
    loop {
        if let Some(after) = rest.strip_prefix('}') {
            return (labels, after);
        }
        let (key, quoted) = rest.split_once("=\"").unwrap_or_else(|| panic!("{rest:?}"));
        assert!(is_name(key), "{key:?}");
        let end = closing_quote(quoted).unwrap_or_else(|| panic!("{quoted:?} is not closed"));
        assert!(
            labels
                .insert(key.to_owned(), quoted[..end].to_owned())
                .is_none(),
            "label {key} is repeated"
        );
        rest = &quoted[end + 1..];
        rest = rest.strip_prefix(',').unwrap_or(rest);
    }
}

fn closing_quote(text: &str) -> Option<usize> {
    let mut escaped = false;
    text.bytes().position(|byte| {
        let closes = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        closes
    })
}

fn is_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    bytes
        .next()
        .is_some_and(|first| first.is_ascii_alphabetic() || first == b'_')
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

#[test]
fn parser_rejects_invalid_pages() {
    let good =
        "# HELP a_b Meaning.\n# TYPE a_b counter\na_b_total{x=\"1,\\\"}\",y=\"2\"} 3\n# EOF\n";
    let page = OpenMetricsPage::read(good);
    assert_eq!(page.families["a_b"], "counter");
    for (from, to) in [
        ("# EOF\n", ""),
        ("_total", ""),
        ("a_b_total", "other_total"),
        ("\"2\"} 3", "\"2\"}3"),
        ("\"2\"} 3", "\"2} 3"),
        (" 3", " three"),
        ("# HELP a_b Meaning.\n", ""),
        ("y=", "x="),
    ] {
        let bad = good.replacen(from, to, 1);
        assert!(
            std::panic::catch_unwind(|| OpenMetricsPage::read(&bad)).is_err(),
            "{bad}"
        );
    }
}
