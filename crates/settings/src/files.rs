//! Errors for paths in settings.

use std::path::Path;

/// Returns the error text for a path that is not a file.
pub fn describe_missing_file(file: &Path) -> String {
    let kind = if file.exists() {
        "is not a file"
    } else {
        "does not exist"
    };
    format!(
        "`{}` {kind}; relative paths start at the directory of this settings file",
        file.display()
    )
}
