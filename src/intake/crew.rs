//! The threads that encode bodies that may take long: one per core and at least two, so that a large body leaves one to
//! others. They run as long as the process. The fast tokenizer caches words on each thread, up to a hundred megabytes for
//! each model. So these threads must be few, or memory has no bound. They must also persist, unlike those of tokio's
//! blocking pool, because a new thread starts with an empty cache.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};
use std::thread::{self, Thread};

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// One for all configurations, of which one follows the other.
static CREW: LazyLock<Crew> = LazyLock::new(Crew::start);

type Work = Box<dyn FnOnce() + Send>;

/// How many there are.
pub(super) fn size() -> usize {
    thread::available_parallelism()
        .map_or(1, std::num::NonZero::get)
        .max(2)
}

/// Runs something on one of the threads, once one is free; nothing if it panics.
pub(super) async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (tell, told) = oneshot::channel();
    CREW.give(Box::new(move || _ = tell.send(work())));
    told.await.ok()
}

struct Crew {
    desk: Arc<Mutex<Desk>>,
    threads: usize,
}

#[derive(Default)]
struct Desk {
    work: VecDeque<Work>,
    /// Who has nothing to do. The last one is called first: what it needs is in its core's cache still.
    idle: Vec<Thread>,
}

impl Crew {
    fn start() -> Self {
        let desk = Arc::<Mutex<Desk>>::default();
        let started = (0..size()).map(|at| {
            let desk = desk.clone();
            thread::Builder::new()
                .name(format!("encoder-{at}"))
                .spawn(move || serve(&desk))
        });
        let threads = started.filter(Result::is_ok).count();
        Self { desk, threads }
    }

    fn give(&self, work: Work) {
        if self.threads == 0 {
            // The system gives us no thread: better late than never.
            return work();
        }
        let mut desk = self.desk.lock();
        desk.work.push_back(work);
        let called = desk.idle.pop();
        drop(desk);
        if let Some(thread) = called {
            thread.unpark();
        }
    }
}

fn serve(desk: &Mutex<Desk>) {
    let me = thread::current();
    loop {
        let mut open = desk.lock();
        if let Some(work) = open.work.pop_front() {
            drop(open);
            // Whoever waits for it hears that nothing comes.
            _ = catch_unwind(AssertUnwindSafe(work));
            continue;
        }
        // A thread may wake without having been called.
        if open.idle.iter().all(|idle| idle.id() != me.id()) {
            open.idle.push(me.clone());
        }
        drop(open);
        thread::park();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Barrier;

    use super::*;

    #[tokio::test]
    async fn work_is_done_by_as_many_threads_as_there_are_and_no_others() {
        let mut seen = HashSet::new();
        for _ in 0..20 {
            // Each waits for the others, so that every thread has one.
            let together = Arc::new(Barrier::new(size()));
            let works = (0..size()).map(|_| {
                let together = together.clone();
                tokio::spawn(run(move || {
                    together.wait();
                    thread::current().id()
                }))
            });
            for work in works.collect::<Vec<_>>() {
                seen.insert(work.await.unwrap().unwrap());
            }
        }
        assert_eq!(seen.len(), size());
    }

    #[tokio::test]
    async fn a_panic_is_nothing_and_the_thread_goes_on() {
        for at in 0..3 * size() {
            assert_eq!(run(|| -> u8 { panic!("on purpose") }).await, None);
            assert_eq!(run(move || at).await, Some(at));
        }
    }

    #[tokio::test]
    async fn more_work_than_threads_is_done_in_its_time() {
        let works: Vec<_> = (0..1000).map(|at| tokio::spawn(run(move || at))).collect();
        for (at, work) in works.into_iter().enumerate() {
            assert_eq!(work.await.unwrap(), Some(at));
        }
    }
}
