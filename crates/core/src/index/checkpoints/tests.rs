use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn names(numbers: impl IntoIterator<Item = u64>) -> Vec<SequenceHash> {
    numbers.into_iter().map(SequenceHash).collect()
}

proptest! {
    /// Checkpoints are at every fourth position here. Some are missing, and from one on all belong
    /// to another prompt.
    #[test]
    fn checkpoints_match_only_the_same_prompt(
        from in 0..9usize, len in 0..40usize, left in vec(any::<bool>(), 12), other in 0..50usize,
    ) {
        let mut marks = PrefixCheckpoints::default();
        marks.resize(48);
        let name = |at: usize| if at < other { at as u64 + 1 } else { at as u64 + 1_001 };
        for at in (0..48).filter(|at| left[at / CHECKPOINT_INTERVAL]) {
            marks.record(at, SequenceHash(name(at)));
        }
        let asked = names((from..from + len).map(|at| at as u64 + 1));
        let agree = (from..from + len).take_while(|at| *at < other).count();
        let known = marks.matching_len(from, &asked);
        prop_assert!(known <= agree, "{known} of {agree}");
        if left.iter().all(|left| *left) {
            prop_assert!(agree - known < CHECKPOINT_INTERVAL);
        }
        prop_assert!(known == 0 || (from + known).is_multiple_of(CHECKPOINT_INTERVAL));
        marks.clear(from..from + len);
        prop_assert_eq!(marks.matching_len(from, &asked), 0);
    }
}
