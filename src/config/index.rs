//! `index:`: limits of the prefix index.

use serde::{Deserialize, Serialize};

use crate::settings::Problem;

/// `index:`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IndexConfig {
    /// Blocks of one worker rank on the device, where its number of KV blocks is not known, and in each lower tier. Where the
    /// number is known, four times as many may be held.
    pub most_blocks_per_tier: u64,
}

impl Default for IndexConfig {
    fn default() -> Self {
        Self {
            most_blocks_per_tier: 1 << 20,
        }
    }
}

impl IndexConfig {
    /// Values that are valid YAML but make no sense.
    pub fn problems(&self) -> Vec<Problem> {
        let text = "the index would hold nothing; the default is 1048576";
        let is_zero = self.most_blocks_per_tier == 0;
        is_zero
            .then(|| Problem::of("most_blocks_per_tier", text))
            .into_iter()
            .collect()
    }
}
