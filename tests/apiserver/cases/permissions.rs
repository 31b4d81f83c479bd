//! Rights that the Role lacks, one verb at a time.

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;

use crate::control_plane::TestControlPlane;
use crate::namespace::{READ, RoleRules, TestNamespace, rule, rules_with};
use crate::objects::POOL;
use crate::router::PATIENCE;
use crate::runner::CaseResult;

/// Starts warmroute with these rights, waits for the log message, and grants the missing rights.
async fn granted_later(
    plane: &Arc<TestControlPlane>,
    rules: RoleRules,
    message: &str,
) -> anyhow::Result<Duration> {
    let namespace = TestNamespace::create_with(plane, rules).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let router = namespace.start_router().await?;
    router.wait_log(message).await?;
    ensure!(
        !router.is_up(POOL).await?,
        "discovery_up is 1 without the rights"
    );
    // After 8 s the backoff has reached its maximum.
    router.keeps_fleet(Duration::from_secs(8), &[]).await?;
    namespace.set_rules(RoleRules::Shipped).await?;
    router.wait_fleet(&["a 127.0.1.1:8000"]).await
}

pub(super) async fn pods_forbidden(plane: Arc<TestControlPlane>) -> CaseResult {
    let took = granted_later(&plane, rules_with(&[], &READ), "cannot list resource").await?;
    Ok(format!(
        "forbidden, names user, verb and resource; fleet {:.1} s after the grant",
        took.as_secs_f64()
    ))
}

pub(super) async fn pools_forbidden(plane: Arc<TestControlPlane>) -> CaseResult {
    let took = granted_later(&plane, rules_with(&READ, &[]), "inferencepools").await?;
    Ok(format!(
        "forbidden, names the resource; fleet {:.1} s after the grant",
        took.as_secs_f64()
    ))
}

pub(super) async fn watch_without_list(plane: Arc<TestControlPlane>) -> CaseResult {
    let took = granted_later(
        &plane,
        rules_with(&["get", "watch"], &READ),
        "cannot list resource",
    )
    .await?;
    Ok(format!(
        "forbidden, names the verb list; fleet {:.1} s after the grant",
        took.as_secs_f64()
    ))
}

pub(super) async fn rights_taken_away(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let router = namespace
        .start_router_with(serde_json::json!({"workers": {"kubernetes": {"watch_timeout": "2s"}}}))
        .await?;
    router.wait_fleet(&["a 127.0.1.1:8000"]).await?;
    namespace.set_rules(rules_with(&[], &[])).await?;
    // An established watch continues until its timeout.
    let noticed = router.wait_up(POOL, false, PATIENCE).await?;
    router
        .keeps_fleet(Duration::from_secs(2), &["a 127.0.1.1:8000"])
        .await?;
    namespace.create_pod("b", "127.0.1.2").await?;
    namespace.set_rules(RoleRules::Shipped).await?;
    let back = router
        .wait_fleet(&["a 127.0.1.1:8000", "b 127.0.1.2:8000"])
        .await?;
    router.wait_up(POOL, true, PATIENCE).await?;
    let noticed = noticed.as_secs_f64();
    let back = back.as_secs_f64();
    Ok(format!(
        "up 0 after {noticed:.1} s, fleet kept; new pod {back:.1} s after the grant"
    ))
}

/// Counts the requests of warmroute for a resource within 10 s.
async fn requests_of(namespace: &TestNamespace, resource: &str) -> anyhow::Result<usize> {
    let count = || -> anyhow::Result<usize> {
        Ok(namespace
            .audit()?
            .iter()
            .filter(|record| record.resource == resource)
            .count())
    };
    let before = count()?;
    tokio::time::sleep(Duration::from_secs(10)).await;
    Ok(count()? - before)
}

pub(super) async fn list_without_watch(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create_with(&plane, rules_with(&["get", "list"], &READ)).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let router = namespace.start_router().await?;
    router.wait_log("cannot watch resource").await?;
    let lines = router.log().lines().count();
    let requests = requests_of(&namespace, "pods").await?;
    let lines = router.log().lines().count() - lines;
    ensure!(
        requests <= 30 && lines <= 10,
        "{requests} requests and {lines} lines within 10 s\n{}",
        router.log()
    );
    namespace.set_rules(RoleRules::Shipped).await?;
    router.wait_up(POOL, true, PATIENCE).await?;
    namespace.create_pod("b", "127.0.1.2").await?;
    let took = router
        .wait_fleet(&["a 127.0.1.1:8000", "b 127.0.1.2:8000"])
        .await?;
    Ok(format!(
        "names the verb watch; {requests} requests and {lines} log lines in 10 s; after the grant a new pod in {} ms",
        took.as_millis()
    ))
}

pub(super) async fn optional_kinds_without_watch(plane: Arc<TestControlPlane>) -> CaseResult {
    let pods = rule("", &["pods"], &READ);
    let pools = rule("inference.networking.k8s.io", &["inferencepools"], &READ);
    let kinds = ["inferenceobjectives", "inferencemodelrewrites"];
    let optional = rule("llm-d.ai", &kinds, &["get", "list"]);
    let rules = RoleRules::Rules(serde_json::json!([pods, pools, optional]));
    let namespace = TestNamespace::create_with(&plane, rules).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let router = namespace.start_router().await?;
    router.wait_fleet(&["a 127.0.1.1:8000"]).await?;
    router.wait_log("cannot watch resource").await?;
    let lines = router.log().lines().count();
    let requests = requests_of(&namespace, "inferenceobjectives").await?;
    let lines = router.log().lines().count() - lines;
    ensure!(
        requests <= 30 && lines <= 10,
        "{requests} requests and {lines} lines within 10 s\n{}",
        router.log()
    );
    Ok(format!(
        "names the verb watch; {requests} requests and {lines} log lines in 10 s; the fleet is complete"
    ))
}
