//! How far event sources are believed, in decisions and in what is told of them.

use super::*;
use crate::block::EngineHash;
use crate::index::{KvEvent, RankWriter, StoredBlock};
use crate::tier::Tier;
use crate::trust::{Because, Link, Source, Standing, Trust, TrustRules};
use crate::worker::DpRank;

pub(super) fn rank(id: u64) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(id),
        rank: DpRank(0),
    }
}

pub(super) fn holds(router: &Router, id: u64, count: u64) -> RankWriter {
    let mut writer = router.index().join(router.fleet().slot(rank(id)).unwrap());
    let blocks = (0..count)
        .map(|local| StoredBlock {
            engine: EngineHash(local),
            local: LocalHash(local),
        })
        .collect();
    writer.apply(&KvEvent::Stored {
        parent: None,
        blocks,
        tier: Tier::Device,
    });
    writer
}

fn stale() -> Standing {
    Standing::new(Trust::Stale, Some(Because::LostBatches))
}

#[test]
fn what_a_stale_source_told_counts_less_and_is_told_to_be_stale() {
    let trust = TrustRules {
        stale_credit: 0.5,
        ..TrustRules::default()
    };
    let router = router_of(
        [worker(1), worker(2)],
        RouterSettings {
            trust,
            ..RouterSettings::default()
        },
    );
    let _writers = [holds(&router, 1, 8), holds(&router, 2, 6)];
    [1, 2]
        .into_iter()
        .for_each(|id| router.set_trust(rank(id), Standing::EXACT));
    let prompt = || request(&[(0..10).collect()]);
    assert_eq!(router.ask(prompt()).unwrap().to.rank, rank(1));

    router.set_trust(rank(1), stale());
    let route = router.ask(prompt()).unwrap();
    assert_eq!(
        (route.to.rank, route.trust, route.mode),
        (rank(2), Trust::Exact, Mode::Exact),
        "4 believed, not 8"
    );
    let explanation = router.explain(prompt());
    let judged = explanation.phases[0]
        .judged
        .iter()
        .find(|judged| judged.rank == rank(1))
        .unwrap();
    let cost = judged.cost.unwrap();
    assert_eq!(
        (cost.trust_credit, cost.device_credit, judged.overlap.device),
        (0.5, 4.0, 8)
    );
    assert_eq!(judged.source, stale());

    router.set_trust(rank(2), stale());
    let route = router.ask(prompt()).unwrap();
    assert_eq!(
        (route.to.rank, route.trust, route.mode),
        (rank(1), Trust::Stale, Mode::Exact),
        "both are believed half"
    );
    assert!(route.short().contains(" trust=stale"), "{}", route.short());
    let sentence = router.explain(prompt()).sentence;
    assert!(
        sentence.ends_with("it holds 8 of 10 blocks, which may be out of date (lost_batches)."),
        "{sentence}"
    );
    assert_eq!(
        route.predicted_cached_tokens, 32,
        "what is foreseen is what was told"
    );
}

#[test]
fn sources_that_cannot_be_used_leave_the_load_to_decide() {
    let router = router_of([worker(1), worker(2)], RouterSettings::default());
    let prompt = || request(&[(0..10).collect()]);
    let told = |router: &Router| {
        let route = router.ask(prompt()).unwrap();
        (route.mode, route.reason)
    };
    assert_eq!(told(&router), (Mode::LoadOnly, Some(Reason::IndexCold)));
    let catching_up = Standing::new(Trust::CatchingUp, Some(Because::Replaying));
    router.set_trust(rank(1), catching_up);
    assert_eq!(
        told(&router),
        (Mode::LoadOnly, Some(Reason::IndexCold)),
        "it told nothing yet"
    );
    let writer = holds(&router, 1, 8);
    for standing in [
        catching_up,
        Standing::new(Trust::CatchingUp, Some(Because::Connecting)),
    ] {
        router.set_trust(rank(1), standing);
        let route = router.ask(prompt()).unwrap();
        assert_eq!(
            (route.to.rank, route.mode, route.reason),
            (rank(1), Mode::Exact, None),
            "chosen by what it told"
        );
        assert_eq!(
            (route.choice.cost.trust_credit, route.trust),
            (0.5, Trust::CatchingUp)
        );
    }
    drop(writer);
    router.set_trust(
        rank(1),
        Standing::new(Trust::Absent, Some(Because::BlockSizeMismatch)),
    );
    assert_eq!(
        told(&router),
        (Mode::LoadOnly, Some(Reason::BlockSizeMismatch))
    );
    // Beside one that can be used, it is by load only where the other is not chosen.
    router.set_trust(rank(2), stale());
    let mut chosen = std::collections::BTreeSet::new();
    for _ in 0..64 {
        let route = router.ask(prompt()).unwrap();
        let by_load = (Mode::LoadOnly, Some(Reason::BlockSizeMismatch));
        let expected = if route.to.rank == rank(1) {
            by_load
        } else {
            (Mode::Exact, None)
        };
        assert_eq!((route.mode, route.reason), expected, "{:?}", route.to);
        chosen.insert(route.to.rank);
    }
    assert_eq!(chosen, [rank(1), rank(2)].into());
    router.sources().forget(rank(2));
    assert_eq!(router.trust(rank(2)), Standing::default());
}

#[test]
fn an_engine_reuses_whole_blocks_of_its_own() {
    // Our blocks have 4 tokens; the prompt has 41, of which 28 are held.
    let cases = [
        (None, 28, 7),
        (BlockSize::new(8), 24, 6),
        (BlockSize::new(16), 16, 4),
        (BlockSize::new(2), 28, 7),
    ];
    for (engine, cached, blocks) in cases {
        let router = router_of([worker(1)], RouterSettings::default());
        let _writer = holds(&router, 1, 7);
        router.set_trust(
            rank(1),
            Standing {
                engine_block_size: engine,
                ..Standing::EXACT
            },
        );
        let route = router.ask(request(&[(0..10).collect()])).unwrap();
        let told = (
            route.predicted_cached_tokens,
            route.best_cached_tokens,
            route.overlap.device,
        );
        assert_eq!(told, (cached, cached, blocks), "{engine:?}");
    }
    // Of a prompt that ends with a block the engine computes at least its own last one.
    for (engine, cached) in [
        (None, 28),
        (BlockSize::new(2), 30),
        (BlockSize::new(16), 16),
    ] {
        let router = router_of([worker(1)], RouterSettings::default());
        let _writer = holds(&router, 1, 8);
        router.set_trust(
            rank(1),
            Standing {
                engine_block_size: engine,
                ..Standing::EXACT
            },
        );
        let hashes = BlockHashes::chain(
            32,
            BlockSize::new(4).unwrap(),
            (0..8).map(LocalHash).collect(),
        );
        let route = router
            .ask(RouteRequest::new(None, Prompt::Hashed(vec![hashes])))
            .unwrap();
        assert_eq!(route.predicted_cached_tokens, cached, "{engine:?}");
    }
}

#[test]
fn answers_that_had_to_store_blocks_are_told_to_the_source() {
    let clock = Clock::default();
    let router = clocked([worker(1)], RouterSettings::default(), &clock);
    let mut source = Source::new(0.0);
    source.linked(Link::Attached);
    let source = Arc::new(Mutex::new(source));
    router.sources().watch(rank(1), source.clone());
    router.set_trust(rank(1), Standing::EXACT);
    let answer = |prompt: Vec<u64>, status: u16, from: AnswerFrom| {
        let mut booked = router.route(request(&[prompt])).unwrap();
        router.answered(&mut booked, Answer { status, from });
        source.lock().facts().unheard_requests
    };
    assert_eq!(answer(vec![1, 2, 3], 200, AnswerFrom::Chosen), 1);
    assert_eq!(
        answer(vec![1, 2, 3], 500, AnswerFrom::Chosen),
        1,
        "nothing was computed"
    );
    assert_eq!(
        answer(vec![1, 2, 3], 200, AnswerFrom::Other(WorkerId(9))),
        1,
        "not there"
    );
    let _writer = holds(&router, 1, 8);
    assert_eq!(
        answer((0..8).collect(), 200, AnswerFrom::Chosen),
        1,
        "it had all of it"
    );
    assert_eq!(answer((0..9).collect(), 200, AnswerFrom::Chosen), 2);
    // The engine's blocks are four of ours, and it had all that it stores of each prompt.
    router.set_trust(
        rank(1),
        Standing {
            engine_block_size: BlockSize::new(16),
            ..Standing::EXACT
        },
    );
    let several = |prompts: &[Vec<u64>]| {
        let mut booked = router.route(request(prompts)).unwrap();
        router.answered(
            &mut booked,
            Answer {
                status: 200,
                from: AnswerFrom::Chosen,
            },
        );
        source.lock().facts().unheard_requests
    };
    let six: Vec<Vec<u64>> = vec![(0..6).collect(); 4];
    assert_eq!(
        several(&six),
        2,
        "what is left of four prompts makes no block of any"
    );
    assert_eq!(several(&[(0..6).collect(), (0..12).collect()]), 3);
}
