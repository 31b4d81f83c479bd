//! Compiles the protocol of the service. No `protoc` is needed: the compiler is a Rust library.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const PROTO: &str = "proto/warmroute/v1/router.proto";
    println!("cargo::rerun-if-changed={PROTO}");
    let files = protox::compile([PROTO], ["proto"])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
