//! How the time of a decision grows: with the length of the prompt, with the ranks that may be chosen, and with the requests
//! in flight. Points of curves, of which the results page makes plots.

use std::path::Path;

use bytes::Bytes;
use serde::Serialize;

use super::bed::Bed;
use super::{chats, duel};

/// Bytes of a message; about five make a token.
const MESSAGE: usize = 2600;
/// Of the chats whose length is not what changes.
const MESSAGES: usize = 50;

/// One point.
#[derive(Debug, Serialize)]
struct Point {
    /// What changes.
    curve: &'static str,
    /// In which state.
    series: &'static str,
    x: f64,
    /// Microseconds.
    y: f64,
}

#[expect(clippy::print_stdout, reason = "what a bench is for")]
/// Measures all curves, each point so many times, and writes them as JSON.
pub(super) fn measure(rounds: usize, path: &Path) -> anyhow::Result<()> {
    let mut points = Vec::new();
    by_length(&mut points, rounds);
    by_ranks(&mut points, rounds);
    by_flight(&mut points, rounds);
    for Point {
        curve,
        series,
        x,
        y,
    } in &points
    {
        println!("{curve:<24} {series:<6} {x:>10.0} {y:>12.1} us");
    }
    Ok(duel::write_json(&points, path)?)
}

/// Chats of more and more messages, new and with two more.
fn by_length(points: &mut Vec<Point>, rounds: usize) {
    let mut chat = 0;
    for messages in [4, 8, 16, 32, 64, 128, 256, 512, 1024, 1600] {
        let mut bed = Bed::new(chats::encoder(1 << 30), 64);
        let (mut cold, mut warm, mut tokens) = (Vec::new(), Vec::new(), 0);
        for _ in 0..rounds.min(3000 / messages + 2) {
            chat += 1;
            let messages = chats::messages(chat, messages, MESSAGE);
            for (upto, times) in [(messages.len() - 2, &mut cold), (messages.len(), &mut warm)] {
                let (took, hashes, _booked) =
                    bed.decide(&Bytes::from(chats::body(&messages[..upto])));
                times.push(took);
                tokens = hashes.tokens();
                bed.store(chat % 64, &hashes);
            }
        }
        for (series, times) in [("cold", &cold), ("warm", &warm)] {
            points.push(Point {
                curve: "prompt tokens",
                series,
                x: tokens as f64,
                y: duel::median(times),
            });
        }
    }
}

/// The same chats with more and more workers.
fn by_ranks(points: &mut Vec<Point>, rounds: usize) {
    for ranks in [4_u32, 16, 64, 256, 1024, 4096] {
        let mut bed = Bed::new(chats::encoder(1 << 30), ranks);
        let times = turns(&mut bed, ranks, rounds);
        points.push(Point {
            curve: "ranks",
            series: "warm",
            x: f64::from(ranks),
            y: duel::median(&times),
        });
    }
}

/// The same chats with more and more requests that have not ended.
fn by_flight(points: &mut Vec<Point>, rounds: usize) {
    for flight in [1_u32, 10, 100, 1000, 10_000] {
        let mut bed = Bed::new(chats::encoder(1 << 30), 64);
        let others: Vec<_> = (0..100)
            .map(|other| {
                bed.decide(&Bytes::from(chats::body(&chats::messages(
                    1000 + other,
                    4,
                    MESSAGE,
                ))))
                .1
            })
            .collect();
        let held: Vec<_> = others
            .iter()
            .cycle()
            .take(flight as usize)
            .map(|hashes| bed.route(hashes))
            .collect();
        let times = turns(&mut bed, 64, rounds);
        drop(held);
        points.push(Point {
            curve: "requests in flight",
            series: "warm",
            x: f64::from(flight),
            y: duel::median(&times),
        });
    }
}

/// What the next turn of a chat takes, for some chats.
fn turns(bed: &mut Bed, ranks: u32, rounds: usize) -> Vec<f64> {
    let turn = |chat: usize| {
        let messages = chats::messages(chat, MESSAGES, MESSAGE);
        let before = bed
            .decide(&Bytes::from(chats::body(&messages[..MESSAGES - 2])))
            .1;
        bed.store(chat % ranks as usize, &before);
        bed.decide(&Bytes::from(chats::body(&messages))).0
    };
    (1..=rounds).map(turn).collect()
}
