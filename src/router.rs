//! The answer to one request. [`Router::prepare`] finds out what does not change with the load, [`Router::place`] costs
//! the candidates of each phase and books the winners in one critical section; neither waits, and neither fails for a
//! reason that Envoy could not route around. What comes of it is a [`Booked`]: where to go and why, and the values whose
//! drop releases everything that was taken.

mod answer;
mod explain;
mod feedback;
mod leg;
mod outside;
mod placing;
mod pools;
mod predictions;
mod prepared;
mod question;
mod ranking;
mod reason;
mod remote;
mod served;
mod settings;
mod sightings;
mod sources;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rand::SeedableRng;
use rand::rngs::SmallRng;

pub use answer::{ComputedBy, Destination, Mode, Phases, Prefill, Route, RouteError, Steer};
pub use explain::{Explanation, Judged, PhaseExplained};
pub use feedback::{Answer, AnswerFrom};
pub use outside::{Elsewhere, Foreign, Surveyed};
pub use placing::Booked;
use predictions::HearRouted;
pub use predictions::{BookedPredictions, Predictions, PromptPrediction, Routed};
pub use prepared::Prepared;
pub use question::{Decoders, Prefilled, Priority, Prompt, RouteRequest, SharedBlocks, Step};
pub use reason::Reason;
pub use remote::{Remote, RemoteAnswer, RemoteRank, RemoteRanks};
pub use served::Moved;
pub use settings::{RouterSettings, Tracking, WhenOverloaded};
pub use sources::{AllLearned, SharedAgreed, SharedSource, Sources};

use crate::admission::{Attempt, Gate};
use crate::block::tracking::unshared;
use crate::fleet::{Fleet, Member};
use crate::health::Health;
use crate::index::{BlockLimits, PrefixIndex};
use crate::load::{LoadTracker, LoadView};
use crate::parity::Parity;
use crate::schedule::{Occupancy, Overload};
use crate::trust::Standing;
use crate::worker::{Role, WorkerId, WorkerRank};
use feedback::Durations;
pub use leg::UnheardOf;
use leg::{Decision, Leg, Legs, Undecided};
use pools::{Pools, Standings};
use prepared::{Blocks, Looked, Scratch};
use ranking::Ranking;
use remote::Saying;

type HearOverloaded = Box<dyn Fn(WorkerId, Duration) + Send + Sync>;

/// The state that decisions read, and the settings they follow.
pub struct Router {
    fleet: ArcSwap<Fleet>,
    index: Arc<PrefixIndex>,
    predictions: Predictions,
    /// Whether the index is kept elsewhere.
    remote: bool,
    /// What others are told of our event sources.
    saying: Saying,
    load: Arc<LoadTracker>,
    overload: Overload,
    hear_overloaded: OnceLock<HearOverloaded>,
    hear_routed: OnceLock<HearRouted>,
    unheard: ArcSwap<UnheardOf>,
    health: Arc<Health>,
    durations: Durations,
    settings: ArcSwap<RouterSettings>,
    parity: Arc<Parity>,
    sources: Sources,
    random: Mutex<SmallRng>,
    scratch: Scratch,
}

impl Router {
    /// A router with an empty fleet. `seed` makes the choice between ties repeatable.
    pub fn new(
        index: Arc<PrefixIndex>,
        load: Arc<LoadTracker>,
        settings: RouterSettings,
        seed: u64,
    ) -> Self {
        Self {
            fleet: ArcSwap::from_pointee(Fleet::empty()),
            index,
            predictions: Predictions::default(),
            remote: false,
            saying: Saying::default(),
            load,
            overload: Overload::new(settings.overload),
            hear_overloaded: OnceLock::new(),
            hear_routed: OnceLock::new(),
            unheard: ArcSwap::default(),
            health: Health::new(settings.health),
            durations: Durations::default(),
            settings: ArcSwap::from_pointee(settings),
            parity: Arc::default(),
            sources: Sources::default(),
            random: Mutex::new(SmallRng::seed_from_u64(seed)),
            scratch: Scratch::default(),
        }
    }

    /// Also believes that routed prompts are cached where they went.
    #[must_use]
    pub fn predicting(mut self, predictions: Predictions) -> Self {
        self.predictions = predictions;
        self
    }

    /// The fleet at this instant.
    pub fn fleet(&self) -> Arc<Fleet> {
        self.fleet.load_full()
    }

    /// Puts another fleet in its place.
    pub fn publish(&self, fleet: Arc<Fleet>) {
        self.overload
            .retain(|worker| fleet.worker(worker).is_some());
        self.health.retain(|worker| fleet.worker(worker).is_some());
        self.fleet.store(fleet);
    }

    /// The prefix index.
    pub fn index(&self) -> &Arc<PrefixIndex> {
        &self.index
    }

    /// The load table.
    pub fn load(&self) -> &Arc<LoadTracker> {
        &self.load
    }

    /// What routed prompts are taken to have left behind.
    pub fn predictions(&self) -> &Predictions {
        &self.predictions
    }

    /// How it decides at this instant. A decision takes them once, when it is prepared.
    pub fn settings(&self) -> Arc<RouterSettings> {
        self.settings.load_full()
    }

    /// Decides in another way from now on; what is prepared already is decided as it was to be.
    pub fn set_settings(&self, settings: RouterSettings) {
        self.overload.set_thresholds(settings.overload);
        self.health.set_rules(settings.health);
        self.settings.store(Arc::new(settings));
        self.fleet()
            .members()
            .for_each(|member| self.limit_blocks(member));
    }

    /// Limits the blocks that the index holds of a worker rank, by its capacity and the settings.
    pub fn limit_blocks(&self, member: &Member) {
        if let Some(most) = self.settings().most_blocks_per_tier {
            let limits = BlockLimits::of_rank(member.worker.capacity.total_kv_blocks, most);
            self.index.set_limits(member.slot, limits);
        }
    }

    /// Believes the event source of a worker rank so far from now on.
    pub fn set_trust(&self, rank: WorkerRank, standing: Standing) {
        self.sources.set(rank, standing);
    }

    /// The role of a worker rank; none where its worker has left the fleet.
    pub fn role_of(&self, rank: WorkerRank) -> Option<Role> {
        self.fleet().worker(rank.worker).map(|worker| worker.role)
    }

    /// How far the event source of a worker rank is believed.
    pub fn trust(&self, rank: WorkerRank) -> Standing {
        self.sources.table().standing(rank)
    }

    /// The event sources.
    pub fn sources(&self) -> &Sources {
        &self.sources
    }

    /// Reckons from now on with what other routers may have sent, of which no word has come.
    pub fn expect_unheard(&self, unheard: UnheardOf) {
        if !(unheard.is_empty() && self.unheard.load().is_empty()) {
            self.unheard.store(Arc::new(unheard));
        }
    }

    /// How many bookings of other routers are reckoned with, on the average.
    pub fn unheard(&self) -> f64 {
        self.unheard
            .load()
            .values()
            .map(|unheard| unheard.bookings)
            .sum()
    }

    /// Chooses and books at once.
    pub fn route(&self, request: RouteRequest) -> Result<Booked, RouteError> {
        let mut prepared = self.prepare(request);
        match self.place(&mut prepared, &Gate::default()) {
            Attempt::Placed(mut booked) => {
                self.expect_booked(&mut booked);
                Ok(booked)
            }
            Attempt::Refused(error) => Err(error),
            // Nothing makes a worker busy where there is no threshold.
            Attempt::Busy => Err(RouteError::NoCandidate),
        }
    }

    /// Finds out everything about a request that does not change with the load.
    pub fn prepare(&self, request: RouteRequest) -> Prepared {
        let overrides = &request.overrides;
        let settings = self.settings();
        let mut prepared = Prepared {
            generation: 0,
            overlaps: Vec::new(),
            blocks: Blocks::of(&request),
            weights: overrides.apply(&settings.weights),
            reuse: overrides
                .assume_kv_reuse
                .unwrap_or(settings.tracking.assume_kv_reuse),
            track_prefill: overrides
                .track_prefill_tokens
                .unwrap_or(settings.tracking.prefill_tokens),
            settings,
            index_time: Duration::ZERO,
            trust: self.sources.table(),
            differing: Arc::default(),
            scratch: self.scratch.clone(),
            request,
        };
        self.look_up(&mut prepared);
        prepared
    }

    /// Looks again what is cached.
    pub fn look_up(&self, prepared: &mut Prepared) {
        let started = Instant::now();
        prepared.forget_overlaps();
        let fleet = self.fleet.load();
        prepared.generation = fleet.generation();
        let (prompt, remote) = (&prepared.request.prompt, &prepared.request.remote);
        prepared.trust = self.trusted(remote);
        prepared.differing = self.differing(&prepared.request);
        for (nth, hashes) in prompt.blocks().iter().enumerate() {
            // The last token of a beginning is not the last of the prompt.
            let tokens = if let Prompt::Beginning { .. } = prompt {
                prompt.tokens() as usize
            } else {
                hashes.tokens()
            };
            let table = self.cached_where((nth, hashes), remote, &fleet);
            prepared.overlaps.push(Looked {
                tokens,
                ..Looked::new(table, hashes)
            });
        }
        prepared.index_time = started.elapsed();
    }

    /// Most tokens that anybody who might compute a request's prompts has cached of them.
    pub fn best_cached_tokens(&self, prepared: &Prepared) -> u64 {
        prepared.best_cached_tokens(&self.fleet.load())
    }

    /// Chooses and books, unless all who would do are busy by `gate`.
    pub fn place(&self, prepared: &mut Prepared, gate: &Gate) -> Attempt<Booked, RouteError> {
        let started = Instant::now();
        let mut fleet = self.fleet_of(prepared);
        loop {
            let placed = self
                .pools(&fleet, prepared)
                .and_then(|pools| self.book(prepared, &pools, gate));
            match placed {
                Err(Undecided::Outrun) => {}
                Err(Undecided::Busy) => return Attempt::Busy,
                // Those it looked for may have left, and others come, while it looked.
                Err(Undecided::Refused(
                    RouteError::NoCandidate | RouteError::NoFleet | RouteError::Unsatisfied,
                )) if self.fleet.load().generation() != fleet.generation() => {
                    fleet = self.fleet_of(prepared);
                }
                Err(Undecided::Refused(error)) => return Attempt::Refused(error),
                Ok(mut booked) => {
                    booked.sighting = self.sighting(&booked, prepared);
                    booked.prompts = prepared.take_prompts();
                    booked.route.index_time = prepared.index_time;
                    booked.route.choose_time = started.elapsed();
                    return Attempt::Placed(booked);
                }
            }
        }
    }

    /// Chooses and books in one critical section.
    fn book(
        &self,
        prepared: &Prepared,
        pools: &Pools<'_>,
        gate: &Gate,
    ) -> Result<Booked, Undecided> {
        let decision = Decision {
            prepared,
            pools,
            settings: &prepared.settings,
            gate,
            unheard: Some(&self.unheard.load()),
        };
        let mut decided = None;
        let reservation = self.load.book_with(|view| {
            let mut random = self.random.lock();
            let legs = decision.decide(view, &mut *random)?;
            let probes = self.probes(&legs, pools, view.now())?;
            let mut bookings = legs.bookings(prepared, &prepared.settings, |count| {
                unshared(count, &mut *random)
            });
            if prepared.settings.tracking.prefill_durations {
                self.durations.estimate(&legs, &mut bookings);
            }
            decided = Some((legs, probes));
            Ok(bookings)
        })?;
        // Nothing is booked without a decision.
        let (legs, probes) = decided.ok_or(Undecided::Busy)?;
        Ok(Booked {
            chosen: legs.decode.member().rank,
            placed: self.load.now(),
            differing: prepared.differing.clone(),
            expected: self.expected(&legs),
            route: self.describe(prepared, &legs, &pools.standings),
            reservation,
            probes,
            sighting: None,
            prompts: Vec::new(),
            remote: prepared.request.remote.clone(),
            predictions: BookedPredictions::default(),
            took_over: matches!(prepared.request.step, Step::Decode(_)),
            away: None,
        })
    }

    /// Chooses without booking.
    pub fn ask(&self, request: RouteRequest) -> Result<Route, RouteError> {
        let mut prepared = self.prepare(request);
        let fleet = self.fleet_of(&mut prepared);
        let pools = self.pools(&fleet, &prepared).map_err(RouteError::from)?;
        let decision = Decision {
            prepared: &prepared,
            pools: &pools,
            settings: &prepared.settings,
            gate: &Gate::default(),
            unheard: None,
        };
        let legs = self
            .load
            .look(|view| decision.decide(view, &mut *self.random.lock()))
            .map_err(RouteError::from)?;
        Ok(self.describe(&prepared, &legs, &pools.standings))
    }

    /// The fleet of this instant, to which the overlaps belong.
    fn fleet_of(&self, prepared: &mut Prepared) -> Arc<Fleet> {
        loop {
            let fleet = self.fleet.load_full();
            if prepared.generation == fleet.generation() {
                return fleet;
            }
            self.look_up(prepared);
        }
    }

    fn pools<'f>(&self, fleet: &'f Fleet, prepared: &Prepared) -> Result<Pools<'f>, Undecided> {
        let settings = &prepared.settings;
        let standings = |members: &[&Member]| self.standings(members, settings);
        Pools::find(fleet, &prepared.request, settings, standings).map_err(Undecided::Refused)
    }

    fn standings(&self, members: &[&Member], settings: &RouterSettings) -> Standings {
        let now = self.load.now();
        let overloaded = match settings.overload.any() {
            true => self.load.look(|view| {
                self.overload
                    .overloaded(members, now, |member| occupancy(view, member))
            }),
            false => self
                .overload
                .overloaded(members, now, |_| Occupancy::default()),
        };
        Standings {
            overloaded,
            unwell: self.health.unwell(now),
        }
    }

    fn describe(&self, prepared: &Prepared, legs: &Legs<'_>, standings: &Standings) -> Route {
        let leg = &legs.decode;
        let Ranking { fallbacks, scores } = Ranking::of(&prepared.settings, leg, standings);
        let (member, members) = (leg.member(), &leg.members);
        let phases = match (&legs.prefill, legs.bypass, &prepared.request.step) {
            (Some(leg), ..) => Phases::Remote(Box::new(self.describe_prefill(prepared, leg))),
            (None, _, Step::Decode(done)) => Phases::Remote(Box::new(done.prefill.clone())),
            (None, Some(bypass), _) => Phases::Kept(bypass),
            (None, None, _) => Phases::Aggregated,
        };
        // The decode worker's cache matters only if it computes the prompt.
        let (mode, reason) = match &phases {
            Phases::Remote(prefill) => (prefill.mode, prefill.reason),
            Phases::Aggregated | Phases::Kept(_) => self.mode(prepared, member, members),
        };
        Route {
            to: destination(member),
            computes: prepared.request.computes,
            fallbacks,
            scores,
            mode,
            reason,
            model: member.worker.model.clone(),
            block_size: leg.question.block_size,
            expected_output_tokens: prepared.request.expected_output_tokens,
            prompt_tokens: leg.question.prompt_tokens,
            prompt_blocks: prepared
                .request
                .prompt
                .blocks()
                .iter()
                .map(|hashes| hashes.len() as u64)
                .sum(),
            overlap: prepared.overlap(member),
            trust: prepared.standing(member).trust,
            predicted_cached_tokens: prepared.cached_tokens(member, true),
            best_cached_tokens: leg.cached.best,
            chance_cached_tokens: leg.chance_cached_tokens(),
            reusable_tokens: prepared.reusable_tokens(),
            shared_beyond_device: shared_beyond_device(legs),
            candidates: members.len(),
            unheard: leg.unheard + legs.prefill.as_ref().map_or(0, |leg| leg.unheard),
            choice: leg.choice.clone(),
            phases,
            index_time: Duration::ZERO,
            choose_time: Duration::ZERO,
        }
    }

    fn describe_prefill(&self, prepared: &Prepared, leg: &Leg<'_>) -> Prefill {
        let member = leg.member();
        let (mode, reason) = self.mode(prepared, member, &leg.members);
        Prefill {
            to: destination(member),
            overlap: prepared.overlap(member),
            cached_tokens: prepared.cached_tokens(member, true),
            best_cached_tokens: leg.cached.best,
            chance_cached_tokens: leg.chance_cached_tokens(),
            mode,
            reason,
            trust: prepared.standing(member).trust,
            choice: leg.choice.clone(),
        }
    }

    /// The step of the ladder: what is known of the prompt, and of the candidates' caches.
    fn mode(
        &self,
        prepared: &Prepared,
        chosen: &Member,
        candidates: &[&Member],
    ) -> (Mode, Option<Reason>) {
        let told = |member: &Member| prepared.overlap(member).total() > 0;
        let counts = |member: &&Member| prepared.standing(member).trust.counts(told(member));
        let away = self.is_away(&prepared.request.remote);
        let guessed = self.is_guessed(prepared, chosen);
        let prompt = &prepared.request.prompt;
        let because = prompt.because();
        match prompt {
            Prompt::Estimated { .. } => (Mode::LoadOnly, because),
            // Hardly anything was shown.
            Prompt::Beginning { known, .. } if known.is_empty() => (Mode::LoadOnly, because),
            _ if prepared.differs(chosen) => (Mode::LoadOnly, Some(Reason::ParityMismatch)),
            _ if away => (
                if guessed {
                    Mode::Approximate
                } else {
                    Mode::LoadOnly
                },
                Some(Reason::IndexAway),
            ),
            _ if guessed => (Mode::Approximate, because),
            _ if !candidates.iter().any(counts) => {
                (Mode::LoadOnly, Some(prepared.why_cold(candidates)))
            }
            // It was not chosen for anything that it was known to hold.
            _ if prepared.is_unusable(chosen) => {
                (Mode::LoadOnly, Some(prepared.why_cold(&[chosen])))
            }
            Prompt::Beginning { .. } => (Mode::Partial, because),
            Prompt::Hashed(_) => (Mode::Exact, None),
        }
    }
}

/// Blocks of the shared cache beyond those on the device of the worker that computes the prompt.
fn shared_beyond_device(legs: &Legs<'_>) -> u64 {
    let leg = legs.prefill.as_ref().unwrap_or(&legs.decode);
    leg.question
        .shared_beyond(leg.candidates[leg.choice.index].overlap.device)
}

fn occupancy(view: &LoadView<'_>, member: &Member) -> Occupancy {
    Occupancy {
        load: view.load(member.slot, member.rank).unwrap_or_default(),
        reported_usage: None,
    }
}

fn destination(member: &Member) -> Destination {
    Destination::of(member)
}

#[cfg(test)]
mod tests;
