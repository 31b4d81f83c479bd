//! The connections to engines, and when one is given up. A machine that has gone says nothing more, and a front end that is
//! left alone for some seconds hangs up without a word; neither may cost a request all the time that it has.

use std::error::Error;
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use reqwest::redirect::Policy;
use reqwest::{Certificate, Client, ClientBuilder};

use super::config::{EnginesConfig, Scheme};
use super::{EngineError, told};

/// How long a connection may take to be there, TLS and all: as long as Envoy gives one in our configurations.
const CONNECT: Duration = Duration::from_secs(1);

/// How long a connection is kept that nobody uses. uvicorn, before most engines, hangs up after 5 s, and what is sent at that
/// moment is lost.
const IDLE: Duration = Duration::from_secs(4);

/// How often an HTTP/2 connection is asked whether it is still there.
const PING: Duration = Duration::from_secs(2);

/// How long that may take: an engine may be busy, and still be there.
const PONG: Duration = Duration::from_secs(5);

/// How long the other side's system may leave bytes unacknowledged. An engine that is busy has its system do that.
const UNACKNOWLEDGED: Duration = Duration::from_secs(10);

/// A connection that dies later than this has died of something else than of having been left alone.
const AT_ONCE: Duration = Duration::from_millis(250);

/// What hyper says of a connection that was closed where an answer should have begun.
const NO_ANSWER: &str = "connection closed before message completed";

/// A pool of connections.
pub(super) fn pool(
    config: &EnginesConfig,
    authorities: Option<&[u8]>,
) -> Result<Client, EngineError> {
    let broken = |problem: String| EngineError::Client(problem);
    let build = |builder: ClientBuilder| {
        // Engines are neighbours: where one sends us instead we have no business.
        let builder = builder
            .redirect(Policy::none())
            .tcp_nodelay(true)
            .connect_timeout(CONNECT);
        let builder = builder
            .pool_max_idle_per_host(config.in_flight as usize)
            .pool_idle_timeout(IDLE);
        let builder = builder
            .http2_keep_alive_interval(PING)
            .http2_keep_alive_timeout(PONG);
        let builder = builder.http2_keep_alive_while_idle(true);
        #[cfg(target_os = "linux")]
        let builder = builder.tcp_user_timeout(UNACKNOWLEDGED);
        if config.scheme == Scheme::H2c {
            builder.http2_prior_knowledge()
        } else {
            builder
        }
        .build()
    };
    let client = match authorities {
        Some(pem) => {
            let certificates =
                Certificate::from_pem_bundle(pem).map_err(|error| broken(error.to_string()))?;
            build(crate::tls::client().tls_certs_only(certificates))
        }
        // Small images have no authorities, and engines without TLS need none.
        None => build(crate::tls::believing_the_system()).or_else(|_| build(crate::tls::client())),
    };
    client.map_err(|error| broken(told(&error)))
}

/// Whether a connection died under a question before any of its answer came, at once: as one does that the other side was
/// closing already. What the other side has done of it cannot be known, so only what may be done twice is asked again.
pub(super) fn was_closing(problem: &reqwest::Error, since: Instant) -> bool {
    if problem.is_connect() || problem.is_timeout() || since.elapsed() > AT_ONCE {
        return false;
    }
    let mut cause = problem.source();
    while let Some(next) = cause {
        let gone = next
            .downcast_ref::<io::Error>()
            .is_some_and(|error| is_gone(error.kind()));
        if gone || next.to_string() == NO_ANSWER {
            return true;
        }
        cause = next.source();
    }
    false
}

fn is_gone(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe
    )
}

#[cfg(test)]
mod tests;
