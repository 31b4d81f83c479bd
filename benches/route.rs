//! What a decision costs, stage by stage, each beside the least that any implementation has to do in the same run: the
//! bare hash of the same bytes, one pass over the same blocks, one pass over as many candidates.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use divan::{Bencher, black_box, counter::BytesCount};
use warmroute::block::{BlockHashes, EngineHash, Salt};
use warmroute::fleet::Fleet;
use warmroute::index::{KvEvent, Overlaps, PrefixIndex, RankWriter, StoredBlock};
use warmroute::lifecycle::Readiness;
use warmroute::load::LoadTracker;
use warmroute::metrics::Metrics;
use warmroute::remote_index::config::RemoteIndexConfig;
use warmroute::remote_index::{Asker, Parts, Question, ServedIndex, ServedModel};
use warmroute::router::{Prompt, Remote, RouteRequest, Router, RouterSettings};
use warmroute::settings::Period;
use warmroute::tier::Tier;
use warmroute::worker::{BlockSize, Endpoint, ModelName, Slot, Worker, WorkerId};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const BLOCK: BlockSize = BlockSize(NonZeroU32::new(16).expect("16 is not zero"));
const BLOCKS: u32 = 752;

fn main() {
    divan::main();
}

fn tokens(count: u32) -> Vec<u32> {
    (0..count)
        .map(|at| at.wrapping_mul(2_654_435_761) % 150_000)
        .collect()
}

fn hashes() -> BlockHashes {
    BlockHashes::of(&tokens(BLOCKS * 16), BLOCK, &Salt::default())
}

/// An index in which every rank holds the whole prompt; the writers keep it so.
fn warm(ranks: u32) -> (std::sync::Arc<PrefixIndex>, Vec<RankWriter>) {
    let (index, prompt) = (PrefixIndex::new(), hashes());
    let blocks = prompt.locals().iter().zip(prompt.sequences());
    let blocks: Vec<_> = blocks
        .map(|(&local, sequence)| StoredBlock {
            engine: EngineHash(sequence.0),
            local,
        })
        .collect();
    let join = |slot| {
        let mut writer = index.join(Slot(slot));
        writer.apply(&KvEvent::Stored {
            parent: None,
            blocks: blocks.clone(),
            tier: Tier::Device,
        });
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
    let bytes: Vec<u8> = tokens(32_768)
        .into_iter()
        .flat_map(u32::to_le_bytes)
        .collect();
    bencher
        .counter(BytesCount::of_slice(&bytes))
        .bench(|| xxh3_64_with_seed(black_box(&bytes), 1337));
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
    let found = router
        .route(request.clone())
        .is_ok_and(|booked| booked.route.predicted_cached_tokens > 0);
    assert!(found, "the prompt is found");
    bencher
        .with_inputs(|| request.clone())
        .bench_values(|request| router.route(black_box(request)).map(drop));
}

#[divan::bench(args = [8, 64, 512])]
fn limit_flat_scan(bencher: Bencher<'_, '_>, ranks: usize) {
    let costs: Vec<f64> = (0..ranks).map(|at| at as f64).rev().collect();
    bencher.bench(|| {
        black_box(&costs)
            .iter()
            .copied()
            .fold(f64::INFINITY, f64::min)
    });
}

/// How many ranks hold the prompt, whatever their number.
const HOLD_IT: u32 = 64;
/// Tokens of the prompt, and ranks.
const QUESTIONS: [(u32, u32); 4] = [(1024, 64), (32_768, 64), (1024, 4096), (32_768, 4096)];

/// A router whose index holds the prompt on some ranks.
fn keeper((tokens_of, ranks): (u32, u32)) -> (Router, Vec<RankWriter>, BlockHashes) {
    let (index, load) = (
        PrefixIndex::new(),
        LoadTracker::new(std::time::Instant::now),
    );
    let prompt = BlockHashes::of(&tokens(tokens_of), BLOCK, &Salt::default());
    let fleet = Fleet::empty().reconcile((0..u64::from(ranks)).map(worker).collect());
    let blocks = prompt.locals().iter().zip(prompt.sequences());
    let blocks: Vec<_> = blocks
        .map(|(&local, sequence)| StoredBlock {
            engine: EngineHash(sequence.0),
            local,
        })
        .collect();
    let join = |slot: u32| {
        let mut writer = index.join(Slot(slot));
        if slot.is_multiple_of(ranks / HOLD_IT) {
            writer.apply(&KvEvent::Stored {
                parent: None,
                blocks: blocks.clone(),
                tier: Tier::Device,
            });
        }
        writer
    };
    let writers = (0..ranks).map(join).collect();
    let router = Router::new(index, load, RouterSettings::default(), 7);
    router.publish(fleet.fleet.into());
    (router, writers, prompt)
}

/// Beside the question below: the same from an index of one's own.
#[divan::bench(args = QUESTIONS)]
fn overlaps_of_own_index(bencher: Bencher<'_, '_>, question: (u32, u32)) {
    let (router, _writers, prompt) = keeper(question);
    let mut table = Overlaps::new();
    bencher.bench_local(|| router.index().overlaps(black_box(&prompt), &mut table));
}

/// A question to a server on the same machine, encoded, sent, answered and read.
#[divan::bench(args = QUESTIONS)]
fn overlaps_of_a_remote_index(bencher: Bencher<'_, '_>, question: (u32, u32)) {
    let (router, _writers, prompt) = keeper(question);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let runtime = runtime.expect("a runtime");
    let asker = runtime.block_on(async {
        let parts = Parts {
            router: Arc::new(router),
            find: Box::new(|_| {
                Some(ServedModel {
                    name: "m".into(),
                    block_size: BLOCK,
                    hashing: 1,
                })
            }),
            readiness: Readiness::default(),
            metrics: Arc::new(Metrics::new()),
            most_blocks: 1 << 17,
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let incoming =
            tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
        let server =
            tonic::transport::Server::builder().add_service(ServedIndex::new(parts).server());
        tokio::spawn(server.serve_with_incoming(incoming));
        let settings = RemoteIndexConfig {
            deadline: Period(Duration::from_secs(5)),
            ..RemoteIndexConfig::of([url])
        };
        Asker::new(&settings, Arc::new(Metrics::new())).expect("an address")
    });
    let (model, prompts) = (ModelName::from("m"), [prompt]);
    let ask = || {
        let question = Question {
            model: Some(&model),
            hashing: 1,
            prompts: black_box(&prompts),
        };
        match runtime.block_on(asker.ask(question)) {
            Remote::Told(answer) => answer,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(
        ask().prompts[0].len(),
        HOLD_IT as usize,
        "the prompt is found"
    );
    bencher.bench_local(ask);
}
