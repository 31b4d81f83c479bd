//! What becomes of requests where one worker is known to make other tokens than we do.

use super::trust::{holds, rank};
use super::*;
use crate::block::EngineHash;
use crate::index::{KvEvent, StoredBlock};
use crate::parity::{Change, Evidence, Foretold};
use crate::tier::Tier;
use crate::trust::{Because, Standing, Trust};

fn hashed(foretold: Foretold) -> RouteRequest {
    RouteRequest {
        model: Some("m".into()),
        foretold,
        ..request(&[(0..10).collect()])
    }
}

/// Two workers, of which the first holds more; its events prove that it makes other tokens.
fn router_with_one_that_differs() -> (Router, [crate::index::RankWriter; 2]) {
    let router = router_of([worker(1), worker(2)], RouterSettings::default());
    let writers = [holds(&router, 1, 8), holds(&router, 2, 6)];
    [1, 2]
        .into_iter()
        .for_each(|id| router.set_trust(rank(id), Standing::EXACT));
    router.parity().configure([("m".into(), Arc::default())]);
    let standing = router.parity().of(&"m".into()).unwrap();
    for _ in 0..8 {
        standing.seen(WorkerId(1), Evidence::Unconfirmed { block: 0 });
        standing.seen(WorkerId(2), Evidence::Confirmed);
    }
    assert!(!standing.is_mistrusted());
    (router, writers)
}

#[test]
fn a_worker_that_differs_is_credited_with_nothing_while_the_others_are_compared() {
    let (router, _writers) = router_with_one_that_differs();
    for foretold in [Foretold::Prompt, Foretold::Illustrated] {
        let route = router.ask(hashed(foretold)).unwrap();
        assert_eq!(
            (route.to.rank, route.mode, route.reason),
            (rank(2), Mode::Exact, None)
        );
        assert_eq!(
            (route.predicted_cached_tokens, route.best_cached_tokens),
            (24, 24)
        );
    }
    // Tokens that the engines made, or the client brought, are what they are.
    let route = router.ask(hashed(Foretold::Nothing)).unwrap();
    assert_eq!(
        (route.to.rank, route.mode, route.predicted_cached_tokens),
        (rank(1), Mode::Exact, 32)
    );
}

#[test]
fn requests_that_go_to_a_worker_that_differs_go_by_load_and_say_why() {
    let (router, _writers) = router_with_one_that_differs();
    let fleet = router.fleet();
    let change = fleet.reconcile(vec![worker(1)]);
    router.publish(Arc::new(change.fleet));
    for model in [Some("m".into()), None] {
        let route = router
            .ask(RouteRequest {
                model,
                ..hashed(Foretold::Prompt)
            })
            .unwrap();
        assert_eq!(
            (route.mode, route.reason),
            (Mode::LoadOnly, Some(Reason::ParityMismatch))
        );
        assert_eq!(
            (route.predicted_cached_tokens, route.overlap.total()),
            (0, 0)
        );
    }
    // It is looked after all the same: so it is noticed when it agrees again.
    let standing = router.parity().of(&"m".into()).unwrap();
    (0..3).for_each(|_| _ = standing.seen(WorkerId(1), Evidence::Confirmed));
    assert_eq!(
        router.ask(hashed(Foretold::Prompt)).unwrap().mode,
        Mode::Exact
    );
}

#[test]
fn where_batches_were_lost_only_blocks_that_were_told_since_prove_something() {
    let router = router_of([worker(1)], RouterSettings::default());
    router.parity().configure([("m".into(), Arc::default())]);
    let parity = router.parity().of(&"m".into()).unwrap();
    let blocks = (0..10)
        .map(|local| StoredBlock {
            engine: EngineHash(local),
            local: LocalHash(local),
        })
        .collect();
    let stored = KvEvent::Stored {
        parent: None,
        blocks,
        tier: Tier::Device,
    };
    let looked_after = || {
        let mut booked = router.route(hashed(Foretold::Prompt)).unwrap();
        router.answered_well(&mut booked);
        parity.take_ready().pop()
    };
    let lost = [
        (Trust::Stale, Because::LostBatches),
        (Trust::Incomplete, Because::UntoldBlocks),
    ];
    for (at, (trust, because)) in lost.into_iter().enumerate() {
        router.set_trust(rank(1), Standing::new(trust, Some(because)));
        let mut writer = router.index().join(router.fleet().slot(rank(1)).unwrap());
        assert_eq!(
            router.look_for(looked_after().unwrap()),
            None,
            "it may hold them: {trust:?}"
        );
        assert_eq!(
            parity.parity().workers[&WorkerId(1)].events.undecided,
            at as u64 + 1
        );
        let sighting = looked_after().unwrap();
        writer.apply(&stored);
        assert_eq!(
            router.look_for(sighting),
            Some((Evidence::Confirmed, Change::None)),
            "{trust:?}"
        );
        assert!(
            looked_after().is_none(),
            "an earlier life may have told of them: {trust:?}"
        );
    }
    router.set_trust(rank(1), Standing::new(Trust::Stale, Some(Because::Silent)));
    assert!(looked_after().is_none(), "nothing is heard");
}

#[test]
fn blocks_evicted_before_the_check_confirm_the_tokens() {
    let router = router_of([worker(1)], RouterSettings::default());
    router.parity().configure([("m".into(), Arc::default())]);
    router.set_trust(rank(1), Standing::EXACT);
    let parity = router.parity().of(&"m".into()).unwrap();
    let mut writer = router.index().join(router.fleet().slot(rank(1)).unwrap());
    let block = |local| StoredBlock {
        engine: EngineHash(local),
        local: LocalHash(local),
    };
    let store = |blocks: std::ops::Range<u64>| {
        let parent = blocks
            .start
            .checked_sub(1)
            .filter(|before| *before < 10)
            .map(EngineHash);
        KvEvent::Stored {
            parent,
            blocks: blocks.map(block).collect(),
            tier: Tier::Device,
        }
    };
    let remove = |blocks: std::ops::Range<u64>| KvEvent::Removed {
        blocks: blocks.map(EngineHash).collect(),
        tier: Tier::Device,
    };
    // A prefill in two steps, then another prompt that takes the room of this one.
    let turnover = [store(0..6), store(6..10), store(100..110), remove(0..10)];
    for round in 0..20 {
        let mut booked = router.route(hashed(Foretold::Prompt)).unwrap();
        turnover.iter().for_each(|event| _ = writer.apply(event));
        router.answered_well(&mut booked);
        let checked = router.look_for(parity.take_ready().pop().unwrap());
        assert_eq!(
            checked,
            Some((Evidence::Confirmed, Change::None)),
            "round {round}"
        );
        writer.apply(&remove(100..110));
    }
    // The same turnover of other tokens is still a proof.
    let mut changes = Vec::new();
    for _ in 0..8 {
        let mut booked = router.route(hashed(Foretold::Prompt)).unwrap();
        [store(100..110), remove(100..110)]
            .iter()
            .for_each(|event| _ = writer.apply(event));
        router.answered_well(&mut booked);
        changes.extend(router.look_for(parity.take_ready().pop().unwrap()));
    }
    assert_eq!(
        changes.last(),
        Some(&(Evidence::Unconfirmed { block: 0 }, Change::Mistrusted))
    );
}
