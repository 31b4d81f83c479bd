//! What a decision costs, stage by stage, each beside the least that any implementation has to do in the same run: the
//! bare hash of the same bytes, one pass over the same blocks, one pass over as many candidates.

use std::num::NonZeroU32;

use divan::{Bencher, black_box, counter::BytesCount};
use warmroute::block::{BlockHashes, EngineHash, Salt};
use warmroute::fleet::Fleet;
use warmroute::index::{KvEvent, Overlaps, PrefixIndex, RankWriter, StoredBlock};
use warmroute::load::LoadTracker;
use warmroute::router::{Prompt, RouteRequest, Router, RouterSettings};
use warmroute::tier::Tier;
use warmroute::worker::{BlockSize, Endpoint, Slot, Worker, WorkerId};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const BLOCK: BlockSize = BlockSize(NonZeroU32::new(16).expect("16 is not zero"));
const BLOCKS: u32 = 752;

fn main() {
    divan::main();
}

fn tokens(count: u32) -> Vec<u32> {
    (0..count).map(|at| at.wrapping_mul(2_654_435_761) % 150_000).collect()
}

fn hashes() -> BlockHashes {
    BlockHashes::of(&tokens(BLOCKS * 16), BLOCK, &Salt::default())
}

/// An index in which every rank holds the whole prompt; the writers keep it so.
fn warm(ranks: u32) -> (std::sync::Arc<PrefixIndex>, Vec<RankWriter>) {
    let (index, prompt) = (PrefixIndex::new(), hashes());
    let blocks = prompt.locals().iter().zip(prompt.sequences());
    let blocks: Vec<_> =
        blocks.map(|(&local, sequence)| StoredBlock { engine: EngineHash(sequence.0), local }).collect();
    let join = |slot| {
        let mut writer = index.join(Slot(slot));
        writer.apply(&KvEvent::Stored { parent: None, blocks: blocks.clone(), tier: Tier::Device });
        writer
    };
    let writers = (0..ranks).map(join).collect();
    (index, writers)
}

#[divan::bench]
fn hash_32k_tokens(bencher: Bencher<'_, '_>) {
    let tokens = tokens(32_768);
    bencher
        .counter(BytesCount::of_slice(&tokens))
        .bench(|| BlockHashes::of(black_box(&tokens), BLOCK, &Salt::default()));
}

#[divan::bench]
fn limit_bare_xxh3_of_32k_tokens(bencher: Bencher<'_, '_>) {
    let bytes: Vec<u8> = tokens(32_768).into_iter().flat_map(u32::to_le_bytes).collect();
    bencher.counter(BytesCount::of_slice(&bytes)).bench(|| xxh3_64_with_seed(black_box(&bytes), 1337));
}

#[divan::bench]
fn overlaps_of_752_blocks_on_64_ranks(bencher: Bencher<'_, '_>) {
    let ((index, _writers), prompt) = (warm(64), hashes());
    let mut table = Overlaps::new();
    index.overlaps(&prompt, &mut table);
    assert_eq!(table.get(Slot(63)).total(), BLOCKS, "the prompt is found");
    bencher.bench_local(|| index.overlaps(black_box(&prompt), &mut table));
}

#[divan::bench]
fn limit_compare_of_752_blocks(bencher: Bencher<'_, '_>) {
    let (one, other) = (hashes(), hashes());
    bencher.bench(|| black_box(one.locals()) == black_box(other.locals()));
}

fn worker(id: u64) -> Worker {
    let address = std::net::SocketAddr::from(([10, 0, (id >> 8) as u8, id as u8], 8000));
    Worker::new(WorkerId(id), Endpoint(address), "m".into(), BLOCK)
}

#[divan::bench(args = [8, 64, 512])]
fn route_and_release(bencher: Bencher<'_, '_>, ranks: u32) {
    let ((index, _writers), load) = (warm(ranks), LoadTracker::new(std::time::Instant::now));
    let fleet = Fleet::empty().reconcile((0..u64::from(ranks)).map(worker).collect());
    for member in &fleet.added {
        load.open(member.slot, member.rank);
    }
    let router = Router::new(index, load, RouterSettings::default(), 7);
    router.publish(fleet.fleet.into());
    let request = RouteRequest::new(Some("m".into()), Prompt::Hashed(vec![hashes()]));
    let found = router.route(request.clone()).is_ok_and(|booked| booked.route.predicted_cached_tokens > 0);
    assert!(found, "the prompt is found");
    bencher.with_inputs(|| request.clone()).bench_values(|request| router.route(black_box(request)).map(drop));
}

#[divan::bench(args = [8, 64, 512])]
fn limit_flat_scan(bencher: Bencher<'_, '_>, ranks: usize) {
    let costs: Vec<f64> = (0..ranks).map(|at| at as f64).rev().collect();
    bencher.bench(|| black_box(&costs).iter().copied().fold(f64::INFINITY, f64::min));
}
