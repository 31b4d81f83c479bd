//! One data-parallel rank at work: drives the scheduler step by step in (scaled) time, hands tokens to the requests that
//! wait for them and publishes what each step did to the cache. A request is a [`Ticket`]; dropping it, as happens when
//! the client goes away, aborts the work and frees the blocks.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::Instant;

use super::cache::{Sequence, Written};
use super::faults::Mood;
use super::leases::{Leases, Lent};
use super::metrics::{Durations, Sample};
use super::publisher::Publisher;
use super::scheduler::{Job, JobId, Output, Part, Scheduler, Step};
use super::wire::{self, Encoding};

/// How long a step takes.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Pace {
    /// Microseconds of any step.
    #[arg(long, default_value_t = 4800.0)]
    pub(crate) step_us: f64,
    /// Microseconds per prompt token computed in a step.
    #[arg(long, default_value_t = 70.0)]
    pub(crate) prefill_us_per_token: f64,
    /// Microseconds per sequence that decodes in a step.
    #[arg(long, default_value_t = 150.0)]
    pub(crate) decode_us_per_seq: f64,
    /// Microseconds per block fetched from another engine.
    #[arg(long, default_value_t = 200.0)]
    pub(crate) transfer_us_per_block: f64,
    /// Everything that many times faster.
    #[arg(long, default_value_t = 1.0)]
    pub(crate) speed: f64,
}

impl Pace {
    fn of(&self, step: &Step) -> Duration {
        let prefill = self.prefill_us_per_token * step.prefill_tokens as f64;
        let decode = self.decode_us_per_seq * step.decoding as f64;
        self.scaled(self.step_us + prefill + decode)
    }

    /// How long the blocks of another engine are under way.
    pub(crate) fn transfer(&self, blocks: usize) -> Duration {
        self.scaled(self.transfer_us_per_block * blocks as f64)
    }

    fn scaled(&self, microseconds: f64) -> Duration {
        Duration::from_secs_f64((microseconds / self.speed / 1e6).max(0.0))
    }
}

/// A step that ends later than this after its time is not made up for by the following ones.
const MOST_LAG: Duration = Duration::from_millis(20);

/// One request's place in the rank.
#[derive(Debug)]
struct Outlet {
    tokens: mpsc::UnboundedSender<Output>,
    arrived: Instant,
    last_token: Option<Instant>,
    room: Option<oneshot::Sender<usize>>,
    lent: Option<oneshot::Sender<Lent>>,
}

#[derive(Debug)]
struct Work {
    scheduler: Scheduler,
    outlets: HashMap<JobId, Outlet>,
    next_job: u64,
    durations: Durations,
    leases: Leases,
}

/// The rank: see the module.
#[derive(Debug)]
pub(crate) struct Rank {
    pub(crate) number: u32,
    pub(crate) publisher: Publisher,
    work: Mutex<Work>,
    wake: Notify,
    lease_granted: Notify,
    pub(crate) pace: Pace,
    /// How long blocks wait for another engine; without end if none is given.
    lease: Option<Duration>,
    encoding: Encoding,
}

impl Rank {
    pub(crate) fn new(
        number: u32,
        scheduler: Scheduler,
        publisher: Publisher,
        (pace, encoding): (Pace, Encoding),
    ) -> Self {
        let (outlets, durations, leases) =
            (HashMap::new(), Durations::default(), Leases::default());
        let work = Mutex::new(Work {
            scheduler,
            outlets,
            next_job: 0,
            durations,
            leases,
        });
        let (wake, lease_granted) = (Notify::new(), Notify::new());
        Self {
            number,
            publisher,
            work,
            wake,
            lease_granted,
            pace,
            lease: None,
            encoding,
        }
    }

    /// The same with an end to every lease.
    pub(crate) fn with_lease(self, lease: Duration) -> Self {
        Self {
            lease: Some(lease),
            ..self
        }
    }

    /// Queues a sequence that will generate `answer`.
    pub(crate) fn submit(
        self: &Arc<Self>,
        sequence: Sequence,
        answer: Vec<u32>,
        part: Part,
    ) -> Ticket {
        let (sender, tokens) = mpsc::unbounded_channel();
        let (has_room, room) = oneshot::channel();
        let (lends, lent) = oneshot::channel();
        let outlet = Outlet {
            tokens: sender,
            arrived: Instant::now(),
            last_token: None,
            room: Some(has_room),
            lent: Some(lends),
        };
        let mut work = self.work.lock();
        let job = JobId(work.next_job);
        work.next_job += 1;
        work.outlets.insert(job, outlet);
        work.scheduler
            .submit(Job::new(job, sequence, answer).with_part(part));
        drop(work);
        self.wake.notify_one();
        Ticket {
            rank: self.clone(),
            job,
            tokens,
            room: Some(room),
            lent: Some(lent),
        }
    }

    fn received(&self, job: JobId, answer: Option<Vec<u32>>) {
        self.work.lock().scheduler.received(job, answer);
        self.wake.notify_one();
    }

    fn recompute(&self, job: JobId) {
        self.work.lock().scheduler.recompute(job);
        self.wake.notify_one();
    }

    /// Whether there is a lease of that name.
    pub(crate) fn lends(&self, name: &str) -> bool {
        self.work.lock().leases.blocks(name).is_some()
    }

    /// What lies in blocks at this moment: in those of these numbers, whether or not anybody keeps them, or in those that
    /// are kept under the name. The lease of that name ends; also told is whether there was one.
    pub(crate) fn take(
        &self,
        name: &str,
        numbers: Option<Vec<usize>>,
    ) -> (Vec<Option<Written>>, bool) {
        let work = self.work.lock();
        let numbers = numbers
            .or_else(|| work.leases.blocks(name))
            .unwrap_or_default();
        let written = work.scheduler.cache.read(&numbers);
        drop(work);
        (written, self.end_lease(name))
    }

    /// The other engine is still there: a lease lasts two thirds of its time from now on, as with vLLM's heartbeats.
    pub(crate) fn prolong_lease(&self, name: &str) {
        if let Some(lease) = self.lease {
            self.work
                .lock()
                .leases
                .extend(name, Instant::now() + lease * 2 / 3);
        }
    }

    /// Ends a lease; whether there was one.
    pub(crate) fn end_lease(&self, name: &str) -> bool {
        let mut work = self.work.lock();
        let Some(mut sequence) = work.leases.take(name) else {
            return false;
        };
        work.scheduler.cache.release(&mut sequence);
        drop(work);
        self.wake.notify_one();
        true
    }

    /// Ends leases in time, for ever.
    pub(crate) async fn expire_leases(self: Arc<Self>) {
        loop {
            let next = self.work.lock().leases.next_end();
            match next {
                None => self.lease_granted.notified().await,
                Some(end) => {
                    // One granted meanwhile can end before this one.
                    tokio::time::timeout_at(end, self.lease_granted.notified())
                        .await
                        .ok();
                    let mut guard = self.work.lock();
                    let work = &mut *guard;
                    for mut sequence in work.leases.expire(Instant::now()) {
                        work.scheduler.cache.release(&mut sequence);
                    }
                    drop(guard);
                    self.wake.notify_one();
                }
            }
        }
    }

    fn abort(&self, job: JobId) {
        let mut work = self.work.lock();
        if work.outlets.remove(&job).is_some() {
            work.scheduler.abort(job);
        }
    }

    /// Forgets the cache if no request holds a block; the event leaves with the next step.
    pub(crate) fn reset(&self) -> bool {
        self.work.lock().scheduler.cache.reset()
    }

    /// Works for ever.
    pub(crate) async fn drive(self: Arc<Self>, mood: Arc<Mood>) {
        // Steps follow one another on an ideal clock: a timer that fires late by a millisecond must not slow the engine.
        let mut clock = Instant::now();
        loop {
            let Some(step) = self.plan() else {
                self.wake.notified().await;
                clock = Instant::now();
                continue;
            };
            mood.crash_if_due();
            clock = clock.max(Instant::now() - MOST_LAG) + self.pace.of(&step);
            tokio::time::sleep_until(clock).await;
            self.complete(&step);
        }
    }

    fn plan(&self) -> Option<Step> {
        let now = Instant::now();
        let mut work = self.work.lock();
        let step = work.scheduler.plan();
        for (job, blocks) in work.scheduler.take_fetches() {
            if let Some(room) = work
                .outlets
                .get_mut(&job)
                .and_then(|outlet| outlet.room.take())
            {
                // A receiver that is gone aborts by its ticket.
                room.send(blocks).ok();
            }
        }
        let step = step?;
        for job in &step.admitted {
            if let Some(arrived) = work.outlets.get(job).map(|outlet| outlet.arrived) {
                work.durations.queue.observe((now - arrived).as_secs_f64());
            }
        }
        Some(step)
    }

    fn complete(&self, step: &Step) {
        let now = Instant::now();
        let mut guard = self.work.lock();
        let work = &mut *guard;
        let outputs = work.scheduler.complete(step);
        let events = work.scheduler.cache.take_events();
        if !events.is_empty() {
            let ts = SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs_f64();
            let block_size = work.scheduler.cache.block_size();
            self.publisher.publish(wire::encode(
                self.encoding,
                ts,
                &events,
                block_size,
                self.number,
            ));
        }
        self.lend(work, now);
        for output in outputs {
            let Some(outlet) = work.outlets.get_mut(&output.job) else {
                continue;
            };
            let durations = &mut work.durations;
            let since_arrival = (now - outlet.arrived).as_secs_f64();
            match outlet.last_token.replace(now) {
                None => durations.first_token.observe(since_arrival),
                Some(last) => durations.between_tokens.observe((now - last).as_secs_f64()),
            }
            if output.is_last {
                durations.whole_request.observe(since_arrival);
            }
            // A receiver that is gone aborts by its ticket.
            outlet.tokens.send(output).ok();
            if output.is_last {
                work.outlets.remove(&output.job);
            }
        }
    }

    /// Pins what done prefills leave behind. It happens before anybody hears of their last token.
    fn lend(&self, work: &mut Work, now: Instant) {
        for (job, name, sequence) in work.scheduler.take_lent() {
            let (lent, replaced) =
                work.leases
                    .grant(name, sequence, self.lease.map(|lease| now + lease));
            if let Some(mut replaced) = replaced {
                work.scheduler.cache.release(&mut replaced);
            }
            // Nobody is there to tell when the client left meanwhile: then nobody comes for the blocks.
            if let Some(lends) = work
                .outlets
                .get_mut(&job)
                .and_then(|outlet| outlet.lent.take())
            {
                lends.send(lent).ok();
            }
            self.lease_granted.notify_one();
        }
    }

    pub(crate) fn sample(&self) -> Sample {
        let work = self.work.lock();
        let Work {
            scheduler,
            durations,
            leases,
            ..
        } = &*work;
        Sample {
            rank: self.number,
            running: scheduler.running(),
            waiting: scheduler.waiting(),
            deferred: scheduler.deferred(),
            used_blocks: scheduler.cache.used_blocks(),
            num_blocks: scheduler.cache.num_blocks(),
            block_size: scheduler.cache.block_size(),
            prefix_caching: scheduler.cache.keeps(),
            totals: scheduler.totals(),
            durations: durations.clone(),
            leases: leases.held(),
            leases_expired: leases.expired(),
        }
    }

    /// Everything a test wants to compare with what it learnt from outside.
    pub(crate) fn state(&self) -> Value {
        let work = self.work.lock();
        let (scheduler, cache) = (&work.scheduler, &work.scheduler.cache);
        let content: Vec<_> = cache
            .content()
            .into_iter()
            .map(|(hash, copies)| json!({"hash": hash, "copies": copies}))
            .collect();
        json!({
            "rank": self.number,
            "block_size": cache.block_size(),
            "blocks": {
                "total": cache.num_blocks(),
                "used": cache.used_blocks(),
                "free": cache.num_blocks() - cache.used_blocks(),
                "cached": cache.cached_blocks(),
            },
            "running": scheduler.running(),
            "waiting": scheduler.waiting(),
            "leases": work.leases.held(),
            "last_seq": self.publisher.last_number(),
            "cached": content,
        })
    }
}

/// A submitted sequence; its tokens arrive here.
#[derive(Debug)]
pub(crate) struct Ticket {
    rank: Arc<Rank>,
    job: JobId,
    tokens: mpsc::UnboundedReceiver<Output>,
    room: Option<oneshot::Receiver<usize>>,
    lent: Option<oneshot::Receiver<Lent>>,
}

impl Ticket {
    /// The next token; `None` after the last.
    pub(crate) async fn next(&mut self) -> Option<Output> {
        self.tokens.recv().await
    }

    /// Waits until there is room for the blocks of another engine; returns how many of them are to be fetched.
    pub(crate) async fn room(&mut self) -> usize {
        let Some(room) = self.room.take() else {
            return 0;
        };
        // The rank keeps the other end as long as there is a ticket.
        room.await.unwrap_or_default()
    }

    /// The blocks of another engine are here.
    pub(crate) fn received(&self) {
        self.rank.received(self.job, None);
    }

    /// Blocks are here that are not this prompt's: what comes of it is another answer.
    pub(crate) fn received_wrong(&self, answer: Vec<u32>) {
        self.rank.received(self.job, Some(answer));
    }

    /// No blocks will come: the prompt is computed here.
    pub(crate) fn recompute(&self) {
        self.rank.recompute(self.job);
    }

    /// Where to hear, not later than the last token, what is kept for another engine.
    pub(crate) fn take_lent(&mut self) -> Option<oneshot::Receiver<Lent>> {
        self.lent.take()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.rank.abort(self.job);
    }
}

#[cfg(test)]
mod tests {
    use super::super::cache::{Cache, Keys};
    use super::super::publisher::Sockets;
    use super::super::scheduler::Limits;
    use super::*;

    const PACE: Pace = Pace {
        step_us: 4800.0,
        prefill_us_per_token: 70.0,
        decode_us_per_seq: 150.0,
        transfer_us_per_block: 200.0,
        speed: 1.0,
    };
    const FAST: Pace = Pace {
        speed: 20.0,
        ..PACE
    };

    fn scheduler(num_blocks: usize) -> Scheduler {
        let limits = Limits {
            max_num_batched_tokens: 2048,
            max_num_seqs: 1,
        };
        Scheduler::new(Cache::new(16, num_blocks), limits)
    }

    async fn rank(num_blocks: usize, pace: Pace) -> Arc<Rank> {
        let sockets = Sockets {
            topic: String::new(),
            events: None,
            replay: None,
            buffered_batches: 10,
        };
        let publisher = Publisher::open(sockets).await.unwrap();
        let rank = Arc::new(Rank::new(
            0,
            scheduler(num_blocks),
            publisher,
            (pace, Encoding::Map),
        ));
        tokio::spawn(rank.clone().drive(Arc::default()));
        rank
    }

    fn prompt(len: u32) -> Sequence {
        Sequence::new((0..len).collect(), Keys::default())
    }

    #[test]
    fn a_cold_4k_prompt_takes_about_300_ms_a_warm_one_a_step_and_a_token_5_ms() {
        let mut scheduler = scheduler(1024);
        let mut times = Vec::new();
        for id in 0..2 {
            scheduler.submit(Job::new(JobId(id), prompt(4096), vec![1; 11]));
            let (mut first, mut total) = (None, Duration::ZERO);
            while let Some(step) = scheduler.plan() {
                total += PACE.of(&step);
                if scheduler
                    .complete(&step)
                    .iter()
                    .any(|output| output.is_first)
                {
                    first = Some(total);
                }
            }
            times.push((
                first.unwrap().as_millis(),
                (total - first.unwrap()).as_millis() / 10,
            ));
        }
        let [(cold, decode), (warm, _)] = times[..] else {
            panic!("{times:?}")
        };
        assert!((280..320).contains(&cold), "{cold} ms");
        assert!((5..=8).contains(&warm), "{warm} ms");
        assert!((4..=6).contains(&decode), "{decode} ms");
        assert_eq!(
            Pace {
                speed: 10.0,
                ..PACE
            }
            .of(&Step::default()),
            PACE.of(&Step::default()) / 10
        );
    }

    #[tokio::test]
    async fn steps_keep_the_ideal_pace_although_timers_fire_late() {
        let rank = rank(64, PACE).await;
        let start = Instant::now();
        let mut ticket = rank.submit(prompt(10), vec![1; 100], Part::Whole);
        while ticket.next().await.is_some() {}
        // 100 steps of 4.8 to 5.5 ms; never faster, whatever else the machine does.
        assert!(
            start.elapsed() >= Duration::from_millis(450),
            "{:?}",
            start.elapsed()
        );
    }

    #[tokio::test]
    async fn a_dropped_ticket_frees_the_blocks_and_the_next_in_line_runs() {
        let rank = rank(64, FAST).await;
        let mut first = rank.submit(prompt(100), vec![1; 500], Part::Whole);
        let mut second = rank.submit(prompt(100), vec![2; 2], Part::Whole);
        first.next().await.unwrap();
        assert_eq!((rank.sample().running, rank.sample().waiting), (1, 1));
        drop(first);
        assert_eq!(second.next().await.unwrap().cached, 96);
        while second.next().await.is_some() {}
        assert_eq!(
            (rank.sample().used_blocks, rank.sample().totals.aborted),
            (0, 1)
        );
    }

    #[tokio::test]
    async fn a_reset_is_numbered_with_the_next_step_and_not_before() {
        let rank = rank(64, FAST).await;
        let mut ticket = rank.submit(prompt(40), vec![1], Part::Whole);
        while ticket.next().await.is_some() {}
        assert_eq!(rank.publisher.last_number(), Some(0));
        assert!(rank.reset());
        assert_eq!(rank.publisher.last_number(), Some(0));
        let mut ticket = rank.submit(prompt(40), vec![1], Part::Whole);
        assert_eq!(ticket.next().await.unwrap().cached, 0);
        assert_eq!(rank.publisher.last_number(), Some(1));
        assert_eq!(rank.state()["cached"].as_array().unwrap().len(), 2);
    }
}
