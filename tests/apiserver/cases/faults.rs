//! Outages, restarts and freezes of the API server and etcd, and compacted history.

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use serde_json::json;

use super::scale::pod_lists;
use crate::control_plane::{OBJECTIVES, TestControlPlane};
use crate::namespace::{RoleRules, TestNamespace};
use crate::objects::{POOL, objective};
use crate::proxy::{ApiProxy, ProxyMode};
use crate::router::{PATIENCE, RouterOptions, RouterProcess};
use crate::runner::CaseResult;
use crate::traffic::SteadyTraffic;

const A: &str = "a 127.0.1.1:8000";
const B: &str = "b 127.0.1.2:8000";
const C: &str = "c 127.0.1.3:8000";

/// Time between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(5);

struct FaultSite {
    namespace: TestNamespace,
    router: RouterProcess,
}

impl FaultSite {
    async fn start(plane: &Arc<TestControlPlane>, silence: &str) -> anyhow::Result<Self> {
        let namespace = TestNamespace::create_with(plane, RoleRules::WithOptionalKinds).await?;
        namespace.create_pool(&[8000]).await?;
        namespace.create_pod("a", "127.0.1.1").await?;
        namespace
            .create_of(OBJECTIVES, &objective(OBJECTIVES.api, "gold", 5))
            .await?;
        let router = namespace
            .start_router_with(json!({"workers": {"kubernetes": {"watch_timeout": silence}}}))
            .await?;
        router.wait_fleet(&[A]).await?;
        router.wait_cluster("\"priority\":5").await?;
        Ok(Self { namespace, router })
    }
}

impl FaultSite {
    /// Creates a pod and changes an objective after a fault. Returns the time until both are
    /// visible.
    async fn time_until_changes_are_visible(&self) -> anyhow::Result<Duration> {
        self.namespace
            .change_of(OBJECTIVES, "gold", &json!({"spec": {"priority": 6}}))
            .await?;
        self.namespace.create_pod("b", "127.0.1.2").await?;
        let pod = self.router.wait_fleet(&[A, B]).await?;
        let objective = self.router.wait_cluster("\"priority\":6").await?;
        self.router.wait_up(POOL, true, PATIENCE).await?;
        Ok(pod + objective)
    }
}

pub(super) async fn restart(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = FaultSite::start(&plane, "30s").await?;
    plane.stop_api_server(GRACE).await?;
    let noticed = site.router.wait_up(POOL, false, PATIENCE).await?;
    site.router
        .keeps_fleet(Duration::from_secs(1), &[A])
        .await?;
    plane.start_api_server(&[]).await?;
    let took = site.time_until_changes_are_visible().await?;
    let noticed = noticed.as_secs_f64();
    let took = took.as_secs_f64();
    Ok(format!(
        "SIGTERM: up 0 after {noticed:.1} s, fleet kept; new pod and changed objective visible within {took:.2} s once the API server is ready"
    ))
}

pub(super) async fn kill(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = FaultSite::start(&plane, "30s").await?;
    let traffic = SteadyTraffic::start(&site.router, &["127.0.1.1:8000"]).await?;
    // A watch that is shorter would count as failed.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = traffic.routed()?;
    ensure!(before > 0, "no exchange was routed");
    let lines = site.router.log().lines().count();
    plane.kill_api_server().await?;
    let noticed = site.router.wait_up(POOL, false, PATIENCE).await?;
    site.router
        .keeps_fleet(Duration::from_secs(10), &[A])
        .await?;
    let during = traffic.routed()? - before;
    ensure!(
        during > 50,
        "{during} exchanges while the API server was away"
    );
    let log = site.router.log();
    let lines = log.lines().count() - lines;
    // The connection is either refused or reset.
    let names_cause = log.contains(&plane.address.to_string()) && log.contains("os error");
    ensure!(
        lines <= 6 && names_cause,
        "{lines} lines, or no cause:\n{log}"
    );
    plane.start_api_server(&[]).await?;
    let took = site.time_until_changes_are_visible().await?;
    let noticed = noticed.as_secs_f64();
    let took = took.as_secs_f64();
    Ok(format!(
        "kill -9 for 10 s: up 0 after {noticed:.1} s, fleet kept, {during} of {during} exchanges routed, log lines with the \
         cause: {lines}; new pod and changed objective visible within {took:.2} s once the API server is ready"
    ))
}

pub(super) async fn freeze(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = FaultSite::start(&plane, "5s").await?;
    site.router.wait_up(POOL, true, PATIENCE).await?;
    plane.freeze_api_server()?;
    let noticed = site
        .router
        .wait_up(POOL, false, Duration::from_secs(40))
        .await;
    let kept = site.router.keeps_fleet(Duration::from_secs(1), &[A]).await;
    plane.thaw_api_server()?;
    let noticed = noticed?;
    kept?;
    site.namespace.create_pod("b", "127.0.1.2").await?;
    let took = site.router.wait_fleet(&[A, B]).await?;
    site.router.wait_up(POOL, true, PATIENCE).await?;
    let noticed = noticed.as_secs_f64();
    let took = took.as_secs_f64();
    Ok(format!(
        "SIGSTOP: up 0 after {noticed:.1} s with `watch_timeout: 5s`, fleet kept; SIGCONT: new pod after {took:.1} s"
    ))
}

pub(super) async fn etcd_away(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = FaultSite::start(&plane, "3s").await?;
    plane.kill_etcd();
    // Longer than the watch timeout.
    site.router
        .keeps_fleet(Duration::from_secs(10), &[A])
        .await?;
    plane.start_etcd().await?;
    let created = warmroute_testbed::ports::until(PATIENCE, async || {
        site.namespace.create_pod("b", "127.0.1.2").await.is_ok()
    });
    ensure!(created.await, "the API server does not reconnect to etcd");
    let took = site.router.wait_fleet(&[A, B]).await?;
    Ok(format!(
        "etcd killed for 10 s: fleet kept; new pod after {:.2} s",
        took.as_secs_f64()
    ))
}

pub(super) async fn start_before_api_server(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let options = namespace.options(json!({})).await?;
    plane.kill_api_server().await?;
    let started = RouterProcess::start(options).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    plane.start_api_server(&[]).await?;
    let router = started?;
    let took = router.wait_fleet(&[A]).await?;
    Ok(format!(
        "keeps running; fleet {:.1} s after the API server was ready",
        took.as_secs_f64()
    ))
}

pub(super) async fn live_watch_survives_compaction(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = FaultSite::start(&plane, "30s").await?;
    plane.compact().await?;
    site.namespace.create_pod("b", "127.0.1.2").await?;
    let took = site.router.wait_fleet(&[A, B]).await?;
    let lists = site
        .namespace
        .audit()?
        .iter()
        .filter(|record| record.verb == "list" && record.resource == "pods")
        .count();
    ensure!(lists == 1, "pods were listed {lists} times");
    Ok(format!(
        "no interruption; new pod after {} ms, no list",
        took.as_millis()
    ))
}

/// warmroute is disconnected, the cluster changes, the history is compacted, and the API server
/// restarts.
pub(super) async fn missed_changes_are_listed(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    namespace.create_pod("b", "127.0.1.2").await?;
    let proxy = ApiProxy::start(&plane, ProxyMode::Pass).await?;
    let options = RouterOptions {
        api_server: proxy.address,
        ..namespace.options(json!({})).await?
    };
    let router = RouterProcess::start(options).await?;
    router.wait_fleet(&[A, B]).await?;
    proxy.set(ProxyMode::Cut);
    router.wait_up(POOL, false, PATIENCE).await?;
    namespace.remove_pod("a").await?;
    namespace.create_pod("c", "127.0.1.3").await?;
    plane.stop_api_server(GRACE).await?;
    plane.compact().await?;
    plane.start_api_server(&[]).await?;
    router
        .keeps_fleet(Duration::from_millis(500), &[A, B])
        .await?;
    proxy.set(ProxyMode::Pass);
    let took = router.wait_fleet(&[B, C]).await?;
    router.wait_up(POOL, true, PATIENCE).await?;
    Ok(format!(
        "fleet kept; correct fleet {:.1} s after the network is restored",
        took.as_secs_f64()
    ))
}

/// Without its watch cache, the API server answers 410 to a watch that resumes from before a
/// compaction. The case restarts the API server with another flag, so it runs last.
pub(super) async fn expired_watches_are_listed(plane: Arc<TestControlPlane>) -> CaseResult {
    plane.kill_api_server().await?;
    plane.start_api_server(&["--watch-cache=false"]).await?;
    let site = FaultSite::start(&plane, "3s").await?;
    let first_lists = pod_lists(&site.namespace)?;
    let mut expected = vec![A.to_owned()];
    let mut longest = Duration::ZERO;
    for turn in 2..8 {
        plane.compact().await?;
        let name = format!("p{turn}");
        site.namespace
            .create_pod(&name, &format!("127.0.1.{turn}"))
            .await?;
        expected.push(format!("{name} 127.0.1.{turn}:8000"));
        let fleet: Vec<&str> = expected.iter().map(String::as_str).collect();
        longest = longest.max(site.router.wait_fleet(&fleet).await?);
        // Two changes and a compaction make the resource version of the watch too old for a
        // resumption.
        for _ in 0..2 {
            let name = format!("filler-{}", plane.next_serial());
            plane
                .admin
                .create("/api/v1/namespaces", &json!({"metadata": {"name": name}}))
                .await?;
        }
        plane.compact().await?;
        tokio::time::sleep(Duration::from_millis(1500)).await;
    }
    let lists = pod_lists(&site.namespace)? - first_lists;
    // Pods are listed again only after a watch has expired.
    ensure!(lists > 0, "no watch of the pods has expired");
    Ok(format!(
        "pods listed {lists} times again; each of 6 pods within {:.2} s",
        longest.as_secs_f64()
    ))
}
