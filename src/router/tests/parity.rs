//! What becomes of requests where one worker is known to make other tokens than we do.

use super::trust::{holds, rank};
use super::*;
use crate::parity::{Evidence, Foretold};
use crate::trust::Standing;

fn hashed(foretold: Foretold) -> RouteRequest {
    RouteRequest { model: Some("m".into()), foretold, ..request(&[(0..10).collect()]) }
}

/// Two workers, of which the first holds more; its events prove that it makes other tokens.
fn router_with_one_that_differs() -> (Router, [crate::index::RankWriter; 2]) {
    let router = router_of([worker(1), worker(2)], RouterSettings::default());
    let writers = [holds(&router, 1, 8), holds(&router, 2, 6)];
    [1, 2].into_iter().for_each(|id| router.set_trust(rank(id), Standing::EXACT));
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
        assert_eq!((route.to.rank, route.mode, route.reason), (rank(2), Mode::Exact, None));
        assert_eq!((route.predicted_cached_tokens, route.best_cached_tokens), (24, 24));
    }
    // Tokens that the engines made, or the client brought, are what they are.
    let route = router.ask(hashed(Foretold::Nothing)).unwrap();
    assert_eq!((route.to.rank, route.mode, route.predicted_cached_tokens), (rank(1), Mode::Exact, 32));
}

#[test]
fn requests_that_go_to_a_worker_that_differs_go_by_load_and_say_why() {
    let (router, _writers) = router_with_one_that_differs();
    let fleet = router.fleet();
    let change = fleet.reconcile(vec![worker(1)]);
    router.publish(Arc::new(change.fleet));
    for model in [Some("m".into()), None] {
        let route = router.ask(RouteRequest { model, ..hashed(Foretold::Prompt) }).unwrap();
        assert_eq!((route.mode, route.reason), (Mode::LoadOnly, Some(Reason::ParityMismatch)));
        assert_eq!((route.predicted_cached_tokens, route.overlap.total()), (0, 0));
    }
    // It is looked after all the same: so it is noticed when it agrees again.
    let standing = router.parity().of(&"m".into()).unwrap();
    (0..3).for_each(|_| _ = standing.seen(WorkerId(1), Evidence::Confirmed));
    assert_eq!(router.ask(hashed(Foretold::Prompt)).unwrap().mode, Mode::Exact);
}
