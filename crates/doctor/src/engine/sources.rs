//! Compares KV event publishers with the configured event sources. It finds disabled publishers,
//! wrong endpoints, and sockets that both sides bind or both sides connect.

use warmroute_core::worker::{EventSource, SocketAttach};
use warmroute_engines::engine_client::RankEventSource;

use super::facts::{AttachOutcome, RankFacts, WorkerFacts, WorkerOrigin};
use crate::finding::{Finding, FindingBuilder};

/// Returns the findings about one rank's event source, except those from the canary.
pub(super) fn check(facts: &WorkerFacts, rank: &RankFacts) -> Vec<Finding> {
    let publisher = find_publisher(facts, rank);
    match &rank.source {
        None => vec![check_unlisted(facts, rank, publisher)],
        Some(source) => {
            let discovered = facts.has_discovered_sources.then(|| {
                let at = FindingBuilder::new("events.configured", facts.rank_subject(rank.rank));
                at.ok(format!(
                    "not configured; the engine reports that it publishes at {}",
                    source.endpoint
                ))
            });
            let checks = [
                discovered,
                check_attachment(facts, rank, source, publisher),
                check_replay(facts, rank, source, publisher),
            ];
            checks.into_iter().flatten().collect()
        }
    }
}

/// Returns the publisher of this rank that the engine reports.
pub(super) fn find_publisher<'f>(
    facts: &'f WorkerFacts,
    rank: &RankFacts,
) -> Option<&'f RankEventSource> {
    let publishers = facts.publishers.as_ref().ok()?;
    publishers
        .iter()
        .find(|publisher| publisher.rank == rank.rank.0)
}

/// Returns whether the engine reports that this rank publishes nothing.
pub(super) fn publishes_nothing(facts: &WorkerFacts, rank: &RankFacts) -> bool {
    match (&facts.publishers, find_publisher(facts, rank)) {
        (Ok(_), Some(publisher)) => !publisher.enabled,
        (Ok(publishers), None) => publishers.is_empty(),
        (Err(_), _) => false,
    }
}

/// Returns the engine flag that makes it publish at the configured endpoint.
pub(super) fn kv_events_flag(source: &EventSource) -> String {
    let port = source
        .endpoint
        .rsplit_once(':')
        .map_or("5557", |(_, port)| port);
    let endpoint = match (source.attach, source.endpoint.starts_with("tcp://")) {
        (SocketAttach::Connect, true) => format!("tcp://*:{port}"),
        (SocketAttach::Bind, _) | (SocketAttach::Connect, false) => source.endpoint.clone(),
    };
    let replay = source
        .replay
        .as_ref()
        .and_then(|replay| replay.rsplit_once(':'))
        .map_or(String::new(), |(_, port)| {
            format!(", \"replay_endpoint\": \"tcp://*:{port}\"")
        });
    format!(
        "--kv-events-config '{{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \
        \"endpoint\": \"{endpoint}\", \
         \"topic\": \"{}\"{replay}}}'",
        source.topic
    )
}

/// Converts an endpoint of the engine to the form in the configuration.
fn to_config_endpoint(facts: &WorkerFacts, theirs: &str) -> String {
    let host = facts.worker.endpoint.0.ip();
    let host = if host.is_ipv6() {
        format!("[{host}]")
    } else {
        host.to_string()
    };
    ["*", "0.0.0.0", "[::]", "::"]
        .iter()
        .find_map(|any| theirs.strip_prefix(&format!("tcp://{any}:")))
        .map_or(theirs.to_owned(), |port| format!("tcp://{host}:{port}"))
}

/// Returns whether vLLM binds an endpoint of this form; otherwise it connects.
fn is_bind_endpoint(endpoint: &str) -> bool {
    ["*", "::", "ipc://", "inproc://"]
        .iter()
        .any(|sign| endpoint.contains(sign))
}

fn check_unlisted(
    facts: &WorkerFacts,
    rank: &RankFacts,
    publisher: Option<&RankEventSource>,
) -> Finding {
    let at = FindingBuilder::new("events.configured", facts.rank_subject(rank.rank));
    let section = facts.config_section();
    match publisher.filter(|publisher| publisher.enabled) {
        Some(RankEventSource { endpoint, replay_endpoint, topic, .. }) => {
            let attach = if is_bind_endpoint(endpoint) { "" } else { ", attach: bind" };
            let replay = replay_endpoint.as_ref();
            let replay = replay.map(|replay| format!(", {}", facts.kv_events_setting("replay_endpoint", &to_config_endpoint(facts, replay))));
            at.warning(
                format!("the engine publishes its events at {endpoint}, and the configuration has \
                no `kv_events` for it"),
                format!(
                    "write `kv_events: {{{}, topic: \"{topic}\"{attach}{}}}` for {section}",
                    facts.kv_events_setting("endpoint", &to_config_endpoint(facts, endpoint)),
                    replay.unwrap_or_default()
                ),
            )
        }
        None => at.warning(
            "no KV events: its cache is predicted from the routed requests",
            format!(
                "start the engine with `--kv-events-config '{{\"enable_kv_cache_events\": true, \
                \"publisher\": \"zmq\", \"endpoint\": \
                 \"tcp://*:5557\", \"replay_endpoint\": \"tcp://*:5558\"}}'`, and write `kv_events: {{{}, {}}}` for {section}",
                facts.kv_events_setting("endpoint", &to_config_endpoint(facts, "tcp://*:5557")),
                facts.kv_events_setting("replay_endpoint", &to_config_endpoint(facts, "tcp://*:5558"))
            ),
        ),
    }
}

fn check_attachment(
    facts: &WorkerFacts,
    rank: &RankFacts,
    source: &EventSource,
    publisher: Option<&RankEventSource>,
) -> Option<Finding> {
    let at = FindingBuilder::new("events.attached", facts.rank_subject(rank.rank));
    let section = facts.config_section();
    if publishes_nothing(facts, rank) {
        return Some(
            FindingBuilder::new("events.published", facts.rank_subject(rank.rank)).error(
                format!(
                    "the engine reports that it publishes no KV events, and warmroute listens at \
                    {}",
                    source.endpoint
                ),
                format!("start the engine with `{}`", kv_events_flag(source)),
            ),
        );
    }
    let connect = |endpoint: &str| {
        let setting = facts.kv_events_setting("endpoint", endpoint);
        format!("write `attach: connect` and `{setting}` in the `kv_events` of {section}")
    };
    let endpoint = &source.endpoint;
    Some(match rank.attachment.as_ref()? {
        AttachOutcome::Attached(SocketAttach::Connect) => at.ok(format!("connected to {endpoint}")),
        AttachOutcome::Attached(SocketAttach::Bind) => {
            at.ok(format!("the engine connected to {endpoint}"))
        }
        AttachOutcome::ConnectRefused(why) => connect_refused(facts, at, source, why, publisher),
        AttachOutcome::BindRefused(why) => at.skipped(format!(
            "{endpoint} cannot be bound ({why}): a running warmroute, or another program, uses \
            it; /debug/fleet shows the events that warmroute receives"
        )),
        AttachOutcome::EngineMayBind(other) if rank.messages.is_empty() => at.skipped(format!(
            "{endpoint} cannot be bound, and {other} accepts connections but sent no message: a \
            running warmroute or the engine uses it"
        )),
        AttachOutcome::EngineMayBind(other) | AttachOutcome::EngineBinds(other) => at.error(
            format!(
                "both sides bind: warmroute at {endpoint} (`attach: bind`), the engine at \
            {other}"
            ),
            connect(other),
        ),
        AttachOutcome::NoPeer => at.error(
            format!(
                "`attach: bind`: no engine connected to {endpoint} within {:?}",
                rank.listen_timeout
            ),
            format!(
                "start the engine with the endpoint of this machine, without `*`, so that it \
                connects: `{}`; or, if the engine binds, {}",
                kv_events_flag(source),
                connect(&to_config_endpoint(
                    facts,
                    &format!("tcp://*:{}", endpoint.rsplit(':').next().unwrap_or("5557"))
                ))
            ),
        ),
    })
}

/// Explains a refused connection. Most often vLLM connects instead of binding, because its endpoint
/// has no wildcard.
fn connect_refused(
    facts: &WorkerFacts,
    at: FindingBuilder,
    source: &EventSource,
    why: &str,
    publisher: Option<&RankEventSource>,
) -> Finding {
    let section = facts.config_section();
    let endpoint = &source.endpoint;
    let message = format!("no publisher listens at {endpoint} ({why})");
    let theirs = publisher
        .map(|publisher| publisher.endpoint.as_str())
        .filter(|theirs| !theirs.is_empty());
    match theirs {
        Some(theirs) if is_bind_endpoint(theirs) => at.error(
            format!("{message}; the engine publishes at {theirs}"),
            format!(
                "write `{}` in the `kv_events` of {section}",
                facts.kv_events_setting("endpoint", &to_config_endpoint(facts, theirs))
            ),
        ),
        Some(theirs) => {
            let listed = if facts.has_discovered_sources {
                format!(
                    "`kv_events: {{endpoint: \"{theirs}\", topic: \"{}\", attach: bind}}`",
                    source.topic
                )
            } else {
                "`attach: bind` in the `kv_events`".to_owned()
            };
            at.error(
                format!(
                    "{message}; the engine's endpoint is {theirs}, and vLLM connects unless its \
                    endpoint contains `*` or `::`: both sides connect and neither binds"
                ),
                match facts.origin {
                    WorkerOrigin::Listed => {
                        format!(
                            "start the engine with `{}`, or write {listed} of {section}",
                            kv_events_flag(source)
                        )
                    }
                    WorkerOrigin::Pod { .. } => {
                        format!("start the engine with `{}`", kv_events_flag(source))
                    }
                },
            )
        }
        None => at.error(
            format!(
                "{message}; vLLM connects unless its endpoint contains `*` or `::`: then both \
            sides connect and neither binds"
            ),
            match facts.origin {
                WorkerOrigin::Listed => format!(
                    "start the engine with `{}`; or, if the engine should connect, write `attach: \
                    bind` in the `kv_events` of {section}",
                    kv_events_flag(source)
                ),
                WorkerOrigin::Pod { .. } => {
                    format!("start the engine with `{}`", kv_events_flag(source))
                }
            },
        ),
    }
}

fn check_replay(
    facts: &WorkerFacts,
    rank: &RankFacts,
    source: &EventSource,
    publisher: Option<&RankEventSource>,
) -> Option<Finding> {
    let at = FindingBuilder::new("events.replay", facts.rank_subject(rank.rank));
    let section = facts.config_section();
    let theirs = publisher.and_then(|publisher| publisher.replay_endpoint.as_deref());
    match (&source.replay, rank.replay, theirs) {
        (Some(ours), Some(Some(_)), _) => Some(at.ok(format!("{ours} responds"))),
        (Some(ours), Some(None), Some(theirs)) if to_config_endpoint(facts, theirs) != *ours => {
            Some(at.error(
                format!(
                    "{ours} does not respond, and the engine's replay endpoint is {theirs}: lost \
            batches stay lost"
                ),
                format!(
                    "write `{}` in the `kv_events` of {section}",
                    facts.kv_events_setting("replay_endpoint", &to_config_endpoint(facts, theirs))
                ),
            ))
        }
        (Some(ours), Some(None), _) => Some(at.error(
            format!(
                "{ours} does not respond: lost batches stay lost, and blocks cached before \
            warmroute started stay invisible"
            ),
            format!(
                "start the engine with `{}`, or remove `replay_endpoint` from {section}",
                kv_events_flag(source)
            ),
        )),
        (Some(_), None, _) => None,
        (None, _, Some(theirs)) => Some(at.warning(
            format!(
                "the engine replays lost batches at {theirs}, but no replay endpoint is configured"
            ),
            format!(
                "write `{}` in the `kv_events` of {section}",
                facts.kv_events_setting("replay_endpoint", &to_config_endpoint(facts, theirs))
            ),
        )),
        (None, ..) => {
            let with = EventSource {
                replay: Some("tcp://*:5558".to_owned()),
                ..source.clone()
            };
            let ours = to_config_endpoint(facts, "tcp://*:5558");
            Some(at.warning(
                "no replay endpoint: lost batches stay lost, and blocks cached before warmroute \
                started stay invisible",
                format!(
                    "start the engine with `{}`, and write `{}` in the `kv_events` of {section}",
                    kv_events_flag(&with),
                    facts.kv_events_setting("replay_endpoint", &ours)
                ),
            ))
        }
    }
}
