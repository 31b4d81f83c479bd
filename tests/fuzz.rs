//! The targets of `fuzz/`, without its coverage guidance: every seed as it is, then changed at random for a moment, or for
//! `WARMROUTE_FUZZ_SECONDS` seconds each. The random seed is printed, so that a run can be had again.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::print_stdout, reason = "a run has to be had again")]

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

#[path = "fuzz/answers.rs"]
mod answers;
#[path = "fuzz/bodies.rs"]
mod bodies;
#[path = "fuzz/exchange.rs"]
mod exchange;
#[path = "fuzz/input.rs"]
mod input;
#[path = "fuzz/requests.rs"]
mod requests;
#[path = "fuzz/watch.rs"]
mod watch;

/// Random seeds of every run; one more is new each time.
const SEEDS: [u64; 2] = [1, 0x5eed];

/// Longest input that is made up.
const LONGEST: usize = 4096;

#[expect(
    clippy::disallowed_methods,
    reason = "whoever fuzzes for longer says so there"
)]
fn seconds() -> f64 {
    std::env::var("WARMROUTE_FUZZ_SECONDS").map_or(2.0, |text| text.parse().unwrap())
}

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/corpus")
        .join(target);
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(files.len() > 3, "a corpus for {target}");
    files.iter().map(|file| fs::read(file).unwrap()).collect()
}

/// Shows the input that failed.
struct Failing<'a>(&'a str, u64, &'a [u8]);

impl Drop for Failing<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut hex = String::new();
            self.2
                .iter()
                .for_each(|byte| write!(hex, "{byte:02x}").unwrap());
            println!("{} fails with the random seed {} on: {hex}", self.0, self.1);
        }
    }
}

fn run(name: &str, target: impl Fn(&[u8])) {
    let corpus = corpus(name);
    for seed in &corpus {
        let _failing = Failing(name, 0, seed);
        target(seed);
    }
    let mut executions = 0;
    for seed in SEEDS.into_iter().chain([rand::random()]) {
        println!("{name}: random seed {seed}");
        let mut random = SmallRng::seed_from_u64(seed);
        let end = Instant::now() + Duration::from_secs_f64(seconds() / 3.0);
        while Instant::now() < end {
            let input = made_up(&corpus, &mut random);
            let _failing = Failing(name, seed, &input);
            target(&input);
            executions += 1;
        }
    }
    println!("{name}: {executions} inputs");
}

/// An input that nobody has seen: noise, or a seed that is changed in a few places.
fn made_up(corpus: &[Vec<u8>], random: &mut SmallRng) -> Vec<u8> {
    const WORDS: [&[u8]; 12] = [
        b"\"",
        b"{",
        b"}",
        b"[",
        b"]",
        b"\\u",
        b"null",
        b"\"model\":",
        b"data: ",
        b"\n\n",
        b"--B\r\n",
        b"\xf0\x9f\x98\x80",
    ];
    if random.random_range(0..8) == 0 {
        return (0..random.random_range(0..200))
            .map(|_| random.random())
            .collect();
    }
    let mut input = corpus[random.random_range(0..corpus.len())].clone();
    for _ in 0..random.random_range(1..8) {
        let at = random.random_range(0..=input.len());
        let until = (at + random.random_range(0..16)).min(input.len());
        match random.random_range(0..6) {
            0 => drop(input.drain(at..until)),
            1 => input.extend_from_within(at..until),
            2 => input.truncate(at),
            3 => drop(input.splice(
                at..at,
                WORDS[random.random_range(0..WORDS.len())].iter().copied(),
            )),
            4 => {
                let other = &corpus[random.random_range(0..corpus.len())];
                let from = random.random_range(0..=other.len());
                drop(input.splice(at.., other[from..].iter().copied()));
            }
            _ if at < input.len() => input[at] = random.random(),
            _ => input.push(random.random()),
        }
    }
    input.truncate(LONGEST);
    input
}

#[test]
fn exchanges_keep_their_promises_whatever_comes() {
    run("exchange", exchange::exchange);
}

#[test]
fn answers_are_read_alike_however_they_are_cut() {
    run("answers", answers::answers);
}

#[test]
fn bodies_are_read_mended_and_edited_whatever_they_are() {
    run("bodies", bodies::bodies);
}

#[test]
fn requests_become_questions_whatever_they_are() {
    run("requests", requests::requests);
}
