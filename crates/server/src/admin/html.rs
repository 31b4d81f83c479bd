//! Escaping of text in HTML pages.

use std::fmt::{self, Write as _};

/// Value that is escaped for HTML content and quoted attributes when it is displayed.
pub(super) struct EscapedText<T>(pub(super) T);

impl<T: fmt::Display> fmt::Display for EscapedText<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(EscapingWriter(f), "{}", self.0)
    }
}

struct EscapingWriter<'a, 'f>(&'a mut fmt::Formatter<'f>);

impl fmt::Write for EscapingWriter<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            match character {
                '&' => self.0.write_str("&amp;")?,
                '<' => self.0.write_str("&lt;")?,
                '>' => self.0.write_str("&gt;")?,
                '"' => self.0.write_str("&quot;")?,
                '\'' => self.0.write_str("&#39;")?,
                // Browsers display control characters and bidirectional controls as if they were
                // part of the page.
                character if is_invisible(character) => {
                    write!(self.0, "\\u{{{:x}}}", character as u32)?
                }
                character => self.0.write_char(character)?,
            }
        }
        Ok(())
    }
}

fn is_invisible(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}')
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
