# docker build -t warmroute . : BuildKit, and nothing but this repository, the two images and crates.io.

# Compiled against the C library of the final image: both are Debian 12. The image has the C compiler and make that two crates
# need (onig, jemalloc); protoc is not needed.
FROM rust:1.91-bookworm AS build
WORKDIR /src
COPY . .
# Without line tables the binary is 28 MB in place of 178.
ENV CARGO_PROFILE_RELEASE_DEBUG=false CARGO_PROFILE_RELEASE_STRIP=true
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --release --locked --bin warmroute && cp target/release/warmroute /warmroute

# glibc, libm and libgcc_s, which is all that the binary links (a test holds it to that), CA certificates and time zones, no shell.
FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=build /warmroute /usr/local/bin/warmroute
# A number, so that Kubernetes can tell that it is not root (runAsNonRoot).
USER 65532:65532
# ext_proc, gRPC health, xDS, admin
EXPOSE 9002 9003 9004 9901
ENTRYPOINT ["/usr/local/bin/warmroute"]
CMD ["serve", "--config", "/etc/warmroute/warmroute.yaml"]
