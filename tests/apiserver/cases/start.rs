//! Startup while objects, rights or the API server are still missing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::{Value, json};
use warmroute_testbed::ports::until;

use crate::control_plane::{INFERENCE_POOLS, TestControlPlane};
use crate::namespace::TestNamespace;
use crate::objects::{POOL, engine_labels, inference_pool};
use crate::pki::TestAuthority;
use crate::proxy::{ApiProxy, ProxyMode};
use crate::router::{MountedAccount, PATIENCE, RouterOptions, RouterProcess};
use crate::runner::CaseResult;

/// Returns the configuration of a pool.
fn pool_entry(name: &str) -> Value {
    json!({"name": name, "worker": {"model": "qwen2.5"}})
}

pub(super) async fn pool_and_pods_exist(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    namespace.create_pod("b", "127.0.1.2").await?;
    let model = |file: &str| {
        format!(
            "{}/examples/models/qwen2.5/{file}",
            env!("CARGO_MANIFEST_DIR")
        )
    };
    let config = json!({"models": [{
        "name": "qwen2.5", "block_size": 16,
        "tokenizer": model("tokenizer.json.gz"), "tokenizer_config": model("tokenizer_config.json"),
    }]});
    let began = Instant::now();
    let router = namespace.start_router_with(config).await?;
    router
        .wait_fleet(&["a 127.0.1.1:8000", "b 127.0.1.2:8000"])
        .await?;
    let fleet = began.elapsed();
    ensure!(
        until(PATIENCE * 2, async || router.is_ready().await).await,
        "not ready:\n{}",
        router.log()
    );
    let ready = began.elapsed();
    ensure!(router.is_up(POOL).await?, "discovery_up is 0");
    Ok(format!(
        "fleet {:.2} s and ready {:.1} s after the start",
        fleet.as_secs_f64(),
        ready.as_secs_f64()
    ))
}

pub(super) async fn pool_created_later(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let router = namespace.start_router().await?;
    router.wait_log("there is no such InferencePool").await?;
    ensure!(
        !router.is_up(POOL).await?,
        "discovery_up is 1 without a pool"
    );
    namespace.create_pool(&[8000]).await?;
    let took = router.wait_fleet(&["a 127.0.1.1:8000"]).await?;
    router.wait_up(POOL, true, PATIENCE).await?;
    Ok(format!(
        "\"there is no such InferencePool\", up 0; fleet {} ms after the pool",
        took.as_millis()
    ))
}

pub(super) async fn pool_of_other_namespace(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    let other = TestNamespace::create(&plane).await?;
    let mut entry = pool_entry(POOL);
    entry["namespace"] = json!(other.name);
    let router = namespace
        .start_router_with(json!({"workers": {"kubernetes": {"pools": [entry]}}}))
        .await?;
    router.wait_log("forbidden").await?;
    ensure!(
        router.log().contains(&other.name),
        "the log does not name {}:\n{}",
        other.name,
        router.log()
    );
    Ok("forbidden; the log names the namespace".to_owned())
}

pub(super) async fn two_pools(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pool(&[8000]).await?;
    namespace
        .create_of(
            INFERENCE_POOLS,
            &inference_pool("second", &json!({"app": "second"}), &[9000]),
        )
        .await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    namespace
        .create_pod_with("b", "127.0.1.2", &json!({"app": "second"}))
        .await?;
    let pools = [POOL, "second", "misspelt"].map(pool_entry);
    let router = namespace
        .start_router_with(json!({"workers": {"kubernetes": {"pools": pools}}}))
        .await?;
    router
        .wait_fleet(&["a 127.0.1.1:8000", "b 127.0.1.2:9000"])
        .await?;
    router.wait_up(POOL, true, PATIENCE).await?;
    router.wait_up("second", true, PATIENCE).await?;
    router.wait_up("misspelt", false, PATIENCE).await?;
    router.wait_log("kubernetes misspelt").await?;
    ensure!(
        until(PATIENCE, async || router.is_ready().await).await,
        "not ready"
    );
    Ok("fleet of two pools, ready; up 0 for the misspelt third, which the log names".to_owned())
}

pub(super) async fn pools_with_same_pods(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pool(&[8000]).await?;
    namespace
        .create_of(
            INFERENCE_POOLS,
            &inference_pool("second", &engine_labels(), &[8000]),
        )
        .await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let pools = [POOL, "second"].map(pool_entry);
    let router = namespace
        .start_router_with(json!({"workers": {"kubernetes": {"pools": pools}}}))
        .await?;
    router.wait_fleet(&["a 127.0.1.1:8000"]).await?;
    router.wait_log("127.0.1.1:8000").await?;
    router
        .keeps_fleet(Duration::from_millis(500), &["a 127.0.1.1:8000"])
        .await?;
    let taints = router
        .fleet_by(|worker| worker["taints"].to_string())
        .await?;
    ensure!(
        taints.iter().all(|taints| taints.contains(POOL)),
        "{taints:?}"
    );
    Ok("the first pool has the worker; a warning names the address".to_owned())
}

/// Token and namespace files end in a newline, as some tools write them.
pub(super) async fn account_with_newlines(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let mut options = namespace.options(json!({})).await?;
    let mut account = namespace.account().await?;
    account.token.push('\n');
    account.namespace.push('\n');
    options.account = Some(account);
    let router = RouterProcess::start(options).await?;
    let took = router.wait_fleet(&["a 127.0.1.1:8000"]).await?;
    Ok(format!("fleet after {} ms", took.as_millis()))
}

pub(super) async fn no_service_account(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    let options = RouterOptions {
        account: None,
        ..namespace.options(json!({})).await?
    };
    let router = RouterProcess::start(options).await?;
    router.wait_log("automountServiceAccountToken").await?;
    // warmroute retries without repeating the message.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let lines = router.log_lines("automountServiceAccountToken");
    ensure!(
        router.is_running() && !router.is_ready().await,
        "warmroute exited, or is ready without a worker"
    );
    ensure!(lines == 1, "logged {lines} times:\n{}", router.log());
    let page = router.page("readyz").await?;
    Ok(format!(
        "names automountServiceAccountToken, once; /readyz: {}",
        page.trim().replace('|', "/")
    ))
}

/// Starts with a wrong service account and replaces it after 6 s.
async fn replaced_later(
    plane: &Arc<TestControlPlane>,
    wrong: impl FnOnce(&mut MountedAccount),
    message: &str,
) -> anyhow::Result<Duration> {
    let namespace = TestNamespace::create(plane).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let mut options = namespace.options(json!({})).await?;
    let right = namespace.account().await?;
    let mut account = right.clone();
    wrong(&mut account);
    options.account = Some(account);
    let mut router = RouterProcess::start(options).await?;
    router.wait_log(message).await?;
    tokio::time::sleep(Duration::from_secs(6)).await;
    router.mount(&right)?;
    let took = router
        .wait_fleet_within(Duration::from_secs(80), &["a 127.0.1.1:8000"])
        .await?;
    ensure!(
        took < Duration::from_secs(15),
        "the new file took effect after {took:?}"
    );
    Ok(took)
}

pub(super) async fn unknown_token_replaced(plane: Arc<TestControlPlane>) -> CaseResult {
    let wrong = |account: &mut MountedAccount| account.token = "unknown".to_owned();
    let took = replaced_later(&plane, wrong, "Unauthorized").await?;
    Ok(format!(
        "\"Unauthorized\"; fleet {:.1} s after the new token",
        took.as_secs_f64()
    ))
}

pub(super) async fn wrong_authority_replaced(plane: Arc<TestControlPlane>) -> CaseResult {
    let wrong = |account: &mut MountedAccount| account.ca = TestAuthority::new("another").cert;
    let took = replaced_later(&plane, wrong, "certificate").await?;
    Ok(format!(
        "names the certificate; fleet {:.1} s after the new ca.crt",
        took.as_secs_f64()
    ))
}

/// A proxy in front of the API server responds with 503 for a while.
pub(super) async fn api_server_unavailable(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace.create_pool(&[8000]).await?;
    namespace.create_pod("a", "127.0.1.1").await?;
    let proxy = ApiProxy::start(&plane, ProxyMode::Status(503)).await?;
    let options = RouterOptions {
        api_server: proxy.address,
        ..namespace.options(json!({})).await?
    };
    let router = RouterProcess::start(options).await?;
    router.wait_log("503").await?;
    tokio::time::sleep(Duration::from_secs(20)).await;
    let lines = router.log_lines("503");
    proxy.set(ProxyMode::Pass);
    let took = router
        .wait_fleet_within(Duration::from_secs(60), &["a 127.0.1.1:8000"])
        .await?;
    ensure!(
        took < Duration::from_secs(8),
        "the fleet was complete {took:?} after the outage"
    );
    ensure!(lines <= 6, "503 is in {lines} lines of the log");
    Ok(format!(
        "503 for 20 s: {lines} lines; fleet {:.1} s after it",
        took.as_secs_f64()
    ))
}

/// A pool is configured by labels and ports, next to a pool whose InferencePool does not exist.
pub(super) async fn pool_by_labels(plane: Arc<TestControlPlane>) -> CaseResult {
    let namespace = TestNamespace::create(&plane).await?;
    namespace
        .create_pod_with("a", "127.0.1.1", &json!({"app": "labelled"}))
        .await?;
    namespace.create_pod("other", "127.0.1.2").await?;
    let labelled =
        json!({"selector": {"app": "labelled"}, "ports": [9000], "worker": {"model": "qwen2.5"}});
    let config = json!({
        "process": {"pool": null},
        "workers": {"kubernetes": {"pools": [pool_entry(POOL), labelled]}},
    });
    let router = namespace.start_router_with(config).await?;
    router.wait_fleet(&["a 127.0.1.1:9000"]).await?;
    router.wait_up("app=labelled", true, PATIENCE).await?;
    router.wait_up(POOL, false, PATIENCE).await?;
    Ok("the pods with the labels; up 0 for the absent pool only".to_owned())
}
