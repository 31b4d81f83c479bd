//! Version of the running program.

use serde_json::{Value, json};

/// Version and commit of a build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuildVersion {
    /// Version of the package.
    pub number: &'static str,
    /// Commit and its date, as `hash, date`. Empty if it is unknown.
    pub commit: &'static str,
    /// Target triple of the compiler. Empty if it is unknown.
    pub target: &'static str,
    /// Version with the commit, for users.
    pub text: &'static str,
}

impl BuildVersion {
    /// Returns the commit without its date.
    pub fn commit_hash(&self) -> &'static str {
        self.commit.split(',').next().unwrap_or_default()
    }

    /// Version of this package, without a commit.
    pub const PACKAGE: Self = Self {
        number: env!("CARGO_PKG_VERSION"),
        commit: "",
        target: "",
        text: env!("CARGO_PKG_VERSION"),
    };

    /// Returns the version as JSON. Unknown parts are null.
    pub fn to_json(&self) -> Value {
        let (hash, date) = self.commit.split_once(", ").unwrap_or((self.commit, ""));
        let known = |text: &'static str| (!text.is_empty()).then_some(text);
        json!({
            "version": self.number,
            "commit": known(hash),
            "commit_date": known(date),
            "target": known(self.target),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_parts_of_version_are_null() {
        let build = |commit, target| BuildVersion {
            number: "0.1.0",
            commit,
            target,
            text: "",
        };
        for (version, commit, date, target) in [
            (
                build("7707573, 2026-11-23", "x86_64-unknown-linux-gnu"),
                json!("7707573"),
                json!("2026-11-23"),
                json!("x86_64-unknown-linux-gnu"),
            ),
            (build("v1", ""), json!("v1"), json!(null), json!(null)),
            (build("", ""), json!(null), json!(null), json!(null)),
        ] {
            let expected = json!({"version": "0.1.0", "commit": commit, "commit_date": date, "target": target});
            assert_eq!(version.to_json(), expected);
        }
    }
}
