//! How quickly bodies become prompts at present. Handing one to another thread and its prompt back costs two changes of
//! threads, and the caches of two cores, which is much of what a body takes once its beginning is known or the tokenizer is a
//! quick one; but a body that takes long would keep a thread from all other exchanges. So what is expected to be quick is done
//! where it arrives. Where bodies are tokenised, only these say anything about the next one: what cannot be read, or is not for
//! us to read, takes hardly any time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What is done where it arrives takes about so long at most.
const QUICK: Duration = Duration::from_millis(1);
/// Longer bodies never are, should the next one be unlike all before it.
const MOST: usize = 256 << 10;
/// How much of a longer time is believed at once, and of a shorter one: a part in so many. Who was slow must show for a while
/// that it no longer is.
const SLOWER: i64 = 8;
const QUICKER: i64 = 64;

/// What became of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Became {
    /// Its text was tokenised.
    Tokens,
    /// It was only read.
    Other,
}

/// Picoseconds per byte, of either kind; 0 while nothing is known.
#[derive(Debug, Default)]
pub(super) struct Pace {
    tokenised: AtomicU64,
    read: AtomicU64,
}

impl Pace {
    /// Whether a body of so many bytes is expected to be done soon, as those up to `inline` always are; with 0 none is.
    pub(super) fn is_quick(&self, bytes: usize, inline: usize) -> bool {
        bytes <= inline || (inline > 0 && self.takes_little(bytes))
    }

    fn takes_little(&self, bytes: usize) -> bool {
        let pace = match self.tokenised.load(Ordering::Relaxed) {
            0 => self.read.load(Ordering::Relaxed),
            pace => pace,
        };
        pace > 0
            && bytes <= MOST
            && pace.saturating_mul(bytes as u64) / 1000 <= QUICK.as_nanos() as u64
    }

    /// Notes how long a body took. Those of a few kilobytes cost what every request costs, whatever their length, and are not
    /// to be noted.
    pub(super) fn note(&self, became: Became, bytes: usize, took: Duration) {
        let pace = match became {
            Became::Tokens => &self.tokenised,
            Became::Other => &self.read,
        };
        let now = (took.as_nanos() as u64).saturating_mul(1000) / bytes.max(1) as u64;
        let now = i64::try_from(now).unwrap_or(i64::MAX >> 8).max(1);
        let before = pace.load(Ordering::Relaxed) as i64;
        let apart = now - before;
        let next = match before {
            0 => now,
            _ if apart > 0 => before + apart / SLOWER,
            _ => before + apart / QUICKER,
        };
        // Of two at once one is lost, and others follow.
        pace.store(next.max(1) as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_quick_before_anything_was_measured() {
        let pace = Pace::default();
        assert!(!pace.takes_little(1));
        assert!(
            pace.is_quick(4, 4) && !pace.is_quick(5, 4) && !pace.is_quick(1, 0),
            "but for what always is"
        );
    }

    #[test]
    fn what_was_quick_is_expected_to_be_so_in_proportion_to_its_length() {
        let pace = Pace::default();
        pace.note(Became::Tokens, 10_000, Duration::from_micros(100));
        let cases = [
            (10_000, true),
            (100_000, true),
            (100_001, false),
            (MOST + 1, false),
        ];
        for (bytes, expected) in cases {
            assert_eq!(pace.takes_little(bytes), expected, "{bytes}");
        }
        let instant = Pace::default();
        instant.note(Became::Tokens, 1 << 20, Duration::ZERO);
        assert!(instant.takes_little(MOST) && !instant.takes_little(MOST + 1));
    }

    #[test]
    fn one_slow_body_is_remembered_for_many_quick_ones() {
        let pace = Pace::default();
        pace.note(Became::Tokens, 40_000, Duration::from_micros(400));
        pace.note(Became::Tokens, 40_000, Duration::from_millis(40));
        assert!(!pace.takes_little(40_000));
        let quick = (0..).take_while(|_| {
            pace.note(Became::Tokens, 40_000, Duration::from_micros(400));
            !pace.takes_little(40_000)
        });
        let quick = quick.count();
        assert!((50..200).contains(&quick), "{quick}");
    }

    #[test]
    fn what_is_only_read_says_nothing_of_what_is_tokenised() {
        let pace = Pace::default();
        pace.note(Became::Other, 10_000, Duration::from_micros(10));
        assert!(pace.takes_little(MOST), "nothing was tokenised");
        pace.note(Became::Tokens, 10_000, Duration::from_millis(10));
        for _ in 0..10_000 {
            pace.note(Became::Other, 10_000, Duration::from_micros(10));
        }
        assert!(!pace.takes_little(10_000));
    }

    #[test]
    fn what_is_always_slow_stays_slow() {
        let pace = Pace::default();
        for at in 0..1000 {
            // One in ten has nothing behind what was there before.
            pace.note(
                Became::Tokens,
                100_000,
                Duration::from_micros(if at % 10 == 0 { 60_000 } else { 100 }),
            );
            assert!(at == 0 || !pace.takes_little(100_000), "{at}");
        }
    }
}
