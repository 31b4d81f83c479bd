//! Sets the cfg `long_tests` if `WARMROUTE_LONG_TESTS` is 1. Without it, libtest reports the long
//! tests as ignored.

#[expect(
    clippy::disallowed_methods,
    reason = "the environment selects the long form of tests"
)]
fn main() {
    println!("cargo::rustc-check-cfg=cfg(long_tests)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=WARMROUTE_LONG_TESTS");
    if std::env::var_os("WARMROUTE_LONG_TESTS").is_some_and(|value| value == "1") {
        println!("cargo::rustc-cfg=long_tests");
    }
}
