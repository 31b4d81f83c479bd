//! Label values from outside the program.

use std::fmt::{self, Write as _};

use prometheus_client::encoding::{EncodeLabelValue, LabelValueEncoder};

/// Label value that may contain any character, such as the name of a model. The client library
/// writes other values as they are, and one line break would make the whole page unreadable.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct LabelText(String);

impl LabelText {
    /// Returns the text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for LabelText {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<&str> for LabelText {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl EncodeLabelValue for LabelText {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> fmt::Result {
        let mut rest = self.0.as_str();
        while let Some(at) = rest.find(['\\', '"', '\n']) {
            let (plain, special) = rest.split_at(at);
            encoder.write_str(plain)?;
            encoder.write_str(match special.as_bytes().first() {
                Some(b'\n') => "\\n",
                Some(b'"') => "\\\"",
                _ => "\\\\",
            })?;
            rest = &special[1..];
        }
        encoder.write_str(rest)
    }
}

#[cfg(test)]
mod tests {
    use crate::{Metrics, ModelLabel, TextFormat};

    #[test]
    fn label_values_are_escaped() {
        for (text, escaped) in [
            ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
            ("", ""),
            ("a\"b\"", "a\\\"b\\\""),
            ("\\", "\\\\"),
            ("a\n# EOF\nb\r\n", "a\\n# EOF\\nb\r\\n"),
            ("模型\"", "模型\\\""),
        ] {
            let metrics = Metrics::new();
            let label = ModelLabel { model: text.into() };
            drop(metrics.parity.mismatches.get_or_create(&label));
            let line = format!("\nwarmroute_parity_mismatches_total{{model=\"{escaped}\"}} 0\n");
            for format in [TextFormat::Prometheus, TextFormat::OpenMetrics] {
                let page = metrics.render(format, |_| {}).unwrap();
                assert!(page.contains(&line), "{text:?} in {page}");
            }
        }
    }
}
