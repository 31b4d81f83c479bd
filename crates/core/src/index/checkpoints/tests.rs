use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn sequences(numbers: impl IntoIterator<Item = u64>) -> Vec<SequenceHash> {
    numbers.into_iter().map(SequenceHash).collect()
}

proptest! {
    /// Checkpoints are at every fourth position here. Some are missing, and from one on all belong
    /// to another prompt.
    #[test]
    fn checkpoints_match_only_the_same_prompt(
        from in 0..9usize, len in 0..40usize, is_recorded in vec(any::<bool>(), 12), other in 0..50usize,
    ) {
        let mut checkpoints = PrefixCheckpoints::default();
        checkpoints.resize(48);
        let sequence = |at: usize| if at < other { at as u64 + 1 } else { at as u64 + 1_001 };
        for at in (0..48).filter(|at| is_recorded[at / CHECKPOINT_INTERVAL]) {
            checkpoints.record(at, SequenceHash(sequence(at)));
        }
        let prompt = sequences((from..from + len).map(|at| at as u64 + 1));
        let matching = (from..from + len).take_while(|at| *at < other).count();
        let known = checkpoints.matching_len(from, &prompt);
        prop_assert!(known <= matching, "{known} of {matching}");
        if is_recorded.iter().all(|is_recorded| *is_recorded) {
            prop_assert!(matching - known < CHECKPOINT_INTERVAL);
        }
        prop_assert!(known == 0 || (from + known).is_multiple_of(CHECKPOINT_INTERVAL));
        checkpoints.clear(from..from + len);
        prop_assert_eq!(checkpoints.matching_len(from, &prompt), 0);
    }
}
