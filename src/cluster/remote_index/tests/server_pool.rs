//! Queries to several servers: failover, hedging, deadlines and limits.

use super::*;

/// A server of an index in which worker 1 holds three blocks.
struct Site {
    router: Arc<Router>,
    readiness: Readiness,
    url: String,
    _writer: RankWriter,
}

impl Site {
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
            most_blocks: 100,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let serving = Server::builder().add_service(IndexService::new(parts).server());
        tokio::spawn(serving.serve_with_incoming(TcpListenerStream::new(listener)));
        Self {
            router,
            readiness,
            url,
            _writer: writer,
        }
    }
}

/// A server that accepts connections and never responds.
async fn silent() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let mut kept: Vec<TcpStream> = Vec::new();
        while let Ok((connection, _)) = listener.accept().await {
            kept.push(connection);
        }
    });
    url
}

/// A client of these servers, with a deadline that no test reaches.
fn client(servers: &[&str]) -> (RemoteIndexClient, Arc<Metrics>) {
    let metrics = Arc::new(Metrics::new());
    let servers = servers.iter().map(|url| (*url).to_owned());
    let settings = RemoteIndexConfig {
        timeout: Period::seconds(30),
        ..RemoteIndexConfig::with_servers(servers)
    };
    (
        RemoteIndexClient::new(&settings, metrics.clone()).unwrap(),
        metrics,
    )
}

async fn ask(client: &RemoteIndexClient, hashing: u64, locals: &[u64]) -> RemoteOverlaps {
    let model = ModelName::from(MODEL);
    client
        .query(OverlapQuery {
            model: Some(&model),
            hashing,
            prompts: &[hashes(locals)],
        })
        .await
}

fn answer(remote: RemoteOverlaps) -> Arc<RemoteAnswer> {
    match remote {
        RemoteOverlaps::Received(answer) => answer,
        other => panic!("{other:?}"),
    }
}

fn outcome(metrics: &Metrics, outcome: &'static str) -> u64 {
    metrics
        .index
        .remote_queries
        .get_or_create(&OutcomeLabel { outcome })
        .get()
}

#[tokio::test]
async fn ranks_are_sent_only_when_changed() {
    let site = Site::start().await;
    let (client, metrics) = client(&[&site.url]);
    let first = answer(ask(&client, HASHING, &[1, 2, 9]).await);
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
    let second = answer(ask(&client, HASHING, &[]).await);
    assert!(
        Arc::ptr_eq(&first.ranks, &second.ranks),
        "the ranks were not sent again"
    );
    assert_eq!(second.prompts, [Vec::new()]);
    site.router.set_source_status(rank(2), standing(4));
    let third = answer(ask(&client, HASHING, &[1]).await);
    assert_eq!(third.ranks.rows()[1].status, standing(4));
    site.router
        .set_source_status(rank(2), SourceStatus::default());
    assert_eq!(
        answer(ask(&client, HASHING, &[1]).await).ranks.rows(),
        first.ranks.rows()
    );
    assert_eq!(outcome(&metrics, "answered"), 4);
}

#[tokio::test]
async fn incompatible_blocks_are_refused() {
    let site = Site::start().await;
    let (client, metrics) = client(&[&site.url]);
    assert!(
        matches!(
            ask(&client, HASHING + 1, &[1, 2]).await,
            RemoteOverlaps::Unavailable(_)
        ),
        "hashed differently"
    );
    let model = ModelName::from(MODEL);
    let other = [BlockHashes::from_locals(
        16,
        BlockSize::new(8).unwrap(),
        vec![LocalHash(1), LocalHash(2)],
    )];
    let question = OverlapQuery {
        model: Some(&model),
        hashing: HASHING,
        prompts: &other,
    };
    assert!(
        matches!(client.query(question).await, RemoteOverlaps::Unavailable(_)),
        "blocks of another size"
    );
    let stranger = ModelName::from("stranger");
    let question = OverlapQuery {
        model: Some(&stranger),
        hashing: HASHING,
        prompts: &[hashes(&[1])],
    };
    assert!(
        matches!(client.query(question).await, RemoteOverlaps::Unavailable(_)),
        "another model"
    );
    assert!(
        matches!(
            ask(&client, HASHING, &[1; 101]).await,
            RemoteOverlaps::Unavailable(_)
        ),
        "too long"
    );
    assert_eq!(outcome(&metrics, "incompatible"), 4);
    answer(ask(&client, HASHING, &[1; 100]).await);
    assert_eq!(
        client.status()[0]["asked"],
        true,
        "who refuses is not left out"
    );
}

#[tokio::test]
async fn unready_server_is_replaced_at_once() {
    let site = Site::start().await;
    let other = Site::start().await;
    let pending = site.readiness.begin_step("something");
    let (client, metrics) = client(&[&site.url, &other.url]);
    for _ in 0..4 {
        answer(ask(&client, HASHING, &[1]).await);
    }
    assert_eq!(
        (
            client.status()[0]["asked"].clone(),
            outcome(&metrics, "answered")
        ),
        (false.into(), 4)
    );
    other.readiness.drain();
    assert!(matches!(
        ask(&client, HASHING, &[1]).await,
        RemoteOverlaps::Unavailable(_)
    ));
    assert_eq!(outcome(&metrics, "failed"), 1);
    assert!(matches!(
        ask(&client, HASHING, &[1]).await,
        RemoteOverlaps::Unavailable(_)
    ));
    assert_eq!(outcome(&metrics, "no_server"), 1);
    // The background task probes the server.
    let comes_back = async {
        while !matches!(
            ask(&client, HASHING, &[1]).await,
            RemoteOverlaps::Received(_)
        ) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        never = client.run_probes() => match never {},
        () = tokio::time::sleep(Duration::from_millis(1500)) => {}
        () = comes_back => panic!("nobody is ready"),
    }
    drop(pending);
    let comes_back = async {
        while !matches!(
            ask(&client, HASHING, &[1]).await,
            RemoteOverlaps::Received(_)
        ) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        never = client.run_probes() => match never {},
        () = tokio::time::sleep(Duration::from_secs(30)) => panic!("it does not come back"),
        () = comes_back => {}
    }
    assert_eq!(
        (
            client.status()[0]["asked"].clone(),
            client.status()[1]["asked"].clone()
        ),
        (true.into(), false.into())
    );
}

#[tokio::test]
async fn oversized_query_ejects_no_server() {
    let site = Site::start().await;
    let (client, metrics) = client(&[&site.url]);
    let long: Vec<u64> = (0..20_000).collect();
    assert!(matches!(
        ask(&client, HASHING, &long).await,
        RemoteOverlaps::Unavailable(_)
    ));
    let model = ModelName::from(MODEL);
    let many: Vec<BlockHashes> = (0..65).map(|local| hashes(&[local])).collect();
    let question = OverlapQuery {
        model: Some(&model),
        hashing: HASHING,
        prompts: &many,
    };
    assert!(matches!(
        client.query(question).await,
        RemoteOverlaps::Unavailable(_)
    ));
    assert_eq!(outcome(&metrics, "incompatible"), 2);
    answer(ask(&client, HASHING, &[1]).await);
}

#[tokio::test]
async fn silent_server_costs_one_hedge_then_is_ejected() {
    let site = Site::start().await;
    let mute = silent().await;
    let (client, metrics) = client(&[&mute, &site.url]);
    for _ in 0..40 {
        answer(ask(&client, HASHING, &[1]).await);
    }
    assert_eq!(client.status()[0]["asked"], false);
    let hedged = outcome(&metrics, "hedge_answered");
    let answered = outcome(&metrics, "answered");
    assert!(
        hedged >= 3 && hedged + answered == 40,
        "{hedged} {answered}"
    );
}

#[tokio::test]
async fn queries_respect_deadline_and_concurrency_limit() {
    let mute = silent().await;
    let metrics = Arc::new(Metrics::new());
    let settings = RemoteIndexConfig {
        max_concurrency: 1,
        ..RemoteIndexConfig::with_servers([mute])
    };
    let client = RemoteIndexClient::new(&settings, metrics.clone()).unwrap();
    let (late, busy) = tokio::join!(ask(&client, HASHING, &[1]), ask(&client, HASHING, &[1]));
    assert!(matches!(
        (late, busy),
        (
            RemoteOverlaps::Unavailable(_),
            RemoteOverlaps::Unavailable(_)
        )
    ));
    assert_eq!(
        (outcome(&metrics, "timeout"), outcome(&metrics, "busy")),
        (1, 1)
    );
    for _ in 0..2 {
        ask(&client, HASHING, &[1]).await;
    }
    assert_eq!(
        (
            outcome(&metrics, "timeout"),
            client.status()[0]["asked"].clone()
        ),
        (3, false.into())
    );
    ask(&client, HASHING, &[1]).await;
    assert_eq!(outcome(&metrics, "no_server"), 1);
}

#[tokio::test]
async fn cancelled_request_cancels_its_query() {
    let mute = silent().await;
    let (client, _) = client(&[&mute]);
    for _ in 0..10 {
        let gone =
            tokio::time::timeout(Duration::from_millis(5), ask(&client, HASHING, &[1])).await;
        assert!(gone.is_err());
    }
    assert_eq!(
        client.status()[0]["asked"],
        true,
        "that says nothing of the server"
    );
    assert_eq!(
        client.permits.available_permits(),
        RemoteIndexConfig::with_servers([]).max_concurrency as usize
    );
}
