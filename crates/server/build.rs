//! Compiles the protocols of warmroute with a Rust library, so that no `protoc` binary is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const PROTOS: [&str; 3] = [
        "proto/warmroute/v1/router.proto",
        "proto/warmroute/index/v1/index.proto",
        "proto/warmroute/replica/v1/replica.proto",
    ];
    PROTOS
        .iter()
        .for_each(|proto| println!("cargo::rerun-if-changed={proto}"));
    let files = protox::compile(PROTOS, ["proto"])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
