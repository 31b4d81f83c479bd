//! The verdict on one model, worker by worker: what its answers to canaries said, and what its events say.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::sighting::Evidence;
use crate::worker::WorkerId;

/// Requests in a row whose blocks did not appear, until that is a proof: blocks may be evicted at once, or a request be
/// given up in the middle, but not eight times in a row while the engine goes on telling of others.
const PROOF: u32 = 8;

/// Requests in a row whose blocks did appear, until that is believed after a proof to the contrary.
const HEALED: u32 = 3;

/// What was compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// The tokens of a canary.
    Tokens,
    /// The length of a canary: one side ends where the other goes on.
    Length,
    /// The blocks of real requests, against events.
    Events,
}

/// A proven difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// What was compared.
    pub what: What,
    /// The canary, where it was one.
    pub canary: Option<String>,
    /// The first token that differs; of real requests the first block.
    pub at: usize,
    /// The block it lies in.
    pub block: usize,
    /// Our token there.
    pub ours: Option<u32>,
    /// The engine's token there.
    pub theirs: Option<u32>,
    /// Our text around it. Canaries are ours; of real requests there is none.
    pub our_text: Option<String>,
    /// The engine's text around it.
    pub their_text: Option<String>,
}

/// What one worker's answers to canaries say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "verdict")]
pub enum Verdict {
    /// It was not asked yet.
    #[default]
    Untested,
    /// It tokenises as we do.
    Agrees {
        /// Canaries that were compared.
        compared: usize,
        /// Canaries that were not, and why.
        skipped: BTreeMap<String, String>,
    },
    /// It does not.
    Differs {
        /// Where.
        difference: Box<Difference>,
    },
    /// It cannot be asked.
    CannotTest {
        /// Why.
        why: String,
        /// Whether it may be otherwise soon.
        #[serde(skip)]
        passes: bool,
    },
}

impl Verdict {
    /// The name in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Verdict::Untested => "untested",
            Verdict::Agrees { .. } => "agrees",
            Verdict::Differs { .. } => "differs",
            Verdict::CannotTest { .. } => "cannot_test",
        }
    }
}

/// What a worker's events say of real requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EventsVerdict {
    /// The difference, while it is proven.
    pub differs: Option<Difference>,
    /// Whether the opposite is.
    pub agrees: bool,
    /// Requests whose blocks were missing while the events did not tell all that the engine holds: they prove nothing, and
    /// as long as only these become more, nothing would show that its tokens are others.
    pub undecided: u64,
    /// Requests in a row without their blocks.
    unconfirmed: u32,
    /// Requests in a row with them.
    confirmed: u32,
}

impl EventsVerdict {
    pub(super) fn note(&mut self, evidence: Evidence) {
        match evidence {
            Evidence::Confirmed => {
                self.unconfirmed = 0;
                self.confirmed = self.confirmed.saturating_add(1);
                if self.confirmed >= HEALED {
                    self.agrees = true;
                    self.differs = None;
                }
            }
            Evidence::Unconfirmed { block } => {
                self.confirmed = 0;
                self.unconfirmed = self.unconfirmed.saturating_add(1);
                if self.unconfirmed >= PROOF && self.differs.is_none() {
                    self.agrees = false;
                    let (canary, our_text, their_text) = (None, None, None);
                    let (ours, theirs) = (None, None);
                    let what = What::Events;
                    self.differs = Some(Difference {
                        what,
                        canary,
                        at: block,
                        block,
                        ours,
                        theirs,
                        our_text,
                        their_text,
                    });
                }
            }
        }
    }
}

/// What is known of one worker's tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WorkerParity {
    /// By canaries.
    #[serde(flatten)]
    pub canaries: Verdict,
    /// By real requests.
    pub events: EventsVerdict,
}

impl WorkerParity {
    /// Whether its tokens are known to be others than ours. What its events prove no canary outweighs, but those after
    /// it began anew.
    pub fn differs(&self) -> bool {
        matches!(self.canaries, Verdict::Differs { .. }) || self.events.differs.is_some()
    }

    /// Whether its tokens are known to be ours.
    pub fn agrees(&self) -> bool {
        !self.differs() && (matches!(self.canaries, Verdict::Agrees { .. }) || self.events.agrees)
    }

    /// The name in metrics.
    pub fn label(&self) -> &'static str {
        match () {
            () if self.differs() => "differs",
            () if self.agrees() => "agrees",
            () => self.canaries.label(),
        }
    }
}

/// What is known of one model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ModelParity {
    /// By worker.
    pub workers: BTreeMap<WorkerId, WorkerParity>,
    /// Workers that may be other engines than were tested.
    #[serde(skip)]
    pub(super) doubted: BTreeSet<WorkerId>,
}

impl ModelParity {
    pub(super) fn tested(&mut self, worker: WorkerId, verdict: Verdict) {
        let known = &mut self.workers.entry(worker).or_default().canaries;
        if matches!(verdict, Verdict::CannotTest { .. }) {
            // Who does not answer has not changed its tokens, unless it is somebody else by now; and even then what was
            // wrong is wrong until a test is passed.
            let stays = matches!(known, Verdict::Differs { .. }) || !self.doubted.contains(&worker);
            if !stays || !known.is_proven() {
                *known = verdict;
            }
            return;
        }
        let begun_anew = self.doubted.remove(&worker);
        *known = verdict;
        // What the events of its earlier life proved is outweighed by a round that this life passed.
        if begun_anew && matches!(known, Verdict::Agrees { .. }) {
            self.workers.entry(worker).or_default().events = EventsVerdict::default();
        }
    }

    pub(super) fn seen(&mut self, worker: WorkerId, evidence: Evidence) {
        self.workers
            .entry(worker)
            .or_default()
            .events
            .note(evidence);
    }

    pub(super) fn retain(&mut self, keep: impl Fn(WorkerId) -> bool) {
        self.workers.retain(|worker, _| keep(*worker));
        self.doubted.retain(|worker| keep(*worker));
    }

    /// Those whose tokens are known to be others than ours.
    pub(super) fn differing(&self) -> BTreeSet<WorkerId> {
        self.workers
            .iter()
            .filter(|(_, known)| known.differs())
            .map(|(worker, _)| *worker)
            .collect()
    }

    /// Whether our own tokens are not to be believed at all: somebody makes others, and nobody is known to make ours.
    pub fn is_mistrusted(&self) -> bool {
        self.workers.values().any(WorkerParity::differs)
            && !self.workers.values().any(WorkerParity::agrees)
    }

    /// In one word, for metrics.
    pub fn state(&self) -> &'static str {
        let any = |label: &str| self.workers.values().any(|known| known.label() == label);
        match () {
            () if self.is_mistrusted() => "differs",
            () if any("differs") => "some_differ",
            () if any("agrees") => "agrees",
            () if any("cannot_test") => "cannot_test",
            () => "untested",
        }
    }
}

impl Verdict {
    fn is_proven(&self) -> bool {
        matches!(self, Verdict::Agrees { .. } | Verdict::Differs { .. })
    }
}
