//! Outages of an event source, for logs.

use super::subscriber::DetachError;

/// Decides how the end of a session is logged, so that each outage is logged once.
#[derive(Default)]
pub(super) struct SourceOutage {
    /// Whether the loss of the last connection was logged.
    is_loss_logged: bool,
    /// Last logged error of a failed connection attempt.
    last_error: String,
}

/// Log line for the end of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OutageReport {
    /// The connection was lost.
    Lost,
    /// No connection was established, and the error is new.
    Unreachable,
    /// The outage or its cause was logged before.
    Repeated,
}

impl SourceOutage {
    /// Records the end of a session.
    pub(super) fn record(&mut self, was_connected: bool, error: &DetachError) -> OutageReport {
        if was_connected {
            // The silence that led to the request was logged.
            let is_requested = matches!(error, DetachError::ReconnectRequested);
            self.is_loss_logged = !is_requested;
            self.last_error.clear();
            return if is_requested {
                OutageReport::Repeated
            } else {
                OutageReport::Lost
            };
        }
        let error = error.to_string();
        if self.is_loss_logged || error == self.last_error {
            return OutageReport::Repeated;
        }
        self.last_error = error;
        OutageReport::Unreachable
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use warmroute_zmtp::ZmtpError;

    use super::*;

    #[test]
    fn each_outage_is_logged_once() {
        let refused = || DetachError::Socket(ZmtpError::ConnectTimeout(Duration::from_secs(5)));
        let mut outage = SourceOutage::default();
        let reports = [
            (false, refused(), OutageReport::Unreachable),
            (false, refused(), OutageReport::Repeated),
            (false, DetachError::SocketClosed, OutageReport::Unreachable),
            (true, DetachError::SocketClosed, OutageReport::Lost),
            (false, refused(), OutageReport::Repeated),
            (
                true,
                DetachError::ReconnectRequested,
                OutageReport::Repeated,
            ),
            (false, refused(), OutageReport::Unreachable),
            (true, DetachError::SocketClosed, OutageReport::Lost),
        ];
        for (was_connected, error, report) in reports {
            assert_eq!(outage.record(was_connected, &error), report, "{error}");
        }
    }
}
