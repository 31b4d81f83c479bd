//! Connections to engines, with their timeouts. A machine that failed sends nothing, and an idle
//! server closes connections without notice. Neither may use up the deadline of a request.

use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use reqwest::redirect::Policy;
use reqwest::{Certificate, Client, ClientBuilder};
use warmroute_runtime::causes::{causes, join_causes};

use super::config::{EngineScheme, EnginesConfig};
use super::error::EngineError;

/// Maximum time to connect, including TLS. The example Envoy configurations use the same value.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum idle time of a pooled connection. uvicorn, which most engines use, closes idle
/// connections after 5 s. A request that is sent at that moment is lost.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);

/// Interval of HTTP/2 keep-alive pings.
const PING_INTERVAL: Duration = Duration::from_secs(2);

/// Timeout of an HTTP/2 keep-alive ping. Busy engines respond late.
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// Time after which unacknowledged bytes end a connection. On a busy engine, the kernel still
/// acknowledges.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time from sending a request to the failure of a stale connection. A later failure has
/// another cause.
const STALE_CONNECTION_WINDOW: Duration = Duration::from_millis(250);

/// Error text of hyper for a connection that was closed before the response began.
const NO_ANSWER: &str = "connection closed before message completed";

/// Creates a connection pool.
pub(super) fn build_pool(
    config: &EnginesConfig,
    authorities: Option<&[u8]>,
) -> Result<Client, EngineError> {
    let build_error = |problem: String| EngineError::Client(problem);
    let build = |builder: ClientBuilder| {
        // Engines are called directly, so redirects are not followed.
        let builder = builder
            .redirect(Policy::none())
            .tcp_nodelay(true)
            .connect_timeout(CONNECT_TIMEOUT);
        let builder = builder
            .pool_max_idle_per_host(config.max_concurrency as usize)
            .pool_idle_timeout(IDLE_TIMEOUT);
        let builder = builder
            .http2_keep_alive_interval(PING_INTERVAL)
            .http2_keep_alive_timeout(PING_TIMEOUT);
        let builder = builder.http2_keep_alive_while_idle(true);
        #[cfg(target_os = "linux")]
        let builder = builder.tcp_user_timeout(TCP_USER_TIMEOUT);
        if config.scheme == EngineScheme::H2c {
            builder.http2_prior_knowledge()
        } else {
            builder
        }
        .build()
    };
    let client = match authorities {
        Some(pem) => {
            let certificates = Certificate::from_pem_bundle(pem)
                .map_err(|error| build_error(error.to_string()))?;
            build(warmroute_runtime::tls::http_client_builder().tls_certs_only(certificates))
        }
        // Minimal images have no CA certificates, and engines without TLS need none.
        None => build(warmroute_runtime::tls::http_client_with_system_roots())
            .or_else(|_| build(warmroute_runtime::tls::http_client_builder())),
    };
    client.map_err(|error| build_error(join_causes(&error)))
}

/// Returns true if a connection failed immediately and before any byte of the response. This
/// happens if the server was already closing the connection. The server may have processed the
/// request, so only idempotent calls are retried.
pub(super) fn is_stale_connection(problem: &reqwest::Error, since: Instant) -> bool {
    if problem.is_connect() || problem.is_timeout() || since.elapsed() > STALE_CONNECTION_WINDOW {
        return false;
    }
    causes(problem).any(|cause| {
        let is_closed = cause
            .downcast_ref::<io::Error>()
            .is_some_and(|error| is_disconnect(error.kind()));
        is_closed || cause.to_string() == NO_ANSWER
    })
}

fn is_disconnect(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe
    )
}

#[cfg(test)]
mod tests;
