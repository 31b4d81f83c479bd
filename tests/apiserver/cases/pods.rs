//! Lifecycle of pods.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use warmroute_testbed::ports::until;

use crate::control_plane::TestControlPlane;
use crate::namespace::TestNamespace;
use crate::objects::{POOL, running};
use crate::router::{PATIENCE, RouterProcess};
use crate::runner::CaseResult;

const A: &str = "a 127.0.1.1:8000";
/// A worker that stays in the fleet, because the last workers of a model are removed only after a
/// grace period.
const OTHER: &str = "other 127.0.1.100:8000";
/// Period in which an unwanted change would become visible.
const MOMENT: Duration = Duration::from_millis(400);

/// A pool with the pod `a`, and a warmroute process that serves it.
struct PodFixture {
    namespace: TestNamespace,
    router: RouterProcess,
}

/// Reaction times of one case.
#[derive(Default)]
struct ReactionTimes(Vec<Duration>);

impl ReactionTimes {
    fn add(&mut self, took: Duration) {
        self.0.push(took);
    }

    /// Returns the range of the times. Fails if a reaction took seconds.
    fn show(&self) -> anyhow::Result<String> {
        let least = self.0.iter().min().context("nothing was measured")?;
        let most = self.0.iter().max().context("nothing was measured")?;
        ensure!(*most < Duration::from_secs(5), "a change took {most:?}");
        Ok(format!("{} to {} ms", least.as_millis(), most.as_millis()))
    }
}

impl PodFixture {
    async fn start(plane: &Arc<TestControlPlane>) -> anyhow::Result<Self> {
        Self::start_with(plane, &[8000]).await
    }

    async fn start_with(plane: &Arc<TestControlPlane>, ports: &[u16]) -> anyhow::Result<Self> {
        let namespace = TestNamespace::create(plane).await?;
        namespace.create_pool(ports).await?;
        namespace.create_pod("a", "127.0.1.1").await?;
        let router = namespace.start_router().await?;
        let expected: Vec<String> = ports
            .iter()
            .map(|port| format!("a 127.0.1.1:{port}"))
            .collect();
        router
            .wait_fleet(&expected.iter().map(String::as_str).collect::<Vec<_>>())
            .await?;
        Ok(Self { namespace, router })
    }

    async fn start_with_other(plane: &Arc<TestControlPlane>) -> anyhow::Result<Self> {
        let site = Self::start(plane).await?;
        site.namespace.create_pod("other", "127.0.1.100").await?;
        site.router.wait_fleet(&[A, OTHER]).await?;
        Ok(site)
    }

    async fn set_ready(&self, name: &str, ip: &str, is_ready: bool) -> anyhow::Result<()> {
        self.namespace
            .set_status(name, &running(&[ip], is_ready))
            .await
    }

    async fn set_label(&self, name: &str, label: &str, value: &Value) -> anyhow::Result<()> {
        self.namespace
            .change_pod(name, &json!({"metadata": {"labels": {label: value}}}))
            .await
    }
}

pub(super) async fn readiness_changes(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = PodFixture::start(&plane).await?;
    let mut times = ReactionTimes::default();
    site.namespace.create_pending("b").await?;
    site.set_ready("b", "127.0.1.2", false).await?;
    site.router.keeps_fleet(MOMENT, &[A]).await?;
    site.set_ready("b", "127.0.1.2", true).await?;
    times.add(site.router.wait_fleet(&[A, "b 127.0.1.2:8000"]).await?);
    site.set_ready("b", "127.0.1.2", false).await?;
    times.add(site.router.wait_fleet(&[A, "b 127.0.1.2:8000 -"]).await?);
    site.set_ready("b", "127.0.1.2", true).await?;
    times.add(site.router.wait_fleet(&[A, "b 127.0.1.2:8000"]).await?);
    Ok(format!(
        "not ready: absent; ready: listed; not ready: draining; ready: listed; {}",
        times.show()?
    ))
}

pub(super) async fn deletion_with_grace(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = PodFixture::start(&plane).await?;
    let mut times = ReactionTimes::default();
    site.namespace.delete_pod("a").await?;
    times.add(site.router.wait_fleet(&["a 127.0.1.1:8000 -"]).await?);
    site.namespace.remove_pod("a").await?;
    times.add(site.router.wait_fleet(&[]).await?);
    Ok(format!("draining; removed; {}", times.show()?))
}

pub(super) async fn deletion_without_grace(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = PodFixture::start_with_other(&plane).await?;
    let mut times = ReactionTimes::default();
    site.namespace.remove_pod("a").await?;
    times.add(site.router.wait_fleet(&[OTHER]).await?);
    site.namespace.create_pod("a", "127.0.1.7").await?;
    times.add(site.router.wait_fleet(&["a 127.0.1.7:8000", OTHER]).await?);
    // A pod that is recreated with the same address is another worker.
    let ids = async || {
        site.router
            .fleet_by(|worker| worker["id"].to_string())
            .await
    };
    let before = ids().await?;
    site.namespace.remove_pod("a").await?;
    site.namespace.create_pod("a", "127.0.1.7").await?;
    let replaced = async || ids().await.is_ok_and(|ids| ids.len() == 2 && ids != before);
    ensure!(
        until(PATIENCE, replaced).await,
        "{:?} after {before:?}",
        ids().await
    );
    site.router
        .keeps_fleet(MOMENT, &["a 127.0.1.7:8000", OTHER])
        .await?;
    Ok(format!(
        "removed; listed again by its name, as one worker; {}",
        times.show()?
    ))
}

pub(super) async fn address_changes(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = PodFixture::start(&plane).await?;
    site.set_ready("a", "127.0.1.9", true).await?;
    let took = site.router.wait_fleet(&["a 127.0.1.9:8000"]).await?;
    Ok(format!(
        "the endpoint follows after {} ms",
        took.as_millis()
    ))
}

pub(super) async fn two_pods_with_one_address(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = PodFixture::start(&plane).await?;
    site.namespace.create_pod("b", "127.0.1.1").await?;
    tokio::time::sleep(MOMENT).await;
    let used = site.router.fleet().await?;
    ensure!(used.len() == 1, "{used:?}");
    let (used, other) = if used[0] == A {
        ("a", "b 127.0.1.1:8000")
    } else {
        ("b", A)
    };
    site.namespace.remove_pod(used).await?;
    let took = site.router.wait_fleet(&[other]).await?;
    Ok(format!(
        "one is used; the other takes over after {} ms",
        took.as_millis()
    ))
}

pub(super) async fn labels_change(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = PodFixture::start_with_other(&plane).await?;
    let mut times = ReactionTimes::default();
    site.set_label("a", "app", &json!("other")).await?;
    times.add(site.router.wait_fleet(&[OTHER]).await?);
    site.set_label("a", "app", &json!(POOL)).await?;
    times.add(site.router.wait_fleet(&[A, OTHER]).await?);
    Ok(format!("removed; listed; {}", times.show()?))
}

pub(super) async fn container_restart(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = PodFixture::start(&plane).await?;
    let mut times = ReactionTimes::default();
    let restarts = |count: u32, is_ready: bool| {
        let mut status = running(&["127.0.1.1"], is_ready);
        status["status"]["containerStatuses"] = json!([{
            "name": "engine", "image": "engine", "imageID": "", "ready": is_ready, "restartCount": count,
        }]);
        status
    };
    site.namespace.set_status("a", &restarts(0, false)).await?;
    times.add(site.router.wait_fleet(&["a 127.0.1.1:8000 -"]).await?);
    site.namespace.set_status("a", &restarts(1, true)).await?;
    times.add(site.router.wait_fleet(&[A]).await?);
    Ok(format!("draining; listed; {}", times.show()?))
}

pub(super) async fn ipv6_addresses(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = PodFixture::start(&plane).await?;
    let mut times = ReactionTimes::default();
    site.namespace.create_pending("b").await?;
    site.namespace
        .set_status("b", &running(&["fd00::1:6"], true))
        .await?;
    times.add(site.router.wait_fleet(&[A, "b [fd00::1:6]:8000"]).await?);
    site.namespace.create_pending("c").await?;
    site.namespace
        .set_status("c", &running(&["127.0.1.3", "fd00::1:7"], true))
        .await?;
    times.add(
        site.router
            .wait_fleet(&[A, "b [fd00::1:6]:8000", "c 127.0.1.3:8000"])
            .await?,
    );
    Ok(format!(
        "`[fd00::1:6]:8000`; the first address of a dual-stack pod; {}",
        times.show()?
    ))
}

pub(super) async fn rapid_readiness(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = PodFixture::start(&plane).await?;
    for turn in 0..50 {
        site.set_ready("a", "127.0.1.1", turn % 2 == 0).await?;
    }
    // Earlier changes also lead to a draining worker. The watch reports the new pod after all of
    // them.
    site.namespace.create_pod("b", "127.0.1.2").await?;
    let expected = ["a 127.0.1.1:8000 -", "b 127.0.1.2:8000"];
    let took = site.router.wait_fleet(&expected).await?;
    site.router.keeps_fleet(MOMENT, &expected).await?;
    Ok(format!(
        "the last of 50 changes takes effect after {} ms",
        took.as_millis()
    ))
}

/// The API server accepts IPv4 addresses with leading zeros, which Rust does not parse.
pub(super) async fn unreadable_address(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = PodFixture::start(&plane).await?;
    site.namespace.create_pending("odd").await?;
    let mut status = running(&["127.0.1.7"], true);
    site.namespace.set_status("odd", &status).await?;
    site.router.wait_fleet(&[A, "odd 127.0.1.7:8000"]).await?;
    status["status"]["podIP"] = json!("010.000.001.007");
    status["status"]["podIPs"] = json!([{"ip": "010.000.001.007"}]);
    site.namespace.set_status("odd", &status).await?;
    site.router
        .wait_log("podIP `010.000.001.007` is not an IP address")
        .await?;
    site.namespace.create_pod("b", "127.0.1.2").await?;
    let took = site.router.wait_fleet(&[A, "b 127.0.1.2:8000"]).await?;
    ensure!(site.router.is_up(POOL).await?, "discovery_up is 0");
    let log = site.router.log();
    ensure!(
        log.contains(&format!("{}/odd", site.namespace.name)),
        "the log does not name the pod:\n{log}"
    );
    let longest = log.lines().map(str::len).max().unwrap_or_default();
    ensure!(longest < 2000, "a line of the log has {longest} bytes");
    Ok(format!(
        "the pod is named in the log and ignored; another new pod after {} ms; longest log line {longest} bytes",
        took.as_millis()
    ))
}

/// An address is reused while the terminating pod that had it still exists. The order of the two
/// uids is random, so the case is repeated.
pub(super) async fn address_of_ending_pod(plane: Arc<TestControlPlane>) -> CaseResult {
    let site = PodFixture::start(&plane).await?;
    let mut times = ReactionTimes::default();
    for turn in 1..=6 {
        let ip = format!("127.0.2.{turn}");
        let old = format!("old{turn}");
        let new = format!("new{turn}");
        site.namespace.create_pod(&old, &ip).await?;
        site.router
            .wait_fleet(&[A, &format!("{old} {ip}:8000")])
            .await?;
        site.namespace.delete_pod(&old).await?;
        site.router
            .wait_fleet(&[A, &format!("{old} {ip}:8000 -")])
            .await?;
        site.namespace.create_pod(&new, &ip).await?;
        times.add(
            site.router
                .wait_fleet(&[A, &format!("{new} {ip}:8000")])
                .await?,
        );
        site.namespace.remove_pod(&old).await?;
        site.router
            .keeps_fleet(MOMENT, &[A, &format!("{new} {ip}:8000")])
            .await?;
        site.namespace.remove_pod(&new).await?;
        site.router.wait_fleet(&[A]).await?;
    }
    Ok(format!(
        "the new pod takes over at once in 6 of 6 turns; {}",
        times.show()?
    ))
}
