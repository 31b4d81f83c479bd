//! Errors of requests to the API server. Each names the request, the cause and the fix.

use std::fmt;
use std::time::Duration;

use serde::Deserialize;

use super::list_watch::FailureKind;

/// Maximum quoted length of a response.
const MAX_QUOTE: usize = 300;

/// Verb of a request, as in a Role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ApiVerb {
    List,
    Watch,
}

impl ApiVerb {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::List => "list",
            Self::Watch => "watch",
        }
    }
}

/// Cause of a failed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RequestFailure {
    /// There are no usable credentials.
    Credentials(String),
    Status {
        code: u16,
        message: String,
        retry_after: Option<Duration>,
    },
    Timeout(Duration),
    Transport(String),
    /// The request could not be built, or the response is not that of an API server.
    Malformed(String),
}

impl RequestFailure {
    /// Builds the failure of a response part that exceeds its limit in bytes.
    pub(super) fn too_long(part: &str, limit: usize) -> Self {
        Self::Malformed(format!("{part} is longer than {} MiB", limit >> 20))
    }
}

/// A failed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RequestError {
    pub(super) verb: ApiVerb,
    /// Plural and API group.
    pub(super) resource: String,
    /// Kind, API group and version.
    pub(super) kind: String,
    pub(super) namespace: String,
    pub(super) address: String,
    /// Text fragments with the paths of the token and CA files; empty if unknown.
    pub(super) token_file: String,
    pub(super) authority_file: String,
    pub(super) failure: RequestFailure,
}

impl RequestError {
    pub(super) fn code(&self) -> Option<u16> {
        match &self.failure {
            RequestFailure::Status { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Returns whether two errors have the same cause, which is logged only once. All errors of an
    /// unreachable API server have the same cause.
    pub(super) fn has_cause_of(&self, other: &Self) -> bool {
        use RequestFailure::{Credentials, Malformed, Status, Timeout, Transport};
        match (&self.failure, &other.failure) {
            (
                Status { code: 500.., .. } | Transport(_) | Timeout(_),
                Status { code: 500.., .. } | Transport(_) | Timeout(_),
            ) => {
                let is_certificate = |error: &Self| error.to_string().contains("certificate");
                is_certificate(self) == is_certificate(other)
            }
            (Credentials(one), Credentials(two)) | (Malformed(one), Malformed(two)) => one == two,
            (Status { code: one, .. }, Status { code: two, .. }) => {
                one == two && (self.verb, &self.resource) == (other.verb, &other.resource)
            }
            _ => false,
        }
    }

    pub(super) fn failure_kind(&self) -> FailureKind {
        match &self.failure {
            RequestFailure::Status { code: 410, .. } => FailureKind::Expired,
            RequestFailure::Status {
                code: 429,
                retry_after,
                ..
            } => FailureKind::Unavailable(*retry_after),
            RequestFailure::Status { code: 400..500, .. } | RequestFailure::Malformed(_) => {
                FailureKind::Rejected
            }
            RequestFailure::Status { retry_after, .. } => FailureKind::Unavailable(*retry_after),
            RequestFailure::Credentials(_)
            | RequestFailure::Timeout(_)
            | RequestFailure::Transport(_) => FailureKind::Unavailable(None),
        }
    }
}

impl fmt::Display for RequestFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status { code, message, .. } => write!(f, "{code} {message}"),
            Self::Timeout(after) => write!(f, "no answer within {} s", after.as_secs()),
            Self::Credentials(reason) | Self::Transport(reason) | Self::Malformed(reason) => {
                f.write_str(reason)
            }
        }
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            verb,
            resource,
            namespace,
            address,
            ..
        } = self;
        if let RequestFailure::Credentials(reason) = &self.failure {
            return write!(
                f,
                "no usable credentials for the Kubernetes API server: {reason}"
            );
        }
        write!(
            f,
            "cannot {} {resource} in namespace {namespace} at {address}: ",
            verb.as_str()
        )?;
        match &self.failure {
            RequestFailure::Status {
                code: 401, message, ..
            } => {
                write!(
                    f,
                    "401 {message}: the API server does not accept the token{}",
                    self.token_file
                )
            }
            RequestFailure::Status {
                code: 403, message, ..
            } => {
                write!(
                    f,
                    "403 {message}; the Role needs the verb `{}` for {resource}",
                    verb.as_str()
                )
            }
            RequestFailure::Status { code: 404, .. } => {
                write!(
                    f,
                    "404: {} is not installed; install its CustomResourceDefinition",
                    self.kind
                )
            }
            RequestFailure::Transport(reason) if reason.contains("certificate") => {
                write!(f, "{reason}{}", self.authority_file)
            }
            failure => failure.fmt(f),
        }
    }
}

impl std::error::Error for RequestError {}

/// Returns the message of a `Status` response, or the first line of another response.
pub(super) fn message(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct StatusMessage {
        message: String,
    }
    let status: Result<StatusMessage, _> = serde_json::from_slice(body);
    let text = status.map_or_else(
        |_| String::from_utf8_lossy(body).into_owned(),
        |status| status.message,
    );
    let line = text.lines().next().unwrap_or_default().trim();
    line.chars().take(MAX_QUOTE).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(failure: RequestFailure) -> RequestError {
        RequestError {
            verb: ApiVerb::Watch,
            resource: "inferencepools.inference.networking.k8s.io".to_owned(),
            kind: "InferencePool of inference.networking.k8s.io/v1".to_owned(),
            namespace: "n".to_owned(),
            address: "https://10.0.0.1:443".to_owned(),
            token_file: " of /run/token".to_owned(),
            authority_file: "; the certificate authority is read from /run/ca.crt".to_owned(),
            failure,
        }
    }

    fn status(code: u16, message: &str) -> RequestFailure {
        RequestFailure::Status {
            code,
            message: message.to_owned(),
            retry_after: None,
        }
    }

    #[test]
    fn errors_name_request_cause_and_fix() {
        let before = "cannot watch inferencepools.inference.networking.k8s.io in namespace n at https://10.0.0.1:443: ";
        let cases = [
            (
                status(403, "forbidden"),
                "403 forbidden; the Role needs the verb `watch` for inferencepools.inference.networking.k8s.io",
            ),
            (
                status(404, "404 page not found"),
                "404: InferencePool of inference.networking.k8s.io/v1 is not installed; install its \
                 CustomResourceDefinition",
            ),
            (
                status(401, "Unauthorized"),
                "401 Unauthorized: the API server does not accept the token of /run/token",
            ),
            (
                RequestFailure::Transport("invalid peer certificate: UnknownIssuer".to_owned()),
                "invalid peer certificate: UnknownIssuer; the certificate authority is read from /run/ca.crt",
            ),
            (
                RequestFailure::Timeout(Duration::from_secs(35)),
                "no answer within 35 s",
            ),
        ];
        for (failure, expected) in cases {
            assert_eq!(error(failure).to_string(), format!("{before}{expected}"));
        }
    }

    #[test]
    fn same_cause_is_recognized_across_requests() {
        let listed = |failure| RequestError {
            verb: ApiVerb::List,
            ..error(failure)
        };
        let reset = "reset".to_owned();
        let refused = "refused".to_owned();
        let reset = RequestFailure::Transport(reset);
        let refused = RequestFailure::Transport(refused);
        assert!(error(reset.clone()).has_cause_of(&listed(refused.clone())));
        assert!(error(reset.clone()).has_cause_of(&listed(status(503, "unavailable"))));
        assert!(!error(reset).has_cause_of(&error(status(403, "forbidden"))));
        assert!(
            !error(status(403, "forbidden")).has_cause_of(&listed(status(403, "forbidden"))),
            "another verb"
        );
        let certificate = RequestFailure::Transport("invalid peer certificate".to_owned());
        assert!(!error(certificate).has_cause_of(&error(refused)));
    }

    #[test]
    fn message_is_short_and_without_objects() {
        assert_eq!(
            message(br#"{"kind": "Status", "message": "too old"}"#),
            "too old"
        );
        assert_eq!(
            message(b"upstream connect error\nmore"),
            "upstream connect error"
        );
        assert_eq!(message("x".repeat(9_000).as_bytes()).len(), MAX_QUOTE);
    }
}
