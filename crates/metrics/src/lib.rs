//! Metrics of warmroute, one module per subsystem. Each metric is defined once, with name, type,
//! labels and help text. There is no global registry: the server creates one [`Metrics`] and passes
//! it to its components. The exposition adds the prefix `warmroute_` to every name, and the suffix
//! `_total` to counters. On Linux, the page also has the metrics `process_*` of the operating system.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod families;
mod format;
mod known_series;
mod label_text;
mod labels;
mod optional_gauge;
#[cfg(target_os = "linux")]
mod process_collector;
// The reference includes the metrics of the operating system.
#[cfg(all(test, target_os = "linux"))]
mod reference;

use std::hash::Hash;
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

pub use families::*;
pub use format::TextFormat;
pub use known_series::KnownLabels;
pub use label_text::LabelText;
pub use labels::*;
pub use optional_gauge::OptionalGauge;

/// Family of histograms. The constructor is a function pointer, so that the type can be written.
pub type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

/// Gauge with a fractional value.
pub type FloatGauge = Gauge<f64, AtomicU64>;

/// Defines the metrics struct of one subsystem. Each metric has a field. The doc comment of the
/// field is also the help text in the exposition.
macro_rules! metrics {
    (
        $(#[doc = $summary:literal])+
        $subsystem:ident {
            $( $(#[doc = $help:literal])+ $name:literal $field:ident: $type:ty $(= $initial:expr)?; )+
        }
    ) => {
        $(#[doc = $summary])+
        pub struct $subsystem {
            $( $(#[doc = $help])+ pub $field: $type, )+
        }

        impl $subsystem {
            /// Rows of the reference.
            #[cfg(all(test, target_os = "linux"))]
            pub(crate) const REFERENCE: $crate::reference::SubsystemRows =
                $crate::reference::SubsystemRows {
                    summary: concat!($($summary),+),
                    rows: &[$($crate::reference::MetricRow {
                        name: $name,
                        type_text: stringify!($type),
                        help: concat!($($help),+),
                    }),+],
                };

            /// Creates the metrics at zero and registers them.
            pub(crate) fn register(registry: &mut Registry) -> Self {
                $( let $field: $type = initial_value!($($initial)?); )+
                $( registry.register($name, concat!($($help),+).trim(), $field.clone()); )+
                Self { $($field),+ }
            }
        }
    };
}
use metrics;

/// Returns the initial value of a metric, which is the default of its type if none is given.
macro_rules! initial_value {
    () => {
        Default::default()
    };
    ($initial:expr) => {
        $initial
    };
}
use initial_value;

/// Defines [`Metrics`] from its subsystems, in the order of the reference.
macro_rules! subsystems {
    ( $( $(#[doc = $summary:literal])+ $field:ident: $subsystem:ident; )+ ) => {
        /// Metrics of one process.
        pub struct Metrics {
            registry: Mutex<Registry>,
            $( $(#[doc = $summary])+ pub $field: $subsystem, )+
        }

        impl Metrics {
            fn register(mut root: Registry) -> Self {
                let registry = root.sub_registry_with_prefix("warmroute");
                Self {
                    $( $field: $subsystem::register(registry), )+
                    registry: Mutex::new(root),
                }
            }
        }

        /// Rows of the reference, by subsystem.
        #[cfg(all(test, target_os = "linux"))]
        pub(crate) const SUBSYSTEMS: &[reference::SubsystemRows] = &[$($subsystem::REFERENCE),+];
    };
}

subsystems! {
    /// Metrics of routed requests.
    requests: RequestMetrics;
    /// Learned latency.
    latency: LatencyMetrics;
    /// Metrics of the comparison between predicted and reported cache hits.
    audit: AuditMetrics;
    /// Metrics of the fleet, its discovery and the load of its workers.
    workers: WorkerMetrics;
    /// Metrics of the shared cache and the remote index.
    index: IndexMetrics;
    /// Metrics of KV events and their sources.
    kv_events: KvEventMetrics;
    /// Metrics of the comparison between the tokens of warmroute and those of the engines.
    parity: ParityMetrics;
    /// Metrics of tokenization.
    tokens: TokenMetrics;
    /// Metrics of the queue of requests that wait for capacity.
    queue: QueueMetrics;
    /// Metrics of sessions.
    sessions: SessionMetrics;
    /// Metrics of remote prefills.
    prefill: PrefillMetrics;
    /// Metrics of the synchronization between replicas.
    replicas: ReplicaMetrics;
    /// Metrics of the exchanges with Envoy.
    ext_proc: ExtProcMetrics;
    /// Metrics of the listeners.
    listeners: ListenerMetrics;
    /// Metrics of the endpoints published to Envoy.
    endpoints: EndpointMetrics;
    /// Metrics of the router API.
    api: ApiMetrics;
    /// Metrics of the configuration file.
    config: ConfigMetrics;
    /// Metrics of the process as a whole.
    process: ProcessMetrics;
}

impl Metrics {
    /// Creates all metrics at zero.
    pub fn new() -> Self {
        #[allow(unused_mut, reason = "only Linux has metrics of the operating system")]
        let mut registry = Registry::default();
        #[cfg(target_os = "linux")]
        process_collector::ProcessCollector::register(&mut registry);
        Self::register(registry)
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Renders the metrics page. `refresh` updates the gauges that are computed at each scrape.
    /// Pages are rendered one at a time, so `refresh` may clear and rebuild families.
    pub fn render(
        &self,
        format: TextFormat,
        refresh: impl FnOnce(&Self),
    ) -> Result<String, std::fmt::Error> {
        let registry = self.lock();
        refresh(self);
        let mut page = String::new();
        text::encode(&mut page, &registry)?;
        Ok(format.convert(page))
    }

    /// Removes the series of a worker rank that left the fleet, except for series that each scrape
    /// rebuilds.
    pub fn remove_rank(&self, rank: &RankLabels) {
        self.requests.worker_requests.remove(rank);
    }

    /// Sets the version and the commit of the program.
    pub fn set_build_info(&self, version: &str, commit: &str) {
        let labels = BuildLabels {
            version: version.into(),
            commit: commit.into(),
        };
        self.process.build_info.get_or_create(&labels).set(1);
    }

    /// Records the duration of one stage of a decision.
    pub fn observe_stage(&self, stage: &'static str, duration: std::time::Duration) {
        self.requests
            .decision_stage_duration_seconds
            .get_or_create(&StageLabel { stage })
            .observe(duration.as_secs_f64());
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Registry> {
        // Metrics are registered before the lock exists, so a panic cannot leave the registry
        // incomplete.
        self.registry
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn histograms<L: Clone + Hash + Eq>(make: fn() -> Histogram) -> Histograms<L> {
    Family::new_with_constructor(make)
}

/// Creates a series at zero for each of these label sets.
pub fn start_at_zero<L, M, C>(family: &Family<L, M, C>, labels: impl IntoIterator<Item = L>)
where
    L: Clone + Hash + Eq,
    M: Clone,
    C: MetricConstructor<M>,
{
    for labels in labels {
        drop(family.get_or_create(&labels));
    }
}

/// Creates a family of counters with one series at zero for each outcome.
fn outcomes(values: &[&'static str]) -> Family<OutcomeLabel, Counter> {
    let family = Family::default();
    start_at_zero(
        &family,
        values.iter().map(|&outcome| OutcomeLabel { outcome }),
    );
    family
}

/// Creates a family of counters with one series at zero for each reason.
fn reasons(values: &[&'static str]) -> Family<ReasonLabel, Counter> {
    let family = Family::default();
    start_at_zero(&family, values.iter().map(|&reason| ReasonLabel { reason }));
    family
}

/// Counts one event with this outcome.
pub fn count_outcome(counters: &Family<OutcomeLabel, Counter>, outcome: &'static str) {
    counters.get_or_create(&OutcomeLabel { outcome }).inc();
}

fn outcome_histograms(values: &[&'static str]) -> Histograms<OutcomeLabel> {
    let family = histograms(seconds);
    start_at_zero(
        &family,
        values.iter().map(|&outcome| OutcomeLabel { outcome }),
    );
    family
}

fn stages(values: &[&'static str]) -> Histograms<StageLabel> {
    let family = histograms(stage_seconds);
    start_at_zero(&family, values.iter().map(|&stage| StageLabel { stage }));
    family
}

fn error_blocks() -> Histogram {
    Histogram::new([1.0, 2.0, 4.0, 16.0, 64.0, 256.0])
}

fn token_seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 1.6, 18))
}

/// Creates a histogram with buckets from half a microsecond to one second.
fn stage_seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.000_000_5, 2.0, 22))
}

fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 1.8, 22))
}
