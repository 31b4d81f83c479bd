//! Compares KV event publishers with the configured event sources. It finds disabled publishers,
//! wrong endpoints, and sockets that both sides bind or both sides connect.

use warmroute_core::worker::{EventSource, SocketAttach};
use warmroute_engines::engine_client::RankEventSource;

use super::RankCheck;
use super::facts::{AttachOutcome, WorkerFacts};
use crate::finding::{CheckVerdict, Finding, error, ok, row, run_checks, skipped, warning};

/// Returns the findings about one rank's event source, except those from the canary.
pub(super) fn check(at: &RankCheck<'_>) -> Vec<Finding> {
    let rows = [
        row("events.configured", check_configured),
        row("events.published", check_published),
        row("events.attached", check_attachment),
        row("events.replay", check_replay),
    ];
    run_checks(at, &rows)
}

/// Returns the publisher of this rank that the engine reports.
fn find_publisher<'f>(at: &RankCheck<'f>) -> Option<&'f RankEventSource> {
    let mut publishers = at.worker.publishers.as_ref().ok()?.iter();
    publishers.find(|publisher| publisher.rank == at.rank.rank.0)
}

/// Returns whether the engine reports that this rank publishes nothing.
pub(super) fn publishes_nothing(at: &RankCheck<'_>) -> bool {
    let has_none = at.worker.publishers.as_ref().is_ok_and(Vec::is_empty);
    find_publisher(at).map_or(has_none, |publisher| !publisher.enabled)
}

/// Returns the engine flag that makes it publish at the configured endpoint.
pub(super) fn kv_events_flag(source: &EventSource) -> String {
    let is_tcp = source.endpoint.starts_with("tcp://");
    let endpoint = match (source.attach, is_tcp) {
        (SocketAttach::Connect, true) => format!("tcp://*:{}", port_of(&source.endpoint)),
        (SocketAttach::Bind, _) | (SocketAttach::Connect, false) => source.endpoint.clone(),
    };
    let replay = source
        .replay
        .as_ref()
        .and_then(|replay| replay.rsplit_once(':'));
    let replay = replay.map_or(String::new(), |(_, port)| {
        format!(", \"replay_endpoint\": \"tcp://*:{port}\"")
    });
    format!(
        "--kv-events-config '{{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \
        \"endpoint\": \"{endpoint}\", \"topic\": \"{}\"{replay}}}'",
        source.topic
    )
}

/// Returns the port of an endpoint; without one, the default of vLLM.
fn port_of(endpoint: &str) -> &str {
    endpoint.rsplit_once(':').map_or("5557", |(_, port)| port)
}

/// Returns the fix that starts the engine with the configured event source.
fn start_fix(source: &EventSource) -> String {
    format!("start the engine with `{}`", kv_events_flag(source))
}

/// Converts an endpoint of the engine to the form in the configuration.
fn to_config_endpoint(facts: &WorkerFacts, theirs: &str) -> String {
    let host = facts.worker.endpoint.0.ip();
    let host = if host.is_ipv6() {
        format!("[{host}]")
    } else {
        host.to_string()
    };
    let mut wildcards = ["*", "0.0.0.0", "[::]", "::"].into_iter();
    let port = wildcards.find_map(|any| theirs.strip_prefix(&format!("tcp://{any}:")));
    port.map_or(theirs.to_owned(), |port| format!("tcp://{host}:{port}"))
}

/// Returns the `kv_events` setting for an endpoint of the engine.
fn setting_of(facts: &WorkerFacts, key: &str, theirs: &str) -> String {
    facts.kv_events_setting(key, &to_config_endpoint(facts, theirs))
}

/// Returns the fix that writes a `kv_events` setting for an endpoint of the engine.
fn write_fix(facts: &WorkerFacts, key: &str, theirs: &str) -> String {
    let setting = setting_of(facts, key, theirs);
    format!(
        "write `{setting}` in the `kv_events` of {}",
        facts.config_section()
    )
}

/// Returns whether vLLM binds an endpoint of this form; otherwise it connects.
fn is_bind_endpoint(endpoint: &str) -> bool {
    let mut signs = ["*", "::", "ipc://", "inproc://"].into_iter();
    signs.any(|sign| endpoint.contains(sign))
}

fn check_configured(at: &RankCheck<'_>) -> Option<CheckVerdict> {
    let facts = at.worker;
    let section = facts.config_section();
    if let Some(source) = &at.rank.source {
        return facts.has_discovered_sources.then(|| {
            ok(format!(
                "not configured; the engine reports that it publishes at {}",
                source.endpoint
            ))
        });
    }
    let Some(publisher) = find_publisher(at).filter(|publisher| publisher.enabled) else {
        return Some(warning(
            "no KV events: its cache is predicted from the routed requests",
            format!(
                "start the engine with \
                `--kv-events-config '{{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \
                \"endpoint\": \"tcp://*:5557\", \"replay_endpoint\": \"tcp://*:5558\"}}'`, \
                and write `kv_events: {{{}, {}}}` for {section}",
                setting_of(facts, "endpoint", "tcp://*:5557"),
                setting_of(facts, "replay_endpoint", "tcp://*:5558")
            ),
        ));
    };
    let RankEventSource {
        endpoint, topic, ..
    } = publisher;
    let attach = if is_bind_endpoint(endpoint) {
        ""
    } else {
        ", attach: bind"
    };
    let replay = publisher.replay_endpoint.as_ref();
    let replay = replay.map(|replay| format!(", {}", setting_of(facts, "replay_endpoint", replay)));
    Some(warning(
        format!(
            "the engine publishes its events at {endpoint}, \
            and the configuration has no `kv_events` for it"
        ),
        format!(
            "write `kv_events: {{{}, topic: \"{topic}\"{attach}{}}}` for {section}",
            setting_of(facts, "endpoint", endpoint),
            replay.unwrap_or_default()
        ),
    ))
}

fn check_published(at: &RankCheck<'_>) -> Option<CheckVerdict> {
    let source = at.rank.source.as_ref().filter(|_| publishes_nothing(at))?;
    let message = format!(
        "the engine reports that it publishes no KV events, and warmroute listens at {}",
        source.endpoint
    );
    Some(error(message, start_fix(source)))
}

fn check_attachment(at: &RankCheck<'_>) -> Option<CheckVerdict> {
    let source = at.rank.source.as_ref().filter(|_| !publishes_nothing(at))?;
    let facts = at.worker;
    let endpoint = &source.endpoint;
    let connect = |endpoint: &str| {
        let setting = facts.kv_events_setting("endpoint", endpoint);
        let section = facts.config_section();
        format!("write `attach: connect` and `{setting}` in the `kv_events` of {section}")
    };
    Some(match at.rank.attachment.as_ref()? {
        AttachOutcome::Attached(SocketAttach::Connect) => ok(format!("connected to {endpoint}")),
        AttachOutcome::Attached(SocketAttach::Bind) => {
            ok(format!("the engine connected to {endpoint}"))
        }
        AttachOutcome::ConnectRefused(why) => judge_refused_connection(at, source, why),
        AttachOutcome::BindRefused(why) => skipped(format!(
            "{endpoint} cannot be bound ({why}): a running warmroute, or another program, uses it; \
            /debug/fleet shows the events that warmroute receives"
        )),
        AttachOutcome::EngineMayBind(other) if at.rank.messages.is_empty() => skipped(format!(
            "{endpoint} cannot be bound, and {other} accepts connections but sent no message: \
            a running warmroute or the engine uses it"
        )),
        AttachOutcome::EngineMayBind(other) | AttachOutcome::EngineBinds(other) => error(
            format!(
                "both sides bind: warmroute at {endpoint} (`attach: bind`), the engine at {other}"
            ),
            connect(other),
        ),
        AttachOutcome::NoPeer => error(
            format!(
                "`attach: bind`: no engine connected to {endpoint} within {:?}",
                at.rank.listen_timeout
            ),
            format!(
                "start the engine with the endpoint of this machine, without `*`, \
                so that it connects: `{}`; or, if the engine binds, {}",
                kv_events_flag(source),
                connect(&to_config_endpoint(
                    facts,
                    &format!("tcp://*:{}", port_of(endpoint))
                ))
            ),
        ),
    })
}

/// Explains a refused connection. Most often vLLM connects instead of binding, because its endpoint
/// has no wildcard.
fn judge_refused_connection(at: &RankCheck<'_>, source: &EventSource, why: &str) -> CheckVerdict {
    let facts = at.worker;
    let message = format!("no publisher listens at {} ({why})", source.endpoint);
    let theirs = find_publisher(at).map(|publisher| publisher.endpoint.as_str());
    let theirs = theirs.filter(|theirs| !theirs.is_empty());
    if let Some(theirs) = theirs.filter(|theirs| is_bind_endpoint(theirs)) {
        let message = format!("{message}; the engine publishes at {theirs}");
        return error(message, write_fix(facts, "endpoint", theirs));
    }
    let section = facts.config_section();
    let (message, or) = match theirs {
        Some(theirs) => {
            let listed = if facts.has_discovered_sources {
                format!(
                    "`kv_events: {{endpoint: \"{theirs}\", topic: \"{}\", attach: bind}}`",
                    source.topic
                )
            } else {
                "`attach: bind` in the `kv_events`".to_owned()
            };
            let message = format!(
                "{message}; the engine's endpoint is {theirs}, and vLLM connects unless \
                its endpoint contains `*` or `::`: both sides connect and neither binds"
            );
            (message, format!(", or write {listed} of {section}"))
        }
        None => {
            let message = format!(
                "{message}; vLLM connects unless its endpoint contains `*` or `::`: \
                then both sides connect and neither binds"
            );
            let or = format!(
                "; or, if the engine should connect, \
                write `attach: bind` in the `kv_events` of {section}"
            );
            (message, or)
        }
    };
    // Pods are configured with ports only.
    let or = if facts.is_pod() { String::new() } else { or };
    error(message, format!("{}{or}", start_fix(source)))
}

fn check_replay(at: &RankCheck<'_>) -> Option<CheckVerdict> {
    const LOST: &str = "lost batches stay lost, \
        and blocks cached before warmroute started stay invisible";
    let facts = at.worker;
    let source = at.rank.source.as_ref()?;
    let theirs = find_publisher(at).and_then(|publisher| publisher.replay_endpoint.as_deref());
    let Some(ours) = &source.replay else {
        return Some(match theirs {
            Some(theirs) => warning(
                format!(
                    "the engine replays lost batches at {theirs}, \
                    but no replay endpoint is configured"
                ),
                write_fix(facts, "replay_endpoint", theirs),
            ),
            None => {
                let endpoint = "tcp://*:5558";
                let replay = Some(endpoint.to_owned());
                let with_replay = EventSource {
                    replay,
                    ..source.clone()
                };
                let write = write_fix(facts, "replay_endpoint", endpoint);
                warning(
                    format!("no replay endpoint: {LOST}"),
                    format!("{}, and {write}", start_fix(&with_replay)),
                )
            }
        });
    };
    if at.rank.replay?.is_some() {
        return Some(ok(format!("{ours} responds")));
    }
    let other = theirs.filter(|theirs| to_config_endpoint(facts, theirs) != *ours);
    Some(match other {
        Some(theirs) => error(
            format!(
                "{ours} does not respond, and the engine's replay endpoint is {theirs}: \
                lost batches stay lost"
            ),
            write_fix(facts, "replay_endpoint", theirs),
        ),
        None => error(
            format!("{ours} does not respond: {LOST}"),
            format!(
                "{}, or remove `replay_endpoint` from {}",
                start_fix(source),
                facts.config_section()
            ),
        ),
    })
}
