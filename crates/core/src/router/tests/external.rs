use super::*;
use crate::block::{EngineHash, StorageTier};
use crate::index::{KvEvent, RankWriter, StoredBlock, TierBlocks};
use crate::worker::DpRank;

/// Holds block 0 on the device, 1 and 2 in host memory and 3 on disk.
fn tiered(router: &Router) -> RankWriter {
    let rank = WorkerRank {
        worker: WorkerId(2),
        rank: DpRank(0),
    };
    let mut writer = router
        .index()
        .create_writer(router.fleet().slot(rank).unwrap());
    for (tier, range) in [
        (StorageTier::Device, 0..1),
        (StorageTier::HostPinned, 1..3),
        (StorageTier::Disk, 3..4_u64),
    ] {
        let parent = range.start.checked_sub(1).map(EngineHash);
        let blocks = range
            .map(|at| StoredBlock {
                engine: EngineHash(at),
                local: LocalHash(at),
            })
            .collect();
        writer.apply(&KvEvent::Stored {
            parent,
            blocks,
            tier,
        });
    }
    writer
}

#[test]
fn estimates_match_next_decision() {
    let router = router_of([worker(1), worker(2)], RouterSettings::default());
    let _writer = tiered(&router);
    // 33 tokens in blocks of 4; the shared cache holds blocks 0 to 5.
    let new_request = || RouteRequest {
        shared: SharedBlocks::Held(vec![0..2, 3..6]),
        ..request(&[(0..8).collect()])
    };
    let live = router.route(request(&[(0..2).collect()])).unwrap();
    assert_eq!(
        live.route.to.rank.worker,
        WorkerId(2),
        "it holds both blocks"
    );
    let estimates = router.estimate_all(new_request()).unwrap();
    let [cold, warm] = &estimates[..] else {
        panic!("{estimates:?}")
    };
    assert_eq!(
        warm.overlap,
        TierBlocks {
            device: 1,
            host: 2,
            disk: 1,
            external: 0
        }
    );
    assert_eq!(
        (cold.overlap, cold.shared_beyond_device),
        (TierBlocks::default(), 5)
    );
    assert_eq!(
        (warm.shared_beyond_device, warm.effective_blocks),
        (4, 1.0 + 2.0 * 0.75 + 0.25)
    );
    // One token of the live request is still to be computed, and its two blocks are among these
    // eight.
    assert_eq!(
        (
            warm.load.active_prefill_tokens,
            warm.potential_prefill_tokens
        ),
        (1, 1 + 33 - 16)
    );
    assert_eq!(
        (warm.load.active_blocks, warm.potential_decode_blocks),
        (2, 8)
    );
    assert_eq!(
        (cold.potential_prefill_tokens, cold.potential_decode_blocks),
        (33, 8)
    );
    let next = router.route(new_request()).unwrap();
    let same = estimates
        .iter()
        .find(|estimates| estimates.rank == next.route.to.rank)
        .unwrap();
    assert_eq!(same.cost, next.route.choice.cost);
}

#[test]
fn external_route_books_like_own_route() {
    let router = router_of([worker(1), worker(2)], RouterSettings::default());
    let _writer = tiered(&router);
    let new_request = || request(&[(0..8).collect()]);
    let own_route = router.route(new_request()).unwrap();
    let foreign = router
        .prepare_external(
            new_request(),
            own_route.route.to.rank,
            ExternalRouteOptions::default(),
        )
        .unwrap();
    assert_eq!(
        Some(&foreign.booking),
        own_route.reservation.bookings().next()
    );
    let options = ExternalRouteOptions {
        has_remote_prefill: true,
        cached_tokens: Some(3),
    };
    let foreign = router
        .prepare_external(new_request(), own_route.route.to.rank, options)
        .unwrap();
    assert_eq!(
        (foreign.booking.track_prefill, foreign.booking.cached_tokens),
        (false, 3)
    );
    let unknown = WorkerRank {
        worker: WorkerId(9),
        rank: DpRank(0),
    };
    assert!(
        router
            .prepare_external(new_request(), unknown, ExternalRouteOptions::default())
            .is_none()
    );
}
