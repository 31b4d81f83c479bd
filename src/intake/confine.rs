//! Confines requests to the workers of one pool, by the authority of the gRPC call, by a header that the gateway sets, or by
//! host and path. The most special rule counts, as in the routes of gateways: by the host first, and then by the longest path.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use warmroute_http2_filter::normalize_authority;

use super::{Headers, Intake};
use crate::settings::{Problem, Step, is_header_name};

/// `confine:`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ConfineConfig {
    /// The pool by the authority of the ext_proc call: one Service for each pool in front of the same process. It beats the header and
    /// the rules, and clients cannot set it.
    pub authority: BTreeMap<String, Arc<str>>,
    /// A header that names the pool, and beats the rules. None by default, because whoever sends it chooses.
    pub header: Option<String>,
    /// By host and path.
    pub rules: Vec<ConfineRule>,
}

/// The pools by the authority of a call, in the form that is equal for all gateways.
#[derive(Clone, Debug, Default)]
pub struct PoolAuthorities(HashMap<String, Arc<str>>);

impl From<&ConfineConfig> for PoolAuthorities {
    fn from(config: &ConfineConfig) -> Self {
        Self(
            config
                .authority
                .iter()
                .map(|(authority, pool)| (service_name(authority), pool.clone()))
                .collect(),
        )
    }
}

impl PoolAuthorities {
    /// Whether no authority selects a pool.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The pool of a call with this authority.
    pub fn pool_of(&self, authority: &str) -> Option<Arc<str>> {
        self.0.get(&service_name(authority)).cloned()
    }
}

/// Requests that are for a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfineRule {
    /// The pool: its workers have the taint `pool=<this>`.
    pub pool: Arc<str>,
    /// Hosts, one of which they are for; `*.example.com` are all below it. None: any host.
    #[serde(default)]
    pub hosts: Vec<String>,
    /// Paths, with one of which theirs begin, whole parts of it. None: any path.
    #[serde(default)]
    pub paths: Vec<String>,
}

/// How well a host fits; more is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum HostFit {
    Any,
    /// Below a domain so long.
    Below(usize),
    Exact,
}

impl ConfineConfig {
    /// Whether no request is confined.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether a rule is for all requests that no other rule is for.
    pub fn has_default(&self) -> bool {
        self.rules
            .iter()
            .any(|rule| rule.hosts.is_empty() && rule.paths.is_empty())
    }

    /// The pools that it names.
    pub fn pools(&self) -> impl Iterator<Item = &str> {
        self.rules
            .iter()
            .map(|rule| &rule.pool)
            .chain(self.authority.values())
            .map(|pool| &**pool)
    }

    /// The pool that a request is for; `None`: any worker will do.
    pub fn pool_of(&self, path: &str, headers: Headers<'_>) -> Option<Arc<str>> {
        let told = self.header.as_deref().and_then(headers);
        if let Some(name) = told
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
            .map(|host| bare(&host).to_ascii_lowercase());
        let path = path.split(['?', '#']).next().unwrap_or_default();
        let fits = self
            .rules
            .iter()
            .filter_map(|rule| Some((rule.fits(host.as_deref(), path)?, rule)));
        // Of equal ones the first.
        fits.rev()
            .max_by_key(|(fit, _)| *fit)
            .map(|(_, rule)| rule.pool.clone())
    }

    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if let Some(name) = self.header.as_ref().filter(|name| !is_header_name(name)) {
            let text = format!(
                "`{name}` cannot be the name of a header; write letters, digits and hyphens"
            );
            problems.push(Problem::of("header", text));
        }
        problems.extend(self.authority_problems());
        for (at, rule) in self.rules.iter().enumerate() {
            problems.extend(
                rule.problems()
                    .into_iter()
                    .map(|problem| problem.within(at).within("rules")),
            );
            if self.rules[..at]
                .iter()
                .any(|earlier| (&earlier.hosts, &earlier.paths) == (&rule.hosts, &rule.paths))
            {
                let text = "an earlier rule is for the same hosts and paths, so this one is never reached; leave one out";
                problems.push(Problem::at([Step::from("rules"), at.into()], text));
            }
        }
        problems
    }

    fn authority_problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut names: HashMap<String, &str> = HashMap::new();
        for (authority, pool) in &self.authority {
            let mut refuse = |text: String| {
                problems.push(Problem::at(
                    ["authority".into(), Step::from(authority.as_str())],
                    text,
                ));
            };
            if authority.is_empty() || authority.contains(char::is_whitespace) {
                refuse(format!(
                    "`{authority}` is no authority; write for example warmroute-qwen.inference"
                ));
            }
            if pool.is_empty() {
                refuse("the name of the pool is empty".to_owned());
            }
            if let Some(earlier) = names.insert(service_name(authority), authority) {
                refuse(format!("`{earlier}` names the same Service; leave one out"));
            }
        }
        problems
    }
}

impl ConfineRule {
    fn fits(&self, host: Option<&str>, path: &str) -> Option<(HostFit, usize)> {
        let of_host = |pattern: &String| {
            let (pattern, host) = (pattern.to_ascii_lowercase(), host?);
            match pattern.strip_prefix('*') {
                Some(domain) => (host.len() > domain.len() && host.ends_with(domain))
                    .then_some(HostFit::Below(domain.len())),
                None => (pattern == host).then_some(HostFit::Exact),
            }
        };
        let of_path = |prefix: &String| {
            let prefix = prefix.trim_end_matches('/');
            let rest = path.strip_prefix(prefix)?;
            (rest.is_empty() || rest.starts_with('/')).then_some(prefix.len())
        };
        let host = if self.hosts.is_empty() {
            HostFit::Any
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
            if name.is_empty() || name.contains(['*', '/', ' ']) || bare(name) != name {
                let text = format!(
                    "`{host}` is no host; write for example chat.example.com or *.example.com, without port"
                );
                problems.push(Problem::at([Step::from("hosts"), at.into()], text));
            }
        }
        for (at, path) in self
            .paths
            .iter()
            .enumerate()
            .filter(|(_, path)| !path.starts_with('/') || path.contains('?'))
        {
            let text = format!("`{path}` is no beginning of a path; write for example /chat");
            problems.push(Problem::at([Step::from("paths"), at.into()], text));
        }
        problems
    }
}

impl Intake {
    /// The pools by the authority of a call.
    pub fn pool_authorities(&self) -> &PoolAuthorities {
        &self.pool_authorities
    }

    /// The pool that a request is for, where it is for one.
    pub fn pool_of(&self, path: &str, headers: Headers<'_>) -> Option<Arc<str>> {
        self.parts.confine.pool_of(path, headers)
    }
}

/// The part of an authority that names a Service, equal for all gateways: `outbound|9002||a.b.svc.cluster.local` (Istio),
/// `a.b.svc:9002` (Envoy AI Gateway), `a.b:9002` (Envoy Gateway) and `A.b.svc` are `a.b`.
fn service_name(authority: &str) -> String {
    // The listener replaces characters that an authority cannot have.
    let authority = normalize_authority(authority).to_ascii_lowercase();
    let host = match authority.strip_prefix("outbound+") {
        // Istio's name of a cluster: direction, port, subset, host.
        Some(cluster) => cluster.rsplit('+').next().unwrap_or(cluster),
        None => &authority,
    };
    let host = bare(host);
    let mut labels = host.split('.');
    match (labels.next(), labels.next(), labels.next()) {
        (Some(service), Some(namespace), Some("svc")) => format!("{service}.{namespace}"),
        _ => host.into_owned(),
    }
}

/// A host without its port.
fn bare(host: &str) -> Cow<'_, str> {
    match host.rsplit_once(':') {
        Some((name, port))
            if !port.is_empty()
                && port.bytes().all(|byte| byte.is_ascii_digit())
                && !is_ipv6(name) =>
        {
            Cow::Borrowed(name)
        }
        _ => Cow::Borrowed(host),
    }
}

/// Whether it is an address that is cut in its middle.
fn is_ipv6(name: &str) -> bool {
    name.contains(':') && !name.ends_with(']')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> ConfineConfig {
        let config: ConfineConfig = serde_json::from_str(text).unwrap();
        assert_eq!(config.problems(), []);
        config
    }

    fn pool(config: &ConfineConfig, path: &str, headers: &[(&str, &str)]) -> Option<String> {
        let find = |name: &str| {
            headers
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| Cow::Borrowed(*value))
        };
        config.pool_of(path, &find).map(|pool| pool.to_string())
    }

    #[test]
    fn the_most_special_rule_counts() {
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
            "nobody said that this header counts"
        );
    }

    #[test]
    fn authority_selects_pool_in_forms_of_all_gateways() {
        let config = config(
            r#"{"authority": {
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
    fn authority_problems_are_reported() {
        let config: ConfineConfig = serde_json::from_str(
            r#"{"authority": {"a.b:9002": "p", "a.b.svc": "q", "": "r", "c d": "s", "e.f": ""}}"#,
        )
        .unwrap();
        assert_eq!(config.problems().len(), 4, "{:?}", config.problems());
    }

    #[test]
    fn a_header_beats_the_rules_and_a_rule_for_all_comes_last() {
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
    fn what_could_never_fit_is_refused() {
        let config: ConfineConfig = serde_json::from_str(
            r#"{"header": "x pool", "rules": [
                {"pool": "", "hosts": ["a:80", "*", "a/b", "*.b*"], "paths": ["chat", "/a?b"]},
                {"pool": "b"}, {"pool": "c"}
            ]}"#,
        )
        .unwrap();
        assert_eq!(config.problems().len(), 9, "{:?}", config.problems());
    }
}
