//! Tests of single steps, without a clock.

use std::collections::BTreeMap;

use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::super::cache::{BlockKeys, CacheEvent};
use super::*;

const BLOCK: usize = 4;

fn scheduler(
    num_blocks: usize,
    max_num_batched_tokens: usize,
    max_num_seqs: usize,
) -> StepScheduler {
    StepScheduler::new(
        BlockCache::new(BLOCK, num_blocks),
        SchedulerLimits {
            max_num_batched_tokens,
            max_num_seqs,
        },
    )
}

fn job(id: u64, prompt: std::ops::Range<u32>, answer: u32) -> SchedulerJob {
    let sequence = TokenSequence::new(prompt.collect(), BlockKeys::default());
    SchedulerJob::new(
        JobId(id),
        sequence,
        (0..answer).map(|at| 1000 * id as u32 + at).collect(),
    )
}

/// Runs to the end. Returns each step with its outputs.
fn run(scheduler: &mut StepScheduler) -> Vec<(SchedulerStep, Vec<TokenOutput>)> {
    let mut steps = Vec::new();
    while let Some(step) = scheduler.plan() {
        let outputs = scheduler.complete(&step);
        steps.push((step, outputs));
        assert!(steps.len() < 10_000, "no progress");
    }
    steps
}

fn tokens_of(steps: &[(SchedulerStep, Vec<TokenOutput>)], id: u64) -> Vec<u32> {
    steps
        .iter()
        .flat_map(|(_, outputs)| outputs)
        .filter(|output| output.job == JobId(id))
        .map(|o| o.token)
        .collect()
}

#[test]
fn long_prompt_is_prefilled_in_chunks() {
    let mut scheduler = scheduler(32, 8, 4);
    scheduler.submit(job(1, 0..20, 3));
    let steps = run(&mut scheduler);
    let work: Vec<_> = steps
        .iter()
        .map(|(step, outputs)| (step.prefill_tokens, step.decoding, outputs.len()))
        .collect();
    assert_eq!(
        work,
        [(8, 0, 0), (8, 0, 0), (4, 0, 1), (0, 1, 1), (0, 1, 1)]
    );
    assert_eq!(tokens_of(&steps, 1), [1000, 1001, 1002]);
    assert_eq!(scheduler.cache.used_blocks(), 0);
}

#[test]
fn each_chunk_publishes_one_stored_event() {
    let mut scheduler = scheduler(32, 8, 4);
    scheduler.submit(job(1, 0..20, 5));
    let mut stored = Vec::new();
    while let Some(step) = scheduler.plan() {
        scheduler.complete(&step);
        for event in scheduler.cache.take_events() {
            let CacheEvent::Stored(event) = event else {
                panic!("{event:?}")
            };
            stored.push(event.hashes.len());
        }
    }
    // 20 prompt and 5 generated tokens, of which 24 are computed, fill six blocks.
    assert_eq!(stored, [2, 2, 1, 1]);
}

#[test]
fn decodes_precede_new_prefills_in_budget() {
    let mut scheduler = scheduler(64, 10, 4);
    scheduler.submit(job(1, 0..9, 4));
    let first = scheduler.plan().unwrap();
    scheduler.complete(&first);
    scheduler.submit(job(2, 100..120, 1));
    let second = scheduler.plan().unwrap();
    assert_eq!((second.decoding, second.prefill_tokens), (1, 9));
    assert_eq!(second.jobs, [JobId(1), JobId(2)]);
}

#[test]
fn requests_beyond_limit_wait_in_order() {
    let mut scheduler = scheduler(64, 64, 2);
    (1..=3).for_each(|id| scheduler.submit(job(id, 0..9, 2)));
    let step = scheduler.plan().unwrap();
    assert_eq!(step.admitted, [JobId(1), JobId(2)]);
    assert_eq!((scheduler.running(), scheduler.waiting()), (2, 1));
    scheduler.complete(&step);
    let steps = run(&mut scheduler);
    assert!(steps.iter().any(|(step, _)| step.admitted == [JobId(3)]));
}

#[test]
fn identical_prompts_in_one_step_share_blocks() {
    let mut scheduler = scheduler(64, 64, 4);
    (1..=3).for_each(|id| scheduler.submit(job(id, 0..10, 1)));
    let step = scheduler.plan().unwrap();
    let cached: Vec<_> = scheduler
        .complete(&step)
        .iter()
        .map(|output| output.cached)
        .collect();
    assert_eq!(cached, [0, 8, 8]);
    let totals = scheduler.totals();
    assert_eq!(
        (
            totals.prefix_queries,
            totals.prefix_hits,
            totals.prompt_tokens
        ),
        (30, 16, 30)
    );
}

#[test]
fn preempted_job_resumes_without_losing_tokens() {
    let mut scheduler = scheduler(6, 64, 4);
    scheduler.submit(job(1, 0..8, 10));
    scheduler.submit(job(2, 100..108, 10));
    let steps = run(&mut scheduler);
    assert!(scheduler.totals().preemptions > 0);
    for id in [1, 2] {
        let expected: Vec<u32> = (0..10).map(|at| 1000 * id as u32 + at).collect();
        assert_eq!(tokens_of(&steps, id), expected, "job {id}");
    }
    let admitted: Vec<_> = steps
        .iter()
        .flat_map(|(step, _)| step.admitted.clone())
        .collect();
    assert_eq!(
        admitted,
        [JobId(1), JobId(2)],
        "a preempted job is not counted as newly admitted"
    );
    let totals = scheduler.totals();
    assert_eq!(
        (totals.prefix_queries, totals.prompt_tokens, totals.finished),
        (16, 16, 2)
    );
    assert_eq!(scheduler.cache.used_blocks(), 0);
}

#[test]
fn queue_waits_while_no_block_is_free() {
    let mut scheduler = scheduler(4, 64, 4);
    scheduler.submit(job(1, 0..12, 2));
    scheduler.submit(job(2, 100..112, 1));
    let step = scheduler.plan().unwrap();
    assert_eq!((scheduler.running(), scheduler.waiting()), (1, 1));
    scheduler.complete(&step);
    let steps = run(&mut scheduler);
    assert_eq!(tokens_of(&steps, 2), [2000]);
}

#[test]
fn abort_frees_blocks_but_leaves_them_cached() {
    let mut scheduler = scheduler(32, 64, 1);
    scheduler.submit(job(1, 0..12, 50));
    scheduler.submit(job(2, 0..12, 50));
    let step = scheduler.plan().unwrap();
    scheduler.abort(JobId(1));
    scheduler.abort(JobId(2));
    scheduler.abort(JobId(99));
    assert_eq!(scheduler.complete(&step), []);
    assert_eq!(
        (
            scheduler.running(),
            scheduler.waiting(),
            scheduler.cache.used_blocks()
        ),
        (0, 0, 0)
    );
    assert_eq!(
        (scheduler.cache.cached_blocks(), scheduler.totals().aborted),
        (3, 2)
    );
    assert_eq!(scheduler.plan(), None);
}

/// Runs until a job must fetch blocks. Returns the jobs and their numbers of blocks.
fn fetches(scheduler: &mut StepScheduler) -> Vec<(JobId, usize)> {
    run(scheduler);
    scheduler.take_fetches()
}

#[test]
fn fetched_prompt_computes_one_token() {
    let mut scheduler = scheduler(32, 8, 4);
    scheduler.submit(job(1, 0..9, 1));
    run(&mut scheduler);
    scheduler.cache.take_events();
    // Two of the five blocks are cached. The fifth block is full, because the prompt ends with it.
    scheduler.submit(job(2, 0..20, 3).with_remote_phase(RemotePhase::Prefill));
    assert_eq!(fetches(&mut scheduler), [(JobId(2), 3)]);
    assert_eq!(
        (
            scheduler.waiting(),
            scheduler.running(),
            scheduler.cache.used_blocks()
        ),
        (1, 0, 5)
    );
    assert_eq!(
        scheduler.cache.take_events(),
        [],
        "nothing is stored before the blocks arrive"
    );
    scheduler.received(JobId(2), None);
    let steps = run(&mut scheduler);
    let work: Vec<_> = steps
        .iter()
        .map(|(step, _)| (step.prefill_tokens, step.decoding))
        .collect();
    assert_eq!(work, [(1, 0), (0, 1), (0, 1)]);
    assert_eq!(tokens_of(&steps, 2), [2000, 2001, 2002]);
    assert_eq!(
        steps[0].1[0].cached, 8,
        "only blocks cached before the fetch count as cached"
    );
    let events = scheduler.cache.take_events();
    let [CacheEvent::Stored(stored)] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(
        (stored.tokens.as_slice(), stored.hashes.len()),
        ((8..20).collect::<Vec<_>>().as_slice(), 3)
    );
    let totals = scheduler.totals();
    assert_eq!(
        (
            totals.prefix_hits,
            totals.fetched,
            scheduler.cache.used_blocks()
        ),
        (8, 12, 0)
    );
}

#[test]
fn failed_fetch_releases_its_blocks() {
    let mut scheduler = scheduler(8, 8, 4);
    scheduler.submit(job(1, 0..30, 1).with_remote_phase(RemotePhase::Prefill));
    scheduler.submit(job(2, 100..110, 1));
    assert_eq!(fetches(&mut scheduler), [(JobId(1), 8)]);
    assert_eq!(scheduler.plan(), None, "no block is left for the second");
    scheduler.abort(JobId(1));
    scheduler.received(JobId(1), None);
    assert_eq!(tokens_of(&run(&mut scheduler), 2), [2000]);
    assert_eq!(
        (
            scheduler.totals().aborted,
            scheduler.totals().fetched,
            scheduler.cache.used_blocks()
        ),
        (1, 0, 0)
    );
}

#[test]
fn failed_fetch_recomputes_and_wrong_blocks_change_answer() {
    let mut scheduler = scheduler(8, 64, 4);
    scheduler.submit(job(1, 0..30, 2).with_remote_phase(RemotePhase::Prefill));
    scheduler.submit(job(2, 100..110, 1));
    assert_eq!(fetches(&mut scheduler), [(JobId(1), 8)]);
    scheduler.recompute(JobId(1));
    let steps = run(&mut scheduler);
    assert_eq!(
        (steps[0].0.prefill_tokens, &steps[0].0.jobs[..]),
        (30, &[JobId(1)][..])
    );
    assert_eq!(
        (tokens_of(&steps, 1), tokens_of(&steps, 2)),
        (vec![1000, 1001], vec![2000])
    );
    assert_eq!(
        (
            scheduler.totals().fetched,
            scheduler.totals().prefix_queries
        ),
        (0, 40)
    );

    scheduler.submit(job(3, 200..210, 2).with_remote_phase(RemotePhase::Prefill));
    fetches(&mut scheduler);
    scheduler.received(JobId(3), Some(vec![7, 8]));
    assert_eq!(tokens_of(&run(&mut scheduler), 3), [7, 8]);
    assert_eq!(scheduler.cache.used_blocks(), 0);
}

#[test]
fn leased_blocks_stay_until_released() {
    let mut scheduler = scheduler(8, 16, 4);
    let phase = RemotePhase::Decode {
        name: "a".into(),
        can_be_aborted: false,
    };
    scheduler.submit(job(1, 0..18, 1).with_remote_phase(phase));
    run(&mut scheduler);
    let mut leased = scheduler.take_finished_prefills();
    let [(JobId(1), name, sequence)] = &mut leased[..] else {
        panic!("{leased:?}")
    };
    assert_eq!(
        (&**name, sequence.computed(), sequence.block_numbers()),
        ("a", 18, vec![1, 2, 3, 4, 5])
    );
    assert_eq!((scheduler.running(), scheduler.cache.used_blocks()), (0, 5));
    scheduler.submit(job(2, 100..116, 1));
    assert_eq!(scheduler.plan(), None, "only three blocks are free");
    scheduler.cache.release(sequence);
    assert_eq!(tokens_of(&run(&mut scheduler), 2), [2000]);
}

#[test]
fn only_started_prefill_survives_abort() {
    for (can_be_aborted, has_begun, survives) in [
        (false, false, false),
        (false, true, true),
        (true, false, false),
        (true, true, false),
    ] {
        let mut scheduler = scheduler(8, 8, 4);
        scheduler.submit(job(1, 0..18, 1).with_remote_phase(RemotePhase::Decode {
            name: "a".into(),
            can_be_aborted,
        }));
        if has_begun {
            let step = scheduler.plan().unwrap();
            scheduler.complete(&step);
        }
        scheduler.abort(JobId(1));
        run(&mut scheduler);
        assert_eq!(
            scheduler.take_finished_prefills().len(),
            usize::from(survives),
            "{can_be_aborted}, {has_begun}"
        );
        assert_eq!(scheduler.cache.used_blocks(), if survives { 5 } else { 0 });
    }
}

/// Applies the events to the content.
fn replay(content: &mut BTreeMap<u64, usize>, events: Vec<CacheEvent>) {
    for event in events {
        match event {
            CacheEvent::Stored(stored) => stored
                .hashes
                .iter()
                .for_each(|&hash| *content.entry(hash).or_default() += 1),
            CacheEvent::Removed(hash) => *content.get_mut(&hash).expect("stored before") -= 1,
            CacheEvent::Cleared => content.clear(),
        }
    }
    content.retain(|_, copies| *copies > 0);
}

fn remote_phase() -> impl Strategy<Value = RemotePhase> {
    let remote_decode = |can_be_aborted| {
        Just(RemotePhase::Decode {
            name: "lease".into(),
            can_be_aborted,
        })
    };
    prop_oneof![4 => Just(RemotePhase::None), 2 => Just(RemotePhase::Prefill), 1 => remote_decode(true), 1 => remote_decode(false)]
}

proptest! {
    #![proptest_config(property_config(200))]
    #[test]
    fn random_jobs_get_exact_answers_and_release_blocks(
        jobs in prop::collection::vec((0..3u32, 1..50u32, 1..14u32, 0..6usize, any::<bool>(), remote_phase()), 1..12),
        num_blocks in 16usize..40, budget in 1usize..40, seqs in 1usize..5,
    ) {
        let mut scheduler = scheduler(num_blocks, budget, seqs);
        let mut content = BTreeMap::new();
        let mut got = BTreeMap::<u64, Vec<u32>>::new();
        let mut arrivals: VecDeque<_> = jobs.iter().enumerate().collect();
        let mut fetching = VecDeque::new();
        let mut leased = VecDeque::new();
        let mut pause = 0;
        for round in 0.. {
            prop_assert!(round < 20_000, "no progress");
            if pause == 0 && let Some((id, &(trunk, prompt, answer, wait, _, ref phase))) = arrivals.pop_front() {
                scheduler.submit(job(id as u64, trunk * 10..trunk * 10 + prompt, answer).with_remote_phase(phase.clone()));
                pause = wait;
            }
            pause = pause.saturating_sub(1);
            // Transfers take several rounds.
            if round % 3 == 0 {
                match fetching.pop_front() {
                    // Some transfers fail.
                    Some((id, _)) if round % 2 == 0 => scheduler.recompute(id),
                    Some((id, _)) => scheduler.received(id, None),
                    None => {}
                }
                leased.pop_front().into_iter().for_each(|(_, _, mut blocks)| scheduler.cache.release(&mut blocks));
            }
            let step = scheduler.plan();
            fetching.extend(scheduler.take_fetches());
            let Some(step) = step else {
                if arrivals.is_empty() && fetching.is_empty() && leased.is_empty() { break } else { continue }
            };
            prop_assert!(step.prefill_tokens + step.decoding <= budget);
            prop_assert!(scheduler.running() <= seqs);
            for output in scheduler.complete(&step) {
                let id = output.job.0;
                let prompt = jobs[id as usize].1 as usize;
                prop_assert!(output.cached < prompt && output.cached.is_multiple_of(BLOCK));
                let tokens = got.entry(id).or_default();
                tokens.push(output.token);
                // The client of some jobs disconnects after the third token.
                if jobs[id as usize].4 && tokens.len() == 3 && !output.is_last {
                    scheduler.abort(output.job);
                }
            }
            leased.extend(scheduler.take_finished_prefills());
            replay(&mut content, scheduler.cache.take_events());
            prop_assert_eq!(&content, &scheduler.cache.content());
        }
        prop_assert_eq!((scheduler.running(), scheduler.waiting(), scheduler.cache.used_blocks()), (0, 0, 0));
        for (id, &(_, _, answer, _, disconnects, ref phase)) in jobs.iter().enumerate() {
            let runs_to_end = matches!(phase, RemotePhase::Decode { can_be_aborted: false, .. });
            let expected_len = if disconnects && !runs_to_end { answer.min(3) } else { answer };
            let expected: Vec<u32> = (0..expected_len).map(|at| 1000 * id as u32 + at).collect();
            prop_assert_eq!(got.get(&(id as u64)).cloned().unwrap_or_default(), expected);
        }
    }
}
