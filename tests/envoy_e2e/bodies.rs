//! What a client sends is what the worker receives, to the byte, however it is sent and however Envoy shows it to us.

use bytes::Bytes;
use reqwest::{Body, Version};
use serde_json::{Value, json};

use crate::deployment::{Answered, Deployment, PATIENCE, telling};
use crate::echo::{Echo, fingerprint, received};
use crate::support::stack::MODEL;

/// How Envoy shows bodies to warmroute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Shown {
    /// As shipped.
    Buffered,
    FullDuplex,
    /// The same, told that bodies come back as long as they were.
    FullDuplexWithLength,
}

impl Shown {
    /// The shipped configuration, with nothing changed but the modes.
    pub(crate) fn config(self, deployment: &Deployment) -> String {
        let shipped = deployment.envoy_config();
        if self == Shown::Buffered {
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
        if self == Shown::FullDuplexWithLength {
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

/// A chat of about `size` bytes.
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

async fn bodies_arrive(shown: Shown) {
    let echoes = [Echo::start(1).await, Echo::start(u64::MAX).await];
    let mut deployment = Deployment::engines(&[]).await;
    deployment
        .write_worker_entries(&echoes.iter().map(Echo::entry).collect())
        .unwrap();
    // With warmroute's own deadline: what cannot be tokenised in time goes by load, and arrives all the same.
    deployment
        .start_router(&telling(json!({"limits": {}})))
        .await
        .unwrap();
    let envoy = shown.config(&deployment);
    deployment.start_envoy(&envoy).await.unwrap();
    let client = || warmroute::tls::client().timeout(PATIENCE);
    let http1 = client().http1_only().build().unwrap();
    let http2 = client().http2_prior_knowledge().build().unwrap();

    let mut bodies = vec![b"7".to_vec()];
    bodies.extend([1_000, 100_000, 1_000_000, 10_000_000].map(long_chat));
    for body in &bodies {
        for (client, version) in [(&http1, Version::HTTP_11), (&http2, Version::HTTP_2)] {
            for sized in [true, false] {
                let what = format!(
                    "{} bytes, {shown:?}, {version:?}, length told: {sized}",
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
                let answered = Answered::read(response).await;
                // Workers without events are routed by what was sent to them. What cannot be read, or not in time, goes by
                // load.
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
                // Envoy alone cannot know that a body in pieces keeps its length; warmroute has gathered all of it.
                let told = match shown {
                    Shown::Buffered => sized,
                    Shown::FullDuplex => false,
                    Shown::FullDuplexWithLength => true,
                };
                let length = body.len().to_string();
                let expected = if told {
                    (vec![length.as_str()], vec![])
                } else {
                    (vec![], vec!["chunked"])
                };
                let framing = (
                    received(report, "content-length"),
                    received(report, "transfer-encoding"),
                );
                assert_eq!(framing, expected, "{what}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_of_any_size_arrive_byte_for_byte_as_shipped() {
    bodies_arrive(Shown::Buffered).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_of_any_size_arrive_byte_for_byte_in_full_duplex() {
    bodies_arrive(Shown::FullDuplex).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_keep_their_length_in_full_duplex_where_envoy_is_told_so() {
    bodies_arrive(Shown::FullDuplexWithLength).await;
}
