//! CPU time and API requests with many pods, and in an idle cluster.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, ensure};
use futures_util::StreamExt as _;
use futures_util::stream;

use crate::control_plane::{AuditRecord, TestControlPlane};
use crate::namespace::TestNamespace;
use crate::objects::POOL;
use crate::router::{PATIENCE, RouterProcess};
use crate::runner::CaseResult;

const PODS: usize = 500;
/// Maximum number of concurrent requests of the test itself.
const PARALLEL: usize = 8;
const IDLE_PERIOD: Duration = Duration::from_secs(30);

/// CPU time and requests of warmroute in an idle cluster.
struct IdleUsage {
    cores: f64,
    requests: Vec<AuditRecord>,
}

impl IdleUsage {
    async fn measure(namespace: &TestNamespace, router: &RouterProcess) -> anyhow::Result<Self> {
        let cpu = router.cpu()?;
        let before = namespace.audit()?.len();
        tokio::time::sleep(IDLE_PERIOD).await;
        let cores = (router.cpu()? - cpu).as_secs_f64() / IDLE_PERIOD.as_secs_f64();
        let requests = namespace.audit()?;
        // A request is recorded when it starts, so one that only ended in the period is not
        // counted.
        let count = requests.len() - before;
        let requests = requests.into_iter().rev().take(count).collect();
        Ok(Self { cores, requests })
    }
}

async fn all<F: Future<Output = anyhow::Result<()>>>(
    work: impl Iterator<Item = F>,
) -> anyhow::Result<()> {
    let results: Vec<_> = stream::iter(work)
        .buffer_unordered(PARALLEL)
        .collect()
        .await;
    results.into_iter().collect()
}

pub(super) fn pod_lists(namespace: &TestNamespace) -> anyhow::Result<usize> {
    Ok(namespace
        .audit()?
        .iter()
        .filter(|record| record.verb == "list" && record.resource == "pods")
        .count())
}

async fn wait_count(router: &RouterProcess, count: usize) -> anyhow::Result<Duration> {
    let began = Instant::now();
    loop {
        let found = router.fleet().await?.len();
        if found == count {
            return Ok(began.elapsed());
        }
        ensure!(
            began.elapsed() < PATIENCE,
            "{found} workers, not {count}\n{}",
            router.log()
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Time after which warmroute no longer retries requests for kinds that its Role does not allow.
const STARTUP: Duration = Duration::from_secs(17);

pub(super) async fn five_hundred_pods(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pool(&[8000]).await?;
    let mut router = namespace.start_router().await?;
    let name = |nth: usize| format!("engine-{nth:03}");
    all((0..PODS).map(async |nth| {
        namespace
            .create_pod(
                &name(nth),
                &format!("127.1.{}.{}", nth / 250, nth % 250 + 1),
            )
            .await
    }))
    .await?;
    let appeared = wait_count(&router, PODS).await?;
    let startup = router.cpu()?;
    tokio::time::sleep(STARTUP).await;
    let idle = IdleUsage::measure(&namespace, &router).await?;
    ensure!(
        idle.cores < 0.2,
        "{:.3} cores in an idle cluster with {PODS} pods",
        idle.cores
    );
    ensure!(
        idle.requests.iter().all(|record| record.verb == "watch"),
        "{:?}",
        idle.requests
    );
    let resident = router.resident()?;
    // One pod more than fits on a page of the list.
    namespace.create_pod("one-more", "127.1.9.1").await?;
    wait_count(&router, PODS + 1).await?;
    let lists = pod_lists(&namespace)?;
    let began = Instant::now();
    router.restart().await?;
    wait_count(&router, PODS + 1).await?;
    let restarted = began.elapsed();
    ensure!(
        pod_lists(&namespace)? - lists == 2,
        "{} pods are not listed in two pages",
        PODS + 1
    );
    namespace.remove_pod("one-more").await?;
    all((0..PODS / 2).map(async |nth| namespace.remove_pod(&name(nth)).await)).await?;
    let left = wait_count(&router, PODS - PODS / 2).await?;
    Ok(format!(
        "all {PODS} listed {:.2} s after the last one was ready, CPU {:.1} s; idle {} s: {:.2} % of a core (debug build), {} requests \
         (watches), {resident} MiB; restart: fleet of {} from two pages after {:.2} s; 250 deleted: removed {:.2} s after the last",
        appeared.as_secs_f64(),
        startup.as_secs_f64(),
        IDLE_PERIOD.as_secs(),
        idle.cores * 100.0,
        idle.requests.len(),
        PODS + 1,
        restarted.as_secs_f64(),
        left.as_secs_f64()
    ))
}

pub(super) async fn quiet_cluster(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    namespace.create_pod("b", "127.0.1.2").await?;
    let router = namespace.start_router().await?;
    router
        .wait_fleet(&["a 127.0.1.1:8000", "b 127.0.1.2:8000"])
        .await?;
    tokio::time::sleep(STARTUP).await;
    let lines = router.log().lines().count();
    let idle = IdleUsage::measure(&namespace, &router).await?;
    ensure!(
        idle.requests.iter().all(|record| record.verb == "watch"),
        "{:?}",
        idle.requests
    );
    ensure!(idle.requests.len() <= 4, "{:?}", idle.requests);
    ensure!(
        router.log().lines().count() == lines,
        "log lines in an idle cluster:\n{}",
        router.log()
    );
    ensure!(router.is_up(POOL).await?, "discovery_up is 0");
    let series =
        format!("discovery_last_success_timestamp_seconds{{source=\"kubernetes {POOL}\"}}");
    let success = router.metric(&series).await?.context("no timestamp")?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
    let age = now - success;
    // A watch lasts up to 30 s, so at least one was resumed in the period.
    ensure!(
        age < IDLE_PERIOD.as_secs_f64() + 2.0,
        "discovery_last_success_timestamp_seconds is {age:.0} s old"
    );
    let written = namespace
        .audit()?
        .into_iter()
        .find(|record| !["get", "list", "watch"].contains(&record.verb.as_str()));
    ensure!(written.is_none(), "{written:?}");
    Ok(format!(
        "idle {} s: {} requests (watches), {:.2} % of a core (debug build), nothing logged, nothing written; success timestamp {age:.0} s old",
        IDLE_PERIOD.as_secs(),
        idle.requests.len(),
        idle.cores * 100.0
    ))
}
