//! Runs the targets of `fuzz/` without coverage guidance. Every input of the corpus runs unchanged,
//! then random inputs run for two seconds, or for `WARMROUTE_FUZZ_SECONDS` seconds. The random
//! seeds are printed, so that a run can be repeated.

#![expect(clippy::print_stdout, reason = "the printed seed repeats a run")]

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

mod bodies;
mod input;
mod requests;
mod responses;

/// Random seeds of every run. A further seed is random.
const SEEDS: [u64; 2] = [1, 0x5eed];

/// Maximum length of a generated input.
const MAX_LENGTH: usize = 4096;

#[expect(
    clippy::disallowed_methods,
    reason = "the duration is set by the environment"
)]
fn seconds() -> f64 {
    std::env::var("WARMROUTE_FUZZ_SECONDS").map_or(2.0, |text| text.parse().unwrap())
}

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/corpus")
        .join(target);
    let mut files: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(files.len() > 3, "a corpus for {target}");
    files.iter().map(|file| fs::read(file).unwrap()).collect()
}

/// Prints the input when the test panics.
struct FailingInput<'a>(&'a str, u64, &'a [u8]);

impl Drop for FailingInput<'_> {
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
        let _failing = FailingInput(name, 0, seed);
        target(seed);
    }
    let mut executions = 0;
    for seed in SEEDS.into_iter().chain([rand::random()]) {
        println!("{name}: random seed {seed}");
        let mut random = SmallRng::seed_from_u64(seed);
        let end = Instant::now() + Duration::from_secs_f64(seconds() / 3.0);
        while Instant::now() < end {
            let input = random_input(&corpus, &mut random);
            let _failing = FailingInput(name, seed, &input);
            target(&input);
            executions += 1;
        }
    }
    println!("{name}: {executions} inputs");
}

/// Generates an input: random bytes, or an input of the corpus with a few changes.
fn random_input(corpus: &[Vec<u8>], random: &mut SmallRng) -> Vec<u8> {
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
    input.truncate(MAX_LENGTH);
    input
}

#[test]
fn responses_are_read_independent_of_chunks() {
    run("responses", responses::responses);
}

#[test]
fn bodies_survive_parsing_and_edits() {
    run("bodies", bodies::bodies);
}

#[test]
fn any_request_is_preprocessed_without_panic() {
    run("requests", requests::requests);
}
