//! Checks of retries after an attempt that may have reached a worker. With a KV handoff or a
//! bootstrap, such a retry must pass through warmroute again. By then, the transferred blocks may
//! belong to another request, and the bootstrap room is closed.

use serde_json::Value;
use warmroute_core::envoy_names::{RETRY_FILTER, WARMROUTE_NAMESPACE};
use warmroute_settings::DurationSetting;
use warmroute_tokens::openai::ApiKind;

use super::dump::parse_part;
use super::filter::{format_seconds, is_buffered};
use super::host_selection::routed_clusters;
use super::schema::{
    EnvoyCluster, ExternalProcessor, RetryPolicy, TypedExtension, body_mode, has_type,
    shows_headers,
};
use super::site::{ActiveRoute, ExtProcFilter, FilterSite};
use crate::finding::{Finding, FindingBuilder};

/// Retry conditions that may apply after a worker has started a request. The prompt is then
/// computed twice.
const LATE_CONDITIONS: [&str; 5] = [
    "5xx",
    "gateway-error",
    "reset",
    "retriable-status-codes",
    "retriable-4xx",
];
const ATTEMPT_COUNT: &str = "x-envoy-attempt-count";
const UPSTREAM_ADDRESS: &str = "upstream.address";

/// Returns the conditions of a policy under which a worker may have started.
pub(super) fn late_conditions(policy: &RetryPolicy) -> Vec<&str> {
    let given = policy.retry_on.split(',').map(str::trim);
    given
        .filter(|on| {
            LATE_CONDITIONS.contains(on)
                && (*on != LATE_CONDITIONS[3] || !policy.retriable_status_codes.is_empty())
        })
        .collect()
}

/// Returns whether prompts on this route may be prefilled by another worker, sequentially or
/// mirrored.
pub(super) fn has_remote_prefill(site: &FilterSite<'_>, active: &ActiveRoute<'_>) -> bool {
    let divided = |path: &str| {
        let api = site.expected.paths.find_api(path);
        matches!(
            api,
            Some(ApiKind::ChatCompletions | ApiKind::Completions | ApiKind::SglangGenerate)
        )
    };
    let carries =
        site.expected.prefill_retry_wait.is_some() || !site.expected.mirror_clusters.is_empty();
    carries
        && active
            .routes()
            .any(|route| route.matches.path.as_deref().is_none_or(divided))
}

/// Returns the findings about the upstream filter; empty if no retry needs it.
pub(super) fn check(site: &FilterSite<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (cluster, actives) in routed_clusters(site) {
        let needs = |active: &&ActiveRoute<'_>| {
            has_remote_prefill(site, active)
                && active
                    .retry_policy()
                    .is_some_and(|policy| !late_conditions(policy).is_empty())
        };
        let needed: Vec<&ActiveRoute<'_>> = actives.into_iter().filter(needs).collect();
        if let Some(first) = needed.first() {
            let at =
                || FindingBuilder::new("envoy.retry_filter", format!("cluster {}", cluster.name));
            findings.extend(match find_retry_filter(cluster) {
                Some(filter) => check_filter(site, cluster, &needed, &filter),
                None => vec![missing_filter(site, at(), cluster, first)],
            });
        }
    }
    findings
}

/// Upstream ext_proc filter of a cluster, with the settings around it.
struct UpstreamFilter {
    filter: ExtProcFilter,
    /// Matcher that selects the attempts that the filter processes; `None` for all.
    matcher: Option<Value>,
    /// Last filter of the list.
    last: TypedExtension,
}

fn find_retry_filter(cluster: &EnvoyCluster) -> Option<UpstreamFilter> {
    let list = cluster.http_options()?["http_filters"].as_array()?;
    let list: Vec<TypedExtension> = list
        .iter()
        .filter_map(|one| parse_part(one, "a filter").ok())
        .collect();
    let last = list.last()?.clone();
    list.iter().enumerate().find_map(|(at, one)| {
        let wrapped = has_type(&one.typed_config, "ExtensionWithMatcher");
        let config = if wrapped {
            &one.typed_config["extension_config"]["typed_config"]
        } else {
            &one.typed_config
        };
        let read: Option<ExternalProcessor> = has_type(config, "ExternalProcessor")
            .then(|| parse_part(config, "a filter").ok())
            .flatten();
        let filter = ExtProcFilter::new(one.name.clone(), at, read.filter(|_| !one.disabled)?);
        let tree = ["xds_matcher", "matcher"]
            .into_iter()
            .map(|key| &one.typed_config[key])
            .find(|tree| tree.is_object());
        let matcher = wrapped.then(|| tree.cloned().unwrap_or_default());
        (filter.declared_kind() == Some(RETRY_FILTER)).then(|| UpstreamFilter {
            filter,
            matcher,
            last: last.clone(),
        })
    })
}

fn missing_filter(
    site: &FilterSite<'_>,
    at: FindingBuilder,
    cluster: &EnvoyCluster,
    active: &ActiveRoute<'_>,
) -> Finding {
    let policy = active.retry_policy().cloned().unwrap_or_default();
    let (follows, name, file) = if site.expected.prefill_retry_wait.is_some() {
        (
            "the next decode worker reads the blocks of the first attempt, which may belong to \
            another request by then",
            "prefill_retry",
            "call",
        )
    } else {
        (
            "the next decode worker waits in a bootstrap room that the prefill worker has left",
            "another_room",
            "mirror",
        )
    };
    at.error(
        format!("a request is retried after {}, and no upstream filter sends these retries to \
        warmroute: {follows}", late_conditions(&policy).join(" or ")),
        format!(
            "in cluster `{}` write the `http_filters` with the filter `{name}` of \
            envoy/disaggregated-{file}.yaml, or in the \
             `retry_policy` of the {} `retry_on: connect-failure,refused-stream,reset-before-request`",
            cluster.name,
            active.title()
        ),
    )
}

/// A problem of the upstream filter and its fix.
struct FilterProblem {
    message: String,
    fix: String,
}

fn check_filter(
    site: &FilterSite<'_>,
    cluster: &EnvoyCluster,
    actives: &[&ActiveRoute<'_>],
    upstream: &UpstreamFilter,
) -> Vec<Finding> {
    let at = || {
        FindingBuilder::new(
            "envoy.retry_filter",
            format!("cluster {}, filter {}", cluster.name, upstream.filter.name),
        )
    };
    let write = |text: &str| {
        format!(
            "in the filter `{}` of cluster `{}` write {text}",
            upstream.filter.name, cluster.name
        )
    };
    let mut problems = request_problems(site, &upstream.filter, &write);
    problems.extend(metadata_problems(site, &upstream.filter, &write));
    if !has_type(&upstream.last.typed_config, "UpstreamCodec") {
        problems.push(FilterProblem {
            message: format!(
                "the last filter is {}: Envoy forwards nothing without the codec",
                upstream.last.name
            ),
            fix: format!(
                "in the `http_filters` of cluster `{}` move `envoy.filters.http.upstream_codec` \
                 to the end",
                cluster.name
            ),
        });
    }
    problems.extend(
        upstream
            .matcher
            .iter()
            .filter_map(|matcher| check_matcher(matcher, actives)),
    );
    if let Some(needed) = site.expected.prefill_retry_wait {
        problems.extend(check_handoff(&upstream.filter.config, needed, &write));
    }
    if problems.is_empty() {
        return vec![at().ok("every retry is sent to warmroute")];
    }
    problems
        .into_iter()
        .map(|problem| at().error(problem.message, problem.fix))
        .collect()
}

/// Returns the problems of the called server and of the processed requests.
fn request_problems(
    site: &FilterSite<'_>,
    filter: &ExtProcFilter,
    write: &impl Fn(&str) -> String,
) -> Vec<FilterProblem> {
    let mut problems = Vec::new();
    let addresses = filter.addresses(site.dump);
    if !addresses
        .iter()
        .any(|address| site.expected.is_ours(address))
    {
        problems.push(FilterProblem {
            message: format!(
                "it does not call warmroute, which listens at {}",
                site.expected.listen_text().0
            ),
            fix: write("the `grpc_service` of the main filter, with its own `initial_metadata`"),
        });
    }
    let modes = &filter.config.processing_mode;
    let body = body_mode(&modes.request_body_mode);
    if !shows_headers(&modes.request_header_mode) || body != "BUFFERED" {
        problems.push(FilterProblem {
            message: format!("request_body_mode: {body}: the body of a retry cannot be replaced"),
            fix: write(
                "`request_header_mode: SEND` and `request_body_mode: BUFFERED` under \
                 `processing_mode`",
            ),
        });
    }
    problems
}

/// Returns the problems of the attributes and metadata that identify a retry.
fn metadata_problems(
    site: &FilterSite<'_>,
    filter: &ExtProcFilter,
    write: &impl Fn(&str) -> String,
) -> Vec<FilterProblem> {
    let mut problems = Vec::new();
    let config = &filter.config;
    if !config
        .request_attributes
        .iter()
        .any(|name| name == UPSTREAM_ADDRESS)
    {
        problems.push(FilterProblem {
            message: format!(
                "request_attributes has no {UPSTREAM_ADDRESS}: warmroute does not know the worker \
                 of a retry, and leaves it unchanged"
            ),
            fix: write(&format!("`request_attributes: [{UPSTREAM_ADDRESS}]`")),
        });
    }
    if !config
        .metadata_options
        .forwarding_namespaces
        .contains(WARMROUTE_NAMESPACE)
    {
        problems.push(FilterProblem {
            message: format!(
                "forwarding_namespaces has no {WARMROUTE_NAMESPACE}: warmroute cannot assign a retry to its \
                 request, and leaves it unchanged"
            ),
            fix: write(&format!(
                "`metadata_options: {{forwarding_namespaces: {{untyped: [{WARMROUTE_NAMESPACE}]}}}}`"
            )),
        });
    }
    let receives = |filter: &&ExternalProcessor| {
        filter
            .metadata_options
            .receiving_namespaces
            .contains(WARMROUTE_NAMESPACE)
    };
    if !site.variants().iter().all(receives) {
        problems.push(FilterProblem {
            message: format!(
                "the receiving_namespaces of {} have no {WARMROUTE_NAMESPACE}: warmroute cannot assign a retry \
                 to its request",
                site.main.name
            ),
            fix: site.in_main_filter(&format!(
                "`{WARMROUTE_NAMESPACE}` into `receiving_namespaces: {{untyped: [..]}}` under `metadata_options`"
            )),
        });
    }
    problems
}

/// Checks the matcher. If a retry is mistaken for the first attempt, it is skipped. If a first
/// attempt is mistaken for a retry, it is prefilled twice.
fn check_matcher(matcher: &Value, actives: &[&ActiveRoute<'_>]) -> Option<FilterProblem> {
    let tree = &matcher["matcher_tree"];
    let by = tree["input"]["typed_config"]["header_name"]
        .as_str()
        .unwrap_or("another input");
    let first = &tree["exact_match_map"]["map"]["1"]["action"]["typed_config"];
    if !by.eq_ignore_ascii_case(ATTEMPT_COUNT) || !has_type(first, "SkipFilter") {
        return Some(FilterProblem {
            message: format!(
                "it is matched by {by}, but must skip only the first attempt by {ATTEMPT_COUNT}"
            ),
            fix: "write its `xds_matcher` as in envoy/disaggregated-call.yaml, or remove it to \
                  process every attempt"
                .to_owned(),
        });
    }
    let silent = actives
        .iter()
        .find(|active| !active.host.include_request_attempt_count)?;
    Some(FilterProblem {
        message: format!(
            "the virtual host {} does not count attempts, so the first is mistaken for a retry",
            silent.host.name
        ),
        fix: format!(
            "in the virtual host `{}` write `include_request_attempt_count: true`",
            silent.host.name
        ),
    })
}

/// Checks the requirements of a KV handoff. There must be time for another prefill, and the filter
/// must not fail open with stale blocks.
fn check_handoff(
    config: &ExternalProcessor,
    needed: std::time::Duration,
    write: &impl Fn(&str) -> String,
) -> Vec<FilterProblem> {
    let mut problems = Vec::new();
    let given = config
        .max_message_timeout
        .map(|given| given.0)
        .filter(|given| !given.is_zero());
    if given.is_none_or(|given| given < needed) && is_buffered(config) {
        let text = given.map_or("none".to_owned(), |given| {
            DurationSetting(given).to_string()
        });
        problems.push(FilterProblem {
            message: format!(
                "max_message_timeout: {text}, all attempts of a prefill with their margin: {}",
                DurationSetting(needed)
            ),
            fix: write(&format!(
                "`max_message_timeout: {}`",
                format_seconds(needed)
            )),
        });
    }
    if config.failure_mode_allow {
        problems.push(FilterProblem {
            message: "failure_mode_allow: true: if warmroute is unavailable or late, the next \
                      decode worker reads the blocks of the first attempt, which may belong to \
                      another request by then"
                .to_owned(),
            fix: write("`failure_mode_allow: false`"),
        });
    }
    problems
}
