//! What the doctor says: one finding per check and subject, with both values and, where something is wrong, the exact
//! words that mend it and where they go.

use serde::Serialize;

/// How bad it is; the worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Requests are lost, refused or sent without regard to the caches.
    Error,
    /// It works, but worse than it could, or not in every case.
    Warning,
    /// A limit of the deployment that no setting of it removes, or that its settings accept.
    Note,
    /// Could not be looked at.
    Skipped,
    /// As it should be.
    Ok,
}

impl Level {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Level::Error => "error",
            Level::Warning => "warning",
            Level::Note => "note",
            Level::Skipped => "skipped",
            Level::Ok => "ok",
        }
    }
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// Which check.
    pub check: &'static str,
    /// Of what: a worker, a model, a part of Envoy's configuration.
    pub subject: String,
    /// What is, and what it was compared with.
    pub seen: String,
    /// What to write where.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mend: Option<String>,
}

/// A check of one subject, still without its outcome.
#[derive(Clone, Debug)]
pub struct At {
    check: &'static str,
    subject: String,
}

impl At {
    /// The check `check` of `subject`.
    pub fn new(check: &'static str, subject: impl Into<String>) -> Self {
        Self {
            check,
            subject: subject.into(),
        }
    }

    /// All is well.
    pub fn ok(self, seen: impl Into<String>) -> Finding {
        self.finding(Level::Ok, seen, None)
    }

    /// It could not be looked at.
    pub fn skipped(self, why: impl Into<String>) -> Finding {
        self.finding(Level::Skipped, why, None)
    }

    /// A limit that the deployment has to live with.
    pub fn note(self, seen: impl Into<String>) -> Finding {
        self.finding(Level::Note, seen, None)
    }

    /// Worse than it could be.
    pub fn warning(self, seen: impl Into<String>, mend: impl Into<String>) -> Finding {
        self.finding(Level::Warning, seen, Some(mend.into()))
    }

    /// Wrong.
    pub fn error(self, seen: impl Into<String>, mend: impl Into<String>) -> Finding {
        self.finding(Level::Error, seen, Some(mend.into()))
    }

    fn finding(self, level: Level, seen: impl Into<String>, mend: Option<String>) -> Finding {
        Finding {
            level,
            check: self.check,
            subject: self.subject,
            seen: seen.into(),
            mend,
        }
    }
}

/// What the exit code of the command says: 0 all is well, 1 there are warnings, 2 there are errors.
pub fn exit_code(findings: &[Finding]) -> u8 {
    match findings.iter().map(|finding| finding.level).min() {
        Some(Level::Error) => 2,
        Some(Level::Warning) => 1,
        Some(Level::Note | Level::Skipped | Level::Ok) | None => 0,
    }
}
