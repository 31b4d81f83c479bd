//! Version of the running program.

/// Version and commit of a build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuildVersion {
    /// Version of the package.
    pub number: &'static str,
    /// Commit and its date. Empty if it is unknown.
    pub commit: &'static str,
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
        text: env!("CARGO_PKG_VERSION"),
    };
}
