//! Whom to ask, when to ask another one as well, and whom to leave alone for a while. Pure: what happened is told here with
//! the time at which it happened.

use std::time::{Duration, Instant};

/// For so long a server that failed is left out, and after each vain trial for twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// A server that is slow so many times in a row has failed. One time proves nothing.
const STRIKES: u32 = 3;

/// What every question adds to the budget of second questions, and the most it can hold. When all servers are slow, to ask
/// each of them twice as much would be the end of them.
const HEDGES_PER_QUESTION: f64 = 0.1;
const MOST_HEDGES: f64 = 16.0;

/// All servers.
#[derive(Debug)]
pub(super) struct Servers {
    servers: Vec<Server>,
    /// Whose turn it is.
    next: usize,
    hedges: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Server {
    /// How often in a row it was slow.
    strikes: u32,
    out: Option<Out>,
}

/// A server that is left out.
#[derive(Clone, Copy, Debug)]
struct Out {
    until: Instant,
    pause: Duration,
    /// Whether somebody is trying it.
    tried: bool,
}

/// A server that is to be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pick {
    /// Its number.
    pub(super) server: usize,
    /// Whether it was out, and this question finds out whether it still is.
    pub(super) trial: bool,
}

/// What became of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// It was answered, if only with a refusal.
    Answered,
    /// It could not be reached, or its answer cannot be used.
    Failed,
    /// There was no answer by the deadline, or one who was asked later was quicker.
    Late,
    /// It is not waited for any longer, and that says nothing of the server.
    Left,
}

/// What is worth a line in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// This one is left out from now on, and others are there.
    Out(usize),
    /// This one is left out, and was the last one.
    AllOut(usize),
    /// This one answers again.
    Back(usize),
}

impl Servers {
    /// All are well.
    pub(super) fn new(count: usize) -> Self {
        Self { servers: vec![Server::default(); count], next: 0, hedges: MOST_HEDGES }
    }

    /// Whom a new question goes to; nobody where all are left out. Whoever has been out for long enough comes first, once:
    /// the question can still go to another one.
    pub(super) fn first(&mut self, now: Instant) -> Option<Pick> {
        self.hedges = (self.hedges + HEDGES_PER_QUESTION).min(MOST_HEDGES);
        let due = |server: &Server| server.out.is_some_and(|out| !out.tried && out.until <= now);
        if let Some(server) = self.servers.iter().position(due) {
            self.servers[server].out.iter_mut().for_each(|out| out.tried = true);
            return Some(Pick { server, trial: true });
        }
        self.well(&[])
    }

    /// Whom a question goes to as well, because those who were asked are slow.
    pub(super) fn beside(&mut self, asked: &[Pick]) -> Option<Pick> {
        // To find out that somebody is still out must not cost the others their second question.
        let price = if asked.iter().any(|pick| pick.trial) { 0.0 } else { 1.0 };
        if self.hedges < price {
            return None;
        }
        let found = self.well(asked)?;
        self.hedges -= price;
        Some(found)
    }

    /// Whom a question goes to instead, because one who was asked has failed.
    pub(super) fn instead(&mut self, asked: &[Pick]) -> Option<Pick> {
        self.well(asked)
    }

    /// What became of a question.
    pub(super) fn ended(&mut self, pick: Pick, ended: Ended, now: Instant) -> Option<News> {
        let server = &mut self.servers[pick.server];
        if let Some(out) = server.out.as_mut().filter(|_| pick.trial) {
            out.tried = false;
        }
        match ended {
            Ended::Left => None,
            Ended::Answered => {
                server.strikes = 0;
                server.out.take().map(|_| News::Back(pick.server))
            }
            Ended::Late if !pick.trial && server.strikes + 1 < STRIKES => {
                server.strikes += 1;
                None
            }
            Ended::Late | Ended::Failed => self.leave_out(pick, now),
        }
    }

    /// Whether somebody is there to be asked.
    pub(super) fn is_well(&self, server: usize) -> bool {
        self.servers[server].out.is_none()
    }

    fn leave_out(&mut self, pick: Pick, now: Instant) -> Option<News> {
        let server = &mut self.servers[pick.server];
        server.strikes = 0;
        let pause = match server.out {
            None => FIRST_PAUSE,
            Some(out) if pick.trial => (out.pause * 2).min(LONGEST_PAUSE),
            // One of many that were under way when it failed: it has been counted.
            Some(_) => return None,
        };
        let was_well = server.out.is_none();
        server.out = Some(Out { until: now + pause, pause, tried: false });
        let all = self.servers.iter().all(|server| server.out.is_some());
        let news = if all { News::AllOut(pick.server) } else { News::Out(pick.server) };
        was_well.then_some(news)
    }

    /// The next one in turn that is well and was not asked yet.
    fn well(&mut self, asked: &[Pick]) -> Option<Pick> {
        let count = self.servers.len();
        let is_free = |at: &usize| self.servers[*at].out.is_none() && asked.iter().all(|pick| pick.server != *at);
        let server = (0..count).map(|step| (self.next + step) % count).find(is_free)?;
        self.next = (server + 1) % count;
        Some(Pick { server, trial: false })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pick(server: usize) -> Pick {
        Pick { server, trial: false }
    }

    fn firsts(servers: &mut Servers, now: Instant, times: usize) -> Vec<Option<usize>> {
        (0..times).map(|_| servers.first(now).map(|pick| pick.server)).collect()
    }

    #[test]
    fn those_who_are_well_take_turns() {
        let (mut servers, now) = (Servers::new(3), Instant::now());
        assert_eq!(firsts(&mut servers, now, 4), [Some(0), Some(1), Some(2), Some(0)]);
        assert_eq!(servers.ended(pick(1), Ended::Failed, now), Some(News::Out(1)));
        assert_eq!(firsts(&mut servers, now, 3), [Some(2), Some(0), Some(2)]);
        assert_eq!(Servers::new(0).first(now), None);
    }

    #[test]
    fn who_failed_is_tried_by_one_at_a_time_after_longer_and_longer_pauses() {
        let (mut servers, mut now) = (Servers::new(2), Instant::now());
        servers.ended(pick(0), Ended::Failed, now);
        // Others that were under way change nothing.
        assert_eq!(servers.ended(pick(0), Ended::Failed, now), None);
        for pause in [1, 2, 4, 8, 16, 30, 30] {
            let pause = Duration::from_secs(pause);
            assert_eq!(firsts(&mut servers, now + pause - Duration::from_millis(1), 3), [Some(1); 3]);
            now += pause;
            let trial = servers.first(now).unwrap();
            assert_eq!(trial, Pick { server: 0, trial: true });
            assert_eq!(firsts(&mut servers, now, 2), [Some(1); 2], "one at a time");
            assert_eq!(servers.ended(trial, Ended::Late, now), None, "a trial that is late is in vain");
        }
        now += LONGEST_PAUSE;
        let left = servers.first(now).unwrap();
        servers.ended(left, Ended::Left, now);
        let again = servers.first(now).unwrap();
        assert_eq!((left, again), (Pick { server: 0, trial: true }, Pick { server: 0, trial: true }), "given back");
        assert_eq!(servers.ended(again, Ended::Answered, now), Some(News::Back(0)));
        assert!(servers.is_well(0));
        servers.ended(pick(0), Ended::Failed, now);
        assert_eq!(servers.first(now + FIRST_PAUSE).unwrap().server, 0, "the first pause is short again");
    }

    #[test]
    fn slowness_counts_only_in_a_row() {
        let (mut servers, now) = (Servers::new(2), Instant::now());
        for _ in 0..5 {
            servers.ended(pick(0), Ended::Late, now);
            servers.ended(pick(0), Ended::Late, now);
            servers.ended(pick(0), Ended::Answered, now);
        }
        assert!(servers.is_well(0));
        let news: Vec<_> = (0..3).map(|_| servers.ended(pick(0), Ended::Late, now)).collect();
        assert_eq!(news, [None, None, Some(News::Out(0))]);
        let news: Vec<_> = (0..3).map(|_| servers.ended(pick(1), Ended::Late, now)).collect();
        assert_eq!(news, [None, None, Some(News::AllOut(1))]);
        assert_eq!(servers.first(now), None);
        // Both are tried, each by one.
        let later = now + FIRST_PAUSE;
        assert_eq!(firsts(&mut servers, later, 3), [Some(0), Some(1), None]);
    }

    #[test]
    fn second_questions_are_a_tenth_and_a_few() {
        let (mut servers, now) = (Servers::new(2), Instant::now());
        let mut hedged = 0;
        for _ in 0..10_000 {
            let first = servers.first(now).unwrap();
            hedged += usize::from(servers.beside(&[first]).is_some_and(|second| second.server != first.server));
        }
        assert!((1000..=1016).contains(&hedged), "{hedged}");
    }

    #[test]
    fn nobody_is_asked_the_same_twice() {
        let (mut servers, now) = (Servers::new(1), Instant::now());
        let only = servers.first(now).unwrap();
        assert_eq!((servers.beside(&[only]), servers.instead(&[only])), (None, None));
        let mut servers = Servers::new(2);
        servers.ended(pick(0), Ended::Failed, now);
        let only = servers.first(now).unwrap();
        assert_eq!((only.server, servers.beside(&[only])), (1, None), "the other one is out");
    }

    #[test]
    fn a_trial_costs_nothing_of_the_budget() {
        let (mut servers, now) = (Servers::new(3), Instant::now());
        servers.hedges = 0.0;
        servers.ended(pick(0), Ended::Failed, now);
        let trial = servers.first(now + FIRST_PAUSE).unwrap();
        assert!(trial.trial && servers.beside(&[trial]).is_some());
        let other = servers.first(now).unwrap();
        assert_eq!(servers.beside(&[other]), None);
        assert!(servers.instead(&[other]).is_some(), "who fails costs nothing either");
    }
}
