//! The client: so many connections that are kept, each with one request after the other, until the bodies or the time are
//! used up. What it notes of a request is when the first piece of its answer came and who says how it was routed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::ensure;
use bytes::Bytes;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use tokio::task::JoinSet;

use crate::answers;

/// How requests are sent.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) connections: usize,
    /// No request begins later.
    pub(crate) most: Duration,
    /// How answers shall look.
    pub(crate) headers: HeaderMap,
}

impl Plan {
    pub(crate) fn new(connections: usize, most: Duration) -> Self {
        Self {
            connections,
            most,
            headers: HeaderMap::new(),
        }
    }

    pub(crate) fn chunks(mut self, chunks: usize) -> Self {
        self.headers.insert(
            HeaderName::from_static(answers::CHUNKS),
            HeaderValue::from(chunks),
        );
        self
    }
}

/// What came of it.
#[derive(Debug, Default)]
pub(crate) struct Round {
    pub(crate) took: Duration,
    /// Milliseconds until the first piece of each answer.
    pub(crate) first: Vec<f64>,
    /// How each was routed, as far as the answer says.
    pub(crate) modes: BTreeMap<String, usize>,
    /// Why requests failed.
    pub(crate) errors: Vec<String>,
}

pub(crate) fn client() -> anyhow::Result<reqwest::Client> {
    // A proxy from the environment has no business on the loopback.
    Ok(warmroute::tls::client()
        .http1_only()
        .tcp_nodelay(true)
        .timeout(Duration::from_secs(120))
        .build()?)
}

/// Sends the bodies, each once, in their order.
pub(crate) async fn drive(
    client: &reqwest::Client,
    url: &str,
    bodies: &Arc<Vec<Bytes>>,
    plan: &Plan,
) -> anyhow::Result<Round> {
    let (began, next) = (Instant::now(), Arc::new(AtomicUsize::new(0)));
    let url: reqwest::Url = url.parse()?;
    let mut connections = JoinSet::new();
    for _ in 0..plan.connections {
        let (client, url, plan) = (client.clone(), url.clone(), plan.clone());
        let (next, bodies) = (next.clone(), bodies.clone());
        connections.spawn(async move {
            let mut round = Round::default();
            while began.elapsed() < plan.most {
                let Some(body) = bodies.get(next.fetch_add(1, Ordering::Relaxed)) else {
                    break;
                };
                match send(&client, &url, body.clone(), &plan.headers).await {
                    Ok((first, mode)) => {
                        round.first.push(first.as_secs_f64() * 1e3);
                        *round.modes.entry(mode).or_default() += 1;
                    }
                    Err(error) => round.errors.push(format!("{error:#}")),
                }
            }
            round
        });
    }
    let mut all = Round::default();
    for round in connections.join_all().await {
        all.first.extend(round.first);
        round
            .modes
            .into_iter()
            .for_each(|(mode, count)| *all.modes.entry(mode).or_default() += count);
        all.errors.extend(round.errors);
    }
    all.took = began.elapsed();
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
    let mut answer = request.body(body).send().await?;
    ensure!(answer.status().is_success(), "status {}", answer.status());
    let mode = answer
        .headers()
        .get("x-warmroute-mode")
        .and_then(|mode| mode.to_str().ok());
    let mode = mode.unwrap_or("none").to_owned();
    ensure!(answer.chunk().await?.is_some(), "an answer without a body");
    let first = sent.elapsed();
    while answer.chunk().await?.is_some() {}
    Ok((first, mode))
}

/// Answers that stay open, over few connections with many streams each, because every open file of a process counts.
pub(crate) struct Held {
    answers: Vec<reqwest::Response>,
    _clients: Vec<reqwest::Client>,
}

impl Held {
    const STREAMS: usize = 100;
    const AT_ONCE: usize = 4;

    pub(crate) async fn open(url: &str, body: &Bytes, count: usize) -> anyhow::Result<Self> {
        let mut held = Self {
            answers: Vec::with_capacity(count),
            _clients: Vec::new(),
        };
        let mut opening = JoinSet::new();
        for from in (0..count).step_by(Self::STREAMS) {
            // Each client has one connection.
            let client = warmroute::tls::client().http2_prior_knowledge().build()?;
            let (url, body) = (url.to_owned(), body.clone());
            held._clients.push(client.clone());
            if opening.len() == Self::AT_ONCE
                && let Some(opened) = opening.join_next().await
            {
                held.answers.extend(opened??);
            }
            opening.spawn(async move {
                let mut answers = Vec::new();
                for _ in from..count.min(from + Self::STREAMS) {
                    let request = client
                        .post(&url)
                        .header(answers::HOLD, "1")
                        .header("content-type", "application/json");
                    let mut answer = request.body(body.clone()).send().await?;
                    ensure!(answer.status().is_success(), "status {}", answer.status());
                    ensure!(answer.chunk().await?.is_some(), "an answer without a body");
                    answers.push(answer);
                }
                Ok(answers)
            });
        }
        while let Some(opened) = opening.join_next().await {
            held.answers.extend(opened??);
        }
        ensure!(
            held.answers.len() == count,
            "{} of {count} answers are open",
            held.answers.len()
        );
        Ok(held)
    }
}
