//! `warmroute doctor` in a faulty cluster.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::ensure;
use serde_json::json;

use crate::control_plane::TestControlPlane;
use crate::namespace::{READ, TestNamespace, rules_with};
use crate::objects::{POOL, running};
use crate::router::{RouterOptions, RouterProcess};
use crate::runner::CaseResult;

/// Exit code of the doctor if it found errors.
const ERRORS: i32 = 2;

async fn examine(router: &RouterProcess) -> anyhow::Result<String> {
    let (code, text) = router
        .run(&["doctor", "--timeout", "1s", "--no-canary"])
        .await?;
    ensure!(code == ERRORS, "exit code {code}:\n{text}");
    Ok(text)
}

fn contains(text: &str, parts: &[&str]) -> anyhow::Result<()> {
    for part in parts {
        ensure!(
            text.contains(part),
            "doctor does not name {part:?}:\n{text}"
        );
    }
    Ok(())
}

pub(super) async fn absent_pool(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let pools =
        [POOL, "misspelt"].map(|name| json!({"name": name, "worker": {"model": "qwen2.5"}}));
    let router = namespace
        .start_router_with(json!({"workers": {"kubernetes": {"pools": pools}}}))
        .await?;
    let text = examine(&router).await?;
    // The existing pool is examined: its engine does not respond.
    contains(&text, &["misspelt", "/a"])?;
    Ok("exit 2; the absent pool is named, the other one is examined".to_owned())
}

pub(super) async fn unusable_pods(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    namespace.create_pending("not-ready").await?;
    namespace
        .set_status("not-ready", &running(&["127.0.1.2"], false))
        .await?;
    namespace
        .create_pod_with(
            "odd-role",
            "127.0.1.3",
            &json!({"app": POOL, "llm-d.ai/role": "encode"}),
        )
        .await?;
    let router = namespace.start_router().await?;
    let text = examine(&router).await?;
    contains(&text, &["not-ready", "odd-role", "encode"])?;
    Ok("exit 2; names the pod that is not ready and the one with the role `encode`".to_owned())
}

pub(super) async fn missing_rights(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create_with(&plane, rules_with(&["get", "list"], &READ)).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let router = namespace.start_router().await?;
    let text = examine(&router).await?;
    contains(&text, &["watch", "pods"])?;
    namespace.set_rules(rules_with(&[], &READ)).await?;
    let text = examine(&router).await?;
    contains(&text, &["list", "pods"])?;
    Ok("exit 2; names list and watch of pods".to_owned())
}

pub(super) async fn api_server_away(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    let away = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
    let options = RouterOptions {
        api_server: away,
        ..namespace.options(json!({})).await?
    };
    let router = RouterProcess::start(options).await?;
    let text = examine(&router).await?;
    contains(&text, &["refused"])?;
    Ok("exit 2; names the refused connection".to_owned())
}
