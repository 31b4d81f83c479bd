//! Storage tiers of cached blocks, ordered from fast to slow.

use serde::{Deserialize, Serialize};

/// Storage tier of a block.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum StorageTier {
    /// Accelerator memory.
    #[default]
    Device,
    /// Pinned host memory.
    HostPinned,
    /// Local disk.
    Disk,
    /// Storage shared over the network.
    External,
}

impl StorageTier {
    /// All tiers, fast to slow.
    pub const ALL: [StorageTier; 4] = [
        StorageTier::Device,
        StorageTier::HostPinned,
        StorageTier::Disk,
        StorageTier::External,
    ];

    /// Returns the name used in metrics and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            StorageTier::Device => "device",
            StorageTier::HostPinned => "host_pinned",
            StorageTier::Disk => "disk",
            StorageTier::External => "external",
        }
    }
}
