//! Streaming calls: dumps of the index, changes of the fleet, and their end at shutdown.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::time::{Instant, timeout};
use tonic::transport::Channel;
use tonic::{Code, Streaming};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use warmroute_core::block::{BlockHashes, CacheSalt, EngineHash, LocalHash, StorageTier};
use warmroute_core::index::dump::{DumpReader, VERSION};
use warmroute_core::index::{KvEvent, Overlaps, PrefixIndex, RankWriter, StoredBlock};
use warmroute_core::worker::{BlockSize, RankSlot};
use warmroute_server::proto::router as pb;
use warmroute_server::proto::router::dump_events_response::Kind;
use warmroute_server::proto::router::event::Change;
use warmroute_testbed::ports::PATIENCE;

use crate::api::site::{ApiSite, StubEngine, rank, tokens, worker};

/// Returns the number of device blocks of a worker, as the service reports it.
async fn device(site: &ApiSite, count: u32, worker_id: u64) -> u64 {
    let scores = site.overlaps(tokens(count)).await;
    let score = scores
        .iter()
        .find(|score| score.worker == rank(worker_id))
        .unwrap();
    score.blocks.unwrap().device
}

/// Publishes blocks until they arrive, because a late subscriber misses batches.
async fn store(site: &ApiSite, engine: &mut StubEngine, worker_id: u64, first: u64, count: u32) {
    let deadline = Instant::now() + PATIENCE;
    while device(site, count, worker_id).await != u64::from(count / 4) {
        assert!(Instant::now() < deadline, "the event never arrives");
        engine.store(first, count).await;
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}

/// Reads a whole event dump.
async fn dump(site: &ApiSite, ranks: Vec<pb::WorkerRank>) -> Vec<Kind> {
    let call_request = pb::DumpEventsRequest { ranks };
    let mut stream = site
        .client
        .clone()
        .dump_events(call_request)
        .await
        .unwrap()
        .into_inner();
    let mut kinds = Vec::new();
    while let Some(message) = stream.message().await.unwrap() {
        kinds.push(message.kind.unwrap());
    }
    kinds
}

#[tokio::test]
async fn dump_rebuilds_an_equal_index() {
    let mut engines = [StubEngine::start().await, StubEngine::start().await];
    let workers = [
        worker(1, &engines[0].worker_fields()),
        worker(2, &engines[1].worker_fields()),
        worker(3, ""),
    ];
    let more = "process: {readiness: {event_sources_timeout: 50ms}}\nindex: {approximate: {policy: 'off'}}\n";
    let site = ApiSite::start(more, &workers).await;
    store(&site, &mut engines[0], 1, 100, 48).await;
    store(&site, &mut engines[1], 2, 7, 20).await;

    let (index, _writers) = rebuild(&dump(&site, Vec::new()).await);
    let mut found = Overlaps::new();
    for count in [3, 4, 19, 20, 47, 48, 100] {
        let prompt: Vec<u32> = (0..count).collect();
        index.query_overlaps(
            &BlockHashes::from_tokens(&prompt, BlockSize::new(4).unwrap(), &CacheSalt::default()),
            &mut found,
        );
        for worker in [1, 2, 3] {
            let expected = u64::from(found.get(RankSlot(worker)).device);
            assert_eq!(
                device(&site, count, u64::from(worker)).await,
                expected,
                "{count} tokens on worker {worker}"
            );
        }
    }
    assert_dump_of_ranks(&site).await;
    // Worker 1 is removed.
    let one = dump(&site, rank(2).into_iter().collect()).await;
    site.set_workers(&workers[1..]);
    let gone = |page: &serde_json::Value| {
        page["members"]
            .as_array()
            .is_some_and(|members| members.len() == 2)
    };
    site.until("worker 1 gone", gone, "debug/fleet").await;
    assert_eq!(dump(&site, Vec::new()).await, one);
}

/// Applies the events of a dump to a new index.
fn rebuild(received: &[Kind]) -> (Arc<PrefixIndex>, HashMap<u64, RankWriter>) {
    let index = PrefixIndex::new();
    let mut writers: HashMap<u64, RankWriter> = HashMap::new();
    let mut current = 0;
    let mut events = 0;
    for kind in received {
        match kind {
            Kind::Rank(rank) => {
                assert_eq!((rank.model.as_str(), rank.block_size), ("m", 4));
                current = rank.worker.unwrap().worker_id;
                writers.insert(current, index.create_writer(RankSlot(current as u32)));
            }
            Kind::Event(event) => {
                let event = stored_event(event);
                writers.get_mut(&current).unwrap().apply(&event);
                events += 1;
            }
            Kind::Complete(complete) => assert_eq!((complete.ranks, complete.events), (2, events)),
        }
    }
    assert!(
        matches!(received.last(), Some(Kind::Complete(_))),
        "the last message is `Complete`"
    );
    assert!(events > 0);
    (index, writers)
}

/// Converts a message about blocks of a device, which are all that the engines have stored.
fn stored_event(message: &pb::Event) -> KvEvent {
    let Some(Change::Stored(stored)) = &message.change else {
        panic!("{message:?}")
    };
    assert_eq!(stored.tier(), pb::Tier::Device);
    let block = |block: &pb::StoredBlock| StoredBlock {
        engine: EngineHash(block.engine_hash),
        local: LocalHash(block.local_hash),
    };
    KvEvent::Stored {
        parent: stored.parent.map(EngineHash),
        blocks: stored.blocks.iter().map(block).collect(),
        tier: StorageTier::Device,
    }
}

/// Asserts the dumps of worker 2, and of worker 3, which has no event source.
async fn assert_dump_of_ranks(site: &ApiSite) {
    let one = dump(site, rank(2).into_iter().collect()).await;
    let ranks: Vec<_> = one
        .iter()
        .filter_map(|kind| {
            if let Kind::Rank(rank) = kind {
                rank.worker
            } else {
                None
            }
        })
        .collect();
    assert_eq!(ranks, [rank(2).unwrap()]);
    assert_eq!(
        dump(site, [rank(2), rank(2)].into_iter().flatten().collect()).await,
        one,
        "a rank that is requested twice is sent once"
    );
    let silent = pb::DumpEventsRequest {
        ranks: rank(3).into_iter().collect(),
    };
    assert_eq!(
        site.client
            .clone()
            .dump_events(silent)
            .await
            .unwrap_err()
            .code(),
        Code::NotFound
    );
}

/// Reads the bytes of a rank copy.
async fn copy(site: &ApiSite, worker: u64) -> Result<Vec<u8>, Code> {
    copy_in(site, rank(worker), 0).await
}

async fn copy_in(
    site: &ApiSite,
    worker: Option<pb::WorkerRank>,
    format: u32,
) -> Result<Vec<u8>, Code> {
    let call_request = pb::CopyRankRequest { worker, format };
    let mut stream = site
        .client
        .clone()
        .copy_rank(call_request)
        .await
        .map_err(|status| status.code())?
        .into_inner();
    let mut bytes = Vec::new();
    while let Some(pb::CopyRankResponse { chunk }) = stream.message().await.unwrap() {
        bytes.extend(chunk);
    }
    Ok(bytes)
}

#[tokio::test]
async fn rank_copy_restores_blocks_and_position() {
    let mut engine = StubEngine::start().await;
    let more = "process: {readiness: {event_sources_timeout: 50ms}}\n";
    let site = ApiSite::start(more, &[worker(1, &engine.worker_fields()), worker(2, "")]).await;
    let nothing = copy(&site, 1).await.unwrap();
    assert_eq!(
        DumpReader::new(&nothing[..])
            .unwrap()
            .read_single()
            .unwrap()
            .position(),
        None,
        "no event has arrived yet"
    );
    store(&site, &mut engine, 1, 100, 48).await;
    let bytes = copy(&site, 1).await.unwrap();
    let held = DumpReader::new(&bytes[..]).unwrap().read_single().unwrap();
    let position = held.position().unwrap();
    assert!(position.seq <= engine.last());
    assert_eq!(position.reader_state.block_sizes[0], Some(4));
    let index = PrefixIndex::new();
    let mut writer = index.create_writer(RankSlot(7));
    writer.restore(&held);
    let (prompt, mut found): (Vec<u32>, _) = ((0..48).collect(), Overlaps::new());
    index.query_overlaps(
        &BlockHashes::from_tokens(&prompt, BlockSize::new(4).unwrap(), &CacheSalt::default()),
        &mut found,
    );
    assert_eq!(found.get(RankSlot(7)).device, 12);

    assert_eq!(
        copy(&site, 2).await,
        Err(Code::NotFound),
        "worker 2 has no event source"
    );
    assert_eq!(copy_in(&site, None, 0).await, Err(Code::InvalidArgument));
    assert_eq!(
        copy_in(&site, rank(1), 1).await,
        Err(Code::FailedPrecondition),
        "unsupported format"
    );
    assert!(copy_in(&site, rank(1), u32::from(VERSION)).await.is_ok());
    drop(engine);
    let deadline = Instant::now() + PATIENCE;
    while copy(&site, 1).await != Err(Code::FailedPrecondition) {
        assert!(
            Instant::now() < deadline,
            "a disconnected source is rejected"
        );
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}

fn device_blocks(device: u64) -> Option<pb::Tiers> {
    Some(pb::Tiers {
        device,
        ..pb::Tiers::default()
    })
}

#[tokio::test]
async fn overlap_scores_report_blocks_and_credit() {
    let mut engine = StubEngine::start().await;
    let more = "process: {readiness: {event_sources_timeout: 50ms}}\nrouting: {weights: {overlap_score_credit: 0.5}}\n";
    let site = ApiSite::start(more, &[worker(1, &engine.worker_fields()), worker(2, "")]).await;
    store(&site, &mut engine, 1, 1, 16).await;
    let call_request = pb::OverlapScoresRequest {
        query: Some(tokens(16)),
        ..Default::default()
    };
    let answer = site
        .client
        .clone()
        .overlap_scores(call_request)
        .await
        .unwrap()
        .into_inner();
    assert_eq!((answer.prompt_blocks, answer.block_size), (4, 4));
    let score = |worker, blocks: u64, credit_blocks, cached_tokens| pb::OverlapScore {
        worker: rank(worker),
        blocks: device_blocks(blocks),
        shared_blocks_beyond_device: 0,
        effective_blocks: blocks as f64,
        credit_blocks,
        cached_tokens,
    };
    // The engine always computes the last token, so it can reuse 3 of the 4 cached blocks.
    assert_eq!(answer.ranks, [score(1, 4, 2.0, 12), score(2, 0, 0.0, 0)]);
    // The same query with the hashes that `Route` returned.
    let received = site
        .route(pb::RouteRequest {
            query: Some(tokens(16)),
            ..pb::RouteRequest::default()
        })
        .await
        .unwrap();
    assert_eq!(received.decode.unwrap().worker, rank(1));
    let blocks = pb::BlockHashes {
        local_hashes: received.prompts[0].local_hashes.clone(),
        sequence_hashes: received.prompts[0].sequence_hashes.clone(),
        isl_tokens: 16,
    };
    let prompt = Some(pb::prompt_query::Prompt::Blocks(blocks));
    assert_eq!(
        site.overlaps(pb::PromptQuery {
            prompt,
            ..pb::PromptQuery::default()
        })
        .await,
        answer.ranks
    );
    assert_other_caches_are_empty(&site).await;
}

/// Asserts that another adapter and another tenant have separate caches.
async fn assert_other_caches_are_empty(site: &ApiSite) {
    for query in [
        pb::PromptQuery {
            model: "tuned".into(),
            ..tokens(16)
        },
        pb::PromptQuery {
            adapter: "tuned".into(),
            ..tokens(16)
        },
        pb::PromptQuery {
            cache_salt: "tenant".into(),
            ..tokens(16)
        },
    ] {
        assert!(
            site.overlaps(query)
                .await
                .iter()
                .all(|score| score.blocks == device_blocks(0))
        );
    }
}

/// Returns the worker ids of the next snapshot.
async fn ids(fleet: &mut Streaming<pb::WatchFleetResponse>) -> Option<Vec<u64>> {
    let snapshot = timeout(PATIENCE, fleet.message()).await.unwrap().unwrap()?;
    Some(snapshot.workers.iter().map(|worker| worker.id).collect())
}

#[tokio::test]
async fn watch_reports_fleet_changes_and_shutdown() {
    let more = ", role: decode, taints: [fast], total_kv_blocks: 9, topology: {zone: a}, \
    data_parallel: {size: 2}";
    let site = ApiSite::start("", &[worker(1, more)]).await;
    let watch = |model: &str| pb::WatchFleetRequest {
        model: model.to_owned(),
    };
    let mut fleet = site
        .client
        .clone()
        .watch_fleet(watch(""))
        .await
        .unwrap()
        .into_inner();
    let first = timeout(PATIENCE, fleet.message())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    let expected = pb::Worker {
        id: 1,
        endpoint: "10.0.0.1:8000".into(),
        model: "m".into(),
        role: pb::Role::Decode.into(),
        block_size: 4,
        first_dp_rank: 0,
        dp_ranks: 2,
        taints: vec!["fast".into()],
        adapters: vec![],
        topology: [("zone".to_owned(), "a".to_owned())].into(),
        max_num_batched_tokens: None,
        total_kv_blocks: Some(9),
    };
    assert_eq!((first.generation, first.workers), (1, vec![expected]));
    site.set_workers(&[worker(1, more), worker(2, "")]);
    assert_eq!(ids(&mut fleet).await, Some(vec![1, 2]));
    let mut late = site
        .client
        .clone()
        .watch_fleet(watch("alias"))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        ids(&mut late).await,
        Some(vec![1, 2]),
        "a later watcher receives the whole fleet"
    );
    site.set_workers(&[worker(2, "")]);
    assert_eq!(
        (ids(&mut fleet).await, ids(&mut late).await),
        (Some(vec![2]), Some(vec![2]))
    );
    let Err(unknown) = site.client.clone().watch_fleet(watch("other")).await else {
        panic!("no such model")
    };
    assert_eq!(unknown.code(), Code::NotFound);
    // Open streams do not delay the shutdown.
    site.stop();
    assert_eq!((ids(&mut fleet).await, ids(&mut late).await), (None, None));
    drop((fleet, late));
    site.end().await;
}

#[tokio::test]
async fn number_of_watchers_is_limited() {
    let site = ApiSite::plain().await;
    let mut client = site.client.clone();
    let all = pb::WatchFleetRequest::default();
    let mut watching = Vec::new();
    let refused = loop {
        match client.watch_fleet(all.clone()).await {
            Ok(stream) => watching.push(stream),
            Err(status) => break status,
        }
    };
    assert_eq!(
        (watching.len(), refused.code()),
        (256, Code::ResourceExhausted)
    );
    drop(watching.pop());
    let deadline = Instant::now() + PATIENCE;
    while client.watch_fleet(all.clone()).await.is_err() {
        assert!(
            Instant::now() < deadline,
            "the closed stream does not count"
        );
    }
}

#[tokio::test]
async fn health_service_is_offered_beside_router() {
    let site = ApiSite::plain().await;
    let channel = Channel::from_shared(format!("http://{}", site.api.unwrap()))
        .unwrap()
        .connect()
        .await
        .unwrap();
    let call_request = HealthCheckRequest {
        service: "warmroute.v1.Router".into(),
    };
    let health = HealthClient::new(channel)
        .check(call_request)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(health.status(), ServingStatus::Serving);
}
