//! `sessions:`: source of the session id in a request, and affinity of a session to its worker
//! rank. Without the section, requests have no sessions.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_core::sessions::SessionRules;
use warmroute_engines::engine_sessions::config::EngineSessionsConfig;
use warmroute_settings::{DurationSetting, Problem, all_within, header_name_problems};
use warmroute_tokens::openai::{self, SessionAction, SessionControl};

use super::routing_hints::HeaderLookup;
use crate::dispatch::{RequestSession, SessionAffinity};

/// The `sessions:` section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SessionsConfig {
    /// Affinity of a session to its worker rank.
    pub affinity: SessionAffinity,
    /// Time that a session is retained after its last request ended; from 1s to a year.
    pub ttl: DurationSetting,
    /// Headers that may carry the session id. The first one present in a request is used.
    pub headers: Vec<String>,
    /// Body field that carries the session id if no header does, as a dotted path:
    /// `metadata.session`.
    pub body_field: Option<String>,
    /// Headers that may carry the id of the parent session. Sessions of one parent share a worker
    /// rank.
    pub parent_headers: Vec<String>,
    /// Headers that mark the last request of a session with `true` or `1`.
    pub final_headers: Vec<String>,
    /// Maximum time that a request waits until the first request of its session is routed.
    pub wait_timeout: DurationSetting,
    /// Maximum number of sessions. Requests of further sessions are routed without affinity.
    pub max_sessions: usize,
    /// Maximum number of sessions of one tenant, identified by `requests.clients.tenant_header`.
    pub max_sessions_per_tenant: usize,
    /// Calls that open and close sessions on engines. `None`: no calls.
    pub engine: Option<EngineSessionsConfig>,
}

impl Default for SessionsConfig {
    fn default() -> Self {
        let SessionRules {
            ttl,
            max_sessions,
            max_sessions_per_tenant,
            ..
        } = SessionRules::default();
        Self {
            affinity: SessionAffinity::default(),
            ttl: DurationSetting(ttl),
            headers: names(["x-dynamo-session-id", "x-session-id"]),
            body_field: None,
            parent_headers: names(["x-dynamo-parent-session-id", "x-parent-session-id"]),
            final_headers: names(["x-dynamo-session-final"]),
            wait_timeout: DurationSetting::millis(500),
            max_sessions,
            max_sessions_per_tenant,
            engine: None,
        }
    }
}

impl SessionsConfig {
    /// Returns the rules for the core.
    pub fn rules(&self) -> SessionRules {
        SessionRules {
            ttl: self.ttl.get(),
            max_sessions: self.max_sessions,
            max_sessions_per_tenant: self.max_sessions_per_tenant,
        }
    }

    /// Returns the problems of the values.
    pub fn problems(&self) -> Vec<Problem> {
        let found = self.rules().validate().err();
        let mut problems: Vec<_> = found
            .map(|(name, text)| Problem::of(name, format!("`{name}` {text}")))
            .into_iter()
            .collect();
        if self.headers.is_empty() && self.body_field.is_none() {
            let text = "neither `headers` nor `body_field` says where the session id is; name at \
                least one";
            problems.push(Problem::of("headers", text));
        }
        if self
            .body_field
            .as_ref()
            .is_some_and(|path| path.split('.').any(str::is_empty))
        {
            let text = "the path has an empty step; write it as `field` or `outer.field`";
            problems.push(Problem::of("body_field", text));
        }
        let lists = [
            ("headers", &self.headers),
            ("parent_headers", &self.parent_headers),
            ("final_headers", &self.final_headers),
        ];
        for (key, list) in lists {
            problems.extend(header_name_problems(key, list, "x-session-id"));
        }
        if let Some(engine) = &self.engine {
            problems.extend(all_within("engine", engine.problems(self.ttl)));
        }
        problems
    }

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

fn names<const N: usize>(list: [&str; N]) -> Vec<String> {
    list.map(str::to_owned).into()
}

fn first_value(headers: HeaderLookup<'_>, names: &[String]) -> Option<String> {
    let value = names.iter().find_map(|name| headers(name))?;
    Some(value.trim().to_owned()).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid() {
        assert_eq!(SessionsConfig::default().problems(), []);
        assert_eq!(SessionsConfig::default().rules(), SessionRules::default());
    }

    #[test]
    fn session_headers_precede_body_field() {
        let fields = SessionsConfig {
            headers: vec!["x-a".into(), "x-b".into()],
            body_field: Some("metadata.session".into()),
            parent_headers: vec!["x-parent".into()],
            final_headers: vec!["x-final".into()],
            ..SessionsConfig::default()
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
        let fields = SessionsConfig {
            headers: vec!["x-a".into()],
            parent_headers: Vec::new(),
            final_headers: Vec::new(),
            ..SessionsConfig::default()
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
