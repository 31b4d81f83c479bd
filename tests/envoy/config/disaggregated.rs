//! Configurations for disaggregated serving.

use super::*;

const DISAGGREGATED: [&str; 2] = ["disaggregated-call", "disaggregated-mirror"];

/// Other paths of an engine would let a client read or abort the requests of other clients.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn disaggregated_envoy_allows_only_listed_paths() {
    for file in DISAGGREGATED {
        let decode = RecordingWorker::start().await;
        let prefill = RecordingWorker::start().await;
        let gateway =
            EnvoyGateway::start_disaggregated(file, &[decode.address], prefill.address).await;
        for path in [
            "/abort_request",
            "/flush_cache",
            "/sleep",
            "/reset_prefix_cache",
            "/inference/v1/generate",
            "/v1/chat/completions/batch",
            "/v1/chat/completions/",
            "/v1/%63hat/completions/batch",
            "/v1/load_lora_adapter",
            "/",
        ] {
            let status = gateway
                .post(path, 10)
                .send()
                .await
                .unwrap()
                .status()
                .as_u16();
            assert_eq!(status, 404, "{file} {path}");
        }
        // Only SGLang serves this path.
        let generate = gateway
            .post("/generate", 10)
            .send()
            .await
            .unwrap()
            .status()
            .as_u16();
        assert_eq!(
            generate,
            if file == "disaggregated-mirror" {
                503
            } else {
                404
            }
        );
        for path in ["/health", "/metrics", "/v1/models?x=1"] {
            assert_eq!(
                echo(gateway.post(path, 0)).await["worker"],
                decode.address.to_string(),
                "{file} {path}"
            );
        }
    }
}

/// A vLLM decode worker can compute the prompt itself. An SGLang decode worker responds with 400 to
/// a request without a bootstrap room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn disaggregated_envoy_without_warmroute_uses_capable_decode_workers() {
    let decode = RecordingWorker::start().await;
    let prefill = RecordingWorker::start().await;
    // Half of the attempts reach a dead worker. The retries succeed although the retry filter has
    // no server.
    let dead = unused_address().await;
    let gateway = EnvoyGateway::start_disaggregated(
        "disaggregated-call",
        &[dead, decode.address],
        prefill.address,
    )
    .await;
    for path in [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
    ]
    .repeat(4)
    {
        assert_eq!(
            echo(gateway.post(path, 1_000)).await["worker"],
            decode.address.to_string(),
            "{path}"
        );
    }
    let gateway = EnvoyGateway::start_disaggregated(
        "disaggregated-mirror",
        &[decode.address],
        prefill.address,
    )
    .await;
    for path in [
        "/v1/chat/completions",
        "/v1/completions",
        "/generate",
        "/v1/embeddings",
    ] {
        assert_eq!(
            gateway.post(path, 1_000).send().await.unwrap().status(),
            503,
            "{path}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn retry_reaches_ext_proc_and_another_worker() {
    for file in DISAGGREGATED {
        let decode = RecordingWorker::start().await;
        let prefill = RecordingWorker::start().await;
        let dead = unused_address().await;
        let gateway =
            EnvoyGateway::start_disaggregated(file, &[dead, decode.address], prefill.address).await;
        let server = OneEndpoint::start(dead, &gateway.setup().ext_proc_socket());
        for bytes in [100, MB, 10 * MB] {
            let seen = echo(gateway.post("/v1/completions", bytes)).await;
            assert_eq!(
                (&seen["worker"], &seen["bytes"]),
                (&json!(decode.address.to_string()), &json!(bytes)),
                "{file}"
            );
            assert_eq!(
                std::mem::take(&mut *server.retries.lock()),
                [bytes],
                "{file}"
            );
        }
    }
    // The first attempt of a request does not pass the retry filter.
    for file in DISAGGREGATED {
        let decode = RecordingWorker::start().await;
        let prefill = RecordingWorker::start().await;
        let gateway =
            EnvoyGateway::start_disaggregated(file, &[decode.address], prefill.address).await;
        let server = OneEndpoint::start(decode.address, &gateway.setup().ext_proc_socket());
        echo(gateway.post("/v1/completions", 100)).await;
        assert_eq!(*server.retries.lock(), [0; 0], "{file}");
    }
}

/// Another request may have overwritten the KV blocks of the first attempt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn retry_without_ext_proc_reaches_no_worker() {
    let decode = RecordingWorker::start().await;
    let prefill = RecordingWorker::start().await;
    let dead = unused_address().await;
    let gateway = EnvoyGateway::start_disaggregated(
        "disaggregated-call",
        &[dead, decode.address],
        prefill.address,
    )
    .await;
    let _server = OneEndpoint::start_with(dead, &gateway.setup().ext_proc_socket(), true);
    let refused = gateway.post("/v1/completions", 100).send().await.unwrap();
    assert!(refused.status().is_server_error(), "{refused:?}");
    let stats = client()
        .get(gateway.setup().admin_url("/clusters"))
        .send()
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    let reached = format!("workers::{}::rq_success::0", decode.address);
    assert!(stats.contains(&reached), "{stats}");
}
