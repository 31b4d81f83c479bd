//! Pauses between connection attempts.

use std::time::Duration;

/// Exponential back-off with jitter.
#[derive(Clone, Debug)]
pub struct ReconnectBackoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl ReconnectBackoff {
    /// Creates a back-off whose pause doubles from `first` to `longest`.
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self {
            first,
            longest,
            next: first,
        }
    }

    /// Returns the pause before the next attempt. `jitter`, from 0 to 1, scales it between 75 %
    /// and 125 %.
    pub fn next_pause(&mut self, jitter: f64) -> Duration {
        let pause = self.next.mul_f64(0.75 + jitter.clamp(0.0, 1.0) / 2.0);
        self.next = (self.next * 2).min(self.longest);
        pause
    }

    /// Resets the next pause to `first`.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_spread() {
        let millis = Duration::from_millis;
        let mut backoff = ReconnectBackoff::new(millis(100), millis(350));
        let pauses: Vec<_> = [0.5, 0.0, 1.0, 0.5]
            .into_iter()
            .map(|jitter| backoff.next_pause(jitter))
            .collect();
        assert_eq!(
            pauses,
            [
                millis(100),
                millis(150),
                Duration::from_micros(437_500),
                millis(350)
            ]
        );
        backoff.reset();
        assert_eq!(backoff.next_pause(0.5), millis(100));
    }
}
