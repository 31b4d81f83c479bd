//! Properties of the gateway at the other end of a connection, as far as its responses show them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::headers::{AnsweredBy, ResponseHead};

/// Properties of the gateway of one connection. Its streams share the value.
#[derive(Clone, Debug, Default)]
pub struct GatewayTraits {
    /// Whether a response had `x-envoy-upstream-service-time`. Envoy's option `suppress_envoy_headers` removes it.
    shows_upstream_time: Arc<AtomicBool>,
}

/// Whether the source of a response is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attribution {
    /// As far as a response can show it.
    Known,
    /// A 503 may be of Envoy or of the worker. It counts as a response of the worker: an overloaded worker rests, and it is not
    /// ejected.
    Undecided,
}

impl GatewayTraits {
    /// Decides the source of an ambiguous response. A gateway that has shown `x-envoy-upstream-service-time` before made a 503 without
    /// it by itself.
    pub(super) fn attribute(&self, head: &mut ResponseHead) -> Attribution {
        if head.has_upstream_time {
            self.shows_upstream_time.store(true, Ordering::Relaxed);
        }
        if head.from != AnsweredBy::Ambiguous {
            return Attribution::Known;
        }
        if self.shows_upstream_time.load(Ordering::Relaxed) {
            head.from = AnsweredBy::Envoy;
            return Attribution::Known;
        }
        head.from = AnsweredBy::Unknown;
        Attribution::Undecided
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(from: AnsweredBy, has_upstream_time: bool) -> ResponseHead {
        ResponseHead { status: 503, from, has_upstream_time, ..ResponseHead::default() }
    }

    #[test]
    fn missing_header_proves_envoy_only_where_shown_before() {
        let gateway = GatewayTraits::default();
        let mut unmarked = response(AnsweredBy::Ambiguous, false);
        assert_eq!(gateway.attribute(&mut unmarked), Attribution::Undecided);
        assert_eq!(unmarked.from, AnsweredBy::Unknown);

        let mut marked = response(AnsweredBy::Unknown, true);
        assert_eq!(gateway.clone().attribute(&mut marked), Attribution::Known);
        assert_eq!(marked.from, AnsweredBy::Unknown);

        let mut unmarked = response(AnsweredBy::Ambiguous, false);
        assert_eq!(gateway.attribute(&mut unmarked), Attribution::Known);
        assert_eq!(unmarked.from, AnsweredBy::Envoy);

        let mut elsewhere = response(AnsweredBy::Ambiguous, false);
        assert_eq!(GatewayTraits::default().attribute(&mut elsewhere), Attribution::Undecided);
    }
}
