//! Optional objects: InferenceObjectives and InferenceModelRewrites.

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use serde_json::json;

use crate::control_plane::{OBJECTIVES, REWRITES, TestControlPlane};
use crate::namespace::{RoleRules, TestNamespace};
use crate::objects::{objective, rewrite};
use crate::router::RouterProcess;
use crate::runner::CaseResult;
use crate::traffic::route;

const A: &str = "a 127.0.1.1:8000";
const FOLLOWED: &str = "watched as llm-d.ai/v1alpha2";

async fn start(
    plane: &Arc<TestControlPlane>,
    rules: RoleRules,
) -> anyhow::Result<(TestNamespace, RouterProcess)> {
    let namespace = TestNamespace::create_with(plane, rules).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let router = namespace
        .start_router_with(json!({"workers": {"kubernetes": {"resync_interval": "3s"}}}))
        .await?;
    router.wait_fleet(&[A]).await?;
    Ok((namespace, router))
}

pub(super) async fn rights_granted_later(plane: Arc<TestControlPlane>) -> CaseResult {
    let (namespace, router) = start(&plane, RoleRules::Shipped).await?;
    namespace
        .create_of(OBJECTIVES, &objective(OBJECTIVES.api, "gold", 5))
        .await?;
    router.wait_cluster("forbidden").await?;
    namespace.set_rules(RoleRules::WithOptionalKinds).await?;
    let took = router.wait_cluster("gold").await?;
    Ok(format!(
        "forbidden; followed {:.1} s after the grant with `resync_interval: 3s`",
        took.as_secs_f64()
    ))
}

pub(super) async fn objectives_change(plane: Arc<TestControlPlane>) -> CaseResult {
    let (namespace, router) = start(&plane, RoleRules::WithOptionalKinds).await?;
    router.wait_cluster(FOLLOWED).await?;
    namespace
        .create_of(OBJECTIVES, &objective(OBJECTIVES.api, "gold", 5))
        .await?;
    let mut longest = router.wait_cluster("\"priority\":5").await?;
    namespace
        .change_of(OBJECTIVES, "gold", &json!({"spec": {"priority": -3}}))
        .await?;
    longest = longest.max(router.wait_cluster("\"priority\":-3").await?);
    let mut foreign = objective(OBJECTIVES.api, "foreign", 9);
    foreign["spec"]["poolRef"]["name"] = json!("other");
    namespace.create_of(OBJECTIVES, &foreign).await?;
    // The API server rejects values that the definition does not allow.
    let path = namespace.path(OBJECTIVES.api, OBJECTIVES.plural);
    let mut odd = objective(OBJECTIVES.api, "odd", 1);
    odd["spec"]["priority"] = json!("high");
    let status = plane.admin.try_create(&path, &odd).await?;
    ensure!(status.as_u16() == 422 || status.as_u16() == 400, "{status}");
    namespace.delete_of(OBJECTIVES, "gold").await?;
    longest = longest.max(router.wait_cluster("\"objectives\":[]").await?);
    Ok(format!(
        "created, changed, deleted: within {} ms; of another pool: ignored",
        longest.as_millis()
    ))
}

pub(super) async fn rewrites_change(plane: Arc<TestControlPlane>) -> CaseResult {
    let (namespace, router) = start(&plane, RoleRules::WithOptionalKinds).await?;
    router.wait_cluster(FOLLOWED).await?;
    namespace
        .create_of(REWRITES, &rewrite("first", "old", "qwen2.5"))
        .await?;
    router.wait_cluster("/first").await?;
    // Creation timestamps have a resolution of one second.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    namespace
        .create_of(REWRITES, &rewrite("a-second", "older", "qwen2.5"))
        .await?;
    router.wait_cluster("/a-second").await?;
    let page = router.page("debug/cluster").await?;
    ensure!(
        page.find("/first") < page.find("/a-second"),
        "the older object is not first: {page}"
    );
    namespace.delete_of(REWRITES, "first").await?;
    namespace.delete_of(REWRITES, "a-second").await?;
    router.wait_cluster("\"rewrites\":[]").await?;
    Ok("the oldest object is first; deleted objects are removed".to_owned())
}

pub(super) async fn rewrite_takes_effect(plane: Arc<TestControlPlane>) -> CaseResult {
    let (namespace, router) = start(&plane, RoleRules::WithOptionalKinds).await?;
    namespace
        .create_of(REWRITES, &rewrite("canary", "old", "qwen2.5"))
        .await?;
    router.wait_cluster("/canary").await?;
    let reply = route(&router, "old").await?;
    ensure!(
        reply.contains("qwen2.5") && reply.contains("127.0.1.1:8000"),
        "{reply}"
    );
    namespace.delete_of(REWRITES, "canary").await?;
    router.wait_cluster("\"rewrites\":[]").await?;
    let reply = route(&router, "old").await?;
    ensure!(!reply.contains("qwen2.5"), "{reply}");
    Ok("the body names the target while the object exists".to_owned())
}

/// The definitions do not require `spec`.
pub(super) async fn objects_without_spec(plane: Arc<TestControlPlane>) -> CaseResult {
    let (namespace, mut router) = start(&plane, RoleRules::WithOptionalKinds).await?;
    router.wait_cluster(FOLLOWED).await?;
    namespace
        .create_of(OBJECTIVES, &objective(OBJECTIVES.api, "gold", 5))
        .await?;
    namespace
        .create_of(REWRITES, &rewrite("canary", "old", "qwen2.5"))
        .await?;
    router.wait_cluster("\"priority\":5").await?;
    let empty = |kind: &str| json!({"apiVersion": OBJECTIVES.api, "kind": kind, "metadata": {"name": "without-spec"}});
    namespace
        .create_of(OBJECTIVES, &empty("InferenceObjective"))
        .await?;
    namespace
        .create_of(REWRITES, &empty("InferenceModelRewrite"))
        .await?;
    router.wait_log("without-spec").await?;
    namespace
        .change_of(OBJECTIVES, "gold", &json!({"spec": {"priority": 6}}))
        .await?;
    let took = router.wait_cluster("\"priority\":6").await?;
    let longest = router.log().lines().map(str::len).max().unwrap_or_default();
    ensure!(longest < 2000, "a line of the log has {longest} bytes");
    router.restart().await?;
    router.wait_cluster("\"priority\":6").await?;
    router.wait_cluster("/canary").await?;
    Ok(format!(
        "named in the log and ignored; the others apply ({} ms), also after a restart",
        took.as_millis()
    ))
}

pub(super) async fn explain_applies_rewrites(plane: Arc<TestControlPlane>) -> CaseResult {
    let (namespace, router) = start(&plane, RoleRules::WithOptionalKinds).await?;
    namespace
        .create_of(REWRITES, &rewrite("canary", "old", "qwen2.5"))
        .await?;
    router.wait_cluster("/canary").await?;
    let page = router.explain("old").await?;
    let expected = router.explain("qwen2.5").await?;
    ensure!(
        page["reason"] == expected["reason"] && page["reason"] != "unknown_model",
        "{page}, not {expected}"
    );
    Ok(format!(
        "mode and reason of the target: {} {}",
        page["mode"], page["reason"]
    ))
}
