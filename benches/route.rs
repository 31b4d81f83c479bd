//! Cost of a decision by stage. The same run measures the minimum for any implementation: the bare
//! hash of the same bytes, one pass over the same blocks, and one pass over as many candidates.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use warmroute_core::block::{BlockHashes, CacheSalt, EngineHash, StorageTier};
use warmroute_core::fleet::Fleet;
use warmroute_core::index::{KvEvent, Overlaps, PrefixIndex, RankWriter, StoredBlock};
use warmroute_core::load::LoadTracker;
use warmroute_core::policy::{PolicyName, PolicySettings, Weights};
use warmroute_core::router::{RemoteOverlaps, RoutePrompt, RouteRequest, Router, RouterSettings};
use warmroute_core::worker::{BlockSize, ModelName, RankSlot, Worker, WorkerEndpoint, WorkerId};
use warmroute_metrics::Metrics;
use warmroute_runtime::lifecycle::Readiness;
use warmroute_server::cluster::remote_index::config::RemoteIndexConfig;
use warmroute_server::cluster::remote_index::{
    IndexService, IndexServiceParts, IndexedModel, OverlapQuery, RemoteIndexClient,
};
use warmroute_settings::DurationSetting;
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
    BlockHashes::from_tokens(&tokens(BLOCKS * 16), BLOCK, &CacheSalt::default())
}

/// Returns an index in which every rank holds the whole prompt, with its writers.
fn full_index(ranks: u32) -> (std::sync::Arc<PrefixIndex>, Vec<RankWriter>) {
    let index = PrefixIndex::new();
    let prompt = hashes();
    let blocks = prompt.locals().iter().zip(prompt.sequences());
    let blocks: Vec<_> = blocks
        .map(|(&local, sequence)| StoredBlock {
            engine: EngineHash(sequence.0),
            local,
        })
        .collect();
    let join = |slot| {
        let mut writer = index.create_writer(RankSlot(slot));
        writer.apply(&KvEvent::Stored {
            parent: None,
            blocks: blocks.clone(),
            tier: StorageTier::Device,
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
        .bench(|| BlockHashes::from_tokens(black_box(&tokens), BLOCK, &CacheSalt::default()));
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
    let (index, _writers) = full_index(64);
    let prompt = hashes();
    let mut table = Overlaps::new();
    index.query_overlaps(&prompt, &mut table);
    assert_eq!(
        table.get(RankSlot(63)).total(),
        BLOCKS,
        "the prompt is found"
    );
    bencher.bench_local(|| index.query_overlaps(black_box(&prompt), &mut table));
}

#[divan::bench]
fn limit_compare_of_752_blocks(bencher: Bencher<'_, '_>) {
    let one = hashes();
    let other = hashes();
    bencher.bench(|| black_box(one.locals()) == black_box(other.locals()));
}

fn worker(id: u64) -> Worker {
    let address = std::net::SocketAddr::from(([10, 0, (id >> 8) as u8, id as u8], 8000));
    Worker::new(WorkerId(id), WorkerEndpoint(address), "m".into(), BLOCK)
}

#[divan::bench(args = [8, 64, 512])]
fn route_and_release(bencher: Bencher<'_, '_>, ranks: u32) {
    let (index, _writers) = full_index(ranks);
    let load = LoadTracker::new(std::time::Instant::now);
    let fleet = Fleet::empty().reconcile((0..u64::from(ranks)).map(worker).collect());
    for member in &fleet.added {
        load.join(member);
    }
    let router = Router::new(index, load, RouterSettings::default(), 7);
    router.set_fleet(fleet.fleet.into());
    let request = RouteRequest::new(Some("m".into()), RoutePrompt::Hashed(vec![hashes()]));
    let found = router
        .route(request.clone())
        .is_ok_and(|booked| booked.route.predicted_cached_tokens > 0);
    assert!(found, "the prompt is found");
    bencher
        .with_inputs(|| request.clone())
        .bench_values(|request| router.route(black_box(request)).map(drop));
}

/// Routes a prompt that a quarter of the ranks hold, while each rank computes two others.
fn route_with_policy(bencher: Bencher<'_, '_>, ranks: u32, name: PolicyName) {
    let (index, _writers) = full_index(ranks / 4);
    let load = LoadTracker::new(std::time::Instant::now);
    let fleet = Fleet::empty().reconcile((0..u64::from(ranks)).map(worker).collect());
    for member in &fleet.added {
        load.join(member);
    }
    let settings = RouterSettings {
        policy: PolicySettings::named(name, &Weights::default()),
        ..RouterSettings::default()
    };
    let router = Router::new(index, load, settings, 7);
    router.set_fleet(fleet.fleet.into());
    let other = |number: u32| {
        let tokens: Vec<u32> = (0..320).map(|at| number * 320 + at).collect();
        let prompt = BlockHashes::from_tokens(&tokens, BLOCK, &CacheSalt::default());
        RouteRequest::new(Some("m".into()), RoutePrompt::Hashed(vec![prompt]))
    };
    let _running: Vec<_> = (0..2 * ranks)
        .filter_map(|number| router.route(other(number)).ok())
        .collect();
    let request = RouteRequest::new(Some("m".into()), RoutePrompt::Hashed(vec![hashes()]));
    bencher
        .with_inputs(|| request.clone())
        .bench_values(|request| router.route(black_box(request)).map(drop));
}

#[divan::bench(args = [16, 256, 4096])]
fn route_with_linear(bencher: Bencher<'_, '_>, ranks: u32) {
    route_with_policy(bencher, ranks, PolicyName::LinearTuned);
}

#[divan::bench(args = [16, 256, 4096])]
fn route_with_seconds(bencher: Bencher<'_, '_>, ranks: u32) {
    route_with_policy(bencher, ranks, PolicyName::Seconds);
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

/// Number of ranks that hold the prompt.
const HOLDERS: u32 = 64;
/// Size of a query.
#[derive(Clone, Copy, Debug)]
struct QuerySize {
    /// Tokens of the prompt.
    tokens: u32,
    ranks: u32,
}

impl std::fmt::Display for QuerySize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "({}, {})", self.tokens, self.ranks)
    }
}

const QUERY_SIZES: [QuerySize; 4] = [
    QuerySize {
        tokens: 1024,
        ranks: 64,
    },
    QuerySize {
        tokens: 32_768,
        ranks: 64,
    },
    QuerySize {
        tokens: 1024,
        ranks: 4096,
    },
    QuerySize {
        tokens: 32_768,
        ranks: 4096,
    },
];

/// Returns a router with an index in which some ranks hold the prompt.
fn index_router(size: QuerySize) -> (Router, Vec<RankWriter>, BlockHashes) {
    let ranks = size.ranks;
    let index = PrefixIndex::new();
    let load = LoadTracker::new(std::time::Instant::now);
    let prompt = BlockHashes::from_tokens(&tokens(size.tokens), BLOCK, &CacheSalt::default());
    let fleet = Fleet::empty().reconcile((0..u64::from(ranks)).map(worker).collect());
    let blocks = prompt.locals().iter().zip(prompt.sequences());
    let blocks: Vec<_> = blocks
        .map(|(&local, sequence)| StoredBlock {
            engine: EngineHash(sequence.0),
            local,
        })
        .collect();
    let join = |slot: u32| {
        let mut writer = index.create_writer(RankSlot(slot));
        if slot.is_multiple_of(ranks / HOLDERS) {
            writer.apply(&KvEvent::Stored {
                parent: None,
                blocks: blocks.clone(),
                tier: StorageTier::Device,
            });
        }
        writer
    };
    let writers = (0..ranks).map(join).collect();
    let router = Router::new(index, load, RouterSettings::default(), 7);
    router.set_fleet(fleet.fleet.into());
    (router, writers, prompt)
}

/// Runs the same query on a local index, for comparison with the next row.
#[divan::bench(args = QUERY_SIZES)]
fn overlaps_of_own_index(bencher: Bencher<'_, '_>, size: QuerySize) {
    let (router, _writers, prompt) = index_router(size);
    let mut table = Overlaps::new();
    bencher.bench_local(|| {
        router
            .index()
            .query_overlaps(black_box(&prompt), &mut table)
    });
}

/// Queries an index server on the same machine: the query is encoded, sent, answered and decoded.
#[divan::bench(args = QUERY_SIZES)]
fn overlaps_of_a_remote_index(bencher: Bencher<'_, '_>, size: QuerySize) {
    let (router, _writers, prompt) = index_router(size);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let runtime = runtime.expect("a runtime");
    let client = runtime.block_on(async {
        let parts = IndexServiceParts {
            router: Arc::new(router),
            find_model: Box::new(|_| {
                Some(IndexedModel {
                    name: "m".into(),
                    block_size: BLOCK,
                    hashing: 1,
                })
            }),
            readiness: Readiness::default(),
            metrics: Arc::new(Metrics::new()),
            max_blocks: 1 << 17,
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let incoming =
            tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
        let server =
            tonic::transport::Server::builder().add_service(IndexService::new(parts).server());
        tokio::spawn(server.serve_with_incoming(incoming));
        let settings = RemoteIndexConfig {
            timeout: DurationSetting(Duration::from_secs(5)),
            ..RemoteIndexConfig::with_servers([url])
        };
        RemoteIndexClient::new(&settings, Arc::new(Metrics::new())).expect("an address")
    });
    let model = ModelName::from("m");
    let prompts = [prompt];
    let query = || {
        let query = OverlapQuery {
            model: Some(&model),
            hashing: 1,
            prompts: black_box(&prompts),
        };
        match runtime.block_on(client.query(query)) {
            RemoteOverlaps::Received(overlaps) => overlaps,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(
        query().prompts[0].len(),
        HOLDERS as usize,
        "the prompt is found"
    );
    bencher.bench_local(query);
}
