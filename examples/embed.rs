//! The router as a library: no server, no Envoy, no clock of its own. A fleet, an index that hears what engines cache, and
//! the load; then a request is routed, its first token comes, and dropping what it holds releases it.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use warmroute::block::{BlockHashes, EngineHash, Salt};
use warmroute::fleet::Fleet;
use warmroute::index::{KvEvent, PrefixIndex, StoredBlock};
use warmroute::load::LoadTracker;
use warmroute::router::{Prompt, RouteRequest, Router, RouterSettings};
use warmroute::tier::Tier;
use warmroute::trust::Standing;
use warmroute::worker::{BlockSize, Endpoint, Worker, WorkerId};

#[expect(clippy::print_stdout, reason = "a program that shows something")]
fn main() -> anyhow::Result<()> {
    let block_size = BlockSize::new(16).context("blocks hold something")?;
    let worker = |id: u64| {
        let endpoint = Endpoint(([10, 0, 0, id as u8], 8000).into());
        Worker::new(WorkerId(id), endpoint, "m".into(), block_size)
    };
    let (index, load) = (PrefixIndex::new(), LoadTracker::new(Instant::now));
    let router = Router::new(index.clone(), load.clone(), RouterSettings::default(), 1);
    let change = Fleet::empty().reconcile((1..=4).map(worker).collect());
    change
        .added
        .iter()
        .for_each(|member| load.open(member.slot, member.rank));
    router.publish(Arc::new(change.fleet));

    // Worker 3 says that it has cached the first six blocks of the prompt.
    let hashes = BlockHashes::of(
        &(0..130).collect::<Vec<u32>>(),
        block_size,
        &Salt::default(),
    );
    let warm = change
        .added
        .iter()
        .find(|member| member.rank.worker == WorkerId(3))
        .context("it was added")?;
    let mut writer = index.join(warm.slot);
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
        tier: Tier::Device,
    });
    router.set_trust(warm.rank, Standing::EXACT);

    let mut booked = router.route(RouteRequest::new(
        Some("m".into()),
        Prompt::Hashed(vec![hashes]),
    ))?;
    let loaded = || {
        load.snapshot()
            .into_iter()
            .find(|load| load.rank == warm.rank)
    };
    println!("routed: {}", booked.route.short());
    println!("booked: {:?}", loaded());
    booked.reservation.first_token();
    println!("first token: {:?}", loaded());
    drop(booked);
    println!("ended: {:?}", loaded());
    Ok(())
}
