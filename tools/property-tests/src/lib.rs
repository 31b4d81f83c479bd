//! Configuration of the property tests of all crates.

use proptest::test_runner::Config;

/// Minimum number of cases of the short form.
const MIN_CASES: u32 = 8;
/// The short form runs one case of this number.
const SHORT_DIVISOR: u32 = 16;

/// Returns the configuration of a property test with this number of cases if
/// `WARMROUTE_LONG_TESTS` is 1, and with a sixteenth of them otherwise. Failing inputs are printed,
/// not stored in files.
#[expect(
    clippy::disallowed_methods,
    reason = "the environment selects the long form of tests"
)]
pub fn property_config(cases: u32) -> Config {
    let is_long = std::env::var("WARMROUTE_LONG_TESTS").is_ok_and(|value| value == "1");
    Config {
        cases: if is_long {
            cases
        } else {
            (cases / SHORT_DIVISOR).max(MIN_CASES)
        },
        failure_persistence: None,
        ..Config::default()
    }
}
