//! The two text formats of the metrics page, and their negotiation.

/// Text format of the metrics page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextFormat {
    /// Prometheus text format 0.0.4.
    Prometheus,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

impl TextFormat {
    /// Returns OpenMetrics if the `Accept` headers prefer it to `text/plain`, and the Prometheus
    /// text format otherwise.
    pub fn negotiate<'a>(accept: impl IntoIterator<Item = &'a str>) -> Self {
        let mut open_metrics = 0.0_f32;
        let mut plain = 0.0_f32;
        for range in accept.into_iter().flat_map(|header| header.split(',')) {
            let mut parts = range.split(';').map(str::trim);
            let media_type = parts.next().unwrap_or_default().to_ascii_lowercase();
            let quality = parts
                .find_map(|parameter| parameter.strip_prefix("q="))
                .map_or(Ok(1.0), str::parse);
            let quality: f32 = quality.unwrap_or(0.0);
            match media_type.as_str() {
                "application/openmetrics-text" => open_metrics = open_metrics.max(quality),
                "text/plain" => plain = plain.max(quality),
                _ => {}
            }
        }
        if open_metrics > 0.0 && open_metrics >= plain {
            Self::OpenMetrics
        } else {
            Self::Prometheus
        }
    }

    /// Returns the value of the `Content-Type` header.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// Converts a page in OpenMetrics to this format.
    pub(super) fn convert(self, open_metrics: String) -> String {
        match self {
            Self::Prometheus => prometheus_text(&open_metrics),
            Self::OpenMetrics => open_metrics,
        }
    }
}

/// Converts a page from OpenMetrics to Prometheus text 0.0.4. The names of counter families get the
/// suffix of their samples. Units and the end mark are removed.
fn prometheus_text(open_metrics: &str) -> String {
    let mut page = String::with_capacity(open_metrics.len());
    let mut help = None;
    for line in open_metrics.lines() {
        let Some(comment) = line.strip_prefix("# ") else {
            page.push_str(line);
            page.push('\n');
            continue;
        };
        if let Some(text) = comment.strip_prefix("HELP ") {
            help = text.split_once(' ');
        } else if let Some((name, kind)) = comment
            .strip_prefix("TYPE ")
            .and_then(|text| text.split_once(' '))
        {
            let suffix = if kind == "counter" { "_total" } else { "" };
            if let Some((_, text)) = help.take() {
                page.push_str(&format!("# HELP {name}{suffix} {text}\n"));
            }
            page.push_str(&format!("# TYPE {name}{suffix} {kind}\n"));
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_metrics_is_served_only_on_request() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,\
                          application/openmetrics-text;version=0.0.1;q=0.4,\
                          text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        let cases: [(&[&str], TextFormat); 9] = [
            (&[], TextFormat::Prometheus),
            (&["*/*"], TextFormat::Prometheus),
            (&["text/plain;version=0.0.4"], TextFormat::Prometheus),
            (&["application/openmetrics-text"], TextFormat::OpenMetrics),
            (
                &["Application/OpenMetrics-Text; version=1.0.0; q=0.9"],
                TextFormat::OpenMetrics,
            ),
            (&[prometheus], TextFormat::OpenMetrics),
            (
                &["text/plain;q=0.9, application/openmetrics-text;q=0.1"],
                TextFormat::Prometheus,
            ),
            (
                &["application/openmetrics-text;q=0"],
                TextFormat::Prometheus,
            ),
            (
                &["text/plain;q=0.2", "application/openmetrics-text;q=0.5"],
                TextFormat::OpenMetrics,
            ),
        ];
        for (accept, expected) in cases {
            assert_eq!(
                TextFormat::negotiate(accept.iter().copied()),
                expected,
                "{accept:?}"
            );
        }
    }

    #[test]
    fn prometheus_text_declares_counters_under_their_sample_names() {
        let open_metrics = "# HELP a_b Meaning of it.\n# TYPE a_b counter\n\
                            a_b_total{x=\"1\"} 3\n# HELP c Other.\n\
                            # TYPE c gauge\n# UNIT c seconds\nc 1.5\n# EOF\n";
        let expected = "# HELP a_b_total Meaning of it.\n# TYPE a_b_total counter\n\
                        a_b_total{x=\"1\"} 3\n# HELP c Other.\n\
                        # TYPE c gauge\nc 1.5\n";
        assert_eq!(
            TextFormat::Prometheus.convert(open_metrics.to_owned()),
            expected
        );
        assert_eq!(
            TextFormat::OpenMetrics.convert(open_metrics.to_owned()),
            open_metrics
        );
    }
}
