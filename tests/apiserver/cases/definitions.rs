//! Custom resource definitions that are installed and deleted at run time.

use std::sync::Arc;

use anyhow::ensure;
use serde_json::json;
use warmroute_testbed::ports::until;

use crate::control_plane::{INFERENCE_POOLS, OBJECTIVES, OLD_OBJECTIVES, TestControlPlane};
use crate::namespace::{RoleRules, TestNamespace};
use crate::objects::{POOL, objective};
use crate::router::PATIENCE;
use crate::runner::CaseResult;

const A: &str = "a 127.0.1.1:8000";

/// Must be the first case of its control plane, because no definition may be installed yet.
pub(super) async fn pool_definition_installed_later(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let router = namespace.start_router().await?;
    router.wait_log("is not installed").await?;
    ensure!(
        !router.is_up(POOL).await?,
        "discovery_up is 1 without the definition"
    );
    plane.install(INFERENCE_POOLS).await?;
    namespace.create_pool(&[8000]).await?;
    let took = router.wait_fleet(&[A]).await?;
    Ok(format!(
        "log names the definition, up 0; fleet {:.1} s after the definition and the pool",
        took.as_secs_f64()
    ))
}

pub(super) async fn pool_definition_deleted(plane: Arc<TestControlPlane>) -> CaseResult {
    plane.install(INFERENCE_POOLS).await?;
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let router = namespace.start_router().await?;
    router.wait_fleet(&[A]).await?;
    plane.uninstall(INFERENCE_POOLS).await?;
    router.wait_up(POOL, false, PATIENCE).await?;
    let gone = router.wait_removal().await?;
    plane.install(INFERENCE_POOLS).await?;
    namespace.create_pool(&[8000]).await?;
    let back = router.wait_fleet(&[A]).await?;
    Ok(format!(
        "fleet empty after {} ms; back {:.1} s after the pool",
        gone.as_millis(),
        back.as_secs_f64()
    ))
}

pub(super) async fn optional_definitions_change(plane: Arc<TestControlPlane>) -> CaseResult {
    plane.install(INFERENCE_POOLS).await?;
    let namespace = TestNamespace::create_with(&plane, RoleRules::WithOptionalKinds).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let router = namespace
        .start_router_with(json!({"workers": {"kubernetes": {"resync_interval": "2s"}}}))
        .await?;
    router.wait_cluster("not installed").await?;
    plane.install(OLD_OBJECTIVES).await?;
    namespace
        .create_of(OLD_OBJECTIVES, &objective(OLD_OBJECTIVES.api, "older", 1))
        .await?;
    let mut longest = router.wait_cluster("older").await?;
    router
        .wait_cluster("watched as inference.networking.x-k8s.io/v1alpha2")
        .await?;
    // If both API groups are installed, warmroute uses the newer one.
    plane.install(OBJECTIVES).await?;
    namespace
        .create_of(OBJECTIVES, &objective(OBJECTIVES.api, "newer", 2))
        .await?;
    longest = longest.max(router.wait_cluster("newer").await?);
    plane.uninstall(OBJECTIVES).await?;
    longest = longest.max(router.wait_cluster("older").await?);
    plane.uninstall(OLD_OBJECTIVES).await?;
    longest = longest.max(router.wait_cluster("\"objectives\":[]").await?);
    // The definition of InferenceModelRewrite was never installed.
    let page = async || router.page("debug/cluster").await.unwrap_or_default();
    let absent = until(PATIENCE, async || {
        page().await.matches("not installed").count() == 2
    })
    .await;
    ensure!(absent, "{}", page().await);
    Ok(format!(
        "llm-d.ai takes precedence; falls back; not installed: objects removed; within {:.1} s with `resync_interval: 2s`",
        longest.as_secs_f64()
    ))
}
