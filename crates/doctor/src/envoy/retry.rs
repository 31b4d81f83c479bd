//! Checks of retries after an attempt that may have reached a worker. With a KV handoff or a
//! bootstrap, such a retry must pass through warmroute again. By then, the transferred blocks may
//! belong to another request, and the bootstrap room is closed.

use warmroute_core::envoy_names::{RETRY_FILTER, WARMROUTE_NAMESPACE};
use warmroute_settings::DurationSetting;
use warmroute_tokens::openai::ApiKind;

use super::cluster::EnvoyCluster;
use super::config_node::ConfigNode;
use super::ext_proc_filter::{BUFFERED, ExtProcFilter};
use super::filter::format_timeout;
use super::fixes::{format_seconds, settings};
use super::site::{ActiveRoute, ClusterFacts, FilterSite};
use crate::finding::{CheckFacts, CheckVerdict, Finding, error, ok};

/// Retry conditions that may apply after a worker has started a request. The prompt is then
/// computed twice.
const LATE_CONDITIONS: [&str; 4] = ["5xx", "gateway-error", "reset", "retriable-4xx"];
const ATTEMPT_COUNT: &str = "x-envoy-attempt-count";
const UPSTREAM_ADDRESS: &str = "upstream.address";

/// Returns the conditions of a policy under which a worker may have started.
pub(super) fn late_conditions(policy: ConfigNode<'_>) -> Vec<&str> {
    let has_codes = policy.items("retriable_status_codes").next().is_some();
    let mut conditions: Vec<&str> = policy.text("retry_on").split(',').map(str::trim).collect();
    conditions.retain(|on| {
        LATE_CONDITIONS.contains(on) || (*on == "retriable-status-codes" && has_codes)
    });
    conditions
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
    let mut paths = active.routes().map(|route| route.given_text("match.path"));
    carries && paths.any(|path| path.is_none_or(divided))
}

/// Returns the findings about the upstream filter; empty if no retry needs it.
pub(super) fn check(site: &FilterSite<'_>) -> Vec<Finding> {
    let mut clusters = site.routed_clusters();
    for routed in &mut clusters {
        routed.actives.retain(|active| {
            let policy = active
                .retry_policy()
                .filter(|_| has_remote_prefill(site, active));
            policy.is_some_and(|policy| !late_conditions(policy).is_empty())
        });
    }
    let needed = clusters
        .into_iter()
        .filter(|routed| !routed.actives.is_empty());
    needed.flat_map(|at| check_cluster(&at)).collect()
}

fn check_cluster(at: &ClusterFacts<'_, '_>) -> Vec<Finding> {
    let Some(upstream) = UpstreamFilter::find(at.cluster) else {
        return vec![judge_missing_filter(at).about("envoy.retry_filter", at.subject())];
    };
    let subject = format!("{}, filter {}", at.subject(), upstream.filter.name);
    let mut verdicts = Vec::new();
    RetryProblems {
        at,
        upstream: &upstream,
        verdicts: &mut verdicts,
    }
    .find();
    if verdicts.is_empty() {
        verdicts.push(ok("every retry is sent to warmroute"));
    }
    let verdicts = verdicts.into_iter();
    verdicts
        .map(|verdict| verdict.about("envoy.retry_filter", subject.as_str()))
        .collect()
}

/// Upstream ext_proc filter of a cluster, with the settings around it.
struct UpstreamFilter<'d> {
    filter: ExtProcFilter,
    /// Matcher that selects the attempts that the filter processes; `None` for all.
    matcher: Option<ConfigNode<'d>>,
    /// Last filter of the list.
    last: ConfigNode<'d>,
}

impl<'d> UpstreamFilter<'d> {
    fn find(cluster: EnvoyCluster<'d>) -> Option<Self> {
        let options = cluster.http_options()?;
        let last = options.items("http_filters").last()?;
        let mut filters = options.items("http_filters").enumerate();
        filters.find_map(|(index, one)| {
            let mut config = one.at("typed_config");
            let mut matcher = None;
            if config.has_type("ExtensionWithMatcher") {
                let given = config.at("xds_matcher").present();
                matcher = Some(given.unwrap_or(config.at("matcher")));
                config = config.at("extension_config.typed_config");
            }
            let filter = ExtProcFilter::read(index, one, config)?;
            let is_found = !filter.is_disabled && filter.declared_role() == Some(RETRY_FILTER);
            is_found.then_some(Self {
                filter,
                matcher,
                last,
            })
        })
    }
}

fn judge_missing_filter(at: &ClusterFacts<'_, '_>) -> CheckVerdict {
    let first = at.actives[0];
    let conditions = first
        .retry_policy()
        .map(late_conditions)
        .unwrap_or_default();
    let (effect, filter, mode) = if at.site.expected.prefill_retry_wait.is_some() {
        (
            "the next decode worker reads the blocks of the first attempt, \
            which may belong to another request by then",
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
    error(
        format!(
            "a request is retried after {}, \
            and no upstream filter sends these retries to warmroute: {effect}",
            conditions.join(" or ")
        ),
        format!(
            "in cluster `{}` write the `http_filters` with the filter `{filter}` \
            of envoy/disaggregated-{mode}.yaml, or in the `retry_policy` \
            of the {} `retry_on: connect-failure,refused-stream,reset-before-request`",
            at.cluster.name(),
            first.title()
        ),
    )
}

/// Search for problems of an upstream filter.
struct RetryProblems<'p, 's, 'd> {
    at: &'p ClusterFacts<'s, 'd>,
    upstream: &'p UpstreamFilter<'d>,
    verdicts: &'p mut Vec<CheckVerdict>,
}

impl RetryProblems<'_, '_, '_> {
    fn find(&mut self) {
        self.check_requests();
        self.check_metadata();
        let last = self.upstream.last;
        if !last.at("typed_config").has_type("UpstreamCodec") {
            let name = self.at.cluster.name();
            let fix = format!(
                "in the `http_filters` \
                of cluster `{name}` move `envoy.filters.http.upstream_codec` to the end"
            );
            let last = last.text("name");
            let message =
                format!("the last filter is {last}: Envoy forwards nothing without the codec");
            self.verdicts.push(error(message, fix));
        }
        if let Some(matcher) = self.upstream.matcher {
            self.verdicts
                .extend(check_matcher(matcher, &self.at.actives));
        }
        self.check_handoff();
    }

    /// Adds a problem whose fix is in the filter.
    fn add(&mut self, message: String, text: &str) {
        let filter = &self.upstream.filter.name;
        let cluster = self.at.cluster.name();
        let fix = format!("in the filter `{filter}` of cluster `{cluster}` write {text}");
        self.verdicts.push(error(message, fix));
    }

    /// Checks the called server and the processed requests.
    fn check_requests(&mut self) {
        let filter = &self.upstream.filter;
        let expected = self.at.site.expected;
        let addresses = filter.addresses(self.at.site.dump);
        if !addresses.iter().any(|address| expected.is_ours(address)) {
            let listen = expected.listen_text().0;
            self.add(
                format!("it does not call warmroute, which listens at {listen}"),
                "the `grpc_service` of the main filter, with its own `initial_metadata`",
            );
        }
        let body = filter.config.mode("request_body_mode");
        if !filter.config.sends_headers("request_header_mode") || body != BUFFERED {
            self.add(
                format!("request_body_mode: {body}: the body of a retry cannot be replaced"),
                "`request_header_mode: SEND` and `request_body_mode: BUFFERED` \
                under `processing_mode`",
            );
        }
    }

    /// Checks the attributes and metadata that identify a retry.
    fn check_metadata(&mut self) {
        let config = &self.upstream.filter.config;
        if !config
            .node()
            .contains("request_attributes", UPSTREAM_ADDRESS)
        {
            self.add(
                format!(
                    "request_attributes has no {UPSTREAM_ADDRESS}: \
                    warmroute does not know the worker of a retry, and leaves it unchanged"
                ),
                &format!("`request_attributes: [{UPSTREAM_ADDRESS}]`"),
            );
        }
        if !config.forwards(WARMROUTE_NAMESPACE) {
            self.add(
                format!(
                    "forwarding_namespaces has no {WARMROUTE_NAMESPACE}: \
                    warmroute cannot assign a retry to its request, and leaves it unchanged"
                ),
                &format!(
                    "`metadata_options: {{forwarding_namespaces: {{untyped: \
                    [{WARMROUTE_NAMESPACE}]}}}}`"
                ),
            );
        }
        let site = self.at.site;
        let mut variants = site.variants().into_iter();
        if !variants.all(|filter| filter.receives(WARMROUTE_NAMESPACE)) {
            let message = format!(
                "the receiving_namespaces of {} have no {WARMROUTE_NAMESPACE}: \
                warmroute cannot assign a retry to its request",
                site.main.name
            );
            let fix = settings::RECEIVED_NAMESPACE.with("namespace", WARMROUTE_NAMESPACE);
            self.verdicts.push(error(message, site.own_fix(&fix)));
        }
    }

    /// Checks the requirements of a KV handoff. There must be time for another prefill, and the
    /// filter must not fail open with stale blocks.
    fn check_handoff(&mut self) {
        let Some(needed) = self.at.site.expected.prefill_retry_wait else {
            return;
        };
        let config = &self.upstream.filter.config;
        let given = config.node().duration("max_message_timeout");
        if config.is_buffered() && given.unwrap_or_default() < needed {
            self.add(
                format!(
                    "max_message_timeout: {}, all attempts of a prefill with their margin: {}",
                    format_timeout(given),
                    DurationSetting(needed)
                ),
                &format!("`max_message_timeout: {}`", format_seconds(needed)),
            );
        }
        if config.allows_failure() {
            self.add(
                "failure_mode_allow: true: if warmroute is unavailable or late, \
                the next decode worker reads the blocks of the first attempt, \
                which may belong to another request by then"
                    .to_owned(),
                "`failure_mode_allow: false`",
            );
        }
    }
}

/// Checks the matcher. If a retry is mistaken for the first attempt, it is skipped. If a first
/// attempt is mistaken for a retry, it is prefilled twice.
fn check_matcher(matcher: ConfigNode<'_>, actives: &[&ActiveRoute<'_>]) -> Option<CheckVerdict> {
    let tree = matcher.at("matcher_tree");
    let header = tree.given_text("input.typed_config.header_name");
    let header = header.unwrap_or("another input");
    let first = tree.at("exact_match_map.map.1.action.typed_config");
    if !header.eq_ignore_ascii_case(ATTEMPT_COUNT) || !first.has_type("SkipFilter") {
        return Some(error(
            format!(
                "it is matched by {header}, but must skip only the first attempt by {ATTEMPT_COUNT}"
            ),
            "write its `xds_matcher` as in envoy/disaggregated-call.yaml, \
            or remove it to process every attempt",
        ));
    }
    let mut hosts = actives.iter().map(|active| active.host);
    let silent = hosts.find(|host| !host.flag("include_request_attempt_count"))?;
    let name = silent.text("name");
    Some(error(
        format!(
            "the virtual host {name} does not count attempts, so the first is mistaken for a retry"
        ),
        format!("in the virtual host `{name}` write `include_request_attempt_count: true`"),
    ))
}
