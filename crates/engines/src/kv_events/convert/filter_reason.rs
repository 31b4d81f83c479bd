//! Reasons why an event is not applied to the main prefix index.

use strum::IntoStaticStr;

/// Reason why an event is not applied to the main prefix index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr)]
#[strum(serialize_all = "snake_case", prefix = "filtered_")]
pub enum FilterReason {
    /// Blocks of a cache that does not serve prefix hits.
    UnsupportedOwnership,
    /// Blocks of an unknown owner.
    UnknownOwnership,
    /// A placeholder event.
    #[strum(serialize = "ignored_event")]
    Ignored,
    /// An event of an unknown type.
    UnknownEvent,
    /// A store with a field that is missing or has an unknown type.
    UnreadableStore,
    /// A removal with a field that is missing or has an unknown type.
    UnreadableRemoval,
    /// Blocks of a LoRA adapter that the event identifies only by a number.
    UnnamedAdapter,
    /// Storage of another worker.
    NonLocalLocality,
    /// Unknown storage medium.
    UnknownMedium,
    /// An attention kind that holds only part of a prefix.
    #[strum(serialize = "non_main_attention_kind")]
    NonMainKind,
    /// Unknown attention kind.
    UnknownKind,
    /// A cache group that is known to hold only part of a prefix.
    #[strum(serialize = "non_main_attention_group")]
    NonMainGroup,
    /// A cache group of unknown kind.
    #[strum(serialize = "unlearned_group_idx")]
    UnknownGroup,
    /// A second cache group that holds whole prefixes. The first one identifies the blocks.
    #[strum(serialize = "further_main_attention_group")]
    SecondaryMainGroup,
    /// A cache group other than the main one, whose block size is not a multiple of the index block
    /// size.
    #[strum(serialize = "group_block_size_mismatch")]
    GroupBlockSize {
        /// Tokens per block in the event.
        engine: u32,
    },
    /// The salt would be inherited from a block that was stored with two salts.
    #[strum(serialize = "ambiguous_cache_namespace")]
    AmbiguousSalt,
    /// Neither of the block sizes of the engine and the index divides the other.
    #[strum(serialize = "block_size_mismatch")]
    BlockSize {
        /// Tokens per block in the event.
        engine: u32,
    },
}

impl FilterReason {
    /// Returns the metric label without its prefix.
    pub fn as_str(self) -> &'static str {
        self.label().trim_start_matches("filtered_")
    }

    /// Returns the outcome label in metrics.
    pub fn label(self) -> &'static str {
        self.into()
    }
}
