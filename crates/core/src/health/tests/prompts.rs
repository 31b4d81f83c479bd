//! Prompts that fail: the fault of the prompt or of the rank.

use super::*;

impl Fixture {
    /// Returns the ranks that a request with this prompt avoids.
    fn avoided(&self, prompt: &[u64]) -> Vec<(WorkerRank, HealthState)> {
        let prompt: Vec<_> = prompt.iter().copied().map(SequenceHash).collect();
        let avoided = self.health.unhealthy_ranks(&prompt, self.now);
        avoided.into_iter().collect()
    }
}

#[test]
fn prompt_that_fails_on_two_ranks_is_at_fault() {
    let fixture = Fixture::new(3);
    let fails = |worker| fixture.report_prompt(worker, RequestOutcome::ServerError, &[1, 2]);
    fixture.report(3, RequestOutcome::Delivered);
    assert_eq!(fails(1), []);
    for _ in 0..20 {
        assert_eq!(fails(2), []);
        assert_eq!(fails(1), []);
        fixture.report(3, RequestOutcome::Delivered);
    }
    // A continuation of the same conversation.
    for _ in 0..20 {
        assert_eq!(
            fixture.report_prompt(1, RequestOutcome::ServerError, &[1, 2, 3]),
            []
        );
    }
    assert_eq!(fixture.health(1), HealthState::Healthy);
}

#[test]
fn prompt_that_fails_elsewhere_readmits_rank() {
    let fixture = Fixture::new(3);
    fixture.report_prompt(1, RequestOutcome::ServerError, &[1]);
    fixture.report(2, RequestOutcome::Delivered);
    (0..4).for_each(|_| _ = fixture.report_prompt(1, RequestOutcome::ServerError, &[1]));
    assert_eq!(fixture.health(1), HealthState::Ejected);
    assert_eq!(
        fixture.report_prompt(2, RequestOutcome::ServerError, &[1]),
        [HealthChange::Readmitted]
    );
}

#[test]
fn failed_prompt_avoids_its_rank() {
    // A worker that reports overload is avoided for a while by all requests.
    for outcome in failures().filter(|outcome| *outcome != RequestOutcome::Overloaded) {
        let fixture = Fixture::new(3);
        fixture.report_prompt(1, outcome, &[1, 2]);
        let suspect = [(rank(1), HealthState::Suspect)];
        assert_eq!(fixture.avoided(&[1, 2]), suspect, "{outcome:?}");
        assert_eq!(fixture.avoided(&[1, 2, 3]), suspect, "{outcome:?}");
        for other in [&[1][..], &[1, 3], &[2], &[]] {
            assert_eq!(fixture.avoided(other), [], "{outcome:?} {other:?}");
        }
        assert_eq!(fixture.health(1), HealthState::Healthy);
    }
}

#[test]
fn retry_of_hung_request_avoids_its_rank() {
    let mut fixture = Fixture::new(2);
    fixture.deliver(2);
    let mut hung = fixture.start(1, Some(seconds(1)));
    fixture.now += seconds(5);
    assert_eq!(fixture.tick(), [HealthChange::Suspected]);
    fixture.report(2, RequestOutcome::Delivered);
    assert_eq!(fixture.health(1), HealthState::Ejected);
    fixture.now += seconds(2);
    assert_eq!(fixture.health(1), HealthState::ProbeDue);

    let prompt: Vec<_> = [1, 2].map(SequenceHash).into();
    hung.report(RequestOutcome::Cancelled, &prompt, fixture.now);
    assert_eq!(fixture.avoided(&[1, 2]), [(rank(1), HealthState::Ejected)]);
    assert_eq!(fixture.avoided(&[3]), [(rank(1), HealthState::ProbeDue)]);
    fixture.now += seconds(10);
    assert_eq!(
        fixture.avoided(&[1, 2]),
        [(rank(1), HealthState::ProbeForced)]
    );
}

#[test]
fn prompt_that_fails_on_two_ranks_avoids_none() {
    let fixture = Fixture::new(3);
    fixture.report_prompt(1, RequestOutcome::Rejected, &[1, 2]);
    fixture.report_prompt(2, RequestOutcome::Rejected, &[1, 2]);
    assert_eq!(fixture.avoided(&[1, 2]), []);
}

#[test]
fn failed_prompt_returns_after_deliveries_or_a_minute() {
    let mut fixture = Fixture::new(3);
    fixture.report_prompt(1, RequestOutcome::Rejected, &[1]);
    fixture.repeat(1, RequestOutcome::Delivered, 2);
    assert_eq!(fixture.avoided(&[1]), []);
    fixture.report_prompt(1, RequestOutcome::Rejected, &[1]);
    fixture.now += seconds(61);
    assert_eq!(fixture.tick(), []);
    assert_eq!(fixture.avoided(&[1]), []);
    assert!(fixture.health.is_all_healthy());
}

#[test]
fn delivery_by_peer_proves_rejection() {
    let fixture = Fixture::new(3);
    let mut changes = Vec::new();
    for prompt in 1..=3 {
        assert_eq!(changes, []);
        fixture.report_prompt(1, RequestOutcome::Rejected, &[prompt]);
        // The failed request, repeated by the client on another rank.
        changes = fixture.report_prompt(2, RequestOutcome::Delivered, &[prompt]);
    }
    assert_eq!(changes, [HealthChange::Ejected(seconds(1))]);
}

#[test]
fn delivery_by_peer_does_not_prove_overload() {
    let fixture = Fixture::new(3);
    for prompt in 1..=5 {
        fixture.report_prompt(1, RequestOutcome::Overloaded, &[prompt]);
        let changes = fixture.report_prompt(2, RequestOutcome::Delivered, &[prompt]);
        assert_eq!(changes, []);
    }
}
