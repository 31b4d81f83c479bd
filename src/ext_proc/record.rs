//! What one exchange holds, and what is noted of it as it goes on and when it ends. The holdings are values, so whatever
//! ends the stream gives them back.

use std::sync::Arc;
use std::time::Instant;

use tracing::info;

use super::headers::{AnsweredBy, ResponseHead};
use crate::entrance::Admitted;
use crate::metrics::{Metrics, ModelLabel, OutcomeLabel, RankLabels};
use crate::openai::usage::UsageScanner;
use crate::router::{Answer, AnswerFrom, Router};
use crate::worker::Endpoint;

/// What one exchange holds and what is noted of it when it ends.
pub(super) struct Record {
    metrics: Arc<Metrics>,
    router: Arc<Router>,
    arrived: Instant,
    /// When the request was let in.
    admitted_at: Instant,
    admitted: Option<Box<Admitted>>,
    label: Option<ModelLabel>,
    usage: UsageScanner,
    status: u16,
    end: End,
    /// Blocks of the answer that are booked already.
    output_blocks: u64,
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
    pub(super) fn open(metrics: Arc<Metrics>, router: Arc<Router>) -> Self {
        metrics.exchanges_open.inc();
        let now = Instant::now();
        Self {
            metrics,
            router,
            arrived: now,
            admitted_at: now,
            admitted: None,
            label: None,
            usage: UsageScanner::default(),
            status: 0,
            end: End::Abandoned,
            output_blocks: 0,
        }
    }

    pub(super) fn routed(&mut self, admitted: Option<Box<Admitted>>) {
        self.label = admitted.as_ref().map(|admitted| ModelLabel::from(&admitted.booked.route.model));
        self.admitted = admitted;
        self.admitted_at = Instant::now();
    }

    /// The client gets our own answer.
    pub(super) fn own_answer(&mut self) {
        self.end = End::Own;
    }

    /// The answer began.
    pub(super) fn answered(&mut self, head: ResponseHead) {
        self.status = head.status;
        let Some(admitted) = &mut self.admitted else { return };
        let from = match head.from {
            AnsweredBy::Unknown => AnswerFrom::Chosen,
            AnsweredBy::Envoy => AnswerFrom::Gateway,
            AnsweredBy::Policy => {
                // Somebody else may try the worker.
                admitted.booked.probes.clear();
                return;
            }
            AnsweredBy::Worker(address) if Endpoint(address) == admitted.booked.route.to.endpoint => AnswerFrom::Chosen,
            AnsweredBy::Worker(address) => {
                let fleet = self.router.fleet();
                let served = fleet.workers().find(|worker| worker.endpoint == Endpoint(address));
                served.map_or(AnswerFrom::Gateway, |worker| AnswerFrom::Other(worker.id))
            }
        };
        let changes = self.router.answered(&mut admitted.booked, Answer { status: head.status, from });
        for (worker, change) in changes {
            info!(%worker, status = head.status, ?change, "the health of a worker changed");
        }
        if from != AnswerFrom::Chosen {
            let rank = RankLabels::from(admitted.booked.route.to.rank);
            self.metrics.chosen_not_reached.get_or_create(&rank).inc();
        }
    }

    pub(super) fn first_token(&mut self) {
        self.end = self.end_at_least(End::Closed);
        // An error has no first token.
        let well = (200..300).contains(&self.status);
        if let Some(admitted) = &mut self.admitted {
            let first = admitted.booked.reservation.first_token();
            if first && well {
                self.router.prefilled(&admitted.booked, self.admitted_at.elapsed());
            }
        }
        if let Some(label) = self.label.as_ref().filter(|_| well) {
            let took = self.arrived.elapsed().as_secs_f64();
            self.metrics.time_to_first_token_seconds.get_or_create(label).observe(took);
        }
    }

    pub(super) fn answer(&mut self, chunk: &[u8]) {
        self.usage.push(chunk);
        if self.router.settings().tracking.output_blocks {
            self.book_output();
        }
    }

    /// Books a block whenever prompt and answer together begin one.
    fn book_output(&mut self) {
        let Some(admitted) = &mut self.admitted else { return };
        let route = &admitted.booked.route;
        let size = route.block_size.tokens() as u64;
        let generated = self.usage.content_events();
        let grown = (route.prompt_tokens + generated).div_ceil(size) - route.prompt_tokens.div_ceil(size);
        let expected = route.expected_output_tokens;
        let fraction = expected.map(|expected| (1.0 - generated as f64 / expected.max(1) as f64).max(0.0));
        while self.output_blocks < grown {
            self.output_blocks += 1;
            admitted.booked.reservation.output_block(fraction);
            admitted.booked.grow();
        }
    }

    /// The answer is complete: nothing is held any longer, though Envoy may keep the stream a little.
    pub(super) fn finished(&mut self) {
        self.end = End::Complete;
        self.admitted = None;
        self.note_duration();
        // The last event may lack its empty line.
        self.usage.finish();
    }

    fn note_duration(&self) {
        let Some(label) = &self.label else { return };
        let took = self.arrived.elapsed().as_secs_f64();
        self.metrics.request_duration_seconds.get_or_create(label).observe(took);
    }

    fn end_at_least(&self, end: End) -> End {
        if matches!(self.end, End::Complete | End::Own) { self.end } else { end }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.admitted = None;
        self.metrics.exchanges_open.dec();
        let outcome = match self.end {
            End::Abandoned => "abandoned",
            End::Closed => "closed",
            End::Complete => "complete",
            End::Own => "own_answer",
        };
        self.metrics.exchanges.get_or_create(&OutcomeLabel { outcome }).inc();
        if self.end == End::Closed {
            self.note_duration();
        }
        let Some(label) = &self.label else { return };
        let usage = self.usage.usage();
        let output = usage.map_or(self.usage.content_events(), |usage| usage.completion_tokens);
        if output > 0 {
            self.metrics.output_tokens.get_or_create(label).observe(output as f64);
        }
        if let Some(cached) = usage.and_then(|usage| usage.cached_tokens) {
            self.metrics.delivered_cached_tokens.get_or_create(label).inc_by(cached);
        }
    }
}
