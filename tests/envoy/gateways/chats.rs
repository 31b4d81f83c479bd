//! Chats with each generated configuration: the chosen worker serves them, and the predicted cached
//! tokens equal those that the engine reports.

use reqwest::Client;
use serde_json::{Value, json};
use warmroute_testbed::ports::PATIENCE;

use crate::gateways::bed::GatewayTestbed;
use crate::gateways::generated::{
    ENVOY_AI_GATEWAY, ENVOY_GATEWAY, GatewayFixture, GeneratedConfig, ISTIO, ISTIO_BUFFERED,
};
use crate::support::deployment::{RoutedAnswer, TestDeployment, chat, essay, fast};

const TOPICS: usize = 6;
/// Size of a long prompt in bytes.
const LONG: usize = 220_000;

fn streamed(mut body: Value) -> Value {
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body
}

/// Returns a prompt of about 220 KB.
fn long(topic: usize) -> String {
    let text = essay(topic);
    text.repeat(LONG / text.len() + 1)
}

async fn send(deployment: &TestDeployment, client: &Client, body: &Value) -> RoutedAnswer {
    let url = deployment.url("/v1/chat/completions");
    let answered = RoutedAnswer::send(client.post(url).json(body)).await;
    answered.assert_exact();
    answered
}

/// Sends a prompt as a unary request, then as a streaming request. Asserts that the same worker
/// serves the second one from its cache.
async fn assert_exact_twice(deployment: &TestDeployment, clients: &[Client; 2], prompt: &str) {
    let first = send(deployment, &clients[0], &chat(prompt)).await;
    deployment.settle().await;
    let second = send(deployment, &clients[1], &streamed(chat(prompt))).await;
    assert_eq!(first.engine(), second.engine(), "the conversation moved");
    for answered in [&first, &second] {
        assert_eq!(
            answered.predicted(),
            Some(answered.cached_tokens()),
            "{answered:?}"
        );
    }
    assert!(second.cached_tokens() > 100, "{second:?}");
    deployment.settle().await;
}

pub(crate) async fn assert_chats_routed(deployment: &TestDeployment) {
    let client = || warmroute_runtime::tls::http_client_builder().timeout(PATIENCE);
    let clients = [
        client().http1_only().build().unwrap(),
        client().http2_prior_knowledge().build().unwrap(),
    ];
    for topic in 0..TOPICS {
        assert_exact_twice(deployment, &clients, &essay(topic)).await;
    }
    for topic in TOPICS..TOPICS + 2 {
        assert_exact_twice(deployment, &clients, &long(topic)).await;
    }
    deployment.idle().await;
    let page = deployment.metrics().await;
    assert_eq!(
        page.sum("exchanges_total", &[]),
        2.0 * (TOPICS + 2) as f64,
        "{}",
        page.text()
    );
    assert_eq!(
        page.sum("served_endpoint_mismatches_total", &[]),
        0.0,
        "{}",
        page.text()
    );
    assert_eq!(page.sum("http2_errors_total", &[]), 0.0, "{}", page.text());
}

pub(crate) async fn chats_are_routed(gateway: GatewayFixture, config: GeneratedConfig) {
    let mut bed = GatewayTestbed::engines(gateway, &[1, 2, 3, 4].map(fast)).await;
    bed.start(config.patient()).await;
    assert_chats_routed(&bed).await;
}

long_tests! {
    istio_with_authority_routes_chats: chats_are_routed(ISTIO, ISTIO.generated()),
    istio_buffered_routes_chats: chats_are_routed(ISTIO_BUFFERED, ISTIO_BUFFERED.generated()),
    envoy_ai_gateway_routes_chats:
        chats_are_routed(ENVOY_AI_GATEWAY, ENVOY_AI_GATEWAY.generated()),
    envoy_gateway_routes_chats: chats_are_routed(ENVOY_GATEWAY, ENVOY_GATEWAY.generated()),
}
