//! Freshness of one event source, and the reason if it is not exact.

use serde::Serialize;
use strum::{IntoStaticStr, VariantArray};

use crate::block::BlockWindows;
use crate::worker::BlockSize;

/// Extent to which the index matches the cache of a rank.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, IntoStaticStr, VariantArray,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum IndexFreshness {
    /// Attached and caught up. The index is up to date.
    Exact,
    /// The source is connecting, or is replaying missed events.
    CatchingUp,
    /// The reported blocks are correct, but the engine may hold more: some stores were not
    /// received.
    Incomplete,
    /// Reported blocks may have changed without an event.
    Stale,
    /// There is no source, or it is not usable.
    #[default]
    Absent,
}

impl IndexFreshness {
    /// All values.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Returns the name used on pages and in metrics.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns whether the index contributes to decisions. While the source is catching up, it
    /// contributes only to ranks with reported blocks, as if it were stale. Without reported
    /// blocks, a missing block means nothing yet.
    pub fn is_usable(self, has_blocks: bool) -> bool {
        match self {
            IndexFreshness::Exact | IndexFreshness::Incomplete | IndexFreshness::Stale => true,
            IndexFreshness::CatchingUp => has_blocks,
            IndexFreshness::Absent => false,
        }
    }
}

/// Reason why a source is not exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, IntoStaticStr, VariantArray)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum StaleReason {
    /// No source is configured or discovered.
    NoSource,
    /// Not connected yet.
    Connecting,
    /// The engine is replaying missed events, or has not answered the replay request yet.
    Replaying,
    /// The connection was lost.
    Detached,
    /// Batches were lost and cannot be replayed, so reported blocks may have been evicted.
    LostBatches,
    /// Stores were lost or not usable, so the engine holds blocks that were never reported.
    UnreportedBlocks,
    /// The last batch could not be decoded.
    Undecodable,
    /// The source sends no events, although requests were answered that must have stored blocks.
    Silent,
    /// Neither of the block sizes of engine and router is a multiple of the other.
    BlockSizeMismatch,
    /// The source publishes events of another data-parallel rank.
    OtherRank,
}

impl StaleReason {
    /// All values.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Returns the name used on pages and in logs.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Status of a source, as used by decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SourceStatus {
    /// Freshness of the index.
    pub freshness: IndexFreshness,
    /// Reason if the freshness is not exact.
    pub reason: Option<StaleReason>,
    /// Tokens per engine block, if events contained it. The engine reuses only whole blocks of its
    /// own.
    pub engine_block_size: Option<BlockSize>,
    /// Tokens that the hash of each block covers, if events contained it.
    #[serde(skip)]
    pub windows: Option<BlockWindows>,
}

impl SourceStatus {
    /// Attached and caught up, with the configured block size.
    pub const EXACT: SourceStatus = SourceStatus::new(IndexFreshness::Exact, None);

    /// Creates a status without a block size.
    pub const fn new(freshness: IndexFreshness, reason: Option<StaleReason>) -> Self {
        Self {
            freshness,
            reason,
            engine_block_size: None,
            windows: None,
        }
    }
}
