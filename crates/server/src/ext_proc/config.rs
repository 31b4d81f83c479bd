//! Configuration of the Envoy side: listeners, limits, and response headers.

mod gateway;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use gateway::{
    AssumedBodies, FailureConfig, FailureMode, GatewayConfig, ObserveMode, ResponseConfig,
};

use warmroute_runtime::tls::{ConnectionLimits, ListenerExposure, ListenerLimits, TlsConfig};
use warmroute_settings::{ADDRESS_PATTERN, ByteSize, DurationSetting, Problem, all_within};

/// Maximum length of a unix socket path. Linux allows 107 bytes, and the socket is bound with the
/// suffix `.new` before it is renamed.
const MAX_SOCKET_PATH: usize = 103;

/// Minimum of `max_header_list_size`. Envoy's own headers of a gRPC call take several hundred
/// bytes, and tracing adds to them.
const MIN_HEADER_LIST: ByteSize = ByteSize::kib(4);

/// Maximum of `max_header_list_size`. A larger value would not be an effective limit.
const MAX_HEADER_LIST: ByteSize = ByteSize::mib(16);

/// Maximum HTTP/2 frame size for clients, in bytes. With the usual 16 KiB a long body arrives in
/// dozens of frames, each of which is read and processed separately.
pub const HTTP2_FRAME_BYTES: u32 = 256 << 10;

/// HTTP/2 receive window of a stream, in bytes.
pub const HTTP2_STREAM_WINDOW: u32 = 128 << 10;

/// HTTP/2 receive window of a connection, in bytes. An exchange stops reading while Envoy does not
/// accept its replies, and the unread part of its body stays in this window. The window has room for
/// many such streams, so that they do not stop the other streams of the connection.
pub const HTTP2_CONNECTION_WINDOW: u32 = 32 << 20;

/// The `listeners.ext_proc:` section: the ext_proc gRPC server with gRPC health, on TCP, on a unix
/// socket, or both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ListenConfig {
    /// TCP address.
    #[serde(default)]
    #[schemars(extend("pattern" = ADDRESS_PATTERN))]
    pub address: Option<SocketAddr>,
    /// Path of a unix socket.
    #[serde(default)]
    pub unix_socket: Option<PathBuf>,
    /// TCP address for gRPC health alone, without TLS, open from the start of the process. `None`:
    /// gRPC health only beside ext_proc.
    #[serde(default)]
    #[schemars(extend("pattern" = ADDRESS_PATTERN))]
    pub health_address: Option<SocketAddr>,
    /// TLS of the TCP address. `None`: plaintext.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsConfig>,
    /// Accept every client on a TCP address that is not loopback.
    #[serde(default)]
    pub unprotected: bool,
}

impl Default for ListenConfig {
    fn default() -> Self {
        Self {
            address: Some((Ipv4Addr::LOCALHOST, 9002).into()),
            unix_socket: None,
            health_address: None,
            tls: None,
            unprotected: false,
        }
    }
}

impl ListenConfig {
    /// Returns the semantic errors of the configuration.
    pub fn problems(&self) -> Vec<Problem> {
        let too_long = |path: &&Path| path.as_os_str().len() > MAX_SOCKET_PATH;
        let mut problems = Vec::new();
        if self.address.is_none() && self.unix_socket.is_none() {
            let text = "neither `address` nor `unix_socket` is given, so Envoy cannot connect; \
                give at least one";
            problems.push(Problem::at([], text));
        }
        if let Some(path) = self.unix_socket.as_deref().filter(too_long) {
            let text = format!(
                "the socket path has {} bytes, more than {MAX_SOCKET_PATH}; choose a shorter one: \
                {}",
                path.as_os_str().len(),
                path.display()
            );
            problems.push(Problem::of("unix_socket", text));
        }
        if let Some(tls) = &self.tls {
            if self.address.is_none() {
                problems.push(Problem::of(
                    "tls",
                    "TLS is for `address`, which is not given; give it, or leave this out",
                ));
            }
            problems.extend(all_within("tls", tls.problems()));
        }
        if let Some(listen) = self.address {
            let exposure = ListenerExposure {
                key: "address",
                listen,
                tls: self.tls.as_ref(),
                unprotected: self.unprotected,
                allowed_actions: "book load and have engines called",
            };
            problems.extend(exposure.problem());
        }
        problems
    }
}

/// gRPC message overhead beyond the body: headers, attributes, metadata.
const MESSAGE_OVERHEAD: usize = 1 << 20;

/// The `requests.limits:` section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// Maximum size of a request body; at least Envoy's `request_body_buffer_limit`.
    pub max_body_size: ByteSize,
    /// Bodies up to this size (about a thousand tokens, one or two milliseconds) are tokenized on
    /// the thread of the stream. Longer ones are tokenized on separate threads, unless recent
    /// bodies of this size were tokenized quickly. 0: all on separate threads.
    pub tokenize_inline_size: ByteSize,
    /// Maximum number of bodies that wait for these threads, half of them above 256 KiB. Further
    /// requests are routed by load only.
    pub tokenize_queue_length: u32,
    /// Size of the prompt cache. The prefix that a request shares with a cached one is not parsed
    /// or tokenized again. 0: no cache.
    pub prompt_cache_size: ByteSize,
    /// Maximum time for queueing and tokenization. Afterwards, the request is routed by the tokens
    /// computed so far.
    pub decision_timeout: DurationSetting,
    /// Maximum time for the body of a request in full-duplex mode, where Envoy sets no limit.
    /// Afterwards, the request is routed by load.
    pub upload_timeout: DurationSetting,
    /// Maximum total size of buffered request bodies. Beyond it, requests are routed by load.
    pub max_buffered_bytes: ByteSize,
}

impl LimitsConfig {
    /// Returns the maximum size of a gRPC message that contains a request body.
    pub fn max_message_bytes(&self) -> usize {
        self.max_body_size.bytes().saturating_add(MESSAGE_OVERHEAD)
    }
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            max_body_size: ByteSize::mib(32),
            tokenize_inline_size: ByteSize::kib(4),
            tokenize_queue_length: 256,
            prompt_cache_size: ByteSize::mib(256),
            // Below Envoy's default `message_timeout` of 1s, so that a slow prompt is still routed.
            decision_timeout: DurationSetting::millis(800),
            upload_timeout: DurationSetting::millis(30_000),
            max_buffered_bytes: ByteSize::mib(1024),
        }
    }
}

impl LimitsConfig {
    /// Returns the semantic errors of the configuration.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.max_body_size.0 == 0 {
            problems.push(Problem::of(
                "max_body_size",
                "no request would fit a limit of 0; the default is 32MiB",
            ));
        }
        if self.decision_timeout.get().is_zero() {
            let text = "no request could be routed within 0s; the default is 800ms";
            problems.push(Problem::of("decision_timeout", text));
        }
        if self.upload_timeout.get().is_zero() {
            problems.push(Problem::of(
                "upload_timeout",
                "no body would arrive within 0s; the default is 30s",
            ));
        }
        if self.max_buffered_bytes.0 < self.max_body_size.0 {
            let text = "is less than `requests.limits.max_body_size`, so that a single request \
                could exceed it; the default is 1GiB";
            problems.push(Problem::of("max_buffered_bytes", text));
        }
        problems
    }
}

/// The `listeners.limits:` section. The limits hold for each listener separately.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ListenerLimitsConfig {
    /// Maximum number of connections. A further connection replaces the connection that has been
    /// idle for longest, or is closed at once if all are in use.
    pub max_connections: u32,
    /// Maximum number of connections of one IP address, enforced in the same way.
    pub max_connections_per_peer: u32,
    /// Maximum time of a TLS handshake, of the connection start after it, and of each header block.
    pub handshake_timeout: DurationSetting,
    /// Maximum size of the header list of one gRPC call, as HTTP/2 defines it.
    pub max_header_list_size: ByteSize,
    /// Maximum number of open gRPC streams of each listener, over all its connections. Each ext_proc
    /// filter opens one per request. Further streams are refused with UNAVAILABLE. Envoy then serves
    /// the request without warmroute if `failure_mode_allow` is true.
    pub max_streams: u32,
}

impl Default for ListenerLimitsConfig {
    fn default() -> Self {
        Self {
            max_connections: 1024,
            max_connections_per_peer: 512,
            handshake_timeout: DurationSetting::seconds(10),
            max_header_list_size: ByteSize::kib(64),
            max_streams: 65_536,
        }
    }
}

impl ListenerLimitsConfig {
    /// Returns the semantic errors of the configuration.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.max_connections == 0 {
            problems.push(Problem::of(
                "max_connections",
                "no client could connect; the default is 1024",
            ));
        }
        if self.max_connections_per_peer == 0 {
            problems.push(Problem::of(
                "max_connections_per_peer",
                "no client could connect; the default is 512",
            ));
        }
        if self.handshake_timeout.get().is_zero() {
            problems.push(Problem::of(
                "handshake_timeout",
                "no client could connect within 0s; the default is 10s",
            ));
        }
        if self.max_header_list_size < MIN_HEADER_LIST
            || self.max_header_list_size > MAX_HEADER_LIST
        {
            let text = format!(
                "{} is too small for the headers of a call; give {MIN_HEADER_LIST} to \
                {MAX_HEADER_LIST}, the default is 64KiB",
                self.max_header_list_size
            );
            problems.push(Problem::of("max_header_list_size", text));
        }
        if self.max_streams == 0 {
            problems.push(Problem::of(
                "max_streams",
                "no exchange could begin; the default is 65536",
            ));
        }
        problems
    }

    /// Returns these limits with at most `max_connections` connections. The limit of one IP address
    /// is reduced by the same ratio.
    pub fn scale_connections(self, max_connections: u32) -> Self {
        if max_connections >= self.max_connections {
            return self;
        }
        let per_peer = u64::from(self.max_connections_per_peer) * u64::from(max_connections)
            / u64::from(self.max_connections).max(1);
        Self {
            max_connections,
            max_connections_per_peer: u32::try_from(per_peer).unwrap_or(u32::MAX).max(1),
            ..self
        }
    }

    /// Returns the limits of a listener.
    pub fn listener_limits(
        &self,
        idle: Option<Duration>,
        idle_timeout: Duration,
    ) -> ListenerLimits {
        let total = self.max_connections as usize;
        let per_peer = self.max_connections_per_peer as usize;
        let header_list = usize::try_from(self.max_header_list_size.0).unwrap_or(usize::MAX);
        // h2 rejects a longer header list with status 431 and continues to read. The HTTP/2 filter
        // in front of h2 therefore accepts such a block as well.
        let max_header_block_bytes = header_list
            .saturating_mul(2)
            .saturating_add(HTTP2_FRAME_BYTES as usize);
        let connections = ConnectionLimits {
            total,
            per_peer,
            idle_timeout,
        };
        ListenerLimits {
            connections,
            handshake: self.handshake_timeout.get(),
            idle,
            max_header_block_bytes,
        }
    }
}
