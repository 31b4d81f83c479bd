//! What one exchange holds, and what is noted of it as it goes on and when it ends. The holdings are values, so whatever
//! ends the stream gives them back.

use std::sync::Arc;
use std::time::Instant;

use tracing::{debug, info};

use super::carrying::Remote;
use super::exchange::ServingWorker;
use super::headers::{AnsweredBy, ResponseHead};
use super::retries::Again;
use crate::audit::{Answered, Audit, Foreseen, Said};
use crate::block::BlockHashes;
use crate::entrance::{Admitted, Entrance};
use crate::health::Outcome;
use crate::metrics::{Metrics, ModelLabel, ModelRoleLabels, OutcomeLabel, RankLabels};
use crate::openai::usage::{Kind, Usage, UsageScanner};
use crate::prefill::{self, Retried, Turn};
use crate::router::{Answer, AnswerFrom, BookedPredictions, Mode, Moved, Route, Router};
use crate::worker::{Endpoint, ModelName};

/// What one exchange holds and what is noted of it when it ends.
pub(super) struct Record {
    metrics: Arc<Metrics>,
    router: Arc<Router>,
    audit: Arc<Audit>,
    arrived: Instant,
    /// When the request was let in.
    admitted_at: Instant,
    admitted: Option<Box<Admitted>>,
    /// What is to be known of a prefill that is, or was, another worker's, until the first token.
    remote: Option<Remote>,
    /// Time at which another worker completed the prefill. Removed at the first token.
    prefill_done: Option<Instant>,
    label: Option<ModelLabel>,
    /// The model and the role of the worker that decodes.
    role_labels: Option<ModelRoleLabels>,
    /// Time of the first token of a streamed response.
    first_token_at: Option<Instant>,
    /// Time of the end of the response.
    completed_at: Option<Instant>,
    /// The response with the cache report.
    cache_report_source: Option<CacheReportSource>,
    /// The prompts of the request, once it is over.
    prompts: Vec<BlockHashes>,
    /// Whether somebody else served the request than was chosen.
    moved: bool,
    /// Whether the answer's body is shown.
    shown: bool,
    /// Whether something of the answer's body was seen, by us or by the probe.
    seen: bool,
    usage: Box<UsageScanner>,
    status: u16,
    /// Whether the answer is shown while it is written, so that its beginning is its first token.
    event_stream: bool,
    end: End,
    /// Whether the blocks of the answer count as load.
    books_output: bool,
    /// Those that are booked already.
    output_blocks: u64,
}

/// The response that carries the cache report of the worker that computes the prompt.
#[derive(Debug)]
enum CacheReportSource {
    /// In the response of the exchange, whose worker computes the prompt.
    InResponse(Box<Foreseen>),
    /// In the response of the prefill worker, which warmroute receives and judges by itself.
    InPrefillResponse,
    /// In the response of the prefill worker, which does not pass through warmroute.
    NotReceived(ModelName),
}

impl CacheReportSource {
    fn of(route: &Route, remote: Option<&Remote>, audit: &Audit) -> Self {
        let is_received = match remote {
            Some(Remote::Called(_)) => true,
            Some(Remote::Meets(mirrored)) => mirrored.receives_response(),
            None => false,
        };
        match route.prefill() {
            None => Self::InResponse(Box::new(audit.foresee(route))),
            Some(_) if is_received => Self::InPrefillResponse,
            Some(_) => Self::NotReceived(route.model.clone()),
        }
    }
}

/// How far the exchange came.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// The answer has not begun.
    Abandoned,
    /// The answer had begun and its body was not shown to us: it ended, or the client left.
    Closed,
    /// The answer's end was seen.
    Complete,
    /// The answer was ours.
    Own,
}

impl Record {
    pub(super) fn open(metrics: Arc<Metrics>, router: Arc<Router>, audit: Arc<Audit>) -> Self {
        metrics.exchanges_open.inc();
        let now = Instant::now();
        Self {
            metrics,
            audit,
            arrived: now,
            admitted_at: now,
            admitted: None,
            remote: None,
            prefill_done: None,
            label: None,
            role_labels: None,
            first_token_at: None,
            completed_at: None,
            cache_report_source: None,
            prompts: Vec::new(),
            moved: false,
            shown: false,
            seen: false,
            usage: Box::default(),
            status: 0,
            event_stream: false,
            end: End::Abandoned,
            books_output: router.settings().tracking.output_blocks,
            output_blocks: 0,
            router,
        }
    }

    /// Records the placement of the request. `remote` is the prefill on another worker.
    fn on_placed(&mut self, remote: Option<Remote>) {
        let route = self
            .admitted
            .as_ref()
            .map(|admitted| &admitted.booked.route);
        self.cache_report_source =
            route.map(|route| CacheReportSource::of(route, remote.as_ref(), &self.audit));
        // warmroute calls the prefill worker before it sends the request on.
        self.prefill_done = matches!(remote, Some(Remote::Called(_))).then(Instant::now);
        self.remote = remote;
    }

    pub(super) fn routed(&mut self, admitted: Option<Box<Admitted>>, remote: Option<Remote>) {
        self.label = admitted
            .as_ref()
            .map(|admitted| ModelLabel::from(&admitted.booked.route.model));
        self.role_labels = admitted.as_ref().map(|admitted| {
            let route = &admitted.booked.route;
            ModelRoleLabels::new(&route.model, self.router.role_of(route.to.rank))
        });
        self.admitted = admitted;
        self.admitted_at = Instant::now();
        self.on_placed(remote);
    }

    /// The client gets our own answer.
    pub(super) fn own_answer(&mut self) {
        self.end = End::Own;
    }

    /// The answer began.
    pub(super) fn answered(&mut self, head: ResponseHead) {
        self.status = head.status;
        self.event_stream = head.event_stream;
        *self.usage = UsageScanner::new(if head.event_stream {
            Kind::EventStream
        } else {
            Kind::Whole
        });
        let Some(admitted) = &mut self.admitted else {
            return;
        };
        let from = match head.from {
            AnsweredBy::Unknown | AnsweredBy::Ambiguous => AnswerFrom::Chosen,
            AnsweredBy::Envoy => AnswerFrom::Gateway,
            AnsweredBy::Policy => {
                // Somebody else may try the worker.
                admitted.booked.probes.clear();
                admitted.booked.predictions = BookedPredictions::default();
                return;
            }
            AnsweredBy::Worker(address) => {
                let served = Endpoint(address).canonical();
                let fleet = self.router.fleet();
                let worker = || {
                    fleet
                        .workers()
                        .find(|worker| worker.endpoint.canonical() == served)
                };
                let chosen = served == admitted.booked.route.to.endpoint.canonical();
                match if chosen { None } else { Some(worker()) } {
                    None => AnswerFrom::Chosen,
                    Some(Some(worker)) => AnswerFrom::Other(worker.id),
                    Some(None) => {
                        // An address that we do not know may well be another name of the chosen worker's.
                        admitted.booked.probes.clear();
                        self.router
                            .settle_predictions(&mut admitted.booked, head.status);
                        self.metrics
                            .served_elsewhere
                            .get_or_create(&OutcomeLabel { outcome: "unknown" })
                            .inc();
                        return;
                    }
                }
            }
        };
        // Health first: it is about whom we chose.
        let chosen = admitted.booked.route.to.rank;
        let changes = self.router.answered(
            &mut admitted.booked,
            Answer {
                status: head.status,
                from,
            },
        );
        if let AnsweredBy::Worker(address) = head.from {
            let outcome = match admitted.served(&self.router, Endpoint(address)) {
                Moved::Unchanged => None,
                Moved::To(_) => Some("moved"),
                Moved::Away => Some("away"),
            };
            if let Some(outcome) = outcome {
                self.moved = true;
                self.metrics
                    .served_elsewhere
                    .get_or_create(&OutcomeLabel { outcome })
                    .inc();
            }
        }
        if let AnswerFrom::Other(_) = from {
            self.router
                .settle_predictions(&mut admitted.booked, head.status);
        }
        admitted.booked.forget_remote();
        for (worker, change) in changes {
            info!(%worker, status = head.status, ?change, "the health of a worker changed");
        }
        // The series of a rank that left have been removed.
        if from != AnswerFrom::Chosen
            && let Some(role) = self.router.role_of(chosen)
        {
            let rank = RankLabels::new(chosen, Some(role));
            self.metrics.chosen_not_reached.get_or_create(&rank).inc();
        }
    }

    /// The worker that sent the response, if it is a known one that was not chosen.
    pub(super) fn served_elsewhere(&self, head: &ResponseHead) -> Option<ServingWorker> {
        let AnsweredBy::Worker(address) = head.from else {
            return None;
        };
        let served = Endpoint(address).canonical();
        let route = &self.admitted.as_ref()?.booked.route;
        if route.to.endpoint.canonical() == served {
            return None;
        }
        let fleet = self.router.fleet();
        let of_model = fleet
            .members()
            .filter(|member| member.worker.model == route.model);
        let mut members = of_model.filter(|member| member.worker.endpoint.canonical() == served);
        let first = ServingWorker::from(members.next()?.rank);
        // Envoy reports the endpoint only, and several ranks may share it.
        Some(if members.next().is_none() {
            first
        } else {
            ServingWorker {
                rank: None,
                ..first
            }
        })
    }

    /// Completes when something is known of the prefill of two workers that meet.
    pub(super) async fn turn(&mut self) -> Turn {
        match &mut self.remote {
            Some(Remote::Meets(mirrored)) => mirrored.turn().await,
            _ => std::future::pending().await,
        }
    }

    /// Takes note of it; says whether nothing can come of the request any longer.
    pub(super) fn turned(&mut self, turn: &Turn) -> bool {
        let (Some(Remote::Meets(mirrored)), Some(admitted)) = (&self.remote, &mut self.admitted)
        else {
            return false;
        };
        match turn {
            Turn::Done => {
                self.prefill_done = Some(Instant::now());
                admitted.booked.reservation.first_token();
                false
            }
            Turn::Failed(failure) => {
                let outcome = failure.outcome(|| !mirrored.is_dead());
                outcome
                    .into_iter()
                    .for_each(|outcome| prefill::note(&self.router, admitted, outcome));
                // It waits for the other, and says so now, which the gateway can try again.
                mirrored.abort_decode(admitted.booked.route.to.endpoint);
                false
            }
            // An answer that has begun shows that they met, even where nobody has seen its first token.
            Turn::Late if self.status != 0 => {
                if let Some(Remote::Meets(mirrored)) = self.remote.take() {
                    mirrored.over();
                }
                false
            }
            Turn::Late => {
                if mirrored.is_dead() {
                    prefill::note(&self.router, admitted, Outcome::Failure);
                }
                mirrored.abort_decode(admitted.booked.route.to.endpoint);
                self.remote = None;
                true
            }
        }
    }

    /// Has a request prefilled anew that goes to another decode worker now.
    pub(super) async fn tried_again(&mut self, entrance: &Entrance, retried: Retried) -> Again {
        // What has begun to be answered is not tried again.
        let Some(remote) = self.remote.take() else {
            return Again::AsItIs;
        };
        let Some(mut admitted) = self.admitted.take() else {
            return Again::AsItIs;
        };
        // What came before says nothing of how long a prefill takes.
        self.admitted_at = Instant::now();
        let again =
            match remote {
                Remote::Meets(mirrored) => mirrored
                    .again(entrance, &mut admitted, retried)
                    .await
                    .map(|met| {
                        self.admitted = Some(admitted);
                        (Remote::Meets(Box::new(met.mirrored)), met.body)
                    }),
                Remote::Called(called) => {
                    called
                        .again(entrance, *admitted, retried)
                        .await
                        .map(|(admitted, body)| {
                            self.admitted = Some(Box::new(admitted));
                            (Remote::Called(called), body)
                        })
                }
            };
        match again {
            Ok((remote, body)) => {
                self.on_placed(Some(remote));
                Again::With(body)
            }
            Err(error) => {
                debug!(%error, "a request cannot be tried again");
                Again::GivenUp
            }
        }
    }

    /// The answer's first token came, and was `seen` or only taken to come with the headers.
    pub(super) fn first_token(&mut self, seen: bool) {
        self.seen |= seen;
        self.end = self.end_at_least(End::Closed);
        // An error has no first token.
        let well = (200..300).contains(&self.status);
        // Where it is one, the prefill is for nobody.
        if let Some(Remote::Meets(mirrored)) = self.remote.take().filter(|_| well) {
            mirrored.over();
        }
        if let Some(admitted) = &mut self.admitted {
            let first = admitted.booked.reservation.first_token();
            // An answer in one piece begins when it is complete, and how long a prefill takes is learnt only of prompts
            // whose uncached part is known.
            let route = &admitted.booked.route;
            let known =
                matches!(route.mode, Mode::Exact | Mode::Approximate) && route.reason.is_none();
            let telling = self.event_stream && known;
            if first && well && telling {
                self.router
                    .prefilled(&admitted.booked, self.admitted_at.elapsed());
            }
        }
        let done = self
            .prefill_done
            .take()
            .filter(|_| well && self.event_stream);
        if let (Some(done), Some(label)) = (done, &self.label) {
            let took = done.elapsed().as_secs_f64();
            self.metrics
                .prefill_to_first_token_seconds
                .get_or_create(label)
                .observe(took);
        }
        if let Some(labels) = self.role_labels.as_ref().filter(|_| well) {
            let took = self.arrived.elapsed().as_secs_f64();
            self.metrics
                .time_to_first_token_seconds
                .get_or_create(labels)
                .observe(took);
        }
        if well && seen && self.event_stream {
            self.first_token_at.get_or_insert_with(Instant::now);
        }
    }

    pub(super) fn answer(&mut self, chunk: &[u8]) {
        (self.shown, self.seen) = (true, true);
        self.usage.push(chunk);
        if self.books_output {
            self.book_output();
        }
    }

    /// Books a block whenever prompt and answer together begin one.
    fn book_output(&mut self) {
        let Some(admitted) = &mut self.admitted else {
            return;
        };
        let route = &admitted.booked.route;
        let size = route.block_size.tokens() as u64;
        let generated = self.usage.output_tokens();
        let grown =
            (route.prompt_tokens + generated).div_ceil(size) - route.prompt_tokens.div_ceil(size);
        let expected = route.expected_output_tokens;
        let fraction =
            expected.map(|expected| (1.0 - generated as f64 / expected.max(1) as f64).max(0.0));
        while self.output_blocks < grown {
            self.output_blocks += 1;
            admitted.booked.reservation.output_block(fraction);
            admitted.booked.grow();
        }
    }

    /// The answer is complete: nothing is held any longer, though Envoy may keep the stream a little.
    pub(super) fn finished(&mut self) {
        self.end = End::Complete;
        self.completed_at = Some(Instant::now());
        self.release();
        self.note_duration();
        // The last event may lack its empty line.
        self.usage.finish();
    }

    /// Gives back what the exchange holds. An answer that was well begun has filled the prompt's blocks; but the headers of
    /// a stream come before anything was computed, and who waits behind them may give up.
    fn release(&mut self) {
        let begun = match self.end {
            End::Complete => true,
            End::Closed => self.seen || !self.event_stream,
            End::Abandoned | End::Own => false,
        };
        let begun = begun && (200..300).contains(&self.status);
        if let Some(mut admitted) = self.admitted.take()
            && begun
        {
            self.router.answered_well(&mut admitted.booked);
            self.prompts = admitted.booked.take_prompts();
        }
    }

    fn note_duration(&self) {
        let Some(labels) = &self.role_labels else {
            return;
        };
        let took = self.arrived.elapsed().as_secs_f64();
        self.metrics
            .request_duration_seconds
            .get_or_create(labels)
            .observe(took);
    }

    fn note_output(&self, tokens: u64) {
        let Some(labels) = self.role_labels.as_ref().filter(|_| tokens > 0) else {
            return;
        };
        self.metrics
            .output_tokens
            .get_or_create(labels)
            .observe(tokens as f64);
        let (Some(first), Some(completed)) = (self.first_token_at, self.completed_at) else {
            return;
        };
        if tokens > 1 {
            let latency =
                completed.saturating_duration_since(first).as_secs_f64() / (tokens - 1) as f64;
            self.metrics
                .inter_token_latency_seconds
                .get_or_create(labels)
                .observe(latency);
        }
    }

    /// Whether it came as was foreseen, if the whole answer was shown and the engine did what it was asked.
    fn judge(&mut self) {
        if !self.shown || self.end != End::Complete || !(200..300).contains(&self.status) {
            return;
        }
        let foreseen = match self.cache_report_source.take() {
            Some(CacheReportSource::InResponse(foreseen)) => *foreseen,
            Some(CacheReportSource::NotReceived(model)) => {
                return self.audit.count_undecided(&model);
            }
            Some(CacheReportSource::InPrefillResponse) | None => return,
        };
        match self.usage.usage() {
            Some(Usage {
                prompt_tokens,
                cached_tokens: Some(cached),
                ..
            }) if prompt_tokens > 0 => {
                let said = Said {
                    prompt: prompt_tokens,
                    cached,
                };
                let prompts = std::mem::take(&mut self.prompts);
                let answered = Answered::new(foreseen, said, prompts).moved(self.moved);
                self.audit.answered(answered, Instant::now());
            }
            usage => self.audit.silent(&foreseen.model, usage.is_some()),
        }
    }

    fn end_at_least(&self, end: End) -> End {
        if matches!(self.end, End::Complete | End::Own) {
            self.end
        } else {
            end
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.release();
        self.metrics.exchanges_open.dec();
        let outcome = match self.end {
            End::Abandoned => "abandoned",
            End::Closed => "closed",
            End::Complete => "complete",
            End::Own => "own_answer",
        };
        self.metrics
            .exchanges
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
        if self.end == End::Closed {
            self.note_duration();
            self.usage.finish();
        }
        if self.label.is_none() {
            return;
        }
        let usage = self.usage.usage();
        let output = usage.map_or(self.usage.output_tokens(), |usage| usage.completion_tokens);
        self.note_output(output);
        if let Some(Usage {
            prompt_tokens,
            cached_tokens: Some(cached),
            ..
        }) = usage
            && let Some(CacheReportSource::InResponse(foreseen)) = &self.cache_report_source
        {
            self.audit.count_delivered_tokens(
                foreseen,
                Said {
                    prompt: prompt_tokens,
                    cached,
                },
            );
        }
        self.judge();
    }
}

#[cfg(test)]
mod tests {

    use std::time::Duration;

    use super::*;
    use crate::block::{BlockHashes, LocalHash};
    use crate::fleet::Fleet;
    use crate::index::PrefixIndex;
    use crate::load::LoadTracker;
    use crate::predict::{Policy, Predictor, Ttl};
    use crate::router::{Predictions, Prompt, Reason, RouteRequest, RouterSettings};
    use crate::worker::{BlockSize, Role, Worker, WorkerId};

    /// Where the blocks of requests are looked for.
    fn watching() -> (Arc<Router>, crate::index::RankWriter) {
        let router = router();
        let rank = router.fleet().members().next().unwrap().rank;
        router.parity().configure([("m".into(), Arc::default())]);
        router.set_trust(rank, crate::trust::Standing::EXACT);
        let writer = router.index().join(router.fleet().slot(rank).unwrap());
        (router, writer)
    }

    /// Whether the blocks of a request that was answered so are looked for.
    fn looked_for(event_stream: bool, seen: bool, complete: bool) -> bool {
        let ((router, _writer), metrics) = (watching(), Arc::new(Metrics::new()));
        let locals = (0..8).map(LocalHash).collect();
        let prompt = Prompt::Hashed(vec![BlockHashes::chain(
            33,
            BlockSize::new(4).unwrap(),
            locals,
        )]);
        let foretold = crate::parity::Foretold::Prompt;
        let request = RouteRequest {
            foretold,
            ..RouteRequest::new(Some("m".into()), prompt)
        };
        let booked = router.route(request).unwrap();
        let mut record = Record::open(
            metrics.clone(),
            router.clone(),
            Audit::new(router.clone(), metrics),
        );
        record.routed(Some(Box::new(Admitted::new(booked))), None);
        record.answered(ResponseHead {
            status: 200,
            event_stream,
            ..ResponseHead::default()
        });
        record.first_token(seen);
        if complete {
            record.finished();
        }
        drop(record);
        !router
            .parity()
            .of(&"m".into())
            .unwrap()
            .take_ready()
            .is_empty()
    }

    #[test]
    fn who_gives_up_behind_the_headers_of_a_stream_proves_nothing() {
        let cases = [
            // Whether it is a stream, its first token was seen, it is complete, and its blocks are looked for.
            (true, false, false, false),
            (true, true, false, true),
            (true, false, true, true),
            (false, false, false, true),
        ];
        for (event_stream, seen, complete, expected) in cases {
            assert_eq!(
                looked_for(event_stream, seen, complete),
                expected,
                "{event_stream} {seen} {complete}"
            );
        }
    }

    fn router() -> Arc<Router> {
        let load = LoadTracker::new(Instant::now);
        let ttl = Ttl {
            ttl: Duration::from_secs(120),
            most_blocks_per_rank: 1000,
        };
        let predictor = Predictor::new(Policy::Ttl(ttl), Instant::now);
        let predictions = Predictions {
            without_events: Some(predictor),
            ..Predictions::default()
        };
        let worker = Worker::new(
            WorkerId(1),
            "127.0.0.1:8000".parse().unwrap(),
            "m".into(),
            BlockSize::new(4).unwrap(),
        );
        let change = Fleet::empty().reconcile(vec![worker]);
        for member in &change.added {
            load.open(member.slot, member.rank);
            predictions.open(member);
        }
        let router = Router::new(PrefixIndex::new(), load, RouterSettings::default(), 1)
            .predicting(predictions);
        router.publish(Arc::new(change.fleet));
        Arc::new(router)
    }

    #[test]
    fn an_engine_cannot_spoil_the_counter_of_cached_tokens() {
        let metrics = Arc::new(Metrics::new());
        let cases = [
            (100, 64, 64),
            (100, 1 << 63, 164),
            (u64::MAX, u64::MAX, 164 + (1 << 40)),
        ];
        for (prompt, cached, expected) in cases {
            let router = router();
            let estimated = Prompt::Estimated {
                tokens: 100,
                because: Reason::NoTokenizer,
            };
            let booked = router
                .route(RouteRequest::new(Some("m".into()), estimated))
                .unwrap();
            let mut record = Record::open(
                metrics.clone(),
                router.clone(),
                Audit::new(router, metrics.clone()),
            );
            record.routed(Some(Box::new(Admitted::new(booked))), None);
            record.answered(ResponseHead {
                status: 200,
                ..ResponseHead::default()
            });
            let details = format!("{{\"cached_tokens\":{cached}}}");
            let usage =
                format!("{{\"prompt_tokens\":{prompt},\"prompt_tokens_details\":{details}}}");
            record.answer(format!("{{\"usage\":{usage}}}").as_bytes());
            record.finished();
            drop(record);
            let labels = ModelRoleLabels::new(&"m".into(), Some(Role::Aggregated));
            let counted = metrics.delivered_cached_tokens.get_or_create(&labels).get();
            assert_eq!(counted, expected, "{prompt} {cached}");
        }
    }

    fn learns(event_stream: bool, status: u16, prompt: &Prompt) -> bool {
        let (router, metrics) = (router(), Arc::new(Metrics::new()));
        for _ in 0..20 {
            let booked = router
                .route(RouteRequest::new(Some("m".into()), prompt.clone()))
                .unwrap();
            let audit = Audit::new(router.clone(), metrics.clone());
            let mut record = Record::open(metrics.clone(), router.clone(), audit);
            record.routed(Some(Box::new(Admitted::new(booked))), None);
            record.answered(ResponseHead {
                status,
                event_stream,
                ..ResponseHead::default()
            });
            record.first_token(true);
            record.finished();
        }
        !router.prefill_time_errors().is_empty()
    }

    #[test]
    fn prefill_times_are_learnt_only_where_the_beginning_of_an_answer_is_its_first_token() {
        let locals = (0..8).map(LocalHash).collect();
        let hashed = Prompt::Hashed(vec![BlockHashes::chain(
            33,
            BlockSize::new(4).unwrap(),
            locals,
        )]);
        let estimated = Prompt::Estimated {
            tokens: 33,
            because: Reason::NoTokenizer,
        };
        let cases = [
            (true, 200, &hashed, true),
            (false, 200, &hashed, false),
            (true, 500, &hashed, false),
            (true, 200, &estimated, false),
        ];
        for (event_stream, status, prompt, expected) in cases {
            assert_eq!(
                learns(event_stream, status, prompt),
                expected,
                "{event_stream} {status} {prompt:?}"
            );
        }
    }
}
