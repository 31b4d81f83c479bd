//! Scrapes one worker.

use std::sync::Arc;
use std::time::Duration;

use tracing::{debug, info, warn};
use warmroute_core::health::HealthSignal;
use warmroute_core::load::{EngineLoadReport, EngineLoadSample};
use warmroute_core::worker::{RankRange, RankSlot, WorkerRank};
use warmroute_engines::engine_client::{EngineError, EngineGauges, EngineUrl, MetricsPath};
use warmroute_metrics::count_outcome;

use super::LoadPollContext;
use super::scrape_interval::{ScrapeOutcome, next_delay};
use crate::app::settings_poller::EngineKey;

/// Number of intervals for which a report counts.
const VALID_INTERVALS: u32 = 3;

/// Maximum duration of a scrape.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Scraper of one worker.
pub(super) struct WorkerScraper {
    engine: EngineKey,
    url: EngineUrl,
    context: Arc<LoadPollContext>,
    /// Path at which the engine last had counters.
    path: Option<MetricsPath>,
    failures: u32,
    /// Whether it was logged that the engine has no counters.
    is_absence_logged: bool,
}

/// Bookings of one rank before a scrape.
struct RankBookings {
    slot: RankSlot,
    rank: WorkerRank,
    count: u64,
}

/// Ranks of the worker before a scrape.
struct ScrapedRanks {
    range: RankRange,
    bookings: Vec<RankBookings>,
}

impl WorkerScraper {
    pub(super) fn new(engine: EngineKey, context: Arc<LoadPollContext>) -> Self {
        Self {
            url: context.config.engines.url(engine.1),
            engine,
            context,
            path: None,
            failures: 0,
            is_absence_logged: false,
        }
    }

    /// Scrapes until the task is aborted.
    pub(super) async fn run(mut self, start_delay: Duration) {
        tokio::time::sleep(start_delay).await;
        loop {
            let outcome = self.scrape().await;
            let delay = next_delay(outcome, self.context.interval(), rand::random());
            tokio::time::sleep(delay).await;
        }
    }

    async fn scrape(&mut self) -> ScrapeOutcome {
        let Some(ranks) = self.ranks() else {
            // The worker has just left the fleet, or its endpoint changed.
            return ScrapeOutcome::Failed(1);
        };
        let result = self.find_counters().await;
        let outcome = match &result {
            Ok(counters) if counters.is_empty() => "no_gauges",
            Ok(_) => "ok",
            Err(error) => error.label(),
        };
        count_outcome(&self.context.metrics.workers.engine_load_scrapes, outcome);
        // An engine whose page was never readable may be out of reach for warmroute alone.
        let is_failing = self.path.is_some() && result.is_err();
        let router = &self.context.router;
        router.set_signal(self.engine.0, HealthSignal::LoadScrape, is_failing);
        if let Some(has_answered) = EngineError::has_answered(&result) {
            router.record_reachability(self.engine.0, has_answered);
        }
        match result {
            Ok(counters) if !counters.is_empty() => {
                self.record(&ranks, &counters);
                self.failures = 0;
                self.is_absence_logged = false;
                ScrapeOutcome::Reported
            }
            Ok(_) | Err(EngineError::NotOffered(_) | EngineError::TooLarge(_)) => {
                self.on_no_counters(outcome);
                ScrapeOutcome::NoGauges
            }
            Err(error) => {
                self.failures = self.failures.saturating_add(1);
                let worker = self.engine.0;
                if is_failing && self.failures == 1 {
                    warn!(%worker, %error, "scrape of engine load failed");
                } else {
                    debug!(%worker, %error, "scrape of engine load failed");
                }
                ScrapeOutcome::Failed(self.failures)
            }
        }
    }

    /// Reads the counters at the known path, or at the first path that has some.
    async fn find_counters(&mut self) -> Result<EngineGauges, EngineError> {
        let known = self.path.as_slice();
        let paths = if known.is_empty() {
            &MetricsPath::ALL
        } else {
            known
        };
        let mut result = Ok(EngineGauges::default());
        for &path in paths {
            let config = &self.context.config;
            let page = config.client.load_gauges(&self.url, path, TIMEOUT).await;
            match page {
                Ok(counters) if !counters.is_empty() => {
                    self.path = Some(path);
                    return Ok(counters);
                }
                // A missing second page does not hide that the first one exists.
                Ok(_) => {}
                Err(EngineError::NotOffered(_)) if path != MetricsPath::Metrics => {}
                Err(error @ EngineError::NotOffered(_)) => result = Err(error),
                Err(error) => return Err(error),
            }
        }
        self.path = None;
        result
    }

    /// Returns the ranks of the worker and their bookings.
    fn ranks(&self) -> Option<ScrapedRanks> {
        let router = &self.context.router;
        let fleet = router.fleet();
        let worker = fleet.worker(self.engine.0)?;
        if worker.endpoint != self.engine.1 {
            return None;
        }
        let bookings = |rank| {
            let rank = WorkerRank {
                worker: worker.id,
                rank,
            };
            let slot = fleet.slot(rank)?;
            Some(RankBookings {
                slot,
                rank,
                count: router.load().active_requests(slot, rank),
            })
        };
        Some(ScrapedRanks {
            range: worker.ranks,
            bookings: worker.ranks.iter().filter_map(bookings).collect(),
        })
    }

    fn record(&self, ranks: &ScrapedRanks, counters: &EngineGauges) {
        let load = self.context.router.load();
        let valid_for = self.context.interval() * VALID_INTERVALS + TIMEOUT;
        for booked in &ranks.bookings {
            let Some(rank) = counters.for_rank(ranks.range, booked.rank.rank) else {
                continue;
            };
            let report = EngineLoadReport {
                running: rank.running,
                waiting: rank.waiting,
                kv_usage: rank.kv_usage,
                received_at: load.now(),
            };
            let sample = EngineLoadSample {
                report,
                booked_before: booked.count,
                valid_for,
                max_lag: counters.max_lag(),
            };
            load.record_engine_load(booked.slot, booked.rank, &sample);
        }
    }

    fn on_no_counters(&mut self, outcome: &'static str) {
        self.failures = 0;
        if !std::mem::replace(&mut self.is_absence_logged, true) {
            let name = self.context.router.fleet().display_name(self.engine.0);
            info!(worker = %self.engine.0, name, outcome, "engine reports no load; trying again once a minute");
        }
    }
}
