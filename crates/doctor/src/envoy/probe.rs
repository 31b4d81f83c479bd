//! Checks of the first-token probe filter. A misconfigured probe can lose whole responses.

use std::time::Duration;

use warmroute_core::envoy_names::{FILTER_ROLE, PROBE_FILTER, PROBED_FILTER, WARMROUTE_NAMESPACE};
use warmroute_settings::DurationSetting;

use super::config_node::list;
use super::ext_proc_filter::ExtProcFilter;
use super::site::FilterSite;
use crate::finding::{CheckFacts, CheckVerdict, Finding, error, ok, row, run_checks, warning};

/// Maximum timeout. If warmroute is frozen, every chunk of a response is delayed by the timeout.
const MAX_PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// The probe with its site.
struct ProbeFacts<'s, 'd> {
    site: &'s FilterSite<'d>,
    probe: &'s ExtProcFilter,
}

impl CheckFacts for ProbeFacts<'_, '_> {
    fn subject(&self) -> String {
        format!("{}, filter {}", self.site.subject(), self.probe.name)
    }
}

impl ProbeFacts<'_, '_> {
    fn write_in(&self, filter: &ExtProcFilter, text: &str) -> String {
        let listener = &self.site.listener.name;
        format!(
            "in the filter `{}` of listener `{listener}` write {text}",
            filter.name
        )
    }
}

/// Returns the findings about the probe.
pub(super) fn check(site: &FilterSite<'_>) -> Vec<Finding> {
    let Some(probe) = &site.probe else {
        return run_checks(site, &[row("envoy.probe", check_missing_probe)]);
    };
    let rows = [
        row("envoy.probe_order", check_order),
        row("envoy.probe", check_metadata),
        row("envoy.probe", check_modes),
        row("envoy.probe", check_isolation),
        row("envoy.probe", check_namespaces),
        row("envoy.probe", check_address),
    ];
    run_checks(&ProbeFacts { site, probe }, &rows)
}

/// Reports a main filter that announces a probe that does not exist. First tokens are then not
/// detected.
fn check_missing_probe(site: &FilterSite<'_>) -> Option<CheckVerdict> {
    (site.main.declared_role() == Some(PROBED_FILTER)).then(|| {
        warning(
            format!(
                "{FILTER_ROLE}: {PROBED_FILTER}, \
                but there is no probe: first tokens are not detected"
            ),
            format!(
                "remove {FILTER_ROLE} from the `initial_metadata` of the filter `{}`, \
                or add the filter `first_token_probe` of envoy/standalone.yaml before it",
                site.main.name
            ),
        )
    })
}

fn check_order(at: &ProbeFacts<'_, '_>) -> Option<CheckVerdict> {
    let main = &at.site.main;
    let main_name = &main.name;
    if at.probe.index < main.index {
        return Some(ok(format!("it is before {main_name}")));
    }
    Some(error(
        format!("it is after {main_name}: whole responses get lost, silently and with status 200"),
        format!(
            "in the `http_filters` of listener `{}` move `{}` before `{main_name}`",
            at.site.listener.name, at.probe.name
        ),
    ))
}

fn check_metadata(at: &ProbeFacts<'_, '_>) -> Option<CheckVerdict> {
    let roles = [(at.probe, PROBE_FILTER), (&at.site.main, PROBED_FILTER)];
    let mut roles = roles.into_iter();
    let (filter, role) = roles.find(|(filter, role)| filter.declared_role() != Some(role))?;
    Some(warning(
        format!(
            "the filter {} does not announce its role `{role}`: first tokens are detected twice, \
            or not at all",
            filter.name
        ),
        format!(
            "in its `grpc_service` \
            write `initial_metadata: [{{key: {FILTER_ROLE}, value: {role}}}]`"
        ),
    ))
}

fn check_modes(at: &ProbeFacts<'_, '_>) -> Option<CheckVerdict> {
    let request = at.probe.config.mode("request_body_mode");
    let response = at.probe.config.mode("response_body_mode");
    if (response, request) == ("STREAMED", "NONE") {
        return None;
    }
    let fix =
        "`request_body_mode: NONE` and `response_body_mode: STREAMED` under `processing_mode`";
    Some(error(
        format!(
            "request_body_mode: {request}, response_body_mode: {response}: \
            it needs streamed response bodies and nothing else"
        ),
        at.write_in(at.probe, fix),
    ))
}

/// Checks that responses neither depend on the probe nor are changed by it.
fn check_isolation(at: &ProbeFacts<'_, '_>) -> Option<CheckVerdict> {
    let config = at.probe.config.node();
    let timeout = config.duration("message_timeout");
    let timeout = timeout.unwrap_or(Duration::from_millis(200));
    let (message, fix) = if !at.probe.config.allows_failure() {
        (
            "failure_mode_allow: false: responses are cut off without warmroute".to_owned(),
            "`failure_mode_allow: true`",
        )
    } else if timeout > MAX_PROBE_TIMEOUT {
        let message = format!(
            "message_timeout: {}: a frozen warmroute delays responses by this time",
            DurationSetting(timeout)
        );
        (message, "`message_timeout: 0.3s`")
    } else if !config.flag("allow_content_length_header") {
        let message =
            "allow_content_length_header: false: unary responses lose their content-length";
        (message.to_owned(), "`allow_content_length_header: true`")
    } else {
        return Some(ok(
            "it receives each response up to its first content, and responses do not depend on it",
        ));
    };
    Some(warning(message, at.write_in(at.probe, fix)))
}

/// Checks the metadata namespaces. The metadata passes the id of the exchange from one filter to
/// the other.
fn check_namespaces(at: &ProbeFacts<'_, '_>) -> Option<CheckVerdict> {
    let mut variants = at.site.variants().into_iter();
    let (filter, key) = if !variants.all(|filter| filter.receives(WARMROUTE_NAMESPACE)) {
        (&at.site.main, "receiving_namespaces")
    } else if !at.probe.config.forwards(WARMROUTE_NAMESPACE) {
        (at.probe, "forwarding_namespaces")
    } else {
        return None;
    };
    let fix =
        format!("`{WARMROUTE_NAMESPACE}` into `{key}: {{untyped: [..]}}` under `metadata_options`");
    Some(warning(
        format!(
            "the {key} of {} have no {WARMROUTE_NAMESPACE}: \
            warmroute cannot assign first tokens to exchanges",
            filter.name
        ),
        at.write_in(filter, &fix),
    ))
}

fn check_address(at: &ProbeFacts<'_, '_>) -> Option<CheckVerdict> {
    let expected = at.site.expected;
    let addresses = at.probe.addresses(at.site.dump);
    if addresses.iter().any(|address| expected.is_ours(address)) {
        return None;
    }
    let called = match addresses.is_empty() {
        true => "no server".to_owned(),
        false => list(&addresses),
    };
    let (listen, text) = expected.listen_text();
    let cluster = at.probe.config.cluster().unwrap_or("first_token_probe");
    Some(error(
        format!("it calls {called}, and warmroute listens at {listen}"),
        format!("in the endpoints of cluster `{cluster}` write `{text}`"),
    ))
}
