//! Colours of the output. The streams of [`crate::cmd::run`] remove them if the output is not a
//! terminal or `NO_COLOR` is set.

use std::fmt::Display;

use anstyle::{AnsiColor, Style};

/// A failed check.
pub(super) const ERROR: Style = AnsiColor::Red.on_default().bold();
/// A warning.
pub(super) const WARNING: Style = AnsiColor::Yellow.on_default().bold();
/// A passed check.
pub(super) const OK: Style = AnsiColor::Green.on_default().bold();

/// Returns a text with a style.
pub(super) fn label(style: Style, text: impl Display) -> String {
    format!("{style}{text}{style:#}")
}
