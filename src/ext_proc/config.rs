//! Settings of the Envoy side: where we listen, what we refuse, what we add to answers.

mod gateway;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use gateway::{AssumedBodies, FailureConfig, FailureMode, GatewayConfig, Observe};

use crate::settings::{Period, Problem, Size};
use crate::tls::{ConnectionLimits, ListenerExposure, ListenerLimits, TlsConfig};

/// Longest path of the unix socket: Linux takes 107, and it is bound with `.new` behind its name before it is renamed.
const LONGEST_SOCKET_PATH: usize = 103;

/// Envoy's own headers of a call take some hundred bytes, tracing some more.
const LEAST_HEADER_LIST: Size = Size::kib(4);

/// Beyond it nothing is bounded.
const MOST_HEADER_LIST: Size = Size::mib(16);

/// Bytes of an HTTP/2 frame that a client may send. With the usual 16 KiB a long body arrives in dozens of frames, each of which is
/// read and processed separately.
pub const HTTP2_FRAME: u32 = 256 << 10;

/// `listen:`: the ext_proc gRPC server, with gRPC health beside it. One or both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListenConfig {
    /// TCP address.
    #[serde(default)]
    pub tcp: Option<SocketAddr>,
    /// Path of a unix socket.
    #[serde(default)]
    pub unix: Option<PathBuf>,
    /// TCP address for gRPC health alone, without TLS, up from the very start of the process; none: only beside ext_proc.
    #[serde(default)]
    pub health: Option<SocketAddr>,
    /// TLS of the TCP address; none: plaintext.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsConfig>,
    /// Accept every client that reaches a TCP address that is not loopback.
    #[serde(default)]
    pub unprotected: bool,
}

impl Default for ListenConfig {
    fn default() -> Self {
        Self {
            tcp: Some((Ipv4Addr::LOCALHOST, 9002).into()),
            unix: None,
            health: None,
            tls: None,
            unprotected: false,
        }
    }
}

impl ListenConfig {
    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let too_long = |path: &&Path| path.as_os_str().len() > LONGEST_SOCKET_PATH;
        let mut problems = Vec::new();
        if self.tcp.is_none() && self.unix.is_none() {
            let text =
                "neither `tcp` nor `unix` is given, so Envoy could not reach us; give at least one";
            problems.push(Problem::at([], text));
        }
        if let Some(path) = self.unix.as_deref().filter(too_long) {
            let text = format!(
                "the socket path has {} bytes, more than {LONGEST_SOCKET_PATH}; choose a shorter one: {}",
                path.as_os_str().len(),
                path.display()
            );
            problems.push(Problem::of("unix", text));
        }
        if let Some(tls) = &self.tls {
            if self.tcp.is_none() {
                problems.push(Problem::of(
                    "tls",
                    "TLS is for `tcp`, which is not given; give it, or leave this out",
                ));
            }
            problems.extend(
                tls.problems()
                    .into_iter()
                    .map(|problem| problem.within("tls")),
            );
        }
        if let Some(listen) = self.tcp {
            let exposure = ListenerExposure {
                key: "tcp",
                listen,
                tls: self.tls.as_ref(),
                unprotected: self.unprotected,
                risk: "book load and have engines called",
            };
            problems.extend(exposure.problem());
        }
        problems
    }

    /// Makes names of files absolute.
    pub fn resolve(&mut self, folder: &Path) {
        if let Some(unix) = &mut self.unix {
            *unix = folder.join(&*unix);
        }
        if let Some(tls) = &mut self.tls {
            tls.resolve(folder);
        }
    }
}

/// `limits:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// Longest request body we take; at least Envoy's `request_body_buffer_limit`.
    pub body: Size,
    /// Bodies up to this size (about a thousand tokens, a millisecond or two) are tokenised on the stream's own thread,
    /// longer ones on threads for that, unless such took very little time lately; with 0 all are.
    pub tokenize_inline: Size,
    /// Bodies that may wait for these threads, half of them above 256 KiB; beyond it a request is routed by load only.
    pub tokenize_queue: u32,
    /// Bytes that are kept of earlier prompts, so that those that begin like them are tokenised only from there on; 0: none.
    pub prompt_cache: Size,
    /// How long a body may wait for these threads and be tokenised there; afterwards the request is routed by the tokens made
    /// until then.
    pub exchange_deadline: Period,
    /// How long the body of a request may take in full duplex, where Envoy sets no limit; afterwards it is routed by what
    /// has come.
    pub upload: Period,
    /// Most bytes of request bodies that are held for all requests together; beyond it they are routed by what has come.
    pub held_bodies: Size,
    /// Connections to one listener at a time. A further one replaces the one that has been idle for longest, or is closed at once if all
    /// are in use.
    pub connections: u32,
    /// Connections of one IP address to one listener at a time; handled alike.
    pub connections_per_peer: u32,
    /// How long a TLS handshake may take, and how long a client may then say nothing before it is sent away.
    pub handshake: Period,
    /// Headers of one gRPC call, added up; what HTTP/2 calls the header list.
    pub header_list: Size,
    /// Exchanges on one connection to ext_proc at a time. Unbounded by default, because Envoy opens many before it is told
    /// of a bound, and does not try those again that were refused.
    pub streams: Option<u32>,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            body: Size::mib(32),
            tokenize_inline: Size::kib(4),
            tokenize_queue: 256,
            prompt_cache: Size::mib(256),
            // Below Envoy's usual message_timeout of 1s, so that a slow prompt still goes by load.
            exchange_deadline: Period::millis(800),
            upload: Period::millis(30_000),
            held_bodies: Size::mib(1024),
            connections: 1024,
            connections_per_peer: 512,
            handshake: Period::seconds(10),
            header_list: Size::kib(64),
            streams: None,
        }
    }
}

impl LimitsConfig {
    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.body.0 == 0 {
            problems.push(Problem::of(
                "body",
                "no request would fit a limit of 0; the default is 32MiB",
            ));
        }
        if self.exchange_deadline.get().is_zero() {
            let text = "no request could be routed within 0s; the default is 800ms";
            problems.push(Problem::of("exchange_deadline", text));
        }
        if self.upload.get().is_zero() {
            problems.push(Problem::of(
                "upload",
                "no body would come within 0s; the default is 30s",
            ));
        }
        if self.held_bodies.0 < self.body.0 {
            let text = "is less than `limits.body`, so that one request could be too many; the default is 1GiB";
            problems.push(Problem::of("held_bodies", text));
        }
        if self.connections == 0 {
            problems.push(Problem::of(
                "connections",
                "nobody could connect; the default is 1024",
            ));
        }
        if self.connections_per_peer == 0 {
            problems.push(Problem::of(
                "connections_per_peer",
                "no client could connect; the default is 512",
            ));
        }
        if self.handshake.get().is_zero() {
            problems.push(Problem::of(
                "handshake",
                "nobody could connect within 0s; the default is 10s",
            ));
        }
        if self.header_list < LEAST_HEADER_LIST || self.header_list > MOST_HEADER_LIST {
            let text = format!(
                "{} is no room for the headers of a call; give {LEAST_HEADER_LIST} to {MOST_HEADER_LIST}, the default is 64KiB",
                self.header_list
            );
            problems.push(Problem::of("header_list", text));
        }
        if self.streams == Some(0) {
            problems.push(Problem::of(
                "streams",
                "no exchange could begin; leave this out for no bound",
            ));
        }
        problems
    }

    /// Limits of a listener.
    pub fn listener(&self, idle: Option<Duration>, quiet: Duration) -> ListenerLimits {
        let total = self.connections as usize;
        let per_peer = self.connections_per_peer as usize;
        let header_list = usize::try_from(self.header_list.0).unwrap_or(usize::MAX);
        // h2 answers a longer header list with status 431 and reads on, so the filter has to follow such a block as well.
        let header_block = header_list
            .saturating_mul(2)
            .saturating_add(HTTP2_FRAME as usize);
        let connections = ConnectionLimits {
            total,
            per_peer,
            quiet,
        };
        ListenerLimits {
            connections,
            handshake: self.handshake.get(),
            idle,
            header_block,
        }
    }
}

/// `response:`: what we add to answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ResponseConfig {
    /// Say on which step of the degradation ladder the request was routed.
    pub mode_header: bool,
    /// Say which worker rank was chosen. Off by default: it tells clients how the fleet is laid out.
    pub worker_header: bool,
    /// Say how many cached prompt tokens the engine is expected to report. Off by default, for the same reason.
    pub prediction_header: bool,
    /// Say in short why the worker was chosen. Off by default, for the same reason.
    pub why_header: bool,
}

impl Default for ResponseConfig {
    fn default() -> Self {
        Self {
            mode_header: true,
            worker_header: false,
            prediction_header: false,
            why_header: false,
        }
    }
}
