//! Load that engines report about requests that warmroute did not route.

use serde_json::json;
use warmroute_testbed::deployment::{EngineSpec, MODEL};

use crate::support::deployment::{TestDeployment, essay, fast, with_response_headers};

const BYPASSED: [(&str, &str); 1] = [("worker_id", "1")];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarted_router_avoids_engine_with_unbooked_request() {
    let slow = EngineSpec::new(1).with(&["--speed", "1"]);
    let mut deployment = TestDeployment::start(&[slow, fast(2)]).await;
    let endless = json!({"model": MODEL, "prompt": essay(7), "max_tokens": 4000, "stream": true});
    let url = deployment.engines[0].url("/v1/completions");
    let held = deployment.http.post(url).json(&endless).send();
    let held = held.await.unwrap();
    assert_eq!(held.status().as_u16(), 200);
    deployment
        .metrics_show("the request is no booking", |page| {
            page.sum("worker_engine_running_requests", &BYPASSED) == 1.0
                && page.sum("worker_engine_kv_usage_ratio", &BYPASSED) > 0.0
                && page.sum("worker_engine_request_drift", &BYPASSED) == 1.0
                && page.sum("worker_unbooked_requests", &BYPASSED) == 1.0
                && page.sum("worker_active_requests", &BYPASSED) == 0.0
        })
        .await;

    deployment.kill9_router();
    let overload = json!({"routing": {"overload": {"decode_blocks_threshold": 0.0005}}});
    deployment
        .start_router(&with_response_headers(overload))
        .await
        .unwrap();
    deployment
        .metrics_show("the engine is busy", |page| {
            page.sum("worker_unbooked_requests", &BYPASSED) == 1.0
        })
        .await;
    for topic in 0..8 {
        let answer = deployment.complete(&essay(topic)).await;
        assert_eq!(answer.header("x-worker-instance-id"), "2", "{answer:?}");
    }
    drop(held);
    deployment
        .metrics_show("the engine is idle", |page| {
            page.sum("worker_unbooked_requests", &BYPASSED) == 0.0
                && page.sum("worker_engine_kv_usage_ratio", &BYPASSED) == 0.0
        })
        .await;
}
