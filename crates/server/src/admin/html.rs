//! Text in HTML pages.

use std::fmt::{self, Write as _};

/// Text of another party, escaped for HTML content and quoted attributes.
pub(super) struct EscapedText<T>(pub(super) T);

impl<T: fmt::Display> fmt::Display for EscapedText<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(EscapingWriter(f), "{}", self.0)
    }
}

struct EscapingWriter<'a, 'f>(&'a mut fmt::Formatter<'f>);

impl fmt::Write for EscapingWriter<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for letter in text.chars() {
            match letter {
                '&' => self.0.write_str("&amp;")?,
                '<' => self.0.write_str("&lt;")?,
                '>' => self.0.write_str("&gt;")?,
                '"' => self.0.write_str("&quot;")?,
                '\'' => self.0.write_str("&#39;")?,
                // Browsers display control characters and bidirectional controls as if they were
                // part of the page.
                letter if is_invisible(letter) => write!(self.0, "\\u{{{:x}}}", letter as u32)?,
                letter => self.0.write_char(letter)?,
            }
        }
        Ok(())
    }
}

fn is_invisible(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_and_control_characters_are_escaped() {
        for (text, escaped) in [
            ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
            (
                "<script>alert('x')</script>",
                "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;",
            ),
            ("a\" onload=\"b", "a&quot; onload=&quot;b"),
            ("&lt;", "&amp;lt;"),
            ("a\n\0\u{202e}b", "a\\u{a}\\u{0}\\u{202e}b"),
            ("模型", "模型"),
        ] {
            assert_eq!(EscapedText(text).to_string(), escaped);
        }
    }
}
