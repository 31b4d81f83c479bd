//! `engines.kv_events:`: the connections to the event sources of all workers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_settings::{ByteSize, Problem};

/// Smallest allowed limit. The batches of a single engine step have up to some hundred KiB.
const SMALLEST_MESSAGE: ByteSize = ByteSize::mib(1);
/// Largest allowed limit, because a message is held in memory as a whole.
const LARGEST_MESSAGE: ByteSize = ByteSize::mib(1024);

/// The `engines.kv_events:` section.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct KvEventsLimits {
    /// Maximum size of a message. A larger message is skipped and counts as a lost batch.
    pub max_message_size: ByteSize,
}

impl Default for KvEventsLimits {
    fn default() -> Self {
        Self {
            max_message_size: ByteSize::mib(64),
        }
    }
}

impl KvEventsLimits {
    /// Checks the values.
    pub fn problems(&self) -> Vec<Problem> {
        if (SMALLEST_MESSAGE..=LARGEST_MESSAGE).contains(&self.max_message_size) {
            return Vec::new();
        }
        let text = format!(
            "`max_message_size` is {}, but must be from {SMALLEST_MESSAGE} to {LARGEST_MESSAGE}; the default is 64MiB",
            self.max_message_size
        );
        vec![Problem::of("max_message_size", text)]
    }
}
