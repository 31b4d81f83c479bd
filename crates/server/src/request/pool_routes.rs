//! Restriction of requests to the workers of one pool: by the authority of the gRPC call, by a
//! header that the gateway sets, or by host and path. The most specific rule applies, as in gateway
//! routes: first by host, then by the longest path.
//!
//! Decision 0013.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_http2_filter::{host_without_port, service_of_authority};
use warmroute_settings::{PathStep, Problem, all_within, header_name_problem};

use super::routing_hints::HeaderLookup;

/// The `routing.pool_routes:` section.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PoolRoutesConfig {
    /// Pools by the authority of the ext_proc call: one Service for each pool in front of the same
    /// process. Overrides the header and the rules, and clients cannot set it.
    pub authorities: BTreeMap<String, Arc<str>>,
    /// Header that names the pool and overrides the rules. Unset by default, because any client
    /// could choose a pool with it.
    pub header: Option<String>,
    /// Rules by host and path.
    pub rules: Vec<PoolRouteRule>,
}

/// The pools by the service that the authority of a call names.
#[derive(Clone, Debug, Default)]
pub struct PoolAuthorities(HashMap<String, Arc<str>>);

impl From<&PoolRoutesConfig> for PoolAuthorities {
    fn from(config: &PoolRoutesConfig) -> Self {
        Self(
            config
                .authorities
                .iter()
                .map(|(authority, pool)| (service_of_authority(authority), pool.clone()))
                .collect(),
        )
    }
}

impl PoolAuthorities {
    /// Returns whether no authority selects a pool.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the pool of a call with this authority.
    pub fn pool_of(&self, authority: &str) -> Option<Arc<str>> {
        self.0.get(&service_of_authority(authority)).cloned()
    }
}

/// Rule that restricts requests to a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolRouteRule {
    /// The pool. Its workers have the taint `pool=<name>`.
    pub pool: Arc<str>,
    /// Hosts of the requests; `*.example.com` matches all hosts below it. Empty: any host.
    #[serde(default)]
    pub hosts: Vec<String>,
    /// Path prefixes of the requests, in whole segments. Empty: any path.
    #[serde(default)]
    pub paths: Vec<String>,
}

/// Specificity of a host match. More specific values are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum HostMatch {
    Any,
    /// A wildcard, with the length of its domain.
    Below(usize),
    Exact,
}

impl PoolRoutesConfig {
    /// Returns whether no request is restricted.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns whether a rule without conditions matches all requests.
    pub fn has_catch_all(&self) -> bool {
        self.rules
            .iter()
            .any(|rule| rule.hosts.is_empty() && rule.paths.is_empty())
    }

    /// Returns the pools that the configuration names.
    pub fn pools(&self) -> impl Iterator<Item = &str> {
        self.rules
            .iter()
            .map(|rule| &rule.pool)
            .chain(self.authorities.values())
            .map(|pool| &**pool)
    }

    /// Returns the pool of a request; `None` allows any worker.
    pub fn pool_of(&self, path: &str, headers: HeaderLookup<'_>) -> Option<Arc<str>> {
        let header = self.header.as_deref().and_then(headers);
        if let Some(name) = header
            .as_deref()
            .map(str::trim)
            .filter(|name| !name.is_empty())
        {
            return Some(name.into());
        }
        if self.rules.is_empty() {
            return None;
        }
        let host = headers(":authority")
            .or_else(|| headers("host"))
            .map(|host| host_without_port(&host).to_ascii_lowercase());
        let path = path.split(['?', '#']).next().unwrap_or_default();
        let matches = self
            .rules
            .iter()
            .filter_map(|rule| Some((rule.match_rank(host.as_deref(), path)?, rule)));
        // `max_by_key` returns the last of several equal matches, and the first rule has to win.
        matches
            .rev()
            .max_by_key(|(rank, _)| *rank)
            .map(|(_, rule)| rule.pool.clone())
    }

    /// Returns the semantic errors of the configuration.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if let Some(name) = &self.header {
            problems.extend(header_name_problem("header", name, "x-pool"));
        }
        problems.extend(self.authority_problems());
        for (at, rule) in self.rules.iter().enumerate() {
            problems.extend(all_within("rules", all_within(at, rule.problems())));
            if self.rules[..at]
                .iter()
                .any(|earlier| (&earlier.hosts, &earlier.paths) == (&rule.hosts, &rule.paths))
            {
                let text = "an earlier rule has the same hosts and paths, so this one is never \
                    used; remove one";
                problems.push(Problem::at([PathStep::from("rules"), at.into()], text));
            }
        }
        problems
    }

    fn authority_problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut names: HashMap<String, &str> = HashMap::new();
        for (authority, pool) in &self.authorities {
            let mut report = |text: String| {
                problems.push(Problem::at(
                    ["authorities".into(), PathStep::from(authority.as_str())],
                    text,
                ));
            };
            if authority.is_empty() || authority.contains(char::is_whitespace) {
                report(format!(
                    "`{authority}` is not an authority; write for example warmroute-qwen.inference"
                ));
            }
            if pool.is_empty() {
                report("the name of the pool is empty".to_owned());
            }
            if let Some(earlier) = names.insert(service_of_authority(authority), authority) {
                report(format!("`{earlier}` names the same Service; leave one out"));
            }
        }
        problems
    }
}

impl PoolRouteRule {
    fn match_rank(&self, host: Option<&str>, path: &str) -> Option<(HostMatch, usize)> {
        let of_host = |pattern: &String| {
            let pattern = pattern.to_ascii_lowercase();
            let host = host?;
            match pattern.strip_prefix('*') {
                Some(domain) => (host.len() > domain.len() && host.ends_with(domain))
                    .then_some(HostMatch::Below(domain.len())),
                None => (pattern == host).then_some(HostMatch::Exact),
            }
        };
        let of_path = |prefix: &String| {
            let prefix = prefix.trim_end_matches('/');
            let rest = path.strip_prefix(prefix)?;
            (rest.is_empty() || rest.starts_with('/')).then_some(prefix.len())
        };
        let host = if self.hosts.is_empty() {
            HostMatch::Any
        } else {
            self.hosts.iter().filter_map(of_host).max()?
        };
        let path = if self.paths.is_empty() {
            0
        } else {
            self.paths.iter().filter_map(of_path).max()?
        };
        Some((host, path))
    }

    fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.pool.is_empty() {
            problems.push(Problem::of(
                "pool",
                "the name is empty; write that of a pool",
            ));
        }
        for (at, host) in self.hosts.iter().enumerate() {
            let name = host.strip_prefix("*.").unwrap_or(host);
            if name.is_empty() || name.contains(['*', '/', ' ']) || host_without_port(name) != name
            {
                let text = format!(
                    "`{host}` is not a host name; write for example chat.example.com or \
                    *.example.com, without port"
                );
                problems.push(Problem::at([PathStep::from("hosts"), at.into()], text));
            }
        }
        for (at, path) in self
            .paths
            .iter()
            .enumerate()
            .filter(|(_, path)| !path.starts_with('/') || path.contains('?'))
        {
            let text = format!("`{path}` is not a path prefix; write for example /chat");
            problems.push(Problem::at([PathStep::from("paths"), at.into()], text));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::*;

    fn config(text: &str) -> PoolRoutesConfig {
        let config: PoolRoutesConfig = serde_json::from_str(text).unwrap();
        assert_eq!(config.problems(), []);
        config
    }

    fn pool(config: &PoolRoutesConfig, path: &str, headers: &[(&str, &str)]) -> Option<String> {
        let find = |name: &str| {
            headers
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| Cow::Borrowed(*value))
        };
        config.pool_of(path, &find).map(|pool| pool.to_string())
    }

    #[test]
    fn most_specific_pool_rule_applies() {
        let rules = config(
            r#"{"rules": [
                {"pool": "chat", "paths": ["/chat"]},
                {"pool": "deep", "paths": ["/chat/deep/", "/deep"]},
                {"pool": "wide", "hosts": ["*.Example.com"]},
                {"pool": "wider", "hosts": ["*.com"]},
                {"pool": "host", "hosts": ["a.example.com", "[::1]"]},
                {"pool": "both", "hosts": ["a.example.com"], "paths": ["/chat"]}
            ]}"#,
        );
        for (host, path, expected) in [
            ("x", "/v1/completions", None),
            ("x", "/chat/v1/completions", Some("chat")),
            ("x", "/chat?a=/deep", Some("chat")),
            ("x", "/chatter/v1/completions", None),
            ("x", "/chat/deep", Some("deep")),
            ("x", "/chat/deeper", Some("chat")),
            ("x", "/deep/v1", Some("deep")),
            ("b.example.com", "/chat", Some("wide")),
            ("B.EXAMPLE.COM:8080", "/v1", Some("wide")),
            ("example.com", "/v1", Some("wider")),
            ("badexample.com", "/v1", Some("wider")),
            ("a.example.com:80", "/v1", Some("host")),
            ("a.example.com", "/chat/v1", Some("both")),
            ("[::1]:80", "/v1", Some("host")),
            ("", "/v1", None),
        ] {
            assert_eq!(
                pool(&rules, path, &[(":authority", host)]).as_deref(),
                expected,
                "{host} {path}"
            );
        }
        assert_eq!(
            pool(&rules, "/v1", &[("host", "a.example.com")]).as_deref(),
            Some("host")
        );
        assert_eq!(pool(&rules, "/chat", &[]).as_deref(), Some("chat"));
        assert_eq!(
            pool(&rules, "/v1", &[("x-pool", "p")]),
            None,
            "the header is not configured"
        );
    }

    #[test]
    fn authority_selects_pool_in_forms_of_all_gateways() {
        let config = config(
            r#"{"authorities": {
                "warmroute-a.inference": "inference/a",
                "warmroute-b.inference.svc.cluster.local:9002": "inference/b",
                "extension/inference/warmroute-c": "inference/c",
                "ext_proc": "d"
            }}"#,
        );
        let authorities = PoolAuthorities::from(&config);
        for (authority, expected) in [
            ("warmroute-a.inference", Some("inference/a")),
            ("warmroute-a.inference:9002", Some("inference/a")),
            ("warmroute-a.inference.svc:9002", Some("inference/a")),
            (
                "Warmroute-A.inference.svc.cluster.local",
                Some("inference/a"),
            ),
            (
                "outbound|9002||warmroute-a.inference.svc.cluster.local",
                Some("inference/a"),
            ),
            (
                "outbound+9002++warmroute-a.inference.svc.cluster.local",
                Some("inference/a"),
            ),
            (
                "outbound|9002|canary|warmroute-b.inference.svc.cluster.local",
                Some("inference/b"),
            ),
            ("warmroute-b.inference:9003", Some("inference/b")),
            ("extension=inference=warmroute-c", Some("inference/c")),
            ("ext_proc", Some("d")),
            ("warmroute-a.other", None),
            ("warmroute-a.inference.example.com", None),
            ("warmroute-a", None),
            ("", None),
        ] {
            assert_eq!(
                authorities.pool_of(authority).as_deref(),
                expected,
                "{authority}"
            );
        }
    }

    #[test]
    fn pool_header_overrides_rules() {
        let rules = config(
            r#"{"header": "x-pool", "rules": [{"pool": "rest"}, {"pool": "chat", "paths": ["/chat"]}]}"#,
        );
        for (path, header, expected) in [
            ("/chat", " other ", "other"),
            ("/chat", " ", "chat"),
            ("/v1", "", "rest"),
        ] {
            assert_eq!(
                pool(&rules, path, &[("x-pool", header)]).as_deref(),
                Some(expected),
                "{path} {header}"
            );
        }
    }

    #[test]
    fn unreachable_pool_rules_are_reported() {
        let config: PoolRoutesConfig = serde_json::from_str(
            r#"{"header": "x pool", "rules": [
                {"pool": "", "hosts": ["a:80", "*", "a/b", "*.b*"], "paths": ["chat", "/a?b"]},
                {"pool": "b"}, {"pool": "c"}
            ]}"#,
        )
        .unwrap();
        assert_eq!(config.problems().len(), 9, "{:?}", config.problems());
    }
}
