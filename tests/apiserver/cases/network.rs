//! Network faults between warmroute and the API server.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use serde_json::json;

use crate::control_plane::TestControlPlane;
use crate::namespace::TestNamespace;
use crate::objects::POOL;
use crate::proxy::{ApiProxy, ProxyMode};
use crate::router::{PATIENCE, RouterOptions, RouterProcess};
use crate::runner::CaseResult;

const A: &str = "a 127.0.1.1:8000";
const B: &str = "b 127.0.1.2:8000";

/// A pool with one pod, and a warmroute process that reaches the API server through a proxy.
struct ProxiedSite {
    namespace: TestNamespace,
    router: RouterProcess,
    proxy: ApiProxy,
}

async fn start_via(
    namespace: &TestNamespace,
    address: SocketAddr,
    silence: &str,
) -> anyhow::Result<RouterProcess> {
    let options = namespace
        .options(json!({"workers": {"kubernetes": {"watch_timeout": silence}}}))
        .await?;
    RouterProcess::start(RouterOptions {
        api_server: address,
        ..options
    })
    .await
}

impl ProxiedSite {
    async fn start(plane: &Arc<TestControlPlane>, silence: &str) -> anyhow::Result<Self> {
        let namespace = TestNamespace::create(plane).await?;
        namespace.create_pool(&[8000]).await?;
        namespace.create_pod("a", "127.0.1.1").await?;
        let proxy = ApiProxy::start(plane, ProxyMode::Pass).await?;
        let router = start_via(&namespace, proxy.address, silence).await?;
        router.wait_fleet(&[A]).await?;
        Ok(Self {
            namespace,
            router,
            proxy,
        })
    }
}

/// Connections die silently, as behind a load balancer that has dropped their state.
pub(super) async fn silent_connections_are_replaced(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = ProxiedSite::start(&plane, "5s").await?;
    site.proxy.kill_silently();
    site.namespace.create_pod("b", "127.0.1.2").await?;
    let took = site
        .router
        .wait_fleet_within(Duration::from_secs(40), &[A, B])
        .await?;
    ensure!(
        took < Duration::from_secs(20),
        "noticed after {took:?} with watch_timeout: 5s"
    );
    Ok(format!(
        "new pod after {:.1} s with `watch_timeout: 5s`",
        took.as_secs_f64()
    ))
}

/// Requests get no response, at first on all connections, then on the existing ones. Uses the
/// default timeout.
pub(super) async fn unanswered_requests_time_out(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = ProxiedSite::start(&plane, "30s").await?;
    site.proxy.set(ProxyMode::Hold);
    let noticed = site
        .router
        .wait_up(POOL, false, Duration::from_secs(60))
        .await?;
    site.router
        .keeps_fleet(Duration::from_secs(1), &[A])
        .await?;
    site.proxy.kill_silently();
    site.namespace.create_pod("b", "127.0.1.2").await?;
    let took = site
        .router
        .wait_fleet_within(Duration::from_secs(45), &[A, B])
        .await?;
    site.router.wait_up(POOL, true, PATIENCE).await?;
    let noticed = noticed.as_secs_f64();
    let took = took.as_secs_f64();
    Ok(format!(
        "all connections held: up 0 after {noticed:.0} s; new connections work: new pod after {took:.1} s"
    ))
}

pub(super) async fn unavailable_while_running(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = ProxiedSite::start(&plane, "30s").await?;
    let lines = site.router.log().lines().count();
    site.proxy.set(ProxyMode::Status(503));
    let noticed = site.router.wait_up(POOL, false, PATIENCE).await?;
    site.router
        .keeps_fleet(Duration::from_secs(20), &[A])
        .await?;
    let lines = site.router.log().lines().count() - lines;
    site.namespace.create_pod("b", "127.0.1.2").await?;
    site.proxy.set(ProxyMode::Pass);
    let took = site
        .router
        .wait_fleet_within(Duration::from_secs(60), &[A, B])
        .await?;
    ensure!(
        took < Duration::from_secs(8),
        "the fleet was complete {took:?} after the outage"
    );
    ensure!(
        lines <= 10,
        "{lines} lines within 20 s:\n{}",
        site.router.log()
    );
    let noticed = noticed.as_secs_f64();
    let took = took.as_secs_f64();
    Ok(format!(
        "503 for 20 s: up 0 after {noticed:.1} s, {lines} log lines; new pod {took:.1} s after it"
    ))
}
