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

/// Result of a check, without the name of the check and its subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckVerdict {
    level: FindingLevel,
    message: String,
    fix: Option<String>,
}

impl CheckVerdict {
    fn new(level: FindingLevel, message: impl Into<String>) -> Self {
        Self {
            level,
            message: message.into(),
            fix: None,
        }
    }

    pub(crate) fn with_fix(self, fix: impl Into<String>) -> Self {
        let fix = Some(fix.into());
        Self { fix, ..self }
    }

    /// Returns the observed and the expected value.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the finding of the check `check` about `subject`.
    pub fn about(self, check: &'static str, subject: impl Into<String>) -> Finding {
        Finding {
            level: self.level,
            check,
            subject: subject.into(),
            message: self.message,
            fix: self.fix,
        }
    }
}

/// The check passed.
pub fn ok(message: impl Into<String>) -> CheckVerdict {
    CheckVerdict::new(FindingLevel::Ok, message)
}

/// The check could not run.
pub fn skipped(why: impl Into<String>) -> CheckVerdict {
    CheckVerdict::new(FindingLevel::Skipped, why)
}

/// A limitation that no setting removes.
pub fn note(message: impl Into<String>) -> CheckVerdict {
    CheckVerdict::new(FindingLevel::Note, message)
}

/// The deployment works, but worse than it could.
pub fn warning(message: impl Into<String>, fix: impl Into<String>) -> CheckVerdict {
    CheckVerdict::new(FindingLevel::Warning, message).with_fix(fix)
}

/// The check failed.
pub fn error(message: impl Into<String>, fix: impl Into<String>) -> CheckVerdict {
    CheckVerdict::new(FindingLevel::Error, message).with_fix(fix)
}

/// Facts about one subject.
pub(crate) trait CheckFacts {
    /// Returns the subject of the findings.
    fn subject(&self) -> String;
}

/// Row of a table of checks.
pub(crate) struct CheckRow<F> {
    id: &'static str,
    judge: fn(&F) -> Option<CheckVerdict>,
}

/// Returns the row of a check, which returns `None` if it does not apply.
pub(crate) fn row<F>(id: &'static str, judge: fn(&F) -> Option<CheckVerdict>) -> CheckRow<F> {
    CheckRow { id, judge }
}

/// Returns the findings of a table of checks about one subject.
pub(crate) fn run_checks<F: CheckFacts>(facts: &F, rows: &[CheckRow<F>]) -> Vec<Finding> {
    let verdicts = rows.iter().map(|row| (row.id, (row.judge)(facts)));
    verdicts
        .filter_map(|(id, verdict)| Some(verdict?.about(id, facts.subject())))
        .collect()
}

/// Adds the findings that are not in the list yet.
pub(crate) fn add_new(findings: &mut Vec<Finding>, found: impl IntoIterator<Item = Finding>) {
    for finding in found {
        if !findings.contains(&finding) {
            findings.push(finding);
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
