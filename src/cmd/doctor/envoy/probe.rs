//! The filter that looks for first tokens: harmless where it is right, and able to lose whole answers where it is not.

use std::time::Duration;

use super::parts::{Modes, body_mode};
use super::site::{Filter, Site};
use crate::cmd::doctor::finding::{At, Finding};
use crate::ext_proc::metadata::OURS;
use crate::ext_proc::service::{FILTER, PROBE, PROBED};

/// A frozen server may hold up every piece of an answer for so long.
const LONGEST: Duration = Duration::from_secs(1);

/// Every check of it.
pub(super) fn check(site: &Site<'_>) -> Vec<Finding> {
    let Some(probe) = &site.probe else {
        return lonely(site).into_iter().collect();
    };
    let checks = [
        order(site, probe),
        named(site, probe),
        sees(site, probe),
        manners(site, probe),
        namespaces(site, probe),
    ];
    checks
        .into_iter()
        .flatten()
        .chain(address(site, probe))
        .collect()
}

fn at(site: &Site<'_>, probe: &Filter) -> At {
    site.at_filter("envoy.probe", probe)
}

fn in_probe(site: &Site<'_>, probe: &Filter, text: &str) -> String {
    format!(
        "in the filter `{}` of listener `{}` write {text}",
        probe.name, site.server.listener
    )
}

/// The main filter speaks of a probe that is not there: then nobody sees first tokens.
fn lonely(site: &Site<'_>) -> Option<Finding> {
    (site.main.says() == Some(PROBED)).then(|| {
        site.at("envoy.probe").warning(
            format!("{FILTER}: {PROBED}, and there is no probe: nobody sees first tokens"),
            format!(
                "take {FILTER} out of the `initial_metadata` of the filter `{}`, or add the filter `first_token_probe` of \
                 envoy/standalone.yaml before it",
                site.main.name
            ),
        )
    })
}

fn order(site: &Site<'_>, probe: &Filter) -> Option<Finding> {
    let at = site.at_filter("envoy.probe_order", probe);
    Some(if probe.at < site.main.at {
        at.ok(format!("it stands before {}", site.main.name))
    } else {
        at.error(
            format!(
                "it stands behind {}: whole answers get lost, silently and with status 200",
                site.main.name
            ),
            format!(
                "in the `http_filters` of listener `{}` put `{}` before `{}`",
                site.server.listener, probe.name, site.main.name
            ),
        )
    })
}

fn named(site: &Site<'_>, probe: &Filter) -> Option<Finding> {
    let missing = |filter: &Filter, said: &str| {
        (filter.says() != Some(said)).then(|| (filter.name.clone(), said.to_owned()))
    };
    let (name, said) = missing(probe, PROBE).or_else(|| missing(&site.main, PROBED))?;
    Some(at(site, probe).warning(
        format!("the filter {name} does not tell us that it is the {said} of two: first tokens are looked for twice, or by nobody"),
        format!("in its `grpc_service` write `initial_metadata: [{{key: {FILTER}, value: {said}}}]`"),
    ))
}

fn sees(site: &Site<'_>, probe: &Filter) -> Option<Finding> {
    let Modes {
        response_body_mode,
        request_body_mode,
        ..
    } = &probe.config.processing_mode;
    let (response, request) = (body_mode(response_body_mode), body_mode(request_body_mode));
    if (response, request) == ("STREAMED", "NONE") {
        return None;
    }
    Some(at(site, probe).error(
        format!("request_body_mode: {request}, response_body_mode: {response}: it is to see the answer's pieces and nothing else"),
        in_probe(site, probe, "`request_body_mode: NONE` and `response_body_mode: STREAMED` under `processing_mode`"),
    ))
}

/// Answers must never depend on it, nor change by it.
fn manners(site: &Site<'_>, probe: &Filter) -> Option<Finding> {
    let config = &probe.config;
    let patience = config
        .message_timeout
        .map_or(Duration::from_millis(200), |given| given.0);
    let (seen, mend) = if !config.failure_mode_allow {
        (
            "failure_mode_allow: false: without us answers are cut".to_owned(),
            "`failure_mode_allow: true`",
        )
    } else if patience > LONGEST {
        let seen = format!(
            "message_timeout: {}: so long a frozen warmroute holds up answers",
            crate::settings::Period(patience)
        );
        (seen, "`message_timeout: 0.3s`")
    } else if !config.allow_content_length_header {
        let seen =
            "allow_content_length_header: false: answers in one piece lose their length".to_owned();
        (seen, "`allow_content_length_header: true`")
    } else {
        return Some(
            at(site, probe)
                .ok("it sees the first piece of each answer, and answers do not depend on it"),
        );
    };
    Some(at(site, probe).warning(seen, in_probe(site, probe, mend)))
}

/// Which exchange an answer belongs to travels from one filter to the other in the metadata.
fn namespaces(site: &Site<'_>, probe: &Filter) -> Option<Finding> {
    let main = site
        .variants()
        .iter()
        .all(|filter| filter.metadata_options.receiving_namespaces.has(OURS));
    let (filter, key) = if !main {
        (&site.main, "receiving_namespaces")
    } else if !probe
        .config
        .metadata_options
        .forwarding_namespaces
        .has(OURS)
    {
        (probe, "forwarding_namespaces")
    } else {
        return None;
    };
    Some(at(site, probe).warning(
        format!("the {key} of {} have no {OURS}: we cannot tell which exchange a first token belongs to", filter.name),
        in_probe(site, filter, &format!("`{OURS}` into `{key}: {{untyped: [..]}}` under `metadata_options`")),
    ))
}

fn address(site: &Site<'_>, probe: &Filter) -> Option<Finding> {
    let asks = probe.asks(site.dump);
    if asks.iter().any(|address| site.expected.is_ours(address)) {
        return None;
    }
    let asks = asks
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    let (words, text) = site.expected.listening();
    Some(at(site, probe).error(
        format!(
            "it asks {}, and we listen at {words}",
            if asks.is_empty() { "nobody" } else { &asks }
        ),
        format!(
            "in the endpoints of cluster `{}` write `{text}`",
            probe.cluster().unwrap_or("first_token_probe")
        ),
    ))
}
