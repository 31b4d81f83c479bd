//! Faults that a real API server does not produce on demand: momentary rejections.

use serde_json::json;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::kubernetes::requests::{self, OBJECTIVES, object, objective};
use crate::support::api_server::ApiServer;

/// A restarted API server responds with 403 until its caches are filled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn momentary_403_does_not_suspend_objectives() {
    let mut server = ApiServer::start().await;
    server.put(
        OBJECTIVES,
        object(OBJECTIVES, "gold", "2026-01-01", &objective("p", 5)),
    );
    server.forbid(OBJECTIVES, false);
    let follows = requests::RuleFollower::start(&server, &json!([{"name": "p"}]), "1h");
    let rewrites = "InferenceModelRewrite: forbidden";
    let objectives = "InferenceObjective: watched as llm-d.ai/v1alpha2";
    follows.wait_for(&[rewrites, objectives, "p gold 5"]).await;
    server.stop().await;
    server.forbid(OBJECTIVES, true);
    server.resume().await;
    let refused = server.refused(OBJECTIVES);
    assert!(until(PATIENCE, async || server.refused(OBJECTIVES) > refused + 1).await);
    server.change(OBJECTIVES, "gold", |object| {
        object["spec"]["priority"] = json!(7)
    });
    server.forbid(OBJECTIVES, false);
    follows.wait_for(&[rewrites, objectives, "p gold 7"]).await;
}

/// warmroute starts before the caches of the API server are filled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn momentary_403_at_start_is_retried() {
    let server = ApiServer::start().await;
    server.put(
        OBJECTIVES,
        object(OBJECTIVES, "gold", "2026-01-01", &objective("p", 5)),
    );
    let follows = requests::RuleFollower::start(&server, &json!([{"name": "p"}]), "1h");
    let rewrites = "InferenceModelRewrite: forbidden";
    follows
        .wait_for(&[rewrites, "InferenceObjective: forbidden"])
        .await;
    server.forbid(OBJECTIVES, false);
    follows
        .wait_for(&[
            rewrites,
            "InferenceObjective: watched as llm-d.ai/v1alpha2",
            "p gold 5",
        ])
        .await;
}
