//! The load client. Each of its persistent connections sends one request after the other until the
//! bodies or the time run out. For each request, it records the time to the first piece of the
//! answer and the reported route.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::ensure;
use bytes::Bytes;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use tokio::task::JoinSet;

use crate::instant_engines;

/// Parameters of the requests.
#[derive(Clone, Debug)]
pub(crate) struct LoadPlan {
    pub(crate) connections: usize,
    /// Time after which no new request begins.
    pub(crate) send_for: Duration,
    /// Headers that select the shape of the answers.
    pub(crate) headers: HeaderMap,
}

impl LoadPlan {
    pub(crate) fn new(connections: usize, send_for: Duration) -> Self {
        Self {
            connections,
            send_for,
            headers: HeaderMap::new(),
        }
    }

    pub(crate) fn with_chunks(mut self, chunks: usize) -> Self {
        self.headers.insert(
            HeaderName::from_static(instant_engines::CHUNKS_HEADER),
            HeaderValue::from(chunks),
        );
        self
    }
}

/// Results of one round.
#[derive(Debug, Default)]
pub(crate) struct ClientRound {
    pub(crate) elapsed: Duration,
    /// Milliseconds until the first piece of each answer.
    pub(crate) first_ms: Vec<f64>,
    /// Number of requests by reported route mode.
    pub(crate) modes: BTreeMap<String, usize>,
    /// Errors of failed requests.
    pub(crate) errors: Vec<String>,
}

pub(crate) fn http_client() -> anyhow::Result<reqwest::Client> {
    // On loopback, a proxy from the environment must not be used.
    Ok(warmroute_runtime::tls::http_client_builder()
        .http1_only()
        .tcp_nodelay(true)
        .timeout(Duration::from_secs(120))
        .build()?)
}

/// Sends each body once, in order.
pub(crate) async fn send_all(
    client: &reqwest::Client,
    url: &str,
    bodies: &Arc<Vec<Bytes>>,
    plan: &LoadPlan,
) -> anyhow::Result<ClientRound> {
    let began = Instant::now();
    let next = Arc::new(AtomicUsize::new(0));
    let url: reqwest::Url = url.parse()?;
    let mut connections = JoinSet::new();
    for _ in 0..plan.connections {
        let client = client.clone();
        let url = url.clone();
        let plan = plan.clone();
        let next = next.clone();
        let bodies = bodies.clone();
        connections.spawn(async move {
            let mut round = ClientRound::default();
            while began.elapsed() < plan.send_for {
                let Some(body) = bodies.get(next.fetch_add(1, Ordering::Relaxed)) else {
                    break;
                };
                match send(&client, &url, body.clone(), &plan.headers).await {
                    Ok((first, mode)) => {
                        round.first_ms.push(first.as_secs_f64() * 1e3);
                        *round.modes.entry(mode).or_default() += 1;
                    }
                    Err(error) => round.errors.push(format!("{error:#}")),
                }
            }
            round
        });
    }
    let mut all = ClientRound::default();
    for round in connections.join_all().await {
        all.first_ms.extend(round.first_ms);
        round
            .modes
            .into_iter()
            .for_each(|(mode, count)| *all.modes.entry(mode).or_default() += count);
        all.errors.extend(round.errors);
    }
    all.elapsed = began.elapsed();
    Ok(all)
}

async fn send(
    client: &reqwest::Client,
    url: &reqwest::Url,
    body: Bytes,
    headers: &HeaderMap,
) -> anyhow::Result<(Duration, String)> {
    let sent = Instant::now();
    let request = client
        .post(url.clone())
        .header("content-type", "application/json")
        .headers(headers.clone());
    let mut response = request.body(body).send().await?;
    ensure!(
        response.status().is_success(),
        "status {}",
        response.status()
    );
    let mode = response
        .headers()
        .get("x-warmroute-mode")
        .and_then(|mode| mode.to_str().ok());
    let mode = mode.unwrap_or("none").to_owned();
    ensure!(response.chunk().await?.is_some(), "response without a body");
    let first = sent.elapsed();
    while response.chunk().await?.is_some() {}
    Ok((first, mode))
}

/// Responses that stay open. They use few connections with many streams each, because every
/// connection needs an open file.
pub(crate) struct OpenResponses {
    responses: Vec<reqwest::Response>,
    _clients: Vec<reqwest::Client>,
}

impl OpenResponses {
    const STREAMS_PER_CONNECTION: usize = 100;
    const CONCURRENT: usize = 4;

    pub(crate) async fn open(url: &str, body: &Bytes, count: usize) -> anyhow::Result<Self> {
        let mut open = Self {
            responses: Vec::with_capacity(count),
            _clients: Vec::new(),
        };
        let mut opening = JoinSet::new();
        for from in (0..count).step_by(Self::STREAMS_PER_CONNECTION) {
            // Each client has one connection.
            let client = warmroute_runtime::tls::http_client_builder()
                .http2_prior_knowledge()
                .build()?;
            let url = url.to_owned();
            let body = body.clone();
            open._clients.push(client.clone());
            if opening.len() == Self::CONCURRENT
                && let Some(opened) = opening.join_next().await
            {
                open.responses.extend(opened??);
            }
            opening.spawn(async move {
                let mut responses = Vec::new();
                for _ in from..count.min(from + Self::STREAMS_PER_CONNECTION) {
                    let request = client
                        .post(&url)
                        .header(instant_engines::HOLD_HEADER, "1")
                        .header("content-type", "application/json");
                    let mut response = request.body(body.clone()).send().await?;
                    ensure!(
                        response.status().is_success(),
                        "status {}",
                        response.status()
                    );
                    ensure!(response.chunk().await?.is_some(), "response without a body");
                    responses.push(response);
                }
                Ok(responses)
            });
        }
        while let Some(opened) = opening.join_next().await {
            open.responses.extend(opened??);
        }
        ensure!(
            open.responses.len() == count,
            "{} of {count} responses are open",
            open.responses.len()
        );
        Ok(open)
    }
}
