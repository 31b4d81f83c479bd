//! Leases on blocks for a decode engine. The blocks of a prefill stay pinned until the decode
//! engine has fetched them or the lease expires. The type has no clock: the caller passes the time.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::time::Instant;

use super::cache::TokenSequence;

/// Description of leased blocks, from which a decode engine fetches them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LeasedBlocks {
    pub(crate) name: Arc<str>,
    pub(crate) blocks: Vec<usize>,
    /// Tokens whose keys and values the blocks hold.
    pub(crate) tokens: usize,
}

#[derive(Debug)]
struct BlockLease {
    sequence: TokenSequence,
    /// End of the lease; `None` for no limit.
    until: Option<Instant>,
}

/// The leases of one rank.
#[derive(Debug, Default)]
pub(crate) struct LeaseTable {
    held: HashMap<Arc<str>, BlockLease>,
    expired: u64,
}

impl LeaseTable {
    /// Grants a lease. If the name is in use, its old lease ends, and the caller must release the
    /// returned blocks.
    pub(crate) fn grant(
        &mut self,
        name: Arc<str>,
        sequence: TokenSequence,
        until: Option<Instant>,
    ) -> (LeasedBlocks, Option<TokenSequence>) {
        let leased = LeasedBlocks {
            name: name.clone(),
            blocks: sequence.block_numbers(),
            tokens: sequence.computed(),
        };
        let replaced = self.held.insert(name, BlockLease { sequence, until });
        (leased, replaced.map(|lease| lease.sequence))
    }

    /// Returns the numbers of the leased blocks.
    pub(crate) fn blocks(&self, name: &str) -> Option<Vec<usize>> {
        Some(self.held.get(name)?.sequence.block_numbers())
    }

    /// Extends a lease to at least `until`.
    pub(crate) fn extend(&mut self, name: &str, until: Instant) {
        if let Some(lease) = self.held.get_mut(name) {
            lease.until = lease.until.map(|before| before.max(until));
        }
    }

    /// Ends a lease; the caller must release the returned blocks.
    pub(crate) fn remove(&mut self, name: &str) -> Option<TokenSequence> {
        self.held.remove(name).map(|lease| lease.sequence)
    }

    /// Ends the expired leases; the caller must release the returned blocks.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<TokenSequence> {
        let is_expired =
            |_: &Arc<str>, lease: &mut BlockLease| lease.until.is_some_and(|until| until <= now);
        let expired: Vec<_> = self
            .held
            .extract_if(is_expired)
            .map(|(_, lease)| lease.sequence)
            .collect();
        self.expired += expired.len() as u64;
        expired
    }

    /// Returns the time at which the next lease expires.
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

    use super::super::cache::BlockKeys;
    use super::*;

    fn sequence() -> TokenSequence {
        TokenSequence::new(vec![1, 2, 3], BlockKeys::default())
    }

    #[test]
    fn lease_ends_when_fetched_or_expired() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut leases = LeaseTable::default();
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
        leases.extend("unknown", at(99));
        assert!(leases.remove("a").is_some() && leases.remove("a").is_none());
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
    fn second_lease_replaces_first_of_same_name() {
        let mut leases = LeaseTable::default();
        assert!(leases.grant("7".into(), sequence(), None).1.is_none());
        assert!(leases.grant("7".into(), sequence(), None).1.is_some());
        assert_eq!(leases.held(), 1);
    }
}
