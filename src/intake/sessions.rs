//! Of which session a request says it is: in a header, or in a field of its body.

use crate::entrance::SessionWord;
use crate::openai::{self, SessionAction, SessionControl};

use super::Intake;
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

    /// The session that the headers name, else `nvext.session_control`, else the field of the body. A `nvext.session_control`
    /// with another session id is ignored.
    pub(super) fn read(
        &self,
        headers: Headers<'_>,
        in_body: Option<String>,
        control: Option<&SessionControl>,
    ) -> Option<SessionWord> {
        let control_id = control
            .and_then(|control| control.session_id.clone())
            .filter(|id| !id.is_empty());
        let id = value(headers, &self.headers)
            .or_else(|| control_id.clone())
            .or(in_body)?;
        let control = control.filter(|_| control_id.is_none_or(|other| other == id));
        let last = value(headers, &self.final_headers);
        let last = last.is_some_and(|value| value == "1" || value.eq_ignore_ascii_case("true"));
        let closes = control.is_some_and(|control| control.action == Some(SessionAction::Close));
        let parent = value(headers, &self.parent_headers);
        Some(SessionWord {
            id,
            parent,
            tenant: None,
            last: last || closes,
            idle: control.and_then(SessionControl::idle),
        })
    }
}

impl Intake {
    /// The tenant of the client, if `clients.tenant_header` is set.
    pub(super) fn tenant(&self, headers: Headers<'_>) -> Option<String> {
        let tenant = self
            .parts
            .clients
            .tenant_header
            .as_deref()
            .and_then(headers);
        tenant
            .map(|value| value.trim().to_owned())
            .filter(|tenant| !tenant.is_empty())
    }

    /// The session of a request, with its tenant.
    pub(super) fn session(
        &self,
        headers: Headers<'_>,
        in_body: Option<String>,
        control: Option<&SessionControl>,
    ) -> Option<SessionWord> {
        let session = self
            .parts
            .sessions
            .as_ref()?
            .read(headers, in_body, control)?;
        Some(SessionWord {
            tenant: self.tenant(headers),
            ..session
        })
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
            Some(SessionWord {
                id: id.to_owned(),
                parent: parent.map(str::to_owned),
                tenant: None,
                last,
                idle: None,
            })
        };
        type Case<'a> = (&'a [(&'a str, &'a str)], &'a [u8], Option<SessionWord>);
        let cases: [Case<'_>; 7] = [
            (&[("x-b", "2"), ("x-a", "1")], body, word("1", None, false)),
            (
                &[("x-b", " 2 "), ("x-final", "TRUE")],
                body,
                word("2", None, true),
            ),
            (
                &[("x-parent", "p"), ("x-final", "no")],
                body,
                word("in-body", Some("p"), false),
            ),
            (&[("x-a", "  ")], body, word("in-body", None, false)),
            (&[], br#"{"metadata":{"session":7}}"#, None),
            (&[], br#"{"metadata":"x"}"#, None),
            (&[], b"garbage", None),
        ];
        for (headers, body, expected) in cases {
            let find = |name: &str| {
                headers
                    .iter()
                    .find(|(key, _)| *key == name)
                    .map(|(_, value)| (*value).into())
            };
            let in_body = signs
                .leave_it_to_the_body(&find)
                .then(|| signs.in_body(body))
                .flatten();
            assert_eq!(signs.read(&find, in_body, None), expected, "{headers:?}");
        }
    }

    #[test]
    fn session_control_opens_and_closes_the_named_session() {
        let signs = SessionSigns {
            headers: vec!["x-a".into()],
            ..SessionSigns::default()
        };
        let word = |id: &str, last, idle: Option<u64>| {
            let idle = idle.map(std::time::Duration::from_secs);
            Some(SessionWord {
                id: id.to_owned(),
                parent: None,
                tenant: None,
                last,
                idle,
            })
        };
        type Case<'a> = (Option<&'a str>, &'a str, Option<SessionWord>);
        let cases: [Case<'_>; 8] = [
            (
                None,
                r#"{"session_id":"s","action":"open","timeout":90}"#,
                word("s", false, Some(90)),
            ),
            (
                None,
                r#"{"session_id":"s","action":"close"}"#,
                word("s", true, None),
            ),
            (None, r#"{"session_id":"s"}"#, word("s", false, None)),
            (None, r#"{"session_id":""}"#, None),
            (None, r#"{"action":"close"}"#, None),
            (Some("s"), r#"{"action":"close"}"#, word("s", true, None)),
            (
                Some("other"),
                r#"{"session_id":"s","action":"close","timeout":90}"#,
                word("other", false, None),
            ),
            (
                None,
                r#"{"session_id":"s","timeout":-1}"#,
                word("s", false, None),
            ),
        ];
        for (header, control, expected) in cases {
            let find = |_: &str| header.map(Into::into);
            let extension = openai::Extension::read(&format!(r#"{{"session_control":{control}}}"#));
            let read = signs.read(&find, None, extension.session_control.as_ref());
            assert_eq!(read, expected, "{header:?} {control}");
        }
    }
}
