//! From values of the library to messages and back. What comes from outside is checked here, by name, before anything is
//! looked up or believed.

use std::num::NonZeroU32;

use thiserror::Error;

use super::pb;
use crate::block::{BlockHashes, LocalHash};
use crate::index::TierBlocks;
use crate::router::{RemoteRank, RemoteRanks};
use crate::trust::{Because, Standing, Trust};
use crate::worker::{BlockSize, DpRank, WorkerId, WorkerRank};

/// Most prompts of a question. All ranks could hold each, and all of them would be told.
pub(super) const MOST_PROMPTS: usize = 64;

/// Bytes of a question beside its hashes.
const AROUND: usize = 64 << 10;

/// The longest question in bytes.
pub(super) fn longest(most_blocks: usize) -> usize {
    most_blocks
        .saturating_mul(size_of::<u64>())
        .saturating_add(AROUND)
}

/// What makes no sense in a message.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum Nonsense {
    #[error("the question has {0} prompts; at most {MOST_PROMPTS} will do")]
    Prompts(usize),
    #[error("the prompts have {blocks} blocks; `api.most_blocks` allows {most}")]
    Blocks { blocks: usize, most: usize },
    #[error("{blocks} blocks of {size} tokens do not fit into a prompt of {tokens}")]
    Tokens {
        blocks: usize,
        size: usize,
        tokens: u64,
    },
    #[error("a block has at least one token")]
    BlockSize,
    #[error("the answer is about {0} prompts, and not about those that were asked for")]
    Answers(usize),
    #[error("the columns of an answer are not equally long")]
    Columns,
    #[error("a worker rank is said to hold more blocks than the prompt has")]
    TooMuch,
    #[error("no ranks of version {0} are known")]
    Version(u64),
    #[error("the number {0} is no word for trust or for a reason")]
    Word(i32),
}

/// The prompts of a question.
pub(super) fn prompts(
    asked: Vec<pb::Prompt>,
    size: BlockSize,
    most: usize,
) -> Result<Vec<BlockHashes>, Nonsense> {
    if asked.len() > MOST_PROMPTS {
        return Err(Nonsense::Prompts(asked.len()));
    }
    let blocks = asked.iter().map(|prompt| prompt.local_hashes.len()).sum();
    if blocks > most {
        return Err(Nonsense::Blocks { blocks, most });
    }
    let read = |prompt: pb::Prompt| {
        let (blocks, size_tokens) = (prompt.local_hashes.len(), size.tokens());
        let tokens = usize::try_from(prompt.tokens).unwrap_or(usize::MAX);
        if tokens / size_tokens < blocks {
            return Err(Nonsense::Tokens {
                blocks,
                size: size_tokens,
                tokens: prompt.tokens,
            });
        }
        let locals = prompt.local_hashes.into_iter().map(LocalHash).collect();
        Ok(BlockHashes::chain(tokens, size, locals))
    };
    asked.into_iter().map(read).collect()
}

/// Prompts as they are asked for.
pub(super) fn asked(prompts: &[BlockHashes]) -> Vec<pb::Prompt> {
    let prompt = |hashes: &BlockHashes| pb::Prompt {
        tokens: hashes.tokens() as u64,
        local_hashes: hashes.locals().iter().map(|hash| hash.0).collect(),
    };
    prompts.iter().map(prompt).collect()
}

/// Who has anything of a prompt.
pub(super) fn held(found: &[(WorkerRank, TierBlocks)]) -> pb::Held {
    let column = |of: fn(&(WorkerRank, TierBlocks)) -> u32| {
        let column: Vec<u32> = found.iter().map(of).collect();
        if column.iter().any(|entry| *entry != 0) {
            column
        } else {
            Vec::new()
        }
    };
    pb::Held {
        worker_ids: found.iter().map(|(rank, _)| rank.worker.0).collect(),
        dp_ranks: column(|(rank, _)| rank.rank.0),
        device: column(|(_, blocks)| blocks.device),
        host: column(|(_, blocks)| blocks.host),
        disk: column(|(_, blocks)| blocks.disk),
        external: column(|(_, blocks)| blocks.external),
    }
}

/// Who has anything of prompts with so many blocks.
pub(super) fn found(
    held: &[pb::Held],
    asked: &[BlockHashes],
) -> Result<Vec<Vec<(WorkerRank, TierBlocks)>>, Nonsense> {
    if held.len() != asked.len() {
        return Err(Nonsense::Answers(held.len()));
    }
    held.iter()
        .zip(asked)
        .map(|(held, hashes)| found_of(held, hashes.len()))
        .collect()
}

fn found_of(held: &pb::Held, most: usize) -> Result<Vec<(WorkerRank, TierBlocks)>, Nonsense> {
    let columns = [
        &held.dp_ranks,
        &held.device,
        &held.host,
        &held.disk,
        &held.external,
    ];
    if columns
        .iter()
        .any(|column| !column.is_empty() && column.len() != held.worker_ids.len())
    {
        return Err(Nonsense::Columns);
    }
    let row = |(at, worker): (usize, &u64)| {
        let [rank, device, host, disk, external] =
            columns.map(|column| column.get(at).copied().unwrap_or(0));
        let blocks = [device, host, disk, external]
            .into_iter()
            .map(u64::from)
            .sum::<u64>();
        if blocks > most as u64 {
            return Err(Nonsense::TooMuch);
        }
        let rank = WorkerRank {
            worker: WorkerId(*worker),
            rank: DpRank(rank),
        };
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
    held.worker_ids.iter().enumerate().map(row).collect()
}

/// What is said of the worker ranks.
pub(super) fn said(ranks: &RemoteRanks) -> pb::Ranks {
    let said = |row: &RemoteRank| pb::Rank {
        worker_id: row.rank.worker.0,
        dp_rank: row.rank.rank.0,
        trust: pb::Trust::from(row.standing.trust).into(),
        because: row
            .standing
            .because
            .map_or(pb::Because::Unspecified, pb::Because::from)
            .into(),
        engine_block_size: row
            .standing
            .engine_block_size
            .map_or(0, |size| size.0.get()),
        grouped: row.grouped,
    };
    pb::Ranks {
        ranks: ranks.rows().iter().map(said).collect(),
    }
}

/// The worker ranks of which something is said.
pub(super) fn ranks(said: &pb::Ranks) -> Result<RemoteRanks, Nonsense> {
    let row = |said: &pb::Rank| {
        let standing = Standing {
            trust: trust(said.trust)?,
            because: because(said.because)?,
            engine_block_size: NonZeroU32::new(said.engine_block_size).map(BlockSize),
        };
        let rank = WorkerRank {
            worker: WorkerId(said.worker_id),
            rank: DpRank(said.dp_rank),
        };
        Ok(RemoteRank {
            rank,
            standing,
            grouped: said.grouped,
        })
    };
    Ok(RemoteRanks::new(
        said.ranks.iter().map(row).collect::<Result<_, _>>()?,
    ))
}

impl From<Trust> for pb::Trust {
    fn from(trust: Trust) -> Self {
        match trust {
            Trust::Exact => pb::Trust::Exact,
            Trust::CatchingUp => pb::Trust::CatchingUp,
            Trust::Incomplete => pb::Trust::Incomplete,
            Trust::Stale => pb::Trust::Stale,
            Trust::Absent => pb::Trust::Absent,
        }
    }
}

fn trust(number: i32) -> Result<Trust, Nonsense> {
    let named = pb::Trust::try_from(number).map_err(|_| Nonsense::Word(number))?;
    Ok(match named {
        // Whoever says a word that we do not know might mean anything.
        pb::Trust::Unspecified => return Err(Nonsense::Word(number)),
        pb::Trust::Exact => Trust::Exact,
        pb::Trust::CatchingUp => Trust::CatchingUp,
        pb::Trust::Incomplete => Trust::Incomplete,
        pb::Trust::Stale => Trust::Stale,
        pb::Trust::Absent => Trust::Absent,
    })
}

impl From<Because> for pb::Because {
    fn from(because: Because) -> Self {
        match because {
            Because::NoSource => pb::Because::NoSource,
            Because::Connecting => pb::Because::Connecting,
            Because::Replaying => pb::Because::Replaying,
            Because::Detached => pb::Because::Detached,
            Because::LostBatches => pb::Because::LostBatches,
            Because::UntoldBlocks => pb::Because::UntoldBlocks,
            Because::Undecodable => pb::Because::Undecodable,
            Because::Silent => pb::Because::Silent,
            Because::BlockSizeMismatch => pb::Because::BlockSizeMismatch,
            Because::OtherRank => pb::Because::OtherRank,
        }
    }
}

fn because(number: i32) -> Result<Option<Because>, Nonsense> {
    let named = pb::Because::try_from(number).map_err(|_| Nonsense::Word(number))?;
    Ok(Some(match named {
        pb::Because::Unspecified => return Ok(None),
        pb::Because::NoSource => Because::NoSource,
        pb::Because::Connecting => Because::Connecting,
        pb::Because::Replaying => Because::Replaying,
        pb::Because::Detached => Because::Detached,
        pb::Because::LostBatches => Because::LostBatches,
        pb::Because::UntoldBlocks => Because::UntoldBlocks,
        pb::Because::Undecodable => Because::Undecodable,
        pb::Because::Silent => Because::Silent,
        pb::Because::BlockSizeMismatch => Because::BlockSizeMismatch,
        pb::Because::OtherRank => Because::OtherRank,
    }))
}
