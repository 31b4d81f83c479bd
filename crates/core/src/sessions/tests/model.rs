//! Compares random operations on a few sessions with a naive model.

use std::collections::BTreeMap;

use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::*;

const IDS: [&str; 4] = ["a", "b", "c", "p"];
const MAX_SESSIONS: usize = 3;

#[derive(Clone, Debug)]
enum Op {
    Enter(usize),
    Bind(usize, u64),
    Abandon(usize),
    Release(usize),
    Rebind(usize, u64),
    Finish(usize),
    Poll(usize),
    StopWaiting(usize),
    RemoveWorker(u64),
    Advance(u64),
}

fn any_op() -> impl Strategy<Value = Op> {
    let nth = || 0usize..3;
    let worker = || 1u64..4;
    prop_oneof![
        8 => (0usize..4).prop_map(Op::Enter),
        4 => (nth(), worker()).prop_map(|(nth, worker)| Op::Bind(nth, worker)),
        2 => nth().prop_map(Op::Abandon),
        5 => nth().prop_map(Op::Release),
        1 => (nth(), worker()).prop_map(|(nth, worker)| Op::Rebind(nth, worker)),
        1 => nth().prop_map(Op::Finish),
        4 => nth().prop_map(Op::Poll),
        1 => nth().prop_map(Op::StopWaiting),
        1 => worker().prop_map(Op::RemoveWorker),
        4 => (1u64..8).prop_map(Op::Advance),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum BindingModel {
    Unbound,
    Deciding,
    Bound(u64),
}

struct Session {
    /// Order of arrival.
    number: u64,
    binding: BindingModel,
    running: usize,
    last: u64,
    ending: bool,
}

#[derive(Debug, PartialEq)]
enum Expected {
    Bound(u64),
    First,
    Wait,
    Full,
}

#[derive(Default)]
struct Model {
    now: u64,
    numbers: u64,
    sessions: BTreeMap<usize, Session>,
    ended: Vec<(usize, u64)>,
}

impl Model {
    fn end(&mut self, matches: impl Fn(&Session) -> bool) {
        let ended: Vec<usize> = self
            .sessions
            .iter()
            .filter(|(_, session)| matches(session))
            .map(|(id, _)| *id)
            .collect();
        for id in ended {
            if let Some(Session {
                binding: BindingModel::Bound(worker),
                ..
            }) = self.sessions.remove(&id)
            {
                self.ended.push((id, worker));
            }
        }
    }

    fn expire(&mut self) {
        let now = self.now;
        let is_expired = |session: &Session| session.running == 0 && session.last + TTL <= now;
        self.end(|session| {
            matches!(session.binding, BindingModel::Bound(_)) && is_expired(session)
        });
    }

    fn evict(&mut self) -> bool {
        let idle = |session: &&Session| {
            session.running == 0 && matches!(session.binding, BindingModel::Bound(_))
        };
        let oldest = self
            .sessions
            .values()
            .filter(idle)
            .map(|session| (session.last, session.number))
            .min();
        self.end(|session| Some(session.number) == oldest.map(|(_, number)| number));
        oldest.is_some()
    }

    fn enter(&mut self, id: usize) -> Expected {
        self.expire();
        let count = self.sessions.len();
        let Some(session) = self.sessions.get_mut(&id) else {
            if count == MAX_SESSIONS && !self.evict() {
                return Expected::Full;
            }
            self.numbers += 1;
            let number = self.numbers;
            let last = self.now;
            self.sessions.insert(
                id,
                Session {
                    number,
                    binding: BindingModel::Deciding,
                    running: 0,
                    last,
                    ending: false,
                },
            );
            return Expected::First;
        };
        match session.binding {
            BindingModel::Bound(worker) => {
                session.running += 1;
                session.ending = false;
                Expected::Bound(worker)
            }
            BindingModel::Unbound => {
                session.binding = BindingModel::Deciding;
                session.ending = false;
                Expected::First
            }
            BindingModel::Deciding => Expected::Wait,
        }
    }

    fn session(&mut self, id: usize) -> &mut Session {
        self.sessions
            .get_mut(&id)
            .expect("a session with a lease was removed")
    }

    fn release(&mut self, id: usize) {
        let now = self.now;
        let session = self.session(id);
        session.running -= 1;
        session.last = now;
        self.end(|session| {
            let is_over = session.ending || session.binding == BindingModel::Unbound;
            session.running == 0 && session.binding != BindingModel::Deciding && is_over
        });
    }

    fn unbind(&mut self, id: usize) {
        self.session(id).binding = BindingModel::Unbound;
        self.end(|session| session.running == 0 && session.binding == BindingModel::Unbound);
    }

    fn move_to(&mut self, id: usize, worker: u64) {
        let previous =
            std::mem::replace(&mut self.session(id).binding, BindingModel::Bound(worker));
        if let BindingModel::Bound(old_worker) = previous
            && old_worker != worker
        {
            self.ended.push((id, old_worker));
        }
    }

    fn unbind_from(&mut self, id: usize, worker: u64) {
        if self.session(id).binding == BindingModel::Bound(worker) {
            self.session(id).binding = BindingModel::Unbound;
            self.ended.push((id, worker));
        }
    }

    fn remove_worker(&mut self, worker: u64) {
        self.expire();
        self.end(|session| session.running == 0 && session.binding == BindingModel::Bound(worker));
        let ids: Vec<usize> = self.sessions.keys().copied().collect();
        ids.into_iter().for_each(|id| self.unbind_from(id, worker));
    }
}

struct ModelCheck {
    sessions: Arc<SessionStore>,
    time: ManualClock,
    model: Model,
    /// Rank of each session, by the reported moves.
    reported_ranks: BTreeMap<usize, u64>,
    holds: Vec<(usize, SessionLease)>,
    bindings: Vec<(usize, PendingBinding)>,
    waiting: Vec<(usize, BindingWait, Arc<WakeFlag>, bool)>,
}

impl ModelCheck {
    fn new() -> Self {
        let (sessions, time) = sessions(MAX_SESSIONS);
        let model = Model::default();
        Self {
            sessions,
            time,
            model,
            reported_ranks: BTreeMap::new(),
            holds: vec![],
            bindings: vec![],
            waiting: vec![],
        }
    }

    fn enter(&self, id: usize) -> Result<SessionEntry, SessionError> {
        let parent = (IDS[id] == "p").then_some("p");
        self.sessions.enter(SessionName {
            id: IDS[id],
            parent,
            model: None,
            tenant: None,
        })
    }

    /// Compares an entry with the model and stores it.
    fn compare_entry(
        &mut self,
        id: usize,
        entry: Result<SessionEntry, SessionError>,
        expected: &Expected,
    ) {
        let found = match entry {
            Ok(SessionEntry::Bound(hold)) => {
                let found = Expected::Bound(hold.target().worker.0);
                self.holds.push((id, hold));
                found
            }
            Ok(SessionEntry::First(binding)) => {
                self.bindings.push((id, binding));
                Expected::First
            }
            Ok(SessionEntry::Deciding(mut waiting)) => {
                let flag = Arc::new(WakeFlag::default());
                assert!(poll(&mut waiting, &flag).is_none());
                self.waiting.push((id, waiting, flag, false));
                Expected::Wait
            }
            Err(_) => Expected::Full,
        };
        assert_eq!(&found, expected);
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Enter(id) => {
                let expected = self.model.enter(id);
                let entry = self.enter(id);
                self.compare_entry(id, entry, &expected);
            }
            Op::Bind(nth, worker) if nth < self.bindings.len() => {
                let (id, binding) = self.bindings.remove(nth);
                self.model.session(id).running += 1;
                self.model.session(id).binding = BindingModel::Bound(worker);
                self.holds.push((id, binding.bind(rank(worker))));
                self.wake(id);
            }
            Op::Abandon(nth) if nth < self.bindings.len() => {
                let (id, binding) = self.bindings.remove(nth);
                self.model.unbind(id);
                drop(binding);
                self.wake(id);
            }
            Op::Release(nth) if nth < self.holds.len() => {
                let (id, hold) = self.holds.remove(nth);
                self.model.release(id);
                drop(hold);
            }
            Op::Rebind(nth, worker) if nth < self.holds.len() => {
                let (id, hold) = &mut self.holds[nth];
                if self.model.session(*id).binding != BindingModel::Deciding {
                    self.model.move_to(*id, worker);
                }
                hold.rebind(rank(worker));
            }
            Op::Finish(nth) if nth < self.holds.len() => {
                let (id, hold) = &self.holds[nth];
                self.model.session(*id).ending |= IDS[*id] != "p";
                hold.finish();
            }
            Op::Poll(nth) if nth < self.waiting.len() => self.poll(nth),
            Op::StopWaiting(nth) if nth < self.waiting.len() => drop(self.waiting.remove(nth)),
            Op::RemoveWorker(worker) => {
                self.model.remove_worker(worker);
                self.compare_moves();
                self.sessions.retain(|known| known != WorkerId(worker));
            }
            Op::Advance(seconds) => {
                self.model.now += seconds;
                self.time.forward(seconds);
            }
            _ => {}
        }
    }

    fn poll(&mut self, nth: usize) {
        let (id, mut waiting, flag, _) = self.waiting.remove(nth);
        match (poll(&mut waiting, &flag), self.model.enter(id)) {
            (None, Expected::Wait) => self.waiting.push((id, waiting, flag, false)),
            (Some(entry), expected) => self.compare_entry(id, entry, &expected),
            (None, expected) => panic!("{expected:?} but the request waits"),
        }
    }

    /// Records that all waiting requests of a session must have been woken.
    fn wake(&mut self, id: usize) {
        self.waiting
            .iter_mut()
            .filter(|(waiting_id, ..)| *waiting_id == id)
            .for_each(|(.., woken)| *woken = true);
    }

    /// Compares the reported moves with the model. A session is unbound only after it was bound,
    /// and before it is bound again.
    fn compare_moves(&mut self) {
        self.sessions.expire();
        for moved in self.sessions.take_moves() {
            let (SessionMove::Bound(binding)
            | SessionMove::Unbound(binding)
            | SessionMove::HandedOver(binding)
            | SessionMove::TakenOver(binding)) = &moved;
            let id = IDS.iter().position(|id| *id == binding.id).unwrap();
            assert_eq!(binding.group, IDS[id] == "p");
            let worker = binding.target.worker.0;
            match moved {
                SessionMove::Bound(_) => {
                    assert_eq!(
                        self.reported_ranks.insert(id, worker),
                        None,
                        "{binding:?} was bound twice"
                    )
                }
                SessionMove::Unbound(_) => {
                    assert_eq!(
                        self.reported_ranks.remove(&id),
                        Some(worker),
                        "{binding:?} was not bound"
                    );
                    let at = self.model.ended.iter().position(|one| *one == (id, worker));
                    self.model.ended.swap_remove(
                        at.unwrap_or_else(|| panic!("{binding:?} has not ended in the model")),
                    );
                }
                SessionMove::HandedOver(_) | SessionMove::TakenOver(_) => {
                    panic!("{binding:?}, but no other replica holds it")
                }
            }
        }
    }

    fn check(&mut self) {
        for (_, _, flag, woken) in &self.waiting {
            assert!(
                !woken || flag.0.load(Ordering::Relaxed),
                "a request is never woken"
            );
        }
        let running = self
            .model
            .sessions
            .values()
            .map(|session| session.running)
            .sum();
        assert_eq!(running, self.holds.len());
        self.model.expire();
        self.compare_moves();
        assert_eq!(self.model.ended, [], "an end was not reported");
        let bound = |(id, session): (&usize, &Session)| match session.binding {
            BindingModel::Bound(worker) => Some((*id, worker)),
            _ => None,
        };
        assert!(
            self.model
                .sessions
                .iter()
                .filter_map(bound)
                .eq(self.reported_ranks.clone()),
            "a binding was not reported"
        );
        let counts = SessionCounts {
            sessions: self.model.sessions.len(),
            running,
            waiting: self.waiting.len(),
        };
        assert_eq!(self.sessions.counts(), counts);
    }
}

proptest! {
    #![proptest_config(property_config(10_000))]

    #[test]
    fn sessions_match_model(ops in prop::collection::vec(any_op(), 1..40)) {
        let mut check = ModelCheck::new();
        for op in &ops {
            check.apply(op);
            check.check();
        }
        let ModelCheck { sessions, time, holds, bindings, waiting, .. } = check;
        drop((holds, bindings, waiting));
        time.forward(TTL);
        sessions.expire();
        prop_assert_eq!(sessions.counts(), SessionCounts::default());
        let debug = format!("{sessions:?}");
        prop_assert!(debug.contains("idle: {}"), "{}", debug);
    }
}
