//! Gauge of a feature that may not be configured.

use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::{EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;

/// Gauge that is absent from the page until it is set. If a feature is not configured, a gauge with
/// the value 0 would look like a failure.
#[derive(Clone, Debug, Default)]
pub struct OptionalGauge(Arc<Mutex<Option<i64>>>);

impl OptionalGauge {
    /// Sets the value. `None` removes the gauge.
    pub fn set(&self, value: impl Into<Option<i64>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = value.into();
    }

    /// Returns the value, or `None` if the gauge is absent.
    pub fn get(&self) -> Option<i64> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EncodeMetric for OptionalGauge {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> std::fmt::Result {
        match self.get() {
            Some(value) => encoder.encode_gauge(&value),
            None => Ok(()),
        }
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }

    fn is_empty(&self) -> bool {
        self.get().is_none()
    }
}

#[cfg(test)]
mod tests {
    use crate::{Metrics, TextFormat};

    #[test]
    fn optional_gauge_is_absent_until_set() {
        let metrics = Metrics::new();
        let page = || metrics.render(TextFormat::OpenMetrics, |_| {}).unwrap();
        let names = [
            "warmroute_workers_file_last_reload_successful",
            "warmroute_replica_connected",
        ];
        let before = page();
        for name in names {
            assert!(!before.contains(name), "{name}");
        }
        metrics.workers.file_last_reload_successful.set(0);
        metrics.replicas.connected.set(1);
        let after = page();
        for (name, value) in names.into_iter().zip(0..) {
            assert!(after.contains(&format!("\n{name} {value}\n")), "{name}");
        }
        metrics.replicas.connected.set(None);
        assert!(!page().contains(names[1]));
    }
}
