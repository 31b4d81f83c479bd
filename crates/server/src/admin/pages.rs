//! Catalog of the admin pages: the list at `/debug`, and the responses to unknown paths and wrong
//! methods.

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};
use warmroute_settings::nearest;

use super::explain::EXPLAIN_PATH;
use super::{AUDIT_PATH, AdminState, ProcessStatus};

/// Address in commands if the request has no usable host header.
const DEFAULT_ADDRESS: &str = "127.0.0.1:9005";

/// One admin page.
pub(super) struct AdminPage {
    pub(super) path: &'static str,
    pub(super) method: &'static str,
    /// Content, in one line.
    pub(super) content: &'static str,
    /// Instruction that enables the feature of the page. `None` if the page needs no feature.
    pub(super) hint: Option<&'static str>,
}

impl AdminPage {
    const fn get(path: &'static str, content: &'static str) -> Self {
        Self {
            path,
            method: "GET",
            content,
            hint: None,
        }
    }

    const fn optional(path: &'static str, content: &'static str, hint: &'static str) -> Self {
        Self {
            path,
            method: "GET",
            content,
            hint: Some(hint),
        }
    }

    /// Returns the instruction that enables the feature, if the feature is off.
    pub(super) fn hint_if_off(
        &self,
        admin: &AdminState,
        process: &ProcessStatus,
    ) -> Option<&'static str> {
        let is_on = match self.path {
            ENVOYS_PATH => (admin.envoys)().is_some(),
            CLUSTER_PATH => (admin.cluster)().is_some(),
            REPLICAS_PATH => (admin.replicas)().is_some(),
            AUDIT_PATH => process.observes_usage,
            PARITY_PATH => process.checks_parity,
            _ => true,
        };
        self.hint.filter(|_| !is_on)
    }
}

pub(super) const ENVOYS_PATH: &str = "/debug/envoys";
pub(super) const CLUSTER_PATH: &str = "/debug/cluster";
pub(super) const REPLICAS_PATH: &str = "/debug/replicas";
pub(super) const PARITY_PATH: &str = "/debug/parity";

pub(super) const HINT_ENVOYS: &str = "set `envoy.xds.address` in warmroute.yaml";
pub(super) const HINT_CLUSTER: &str = "set `workers.kubernetes.pools` in warmroute.yaml";
pub(super) const HINT_REPLICAS: &str = "set `replicas.nats.servers` in warmroute.yaml";
pub(super) const HINT_REMOTE_INDEX: &str = "set `index.remote.servers` in warmroute.yaml";
const HINT_AUDIT: &str = "set `gateway.observe: sampled(0.05)` or `usage` in warmroute.yaml";
const HINT_PARITY: &str = "set `engines.parity_check.enabled: true` in warmroute.yaml";

/// All pages, in the order of the list.
pub(super) const PAGES: [AdminPage; 17] = [
    AdminPage::get(
        "/",
        "this overview; with `Accept: application/json`, the list of pages",
    ),
    AdminPage::get("/version", "version, commit and target of the program"),
    AdminPage::get("/healthz", "`ok` while the process runs"),
    AdminPage::get("/readyz", "readiness and the pending steps"),
    AdminPage::get("/metrics", "metrics for Prometheus"),
    AdminPage::get("/debug", "list of pages as JSON"),
    AdminPage::get(
        "/debug/fleet",
        "workers with their settings, freshness of their KV events, and differences from the \
        configuration",
    ),
    AdminPage::get(
        "/debug/index",
        "indexed blocks of each rank and tier, limits, dropped blocks, and remote index servers",
    ),
    AdminPage::get(
        "/debug/load",
        "active requests, blocks and prefill tokens of each rank",
    ),
    AdminPage::optional(
        PARITY_PATH,
        "comparison of tokens with each engine, with the first token that differs",
        HINT_PARITY,
    ),
    AdminPage::get(
        "/debug/calibration",
        "learned latency, and predicted and observed times to first token",
    ),
    AdminPage::optional(
        AUDIT_PATH,
        "predicted and reported cache hits; `warmroute audit` prints them as a table",
        HINT_AUDIT,
    ),
    AdminPage::optional(
        ENVOYS_PATH,
        "Envoys connected by xDS, with acknowledged and rejected versions",
        HINT_ENVOYS,
    ),
    AdminPage::optional(
        CLUSTER_PATH,
        "InferenceObjectives and InferenceModelRewrites in use",
        HINT_CLUSTER,
    ),
    AdminPage::optional(REPLICAS_PATH, "other replicas", HINT_REPLICAS),
    AdminPage::get(
        "/debug/config",
        "resolved configuration, its last reload, and keys that need a restart",
    ),
    AdminPage {
        path: EXPLAIN_PATH,
        method: "POST",
        content: "the route that a request would get now; nothing is booked",
        hint: None,
    },
];

/// Returns the page of a feature that is off.
pub(super) fn feature_off(hint: &str) -> Value {
    json!({"enabled": false, "hint": hint})
}

/// Returns the list of pages as JSON.
pub(super) fn page_list(admin: &AdminState) -> Value {
    let process = (admin.process)();
    let entry = |page: &AdminPage| {
        let hint = page.hint_if_off(admin, &process);
        let mut entry = json!({
            "method": page.method,
            "path": page.path,
            "content": page.content,
            "enabled": hint.is_none(),
        });
        if let Some(hint) = hint {
            entry["hint"] = hint.into();
        }
        entry
    };
    json!({
        "version": process.version.text,
        "ready": admin.readiness.is_ready(),
        "pages": PAGES.iter().map(entry).collect::<Vec<_>>(),
    })
}

pub(super) async fn list_page(State(admin): State<AdminState>) -> Json<Value> {
    Json(page_list(&admin))
}

/// Returns the response to an unknown path, with the page that has the most similar path.
pub(super) async fn unknown_path(uri: Uri) -> Response {
    let mut body = json!({"error": "there is no such page; / lists all pages", "pages": "/"});
    if let Some(path) = nearest_path(uri.path()) {
        body["error"] =
            format!("there is no such page; did you mean {path}? / lists all pages").into();
        body["nearest"] = path.into();
    }
    (StatusCode::NOT_FOUND, Json(body)).into_response()
}

/// Returns the page with the most similar path. The last segment of a path is sufficient.
fn nearest_path(path: &str) -> Option<&'static str> {
    let longest = PAGES.iter().map(|page| page.path.len()).max()?;
    let path = path.trim_end_matches('/');
    let segment = path.rsplit('/').next()?;
    // Comparing a long path is expensive, and no page has a similar one.
    if segment.is_empty() || path.len() > 2 * longest {
        return None;
    }
    let named = PAGES.iter().map(|page| page.path).find(|known| {
        known
            .rsplit('/')
            .next()
            .is_some_and(|name| name.eq_ignore_ascii_case(segment))
    });
    named.or_else(|| nearest(path, PAGES.iter().map(|page| page.path)))
}

/// Returns the response to an unsupported method, with a command that uses a supported one.
pub(super) async fn wrong_method(method: Method, uri: Uri, headers: HeaderMap) -> Response {
    let page = PAGES.iter().find(|page| page.path == uri.path());
    let allowed = page.map_or("GET", |page| page.method);
    let address = headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok())
        .filter(|host| is_plain_address(host))
        .unwrap_or(DEFAULT_ADDRESS);
    // Only the fixed paths of the routes reach this function.
    let path = uri.path();
    let (allow, command) = match allowed {
        "POST" => (
            "POST",
            format!("curl --data-binary @chat.json {address}{path}"),
        ),
        _ => ("GET, HEAD", format!("curl {address}{path}")),
    };
    let body = json!({
        "error": format!("{path} does not support {method}; use {allowed}"),
        "command": command,
    });
    (
        StatusCode::METHOD_NOT_ALLOWED,
        [(header::ALLOW, allow)],
        Json(body),
    )
        .into_response()
}

/// Returns whether a host header is safe in a shell command.
fn is_plain_address(host: &str) -> bool {
    !host.is_empty()
        && !host.starts_with('-')
        && host
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b".:-[]".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similar_path_is_found() {
        for (path, nearest) in [
            ("/debug/flet", Some("/debug/fleet")),
            ("/debug/fleet/", Some("/debug/fleet")),
            ("/fleet", Some("/debug/fleet")),
            ("/Debug/Fleet", Some("/debug/fleet")),
            ("/explain", Some("/debug/explain")),
            ("/ready", Some("/readyz")),
            ("/debug/pprof/heap", Some("/debug")),
            ("//", None),
            ("/favicon.ico", None),
        ] {
            assert_eq!(nearest_path(path), nearest, "{path}");
        }
        assert_eq!(nearest_path(&"/debug/fleet".repeat(1000)), None);
    }

    #[test]
    fn only_plain_hosts_appear_in_commands() {
        for host in ["127.0.0.1:9005", "[::1]:9005", "warmroute.inference"] {
            assert!(is_plain_address(host), "{host}");
        }
        for host in ["", "-o/etc/passwd", "a;reboot", "a b", "$(id)", "é"] {
            assert!(!is_plain_address(host), "{host}");
        }
    }

    #[test]
    fn instructions_name_existing_keys() {
        let reference =
            std::fs::read_to_string(format!("{}/examples/warmroute.yaml", crate::REPOSITORY))
                .unwrap();
        for hint in PAGES
            .iter()
            .filter_map(|page| page.hint)
            .chain([HINT_REMOTE_INDEX])
        {
            let (_, setting) = hint.split_once('`').unwrap();
            let (setting, _) = setting.split_once('`').unwrap();
            let path = setting.split(':').next().unwrap();
            for key in path.split('.') {
                assert!(reference.contains(&format!("{key}:")), "{hint}");
            }
        }
    }
}
