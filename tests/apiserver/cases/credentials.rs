//! Tokens and certificates that change.

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use serde_json::json;

use crate::control_plane::ControlPlane;
use crate::namespace::TestNamespace;
use crate::runner::CaseResult;

const A: &str = "a 127.0.1.1:8000";
const B: &str = "b 127.0.1.2:8000";

/// The token is revoked, and the new one is in the file at once.
pub(super) async fn token_replaced(plane: Arc<ControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let mut router = namespace.start_router_with(json!({"kubernetes": {"silence": "3s"}})).await?;
    router.wait_fleet(&[A]).await?;
    namespace.revoke_tokens().await?;
    router.mount(&namespace.account().await?)?;
    namespace.create_pod("b", "127.0.1.2").await?;
    // Watches that were granted go on.
    router.wait_fleet(&[A, B]).await?;
    // The API server keeps a token that it has verified for 10 s.
    tokio::time::sleep(Duration::from_secs(14)).await;
    namespace.remove_pod("b").await?;
    let took = router.wait_fleet_within(Duration::from_secs(75), &[A]).await?;
    ensure!(took < Duration::from_secs(20), "the new token took effect after {took:?}");
    Ok(format!("changes are seen {:.1} s after the watches had to be asked for with the new token", took.as_secs_f64()))
}
