//! Requests that the engine refuses: they leave no predicted blocks, evict none, and other replicas are not notified.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::block::Salt;
use crate::predict::{Policy, Predictor, Ttl};

const TTL: Ttl = Ttl {
    ttl: Duration::from_secs(120),
    most_blocks_per_rank: 1 << 20,
};

/// A router to workers whose caches are predicted by a policy.
fn predicting(policy: Policy, workers: impl IntoIterator<Item = Worker>) -> Router {
    let router = router_of(workers, RouterSettings::default());
    let without_events = Some(Predictor::new(policy, Instant::now));
    let router = router.predicting(Predictions {
        without_events,
        ..Predictions::default()
    });
    router
        .fleet()
        .members()
        .for_each(|member| router.predictions().open(member));
    router
}

fn with_capacity(total_kv_blocks: Option<u64>) -> Worker {
    let mut worker = Worker {
        block_size: BlockSize::new(16).unwrap(),
        ..worker(1)
    };
    worker.capacity.total_kv_blocks = total_kv_blocks;
    worker
}

fn tokens(from: u32, count: u32) -> RouteRequest {
    let tokens: Vec<u32> = (from..from + count).collect();
    let hashes = BlockHashes::of(&tokens, BlockSize::new(16).unwrap(), &Salt::default());
    RouteRequest::new(Some("m".into()), Prompt::Hashed(vec![hashes]))
}

fn answer(router: &Router, request: RouteRequest, status: u16) {
    let mut booked = router.route(request).unwrap();
    router.answered(
        &mut booked,
        Answer {
            status,
            from: AnswerFrom::Chosen,
        },
    );
}

fn cached(router: &Router, request: RouteRequest) -> u64 {
    router.ask(request).unwrap().predicted_cached_tokens
}

#[test]
fn refused_prompt_neither_stays_nor_evicts_others() {
    let lru = Policy::Lru {
        default_blocks: None,
        fallback: TTL,
    };
    let cases = [
        // A prompt that fits, and prompts that exceed what the rank can hold.
        ("lru, fits", lru, Some(30_000), 400_000),
        ("lru, too long", lru, Some(30_000), 500_000),
        ("ttl, fits", Policy::Ttl(TTL), None, 16_000_000),
        ("ttl, too long", Policy::Ttl(TTL), None, 16_900_000),
    ];
    for (case, policy, capacity, attack) in cases {
        let router = predicting(policy, [with_capacity(capacity)]);
        let published = Arc::new(AtomicUsize::new(0));
        let count = published.clone();
        router.on_routed(move |_, _| _ = count.fetch_add(1, Ordering::Relaxed));
        let (of_victim, of_refused) = (tokens(0, 8000), tokens(1 << 30, attack));
        let victim = || of_victim.clone();
        let refused = || of_refused.clone();
        answer(&router, victim(), 200);
        assert_eq!(cached(&router, victim()), 7_984, "{case}");
        for status in [400, 500, 503, 302] {
            answer(&router, refused(), status);
            assert_eq!(
                (cached(&router, victim()), cached(&router, refused())),
                (7_984, 0),
                "{case}: {status}"
            );
        }
        drop(router.route(refused()).unwrap());
        assert_eq!(
            (cached(&router, victim()), cached(&router, refused())),
            (7_984, 0),
            "{case}: the client left"
        );
        assert_eq!(
            published.load(Ordering::Relaxed),
            1,
            "{case}: only the accepted prompt"
        );
    }
}

#[test]
fn prompt_in_flight_counts_for_concurrent_requests() {
    for policy in [
        Policy::Lru {
            default_blocks: Some(1000),
            fallback: TTL,
        },
        Policy::Ttl(TTL),
    ] {
        let router = predicting(policy, [with_capacity(None)]);
        let mut first = router.route(tokens(0, 800)).unwrap();
        let second = router.route(tokens(0, 800)).unwrap();
        assert_eq!(second.route.predicted_cached_tokens, 784);
        router.answered(
            &mut first,
            Answer {
                status: 400,
                from: AnswerFrom::Chosen,
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Two routers get the same accepted requests; one of them also gets requests that are refused, some of which are in
    /// flight across the accepted ones.
    #[test]
    fn refused_requests_leave_all_overlaps_unchanged(
        lru in any::<bool>(),
        most in 4..40u64,
        steps in vec((vec(0..3u64, 0..10), 0..4u8), 1..40),
    ) {
        let fallback = Ttl { most_blocks_per_rank: most, ..TTL };
        let policy = if lru { Policy::Lru { default_blocks: Some(most), fallback } } else { Policy::Ttl(fallback) };
        let [plain, attacked] = [(); 2].map(|()| predicting(policy, [worker(1)]));
        let mut in_flight = Vec::new();
        for (path, kind) in &steps {
            let asked = || request(std::slice::from_ref(path));
            match kind {
                0 => {
                    answer(&plain, asked(), 200);
                    answer(&attacked, asked(), 200);
                }
                1 => answer(&attacked, asked(), 400),
                2 => in_flight.push(attacked.route(asked()).unwrap()),
                _ => drop(in_flight.pop()),
            }
        }
        for mut booked in in_flight {
            attacked.answered(&mut booked, Answer { status: 422, from: AnswerFrom::Chosen });
        }
        for (path, _) in &steps {
            let asked = || request(std::slice::from_ref(path));
            prop_assert_eq!(cached(&plain, asked()), cached(&attacked, asked()), "{:?}", path);
        }
        let blocks = |router: &Router| router.predictions().stats().map(|rank| (rank.blocks, rank.evicted)).collect::<Vec<_>>();
        prop_assert_eq!(blocks(&plain), blocks(&attacked));
    }
}
