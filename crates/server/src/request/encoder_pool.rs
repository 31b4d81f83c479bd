//! Threads for bodies that take long to encode: one per core and at least two, so that a large body
//! leaves a thread to other bodies. The fast tokenizer caches words per thread, up to a hundred
//! megabytes per model. The small number of threads therefore bounds the memory. The threads live
//! as long as the process, because a new thread, as in tokio's blocking pool, starts with an empty
//! cache.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};
use std::thread::{self, Thread};

use parking_lot::Mutex;
use tokio::sync::{Semaphore, oneshot};

/// Shared by all configurations, since reloads replace the preprocessor.
static ENCODER_POOL: LazyLock<EncoderPool> = LazyLock::new(EncoderPool::start);

type EncodeJob = Box<dyn FnOnce() + Send>;

/// Returns the number of encoder threads.
pub(super) fn thread_count() -> usize {
    thread::available_parallelism()
        .map_or(1, std::num::NonZero::get)
        .max(2)
}

/// Limits of the jobs on encoder threads.
pub(super) struct EncoderLimiter {
    /// One permit per encoder thread.
    pub(super) threads: Arc<Semaphore>,
    /// One permit per job that uses or awaits a thread.
    pub(super) queue: Semaphore,
}

impl EncoderLimiter {
    /// Creates a limiter for a queue of this length.
    pub(super) fn new(queue: usize) -> Self {
        Self {
            // One encoder per core. More would share the same cores and delay the async threads.
            threads: Arc::new(Semaphore::new(thread_count())),
            queue: Semaphore::new(queue.min(Semaphore::MAX_PERMITS)),
        }
    }

    /// Runs a job on an encoder thread. The error is `busy` if the queue is full, and `client` if
    /// the job panics in this process.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, &'static str> {
        let _slot = self.queue.try_acquire().map_err(|_| "busy")?;
        let thread = self.threads.clone().acquire_owned().await;
        let thread = thread.map_err(|_| "busy")?;
        let job = move || {
            // Held until the job is done: a timeout ends the wait, but does not stop the job.
            let _thread = thread;
            job()
        };
        run(job).await.ok_or("client")
    }
}

/// Runs a job on an encoder thread. Returns `None` if it panics.
async fn run<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (result_tx, result_rx) = oneshot::channel();
    ENCODER_POOL.submit(Box::new(move || _ = result_tx.send(job())));
    result_rx.await.ok()
}

struct EncoderPool {
    queue: Arc<Mutex<EncodeQueue>>,
    threads: usize,
}

#[derive(Default)]
struct EncodeQueue {
    jobs: VecDeque<EncodeJob>,
    /// Idle threads. The last one is woken first, because its core's cache is the warmest.
    idle: Vec<Thread>,
}

impl EncoderPool {
    fn start() -> Self {
        let queue = Arc::<Mutex<EncodeQueue>>::default();
        let started = (0..thread_count()).map(|index| {
            let queue = queue.clone();
            thread::Builder::new()
                .name(format!("encoder-{index}"))
                .spawn(move || run_worker(&queue))
        });
        let threads = started.filter(Result::is_ok).count();
        Self { queue, threads }
    }

    fn submit(&self, job: EncodeJob) {
        if self.threads == 0 {
            // If no thread could be started, the job runs on the caller's thread.
            return job();
        }
        let mut queue = self.queue.lock();
        queue.jobs.push_back(job);
        let thread = queue.idle.pop();
        drop(queue);
        if let Some(thread) = thread {
            thread.unpark();
        }
    }
}

fn run_worker(queue: &Mutex<EncodeQueue>) {
    let current = thread::current();
    loop {
        let mut state = queue.lock();
        if let Some(job) = state.jobs.pop_front() {
            drop(state);
            // A panic drops the channel, which the caller detects.
            _ = catch_unwind(AssertUnwindSafe(job));
            continue;
        }
        // Threads may wake spuriously.
        if state.idle.iter().all(|idle| idle.id() != current.id()) {
            state.idle.push(current.clone());
        }
        drop(state);
        thread::park();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Barrier;

    use super::*;

    #[tokio::test]
    async fn jobs_run_on_all_encoder_threads_only() {
        let mut thread_ids = HashSet::new();
        for _ in 0..20 {
            // The jobs wait for each other, so each needs a thread of its own.
            let barrier = Arc::new(Barrier::new(thread_count()));
            let jobs = (0..thread_count()).map(|_| {
                let barrier = barrier.clone();
                tokio::spawn(run(move || {
                    barrier.wait();
                    thread::current().id()
                }))
            });
            for job in jobs.collect::<Vec<_>>() {
                thread_ids.insert(job.await.unwrap().unwrap());
            }
        }
        assert_eq!(thread_ids.len(), thread_count());
    }

    #[tokio::test]
    async fn panic_returns_none_and_thread_survives() {
        for index in 0..3 * thread_count() {
            assert_eq!(run(|| -> u8 { panic!("on purpose") }).await, None);
            assert_eq!(run(move || index).await, Some(index));
        }
    }

    #[tokio::test]
    async fn more_jobs_than_threads_complete() {
        let jobs: Vec<_> = (0..1000)
            .map(|index| tokio::spawn(run(move || index)))
            .collect();
        for (index, job) in jobs.into_iter().enumerate() {
            assert_eq!(job.await.unwrap(), Some(index));
        }
    }
}
