//! Tests of decoding the messages of index queries.

use super::*;
use crate::proto::index as pb;

#[test]
fn invalid_prompts_are_reported() {
    let prompt = |tokens, blocks| pb::Prompt {
        tokens,
        local_hashes: vec![7; blocks],
    };
    let error_of = |prompts, max| wire::decode_prompts(prompts, size(), max).err();
    assert_eq!(error_of(vec![prompt(9, 2), prompt(3, 0)], 2), None);
    assert_eq!(
        error_of(vec![prompt(9, 2), prompt(9, 1)], 2),
        Some(wire::IndexMessageError::TooManyBlocks { blocks: 3, max: 2 })
    );
    assert_eq!(
        error_of(vec![prompt(7, 2)], 9),
        Some(wire::IndexMessageError::TooFewTokens {
            blocks: 2,
            size: 4,
            tokens: 7
        })
    );
    assert_eq!(
        error_of(vec![prompt(1, 0); 1025], 9),
        Some(wire::IndexMessageError::TooManyPrompts(1025))
    );
}

#[test]
fn invalid_overlaps_are_reported() {
    let queried = [hashes(&[1, 2, 3])];
    let overlaps = pb::PromptOverlaps {
        worker_ids: vec![1, 2],
        device: vec![1, 0],
        host: vec![2, 1],
        ..pb::PromptOverlaps::default()
    };
    let found = wire::decode_overlaps(std::slice::from_ref(&overlaps), &queried).unwrap();
    let blocks = |device, host| TierBlocks {
        device,
        host,
        ..TierBlocks::default()
    };
    assert_eq!(
        found,
        [vec![(rank(1), blocks(1, 2)), (rank(2), blocks(0, 1))]]
    );
    let error_of =
        |overlaps: pb::PromptOverlaps| wire::decode_overlaps(&[overlaps], &queried).err();
    assert_eq!(
        wire::decode_overlaps(&[], &queried).err(),
        Some(wire::IndexMessageError::WrongPromptCount(0))
    );
    assert_eq!(
        error_of(pb::PromptOverlaps {
            disk: vec![1],
            ..overlaps.clone()
        }),
        Some(wire::IndexMessageError::Columns)
    );
    assert_eq!(
        error_of(pb::PromptOverlaps {
            worker_ids: Vec::new(),
            ..overlaps.clone()
        }),
        Some(wire::IndexMessageError::Columns)
    );
    assert_eq!(
        error_of(pb::PromptOverlaps {
            disk: vec![1, 0],
            ..overlaps.clone()
        }),
        Some(wire::IndexMessageError::TooManyHeldBlocks)
    );
    assert_eq!(
        error_of(pb::PromptOverlaps {
            disk: vec![u32::MAX, 0],
            ..overlaps
        }),
        Some(wire::IndexMessageError::TooManyHeldBlocks)
    );
}

#[test]
fn invalid_ranks_are_reported() {
    let ranks = |freshness, reason| {
        let rank = pb::Rank {
            worker_id: 1,
            freshness,
            reason,
            ..pb::Rank::default()
        };
        wire::decode_ranks(&pb::Ranks { ranks: vec![rank] }).map(|ranks| ranks.rows()[0].status)
    };
    assert_eq!(ranks(1, 0), Ok(SourceStatus::EXACT));
    assert_eq!(ranks(0, 0), Err(wire::IndexMessageError::UnknownNumber(0)));
    assert_eq!(ranks(6, 0), Err(wire::IndexMessageError::UnknownNumber(6)));
    assert_eq!(
        ranks(4, 77),
        Err(wire::IndexMessageError::UnknownNumber(77))
    );
}

#[test]
fn every_enum_value_round_trips() {
    let reasons = StaleReason::ALL.iter().copied().map(Some).chain([None]);
    let with_freshness = |reason| {
        let all = IndexFreshness::ALL.iter();
        all.map(move |freshness| (*freshness, reason))
    };
    let all = reasons.flat_map(with_freshness);
    let row = |(index, (freshness, reason)): (usize, (IndexFreshness, Option<StaleReason>))| {
        let engine_block_size = BlockSize::new(index as u32 % 3);
        let rank = WorkerRank::new(u64::MAX - index as u64, index as u32);
        RemoteRank {
            rank,
            status: SourceStatus {
                freshness,
                reason,
                engine_block_size,
                windows: None,
            },
            has_cache_groups: index % 2 == 0,
        }
    };
    let ranks = RemoteRanks::new(all.enumerate().map(row).collect());
    assert_eq!(ranks.rows().len(), 55);
    assert_eq!(
        wire::decode_ranks(&wire::encode_ranks(&ranks))
            .unwrap()
            .rows(),
        ranks.rows()
    );
}
