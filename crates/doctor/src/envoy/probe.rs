//! Checks of the first-token probe filter. A misconfigured probe can lose whole responses.

use std::time::Duration;

use warmroute_core::envoy_names::{FILTER_ROLE, PROBE_FILTER, PROBED_FILTER, WARMROUTE_NAMESPACE};

use super::schema::{ProcessingMode, body_mode};
use super::site::{ExtProcFilter, FilterSite};
use crate::finding::{Finding, FindingBuilder};

/// Maximum timeout. If warmroute is frozen, every chunk of a response is delayed by the timeout.
const MAX_PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Returns the findings about the probe.
pub(super) fn check(site: &FilterSite<'_>) -> Vec<Finding> {
    let Some(probe) = &site.probe else {
        return check_missing_probe(site).into_iter().collect();
    };
    let checks = [
        check_order(site, probe),
        check_metadata(site, probe),
        check_modes(site, probe),
        check_isolation(site, probe),
        check_namespaces(site, probe),
    ];
    checks
        .into_iter()
        .flatten()
        .chain(check_address(site, probe))
        .collect()
}

fn probe_check(site: &FilterSite<'_>, probe: &ExtProcFilter) -> FindingBuilder {
    site.filter_check("envoy.probe", probe)
}

fn in_probe_filter(site: &FilterSite<'_>, probe: &ExtProcFilter, text: &str) -> String {
    format!(
        "in the filter `{}` of listener `{}` write {text}",
        probe.name, site.listener.name
    )
}

/// Reports a main filter that announces a probe that does not exist. First tokens are then not
/// detected.
fn check_missing_probe(site: &FilterSite<'_>) -> Option<Finding> {
    (site.main.declared_kind() == Some(PROBED_FILTER)).then(|| {
        site.listener_check("envoy.probe").warning(
            format!("{FILTER_ROLE}: {PROBED_FILTER}, but there is no probe: first tokens are not detected"),
            format!(
                "remove {FILTER_ROLE} from the `initial_metadata` of the filter `{}`, or add the \
                filter `first_token_probe` of envoy/standalone.yaml before it",
                site.main.name
            ),
        )
    })
}

fn check_order(site: &FilterSite<'_>, probe: &ExtProcFilter) -> Option<Finding> {
    let at = site.filter_check("envoy.probe_order", probe);
    Some(if probe.index < site.main.index {
        at.ok(format!("it is before {}", site.main.name))
    } else {
        at.error(
            format!(
                "it is after {}: whole responses get lost, silently and with status 200",
                site.main.name
            ),
            format!(
                "in the `http_filters` of listener `{}` move `{}` before `{}`",
                site.listener.name, probe.name, site.main.name
            ),
        )
    })
}

fn check_metadata(site: &FilterSite<'_>, probe: &ExtProcFilter) -> Option<Finding> {
    let missing = |filter: &ExtProcFilter, role: &str| {
        (filter.declared_kind() != Some(role)).then(|| (filter.name.clone(), role.to_owned()))
    };
    let (name, role) =
        missing(probe, PROBE_FILTER).or_else(|| missing(&site.main, PROBED_FILTER))?;
    Some(probe_check(site, probe).warning(
        format!(
            "the filter {name} does not announce its role `{role}`: first tokens are detected \
        twice, or not at all"
        ),
        format!(
            "in its `grpc_service` write `initial_metadata: [{{key: {FILTER_ROLE}, value: {role}}}]`"
        ),
    ))
}

fn check_modes(site: &FilterSite<'_>, probe: &ExtProcFilter) -> Option<Finding> {
    let ProcessingMode {
        response_body_mode,
        request_body_mode,
        ..
    } = &probe.config.processing_mode;
    let response = body_mode(response_body_mode);
    let request = body_mode(request_body_mode);
    if (response, request) == ("STREAMED", "NONE") {
        return None;
    }
    Some(probe_check(site, probe).error(
        format!(
            "request_body_mode: {request}, response_body_mode: {response}: it needs streamed \
        response bodies and nothing else"
        ),
        in_probe_filter(
            site,
            probe,
            "`request_body_mode: NONE` and `response_body_mode: STREAMED` under `processing_mode`",
        ),
    ))
}

/// Checks that responses neither depend on the probe nor are changed by it.
fn check_isolation(site: &FilterSite<'_>, probe: &ExtProcFilter) -> Option<Finding> {
    let config = &probe.config;
    let timeout = config
        .message_timeout
        .map_or(Duration::from_millis(200), |given| given.0);
    let (message, fix) = if !config.failure_mode_allow {
        (
            "failure_mode_allow: false: responses are cut off without warmroute".to_owned(),
            "`failure_mode_allow: true`",
        )
    } else if timeout > MAX_PROBE_TIMEOUT {
        let message = format!(
            "message_timeout: {}: a frozen warmroute delays responses by this time",
            warmroute_settings::DurationSetting(timeout)
        );
        (message, "`message_timeout: 0.3s`")
    } else if !config.allow_content_length_header {
        let message = "allow_content_length_header: false: unary responses lose their \
            content-length"
            .to_owned();
        (message, "`allow_content_length_header: true`")
    } else {
        return Some(probe_check(site, probe).ok(
            "it receives each response up to its first content, and responses do not depend on \
                it",
        ));
    };
    Some(probe_check(site, probe).warning(message, in_probe_filter(site, probe, fix)))
}

/// Checks the metadata namespaces. The metadata passes the id of the exchange from one filter to
/// the other.
fn check_namespaces(site: &FilterSite<'_>, probe: &ExtProcFilter) -> Option<Finding> {
    let main = site.variants().iter().all(|filter| {
        filter
            .metadata_options
            .receiving_namespaces
            .contains(WARMROUTE_NAMESPACE)
    });
    let (filter, key) = if !main {
        (&site.main, "receiving_namespaces")
    } else if !probe
        .config
        .metadata_options
        .forwarding_namespaces
        .contains(WARMROUTE_NAMESPACE)
    {
        (probe, "forwarding_namespaces")
    } else {
        return None;
    };
    Some(probe_check(site, probe).warning(
        format!(
            "the {key} of {} have no {WARMROUTE_NAMESPACE}: warmroute cannot assign first tokens to \
        exchanges",
            filter.name
        ),
        in_probe_filter(
            site,
            filter,
            &format!("`{WARMROUTE_NAMESPACE}` into `{key}: {{untyped: [..]}}` under `metadata_options`"),
        ),
    ))
}

fn check_address(site: &FilterSite<'_>, probe: &ExtProcFilter) -> Option<Finding> {
    let addresses = probe.addresses(site.dump);
    if addresses
        .iter()
        .any(|address| site.expected.is_ours(address))
    {
        return None;
    }
    let addresses = addresses
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    let (listen, text) = site.expected.listen_text();
    Some(probe_check(site, probe).error(
        format!(
            "it calls {}, and warmroute listens at {listen}",
            if addresses.is_empty() {
                "no server"
            } else {
                &addresses
            }
        ),
        format!(
            "in the endpoints of cluster `{}` write `{text}`",
            probe.cluster().unwrap_or("first_token_probe")
        ),
    ))
}
