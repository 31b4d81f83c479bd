//! Models of which no rank delivers.

use super::*;

impl Fixture {
    /// Returns what changed: the failures of a group that stopped, or `resumed`.
    fn delivery_changes(&self) -> Vec<String> {
        self.delivery_changes_without(&[])
    }

    fn delivery_changes_without(&self, unreachable: &[u64]) -> Vec<String> {
        let unreachable = unreachable.iter().map(|id| (WorkerId(*id), seconds(9)));
        let unreachable = unreachable.collect();
        let (failing, changes) = self.health.with_model(|model| {
            let failing = model.failing_groups(&unreachable, self.now);
            (failing, model.update_deliveries(&unreachable, self.now))
        });
        let describe = |change| match change {
            DeliveryTransition::Stopped(group) => {
                assert_eq!(failing.as_slice(), std::slice::from_ref(&group));
                format!("{} of {}", group.failures, group.ranks)
            }
            DeliveryTransition::Resumed(..) => {
                assert_eq!(failing, []);
                "resumed".to_owned()
            }
        };
        changes.into_iter().map(describe).collect()
    }
}

#[test]
fn failures_of_all_ranks_are_reported_once() {
    let mut fixture = Fixture::new(3);
    fixture.deliver(1);
    for worker in [1, 2, 3, 1, 2] {
        fixture.report(worker, RequestOutcome::ServerError);
    }
    assert_eq!(fixture.delivery_changes(), [""; 0]);
    fixture.now += seconds(2);
    assert_eq!(fixture.delivery_changes(), ["server_error=5 of 3"]);
    fixture.report(3, RequestOutcome::Empty);
    fixture.now += seconds(100);
    assert_eq!(fixture.delivery_changes(), [""; 0]);
    fixture.deliver(2);
    assert_eq!(fixture.delivery_changes(), ["resumed"]);
    assert_eq!(fixture.delivery_changes(), [""; 0]);
}

#[test]
fn model_with_an_untried_rank_is_not_failing() {
    let mut fixture = Fixture::new(3);
    fixture.repeat(1, RequestOutcome::ServerError, 9);
    fixture.repeat(2, RequestOutcome::ServerError, 9);
    fixture.now += seconds(60);
    assert_eq!(fixture.delivery_changes(), [""; 0]);
    assert_eq!(
        fixture.delivery_changes_without(&[3]),
        ["server_error=18 of 3"]
    );
}

#[test]
fn rejected_requests_need_twice_the_number() {
    let mut fixture = Fixture::new(1);
    fixture.repeat(1, RequestOutcome::Rejected, 5);
    fixture.now += seconds(60);
    assert_eq!(fixture.delivery_changes(), [""; 0]);
    fixture.report(1, RequestOutcome::Rejected);
    assert_eq!(fixture.delivery_changes(), ["rejected=6 of 1"]);
}

#[test]
fn model_without_reachable_rank_is_failing() {
    let fixture = Fixture::new(2);
    assert_eq!(fixture.delivery_changes_without(&[1]), [""; 0]);
    assert_eq!(fixture.delivery_changes_without(&[1, 2]), [" of 2"]);
    assert_eq!(fixture.delivery_changes_without(&[1]), ["resumed"]);
}
