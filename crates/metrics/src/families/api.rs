//! Metrics of the router API.

use crate::*;

metrics! {
    /// Metrics of the router API.
    ApiMetrics {
        /// Calls of the router API by method and gRPC status code. A stream is counted when it
        /// begins
        "api_calls" calls: Family<ApiCallLabels, Counter> = Family::default();
        /// Requests that callers of the router API have booked
        "api_bookings" bookings: Gauge = Gauge::default();
        /// Bookings of the router API that were released because their callers sent no update in
        /// time
        "api_expired_bookings" expired_bookings: Counter = Counter::default();
    }
}
