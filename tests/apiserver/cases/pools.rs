//! Changes of an InferencePool.

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use serde_json::json;

use crate::control_plane::{INFERENCE_POOLS, TestControlPlane};
use crate::namespace::TestNamespace;
use crate::objects::{POOL, engine_labels, inference_pool};
use crate::router::{PATIENCE, RouterProcess};
use crate::runner::CaseResult;

const A: &str = "a 127.0.1.1:8000";
const MOMENT: Duration = Duration::from_millis(400);

async fn start(plane: &Arc<TestControlPlane>) -> anyhow::Result<(TestNamespace, RouterProcess)> {
    let namespace = TestNamespace::create(plane).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let router = namespace.start_router().await?;
    router.wait_fleet(&[A]).await?;
    Ok((namespace, router))
}

pub(super) async fn ports_change(plane: Arc<TestControlPlane>) -> CaseResult {
    let (namespace, router) = start(&plane).await?;
    let mut longest = Duration::ZERO;
    for count in [3_u16, 8, 1] {
        let ports: Vec<u16> = (8000..8000 + count).collect();
        let change = inference_pool(POOL, &engine_labels(), &ports);
        namespace.change_of(INFERENCE_POOLS, POOL, &change).await?;
        let expected: Vec<String> = ports
            .iter()
            .map(|port| format!("a 127.0.1.1:{port}"))
            .collect();
        let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
        longest = longest.max(router.wait_fleet(&expected).await?);
        if count == 8 {
            let ranks = router
                .fleet_by(|worker| worker["ranks"].to_string())
                .await?;
            ensure!(
                ranks
                    .iter()
                    .collect::<std::collections::BTreeSet<_>>()
                    .len()
                    == 8,
                "{ranks:?}"
            );
        }
    }
    Ok(format!(
        "3, 8 and 1 ports: the workers follow within {} ms, one rank each",
        longest.as_millis()
    ))
}

pub(super) async fn selector_changes(plane: Arc<TestControlPlane>) -> CaseResult {
    let (namespace, router) = start(&plane).await?;
    namespace
        .create_pod_with("b", "127.0.1.2", &json!({"app": "other"}))
        .await?;
    let select = async |selector: serde_json::Value| {
        let change = json!({"spec": {"selector": {"matchLabels": selector}}});
        namespace.change_of(INFERENCE_POOLS, POOL, &change).await
    };
    select(json!({"app": "other"})).await?;
    let first = router.wait_fleet(&["b 127.0.1.2:8000"]).await?;
    select(json!({"app": POOL})).await?;
    let second = router.wait_fleet(&[A]).await?;
    select(json!({"app": "none"})).await?;
    router.wait_log("lists no workers").await?;
    router.keeps_fleet(MOMENT, &[A]).await?;
    select(json!({"app": POOL})).await?;
    router.wait_fleet(&[A]).await?;
    // The definition accepts an invalid label key. The API server then rejects the list of pods.
    select(json!({"bad key!": "x"})).await?;
    router.wait_up(POOL, false, PATIENCE).await?;
    router.keeps_fleet(MOMENT, &[A]).await?;
    select(json!({"bad key!": null})).await?;
    router.wait_up(POOL, true, PATIENCE).await?;
    router.wait_fleet(&[A]).await?;
    Ok(format!(
        "follows after {} and {} ms; no match: fleet kept during the grace period; invalid key: up 0, fleet kept",
        first.as_millis(),
        second.as_millis()
    ))
}

pub(super) async fn pool_deleted(plane: Arc<TestControlPlane>) -> CaseResult {
    let (namespace, router) = start(&plane).await?;
    let finalizers = json!({"metadata": {"finalizers": ["example.com/hold"]}});
    namespace
        .change_of(INFERENCE_POOLS, POOL, &finalizers)
        .await?;
    namespace.delete_of(INFERENCE_POOLS, POOL).await?;
    router.keeps_fleet(MOMENT, &[A]).await?;
    namespace
        .change_of(
            INFERENCE_POOLS,
            POOL,
            &json!({"metadata": {"finalizers": null}}),
        )
        .await?;
    router.wait_up(POOL, false, PATIENCE).await?;
    router.keeps_fleet(MOMENT, &[A]).await?;
    let gone = router.wait_removal().await?;
    ensure!(
        !router.log().contains("is kept"),
        "the log claims that the fleet is kept:\n{}",
        router.log()
    );
    namespace.create_pool(&[8000]).await?;
    let back = router.wait_fleet(&[A]).await?;
    router.wait_up(POOL, true, PATIENCE).await?;
    Ok(format!(
        "fleet kept while a finalizer blocks the deletion and during the grace period; empty after {} ms; back after {} ms",
        gone.as_millis(),
        back.as_millis()
    ))
}

pub(super) async fn event_ports(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pool(&[8000, 8001]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let entry = json!({"name": POOL, "worker": {"model": "qwen2.5", "kv_events": {"port": 5557}}});
    let router = namespace
        .start_router_with(json!({"workers": {"kubernetes": {"pools": [entry]}}}))
        .await?;
    router.wait_fleet(&[A, "a 127.0.1.1:8001"]).await?;
    let sources = router
        .fleet_by(|worker| worker["event_sources"][0]["endpoint"].to_string())
        .await?;
    ensure!(
        sources == [r#""tcp://127.0.1.1:5557""#, r#""tcp://127.0.1.1:5558""#],
        "{sources:?}"
    );
    Ok("KV events of the ranks: 5557 and 5558".to_owned())
}
