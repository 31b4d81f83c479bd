use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn names(numbers: impl IntoIterator<Item = u64>) -> Vec<SequenceHash> {
    numbers.into_iter().map(SequenceHash).collect()
}

proptest! {
    /// Marks are at every fourth position here; some are left by nobody, and from one on all are of another prompt.
    #[test]
    fn no_more_is_known_than_was_left_by_the_same(
        from in 0..9usize, len in 0..40usize, left in vec(any::<bool>(), 12), other in 0..50usize,
    ) {
        let mut marks = Marks::default();
        marks.fit(48);
        let name = |at: usize| if at < other { at as u64 + 1 } else { at as u64 + 1_001 };
        for at in (0..48).filter(|at| left[at / APART]) {
            marks.leave(at, SequenceHash(name(at)));
        }
        let asked = names((from..from + len).map(|at| at as u64 + 1));
        let agree = (from..from + len).take_while(|at| *at < other).count();
        let known = marks.known(from, &asked);
        prop_assert!(known <= agree, "{known} of {agree}");
        if left.iter().all(|left| *left) {
            prop_assert!(agree - known < APART);
        }
        prop_assert!(known == 0 || (from + known).is_multiple_of(APART));
        marks.forget(from..from + len);
        prop_assert_eq!(marks.known(from, &asked), 0);
    }
}
