# docker build -t warmroute . : requires BuildKit, the two images and crates.io.

# Compiled against the C library of the final image: both are Debian 12. The image has the C compiler and make that two crates
# need (onig, jemalloc); protoc is not needed.
FROM rust:1.91-bookworm AS build
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --release --locked --bin warmroute && cp target/release/warmroute /warmroute

# The image has glibc, libm and libgcc_s, the only libraries that the binary links (checked by a test), CA certificates and
# time zones, and no shell.
FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=build /warmroute /usr/local/bin/warmroute
# A number, so that Kubernetes can check that it is not root (runAsNonRoot).
USER 65532:65532
# ext_proc, gRPC health, xDS, admin
EXPOSE 9002 9003 9004 9901
ENTRYPOINT ["/usr/local/bin/warmroute"]
CMD ["serve", "--config", "/etc/warmroute/warmroute.yaml"]
