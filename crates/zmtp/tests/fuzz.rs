//! Compares the connection with a simple reference parser on random conversations.
//! `WARMROUTE_FUZZ_INPUTS` sets their number, and the random seed is printed. The fuzz target in
//! `fuzz/` runs the same comparison guided by coverage.

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

/// Returns the resident memory of the process in MiB.
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
fn connection_agrees_with_reference_parser() {
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
