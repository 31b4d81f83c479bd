# docker build -t warmroute . : requires BuildKit, the two images and crates.io.

# This image is Debian 12, like the final image, so both have the same C library. Two crates (onig, jemalloc) need its C compiler and
# make. protoc is not needed.
FROM rust:1.91-bookworm AS build
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --release --locked --bin warmroute && cp target/release/warmroute /warmroute

# This image has CA certificates, time zones and the only libraries that the binary links: glibc, libm and libgcc_s (checked by a
# test). It has no shell.
FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=build /warmroute /usr/local/bin/warmroute
# A numeric id, so that Kubernetes can check that it is not root (runAsNonRoot).
USER 65532:65532
# ext_proc, gRPC health, xDS, admin
EXPOSE 9002 9003 9004 9901
ENTRYPOINT ["/usr/local/bin/warmroute"]
CMD ["serve", "--config", "/etc/warmroute/warmroute.yaml"]
