//! Where a cached block lies. The order is the order of the walk from fast to slow.

use serde::{Deserialize, Serialize};

/// Storage tier of a block.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
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

impl Tier {
    /// All tiers, fast to slow.
    pub const ALL: [Tier; 4] = [Tier::Device, Tier::HostPinned, Tier::Disk, Tier::External];

    /// The name used in metrics and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Tier::Device => "device",
            Tier::HostPinned => "host_pinned",
            Tier::Disk => "disk",
            Tier::External => "external",
        }
    }
}
