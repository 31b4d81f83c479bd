//! The long and the short form of tests.

/// Returns the value of the long form if `WARMROUTE_LONG_TESTS` is 1, and that of the short form
/// otherwise.
#[expect(clippy::print_stdout, reason = "the output of a test names its form")]
pub(crate) fn long_or_short<T>(long: T, short: T) -> T {
    if warmroute_property_tests::is_long_form() {
        return long;
    }
    println!("short form; the long form needs WARMROUTE_LONG_TESTS=1");
    short
}
