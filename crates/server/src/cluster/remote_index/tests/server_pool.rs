//! Tests of queries to several servers: failover, hedging, deadlines and limits.

use super::*;
use crate::cluster::remote_index::client::MAX_CONCURRENCY;

/// Server of an index in which worker 1 holds three blocks.
struct TestIndexServer {
    router: Arc<Router>,
    readiness: Readiness,
    url: String,
    _writer: RankWriter,
}

impl TestIndexServer {
    async fn start() -> Self {
        let router = Arc::new(router(3, 1));
        let mut writer = router
            .index()
            .create_writer(router.fleet().slot(rank(1)).unwrap());
        writer.apply(&stored(&[1, 2, 3], StorageTier::Device));
        router.set_source_status(rank(1), SourceStatus::EXACT);
        let readiness = Readiness::default();
        let find = |name: Option<&str>| {
            let found = IndexedModel {
                name: MODEL.into(),
                block_size: size(),
                hashing: HASHING,
            };
            Some(found).filter(|_| name.is_none_or(|name| name == MODEL))
        };
        let parts = IndexServiceParts {
            router: router.clone(),
            find_model: Box::new(find),
            readiness: readiness.clone(),
            metrics: Arc::new(Metrics::new()),
            max_blocks: 100,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let service = Server::builder().add_service(IndexService::new(parts).server());
        tokio::spawn(service.serve_with_incoming(TcpListenerStream::new(listener)));
        Self {
            router,
            readiness,
            url,
            _writer: writer,
        }
    }
}

/// Starts a server that accepts connections but never responds.
async fn start_silent_server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let mut connections: Vec<TcpStream> = Vec::new();
        while let Ok((connection, _)) = listener.accept().await {
            connections.push(connection);
        }
    });
    url
}

/// Returns a client of these servers, with a timeout that no test reaches.
fn client(servers: &[&str]) -> (RemoteIndexClient, Arc<Metrics>) {
    let metrics = Arc::new(Metrics::new());
    let servers = servers.iter().map(|url| (*url).to_owned());
    let settings = RemoteIndexConfig {
        timeout: DurationSetting::seconds(30),
        ..RemoteIndexConfig::with_servers(servers)
    };
    (
        RemoteIndexClient::new(&settings, metrics.clone()).unwrap(),
        metrics,
    )
}

async fn query_overlaps(
    client: &RemoteIndexClient,
    hashing: u64,
    locals: &[u64],
) -> RemoteOverlaps {
    let model = ModelName::from(MODEL);
    client
        .query(OverlapQuery {
            model: Some(&model),
            hashing,
            prompts: &[hashes(locals)],
        })
        .await
}

fn expect_answer(remote: RemoteOverlaps) -> Arc<RemoteAnswer> {
    match remote {
        RemoteOverlaps::Received(answer) => answer,
        other => panic!("{other:?}"),
    }
}

fn outcome_count(metrics: &Metrics, outcome: &'static str) -> u64 {
    metrics
        .index
        .remote_queries
        .get_or_create(&OutcomeLabel { outcome })
        .get()
}

#[tokio::test]
async fn ranks_are_sent_only_when_changed() {
    let server = TestIndexServer::start().await;
    let (client, metrics) = client(&[&server.url]);
    let first = expect_answer(query_overlaps(&client, HASHING, &[1, 2, 9]).await);
    assert_eq!(
        first.prompts,
        [vec![(
            rank(1),
            TierBlocks {
                device: 2,
                ..TierBlocks::default()
            }
        )]]
    );
    assert_eq!(
        first.ranks.rows(),
        [RemoteRank {
            rank: rank(1),
            status: SourceStatus::EXACT,
            has_cache_groups: false
        }]
    );
    let second = expect_answer(query_overlaps(&client, HASHING, &[]).await);
    assert!(
        Arc::ptr_eq(&first.ranks, &second.ranks),
        "unchanged ranks were sent again"
    );
    assert_eq!(second.prompts, [Vec::new()]);
    server.router.set_source_status(rank(2), source_status(4));
    let third = expect_answer(query_overlaps(&client, HASHING, &[1]).await);
    assert_eq!(third.ranks.rows()[1].status, source_status(4));
    server
        .router
        .set_source_status(rank(2), SourceStatus::default());
    assert_eq!(
        expect_answer(query_overlaps(&client, HASHING, &[1]).await)
            .ranks
            .rows(),
        first.ranks.rows()
    );
    assert_eq!(outcome_count(&metrics, "answered"), 4);
}

#[tokio::test]
async fn incompatible_blocks_are_refused() {
    let server = TestIndexServer::start().await;
    let (client, metrics) = client(&[&server.url]);
    assert!(
        matches!(
            query_overlaps(&client, HASHING + 1, &[1, 2]).await,
            RemoteOverlaps::Unavailable(_)
        ),
        "different hashing"
    );
    let model = ModelName::from(MODEL);
    let other = [BlockHashes::from_locals(
        16,
        BlockSize::new(8).unwrap(),
        vec![LocalHash(1), LocalHash(2)],
    )];
    let query = OverlapQuery {
        model: Some(&model),
        hashing: HASHING,
        prompts: &other,
    };
    assert!(
        matches!(client.query(query).await, RemoteOverlaps::Unavailable(_)),
        "different block size"
    );
    let other_model = ModelName::from("other");
    let query = OverlapQuery {
        model: Some(&other_model),
        hashing: HASHING,
        prompts: &[hashes(&[1])],
    };
    assert!(
        matches!(client.query(query).await, RemoteOverlaps::Unavailable(_)),
        "unknown model"
    );
    assert!(
        matches!(
            query_overlaps(&client, HASHING, &[1; 101]).await,
            RemoteOverlaps::Unavailable(_)
        ),
        "too many blocks"
    );
    assert_eq!(outcome_count(&metrics, "incompatible"), 4);
    expect_answer(query_overlaps(&client, HASHING, &[1; 100]).await);
    assert_eq!(
        client.status()[0]["available"],
        true,
        "a refusal ejected the server"
    );
}

#[tokio::test]
async fn unready_server_is_replaced_at_once() {
    let server = TestIndexServer::start().await;
    let other = TestIndexServer::start().await;
    let pending = server.readiness.begin_step("test step");
    let (client, metrics) = client(&[&server.url, &other.url]);
    for _ in 0..4 {
        expect_answer(query_overlaps(&client, HASHING, &[1]).await);
    }
    assert_eq!(
        (
            client.status()[0]["available"].clone(),
            outcome_count(&metrics, "answered")
        ),
        (false.into(), 4)
    );
    other.readiness.drain();
    assert!(matches!(
        query_overlaps(&client, HASHING, &[1]).await,
        RemoteOverlaps::Unavailable(_)
    ));
    assert_eq!(outcome_count(&metrics, "failed"), 1);
    assert!(matches!(
        query_overlaps(&client, HASHING, &[1]).await,
        RemoteOverlaps::Unavailable(_)
    ));
    assert_eq!(outcome_count(&metrics, "no_server"), 1);
    // The background task probes the server.
    let readmission = async {
        while !matches!(
            query_overlaps(&client, HASHING, &[1]).await,
            RemoteOverlaps::Received(_)
        ) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        never = client.run_probes() => match never {},
        () = tokio::time::sleep(Duration::from_millis(1500)) => {}
        () = readmission => panic!("an unready server was readmitted"),
    }
    drop(pending);
    let readmission = async {
        while !matches!(
            query_overlaps(&client, HASHING, &[1]).await,
            RemoteOverlaps::Received(_)
        ) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        never = client.run_probes() => match never {},
        () = tokio::time::sleep(Duration::from_secs(30)) => panic!("the server was not readmitted"),
        () = readmission => {}
    }
    assert_eq!(
        (
            client.status()[0]["available"].clone(),
            client.status()[1]["available"].clone()
        ),
        (true.into(), false.into())
    );
}

#[tokio::test]
async fn oversized_query_ejects_no_server() {
    let server = TestIndexServer::start().await;
    let (client, metrics) = client(&[&server.url]);
    let long_prompt: Vec<u64> = (0..20_000).collect();
    assert!(matches!(
        query_overlaps(&client, HASHING, &long_prompt).await,
        RemoteOverlaps::Unavailable(_)
    ));
    let model = ModelName::from(MODEL);
    let prompts: Vec<BlockHashes> = (0..65).map(|local| hashes(&[local])).collect();
    let query = OverlapQuery {
        model: Some(&model),
        hashing: HASHING,
        prompts: &prompts,
    };
    assert!(matches!(
        client.query(query).await,
        RemoteOverlaps::Unavailable(_)
    ));
    assert_eq!(outcome_count(&metrics, "incompatible"), 2);
    expect_answer(query_overlaps(&client, HASHING, &[1]).await);
}

#[tokio::test]
async fn silent_server_costs_one_hedge_then_is_ejected() {
    let server = TestIndexServer::start().await;
    let silent_url = start_silent_server().await;
    let (client, metrics) = client(&[&silent_url, &server.url]);
    for _ in 0..40 {
        expect_answer(query_overlaps(&client, HASHING, &[1]).await);
    }
    assert_eq!(client.status()[0]["available"], false);
    let hedged = outcome_count(&metrics, "hedge_answered");
    let answered = outcome_count(&metrics, "answered");
    assert!(
        hedged >= 3 && hedged + answered == 40,
        "{hedged} {answered}"
    );
}

#[tokio::test]
async fn queries_respect_deadline_and_concurrency_limit() {
    let silent_url = start_silent_server().await;
    let metrics = Arc::new(Metrics::new());
    let settings = RemoteIndexConfig::with_servers([silent_url]);
    let client = RemoteIndexClient::new(&settings, metrics.clone()).unwrap();
    client.permits.forget_permits(MAX_CONCURRENCY - 1);
    let (slow, busy) = tokio::join!(
        query_overlaps(&client, HASHING, &[1]),
        query_overlaps(&client, HASHING, &[1])
    );
    assert!(matches!(
        (slow, busy),
        (
            RemoteOverlaps::Unavailable(_),
            RemoteOverlaps::Unavailable(_)
        )
    ));
    assert_eq!(
        (
            outcome_count(&metrics, "timeout"),
            outcome_count(&metrics, "busy")
        ),
        (1, 1)
    );
    for _ in 0..2 {
        query_overlaps(&client, HASHING, &[1]).await;
    }
    assert_eq!(
        (
            outcome_count(&metrics, "timeout"),
            client.status()[0]["available"].clone()
        ),
        (3, false.into())
    );
    query_overlaps(&client, HASHING, &[1]).await;
    assert_eq!(outcome_count(&metrics, "no_server"), 1);
}

#[tokio::test]
async fn cancelled_request_cancels_its_query() {
    let silent_url = start_silent_server().await;
    let (client, _) = client(&[&silent_url]);
    for _ in 0..10 {
        let result = tokio::time::timeout(
            Duration::from_millis(5),
            query_overlaps(&client, HASHING, &[1]),
        )
        .await;
        assert!(result.is_err());
    }
    assert_eq!(
        client.status()[0]["available"],
        true,
        "a cancelled query ejected the server"
    );
    assert_eq!(client.permits.available_permits(), MAX_CONCURRENCY);
}
