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

/// Result of attributing a response to Envoy or to the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ResponseAttribution {
    /// The response shows its source.
    Known,
    /// A 503 of Envoy or of the worker. It counts as a response of the worker, which is marked as
    /// overloaded and not ejected.
    Ambiguous,
}

impl GatewayTraits {
    /// Decides the source of an ambiguous response. After a response with
    /// `x-envoy-upstream-service-time`, a 503 without it comes from Envoy.
    pub(super) fn attribute(&self, head: &mut ResponseHead) -> ResponseAttribution {
        if head.has_upstream_time {
            self.shows_upstream_time.store(true, Ordering::Relaxed);
        }
        if head.source != ResponseSource::Ambiguous {
            return ResponseAttribution::Known;
        }
        if self.shows_upstream_time.load(Ordering::Relaxed) {
            head.source = ResponseSource::Envoy;
            return ResponseAttribution::Known;
        }
        head.source = ResponseSource::Unknown;
        ResponseAttribution::Ambiguous
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
        assert_eq!(
            gateway.attribute(&mut unmarked),
            ResponseAttribution::Ambiguous
        );
        assert_eq!(unmarked.source, ResponseSource::Unknown);

        let mut marked = response(ResponseSource::Unknown, true);
        assert_eq!(
            gateway.clone().attribute(&mut marked),
            ResponseAttribution::Known
        );
        assert_eq!(marked.source, ResponseSource::Unknown);

        let mut unmarked = response(ResponseSource::Ambiguous, false);
        assert_eq!(gateway.attribute(&mut unmarked), ResponseAttribution::Known);
        assert_eq!(unmarked.source, ResponseSource::Envoy);

        let mut other_gateway = response(ResponseSource::Ambiguous, false);
        assert_eq!(
            GatewayTraits::default().attribute(&mut other_gateway),
            ResponseAttribution::Ambiguous
        );
    }
}
