//! The long and the short form of tests.

/// Returns the value of the long form if `WARMROUTE_LONG_TESTS` is 1, and that of the short form
/// otherwise.
#[expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "the environment selects the form, and the output of a test names it"
)]
pub(crate) fn long_or_short<T>(long: T, short: T) -> T {
    if std::env::var("WARMROUTE_LONG_TESTS").is_ok_and(|value| value == "1") {
        return long;
    }
    println!("short form; the long form needs WARMROUTE_LONG_TESTS=1");
    short
}
