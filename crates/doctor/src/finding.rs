//! Findings of the doctor: one per check and subject, with the observed and the expected value. A
//! problem has a fix: a text to write, and the place to write it.

use serde::Serialize;

/// Severity of a finding, most severe first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingLevel {
    /// Requests are lost, rejected, or routed without regard to the caches.
    Error,
    /// The deployment works, but worse than it could, or not in every case.
    Warning,
    /// A limitation that no setting removes, or that the settings accept.
    Note,
    /// The check could not run.
    Skipped,
    /// The check passed.
    Ok,
}

impl FindingLevel {
    /// Returns the name of the level.
    pub fn as_str(self) -> &'static str {
        match self {
            FindingLevel::Error => "error",
            FindingLevel::Warning => "warning",
            FindingLevel::Note => "note",
            FindingLevel::Skipped => "skipped",
            FindingLevel::Ok => "ok",
        }
    }
}

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Severity.
    pub level: FindingLevel,
    /// Name of the check.
    pub check: &'static str,
    /// Subject of the check: a worker, a model, a part of Envoy's configuration.
    pub subject: String,
    /// Observed value and expected value.
    pub message: String,
    /// Text to write, and the place to write it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

/// Check of one subject whose result is not yet known.
#[derive(Clone, Debug)]
pub struct FindingBuilder {
    check: &'static str,
    subject: String,
}

impl FindingBuilder {
    /// Starts the check `check` of `subject`.
    pub fn new(check: &'static str, subject: impl Into<String>) -> Self {
        Self {
            check,
            subject: subject.into(),
        }
    }

    /// Returns a finding that the check passed.
    pub fn ok(self, message: impl Into<String>) -> Finding {
        self.build(FindingLevel::Ok, message, None)
    }

    /// Returns a finding that the check could not run.
    pub fn skipped(self, why: impl Into<String>) -> Finding {
        self.build(FindingLevel::Skipped, why, None)
    }

    /// Returns a note about a limitation that no setting removes.
    pub fn note(self, message: impl Into<String>) -> Finding {
        self.build(FindingLevel::Note, message, None)
    }

    /// Returns a warning: the deployment works, but worse than it could.
    pub fn warning(self, message: impl Into<String>, fix: impl Into<String>) -> Finding {
        self.build(FindingLevel::Warning, message, Some(fix.into()))
    }

    /// Returns an error: the check failed.
    pub fn error(self, message: impl Into<String>, fix: impl Into<String>) -> Finding {
        self.build(FindingLevel::Error, message, Some(fix.into()))
    }

    fn build(
        self,
        level: FindingLevel,
        message: impl Into<String>,
        fix: Option<String>,
    ) -> Finding {
        Finding {
            level,
            check: self.check,
            subject: self.subject,
            message: message.into(),
            fix,
        }
    }
}

/// Returns the exit code of the command: 0 without problems, 1 with warnings, 2 with errors.
pub fn exit_code(findings: &[Finding]) -> u8 {
    match findings.iter().map(|finding| finding.level).min() {
        Some(FindingLevel::Error) => 2,
        Some(FindingLevel::Warning) => 1,
        Some(FindingLevel::Note | FindingLevel::Skipped | FindingLevel::Ok) | None => 0,
    }
}
