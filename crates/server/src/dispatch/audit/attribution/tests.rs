use super::*;

fn forecast(available: u64, captured: u64) -> HitForecast {
    HitForecast {
        model: "m".into(),
        rank: WorkerRank::new(1, 0),
        role: Some(WorkerRole::Aggregated),
        mode: Mode::Exact,
        reason: None,
        event_cursor: None,
        prompt_tokens: 100,
        reusable_tokens: 96,
        available_tokens: available,
        captured_tokens: captured,
        chance_tokens: captured / 2,
        block_size: BlockSize::new(16).unwrap(),
        recomputes_last_block: false,
    }
}

const NO_EVIDENCE: MissEvidence = MissEvidence {
    events: EventEvidence::Absent,
    served_elsewhere: false,
    rounding_tokens: 0,
    is_last_block_difference: false,
};

/// Returns the usage of a prompt of 100 tokens.
fn usage(cached_tokens: u64) -> ReportedUsage {
    ReportedUsage {
        prompt_tokens: 100,
        cached_tokens,
    }
}

/// Forecast, report and evidence, with the expected missed tokens and error.
type AttributionCase<'a> = (
    HitForecast,
    ReportedUsage,
    MissEvidence,
    &'a [(MissCause, u64)],
    Option<(i64, MissCause)>,
);

fn assert_attributed(cases: &[AttributionCase<'_>]) {
    for (forecast, usage, evidence, missed, error) in cases {
        let entry = attribute_miss(forecast, *usage, *evidence);
        assert_eq!(
            (&entry.missed_tokens[..], entry.error),
            (*missed, *error),
            "{forecast:?} {usage:?} {evidence:?}"
        );
        let sum: u64 = entry.missed_tokens.iter().map(|(_, tokens)| tokens).sum();
        assert_eq!(sum, usage.prompt_tokens - entry.usage.cached_tokens);
    }
}

#[test]
fn fewer_cached_tokens_are_attributed() {
    use MissCause::{
        BlockAlignment as Align, Evicted, LoadBalancing as Balancing, NotCached, StaleIndex,
        Unknown,
    };
    let explained = MissEvidence {
        events: EventEvidence::Present,
        ..NO_EVIDENCE
    };
    let undecidable = MissEvidence {
        events: EventEvidence::Unknown,
        ..NO_EVIDENCE
    };
    assert_attributed(&[
        (
            forecast(96, 96),
            usage(96),
            NO_EVIDENCE,
            &[(Align, 4)],
            None,
        ),
        (
            forecast(0, 0),
            usage(0),
            NO_EVIDENCE,
            &[(Align, 4), (NotCached, 96)],
            None,
        ),
        (
            forecast(64, 32),
            usage(32),
            NO_EVIDENCE,
            &[(Align, 4), (Balancing, 32), (NotCached, 32)],
            None,
        ),
        (
            forecast(64, 32),
            usage(16),
            explained,
            &[(Align, 4), (Evicted, 16), (Balancing, 32), (NotCached, 32)],
            Some((-1, Evicted)),
        ),
        (
            forecast(32, 32),
            usage(0),
            NO_EVIDENCE,
            &[(Align, 4), (StaleIndex, 32), (NotCached, 64)],
            Some((-2, StaleIndex)),
        ),
        (
            forecast(32, 32),
            usage(0),
            undecidable,
            &[(Align, 4), (Unknown, 32), (NotCached, 64)],
            Some((-2, Unknown)),
        ),
    ]);
}

/// Surplus cached tokens first reduce the tokens missed by load balancing, and then the tokens that
/// were not cached.
#[test]
fn surplus_cached_tokens_are_attributed() {
    use MissCause::{
        BlockAlignment as Align, BlockRounding as Rounding, LoadBalancing as Balancing, NotCached,
        StaleIndex, StoredMeanwhile as Stored,
    };
    let explained = MissEvidence {
        events: EventEvidence::Present,
        ..NO_EVIDENCE
    };
    let smaller_blocks = MissEvidence {
        rounding_tokens: 8,
        ..NO_EVIDENCE
    };
    assert_attributed(&[
        (
            forecast(64, 32),
            usage(48),
            explained,
            &[(Align, 4), (Balancing, 16), (NotCached, 32)],
            Some((1, Stored)),
        ),
        (
            forecast(64, 32),
            usage(96),
            explained,
            &[(Align, 4)],
            Some((4, Stored)),
        ),
        (
            forecast(64, 32),
            usage(96),
            NO_EVIDENCE,
            &[(Align, 4)],
            Some((4, StaleIndex)),
        ),
        // A surplus of less than one block is rounding.
        (
            forecast(32, 32),
            usage(40),
            smaller_blocks,
            &[(Align, 4), (NotCached, 56)],
            Some((1, Rounding)),
        ),
        (
            forecast(32, 32),
            usage(48),
            smaller_blocks,
            &[(Align, 4), (NotCached, 48)],
            Some((1, StaleIndex)),
        ),
        // An impossible report is clamped.
        (
            forecast(32, 32),
            usage(u64::MAX),
            NO_EVIDENCE,
            &[],
            Some((5, StaleIndex)),
        ),
    ]);
}

#[test]
fn inexact_forecasts_are_attributed() {
    use MissCause::{
        Approximate, BlockAlignment as Align, LoadBalancing as Balancing, LoadOnly, NotCached,
        ServedElsewhere as Elsewhere, TokenMismatch,
    };
    let served_elsewhere = MissEvidence {
        served_elsewhere: true,
        ..NO_EVIDENCE
    };
    let mode = |mode, reason| HitForecast {
        mode,
        reason,
        ..forecast(64, 32)
    };
    assert_attributed(&[
        (
            forecast(32, 32),
            usage(0),
            served_elsewhere,
            &[(Align, 4), (Elsewhere, 32), (NotCached, 64)],
            Some((-2, Elsewhere)),
        ),
        (
            mode(Mode::Approximate, None),
            usage(16),
            NO_EVIDENCE,
            &[
                (Align, 4),
                (Approximate, 16),
                (Balancing, 32),
                (NotCached, 32),
            ],
            Some((-1, Approximate)),
        ),
        (
            mode(Mode::LoadOnly, Some(Reason::IndexCold)),
            usage(16),
            NO_EVIDENCE,
            &[(Align, 4), (LoadOnly, 80)],
            None,
        ),
        (
            mode(Mode::LoadOnly, Some(Reason::ParityMismatch)),
            usage(0),
            NO_EVIDENCE,
            &[(Align, 4), (TokenMismatch, 96)],
            None,
        ),
    ]);
}

#[test]
fn other_prompt_length_is_a_parity_difference() {
    let usage = ReportedUsage {
        prompt_tokens: 101,
        cached_tokens: 32,
    };
    assert!(
        !needs_events(&forecast(32, 32), usage),
        "no event explains the difference"
    );
    assert_eq!(
        attribute_miss(&forecast(32, 32), usage, NO_EVIDENCE).error,
        Some((0, MissCause::TokenMismatch))
    );
    let predicted = forecast(32, 32);
    let entry = attribute_miss(
        &predicted,
        ReportedUsage {
            prompt_tokens: 100,
            cached_tokens: 40,
        },
        NO_EVIDENCE,
    );
    assert_eq!(
        entry.error,
        Some((1, MissCause::StaleIndex)),
        "part of a block counts as one"
    );
}
