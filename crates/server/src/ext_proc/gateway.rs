//! Properties of the gateway at the other end of a connection, as its responses show them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::headers::{ResponseHead, ResponseSource};

/// Properties of the gateway of one connection. Its streams share the value.
#[derive(Clone, Debug, Default)]
pub struct GatewayTraits {
    /// Whether a response had `x-envoy-upstream-service-time`. Envoy's option
    /// `suppress_envoy_headers` removes it.
    shows_upstream_time: Arc<AtomicBool>,
}

impl GatewayTraits {
    /// Decides the source of an ambiguous response. After a response with
    /// `x-envoy-upstream-service-time`, a 503 without it comes from Envoy. Returns whether the
    /// source is known. Otherwise, the 503 counts as a response of the worker, which is marked as
    /// overloaded and not ejected.
    pub(super) fn decide_source(&self, head: &mut ResponseHead) -> bool {
        if head.has_upstream_time {
            self.shows_upstream_time.store(true, Ordering::Relaxed);
        }
        if head.source != ResponseSource::Ambiguous {
            return true;
        }
        if self.shows_upstream_time.load(Ordering::Relaxed) {
            head.source = ResponseSource::Envoy;
            return true;
        }
        head.source = ResponseSource::Unknown;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(source: ResponseSource, has_upstream_time: bool) -> ResponseHead {
        ResponseHead {
            status: 503,
            source,
            has_upstream_time,
            ..ResponseHead::default()
        }
    }

    #[test]
    fn missing_header_identifies_envoy_only_if_seen_before() {
        let gateway = GatewayTraits::default();
        let mut unmarked = response(ResponseSource::Ambiguous, false);
        assert!(!gateway.decide_source(&mut unmarked));
        assert_eq!(unmarked.source, ResponseSource::Unknown);

        let mut marked = response(ResponseSource::Unknown, true);
        assert!(gateway.clone().decide_source(&mut marked));
        assert_eq!(marked.source, ResponseSource::Unknown);

        let mut unmarked = response(ResponseSource::Ambiguous, false);
        assert!(gateway.decide_source(&mut unmarked));
        assert_eq!(unmarked.source, ResponseSource::Envoy);

        let mut other_gateway = response(ResponseSource::Ambiguous, false);
        assert!(!GatewayTraits::default().decide_source(&mut other_gateway));
    }
}
