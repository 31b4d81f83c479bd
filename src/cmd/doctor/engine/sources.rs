//! Where events are published against where we listen: what is off, what is in the wrong place, and the trap of two sides
//! that both wait, or both call.

use super::facts::{Attached, RankFacts, WorkerFacts, WorkerOrigin};
use crate::cmd::doctor::finding::{At, Finding};
use crate::engine_client::EventsOfRank;
use crate::worker::{Attach, EventSource};

/// Every check of one rank's source; what the canary brought is looked at elsewhere.
pub(super) fn check(facts: &WorkerFacts, rank: &RankFacts) -> Vec<Finding> {
    let publisher = publisher(facts, rank);
    match &rank.source {
        None => vec![unlisted(facts, rank, publisher)],
        Some(source) => {
            let learned = facts.sources_learned.then(|| {
                let at = At::new("events.configured", facts.rank_subject(rank.rank));
                at.ok(format!(
                    "not configured; the engine tells that it publishes at {}",
                    source.endpoint
                ))
            });
            let checks = [
                learned,
                attached(facts, rank, source, publisher),
                replay(facts, rank, source, publisher),
            ];
            checks.into_iter().flatten().collect()
        }
    }
}

/// What the engine says of where this rank publishes.
pub(super) fn publisher<'f>(facts: &'f WorkerFacts, rank: &RankFacts) -> Option<&'f EventsOfRank> {
    let publishers = facts.publishers.as_ref().ok()?;
    publishers
        .iter()
        .find(|publisher| publisher.rank == rank.rank.0)
}

/// Whether the engine says that it publishes nothing.
pub(super) fn silent(facts: &WorkerFacts, rank: &RankFacts) -> bool {
    match (&facts.publishers, publisher(facts, rank)) {
        (Ok(_), Some(publisher)) => !publisher.enabled,
        (Ok(publishers), None) => publishers.is_empty(),
        (Err(_), _) => false,
    }
}

/// How an engine is started so that it publishes where we listen.
pub(super) fn flag(source: &EventSource) -> String {
    let port = source
        .endpoint
        .rsplit_once(':')
        .map_or("5557", |(_, port)| port);
    let endpoint = match (source.attach, source.endpoint.starts_with("tcp://")) {
        (Attach::Connect, true) => format!("tcp://*:{port}"),
        (Attach::Bind, _) | (Attach::Connect, false) => source.endpoint.clone(),
    };
    let replay = source
        .replay
        .as_ref()
        .and_then(|replay| replay.rsplit_once(':'))
        .map_or(String::new(), |(_, port)| {
            format!(", \"replay_endpoint\": \"tcp://*:{port}\"")
        });
    format!(
        "--kv-events-config '{{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \"endpoint\": \"{endpoint}\", \
         \"topic\": \"{}\"{replay}}}'",
        source.topic
    )
}

/// The endpoint that the engine names, as we would write it.
fn as_we_write(facts: &WorkerFacts, theirs: &str) -> String {
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

/// Whether vLLM listens at an endpoint that is written so; else it connects there.
fn binds(endpoint: &str) -> bool {
    ["*", "::", "ipc://", "inproc://"]
        .iter()
        .any(|sign| endpoint.contains(sign))
}

fn unlisted(facts: &WorkerFacts, rank: &RankFacts, publisher: Option<&EventsOfRank>) -> Finding {
    let at = At::new("events.configured", facts.rank_subject(rank.rank));
    let section = facts.section();
    match publisher.filter(|publisher| publisher.enabled) {
        Some(EventsOfRank { endpoint, replay_endpoint, topic, .. }) => {
            let attach = if binds(endpoint) { "" } else { ", attach: bind" };
            let replay = replay_endpoint.as_ref();
            let replay = replay.map(|replay| format!(", {}", facts.events_setting("replay", &as_we_write(facts, replay))));
            at.warning(
                format!("the engine publishes its events at {endpoint}, and our configuration has no `kv_events` for it"),
                format!(
                    "write `kv_events: {{{}, topic: \"{topic}\"{attach}{}}}` for {section}",
                    facts.events_setting("endpoint", &as_we_write(facts, endpoint)),
                    replay.unwrap_or_default()
                ),
            )
        }
        None => at.warning(
            "no KV events: what its cache holds is guessed from what was sent to it",
            format!(
                "start the engine with `--kv-events-config '{{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \"endpoint\": \
                 \"tcp://*:5557\", \"replay_endpoint\": \"tcp://*:5558\"}}'`, and write `kv_events: {{{}, {}}}` for {section}",
                facts.events_setting("endpoint", &as_we_write(facts, "tcp://*:5557")),
                facts.events_setting("replay", &as_we_write(facts, "tcp://*:5558"))
            ),
        ),
    }
}

fn attached(
    facts: &WorkerFacts,
    rank: &RankFacts,
    source: &EventSource,
    publisher: Option<&EventsOfRank>,
) -> Option<Finding> {
    let at = At::new("events.attached", facts.rank_subject(rank.rank));
    let section = facts.section();
    if silent(facts, rank) {
        return Some(
            At::new("events.published", facts.rank_subject(rank.rank)).error(
                format!(
                    "the engine says that it publishes no KV events, and we listen at {}",
                    source.endpoint
                ),
                format!("start the engine with `{}`", flag(source)),
            ),
        );
    }
    let connect = |endpoint: &str| {
        let setting = facts.events_setting("endpoint", endpoint);
        format!("write `attach: connect` and `{setting}` in the `kv_events` of {section}")
    };
    let endpoint = &source.endpoint;
    Some(match rank.attached.as_ref()? {
        Attached::As(Attach::Connect) => at.ok(format!("connected to {endpoint}")),
        Attached::As(Attach::Bind) => at.ok(format!("the engine connected to {endpoint}")),
        Attached::Refused(why) => refused(facts, at, (source, why), publisher),
        Attached::Taken(why) => at.skipped(format!(
            "{endpoint} cannot be bound ({why}): a running warmroute, or another program, has it; what warmroute hears there it \
             shows at /debug/fleet"
        )),
        Attached::Connectable(other) if rank.heard.is_empty() => at.skipped(format!(
            "{endpoint} cannot be bound, and {other} can be connected to, where nothing was heard: a running warmroute has it, or \
             the engine"
        )),
        Attached::Connectable(other) | Attached::Elsewhere(other) => at.error(
            format!("both sides bind: `attach: bind` waits at {endpoint}, and the engine waits at {other}"),
            connect(other),
        ),
        Attached::Nobody => at.error(
            format!("`attach: bind`: no engine connected to {endpoint} within {:?}", rank.patience),
            format!(
                "start the engine with the endpoint of this machine, without `*`, so that it connects: `{}`; or, where the engine \
                 binds, {}",
                flag(source),
                connect(&as_we_write(facts, &format!("tcp://*:{}", endpoint.rsplit(':').next().unwrap_or("5557"))))
            ),
        ),
    })
}

/// Nobody listens where we connect: the commonest mistake with vLLM, which connects unless its endpoint has a wildcard.
fn refused(
    facts: &WorkerFacts,
    at: At,
    (source, why): (&EventSource, &str),
    publisher: Option<&EventsOfRank>,
) -> Finding {
    let (section, endpoint) = (facts.section(), &source.endpoint);
    let seen = format!("nobody listens at {endpoint} ({why})");
    let theirs = publisher
        .map(|publisher| publisher.endpoint.as_str())
        .filter(|theirs| !theirs.is_empty());
    match theirs {
        Some(theirs) if binds(theirs) => at.error(
            format!("{seen}; the engine publishes at {theirs}"),
            format!(
                "write `{}` in the `kv_events` of {section}",
                facts.events_setting("endpoint", &as_we_write(facts, theirs))
            ),
        ),
        Some(theirs) => {
            let listed = match facts.sources_learned {
                true => format!("`kv_events: {{endpoint: \"{theirs}\", topic: \"{}\", attach: bind}}`", source.topic),
                false => "`attach: bind` in the `kv_events`".to_owned(),
            };
            at.error(
                format!(
                    "{seen}; the engine was told {theirs}, and vLLM connects unless its endpoint holds `*` or `::`: both sides \
                     wait for the other to listen"
                ),
                match facts.origin {
                    WorkerOrigin::Listed => {
                        format!("start the engine with `{}`, or write {listed} of {section}", flag(source))
                    }
                    WorkerOrigin::Pod { .. } => format!("start the engine with `{}`", flag(source)),
                },
            )
        }
        None => at.error(
            format!("{seen}; vLLM connects unless its endpoint holds `*` or `::`, and then both sides call and nobody listens"),
            match facts.origin {
                WorkerOrigin::Listed => format!(
                    "start the engine with `{}`; or, where the engine is to connect, write `attach: bind` in the `kv_events` of {section}",
                    flag(source)
                ),
                WorkerOrigin::Pod { .. } => format!("start the engine with `{}`", flag(source)),
            },
        ),
    }
}

fn replay(
    facts: &WorkerFacts,
    rank: &RankFacts,
    source: &EventSource,
    publisher: Option<&EventsOfRank>,
) -> Option<Finding> {
    let at = At::new("events.replay", facts.rank_subject(rank.rank));
    let section = facts.section();
    let theirs = publisher.and_then(|publisher| publisher.replay_endpoint.as_deref());
    match (&source.replay, rank.replay, theirs) {
        (Some(ours), Some(Some(_)), _) => Some(at.ok(format!("{ours} answers"))),
        (Some(ours), Some(None), Some(theirs)) if as_we_write(facts, theirs) != *ours => Some(at.error(
            format!("{ours} does not answer, and the engine's replay endpoint is {theirs}: lost batches stay lost"),
            format!(
                "write `{}` in the `kv_events` of {section}",
                facts.events_setting("replay", &as_we_write(facts, theirs))
            ),
        )),
        (Some(ours), Some(None), _) => Some(at.error(
            format!("{ours} does not answer: batches that get lost stay lost, and so does everything before our start"),
            format!("start the engine with `{}`, or take `replay` away from {section}", flag(source)),
        )),
        (Some(_), None, _) => None,
        (None, _, Some(theirs)) => Some(at.warning(
            format!("the engine repeats lost batches at {theirs}, and nobody asks it"),
            format!(
                "write `{}` in the `kv_events` of {section}",
                facts.events_setting("replay", &as_we_write(facts, theirs))
            ),
        )),
        (None, ..) => {
            let with = EventSource { replay: Some("tcp://*:5558".to_owned()), ..source.clone() };
            let ours = as_we_write(facts, "tcp://*:5558");
            Some(at.warning(
                "no replay endpoint: batches that get lost stay lost, and so does everything before our start",
                format!(
                    "start the engine with `{}`, and write `{}` in the `kv_events` of {section}",
                    flag(&with),
                    facts.events_setting("replay", &ours)
                ),
            ))
        }
    }
}
