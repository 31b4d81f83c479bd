//! Responses to clients while warmroute is killed, frozen, or has no ready endpoint. The
//! expectations are those of the table in `docs/gateways/availability.md`.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use reqwest::RequestBuilder;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::gateways::bed::GatewayTestbed;
use crate::gateways::generated::{
    ENVOY_AI_GATEWAY, ENVOY_GATEWAY, GatewayFixture, GeneratedConfig, ISTIO, ISTIO_AS_GENERATED,
    ISTIO_BUFFERED,
};
use crate::shipped::bursts::{BurstEngine, EVENTS, PACED, begin, is_whole};
use crate::support::deployment::{chat, essay};

/// Effect of a frozen warmroute on requests.
#[derive(Clone, Copy, Debug)]
enum FreezeEffect {
    /// Requests wait while warmroute is frozen, and continue afterwards.
    Wait,
    /// Requests end within this time with one of the statuses for a killed warmroute.
    End(Duration),
}

/// One column of the table: the behaviour of a gateway.
#[derive(Clone, Copy, Debug)]
struct ExpectedOutage {
    /// Statuses while warmroute is killed and its endpoint is still listed. None of these requests
    /// is routed by warmroute.
    killed: &'static [u16],
    /// Status if no endpoint of warmroute is listed.
    absent: u16,
    frozen: FreezeEffect,
    /// A response in progress continues after a kill.
    survives: bool,
}

const SECOND: Duration = Duration::from_secs(1);

/// With FailOpen, a request passes or fails depending on how much of it Envoy has already sent.
const FAIL_OPEN: ExpectedOutage = ExpectedOutage {
    killed: &[200, 500],
    absent: 200,
    frozen: FreezeEffect::End(Duration::from_secs(8)),
    survives: false,
};
const FAIL_CLOSE: ExpectedOutage = ExpectedOutage {
    killed: &[500],
    absent: 500,
    frozen: FreezeEffect::End(Duration::from_secs(8)),
    survives: false,
};
const BUFFERED: ExpectedOutage = ExpectedOutage {
    killed: &[200],
    absent: 200,
    frozen: FreezeEffect::End(Duration::from_secs(4)),
    survives: true,
};
const AI_GATEWAY: ExpectedOutage = ExpectedOutage {
    frozen: FreezeEffect::Wait,
    ..FAIL_CLOSE
};

/// Response that a client received.
#[derive(Debug)]
struct ClientReply {
    status: u16,
    /// warmroute routed the request.
    routed: bool,
    took: Duration,
}

fn request(bed: &GatewayTestbed, topic: usize) -> RequestBuilder {
    bed.request("/v1/chat/completions", &chat(&essay(topic)))
}

/// Sends ten requests per second without waiting for responses.
fn send_all(bed: &GatewayTestbed, count: usize) -> Vec<tokio::task::JoinHandle<ClientReply>> {
    let send = |at: usize| {
        let request = request(bed, at);
        tokio::spawn(async move {
            tokio::time::sleep(at as u32 * SECOND / 10).await;
            let sent = Instant::now();
            let response = request.send().await.unwrap();
            let status = response.status().as_u16();
            let routed = response.headers().contains_key("x-warmroute-mode");
            response.bytes().await.unwrap();
            ClientReply {
                status,
                routed,
                took: sent.elapsed(),
            }
        })
    };
    (0..count).map(send).collect()
}

async fn all(sent: Vec<tokio::task::JoinHandle<ClientReply>>) -> Vec<ClientReply> {
    let replies = join_all(sent).await;
    replies.into_iter().map(Result::unwrap).collect()
}

async fn wait_routed(bed: &GatewayTestbed) {
    assert!(until(PATIENCE, async || is_routed(bed).await).await);
}

async fn is_routed(bed: &GatewayTestbed) -> bool {
    let response = request(bed, 1).send().await.unwrap();
    response.status() == 200 && response.headers().contains_key("x-warmroute-mode")
}

/// Returns a request for a response of 50 events.
fn paced(bed: &GatewayTestbed) -> RequestBuilder {
    request(bed, 1).header(EVENTS, 50).header(PACED, 1)
}

fn assert_unrouted(replies: &[ClientReply], statuses: &[u16], case: &str) {
    for reply in replies {
        assert!(
            statuses.contains(&reply.status) && !reply.routed,
            "{case}: {reply:?}"
        );
    }
}

async fn killed(bed: &mut GatewayTestbed, workers: &[BurstEngine], expected: ExpectedOutage) {
    let open = begin(paced(bed), workers).await;
    bed.kill9_router();
    assert_eq!(
        is_whole(open, workers).await,
        expected.survives,
        "a response in progress at the kill"
    );
    let replies = all(send_all(bed, 30)).await;
    assert_unrouted(&replies, expected.killed, "killed");
    let slowest = replies.iter().map(|reply| reply.took).max().unwrap();
    assert!(slowest < 4 * SECOND, "{replies:?}");
    bed.start_warmroute().await;
    wait_routed(bed).await;
    let replies = all(send_all(bed, 10)).await;
    assert!(
        replies.iter().all(|reply| reply.status == 200),
        "{replies:?}"
    );
    // A busy machine may exceed the message timeout occasionally.
    assert!(
        replies.iter().filter(|reply| reply.routed).count() > 5,
        "{replies:?}"
    );
}

async fn frozen(bed: &mut GatewayTestbed, workers: &[BurstEngine], expected: ExpectedOutage) {
    let open = begin(paced(bed), workers).await;
    bed.router().unwrap().freeze();
    let sent = send_all(bed, 30);
    match expected.frozen {
        FreezeEffect::Wait => {
            tokio::time::sleep(6 * SECOND).await;
            assert!(
                sent.iter().all(|reply| !reply.is_finished()),
                "a request ended while warmroute was frozen"
            );
            bed.router().unwrap().thaw();
            for reply in all(sent).await {
                assert!(
                    reply.status == 200 && reply.routed && reply.took > 2 * SECOND,
                    "{reply:?}"
                );
            }
            assert!(
                is_whole(open, workers).await,
                "a response in progress while warmroute was frozen"
            );
        }
        FreezeEffect::End(within) => {
            let replies = all(sent).await;
            assert_unrouted(&replies, expected.killed, "frozen");
            let slowest = replies.iter().map(|reply| reply.took).max().unwrap();
            assert!(slowest < within, "{replies:?}");
            assert_eq!(
                is_whole(open, workers).await,
                expected.survives,
                "a response in progress at the freeze"
            );
            bed.router().unwrap().thaw();
        }
    }
    wait_routed(bed).await;
}

async fn absent(bed: &mut GatewayTestbed, config: GeneratedConfig, expected: ExpectedOutage) {
    bed.start_envoy_with(config, &[]).await;
    let replies = all(send_all(bed, 10)).await;
    assert_unrouted(&replies, &[expected.absent], "no endpoint");
}

async fn assert_outages(
    gateway: GatewayFixture,
    config: GeneratedConfig,
    expected: ExpectedOutage,
) {
    let workers = BurstEngine::start_all(3).await;
    let mut bed = GatewayTestbed::workers(gateway, &workers).await;
    bed.start(config.clone()).await;
    wait_routed(&bed).await;
    killed(&mut bed, &workers, expected).await;
    frozen(&mut bed, &workers, expected).await;
    absent(&mut bed, config, expected).await;
}

async fn outages_of_shipped(gateway: GatewayFixture, expected: ExpectedOutage) {
    assert_outages(gateway, gateway.shipped(), expected).await;
}

long_tests! {
    istio_fails_open_as_documented: outages_of_shipped(ISTIO_AS_GENERATED, FAIL_OPEN),
    istio_with_authority_fails_open_as_documented: outages_of_shipped(ISTIO, FAIL_OPEN),
    istio_buffered_serves_every_request_without_warmroute:
        outages_of_shipped(ISTIO_BUFFERED, BUFFERED),
    envoy_ai_gateway_fails_as_documented: outages_of_shipped(ENVOY_AI_GATEWAY, AI_GATEWAY),
    envoy_gateway_fails_as_documented: outages_of_shipped(ENVOY_GATEWAY, FAIL_CLOSE),
}

/// The pool has `failureMode: FailClose`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn istio_fails_closed_as_documented() {
    let mut config = ISTIO_AS_GENERATED.shipped();
    let filter = "/typed_per_filter_config/envoy.filters.http.ext_proc/overrides";
    for route in config.routes() {
        route.pointer_mut(filter).unwrap()["failure_mode_allow"] = false.into();
    }
    assert_outages(ISTIO_AS_GENERATED, config, FAIL_CLOSE).await;
}
