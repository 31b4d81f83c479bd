//! Settings of the Envoy side: where we listen, what we refuse, what we add to answers.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::settings::{Period, Problem, Size};

/// Longest path of the unix socket: Linux takes 107, and it is bound with `.new` behind its name before it is renamed.
const LONGEST_SOCKET_PATH: usize = 103;

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
}

impl Default for ListenConfig {
    fn default() -> Self {
        Self { tcp: Some((Ipv4Addr::LOCALHOST, 9002).into()), unix: None, health: None }
    }
}

impl ListenConfig {
    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let too_long = |path: &&Path| path.as_os_str().len() > LONGEST_SOCKET_PATH;
        let mut problems = Vec::new();
        if self.tcp.is_none() && self.unix.is_none() {
            let text = "neither `tcp` nor `unix` is given, so Envoy could not reach us; give at least one";
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
        problems
    }
}

/// `limits:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// Longest request body we take; at least Envoy's `request_body_buffer_limit`.
    pub body: Size,
    /// Bodies up to this size (about a thousand tokens, a millisecond or two) are tokenised on the stream's own thread,
    /// longer ones on the blocking pool.
    pub tokenize_inline: Size,
    /// Bodies that may wait for the blocking pool; beyond it a request is routed by load only.
    pub tokenize_queue: u32,
    /// How long a body may wait for the blocking pool and be tokenised there; afterwards the request is routed by load only.
    pub exchange_deadline: Period,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            body: Size::mib(32),
            tokenize_inline: Size::kib(4),
            tokenize_queue: 256,
            // Below Envoy's usual message_timeout of 1s, so that a slow prompt still goes by load.
            exchange_deadline: Period::millis(800),
        }
    }
}

impl LimitsConfig {
    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.body.0 == 0 {
            problems.push(Problem::of("body", "no request would fit a limit of 0; the default is 32MiB"));
        }
        if self.exchange_deadline.get().is_zero() {
            let text = "no request could be routed within 0s; the default is 800ms";
            problems.push(Problem::of("exchange_deadline", text));
        }
        problems
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
        Self { mode_header: true, worker_header: false, prediction_header: false, why_header: false }
    }
}
