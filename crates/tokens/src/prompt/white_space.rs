//! Python's white space, and the methods of `str` that strip it.

/// Returns true for Python's white space: that of Unicode, and four ASCII separators.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Implements Python's `str.strip()`.
pub(super) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// Implements Python's `str.rstrip()`.
pub(super) fn strip_end(text: &str) -> &str {
    text.trim_end_matches(is_space)
}

/// Strips the given characters from one or both ends, or white space if `chars` is `None`.
pub(super) fn strip_with<'t>(
    text: &'t str,
    chars: Option<&str>,
    start: bool,
    end: bool,
) -> &'t str {
    let strips = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if start {
        text.trim_start_matches(strips)
    } else {
        text
    };
    if end {
        text.trim_end_matches(strips)
    } else {
        text
    }
}
