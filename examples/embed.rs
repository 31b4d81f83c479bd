//! The router as a library, without a server, Envoy or a clock. It uses a fleet, an index that
//! receives cache events, and the load tracker. A request is routed, its first token arrives, and
//! dropping its route releases it.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use warmroute_core::block::{BlockHashes, CacheSalt, EngineHash, StorageTier};
use warmroute_core::fleet::Fleet;
use warmroute_core::freshness::SourceStatus;
use warmroute_core::index::{KvEvent, PrefixIndex, StoredBlock};
use warmroute_core::load::LoadTracker;
use warmroute_core::router::{RoutePrompt, RouteRequest, Router, RouterSettings};
use warmroute_core::worker::{BlockSize, Worker, WorkerEndpoint, WorkerId};

#[expect(clippy::print_stdout, reason = "a program that shows something")]
fn main() -> anyhow::Result<()> {
    let block_size = BlockSize::new(16).context("blocks hold something")?;
    let worker = |id: u64| {
        let endpoint = WorkerEndpoint(([10, 0, 0, id as u8], 8000).into());
        Worker::new(WorkerId(id), endpoint, "m".into(), block_size)
    };
    let index = PrefixIndex::new();
    let load = LoadTracker::new(Instant::now);
    let router = Router::new(index.clone(), load.clone(), RouterSettings::default(), 1);
    let change = Fleet::empty().reconcile((1..=4).map(worker).collect());
    change
        .added
        .iter()
        .for_each(|member| load.open_slot(member.slot, member.rank, &member.worker.model));
    router.set_fleet(Arc::new(change.fleet));

    // Worker 3 reports that it has cached the first six blocks of the prompt.
    let hashes = BlockHashes::from_tokens(
        &(0..130).collect::<Vec<u32>>(),
        block_size,
        &CacheSalt::default(),
    );
    let warm = change
        .added
        .iter()
        .find(|member| member.rank.worker == WorkerId(3))
        .context("it was added")?;
    let mut writer = index.create_writer(warm.slot);
    let blocks = hashes
        .locals()
        .iter()
        .zip(100..)
        .map(|(&local, name)| StoredBlock {
            engine: EngineHash(name),
            local,
        });
    writer.apply(&KvEvent::Stored {
        parent: None,
        blocks: blocks.take(6).collect(),
        tier: StorageTier::Device,
    });
    router.set_source_status(warm.rank, SourceStatus::EXACT);

    let mut booked = router.route(RouteRequest::new(
        Some("m".into()),
        RoutePrompt::Hashed(vec![hashes]),
    ))?;
    let loaded = || {
        load.snapshot()
            .into_iter()
            .find(|load| load.rank == warm.rank)
    };
    println!("routed: {}", booked.route.summary_line());
    println!("booked: {:?}", loaded());
    booked.reservation.on_first_token();
    println!("first token: {:?}", loaded());
    drop(booked);
    println!("ended: {:?}", loaded());
    Ok(())
}
