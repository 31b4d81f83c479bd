//! Blocks that wait for another engine: what a prefill leaves behind stays pinned under the name of its request until the
//! decode side has it, or until nobody came in time. A plain value: the time is passed in.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::time::Instant;

use super::cache::Sequence;

/// What the other engine has to know to come for the blocks.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Lent {
    pub(crate) name: Arc<str>,
    pub(crate) blocks: Vec<usize>,
    /// Tokens whose keys and values are in them.
    pub(crate) tokens: usize,
}

#[derive(Debug)]
struct Lease {
    sequence: Sequence,
    /// Without one it stays until it is taken.
    until: Option<Instant>,
}

/// The leases of one rank.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    held: HashMap<Arc<str>, Lease>,
    expired: u64,
}

impl Leases {
    /// A name that is held already comes to mean the new one; the blocks of the old one are to be released.
    pub(crate) fn grant(
        &mut self,
        name: Arc<str>,
        sequence: Sequence,
        until: Option<Instant>,
    ) -> (Lent, Option<Sequence>) {
        let lent = Lent {
            name: name.clone(),
            blocks: sequence.block_numbers(),
            tokens: sequence.computed(),
        };
        let replaced = self.held.insert(name, Lease { sequence, until });
        (lent, replaced.map(|lease| lease.sequence))
    }

    /// The numbers of the blocks.
    pub(crate) fn blocks(&self, name: &str) -> Option<Vec<usize>> {
        Some(self.held.get(name)?.sequence.block_numbers())
    }

    /// Makes a lease last until then at least.
    pub(crate) fn extend(&mut self, name: &str, until: Instant) {
        if let Some(lease) = self.held.get_mut(name) {
            lease.until = lease.until.map(|before| before.max(until));
        }
    }

    /// Ends a lease; its blocks are to be released.
    pub(crate) fn take(&mut self, name: &str) -> Option<Sequence> {
        self.held.remove(name).map(|lease| lease.sequence)
    }

    /// Ends those whose time is over; their blocks are to be released.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<Sequence> {
        let over = |_: &Arc<str>, lease: &mut Lease| lease.until.is_some_and(|until| until <= now);
        let expired: Vec<_> = self
            .held
            .extract_if(over)
            .map(|(_, lease)| lease.sequence)
            .collect();
        self.expired += expired.len() as u64;
        expired
    }

    /// When the next of them ends.
    pub(crate) fn next_end(&self) -> Option<Instant> {
        self.held.values().filter_map(|lease| lease.until).min()
    }

    pub(crate) fn held(&self) -> usize {
        self.held.len()
    }

    pub(crate) fn expired(&self) -> u64 {
        self.expired
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::cache::Keys;
    use super::*;

    fn sequence() -> Sequence {
        Sequence::new(vec![1, 2, 3], Keys::default())
    }

    #[test]
    fn a_lease_ends_when_it_is_taken_or_its_time_is_over_and_a_sign_of_life_prolongs_it() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut leases = Leases::default();
        for (name, until) in [
            ("a", Some(at(10))),
            ("b", Some(at(10))),
            ("c", Some(at(10))),
            ("d", None),
        ] {
            leases.grant(name.into(), sequence(), until);
        }
        leases.extend("b", at(20));
        leases.extend("c", at(5));
        leases.extend("d", at(5));
        leases.extend("nobody", at(99));
        assert!(leases.take("a").is_some() && leases.take("a").is_none());
        assert_eq!(leases.next_end(), Some(at(10)));
        assert_eq!(
            (leases.expire(at(9)).len(), leases.expire(at(10)).len()),
            (0, 1)
        );
        assert!(leases.blocks("c").is_none() && leases.blocks("b").is_some());
        assert_eq!(
            (
                leases.expire(at(100)).len(),
                leases.held(),
                leases.expired()
            ),
            (1, 1, 2)
        );
        assert_eq!(leases.next_end(), None);
    }

    #[test]
    fn of_two_leases_of_one_name_the_second_counts_and_the_first_comes_back() {
        let mut leases = Leases::default();
        assert!(leases.grant("7".into(), sequence(), None).1.is_none());
        assert!(leases.grant("7".into(), sequence(), None).1.is_some());
        assert_eq!(leases.held(), 1);
    }
}
