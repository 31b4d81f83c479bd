//! One answer judged: what its engine found cached against what was foreseen, and for every token that was not found, why.
//! Pure. The causes of one answer add up to the tokens that were missed, so that the sums over many answers do, too.

use serde::{Deserialize, Serialize};

use crate::index::Moment;
use crate::router::{Mode, Reason, Route};
use crate::worker::{BlockSize, ModelName, Role, WorkerRank};

/// The prediction for the worker rank that computes the prompt, made when the request was routed.
#[derive(Clone, Debug, PartialEq)]
pub struct Foreseen {
    /// The model.
    pub model: ModelName,
    /// The worker rank that computes the prompt.
    pub chosen: WorkerRank,
    /// The role of its worker; none if that has left the fleet.
    pub role: Option<Role>,
    /// How its cache was known.
    pub mode: Mode,
    /// Why no better.
    pub reason: Option<Reason>,
    /// How far the events of the chosen one were, where it tells any.
    pub since: Option<Moment>,
    /// Tokens of the prompt, as we count them.
    pub prompt: u64,
    /// Those that an engine could find cached at best.
    pub reusable: u64,
    /// Those cached at the best candidate.
    pub available: u64,
    /// Those cached at the chosen one.
    pub captured: u64,
    /// Those that a candidate taken by chance would have had.
    pub by_chance: u64,
    /// Tokens per block.
    pub block_size: BlockSize,
}

impl Foreseen {
    /// Creates the prediction from a route. `role` and `since` describe the worker rank that computes the prompt.
    pub fn of(route: &Route, role: Option<Role>, since: Option<Moment>) -> Self {
        let computed_by = route.computed_by();
        Self {
            model: route.model.clone(),
            chosen: computed_by.rank,
            role,
            mode: route.mode,
            reason: route.reason,
            since,
            prompt: route.prompt_tokens,
            reusable: route.reusable_tokens,
            available: computed_by.best_cached_tokens,
            captured: computed_by.cached_tokens,
            by_chance: computed_by.chance_cached_tokens,
            block_size: route.block_size,
        }
    }
}

/// What the engine said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said {
    /// Tokens of the prompt.
    pub prompt: u64,
    /// Those it found cached.
    pub cached: u64,
}

/// What is known of the time between the choice and the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    /// Whether the chosen worker rank's events tell what its engine found: that blocks of the prompt went, or came.
    pub told: Told,
    /// Whether somebody else served the request.
    pub moved: bool,
    /// Tokens that the engine may find beyond the whole predicted blocks, because its blocks are smaller.
    pub rounding: u64,
}

/// Whether events tell something. The later ones outweigh the earlier where there are several prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Told {
    /// They do not.
    #[default]
    No,
    /// There were too many since to remember.
    Forgotten,
    /// They do.
    Yes,
}

impl From<bool> for Told {
    fn from(told: bool) -> Self {
        if told { Self::Yes } else { Self::No }
    }
}

/// Why tokens of a prompt were not found cached, or were although nobody foresaw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// An engine reuses whole blocks, and never the last token.
    BlockAlignment,
    /// Nobody had them.
    Workload,
    /// Somebody had them, and another was chosen for its load.
    LoadSpill,
    /// The chosen worker dropped them between the choice and the prefill.
    Evicted,
    /// Only between the choice and the prefill did the chosen worker get them.
    StoredMeanwhile,
    /// The engine has smaller blocks, so it reused a further part of a block.
    BlockRounding,
    /// The index said something else than was true.
    StaleIndex,
    /// The chosen worker dropped them or the index was wrong: so much was told since that it is not remembered which.
    Unknown,
    /// The engine's tokens are others than ours.
    Parity,
    /// Somebody else served the request than was chosen.
    ServedElsewhere,
    /// The cache was guessed or the prompt known in part only.
    Guess,
    /// Nothing was foreseen: the request went by load.
    Unforeseen,
}

/// A cause that is missing in the list fails to compile, as long as the last one stays the last.
const _: () = assert!(Cause::ALL.len() == Cause::Unforeseen as usize + 1);

impl Cause {
    /// Every cause.
    pub const ALL: [Self; 12] = [
        Self::BlockAlignment,
        Self::Workload,
        Self::LoadSpill,
        Self::Evicted,
        Self::StoredMeanwhile,
        Self::BlockRounding,
        Self::StaleIndex,
        Self::Unknown,
        Self::Parity,
        Self::ServedElsewhere,
        Self::Guess,
        Self::Unforeseen,
    ];

    /// The name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Cause::BlockAlignment => "block_alignment",
            Cause::Workload => "workload",
            Cause::LoadSpill => "load_spill",
            Cause::Evicted => "evicted",
            Cause::StoredMeanwhile => "stored_meanwhile",
            Cause::BlockRounding => "block_rounding",
            Cause::StaleIndex => "stale_index",
            Cause::Unknown => "unknown",
            Cause::Parity => "parity",
            Cause::ServedElsewhere => "served_elsewhere",
            Cause::Guess => "guess",
            Cause::Unforeseen => "unforeseen",
        }
    }

    /// The same in words.
    pub fn words(self) -> &'static str {
        match self {
            Cause::BlockAlignment => "no whole block (or the last token)",
            Cause::Workload => "no worker had cached it",
            Cause::LoadSpill => "another worker was chosen for its load",
            Cause::Evicted => "evicted before the prefill",
            Cause::StoredMeanwhile => "stored before the prefill",
            Cause::BlockRounding => "the engine's blocks are smaller than `block_size`",
            Cause::StaleIndex => "the index was out of date",
            Cause::Unknown => "too many later events to decide",
            Cause::Parity => "the engine's tokens differ",
            Cause::ServedElsewhere => "another worker served it",
            Cause::Guess => "the cache was predicted without events",
            Cause::Unforeseen => "routed by load alone",
        }
    }
}

/// A judged answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// The model.
    pub model: ModelName,
    /// The role of the worker that computed the prompt; none if it has left the fleet.
    pub role: Option<Role>,
    /// Tokens of the prompt, as the engine counts them.
    pub prompt: u64,
    /// What the best candidate had.
    pub available: u64,
    /// What the chosen one had.
    pub captured: u64,
    /// What one by chance would have had.
    pub by_chance: u64,
    /// What the engine found.
    pub delivered: u64,
    /// Tokens that were not found, by cause.
    pub missed: Vec<(Cause, u64)>,
    /// By how many blocks more was found than foreseen (or less), and why.
    pub error: Option<(i64, Cause)>,
    /// Whether anything was foreseen.
    pub foreseen: bool,
}

/// Whether it takes the events of the time to judge an answer.
pub(super) fn needs_events(foreseen: &Foreseen, said: Said) -> bool {
    foreseen.mode == Mode::Exact
        && said.prompt == foreseen.prompt
        && said.cached != foreseen.captured
}

/// Tokens of a prompt that is believed to be one; an engine may say anything, and what it says is summed up.
pub(super) const LONGEST: u64 = 1 << 40;

/// Judges an answer.
pub fn judge(foreseen: &Foreseen, said: Said, evidence: Evidence) -> Verdict {
    let prompt = said.prompt.min(LONGEST);
    let said = Said {
        prompt,
        cached: said.cached.min(prompt),
    };
    let delivered = said.cached;
    let known = !is_unforeseen(foreseen);
    let error = if known {
        error(foreseen, said, evidence)
    } else {
        None
    };
    let mut verdict = Verdict {
        model: foreseen.model.clone(),
        role: foreseen.role,
        prompt: said.prompt,
        available: if known { foreseen.available } else { 0 },
        captured: if known { foreseen.captured } else { 0 },
        by_chance: if known { foreseen.by_chance } else { 0 },
        delivered,
        missed: Vec::new(),
        error,
        foreseen: known,
    };
    let size = foreseen.block_size.tokens() as u64;
    let reusable = if known {
        foreseen.reusable
    } else {
        said.prompt.saturating_sub(1) / size * size
    };
    let reusable = reusable.min(said.prompt).max(delivered);
    let mut rest = said.prompt - delivered;
    let mut missed = |cause: Cause, tokens: u64| {
        let tokens = tokens.min(rest);
        rest -= tokens;
        if tokens > 0 {
            verdict.missed.push((cause, tokens));
        }
    };
    missed(Cause::BlockAlignment, said.prompt - reusable);
    if !known {
        let because = if foreseen.reason == Some(Reason::ParityMismatch) {
            Cause::Parity
        } else {
            Cause::Unforeseen
        };
        missed(because, u64::MAX);
        return verdict;
    }
    // From the bottom up: what was expected and did not come, what was given up for load, and what nobody had.
    if let Some((_, because)) = error {
        missed(because, foreseen.captured.saturating_sub(delivered));
    }
    missed(
        Cause::LoadSpill,
        foreseen
            .available
            .saturating_sub(foreseen.captured.max(delivered)),
    );
    missed(Cause::Workload, u64::MAX);
    verdict
}

fn is_unforeseen(foreseen: &Foreseen) -> bool {
    matches!(foreseen.mode, Mode::LoadOnly | Mode::Passthrough)
}

/// The difference to what was foreseen in blocks, and its cause.
fn error(foreseen: &Foreseen, said: Said, evidence: Evidence) -> Option<(i64, Cause)> {
    let size = foreseen.block_size.tokens() as i64;
    let difference = said.cached as i64 - foreseen.captured as i64;
    // Part of a block is a difference, too.
    let blocks = difference.signum() * (difference.abs() + size - 1).div_euclid(size);
    let cause = match difference {
        _ if evidence.moved => Cause::ServedElsewhere,
        _ if foreseen.mode == Mode::Exact && said.prompt != foreseen.prompt => Cause::Parity,
        0 => return None,
        _ if foreseen.mode != Mode::Exact => Cause::Guess,
        1.. if difference as u64 <= evidence.rounding => Cause::BlockRounding,
        _ if evidence.told == Told::Forgotten => Cause::Unknown,
        _ if evidence.told == Told::No => Cause::StaleIndex,
        ..0 => Cause::Evicted,
        1.. => Cause::StoredMeanwhile,
    };
    Some((blocks, cause))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::{DpRank, WorkerId};

    fn foreseen(available: u64, captured: u64) -> Foreseen {
        Foreseen {
            model: "m".into(),
            chosen: WorkerRank {
                worker: WorkerId(1),
                rank: DpRank(0),
            },
            role: Some(Role::Aggregated),
            mode: Mode::Exact,
            reason: None,
            since: None,
            prompt: 100,
            reusable: 96,
            available,
            captured,
            by_chance: captured / 2,
            block_size: BlockSize::new(16).unwrap(),
        }
    }

    const UNTOLD: Evidence = Evidence {
        told: Told::No,
        moved: false,
        rounding: 0,
    };

    #[test]
    fn the_causes_add_up_to_what_was_missed() {
        use Cause::{
            BlockAlignment as Align, BlockRounding as Rounding, Evicted, Guess, LoadSpill as Spill,
            Parity, ServedElsewhere as Elsewhere, StaleIndex, StoredMeanwhile as Stored,
            Unforeseen, Unknown, Workload,
        };
        let said = |cached| Said {
            prompt: 100,
            cached,
        };
        let told = Evidence {
            told: Told::Yes,
            ..UNTOLD
        };
        let forgotten = Evidence {
            told: Told::Forgotten,
            ..UNTOLD
        };
        let moved = Evidence {
            moved: true,
            ..UNTOLD
        };
        let smaller = Evidence {
            rounding: 8,
            ..UNTOLD
        };
        let mode = |mode, reason| Foreseen {
            mode,
            reason,
            ..foreseen(64, 32)
        };
        type Case<'a> = (
            Foreseen,
            Said,
            Evidence,
            &'a [(Cause, u64)],
            Option<(i64, Cause)>,
        );
        let cases: [Case<'_>; 16] = [
            (foreseen(96, 96), said(96), UNTOLD, &[(Align, 4)], None),
            (
                foreseen(0, 0),
                said(0),
                UNTOLD,
                &[(Align, 4), (Workload, 96)],
                None,
            ),
            (
                foreseen(64, 32),
                said(32),
                UNTOLD,
                &[(Align, 4), (Spill, 32), (Workload, 32)],
                None,
            ),
            (
                foreseen(64, 32),
                said(16),
                told,
                &[(Align, 4), (Evicted, 16), (Spill, 32), (Workload, 32)],
                Some((-1, Evicted)),
            ),
            (
                foreseen(32, 32),
                said(0),
                UNTOLD,
                &[(Align, 4), (StaleIndex, 32), (Workload, 64)],
                Some((-2, StaleIndex)),
            ),
            (
                foreseen(32, 32),
                said(0),
                forgotten,
                &[(Align, 4), (Unknown, 32), (Workload, 64)],
                Some((-2, Unknown)),
            ),
            // More than was foreseen: first others had less to offer, then nobody had nothing.
            (
                foreseen(64, 32),
                said(48),
                told,
                &[(Align, 4), (Spill, 16), (Workload, 32)],
                Some((1, Stored)),
            ),
            (
                foreseen(64, 32),
                said(96),
                told,
                &[(Align, 4)],
                Some((4, Stored)),
            ),
            (
                foreseen(64, 32),
                said(96),
                UNTOLD,
                &[(Align, 4)],
                Some((4, StaleIndex)),
            ),
            // Less than one block is the known rounding; more is an error.
            (
                foreseen(32, 32),
                said(40),
                smaller,
                &[(Align, 4), (Workload, 56)],
                Some((1, Rounding)),
            ),
            (
                foreseen(32, 32),
                said(48),
                smaller,
                &[(Align, 4), (Workload, 48)],
                Some((1, StaleIndex)),
            ),
            (
                foreseen(32, 32),
                said(0),
                moved,
                &[(Align, 4), (Elsewhere, 32), (Workload, 64)],
                Some((-2, Elsewhere)),
            ),
            (
                mode(Mode::Approximate, None),
                said(16),
                UNTOLD,
                &[(Align, 4), (Guess, 16), (Spill, 32), (Workload, 32)],
                Some((-1, Guess)),
            ),
            (
                mode(Mode::LoadOnly, Some(Reason::IndexCold)),
                said(16),
                UNTOLD,
                &[(Align, 4), (Unforeseen, 80)],
                None,
            ),
            (
                mode(Mode::LoadOnly, Some(Reason::ParityMismatch)),
                said(0),
                UNTOLD,
                &[(Align, 4), (Parity, 96)],
                None,
            ),
            // Nonsense of an engine is cut to size.
            (
                foreseen(32, 32),
                said(u64::MAX),
                UNTOLD,
                &[],
                Some((5, StaleIndex)),
            ),
        ];
        for (foreseen, said, evidence, missed, error) in cases {
            let verdict = judge(&foreseen, said, evidence);
            assert_eq!(
                (&verdict.missed[..], verdict.error),
                (missed, error),
                "{foreseen:?} {said:?} {evidence:?}"
            );
            let sum: u64 = verdict.missed.iter().map(|(_, tokens)| tokens).sum();
            assert_eq!(sum, said.prompt - verdict.delivered);
        }
    }

    #[test]
    fn another_number_of_prompt_tokens_is_a_parity_difference_even_where_the_cached_ones_agree() {
        let said = Said {
            prompt: 101,
            cached: 32,
        };
        assert!(
            !needs_events(&foreseen(32, 32), said),
            "no event explains that"
        );
        assert_eq!(
            judge(&foreseen(32, 32), said, UNTOLD).error,
            Some((0, Cause::Parity))
        );
        let part = judge(
            &foreseen(32, 32),
            Said {
                prompt: 100,
                cached: 40,
            },
            UNTOLD,
        );
        assert_eq!(
            part.error,
            Some((1, Cause::StaleIndex)),
            "part of a block counts as one"
        );
    }
}
