//! Large uploads and small requests on Envoy's one connection to warmroute.

use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use warmroute_testbed::deployment::MODEL;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::shipped::configurations::GATEWAY_API;
use crate::support::deployment::{TestDeployment, essay, fast};

const UPLOADS: u64 = 12;
/// Bytes of each upload. All fit into Envoy's default window of a stream, 16 MiB.
const UPLOAD_BYTES: usize = 8 << 20;
/// Maximum part of an upload that Envoy may queue on the connection: the configured window, and the
/// last piece that it has read, up to 1 MiB.
const MAX_QUEUED_BYTES: u64 = 2 << 20;

/// Sends all bytes of a request except the last one, and then keeps the connection open.
async fn upload(port: u16) {
    let text = "a ".repeat(UPLOAD_BYTES / 2);
    let body = format!(r#"{{"model":"{MODEL}","prompt":"{text}"}}"#);
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut connection = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    connection.write_all(head.as_bytes()).await.unwrap();
    connection
        .write_all(&body.as_bytes()[..body.len() - 1])
        .await
        .unwrap();
    std::future::pending::<()>().await;
}

/// While warmroute does not read, Envoy must not queue the uploads: everything that it queues is
/// sent before the small requests that arrive later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn large_uploads_do_not_delay_small_requests() {
    let mut deployment = TestDeployment::engines(&[fast(1)]).await;
    deployment.write_workers().unwrap();
    let workers = deployment.addresses();
    let router_config = GATEWAY_API.warmroute();
    deployment.start_router(&router_config).await.unwrap();
    let config = GATEWAY_API.envoy(&deployment, &workers, "30s");
    // Envoy must keep the connection while warmroute does not read.
    let pings = "connection_keepalive: {interval: 2s, timeout: 2s}";
    assert_eq!(config.matches(pings).count(), 1);
    let config = config.replace(
        pings,
        "connection_keepalive: {interval: 300s, timeout: 300s}",
    );
    deployment.start_envoy(&config).await.unwrap();
    assert_eq!(deployment.complete(&essay(0)).await.status, 200);

    let address = deployment.url("");
    let port = address.rsplit(':').next().unwrap();
    let port: u16 = port.trim_end_matches('/').parse().unwrap();
    let router = deployment.router().unwrap();
    router.freeze();
    let mut uploads = JoinSet::new();
    (0..UPLOADS).for_each(|_| drop(uploads.spawn(upload(port))));
    let mut queued = 0;
    let blocked = until(PATIENCE, async || {
        let stat = async |name| {
            deployment
                .envoy_stat(&format!("cluster.ext_proc.{name}"))
                .await
        };
        queued = stat("http2.pending_send_bytes").await;
        let paused = stat("upstream_flow_control_backed_up_total").await;
        paused >= UPLOADS || queued > UPLOADS * MAX_QUEUED_BYTES
    })
    .await;
    router.thaw();
    assert!(blocked, "Envoy queues {queued} bytes");
    assert!(
        queued <= UPLOADS * MAX_QUEUED_BYTES,
        "Envoy queues {queued} bytes"
    );
    assert_eq!(deployment.complete(&essay(1)).await.status, 200);
    assert_eq!(uploads.len() as u64, UPLOADS, "an upload has failed");
}
