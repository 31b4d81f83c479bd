//! Reasons why an event is not applied to the main prefix index.

/// Reason why an event is not applied to the main prefix index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FilterReason {
    /// Blocks of a cache that does not serve prefix hits.
    UnsupportedOwnership,
    /// Blocks of an unknown owner.
    UnknownOwnership,
    /// A placeholder event.
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
    NonMainKind,
    /// Unknown attention kind.
    UnknownKind,
    /// A cache group that is known to hold only part of a prefix.
    NonMainGroup,
    /// A cache group of unknown kind.
    UnknownGroup,
    /// A second cache group that holds whole prefixes. The first one identifies the blocks.
    SecondaryMainGroup,
    /// A cache group other than the main one, whose block size is not a multiple of the index block
    /// size.
    GroupBlockSize {
        /// Tokens per block in the event.
        engine: u32,
    },
    /// The salt would be inherited from a block that was stored with two salts.
    AmbiguousSalt,
    /// Neither of the block sizes of the engine and the index divides the other.
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
        match self {
            FilterReason::UnsupportedOwnership => "filtered_unsupported_ownership",
            FilterReason::UnknownOwnership => "filtered_unknown_ownership",
            FilterReason::Ignored => "filtered_ignored_event",
            FilterReason::UnknownEvent => "filtered_unknown_event",
            FilterReason::UnreadableStore => "filtered_unreadable_store",
            FilterReason::UnreadableRemoval => "filtered_unreadable_removal",
            FilterReason::UnnamedAdapter => "filtered_unnamed_adapter",
            FilterReason::NonLocalLocality => "filtered_non_local_locality",
            FilterReason::UnknownMedium => "filtered_unknown_medium",
            FilterReason::NonMainKind => "filtered_non_main_attention_kind",
            FilterReason::UnknownKind => "filtered_unknown_kind",
            FilterReason::NonMainGroup => "filtered_non_main_attention_group",
            FilterReason::UnknownGroup => "filtered_unlearned_group_idx",
            FilterReason::SecondaryMainGroup => "filtered_further_main_attention_group",
            FilterReason::GroupBlockSize { .. } => "filtered_group_block_size_mismatch",
            FilterReason::AmbiguousSalt => "filtered_ambiguous_cache_namespace",
            FilterReason::BlockSize { .. } => "filtered_block_size_mismatch",
        }
    }
}
