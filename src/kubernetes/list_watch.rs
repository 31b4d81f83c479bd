//! State machine for the list and watch of one kind of object. Determines the next request and its
//! time. Pure: clock and jitter are arguments.
//!
//! Decision 0052.

use std::time::Duration;

use tokio::time::Instant;

/// First delay after a failure, and longest delay without `Retry-After`.
const MIN_DELAY: Duration = Duration::from_millis(100);
const MAX_DELAY: Duration = Duration::from_secs(5);
/// Maximum delay by a `Retry-After` header.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(30);
/// Time after which an open watch counts as working even without an event. A watch that ends
/// earlier without an event counts as a failure.
const MIN_WATCH: Duration = Duration::from_millis(500);
/// Consecutive failures after which the objects are listed again, in place of a watch from the last
/// version.
const WATCH_ATTEMPTS: u32 = 3;

/// Exponential delay between attempts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RetryBackoff {
    failures: u32,
}

impl RetryBackoff {
    /// Returns the delay before the next attempt. `jitter` is in 0..1, so that replicas do not
    /// retry at the same time.
    pub(super) fn next_delay(&mut self, retry_after: Option<Duration>, jitter: f64) -> Duration {
        let own = MIN_DELAY
            .saturating_mul(1 << self.failures.min(10))
            .min(MAX_DELAY);
        self.failures = self.failures.saturating_add(1);
        let min_delay = retry_after.unwrap_or_default().min(MAX_RETRY_AFTER);
        (min_delay + own.mul_f64(0.1 * jitter)).max(own.mul_f64(0.5 + jitter / 2.0))
    }

    pub(super) fn reset(&mut self) {
        self.failures = 0;
    }
}

/// Next action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NextStep {
    /// Wait until this time.
    Wait(Instant),
    List,
    /// Watch from this resource version.
    Watch(String),
    /// Read the open watch, at most until this time.
    Read(Instant),
}

/// Kind of a failure, which determines the next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureKind {
    /// 410: the resource version is too old.
    Expired,
    /// Another 4xx, or a malformed response: the same request would fail again.
    Rejected,
    /// Any other failure, with the value of `Retry-After`.
    Unavailable(Option<Duration>),
}

/// State of a watch that had no event until the deadline of [`NextStep::Read`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QuietWatch {
    /// Open long enough to count as working.
    Works,
    /// Open for longer than the API server allows, so the connection is dead.
    Dead,
}

#[derive(Clone, Copy, Debug)]
struct OpenWatch {
    opened: Instant,
    last_event: Instant,
    is_working: bool,
}

/// State of one list and watch.
#[derive(Debug)]
pub(super) struct ListWatch {
    /// Maximum time without a byte on an open watch.
    silence: Duration,
    /// Resource version to watch from; `None`: the objects are listed next.
    version: Option<String>,
    open: Option<OpenWatch>,
    /// True if a watch has worked since the last list.
    watched_since_list: bool,
    backoff: RetryBackoff,
    retry_at: Option<Instant>,
}

impl ListWatch {
    pub(super) fn new(silence: Duration) -> Self {
        let backoff = RetryBackoff::default();
        Self {
            silence,
            version: None,
            open: None,
            watched_since_list: false,
            backoff,
            retry_at: None,
        }
    }

    pub(super) fn next_step(&self) -> NextStep {
        match (self.retry_at, &self.open, &self.version) {
            (Some(at), ..) => NextStep::Wait(at),
            (None, Some(open), _) if open.is_working => {
                NextStep::Read(open.last_event + self.silence)
            }
            (None, Some(open), _) => NextStep::Read(open.opened + MIN_WATCH.min(self.silence)),
            (None, None, Some(version)) => NextStep::Watch(version.clone()),
            (None, None, None) => NextStep::List,
        }
    }

    /// Returns whether changes are received. After a failure, this is only the case when the next
    /// watch works.
    pub(super) fn is_up(&self) -> bool {
        self.open
            .is_some_and(|open| open.is_working || self.backoff.failures == 0)
    }

    pub(super) fn on_waited(&mut self) {
        self.retry_at = None;
    }

    pub(super) fn on_listed(&mut self, version: String) {
        self.version = Some(version);
        self.watched_since_list = false;
    }

    pub(super) fn on_opened(&mut self, now: Instant) {
        self.open = Some(OpenWatch {
            opened: now,
            last_event: now,
            is_working: false,
        });
    }

    /// Handles an event or a bookmark.
    pub(super) fn on_event(&mut self, version: Option<String>, now: Instant) {
        self.version = version.or_else(|| self.version.take());
        if let Some(open) = &mut self.open {
            open.last_event = now;
            open.is_working = true;
            self.watched_since_list = true;
            if now >= open.opened + MIN_WATCH {
                self.backoff.reset();
            }
        }
    }

    /// Handles the deadline of [`NextStep::Read`].
    pub(super) fn on_quiet(&mut self, now: Instant) -> QuietWatch {
        if self
            .open
            .is_some_and(|open| now >= open.last_event + self.silence)
        {
            return QuietWatch::Dead;
        }
        self.confirm();
        QuietWatch::Works
    }

    /// Handles the end of a watch. Returns whether the end is a failure. After a watch of normal
    /// duration, the next one is opened immediately.
    pub(super) fn on_closed(&mut self, now: Instant, jitter: f64) -> bool {
        if self.open.is_some_and(|open| now >= open.opened + MIN_WATCH) {
            self.confirm();
            self.open = None;
            return false;
        }
        if self.open.take().is_some_and(|open| open.is_working) {
            self.retry_at = Some(now + self.backoff.next_delay(None, jitter));
            return false;
        }
        self.on_failure(FailureKind::Unavailable(None), now, jitter)
    }

    /// Handles a failed request. Returns whether to report it: an expired version is not reported
    /// if a watch has worked since the last list.
    pub(super) fn on_failure(&mut self, kind: FailureKind, now: Instant, jitter: f64) -> bool {
        self.open = None;
        if kind == FailureKind::Expired && self.watched_since_list {
            self.version = None;
            // If the version of the new list expires as well, that is a failure.
            self.watched_since_list = false;
            return false;
        }
        let retry_after = match kind {
            FailureKind::Unavailable(retry_after) => retry_after,
            FailureKind::Expired | FailureKind::Rejected => None,
        };
        self.retry_at = Some(now + self.backoff.next_delay(retry_after, jitter));
        let watches_again =
            matches!(kind, FailureKind::Unavailable(_)) && self.backoff.failures < WATCH_ATTEMPTS;
        if !watches_again {
            self.version = None;
        }
        true
    }

    /// Records that the open watch works.
    fn confirm(&mut self) {
        if let Some(open) = &mut self.open {
            open.is_working = true;
            self.watched_since_list = true;
            self.backoff.reset();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SILENCE: Duration = Duration::from_secs(35);

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn watching(now: Instant) -> ListWatch {
        let mut list_watch = ListWatch::new(SILENCE);
        list_watch.on_listed("7".to_owned());
        list_watch.on_opened(now);
        list_watch
    }

    fn fail(list_watch: &mut ListWatch, kind: FailureKind, now: Instant) -> Duration {
        assert!(list_watch.on_failure(kind, now, 1.0));
        let NextStep::Wait(at) = list_watch.next_step() else {
            panic!("{:?}", list_watch.next_step())
        };
        list_watch.on_waited();
        at - now
    }

    #[test]
    fn objects_are_listed_then_watched() {
        let now = Instant::now();
        let mut list_watch = ListWatch::new(SILENCE);
        assert_eq!(list_watch.next_step(), NextStep::List);
        list_watch.on_listed("7".to_owned());
        assert_eq!(
            (list_watch.next_step(), list_watch.is_up()),
            (NextStep::Watch("7".to_owned()), false)
        );
        list_watch.on_opened(now);
        assert!(list_watch.is_up());
        list_watch.on_event(Some("9".to_owned()), now + ms(10));
        assert_eq!(
            list_watch.next_step(),
            NextStep::Read(now + ms(10) + SILENCE)
        );
        // The API server ends each watch after a while; the next one continues.
        assert!(!list_watch.on_closed(now + MIN_WATCH, 1.0));
        assert_eq!(list_watch.next_step(), NextStep::Watch("9".to_owned()));
    }

    #[test]
    fn watches_that_end_after_one_event_back_off() {
        let now = Instant::now();
        let mut list_watch = watching(now);
        let mut delays = Vec::new();
        for _ in 0..7 {
            list_watch.on_event(None, now + ms(1));
            assert!(
                !list_watch.on_closed(now + ms(2), 1.0),
                "a watch with an event is not a failure"
            );
            let NextStep::Wait(at) = list_watch.next_step() else {
                panic!("{:?}", list_watch.next_step())
            };
            delays.push(at - now - ms(2));
            list_watch.on_waited();
            list_watch.on_opened(now);
        }
        assert_eq!((delays[0], delays[6]), (ms(100), MAX_DELAY));
    }

    #[test]
    fn forbidden_watch_backs_off_despite_successful_lists() {
        let now = Instant::now();
        let mut list_watch = ListWatch::new(SILENCE);
        let mut delays = Vec::new();
        for _ in 0..9 {
            assert_eq!(list_watch.next_step(), NextStep::List);
            list_watch.on_listed("7".to_owned());
            delays.push(fail(&mut list_watch, FailureKind::Rejected, now));
            assert!(!list_watch.is_up());
        }
        assert_eq!(delays[..4], [ms(100), ms(200), ms(400), ms(800)]);
        assert_eq!(delays[6..], [MAX_DELAY; 3]);
    }

    #[test]
    fn watches_that_end_at_once_back_off() {
        let now = Instant::now();
        let mut list_watch = watching(now);
        let mut delays = Vec::new();
        for _ in 0..8 {
            assert!(list_watch.on_closed(now + ms(1), 1.0));
            let NextStep::Wait(at) = list_watch.next_step() else {
                panic!("{:?}", list_watch.next_step())
            };
            delays.push(at - now - ms(1));
            list_watch.on_waited();
            list_watch.on_listed("7".to_owned());
            list_watch.on_opened(now);
            assert!(!list_watch.is_up(), "the previous watch failed");
        }
        assert_eq!((delays[0], delays[7]), (ms(100), MAX_DELAY));
        // A watch that stays open resets the delay.
        assert_eq!(list_watch.next_step(), NextStep::Read(now + MIN_WATCH));
        assert_eq!(list_watch.on_quiet(now + MIN_WATCH), QuietWatch::Works);
        assert!(list_watch.is_up());
        assert_eq!(
            fail(&mut list_watch, FailureKind::Unavailable(None), now),
            ms(100)
        );
    }

    #[test]
    fn silent_watch_is_dead_after_silence() {
        let now = Instant::now();
        let mut list_watch = watching(now);
        assert_eq!(list_watch.on_quiet(now + MIN_WATCH), QuietWatch::Works);
        assert_eq!(list_watch.next_step(), NextStep::Read(now + SILENCE));
        assert_eq!(list_watch.on_quiet(now + SILENCE), QuietWatch::Dead);
        assert_eq!(
            fail(
                &mut list_watch,
                FailureKind::Unavailable(None),
                now + SILENCE
            ),
            ms(100)
        );
        assert_eq!(
            (list_watch.next_step(), list_watch.is_up()),
            (NextStep::Watch("7".to_owned()), false)
        );
    }

    #[test]
    fn unavailable_server_is_retried_within_five_seconds() {
        let now = Instant::now();
        let mut list_watch = watching(now);
        let delays: Vec<_> = (0..20)
            .map(|_| fail(&mut list_watch, FailureKind::Unavailable(None), now))
            .collect();
        assert!(delays.iter().all(|delay| *delay <= MAX_DELAY), "{delays:?}");
        assert!(delays.iter().sum::<Duration>() > ms(70_000), "{delays:?}");
        assert_eq!(
            list_watch.next_step(),
            NextStep::List,
            "the number of watch attempts is limited"
        );
        let spread = [0.0, 1.0].map(|jitter| RetryBackoff { failures: 9 }.next_delay(None, jitter));
        assert_eq!(spread, [MAX_DELAY / 2, MAX_DELAY]);
    }

    #[test]
    fn retry_after_is_honored_within_bounds() {
        let delay = |seconds: u64, failures: u32| {
            RetryBackoff { failures }.next_delay(Some(Duration::from_secs(seconds)), 0.0)
        };
        assert_eq!(delay(2, 0), Duration::from_secs(2));
        assert_eq!(delay(1, 9), MAX_DELAY / 2, "the computed delay is longer");
        assert_eq!(delay(3600, 0), MAX_RETRY_AFTER);
    }

    #[test]
    fn expired_version_is_listed_again_at_once() {
        let now = Instant::now();
        let mut list_watch = watching(now);
        list_watch.on_event(None, now);
        assert!(!list_watch.on_closed(now + MIN_WATCH, 1.0));
        assert!(
            !list_watch.on_failure(FailureKind::Expired, now, 1.0),
            "an expired version is not reported after a working watch"
        );
        assert_eq!(list_watch.next_step(), NextStep::List);
        // A new version that has expired as well is a failure.
        list_watch.on_listed("8".to_owned());
        assert_eq!(fail(&mut list_watch, FailureKind::Expired, now), ms(100));
        assert_eq!(list_watch.next_step(), NextStep::List);
    }

    #[test]
    fn expired_list_backs_off() {
        let now = Instant::now();
        let mut list_watch = watching(now);
        assert_eq!(list_watch.on_quiet(now + MIN_WATCH), QuietWatch::Works);
        assert!(
            !list_watch.on_failure(FailureKind::Expired, now, 1.0),
            "an expired version is not reported after a working watch"
        );
        assert_eq!(list_watch.next_step(), NextStep::List);
        let delays: Vec<_> = (0..7)
            .map(|_| fail(&mut list_watch, FailureKind::Expired, now))
            .collect();
        assert_eq!((delays[0], delays[6]), (ms(100), MAX_DELAY));
    }
}
