//! Growth of the decision time with the prompt length, the number of ranks, and the number of
//! requests in flight. The results page plots the points.

use std::path::Path;

use bytes::Bytes;
use serde::Serialize;
use warmroute_testbed::comparison;

use super::bed::DecisionPipeline;
use super::chats;

/// Bytes of a message. A token has about five bytes.
const MESSAGE: usize = 2600;
/// Messages of the chats with a fixed length.
const MESSAGES: usize = 50;

/// One point.
#[derive(Debug, Serialize)]
struct GrowthPoint {
    /// Varied parameter.
    curve: &'static str,
    /// State of the caches.
    series: &'static str,
    x: f64,
    /// Microseconds.
    y: f64,
}

/// Measures every point of all curves `rounds` times and writes them as JSON.
#[expect(clippy::print_stdout, reason = "a bench prints its results")]
pub(super) fn measure(rounds: usize, path: &Path) -> anyhow::Result<()> {
    let mut points = Vec::new();
    by_length(&mut points, rounds);
    by_ranks(&mut points, rounds);
    by_flight(&mut points, rounds);
    for GrowthPoint {
        curve,
        series,
        x,
        y,
    } in &points
    {
        println!("{curve:<24} {series:<6} {x:>10.0} {y:>12.1} µs");
    }
    Ok(comparison::write_json(&points, path)?)
}

/// Measures chats of increasing length, new and with two more messages.
fn by_length(points: &mut Vec<GrowthPoint>, rounds: usize) {
    let mut chat = 0;
    for messages in [4, 8, 16, 32, 64, 128, 256, 512, 1024, 1600] {
        let mut pipeline = DecisionPipeline::new(chats::encoder(1 << 30), 64);
        let mut cold = Vec::new();
        let mut warm = Vec::new();
        let mut tokens = 0;
        for _ in 0..rounds.min(3000 / messages + 2) {
            chat += 1;
            let messages = chats::messages(chat, messages, MESSAGE);
            for (end, times) in [(messages.len() - 2, &mut cold), (messages.len(), &mut warm)] {
                let decision = pipeline.decide(&Bytes::from(chats::body(&messages[..end])));
                times.push(decision.micros);
                tokens = decision.hashes.tokens();
                pipeline.store(chat % 64, &decision.hashes);
            }
        }
        for (series, times) in [("cold", &cold), ("warm", &warm)] {
            points.push(GrowthPoint {
                curve: "prompt tokens",
                series,
                x: tokens as f64,
                y: comparison::median(times),
            });
        }
    }
}

/// Measures the same chats with an increasing number of workers.
fn by_ranks(points: &mut Vec<GrowthPoint>, rounds: usize) {
    for ranks in [4_u32, 16, 64, 256, 1024, 4096] {
        let mut pipeline = DecisionPipeline::new(chats::encoder(1 << 30), ranks);
        let times = turns(&mut pipeline, ranks, rounds);
        points.push(GrowthPoint {
            curve: "ranks",
            series: "warm",
            x: f64::from(ranks),
            y: comparison::median(&times),
        });
    }
}

/// Measures the same chats with an increasing number of requests in flight.
fn by_flight(points: &mut Vec<GrowthPoint>, rounds: usize) {
    for flight in [1_u32, 10, 100, 1000, 10_000] {
        let mut pipeline = DecisionPipeline::new(chats::encoder(1 << 30), 64);
        let others: Vec<_> = (0..100)
            .map(|other| {
                pipeline
                    .decide(&Bytes::from(chats::body(&chats::messages(
                        1000 + other,
                        4,
                        MESSAGE,
                    ))))
                    .hashes
            })
            .collect();
        let in_flight: Vec<_> = others
            .iter()
            .cycle()
            .take(flight as usize)
            .map(|hashes| pipeline.route(hashes))
            .collect();
        let times = turns(&mut pipeline, 64, rounds);
        drop(in_flight);
        points.push(GrowthPoint {
            curve: "requests in flight",
            series: "warm",
            x: f64::from(flight),
            y: comparison::median(&times),
        });
    }
}

/// Returns the durations of the next turns of some chats.
fn turns(pipeline: &mut DecisionPipeline, ranks: u32, rounds: usize) -> Vec<f64> {
    let turn = |chat: usize| {
        let messages = chats::messages(chat, MESSAGES, MESSAGE);
        let before = pipeline
            .decide(&Bytes::from(chats::body(&messages[..MESSAGES - 2])))
            .hashes;
        pipeline.store(chat % ranks as usize, &before);
        pipeline.decide(&Bytes::from(chats::body(&messages))).micros
    };
    (1..=rounds).map(turn).collect()
}
