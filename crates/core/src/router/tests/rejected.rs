//! Requests that the engine rejects: they leave no predicted blocks, evict none, and are not
//! published to other replicas.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::block::CacheSalt;
use crate::fleet::FleetMember;
use crate::policy::Constraints;
use crate::predict::{EvictionPolicy, Predictor, TtlPolicy};

const TTL: TtlPolicy = TtlPolicy {
    ttl: Duration::from_secs(120),
    max_blocks_per_rank: 1 << 20,
};

/// Creates a router with workers whose caches are predicted by a policy.
fn predicting(policy: EvictionPolicy, workers: impl IntoIterator<Item = Worker>) -> Router {
    let router = router_of(workers, RouterSettings::default());
    let predictor = Predictor::new(policy, Instant::now);
    with_predictor(router, predictor)
}

fn with_large_blocks(id: u64) -> Worker {
    Worker {
        block_size: BlockSize::new(16).unwrap(),
        ..worker(id)
    }
}

fn with_capacity(total_kv_blocks: Option<u64>) -> Worker {
    let mut worker = with_large_blocks(1);
    worker.capacity.total_kv_blocks = total_kv_blocks;
    worker
}

fn tokens(from: u32, count: u32) -> RouteRequest {
    let tokens: Vec<u32> = (from..from + count).collect();
    let hashes =
        BlockHashes::from_tokens(&tokens, BlockSize::new(16).unwrap(), &CacheSalt::default());
    RouteRequest::new(Some("m".into()), RoutePrompt::Hashed(vec![hashes]))
}

fn answer(router: &Router, request: RouteRequest, status: u16) {
    let mut booked = router.route(request).unwrap();
    router.on_response(
        &mut booked,
        WorkerResponse {
            status,
            origin: ResponseOrigin::Chosen,
        },
    );
}

fn cached(router: &Router, request: RouteRequest) -> u64 {
    router.preview(request).unwrap().predicted_cached_tokens
}

/// Counts the published prompts.
#[derive(Default)]
struct PublishCounter(AtomicUsize);

impl RouterListener for PublishCounter {
    fn on_routed(&self, _: &FleetMember, _: &[BlockHashes]) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn refused_prompt_neither_stays_nor_evicts_others() {
    let lru = EvictionPolicy::Lru {
        default_blocks: None,
        fallback: TTL,
    };
    let cases = [
        // A prompt that fits, and prompts that exceed what the rank can hold.
        ("lru, fits", lru, Some(30_000), 400_000),
        ("lru, too long", lru, Some(30_000), 500_000),
        ("ttl, fits", EvictionPolicy::Ttl(TTL), None, 16_000_000),
        ("ttl, too long", EvictionPolicy::Ttl(TTL), None, 16_900_000),
    ];
    for (case, policy, capacity, attack) in cases {
        let published = Arc::new(PublishCounter::default());
        let router = predicting(policy, [with_capacity(capacity)]).with_listener(published.clone());
        let cached_prompt = tokens(0, 8000);
        let of_refused = tokens(1 << 30, attack);
        let cached_request = || cached_prompt.clone();
        let refused = || of_refused.clone();
        answer(&router, cached_request(), 200);
        assert_eq!(cached(&router, cached_request()), 7_984, "{case}");
        for status in [400, 500, 503, 302] {
            answer(&router, refused(), status);
            assert_eq!(
                (
                    cached(&router, cached_request()),
                    cached(&router, refused())
                ),
                (7_984, 0),
                "{case}: {status}"
            );
        }
        drop(router.route(refused()).unwrap());
        assert_eq!(
            (
                cached(&router, cached_request()),
                cached(&router, refused())
            ),
            (7_984, 0),
            "{case}: the client left"
        );
        assert_eq!(
            published.0.load(Ordering::Relaxed),
            1,
            "{case}: only the accepted prompt"
        );
    }
}

#[test]
fn prompt_in_flight_counts_for_concurrent_requests() {
    for policy in [
        EvictionPolicy::Lru {
            default_blocks: Some(1000),
            fallback: TTL,
        },
        EvictionPolicy::Ttl(TTL),
    ] {
        let router = predicting(policy, [with_capacity(None)]);
        let mut first = router.route(tokens(0, 800)).unwrap();
        let second = router.route(tokens(0, 800)).unwrap();
        assert_eq!(second.route.predicted_cached_tokens, 784);
        router.on_response(
            &mut first,
            WorkerResponse {
                status: 400,
                origin: ResponseOrigin::Chosen,
            },
        );
        assert_eq!(
            cached(&router, tokens(0, 800)),
            784,
            "the second request is still in flight"
        );
        drop((first, second));
        assert_eq!(cached(&router, tokens(0, 800)), 0);
    }
}

#[test]
fn retry_avoids_rank_where_prompt_failed() {
    let workers = [with_large_blocks(1), with_large_blocks(2)];
    let router = predicting(EvictionPolicy::Ttl(TTL), workers);
    let chosen = |request: RouteRequest| router.preview(request).unwrap().to.rank;
    answer(&router, tokens(0, 800), 200);
    let warm = chosen(tokens(0, 1600));
    answer(&router, tokens(0, 1600), 404);
    assert_ne!(chosen(tokens(0, 1600)), warm);
    assert_eq!(chosen(tokens(0, 800)), warm, "another prompt");
    for constraints in [
        Constraints {
            storing_rank: Some(warm),
            ..Constraints::default()
        },
        Constraints {
            bound_rank: Some(warm),
            ..Constraints::default()
        },
    ] {
        let bound = RouteRequest {
            constraints,
            ..tokens(0, 1600)
        };
        assert_eq!(chosen(bound), warm, "the request needs its state");
    }
}

proptest! {
    #![proptest_config(warmroute_property_tests::property_config(400))]

    /// Sends the same accepted requests to two routers. One of them also receives rejected
    /// requests, some of which are in flight at the same time.
    #[test]
    fn refused_requests_leave_all_overlaps_unchanged(
        lru in any::<bool>(),
        most in 4..40u64,
        steps in vec((vec(0..3u64, 0..10), 0..4u8), 1..40),
    ) {
        let fallback = TtlPolicy { max_blocks_per_rank: most, ..TTL };
        let policy = if lru { EvictionPolicy::Lru { default_blocks: Some(most), fallback } } else { EvictionPolicy::Ttl(fallback) };
        let [plain, disturbed] = [(); 2].map(|()| predicting(policy, [worker(1)]));
        let mut in_flight = Vec::new();
        for (path, kind) in &steps {
            let new_request = || request(std::slice::from_ref(path));
            match kind {
                0 => {
                    answer(&plain, new_request(), 200);
                    answer(&disturbed, new_request(), 200);
                }
                1 => answer(&disturbed, new_request(), 400),
                2 => in_flight.push(disturbed.route(new_request()).unwrap()),
                _ => drop(in_flight.pop()),
            }
        }
        for mut booked in in_flight {
            disturbed.on_response(&mut booked, WorkerResponse { status: 422, origin: ResponseOrigin::Chosen });
        }
        for (path, _) in &steps {
            let new_request = || request(std::slice::from_ref(path));
            prop_assert_eq!(cached(&plain, new_request()), cached(&disturbed, new_request()), "{:?}", path);
        }
        let blocks = |router: &Router| router.predictors().stats().map(|rank| (rank.blocks, rank.evicted)).collect::<Vec<_>>();
        prop_assert_eq!(blocks(&plain), blocks(&disturbed));
    }
}
