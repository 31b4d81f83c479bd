# syntax=docker/dockerfile:1
# Image of warmroute. Requires BuildKit, the two base images and crates.io:
#   docker build --build-arg COMMIT="$(git rev-parse HEAD)" --tag warmroute:0.1.0 .
# tests/fleet/manifests.rs checks this file with hadolint, and that the binary needs only the libraries of the final image. The image itself was
# never built: no container engine was available.

# This image is Debian 12, like the final image, so both have the same C library. Several crates, such as onig, jemalloc and ring, need its
# C compiler, and jemalloc needs make. protoc is not needed. A static binary can be built as well (x86_64-unknown-linux-musl with musl-gcc), but
# its speed was not measured.
FROM rust:1.91-bookworm AS build
WORKDIR /src
# The build context has no git history, so `warmroute --version` takes the commit from here.
ARG COMMIT=""
ENV WARMROUTE_COMMIT=$COMMIT
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --release --locked --bin warmroute && cp target/release/warmroute /warmroute

# This image has CA certificates, time zones and the only libraries that the binary links: glibc, libm and libgcc_s. It has no shell and no
# package manager.
FROM gcr.io/distroless/cc-debian12:nonroot
ARG VERSION=0.1.0
ARG COMMIT=unknown
ARG SOURCE=""
LABEL org.opencontainers.image.title="warmroute" \
      org.opencontainers.image.description="An Envoy external processor that routes every LLM request to the worker whose KV cache is already warm for it" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$COMMIT" \
      org.opencontainers.image.source="$SOURCE" \
      org.opencontainers.image.base.name="gcr.io/distroless/cc-debian12:nonroot"
COPY --from=build /warmroute /usr/local/bin/warmroute
# A numeric id, so that Kubernetes can check that it is not root (runAsNonRoot).
USER 65532:65532
# ext_proc, gRPC health, xDS, admin
EXPOSE 9002 9003 9004 9005
ENTRYPOINT ["/usr/local/bin/warmroute"]
CMD ["serve", "--config", "/etc/warmroute/warmroute.yaml"]
