//! Random conversations through a socket pair, against a plain parser. `WARMROUTE_FUZZ_INPUTS` sets
//! their number; the random seed is printed. `fuzz/` runs the same target guided by coverage.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#[path = "fuzz/input.rs"]
mod input;
#[path = "fuzz/target.rs"]
mod target;

use rand::SeedableRng as _;
use rand::rngs::SmallRng;

#[expect(clippy::disallowed_methods, reason = "long runs set it")]
fn inputs() -> usize {
    std::env::var("WARMROUTE_FUZZ_INPUTS").map_or(40_000, |text| text.parse().unwrap())
}

/// Resident memory in MiB.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim()
        .trim_end_matches("kB")
        .trim()
        .parse::<usize>()
        .unwrap()
        / 1024
}

#[test]
fn connection_agrees_with_a_plain_parser() {
    let inputs = inputs();
    for seed in [1, rand::random()] {
        println!("seed {seed}, {} inputs", inputs / 2);
        let mut random = SmallRng::seed_from_u64(seed);
        let mut warm = 0;
        for at in 0..inputs / 2 {
            target::run(&input::input(&mut random));
            if at == 1000 {
                warm = resident();
            }
        }
        println!(
            "resident memory: {warm} MiB after 1000 inputs, {} MiB after all",
            resident()
        );
        assert!(resident() <= warm + 16);
    }
}
