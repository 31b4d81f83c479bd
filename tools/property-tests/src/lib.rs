//! The long and the short form of the tests of all crates.

use proptest::test_runner::Config;

/// Minimum number of cases of the short form.
const MIN_CASES: u32 = 8;
/// The short form runs one case of this number.
const SHORT_DIVISOR: u32 = 16;

/// Returns whether `WARMROUTE_LONG_TESTS` selects the long form.
#[expect(
    clippy::disallowed_methods,
    reason = "the environment selects the long form of tests"
)]
pub fn is_long_form() -> bool {
    std::env::var("WARMROUTE_LONG_TESTS").is_ok_and(|value| value == "1")
}

/// Returns the configuration of a property test: with this number of cases in the long form, and
/// with a sixteenth of them in the short form. Failing inputs are printed, not stored in files.
pub fn property_config(cases: u32) -> Config {
    Config {
        cases: if is_long_form() {
            cases
        } else {
            (cases / SHORT_DIVISOR).max(MIN_CASES)
        },
        failure_persistence: None,
        ..Config::default()
    }
}
