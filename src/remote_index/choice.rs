//! Whom to ask, when to ask another one as well, and whom to leave alone for a while. Pure: what happened is told here with
//! the time at which it happened.

use std::time::{Duration, Instant};

/// For so long a server that failed is left alone. Requests do not try it again, so it need not be spared more than that.
const PAUSE: Duration = Duration::from_secs(1);

/// A server that is slow so many times in a row has failed. One time proves nothing, and neither do many questions that were
/// under way at one time.
const STRIKES: u32 = 3;
const APART: Duration = Duration::from_millis(5);

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
    /// How often in a row it was slow, and when last.
    strikes: u32,
    struck: Option<Instant>,
    out: Option<Out>,
}

/// A server that is left out.
#[derive(Clone, Copy, Debug)]
struct Out {
    until: Instant,
    /// Whether it is being tried.
    tried: bool,
}

/// A server that is to be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pick {
    /// Its number.
    pub(super) server: usize,
    /// Whether it was out, and it is only to be found out whether it still is.
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
        Self {
            servers: vec![Server::default(); count],
            next: 0,
            hedges: MOST_HEDGES,
        }
    }

    /// Whom a new question goes to; nobody where all are left out.
    pub(super) fn first(&mut self) -> Option<Pick> {
        self.hedges = (self.hedges + HEDGES_PER_QUESTION).min(MOST_HEDGES);
        self.well(&[])
    }

    /// Who has been out for long enough to be tried again.
    pub(super) fn due(&mut self, now: Instant) -> Option<Pick> {
        let due = |server: &Server| server.out.is_some_and(|out| !out.tried && out.until <= now);
        let server = self.servers.iter().position(due)?;
        self.servers[server]
            .out
            .iter_mut()
            .for_each(|out| out.tried = true);
        Some(Pick {
            server,
            trial: true,
        })
    }

    /// Whom a question goes to as well, because those who were asked are slow.
    pub(super) fn beside(&mut self, asked: &[Pick]) -> Option<Pick> {
        if self.hedges < 1.0 {
            return None;
        }
        let found = self.well(asked)?;
        self.hedges -= 1.0;
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
                (server.strikes, server.struck) = (0, None);
                server.out.take().map(|_| News::Back(pick.server))
            }
            Ended::Late if server.struck.is_some_and(|struck| now < struck + APART) => None,
            Ended::Late if !pick.trial && server.strikes + 1 < STRIKES => {
                (server.strikes, server.struck) = (server.strikes + 1, Some(now));
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
        let was_well = server.out.is_none();
        if !was_well && !pick.trial {
            // One of many that were under way when it failed: it has been counted.
            return None;
        }
        *server = Server {
            out: Some(Out {
                until: now + PAUSE,
                tried: false,
            }),
            ..Server::default()
        };
        let all = self.servers.iter().all(|server| server.out.is_some());
        let news = if all {
            News::AllOut(pick.server)
        } else {
            News::Out(pick.server)
        };
        was_well.then_some(news)
    }

    /// The next one in turn that is well and was not asked yet.
    fn well(&mut self, asked: &[Pick]) -> Option<Pick> {
        let count = self.servers.len();
        let is_free = |at: &usize| {
            self.servers[*at].out.is_none() && asked.iter().all(|pick| pick.server != *at)
        };
        let server = (0..count)
            .map(|step| (self.next + step) % count)
            .find(is_free)?;
        self.next = (server + 1) % count;
        Some(Pick {
            server,
            trial: false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pick(server: usize) -> Pick {
        Pick {
            server,
            trial: false,
        }
    }

    fn firsts(servers: &mut Servers, times: usize) -> Vec<Option<usize>> {
        (0..times)
            .map(|_| servers.first().map(|pick| pick.server))
            .collect()
    }

    #[test]
    fn those_who_are_well_take_turns() {
        let (mut servers, now) = (Servers::new(3), Instant::now());
        assert_eq!(
            firsts(&mut servers, 4),
            [Some(0), Some(1), Some(2), Some(0)]
        );
        assert_eq!(
            servers.ended(pick(1), Ended::Failed, now),
            Some(News::Out(1))
        );
        assert_eq!(firsts(&mut servers, 3), [Some(2), Some(0), Some(2)]);
        assert_eq!(Servers::new(0).first(), None);
    }

    #[test]
    fn who_failed_is_tried_now_and_then_and_asked_again_once_it_answers() {
        let (mut servers, mut now) = (Servers::new(2), Instant::now());
        servers.ended(pick(0), Ended::Failed, now);
        // Others that were under way change nothing.
        assert_eq!(servers.ended(pick(0), Ended::Failed, now + PAUSE / 2), None);
        for ended in [Ended::Late, Ended::Failed, Ended::Late] {
            assert_eq!(servers.due(now + PAUSE - Duration::from_millis(1)), None);
            now += PAUSE;
            let trial = servers.due(now).unwrap();
            assert_eq!(
                (trial, servers.due(now)),
                (
                    Pick {
                        server: 0,
                        trial: true
                    },
                    None
                ),
                "one at a time"
            );
            assert_eq!(firsts(&mut servers, 2), [Some(1); 2], "no request tries it");
            assert_eq!(servers.ended(trial, ended, now), None, "it is no news");
        }
        now += PAUSE;
        let left = servers.due(now).unwrap();
        servers.ended(left, Ended::Left, now);
        let again = servers.due(now).unwrap();
        assert_eq!(left, again, "given back");
        assert_eq!(
            servers.ended(again, Ended::Answered, now),
            Some(News::Back(0))
        );
        assert!(servers.is_well(0));
    }

    #[test]
    fn slowness_counts_only_in_a_row_and_not_of_one_moment() {
        let (mut servers, mut now) = (Servers::new(2), Instant::now());
        let mut late = |servers: &mut Servers, server: usize| {
            now += APART;
            servers.ended(pick(server), Ended::Late, now)
        };
        for _ in 0..5 {
            late(&mut servers, 0);
            late(&mut servers, 0);
            servers.ended(pick(0), Ended::Answered, Instant::now());
        }
        assert!(servers.is_well(0));
        let news: Vec<_> = (0..3).map(|_| late(&mut servers, 0)).collect();
        assert_eq!(news, [None, None, Some(News::Out(0))]);
        let news: Vec<_> = (0..3).map(|_| late(&mut servers, 1)).collect();
        assert_eq!(news, [None, None, Some(News::AllOut(1))]);
        assert_eq!(servers.first(), None);
        // Both are tried.
        let trials: Vec<_> = (0..3)
            .map(|_| servers.due(now + PAUSE).map(|pick| pick.server))
            .collect();
        assert_eq!(trials, [Some(0), Some(1), None]);

        let (mut servers, now) = (Servers::new(1), Instant::now());
        for _ in 0..100 {
            servers.ended(pick(0), Ended::Late, now);
        }
        assert!(
            servers.is_well(0),
            "a hundred questions were under way while it stood still once"
        );
    }

    #[test]
    fn second_questions_are_a_tenth_and_a_few() {
        let mut servers = Servers::new(2);
        let mut hedged = 0;
        for _ in 0..10_000 {
            let first = servers.first().unwrap();
            hedged += usize::from(
                servers
                    .beside(&[first])
                    .is_some_and(|second| second.server != first.server),
            );
        }
        assert!((1000..=1016).contains(&hedged), "{hedged}");
    }

    #[test]
    fn nobody_is_asked_the_same_twice() {
        let (mut servers, now) = (Servers::new(1), Instant::now());
        let only = servers.first().unwrap();
        assert_eq!(
            (servers.beside(&[only]), servers.instead(&[only])),
            (None, None)
        );
        let mut servers = Servers::new(2);
        servers.ended(pick(0), Ended::Failed, now);
        let only = servers.first().unwrap();
        assert_eq!(
            (only.server, servers.beside(&[only])),
            (1, None),
            "the other one is out"
        );
    }

    #[test]
    fn who_fails_costs_nothing_of_the_budget() {
        let mut servers = Servers::new(3);
        servers.hedges = 0.0;
        let first = servers.first().unwrap();
        assert_eq!(servers.beside(&[first]), None);
        assert!(servers.instead(&[first]).is_some());
    }
}
