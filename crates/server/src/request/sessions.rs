//! Session id of a request, from a header or from a field of the body.

use warmroute_tokens::openai::{self, SessionAction, SessionControl};

use super::routing_hints::HeaderLookup;
use crate::dispatch::RequestSession;

/// Headers and fields with session ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionFields {
    /// Headers with the session id. The first present one is used.
    pub headers: Vec<String>,
    /// Dotted path of the body field with the session id, used if no header has it.
    pub body_field: Option<String>,
    /// Headers with the id of the parent session.
    pub parent_headers: Vec<String>,
    /// Headers that mark the last request of a session.
    pub final_headers: Vec<String>,
}

impl SessionFields {
    /// Returns whether the id can only be in the body.
    pub(super) fn is_only_in_body(&self, headers: HeaderLookup<'_>) -> bool {
        self.body_field.is_some() && first_value(headers, &self.headers).is_none()
    }

    /// Returns the session id in a body.
    pub(super) fn id_in_body(&self, body: &[u8]) -> Option<String> {
        openai::text_at_path(body, self.body_field.as_deref()?).filter(|id| !id.is_empty())
    }

    /// Parses the session from the headers, else from `nvext.session_control`, else from the body
    /// field. An `nvext.session_control` with another session id is ignored.
    pub(super) fn parse(
        &self,
        headers: HeaderLookup<'_>,
        in_body: Option<String>,
        control: Option<&SessionControl>,
    ) -> Option<RequestSession> {
        let control_id = control
            .and_then(|control| control.session_id.clone())
            .filter(|id| !id.is_empty());
        let id = first_value(headers, &self.headers)
            .or_else(|| control_id.clone())
            .or(in_body)?;
        let control = control.filter(|_| control_id.is_none_or(|other| other == id));
        let last = first_value(headers, &self.final_headers);
        let last = last.is_some_and(|value| value == "1" || value.eq_ignore_ascii_case("true"));
        let closes = control.is_some_and(|control| control.action == Some(SessionAction::Close));
        let parent = first_value(headers, &self.parent_headers);
        Some(RequestSession {
            id,
            parent,
            tenant: None,
            is_last: last || closes,
            idle_timeout: control.and_then(SessionControl::idle_timeout),
        })
    }
}

fn first_value(headers: HeaderLookup<'_>, names: &[String]) -> Option<String> {
    let value = names.iter().find_map(|name| headers(name))?;
    Some(value.trim().to_owned()).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn session_headers_precede_body_field() {
        let fields = SessionFields {
            headers: vec!["x-a".into(), "x-b".into()],
            body_field: Some("metadata.session".into()),
            parent_headers: vec!["x-parent".into()],
            final_headers: vec!["x-final".into()],
        };
        let body: &[u8] = br#"{"metadata":{"session":"in-body"}}"#;
        let request_session = |id: &str, parent: Option<&str>, last| {
            Some(RequestSession {
                id: id.to_owned(),
                parent: parent.map(str::to_owned),
                tenant: None,
                is_last: last,
                idle_timeout: None,
            })
        };
        type Case<'a> = (&'a [(&'a str, &'a str)], &'a [u8], Option<RequestSession>);
        let cases: [Case<'_>; 7] = [
            (
                &[("x-b", "2"), ("x-a", "1")],
                body,
                request_session("1", None, false),
            ),
            (
                &[("x-b", " 2 "), ("x-final", "TRUE")],
                body,
                request_session("2", None, true),
            ),
            (
                &[("x-parent", "p"), ("x-final", "no")],
                body,
                request_session("in-body", Some("p"), false),
            ),
            (
                &[("x-a", "  ")],
                body,
                request_session("in-body", None, false),
            ),
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
            let in_body = fields
                .is_only_in_body(&find)
                .then(|| fields.id_in_body(body))
                .flatten();
            assert_eq!(fields.parse(&find, in_body, None), expected, "{headers:?}");
        }
    }

    #[test]
    fn session_control_opens_and_closes_the_named_session() {
        let fields = SessionFields {
            headers: vec!["x-a".into()],
            ..SessionFields::default()
        };
        let request_session = |id: &str, last, idle: Option<u64>| {
            let idle = idle.map(std::time::Duration::from_secs);
            Some(RequestSession {
                id: id.to_owned(),
                parent: None,
                tenant: None,
                is_last: last,
                idle_timeout: idle,
            })
        };
        type Case<'a> = (Option<&'a str>, &'a str, Option<RequestSession>);
        let cases: [Case<'_>; 8] = [
            (
                None,
                r#"{"session_id":"s","action":"open","timeout":90}"#,
                request_session("s", false, Some(90)),
            ),
            (
                None,
                r#"{"session_id":"s","action":"close"}"#,
                request_session("s", true, None),
            ),
            (
                None,
                r#"{"session_id":"s"}"#,
                request_session("s", false, None),
            ),
            (None, r#"{"session_id":""}"#, None),
            (None, r#"{"action":"close"}"#, None),
            (
                Some("s"),
                r#"{"action":"close"}"#,
                request_session("s", true, None),
            ),
            (
                Some("other"),
                r#"{"session_id":"s","action":"close","timeout":90}"#,
                request_session("other", false, None),
            ),
            (
                None,
                r#"{"session_id":"s","timeout":-1}"#,
                request_session("s", false, None),
            ),
        ];
        for (header, control, expected) in cases {
            let find = |_: &str| header.map(Into::into);
            let extension = openai::NvExt::parse(&format!(r#"{{"session_control":{control}}}"#));
            let read = fields.parse(&find, None, extension.session_control.as_ref());
            assert_eq!(read, expected, "{header:?} {control}");
        }
    }
}
