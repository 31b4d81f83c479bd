//! `sessions:`: how a request says of which session it is, and how strictly a session stays where it is. Off as a whole
//! where the section is missing.

use serde::{Deserialize, Serialize};

use crate::engine_sessions::config::EngineSessionsConfig;
use crate::sessions::SessionRules;
use crate::settings::{Period, Problem, Step, is_header_name};

/// `sessions:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SessionsConfig {
    /// How strictly a session stays with its worker rank.
    pub affinity: Affinity,
    /// How long a session is remembered after its last request ended; from 1s to a year.
    pub ttl: Period,
    /// Headers that may carry the session id; the first that a request has counts.
    pub headers: Vec<String>,
    /// The field of the body that carries it where no header does, as a path with dots: `session_id`, `metadata.session`.
    pub body_field: Option<String>,
    /// Headers that may carry the id of the session that started this one; all of one parent stay together.
    pub parent_headers: Vec<String>,
    /// Headers that may say, by `true` or `1`, that this is the last request of the session.
    pub final_headers: Vec<String>,
    /// How long a request may wait for the first of its session to be routed.
    pub wait: Period,
    /// How many sessions are remembered; requests of others are routed without.
    pub most_sessions: usize,
    /// How many of them one tenant may have, by `clients.tenant_header`.
    pub most_sessions_per_tenant: usize,
    /// Longest id in bytes, of a session or a tenant; longer ones are ignored.
    pub longest_id: usize,
    /// Whether engines are told of sessions that come to them and leave; none: they are not.
    pub engine: Option<EngineSessionsConfig>,
}

/// How strictly a session stays with its worker rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Affinity {
    /// As long as the rank is eligible, nobody else is.
    #[default]
    Hard,
    /// The rank is a hint, and the session goes along when another is chosen.
    Soft,
}

impl Default for SessionsConfig {
    fn default() -> Self {
        let SessionRules {
            ttl,
            most_sessions,
            most_sessions_per_tenant,
            longest_id,
        } = SessionRules::default();
        Self {
            affinity: Affinity::default(),
            ttl: Period(ttl),
            headers: names(["x-dynamo-session-id", "x-session-id"]),
            body_field: None,
            parent_headers: names(["x-dynamo-parent-session-id", "x-parent-session-id"]),
            final_headers: names(["x-dynamo-session-final"]),
            wait: Period::millis(500),
            most_sessions,
            most_sessions_per_tenant,
            longest_id,
            engine: None,
        }
    }
}

impl SessionsConfig {
    /// What the core is told.
    pub fn rules(&self) -> SessionRules {
        SessionRules {
            ttl: self.ttl.get(),
            most_sessions: self.most_sessions,
            most_sessions_per_tenant: self.most_sessions_per_tenant,
            longest_id: self.longest_id,
        }
    }

    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let found = self.rules().validate().err();
        let mut problems: Vec<_> = found
            .map(|(name, text)| Problem::of(name, format!("`{name}` {text}")))
            .into_iter()
            .collect();
        if self.headers.is_empty() && self.body_field.is_none() {
            let text = "neither `headers` nor `body_field` says where the session id is; name at least one";
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
        let headers = lists.iter().flat_map(|(key, list)| {
            list.iter()
                .enumerate()
                .map(move |(at, name)| (*key, at, name))
        });
        for (key, at, name) in headers.filter(|(_, _, name)| !is_header_name(name)) {
            let text = format!(
                "`{name}` cannot be the name of a header; write letters, digits and hyphens"
            );
            problems.push(Problem::at([Step::from(key), at.into()], text));
        }
        let engine = self
            .engine
            .as_ref()
            .map(|engine| engine.problems(self.ttl))
            .unwrap_or_default();
        problems.extend(engine.into_iter().map(|problem| problem.within("engine")));
        problems
    }
}

fn names<const N: usize>(list: [&str; N]) -> Vec<String> {
    list.map(str::to_owned).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_that_cannot_work_are_refused_where_they_are_wrong() {
        assert!(SessionsConfig::default().problems().is_empty());
        assert_eq!(SessionsConfig::default().rules(), SessionRules::default());
        let cases: [(&str, &[Step]); 10] = [
            (r#"{"ttl": "999ms"}"#, &["ttl".into()]),
            (r#"{"ttl": "367days"}"#, &["ttl".into()]),
            (r#"{"most_sessions": 0}"#, &["most_sessions".into()]),
            (r#"{"headers": []}"#, &["headers".into()]),
            (
                r#"{"headers": ["x-a", "x b"]}"#,
                &["headers".into(), 1.into()],
            ),
            (r#"{"body_field": "a..b"}"#, &["body_field".into()]),
            (
                r#"{"final_headers": [""]}"#,
                &["final_headers".into(), 0.into()],
            ),
            (
                r#"{"engine": {"kind": "sglang", "capacity": 0}}"#,
                &["engine".into(), "capacity".into()],
            ),
            (
                r#"{"engine": {"kind": "sglang", "timeout": "0s"}}"#,
                &["engine".into(), "timeout".into()],
            ),
            (
                r#"{"engine": {"kind": "sglang", "idle": "9m"}}"#,
                &["engine".into(), "idle".into()],
            ),
        ];
        for (text, trail) in cases {
            let config: SessionsConfig = serde_json::from_str(text).unwrap();
            let problems = config.problems();
            assert_eq!(problems.len(), 1, "{text}: {problems:?}");
            assert_eq!(problems[0].trail, trail, "{text}");
        }
    }
}
