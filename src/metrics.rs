//! Every metric of warmroute, defined once: name, type, labels, unit and meaning. No global registry; the composition
//! root makes one [`Metrics`] and hands it to whoever measures. Names here carry the prefix `warmroute_` on the page,
//! counters the suffix `_total`.

mod format;
mod labels;
mod zero;

use std::sync::Mutex;

use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets, linear_buckets};
use prometheus_client::registry::{Metric, Registry};

pub use format::TextFormat;
pub use labels::*;
pub use zero::KnownLabels;

/// A family of histograms; the constructor is a plain function pointer so that the type can be named.
pub type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

macro_rules! metrics {
    ($( $(#[doc = $help:literal])+ $field:ident : $type:ty = $make:expr ; )+) => {
        /// The measures of one process.
        pub struct Metrics {
            registry: Mutex<Registry>,
            $( $(#[doc = $help])+ pub $field: $type, )+
        }

        impl Metrics {
            /// All measures at zero.
            pub fn new() -> Self {
                let mut registry = Registry::with_prefix("warmroute");
                $( let $field: $type = $make; )+
                $( register(&mut registry, stringify!($field), concat!($($help),+), $field.clone()); )+
                Self { registry: Mutex::new(registry), $($field),+ }
            }
        }
    };
}

metrics! {
    /// Number of the configuration in use, counted from 1 at the start
    config_generation: Gauge = Gauge::default();
    /// 1 while the last read of the configuration file was valid, 0 while an invalid file is ignored
    config_last_reload_successful: Gauge = Gauge::default();
    /// Time of the last successful read of the configuration file, in seconds of Unix time
    config_last_reload_success_timestamp_seconds: Gauge<f64, std::sync::atomic::AtomicU64> = Gauge::default();
    /// Keys of the configuration file whose values take effect only after a restart
    config_pending_restart: Gauge = Gauge::default();
    /// Readings of the configuration file after the start by outcome: applied, unchanged, invalid
    config_reloads: Family<OutcomeLabel, Counter> = outcomes(&["applied", "unchanged", "invalid"]);
    /// The pool of workers that this process serves, always 1
    pool_info: Family<PoolLabels, Gauge> = Family::default();
    /// Requests routed or let through, by model, step of the degradation ladder and role of the worker that decodes (none: no worker was chosen)
    requests: Family<RequestLabels, Counter> = Family::default();
    /// Requests that took a lower step of the ladder than exact, by reason
    degradations: Family<ReasonLabel, Counter> = Family::default();
    /// Exchanges by how they ended: complete, closed (the answer had begun; its end was not shown to us), abandoned, own_answer (refused, or asked for the choice only)
    exchanges: Family<OutcomeLabel, Counter> = outcomes(&["complete", "closed", "abandoned", "own_answer"]);
    /// Messages of Envoy that could not be decoded or were larger than the limit; each ends its stream. The stream ends with an error, unless the message is a buffered request body above the limit, which is routed by its headers
    unreadable_messages: Counter = Counter::default();
    /// Exchanges that are open now
    exchanges_open: Gauge = Gauge::default();
    /// Time of one stage of a decision, in microseconds
    decision_stage_microseconds: Histograms<StageLabel> = stages(&["parse", "render", "tokenize", "hash", "index", "choose", "total"]);
    /// Share of a prompt's blocks found cached on the worker rank that computes the prompt, 0 to 1, by model and role of that worker
    hit_rate: Histograms<ModelRoleLabels> = histograms(|| Histogram::new(linear_buckets(0.0, 0.05, 21)));
    /// Share of a prompt's blocks that the shared cache holds, 0 to 1, by model; look-ups that failed are not among them
    shared_cache_hit_rate: Histograms<ModelLabel> = histograms(|| Histogram::new(linear_buckets(0.0, 0.05, 21)));
    /// Blocks of prompts that the shared cache holds beyond those on the device of the worker that computes the prompt, by model
    shared_cache_beyond_blocks: Family<ModelLabel, Counter> = Family::default();
    /// Time that a request waited for the shared cache, in seconds
    shared_cache_seconds: Histogram = Histogram::new(exponential_buckets(0.0001, 2.0, 12));
    /// Prompt length in tokens, by model and role of the worker that computes the prompt
    prompt_tokens: Histograms<ModelRoleLabels> = histograms(|| Histogram::new(exponential_buckets(32.0, 2.0, 14)));
    /// Output length in tokens, where the answer passed through us
    output_tokens: Histograms<ModelRoleLabels> = histograms(|| Histogram::new(exponential_buckets(1.0, 2.0, 16)));
    /// Time from the request's arrival here to the first token of its answer, in seconds; of an answer that is not a stream, to its headers
    time_to_first_token_seconds: Histograms<ModelRoleLabels> = histograms(seconds);
    /// Mean time between the output tokens of one streamed response, in seconds: from its first token to its end, divided by the tokens after the first
    inter_token_latency_seconds: Histograms<ModelRoleLabels> = histograms(token_seconds);
    /// Time from the request's arrival here to the end of its answer, in seconds
    request_duration_seconds: Histograms<ModelRoleLabels> = histograms(seconds);
    /// Cached prompt tokens on the best eligible worker rank, summed over requests, by model and role of the worker that computes the prompt
    best_cached_tokens: Family<ModelRoleLabels, Counter> = Family::default();
    /// Cached prompt tokens on the worker rank that computes the prompt as predicted, summed over requests, by model and role of that worker
    predicted_cached_tokens: Family<ModelRoleLabels, Counter> = Family::default();
    /// Cached prompt tokens reported by the worker that computed the prompt, summed over responses, by model and role of that worker
    delivered_cached_tokens: Family<ModelRoleLabels, Counter> = Family::default();
    /// Responses compared with the prediction, by outcome: equal, less (fewer cached tokens than predicted), more, other_prompt (equal, but another prompt length), unforeseen (routed by load), no_usage, no_details (the usage does not say what was cached), undecided (another worker computed the prompt, and warmroute receives no report of its cache)
    audit_answers: Family<ModelOutcomeLabels, Counter> = Family::default();
    /// Tokens of the answers that said what they found cached, by kind: prompt, available (on the best candidate), captured (on the chosen one), by_chance (on one by chance), delivered (by the engine)
    audit_tokens: Family<ModelTokensLabels, Counter> = Family::default();
    /// Prompt tokens that were not found cached, by cause: block_alignment, workload (no worker had cached them), load_spill (another worker was chosen for its load), evicted (the events of the worker report the eviction), stale_index (the events do not explain the difference), unknown (evicted or stale_index: too many events have arrived since, or a remote server keeps the index), parity (the engine has other tokens), served_elsewhere (another worker served the request), guess (the cache was predicted without events), unforeseen (the request was routed by load)
    audit_missed_tokens: Family<CauseLabels, Counter> = Family::default();
    /// Answers that found more or less cached than predicted, by cause: those of missed tokens, stored_meanwhile (by another request), block_rounding (the engine's blocks are smaller than block_size)
    audit_errors: Family<CauseLabels, Counter> = Family::default();
    /// Blocks predicted as cached that the engine had to compute, for each answer with fewer cached tokens than predicted
    audit_over_predicted_blocks: Histograms<ModelLabel> = histograms(error_blocks);
    /// Blocks cached by the engine beyond the prediction, for each answer with more cached tokens than predicted
    audit_under_predicted_blocks: Histograms<ModelLabel> = histograms(error_blocks);
    /// Requests whose prompt is computed by another worker rank than the one with most cached blocks, by model and role of that worker
    non_max_overlap_choices: Family<ModelRoleLabels, Counter> = Family::default();
    /// Routed requests by which workers do which phase
    phases: Family<PhasesLabel, Counter> = Family::default();
    /// Requests whose chosen worker rank did not answer them, because it could not be reached
    chosen_not_reached: Family<RankLabels, Counter> = Family::default();
    /// Calls to the service for callers that are not Envoy, by call and gRPC status; a stream counts when it begins
    api_calls: Family<CallLabels, Counter> = Family::default();
    /// Requests booked through the service
    api_bookings: Gauge = Gauge::default();
    /// Bookings of the service that were released because nothing was heard of them
    api_bookings_expired: Counter = Counter::default();
    /// Workers that rest because they failed
    workers_out: Gauge = Gauge::default();
    /// Bytes of request bodies that are held until they are routed
    held_body_bytes: Gauge = Gauge::default();
    /// Prompts whose tokens were looked for among those of earlier prompts, by outcome: hit, miss, uncut (too short, or without an added token to resume at), failed (tokenised whole instead)
    prompt_cache_lookups: Family<OutcomeLabel, Counter> = outcomes(&["hit", "miss", "uncut", "failed"]);
    /// Prompt tokens that were taken over from earlier prompts
    prompt_cache_resumed_tokens: Counter = Counter::default();
    /// Tokens of the prompts that hit or missed
    prompt_cache_looked_up_tokens: Counter = Counter::default();
    /// Bytes that are kept of earlier prompts
    prompt_cache_bytes: Gauge = Gauge::default();
    /// Pieces of earlier prompts that were thrown out to make room
    prompt_cache_evictions: Counter = Counter::default();
    /// Streams of the filter that looks for first tokens, by outcome: seen, foreign (of no exchange that waits), none
    first_token_streams: Family<OutcomeLabel, Counter> = outcomes(&["seen", "foreign", "none"]);
    /// Requests that another endpoint than the chosen one served, by what happened to their booking: moved (to that worker), away (released), unknown (no worker has the address; the booking stays)
    served_elsewhere: Family<OutcomeLabel, Counter> = outcomes(&["moved", "away", "unknown"]);
    /// Aborts of mirrored prefills that no client waits for any longer, by outcome: told (the engine accepted the abort), not_ours (the client chose the id of the request, which may name other requests too), overflow (too many aborts wait for one engine), or the reason of the failure
    prefill_aborts: Family<OutcomeLabel, Counter> = outcomes(&["told", "not_ours", "overflow", "unreachable", "timeout", "status"]);
    /// Prefills that were carried out by asking another worker, by outcome: done, refused, busy, full, timeout, failed, left_before_start (taken back), left_after_start (goes on without its client)
    prefill_calls: Family<OutcomeLabel, Counter> = outcomes(&["done", "refused", "busy", "full", "timeout", "failed", "left_before_start", "left_after_start"]);
    /// Time that a called-for prefill took, from the question to its end, in seconds, by outcome as the calls'; what was taken back is not among them
    prefill_call_seconds: Histograms<OutcomeLabel> = outcome_histograms(&["done", "refused", "busy", "full", "timeout", "failed", "left_after_start"]);
    /// Time from the end of another worker's prefill to the first token of the decode worker, in seconds, by model
    prefill_to_first_token_seconds: Histograms<ModelLabel> = histograms(seconds);
    /// Prefills in flight that warmroute requested from prefill workers, including those of disconnected clients
    prefills_under_way: Gauge = Gauge::default();
    /// Retries of Envoy that passed warmroute, by outcome: prefilled_anew (another prefill was started), as_it_is (sent unchanged: it had no remote prefill), taken_out (the fields of a prefill that an earlier process started were removed), given_up (no worker is left), left (the client disconnected)
    prefill_retries: Family<OutcomeLabel, Counter> = outcomes(&["prefilled_anew", "as_it_is", "taken_out", "given_up", "left"]);
    /// Requests whose model was given another name on the way
    rewritten_models: Counter = Counter::default();
    /// Requests that wait for their turn, by class
    queue_requests: Family<ClassLabel, Gauge> = Family::default();
    /// Prompt tokens of the requests that wait, by class
    queue_prompt_tokens: Family<ClassLabel, Gauge> = Family::default();
    /// Cached prompt tokens of the requests that wait, by class
    queue_cached_tokens: Family<ClassLabel, Gauge> = Family::default();
    /// Requests that had to wait, by class and outcome: waited, over_requests, over_prompt_tokens, over_cached_tokens, expired, left
    queue_outcomes: Family<ClassOutcomeLabels, Counter> = Family::default();
    /// Sessions that are remembered
    sessions: Gauge = Gauge::default();
    /// Requests that run in a session
    session_requests: Gauge = Gauge::default();
    /// Sessions that engines have open because of us
    engine_sessions: Gauge = Gauge::default();
    /// Calls that open and close sessions on engines, by call and outcome: ok, busy, unreachable, timeout, not_offered, status, overflow (too many waited)
    engine_session_calls: Family<EngineSessionLabels, Counter> = Family::default();
    /// Requests whose tokens engines were asked for, by model and outcome: ok, refused, nobody (no engine is available, or all are paused after failures), busy, unreachable, timeout, not_offered, status, unreadable, too_large
    engine_tokens: Family<ModelOutcomeLabels, Counter> = Family::default();
    /// Pieces of real prompts whose tokens the fast way and the library made, by model and outcome: agrees, differs (the library makes them from then on)
    tokenizer_comparisons: Family<ModelOutcomeLabels, Counter> = Family::default();
    /// Workers by model and what is known of their tokens: untested, agrees, differs (their requests go by load), cannot_test
    parity_workers: Family<ModelOutcomeLabels, Gauge> = Family::default();
    /// 1 while the tokens of an engine of the model differ from those of warmroute and no engine confirms them, so that those of warmroute are not used
    parity_mistrusted: Family<ModelLabel, Gauge> = Family::default();
    /// Comparisons of a worker's tokens with ours, by model and outcome: agrees, differs, cannot_test
    parity_tests: Family<ModelOutcomeLabels, Counter> = Family::default();
    /// Times that tokens were found to differ, by canaries or by events
    parity_mismatches: Family<ModelLabel, Counter> = Family::default();
    /// Real requests whose blocks were looked for in their engine's events, by model and outcome: confirmed, unconfirmed, unknown (no news to judge by, or the source does not tell all)
    parity_sightings: Family<ModelOutcomeLabels, Counter> = Family::default();
    /// Error of the estimated prefill times, relative to the times, by model and role
    prefill_time_error: Family<ModelRoleLabels, Gauge<f64, std::sync::atomic::AtomicU64>> = Family::default();
    /// Shared cache look-ups that failed, by reason
    shared_cache_errors: Family<ReasonLabel, Counter> = Family::default();
    /// Questions to the servers of the index, by outcome: answered, hedged_won (by a second server, because the first was slow), late, failed, refused (its block settings differ), busy (too many under way), out (all servers are excluded after failures)
    remote_index_questions: Family<OutcomeLabel, Counter> = outcomes(&["answered", "hedged_won", "late", "failed", "refused", "busy", "out"]);
    /// Time that a request waited for the servers of the index, in seconds
    remote_index_seconds: Histogram = Histogram::new(exponential_buckets(0.0001, 2.0, 12));
    /// Distinct blocks that live requests hold on a worker rank
    worker_active_decode_blocks: Family<RankLabels, Gauge> = Family::default();
    /// Prompt tokens on a worker rank whose requests have not shown their first token
    worker_active_prefill_tokens: Family<RankLabels, Gauge> = Family::default();
    /// Live requests on a worker rank
    worker_active_requests: Family<RankLabels, Gauge> = Family::default();
    /// Blocks a worker rank has cached, by tier, according to its KV events
    worker_cached_blocks: Family<RankTierLabels, Gauge> = Family::default();
    /// Most blocks that are kept of a worker rank, by tier; events beyond it have the outcome index_full
    worker_cached_blocks_limit: Family<RankTierLabels, Gauge> = Family::default();
    /// Blocks a worker rank is taken to have cached because prompts with them were routed there
    worker_predicted_blocks: Family<RankLabels, Gauge> = Family::default();
    /// Workers in the fleet
    workers: Gauge = Gauge::default();
    /// Number of the fleet in use; grows with every change
    fleet_generation: Gauge = Gauge::default();
    /// 1 while the last workers file read was valid and is in use, 0 while an older fleet is kept
    workers_file_valid: Gauge = Gauge::default();
    /// Reads of the workers file, by outcome: applied, unchanged, invalid
    workers_file_reloads: Family<OutcomeLabel, Counter> = outcomes(&["applied", "unchanged", "invalid"]);
    /// 1 while a source of workers can be read and watched, 0 otherwise
    discovery_up: Family<SourceLabel, Gauge> = Family::default();
    /// Unix time, in seconds, at which a source of workers last worked
    discovery_success_timestamp_seconds: Family<SourceLabel, Gauge<f64, std::sync::atomic::AtomicU64>> = Family::default();
    /// Writes of Envoy's endpoint file, by outcome: written, failed
    endpoint_file_writes: Family<OutcomeLabel, Counter> = outcomes(&["written", "failed"]);
    /// Version of the endpoints that Envoys get by xDS; increases with every change
    xds_generation: Gauge = Gauge::default();
    /// xDS streams that are open
    xds_streams: Gauge = Gauge::default();
    /// Endpoints published by xDS, by outcome: sent, accepted, refused, too_many_names (the stream was ended)
    xds_updates: Family<OutcomeLabel, Counter> = outcomes(&["sent", "accepted", "refused", "too_many_names"]);
    /// From a change of the endpoints until an Envoy says that it has it
    xds_acceptance_seconds: Histogram = Histogram::new(exponential_buckets(0.0005, 2.0, 14));
    /// Whether the connection to NATS is up, by which replicas tell each other what they do
    replica_connected: Gauge = Gauge::default();
    /// Other replicas that this one knows of
    replica_peers: Gauge = Gauge::default();
    /// Reservations of other replicas that count here
    replica_reservations: Gauge = Gauge::default();
    /// Words between replicas by outcome: sent, lost (NATS was not there), received, gap (some were missed), snapshot_given, snapshot_taken, garbage
    replica_messages: Family<OutcomeLabel, Counter> = outcomes(&["sent", "lost", "received", "gap", "snapshot_given", "snapshot_taken", "garbage"]);
    /// KV events by kind and outcome
    kv_events: Family<EventLabels, Counter> = Family::default();
    /// Event batches by outcome: applied, stale, undecodable, too_large, malformed_frames, other_rank
    kv_event_batches: Family<OutcomeLabel, Counter> = outcomes(&["applied", "stale", "undecodable", "too_large", "malformed_frames", "other_rank"]);
    /// Event batches that exceed a limit and are lost, by limit: message (kv_events.max_message), frames, events, hashes, tokens, extra_keys
    kv_event_batches_too_large: Family<ReasonLabel, Counter> = reasons(&["message", "frames", "events", "hashes", "tokens", "extra_keys"]);
    /// Connections of event sources that failed or were refused, by reason: closed, closed_in_handshake, connect_timeout, handshake_timeout, heartbeat_timeout, too_large, protocol, io, endpoint, too_many_publishers, too_many_handshakes, replaced
    kv_event_connection_errors: Family<ReasonLabel, Counter> = reasons(&["closed", "closed_in_handshake", "connect_timeout", "handshake_timeout", "heartbeat_timeout", "too_large", "protocol", "io", "endpoint", "too_many_publishers", "too_many_handshakes", "replaced"]);
    /// Gaps in an engine's batch numbers, by outcome: replayed, partly_replayed, lost
    kv_event_gaps: Family<OutcomeLabel, Counter> = outcomes(&["replayed", "partly_replayed", "lost"]);
    /// Engine restarts noticed by batch numbers that went back
    kv_event_restarts: Counter = Counter::default();
    /// State of the event source of a worker rank: 1 for the current one of exact, incomplete (its events are correct, but some may be missing), catching_up, stale and absent, 0 for the others
    kv_event_source_trust: Family<RankTrustLabels, Gauge> = Family::default();
    /// How much later than the engine wrote it the last batch of a worker rank came, in seconds; less than 0 where the engine's clock is ahead of ours
    kv_event_source_lag_seconds: Family<RankLabels, Gauge<f64, std::sync::atomic::AtomicU64>> = Family::default();
    /// How long ago the last batch of a worker rank came, in seconds
    kv_event_source_last_event_age_seconds: Family<RankLabels, Gauge<f64, std::sync::atomic::AtomicU64>> = Family::default();
    /// Gaps in the batch numbers of a worker rank since it was attached first, closed or not
    kv_event_source_gaps: Family<RankLabels, Counter> = Family::default();
    /// Batches of a worker rank that are lost for good
    kv_event_source_lost_batches: Family<RankLabels, Counter> = Family::default();
    /// Blocks of a worker rank that may be gone, because events were lost
    kv_event_source_doubted_blocks: Family<RankLabels, Gauge> = Family::default();
    /// Workers whose engine says something else of itself than is configured, by setting
    setting_mismatches: Family<SettingLabel, Gauge> = Family::default();
    /// Questions to engines for their settings, by outcome: ok, not_offered, unreachable, timeout, status, unreadable, too_large, busy
    engine_settings_asked: Family<OutcomeLabel, Counter> = outcomes(&["ok", "not_offered", "unreachable", "timeout", "status", "unreadable", "too_large", "busy"]);
    /// Connections that are open now, by listener
    connections: Family<ListenerLabel, Gauge> = Family::default();
    /// Connections that were closed at once because there were too many and all were in use, by listener
    connections_refused: Family<ListenerLabel, Counter> = Family::default();
    /// Connections that were closed by listener and reason: evicted (for a new connection, being idle for longest), idle, greeting_timeout (no request began), header_timeout (a header block was not completed), write_timeout (the client accepted no data)
    connections_closed: Family<ListenerReasonLabels, Counter> = Family::default();
    /// HTTP/2 errors sent to clients, by listener, scope (stream: RST_STREAM, connection: GOAWAY) and error code
    http2_errors: Family<Http2ErrorLabels, Counter> = Family::default();
    /// TLS handshakes that failed, by listener and reason: server_name (not a DNS name), plaintext, malformed, no_client_certificate, client_certificate, incompatible, alpn, alert (refused by the client), closed (by the client), timeout, other
    tls_handshake_errors: Family<ListenerReasonLabels, Counter> = Family::default();
    /// TLS handshakes by listener and outcome: done, failed, expired
    tls_handshakes: Family<ListenerOutcomeLabels, Counter> = Family::default();
    /// Changes of a certificate, its key or the client CA, by listener and outcome: applied, invalid (the old one is kept)
    tls_reloads: Family<ListenerOutcomeLabels, Counter> = Family::default();
    /// When the certificate in use ends, in seconds of unix time, by listener
    tls_certificate_expires_seconds: Family<ListenerLabel, Gauge> = Family::default();
    /// Changes of the token for the admin pages, by outcome: applied, invalid (the old one is kept)
    admin_token_reloads: Family<OutcomeLabel, Counter> = outcomes(&["applied", "invalid"]);
    /// 1 while a background task runs, 0 while it waits for its next try
    task_up: Family<TaskLabel, Gauge> = Family::default();
    /// Restarts of background tasks
    task_restarts: Family<TaskLabel, Counter> = Family::default();
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Renders the page. `refresh` sets the values that are read at each scrape. Pages are rendered one at a time, so `refresh`
    /// may clear families.
    pub fn page(
        &self,
        format: TextFormat,
        refresh: impl FnOnce(&Self),
    ) -> Result<String, std::fmt::Error> {
        let registry = self.lock();
        refresh(self);
        let mut page = String::new();
        text::encode(&mut page, &registry)?;
        Ok(format.convert(page))
    }

    /// Removes the series of a worker rank that left, as far as they are not rebuilt for each page.
    pub fn forget_rank(&self, rank: &RankLabels) {
        self.chosen_not_reached.remove(rank);
    }

    /// Notes the time that one stage of a decision took.
    pub fn stage(&self, stage: &'static str, took: std::time::Duration) {
        self.decision_stage_microseconds
            .get_or_create(&StageLabel { stage })
            .observe(took.as_secs_f64() * 1e6);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Registry> {
        // Registering cannot panic half-way, so a poisoned lock still guards a whole registry.
        self.registry
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn register(registry: &mut Registry, name: &str, help: &str, metric: impl Metric) {
    registry.register(name, help.trim(), metric);
}

fn histograms<L: Clone + std::hash::Hash + Eq>(make: fn() -> Histogram) -> Histograms<L> {
    Family::new_with_constructor(make)
}

/// A family whose series all start at zero.
fn outcomes(values: &[&'static str]) -> Family<OutcomeLabel, Counter> {
    let family = Family::default();
    values
        .iter()
        .for_each(|&outcome| drop(family.get_or_create(&OutcomeLabel { outcome })));
    family
}

fn reasons(values: &[&'static str]) -> Family<ReasonLabel, Counter> {
    let family = Family::default();
    values
        .iter()
        .for_each(|&reason| drop(family.get_or_create(&ReasonLabel { reason })));
    family
}

fn outcome_histograms(values: &[&'static str]) -> Histograms<OutcomeLabel> {
    let family = histograms(seconds);
    values
        .iter()
        .for_each(|&outcome| drop(family.get_or_create(&OutcomeLabel { outcome })));
    family
}

fn stages(values: &[&'static str]) -> Histograms<StageLabel> {
    let family = histograms(microseconds);
    values
        .iter()
        .for_each(|&stage| drop(family.get_or_create(&StageLabel { stage })));
    family
}

fn error_blocks() -> Histogram {
    Histogram::new([1.0, 2.0, 4.0, 16.0, 64.0, 256.0])
}

fn token_seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 1.6, 18))
}

fn microseconds() -> Histogram {
    Histogram::new(exponential_buckets(0.5, 2.0, 22))
}

fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 1.8, 22))
}
