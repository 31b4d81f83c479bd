//! Tries after one that may have reached a worker. Where a prefill is handed over or met, such a try must come to us first: the
//! blocks that the first one was handed may be another request's by now, and in its room nobody waits any more.

use serde_json::Value;

use super::dump::{is, part};
use super::filter::{buffers, seconds};
use super::parts::{Cluster, Extension, ExternalProcessing, RetryPolicy, body_mode, shows_headers};
use super::site::{Active, Filter, Site};
use super::ways::clusters;
use crate::cmd::doctor::finding::{At, Finding};
use crate::ext_proc::metadata::OURS;
use crate::ext_proc::service::RETRY;
use crate::openai::Api;
use crate::settings::Period;

/// Retries that may come when a worker has begun: a prompt is computed twice.
const LATE: [&str; 5] = [
    "5xx",
    "gateway-error",
    "reset",
    "retriable-status-codes",
    "retriable-4xx",
];
const ATTEMPT: &str = "x-envoy-attempt-count";
const TO_WHOM: &str = "upstream.address";

/// The conditions of a policy under which a worker may have begun.
pub(super) fn late(policy: &RetryPolicy) -> Vec<&str> {
    let given = policy.retry_on.split(',').map(str::trim);
    given
        .filter(|on| {
            LATE.contains(on) && (*on != LATE[3] || !policy.retriable_status_codes.is_empty())
        })
        .collect()
}

/// Whether prompts come by this route whose prefill is carried to another worker, by a call or by a copy.
pub(super) fn carried(site: &Site<'_>, active: &Active<'_>) -> bool {
    let divided = |path: &str| {
        let api = site.expected.paths.find(path);
        matches!(
            api,
            Some(Api::ChatCompletions | Api::Completions | Api::SglangGenerate)
        )
    };
    let carries = site.expected.calls.is_some() || !site.expected.mirrors.is_empty();
    carries
        && active
            .routes()
            .any(|route| route.matches.path.as_deref().is_none_or(divided))
}

/// Every check of the filter; none where no try needs it.
pub(super) fn check(site: &Site<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (cluster, actives) in clusters(site) {
        let needs = |active: &&Active<'_>| {
            carried(site, active)
                && active
                    .retry_policy()
                    .is_some_and(|policy| !late(policy).is_empty())
        };
        let needed: Vec<&Active<'_>> = actives.into_iter().filter(needs).collect();
        if let Some(first) = needed.first() {
            let at = || At::new("envoy.retry_filter", format!("cluster {}", cluster.name));
            findings.extend(match found(cluster) {
                Some(filter) => of_filter(site, cluster, &needed, &filter),
                None => vec![absent(site, at(), cluster, first)],
            });
        }
    }
    findings
}

/// The filter on the way to a cluster, and what is before it and behind.
struct Upstream {
    filter: Filter,
    /// Which tries it is shown; none: all.
    matcher: Option<Value>,
    /// The last of the list.
    last: Extension,
}

fn found(cluster: &Cluster) -> Option<Upstream> {
    let list = cluster.http()?["http_filters"].as_array()?;
    let list: Vec<Extension> = list
        .iter()
        .filter_map(|one| part(one, "a filter").ok())
        .collect();
    let last = list.last()?.clone();
    list.iter().enumerate().find_map(|(at, one)| {
        let wrapped = is(&one.typed_config, "ExtensionWithMatcher");
        let config = if wrapped {
            &one.typed_config["extension_config"]["typed_config"]
        } else {
            &one.typed_config
        };
        let read: Option<ExternalProcessing> = is(config, "ExternalProcessor")
            .then(|| part(config, "a filter").ok())
            .flatten();
        let filter = Filter::new(one.name.clone(), at, read.filter(|_| !one.disabled)?);
        let tree = ["xds_matcher", "matcher"]
            .into_iter()
            .map(|key| &one.typed_config[key])
            .find(|tree| tree.is_object());
        let matcher = wrapped.then(|| tree.cloned().unwrap_or_default());
        (filter.says() == Some(RETRY)).then(|| Upstream {
            filter,
            matcher,
            last: last.clone(),
        })
    })
}

fn absent(site: &Site<'_>, at: At, cluster: &Cluster, active: &Active<'_>) -> Finding {
    let policy = active.retry_policy().cloned().unwrap_or_default();
    let (follows, name, file) = if site.expected.calls.is_some() {
        (
            "the next decode worker reads the blocks that the first was told of, whoever has them by now",
            "prefilled_anew",
            "call",
        )
    } else {
        (
            "the next decode worker waits in a room that everybody has left",
            "another_room",
            "mirror",
        )
    };
    at.error(
        format!("after {} a request is sent again, and no filter shows us these tries: {follows}", late(&policy).join(" or ")),
        format!(
            "in cluster `{}` write the `http_filters` with the filter `{name}` of envoy/disaggregated-{file}.yaml, or in the \
             `retry_policy` of the {} `retry_on: connect-failure,refused-stream,reset-before-request`",
            cluster.name,
            active.title()
        ),
    )
}

fn of_filter(
    site: &Site<'_>,
    cluster: &Cluster,
    actives: &[&Active<'_>],
    upstream: &Upstream,
) -> Vec<Finding> {
    let Upstream {
        filter,
        matcher,
        last,
    } = upstream;
    let at = || {
        At::new(
            "envoy.retry_filter",
            format!("cluster {}, filter {}", cluster.name, filter.name),
        )
    };
    let write = |text: &str| {
        format!(
            "in the filter `{}` of cluster `{}` write {text}",
            filter.name, cluster.name
        )
    };
    let mut findings = Vec::new();
    let mut wrong = |seen: String, mend: String| findings.push(at().error(seen, mend));
    let config = &filter.config;
    if !filter
        .asks(site.dump)
        .iter()
        .any(|address| site.expected.is_ours(address))
    {
        let seen = format!(
            "it does not ask us, and we listen at {}",
            site.expected.listening().0
        );
        wrong(
            seen,
            write("the `grpc_service` of the main filter, with its own `initial_metadata`"),
        );
    }
    let modes = &config.processing_mode;
    if !shows_headers(&modes.request_header_mode)
        || body_mode(&modes.request_body_mode) != "BUFFERED"
    {
        let seen = format!(
            "request_body_mode: {}: the body of a further try cannot be replaced",
            body_mode(&modes.request_body_mode)
        );
        wrong(
            seen,
            write(
                "`request_header_mode: SEND` and `request_body_mode: BUFFERED` under `processing_mode`",
            ),
        );
    }
    if !config.request_attributes.iter().any(|name| name == TO_WHOM) {
        let seen = format!(
            "request_attributes has no {TO_WHOM}: we do not learn to whom a further try goes, and leave it as it is"
        );
        wrong(seen, write(&format!("`request_attributes: [{TO_WHOM}]`")));
    }
    if !config.metadata_options.forwarding_namespaces.has(OURS) {
        let seen = format!(
            "forwarding_namespaces has no {OURS}: we cannot tell which request a further try is of, and leave it as it is"
        );
        wrong(
            seen,
            write(&format!(
                "`metadata_options: {{forwarding_namespaces: {{untyped: [{OURS}]}}}}`"
            )),
        );
    }
    if !site
        .variants()
        .iter()
        .all(|filter| filter.metadata_options.receiving_namespaces.has(OURS))
    {
        let seen = format!(
            "the receiving_namespaces of {} have no {OURS}: we cannot tell which request a further try is of",
            site.main.name
        );
        wrong(
            seen,
            site.in_main(&format!(
                "`{OURS}` into `receiving_namespaces: {{untyped: [..]}}` under `metadata_options`"
            )),
        );
    }
    if !is(&last.typed_config, "UpstreamCodec") {
        let seen = format!(
            "the last of the filters is {}: Envoy sends nothing without the codec",
            last.name
        );
        wrong(
            seen,
            format!(
                "in the `http_filters` of cluster `{}` put `envoy.filters.http.upstream_codec` last",
                cluster.name
            ),
        );
    }
    for (seen, mend) in matcher.iter().filter_map(|matcher| tries(matcher, actives)) {
        wrong(seen, mend);
    }
    if let Some(needed) = site.expected.calls {
        for (seen, mend) in handed_over(config, needed) {
            wrong(seen, write(&mend));
        }
    }
    if findings.is_empty() {
        findings.push(at().ok("every try after the first is shown to us"));
    }
    findings
}

/// A try that is taken for the first one is not shown; and a first one that is not known as such would be prefilled twice.
fn tries(matcher: &Value, actives: &[&Active<'_>]) -> Option<(String, String)> {
    let tree = &matcher["matcher_tree"];
    let by = tree["input"]["typed_config"]["header_name"]
        .as_str()
        .unwrap_or("something else");
    let first = &tree["exact_match_map"]["map"]["1"]["action"]["typed_config"];
    if !by.eq_ignore_ascii_case(ATTEMPT) || !is(first, "SkipFilter") {
        return Some((
            format!("it is matched by {by}: which try it is tells {ATTEMPT}, and only the first is to be skipped"),
            "write its `xds_matcher` as in envoy/disaggregated-call.yaml, or take that out: then every try is shown"
                .to_owned(),
        ));
    }
    let silent = actives
        .iter()
        .find(|active| !active.host.include_request_attempt_count)?;
    Some((
        format!(
            "the virtual host {} does not count tries, so that the first is taken for a further one",
            silent.host.name
        ),
        format!(
            "in the virtual host `{}` write `include_request_attempt_count: true`",
            silent.host.name
        ),
    ))
}

/// What a hand-over needs: time for another prefill, and that nobody gets the first one by mistake.
fn handed_over(config: &ExternalProcessing, needed: std::time::Duration) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let given = config
        .max_message_timeout
        .map(|given| given.0)
        .filter(|given| !given.is_zero());
    if given.is_none_or(|given| given < needed) && buffers(config) {
        let words = given.map_or("none".to_owned(), |given| Period(given).to_string());
        found.push((
            format!(
                "max_message_timeout: {words}, all tries of a prefill with their margin: {}",
                Period(needed)
            ),
            format!("`max_message_timeout: {}`", seconds(needed)),
        ));
    }
    if config.failure_mode_allow {
        found.push((
            "failure_mode_allow: true: where we are away or late, the next decode worker reads the blocks that the first was told \
             of, whoever has them by now"
                .to_owned(),
            "`failure_mode_allow: false`".to_owned(),
        ));
    }
    found
}
