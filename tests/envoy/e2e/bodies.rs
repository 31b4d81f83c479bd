//! Workers receive request bodies byte for byte in each body mode of Envoy.

use bytes::Bytes;
use reqwest::{Body, Version};
use serde_json::{Value, json};
use warmroute_testbed::deployment::MODEL;

use crate::e2e::echo::{EchoEngine, fingerprint, received};
use crate::support::deployment::{ChatAnswer, PATIENCE, TestDeployment, with_response_headers};

/// Body mode in which Envoy sends requests to warmroute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum EchoBodyMode {
    /// The shipped mode.
    Buffered,
    FullDuplex,
    /// Full duplex, configured to preserve the content length.
    FullDuplexWithLength,
}

impl EchoBodyMode {
    /// Returns the shipped configuration with this body mode.
    pub(crate) fn config(self, deployment: &TestDeployment) -> String {
        let shipped = deployment.envoy_config();
        if self == EchoBodyMode::Buffered {
            return shipped;
        }
        let mut config: Value = serde_saphyr::from_str(&shipped).unwrap();
        let filters =
            "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters";
        let filters = config.pointer_mut(filters).unwrap().as_array_mut().unwrap();
        let filter = filters
            .iter_mut()
            .find(|filter| filter["name"] == "envoy.filters.http.ext_proc")
            .unwrap();
        if self == EchoBodyMode::FullDuplexWithLength {
            filter["typed_config"]["allow_content_length_header"] = json!(true);
        }
        let modes = &mut filter["typed_config"]["processing_mode"];
        assert_eq!(
            (&modes["request_body_mode"], &modes["request_trailer_mode"]),
            (&json!("BUFFERED"), &json!("SKIP"))
        );
        modes["request_body_mode"] = json!("FULL_DUPLEX_STREAMED");
        modes["request_trailer_mode"] = json!("SEND");
        config.to_string()
    }
}

/// Returns a chat of about `size` bytes.
fn long_chat(size: usize) -> Vec<u8> {
    let words = "every byte of this question has to arrive, ümläute \u{1f525} and \"quotes\" too; ";
    let mut content = words.repeat(size / words.len());
    content.push_str("what is the last word?");
    json!({"model": MODEL, "messages": [{"role": "user", "content": content}]})
        .to_string()
        .into_bytes()
}

fn chunked(body: &[u8]) -> Body {
    let pieces: Vec<_> = body
        .chunks(60_000)
        .map(Bytes::copy_from_slice)
        .map(Ok::<_, std::io::Error>)
        .collect();
    Body::wrap_stream(futures_util::stream::iter(pieces))
}

async fn bodies_arrive(shown: EchoBodyMode) {
    let echoes = [
        EchoEngine::start(1).await,
        EchoEngine::start(u64::MAX).await,
    ];
    let mut deployment = TestDeployment::engines(&[]).await;
    deployment
        .write_worker_entries(&echoes.iter().map(EchoEngine::entry).collect())
        .unwrap();
    // The default timeout. A request that exceeds it is routed load-only, and its body arrives
    // nevertheless.
    deployment
        .start_router(&with_response_headers(json!({"requests": {"limits": {}}})))
        .await
        .unwrap();
    let envoy = shown.config(&deployment);
    deployment.start_envoy(&envoy).await.unwrap();
    let client = || warmroute_runtime::tls::http_client_builder().timeout(PATIENCE);
    let http1 = client().http1_only().build().unwrap();
    let http2 = client().http2_prior_knowledge().build().unwrap();

    let mut bodies = vec![b"7".to_vec()];
    bodies.extend([1_000, 100_000, 1_000_000, 10_000_000].map(long_chat));
    for body in &bodies {
        for (client, version) in [(&http1, Version::HTTP_11), (&http2, Version::HTTP_2)] {
            for sized in [true, false] {
                let what = format!(
                    "{} bytes, {shown:?}, {version:?}, content-length: {sized}",
                    body.len()
                );
                let payload = if sized {
                    Body::from(body.clone())
                } else {
                    chunked(body)
                };
                let request = client
                    .post(deployment.url("/v1/chat/completions"))
                    .body(payload);
                let response = request
                    .header("content-type", "application/json")
                    .send()
                    .await
                    .unwrap();
                assert_eq!(response.version(), version, "{what}");
                let answered = ChatAnswer::read(response).await;
                assert_body_arrived(&answered, body, &what);
                // Envoy does not know the length of a chunked body. warmroute does, because it has
                // the whole body.
                let has_length = match shown {
                    EchoBodyMode::Buffered => sized,
                    EchoBodyMode::FullDuplex => false,
                    EchoBodyMode::FullDuplexWithLength => true,
                };
                assert_framing(
                    &answered.documents()[0],
                    has_length.then_some(body.len()),
                    &what,
                );
            }
        }
    }
}

/// Asserts that the engine received the body unchanged.
fn assert_body_arrived(answered: &ChatAnswer, body: &[u8], what: &str) {
    // Requests to workers without events are routed approximately, or load-only if the body cannot
    // be parsed in time.
    let modes: &[&str] = match body.len() {
        1 => &["load_only"],
        2..=4_000 => &["approximate"],
        _ => &["approximate", "load_only"],
    };
    assert!(
        answered.status == 200 && modes.contains(&answered.mode()),
        "{what}: {answered:?}"
    );
    let report = &answered.documents()[0];
    assert_eq!(
        (&report["bytes"], &report["xxh3"]),
        (&json!(body.len()), &json!(fingerprint(body))),
        "{what}"
    );
    assert_eq!(
        received(report, "x-worker-instance-id"),
        [answered.engine()],
        "{what}"
    );
}

/// Asserts the content length of the request that the engine received. `None` means chunked.
fn assert_framing(report: &Value, length: Option<usize>, what: &str) {
    let length = length.map(|length| length.to_string());
    let expected = match &length {
        Some(length) => (vec![length.as_str()], vec![]),
        None => (vec![], vec!["chunked"]),
    };
    let framing = (
        received(report, "content-length"),
        received(report, "transfer-encoding"),
    );
    assert_eq!(framing, expected, "{what}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_arrive_unchanged_as_shipped() {
    bodies_arrive(EchoBodyMode::Buffered).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn bodies_arrive_unchanged_in_full_duplex() {
    bodies_arrive(EchoBodyMode::FullDuplex).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn full_duplex_retains_content_length_if_configured() {
    bodies_arrive(EchoBodyMode::FullDuplexWithLength).await;
}
