//! Encoding and decoding of the messages. Received messages are validated completely before use.

use std::num::NonZeroU32;

use thiserror::Error;
use warmroute_core::block::{BlockHashes, LocalHash};
use warmroute_core::freshness::{IndexFreshness, SourceStatus, StaleReason};
use warmroute_core::index::TierBlocks;
use warmroute_core::router::{RemoteRank, RemoteRanks};
use warmroute_core::worker::{BlockSize, WorkerRank};

use crate::proto::index as pb;

/// Maximum number of prompts in a query. It limits the size of a response, which lists all worker
/// ranks with blocks of each prompt.
pub(super) const MAX_PROMPTS: usize = 64;

/// Maximum number of bytes of a query besides its hashes.
const QUERY_OVERHEAD: usize = 64 << 10;

/// Maximum size of a query in bytes.
pub(super) fn max_query_bytes(max_blocks: usize) -> usize {
    max_blocks
        .saturating_mul(size_of::<u64>())
        .saturating_add(QUERY_OVERHEAD)
}

/// Reason why a message is invalid.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum IndexMessageError {
    #[error("the query has {0} prompts, more than the maximum of {MAX_PROMPTS}")]
    TooManyPrompts(usize),
    #[error("the prompts have {blocks} blocks; the maximum is {max}")]
    TooManyBlocks { blocks: usize, max: usize },
    #[error("{blocks} blocks of {size} tokens do not fit into a prompt of {tokens}")]
    TooFewTokens {
        blocks: usize,
        size: usize,
        tokens: u64,
    },
    #[error("the block size is 0")]
    BlockSize,
    #[error("the response has {0} prompts, not those of the query")]
    WrongPromptCount(usize),
    #[error("the columns of a response differ in length")]
    Columns,
    #[error("a worker rank holds more blocks than the prompt has")]
    TooManyHeldBlocks,
    #[error("unknown version of the ranks: {0}")]
    UnknownVersion(u64),
    #[error("unknown enum value {0}")]
    UnknownNumber(i32),
}

/// Decodes the prompts of a query.
pub(super) fn decode_prompts(
    prompts: Vec<pb::Prompt>,
    size: BlockSize,
    max: usize,
) -> Result<Vec<BlockHashes>, IndexMessageError> {
    if prompts.len() > MAX_PROMPTS {
        return Err(IndexMessageError::TooManyPrompts(prompts.len()));
    }
    let blocks = prompts.iter().map(|prompt| prompt.local_hashes.len()).sum();
    if blocks > max {
        return Err(IndexMessageError::TooManyBlocks { blocks, max });
    }
    let decode = |prompt: pb::Prompt| {
        let blocks = prompt.local_hashes.len();
        let size_tokens = size.tokens();
        let tokens = usize::try_from(prompt.tokens).unwrap_or(usize::MAX);
        if tokens / size_tokens < blocks {
            return Err(IndexMessageError::TooFewTokens {
                blocks,
                size: size_tokens,
                tokens: prompt.tokens,
            });
        }
        let locals = prompt.local_hashes.into_iter().map(LocalHash).collect();
        Ok(BlockHashes::from_locals(tokens, size, locals))
    };
    prompts.into_iter().map(decode).collect()
}

/// Encodes the prompts of a query.
pub(super) fn encode_prompts(prompts: &[BlockHashes]) -> Vec<pb::Prompt> {
    let prompt = |hashes: &BlockHashes| pb::Prompt {
        tokens: hashes.tokens() as u64,
        local_hashes: hashes.locals().iter().map(|hash| hash.0).collect(),
    };
    prompts.iter().map(prompt).collect()
}

/// Encodes the worker ranks that hold blocks of a prompt.
pub(super) fn encode_overlaps(found: &[(WorkerRank, TierBlocks)]) -> pb::PromptOverlaps {
    let column = |field: fn(&(WorkerRank, TierBlocks)) -> u32| {
        let column: Vec<u32> = found.iter().map(field).collect();
        if column.iter().any(|entry| *entry != 0) {
            column
        } else {
            Vec::new()
        }
    };
    pb::PromptOverlaps {
        worker_ids: found.iter().map(|(rank, _)| rank.worker.0).collect(),
        dp_ranks: column(|(rank, _)| rank.rank.0),
        device: column(|(_, blocks)| blocks.device),
        host: column(|(_, blocks)| blocks.host),
        disk: column(|(_, blocks)| blocks.disk),
        external: column(|(_, blocks)| blocks.external),
    }
}

/// Decodes the worker ranks that hold blocks of the queried prompts.
pub(super) fn decode_overlaps(
    overlaps: &[pb::PromptOverlaps],
    queried: &[BlockHashes],
) -> Result<Vec<Vec<(WorkerRank, TierBlocks)>>, IndexMessageError> {
    if overlaps.len() != queried.len() {
        return Err(IndexMessageError::WrongPromptCount(overlaps.len()));
    }
    overlaps
        .iter()
        .zip(queried)
        .map(|(overlaps, hashes)| decode_prompt_overlaps(overlaps, hashes.len()))
        .collect()
}

fn decode_prompt_overlaps(
    overlaps: &pb::PromptOverlaps,
    max: usize,
) -> Result<Vec<(WorkerRank, TierBlocks)>, IndexMessageError> {
    let columns = [
        &overlaps.dp_ranks,
        &overlaps.device,
        &overlaps.host,
        &overlaps.disk,
        &overlaps.external,
    ];
    if columns
        .iter()
        .any(|column| !column.is_empty() && column.len() != overlaps.worker_ids.len())
    {
        return Err(IndexMessageError::Columns);
    }
    let row = |(index, worker): (usize, &u64)| {
        let [rank, device, host, disk, external] =
            columns.map(|column| column.get(index).copied().unwrap_or(0));
        let blocks = [device, host, disk, external]
            .into_iter()
            .map(u64::from)
            .sum::<u64>();
        if blocks > max as u64 {
            return Err(IndexMessageError::TooManyHeldBlocks);
        }
        let rank = WorkerRank::new(*worker, rank);
        Ok((
            rank,
            TierBlocks {
                device,
                host,
                disk,
                external,
            },
        ))
    };
    overlaps.worker_ids.iter().enumerate().map(row).collect()
}

/// Encodes the state of the worker ranks.
pub(super) fn encode_ranks(ranks: &RemoteRanks) -> pb::Ranks {
    let message = |row: &RemoteRank| pb::Rank {
        worker_id: row.rank.worker.0,
        dp_rank: row.rank.rank.0,
        freshness: pb::Freshness::from(row.status.freshness).into(),
        reason: row
            .status
            .reason
            .map_or(pb::StaleReason::Unspecified, pb::StaleReason::from)
            .into(),
        engine_block_size: row.status.engine_block_size.map_or(0, |size| size.0.get()),
        grouped: row.has_cache_groups,
    };
    pb::Ranks {
        ranks: ranks.rows().iter().map(message).collect(),
    }
}

/// Decodes the state of the worker ranks.
pub(super) fn decode_ranks(message: &pb::Ranks) -> Result<RemoteRanks, IndexMessageError> {
    let row = |message: &pb::Rank| {
        let status = SourceStatus {
            freshness: decode_freshness(message.freshness)?,
            reason: decode_reason(message.reason)?,
            engine_block_size: NonZeroU32::new(message.engine_block_size).map(BlockSize),
            windows: None,
        };
        let rank = WorkerRank::new(message.worker_id, message.dp_rank);
        Ok(RemoteRank {
            rank,
            status,
            has_cache_groups: message.grouped,
        })
    };
    Ok(RemoteRanks::new(
        message.ranks.iter().map(row).collect::<Result<_, _>>()?,
    ))
}

impl From<IndexFreshness> for pb::Freshness {
    fn from(freshness: IndexFreshness) -> Self {
        match freshness {
            IndexFreshness::Exact => pb::Freshness::Exact,
            IndexFreshness::CatchingUp => pb::Freshness::CatchingUp,
            IndexFreshness::Incomplete => pb::Freshness::Incomplete,
            IndexFreshness::Stale => pb::Freshness::Stale,
            IndexFreshness::Absent => pb::Freshness::Absent,
        }
    }
}

fn decode_freshness(number: i32) -> Result<IndexFreshness, IndexMessageError> {
    let value =
        pb::Freshness::try_from(number).map_err(|_| IndexMessageError::UnknownNumber(number))?;
    Ok(match value {
        // The zero value is never sent.
        pb::Freshness::Unspecified => return Err(IndexMessageError::UnknownNumber(number)),
        pb::Freshness::Exact => IndexFreshness::Exact,
        pb::Freshness::CatchingUp => IndexFreshness::CatchingUp,
        pb::Freshness::Incomplete => IndexFreshness::Incomplete,
        pb::Freshness::Stale => IndexFreshness::Stale,
        pb::Freshness::Absent => IndexFreshness::Absent,
    })
}

impl From<StaleReason> for pb::StaleReason {
    fn from(reason: StaleReason) -> Self {
        match reason {
            StaleReason::NoSource => pb::StaleReason::NoSource,
            StaleReason::Connecting => pb::StaleReason::Connecting,
            StaleReason::Replaying => pb::StaleReason::Replaying,
            StaleReason::Detached => pb::StaleReason::Detached,
            StaleReason::LostBatches => pb::StaleReason::LostBatches,
            StaleReason::UnreportedBlocks => pb::StaleReason::UnreportedBlocks,
            StaleReason::Undecodable => pb::StaleReason::Undecodable,
            StaleReason::Silent => pb::StaleReason::Silent,
            StaleReason::BlockSizeMismatch => pb::StaleReason::BlockSizeMismatch,
            StaleReason::OtherRank => pb::StaleReason::OtherRank,
        }
    }
}

fn decode_reason(number: i32) -> Result<Option<StaleReason>, IndexMessageError> {
    let value =
        pb::StaleReason::try_from(number).map_err(|_| IndexMessageError::UnknownNumber(number))?;
    Ok(Some(match value {
        pb::StaleReason::Unspecified => return Ok(None),
        pb::StaleReason::NoSource => StaleReason::NoSource,
        pb::StaleReason::Connecting => StaleReason::Connecting,
        pb::StaleReason::Replaying => StaleReason::Replaying,
        pb::StaleReason::Detached => StaleReason::Detached,
        pb::StaleReason::LostBatches => StaleReason::LostBatches,
        pb::StaleReason::UnreportedBlocks => StaleReason::UnreportedBlocks,
        pb::StaleReason::Undecodable => StaleReason::Undecodable,
        pb::StaleReason::Silent => StaleReason::Silent,
        pb::StaleReason::BlockSizeMismatch => StaleReason::BlockSizeMismatch,
        pb::StaleReason::OtherRank => StaleReason::OtherRank,
    }))
}
