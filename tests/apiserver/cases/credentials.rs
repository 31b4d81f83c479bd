//! Tokens and certificates that are replaced at run time.

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use serde_json::json;

use crate::control_plane::TestControlPlane;
use crate::namespace::TestNamespace;
use crate::objects::POOL;
use crate::pki::TestAuthority;
use crate::proxy::{ApiProxy, ProxyMode};
use crate::router::{MountedAccount, PATIENCE, RouterOptions, RouterProcess};
use crate::runner::CaseResult;

const A: &str = "a 127.0.1.1:8000";
const B: &str = "b 127.0.1.2:8000";

/// The token is revoked while the mounted file already has a new one.
pub(super) async fn token_replaced(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let mut router = namespace
        .start_router_with(json!({"workers": {"kubernetes": {"watch_timeout": "3s"}}}))
        .await?;
    router.wait_fleet(&[A]).await?;
    namespace.revoke_tokens().await?;
    router.mount(&namespace.account().await?)?;
    namespace.create_pod("b", "127.0.1.2").await?;
    // Established watches continue without a valid token.
    router.wait_fleet(&[A, B]).await?;
    // The API server caches a verified token for 10 s.
    tokio::time::sleep(Duration::from_secs(14)).await;
    namespace.remove_pod("b").await?;
    let took = router
        .wait_fleet_within(Duration::from_secs(75), &[A])
        .await?;
    ensure!(
        took < Duration::from_secs(20),
        "the new token took effect after {took:?}"
    );
    Ok(format!(
        "changes are visible {:.1} s after the watches needed the new token",
        took.as_secs_f64()
    ))
}

/// The API server gets a certificate of another authority: first of one that `ca.crt` already
/// contains, then of one that it does not contain.
pub(super) async fn authority_replaced(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let proxy = ApiProxy::start(&plane, ProxyMode::Pass).await?;
    let options = RouterOptions {
        api_server: proxy.address,
        ..namespace.options(json!({})).await?
    };
    let mut router = RouterProcess::start(options).await?;
    router.wait_fleet(&[A]).await?;
    let account = namespace.account().await?;
    let with_ca = |ca: &str| MountedAccount {
        ca: ca.to_owned(),
        ..account.clone()
    };
    let second = TestAuthority::new("second");
    router.mount(&with_ca(&format!("{}{}", account.ca, second.cert)))?;
    // warmroute rereads the mounted files within seconds.
    tokio::time::sleep(Duration::from_secs(10)).await;
    proxy.change_authority(&second).await?;
    namespace.create_pod("b", "127.0.1.2").await?;
    let known = router.wait_fleet(&[A, B]).await?;
    router.mount(&with_ca(&second.cert))?;
    let third = TestAuthority::new("third");
    proxy.change_authority(&third).await?;
    router.wait_up(POOL, false, PATIENCE).await?;
    router.wait_log("certificate").await?;
    namespace.remove_pod("b").await?;
    router.keeps_fleet(Duration::from_secs(1), &[A, B]).await?;
    router.mount(&with_ca(&third.cert))?;
    let unknown = router
        .wait_fleet_within(Duration::from_secs(60), &[A])
        .await?;
    ensure!(
        unknown < Duration::from_secs(15),
        "the new ca.crt took effect after {unknown:?}"
    );
    Ok(format!(
        "authority in ca.crt: changes visible after {:.1} s; not in ca.crt: up 0, fleet kept, log names the certificate; visible {:.1} s after the new ca.crt",
        known.as_secs_f64(),
        unknown.as_secs_f64()
    ))
}
