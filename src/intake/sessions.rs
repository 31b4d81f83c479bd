//! Of which session a request says it is: in a header, or in a field of its body.

use crate::entrance::SessionWord;
use crate::openai;

use super::wishes::Headers;

/// Where sessions are named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionSigns {
    /// Headers with the session's id; the first that a request has counts.
    pub headers: Vec<String>,
    /// The field of the body with it, where no header has it; a path with dots.
    pub body_field: Option<String>,
    /// Headers with the id of the session that started this one.
    pub parent_headers: Vec<String>,
    /// Headers that mark the last request.
    pub final_headers: Vec<String>,
}

impl SessionSigns {
    /// Whether the id can only be in the body.
    pub(super) fn leave_it_to_the_body(&self, headers: Headers<'_>) -> bool {
        self.body_field.is_some() && value(headers, &self.headers).is_none()
    }

    /// The id that a body has.
    pub(super) fn in_body(&self, body: &[u8]) -> Option<String> {
        openai::text_of(body, self.body_field.as_deref()?).filter(|id| !id.is_empty())
    }

    /// What the headers say, and where they name no session, with the id from the body.
    pub(super) fn read(&self, headers: Headers<'_>, in_body: Option<String>) -> Option<SessionWord> {
        let id = value(headers, &self.headers).or(in_body)?;
        let last = value(headers, &self.final_headers);
        let last = last.is_some_and(|value| value == "1" || value.eq_ignore_ascii_case("true"));
        Some(SessionWord { id, parent: value(headers, &self.parent_headers), last })
    }
}

fn value(headers: Headers<'_>, names: &[String]) -> Option<String> {
    let value = names.iter().find_map(|name| headers(name))?;
    Some(value.trim().to_owned()).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_go_before_the_body_and_empty_ones_do_not_count() {
        let signs = SessionSigns {
            headers: vec!["x-a".into(), "x-b".into()],
            body_field: Some("metadata.session".into()),
            parent_headers: vec!["x-parent".into()],
            final_headers: vec!["x-final".into()],
        };
        let body: &[u8] = br#"{"metadata":{"session":"in-body"}}"#;
        let word = |id: &str, parent: Option<&str>, last| {
            Some(SessionWord { id: id.to_owned(), parent: parent.map(str::to_owned), last })
        };
        type Case<'a> = (&'a [(&'a str, &'a str)], &'a [u8], Option<SessionWord>);
        let cases: [Case<'_>; 7] = [
            (&[("x-b", "2"), ("x-a", "1")], body, word("1", None, false)),
            (&[("x-b", " 2 "), ("x-final", "TRUE")], body, word("2", None, true)),
            (&[("x-parent", "p"), ("x-final", "no")], body, word("in-body", Some("p"), false)),
            (&[("x-a", "  ")], body, word("in-body", None, false)),
            (&[], br#"{"metadata":{"session":7}}"#, None),
            (&[], br#"{"metadata":"x"}"#, None),
            (&[], b"garbage", None),
        ];
        for (headers, body, expected) in cases {
            let find = |name: &str| headers.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).into());
            let in_body = signs.leave_it_to_the_body(&find).then(|| signs.in_body(body)).flatten();
            assert_eq!(signs.read(&find, in_body), expected, "{headers:?}");
        }
    }
}
