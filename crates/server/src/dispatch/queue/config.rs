//! Configuration of the queue. By default there is one class, no worker is ever busy, and no
//! request is queued.

mod problems;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_core::queue::{
    BusyThreshold, ClassDefinition, FamilyBucket, QueueClass, QueueClasses, QueueLimits,
    QueuePolicy,
};
use warmroute_settings::DurationSetting;

/// Name of the single class if none are configured.
const DEFAULT_CLASS: &str = "default";

/// The `queue:` section.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct QueueConfig {
    /// Order of the requests within a class.
    pub policy: QueuePolicy,
    /// A worker is busy with more outstanding prefill tokens than this. If all workers are busy,
    /// requests are queued.
    pub prefill_busy_threshold: Option<u64>,
    /// The same threshold, as a multiple of the tokens per engine step.
    pub prefill_busy_threshold_frac: Option<f64>,
    /// Maximum time in the queue. Envoy's `max_message_timeout` must allow this plus
    /// `sessions.wait_timeout` plus 0.5 s.
    pub timeout: DurationSetting,
    /// Time in the queue after which the cached prefixes are looked up again; 0s disables it.
    pub refresh_after: DurationSetting,
    /// Value of `Retry-After` for rejected requests.
    pub retry_after: DurationSetting,
    /// Family of requests that name neither a class nor a family.
    pub default_family: Option<String>,
    /// Buckets of uncached prompt tokens, which select the class within a family.
    pub uncached_buckets: Vec<BucketConfig>,
    /// Queue classes.
    pub classes: Vec<ClassConfig>,
}

/// Entry of `uncached_buckets`: from `min_tokens` up to those of the next entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BucketConfig {
    /// Minimum number of uncached tokens.
    pub min_tokens: u64,
    /// Name of the bucket.
    pub bucket: String,
}

/// Entry of `classes`: selected by family and bucket, or by its name if it has neither.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ClassConfig {
    /// Name of the class.
    pub name: String,
    /// Family of the class.
    #[serde(default)]
    pub family: Option<String>,
    /// Bucket of the family that selects the class.
    #[serde(default)]
    pub bucket: Option<String>,
    /// Order of the requests; defaults to the queue's policy.
    #[serde(default)]
    pub policy: Option<QueuePolicy>,
    /// Tokens that the class may place per round, relative to the other classes.
    #[serde(default = "default_quantum")]
    pub quantum: u64,
    /// Maximum number of queued requests per worker; 0 queues none.
    #[serde(default)]
    pub max_requests_per_worker: Option<u64>,
    /// Maximum sum of queued prompt tokens per worker.
    #[serde(default)]
    pub max_prompt_tokens_per_worker: Option<u64>,
    /// Maximum sum of queued cached prompt tokens per worker.
    #[serde(default)]
    pub max_cached_tokens_per_worker: Option<u64>,
}

const fn default_quantum() -> u64 {
    1
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            policy: QueuePolicy::default(),
            prefill_busy_threshold: None,
            prefill_busy_threshold_frac: None,
            timeout: DurationSetting::seconds(30),
            refresh_after: DurationSetting::seconds(10),
            retry_after: DurationSetting::seconds(1),
            default_family: None,
            uncached_buckets: Vec::new(),
            classes: Vec::new(),
        }
    }
}

impl QueueConfig {
    /// Returns the classes with their selection rules. The configuration must have no
    /// [`problems`](Self::problems).
    pub fn to_classes(&self) -> QueueClasses {
        QueueClasses::new(self.definitions(), self.default_family.as_deref())
    }

    /// Returns the threshold above which a worker is busy.
    pub fn busy_threshold(&self) -> BusyThreshold {
        BusyThreshold {
            prefill_tokens: self.prefill_busy_threshold,
            prefill_fraction: self.prefill_busy_threshold_frac,
        }
    }

    /// Returns the classes with the queue's defaults applied, or a single class if none are
    /// configured.
    fn definitions(&self) -> Vec<ClassDefinition> {
        if self.classes.is_empty() {
            let class = QueueClass {
                name: DEFAULT_CLASS.into(),
                policy: self.policy,
                quantum: 1,
                limits: QueueLimits::default(),
            };
            return vec![ClassDefinition {
                class,
                bucket: None,
            }];
        }
        self.classes
            .iter()
            .map(|class| self.definition(class))
            .collect()
    }

    fn definition(&self, class: &ClassConfig) -> ClassDefinition {
        ClassDefinition {
            class: QueueClass {
                name: class.name.as_str().into(),
                policy: class.policy.unwrap_or(self.policy),
                quantum: class.quantum,
                limits: QueueLimits {
                    requests: class.max_requests_per_worker,
                    prompt_tokens: class.max_prompt_tokens_per_worker,
                    cached_tokens: class.max_cached_tokens_per_worker,
                },
            },
            bucket: self.family_bucket(class),
        }
    }

    fn family_bucket(&self, class: &ClassConfig) -> Option<FamilyBucket> {
        let family = class.family.clone()?;
        let bucket = class.bucket.as_ref()?;
        let known = self
            .uncached_buckets
            .iter()
            .find(|known| known.bucket == *bucket);
        Some(FamilyBucket {
            family,
            min_uncached_tokens: known.map_or(0, |known| known.min_tokens),
        })
    }
}

#[cfg(test)]
mod tests;
