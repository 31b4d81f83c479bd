//! `sessions:`: source of the session id in a request, and affinity of a session to its worker
//! rank. Without the section, requests have no sessions.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_core::sessions::SessionRules;
use warmroute_engines::engine_sessions::config::EngineSessionsConfig;
use warmroute_settings::{DurationSetting, PathStep, Problem, is_header_name};

/// The `sessions:` section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SessionsConfig {
    /// Affinity of a session to its worker rank.
    pub affinity: AffinityMode,
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

/// Affinity of a session to its worker rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AffinityMode {
    /// While the rank is eligible, it is the only candidate.
    #[default]
    Hard,
    /// The rank is preferred. If another one is chosen, the session moves there.
    Soft,
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
            affinity: AffinityMode::default(),
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
            ..SessionRules::default()
        }
    }

    /// Checks the values.
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
            problems.push(Problem::at([PathStep::from(key), at.into()], text));
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
    fn invalid_sections_name_the_key() {
        assert!(SessionsConfig::default().problems().is_empty());
        assert_eq!(SessionsConfig::default().rules(), SessionRules::default());
        let cases: [(&str, &[PathStep]); 10] = [
            (r#"{"ttl": "999ms"}"#, &["ttl".into()]),
            (r#"{"ttl": "367days"}"#, &["ttl".into()]),
            (r#"{"max_sessions": 0}"#, &["max_sessions".into()]),
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
                r#"{"engine": {"kind": "sglang", "idle_timeout": "9m"}}"#,
                &["engine".into(), "idle_timeout".into()],
            ),
        ];
        for (text, path) in cases {
            let config: SessionsConfig = serde_json::from_str(text).unwrap();
            let problems = config.problems();
            assert_eq!(problems.len(), 1, "{text}: {problems:?}");
            assert_eq!(problems[0].path, path, "{text}");
        }
    }
}
