//! One data-parallel rank. It drives the scheduler step by step in (scaled) time, passes tokens to
//! the waiting requests and publishes the cache changes of each step. A submitted sequence is a
//! [`SequenceHandle`]. Dropping the handle, as after a client disconnect, aborts the sequence and
//! frees its blocks.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::Instant;

use super::cache::{BlockContent, TokenSequence};
use super::faults::FaultState;
use super::leases::{LeaseTable, LeasedBlocks};
use super::metrics::{LatencyHistograms, RankSample};
use super::publisher::KvEventPublisher;
use super::scheduler::{
    JobId, RemotePhase, SchedulerJob, SchedulerStep, StepScheduler, TokenOutput,
};
use super::wire::{self, EventEncoding};

/// Durations of the simulated work, from which a step's duration is computed.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct TimingModel {
    /// Microseconds per step.
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
    /// Speed-up factor of the simulated time.
    #[arg(long, default_value_t = 1.0)]
    pub(crate) speed: f64,
}

impl TimingModel {
    fn step_duration(&self, step: &SchedulerStep) -> Duration {
        let prefill = self.prefill_us_per_token * step.prefill_tokens as f64;
        let decode = self.decode_us_per_seq * step.decoding as f64;
        self.scaled(self.step_us + prefill + decode)
    }

    /// Returns the transfer time of blocks from another engine.
    pub(crate) fn transfer(&self, blocks: usize) -> Duration {
        self.scaled(self.transfer_us_per_block * blocks as f64)
    }

    fn scaled(&self, microseconds: f64) -> Duration {
        Duration::from_secs_f64((microseconds / self.speed / 1e6).max(0.0))
    }
}

/// Maximum lag behind the ideal clock that the following steps make up for.
const MAX_CATCH_UP: Duration = Duration::from_millis(20);

/// Channels to the [`SequenceHandle`] of one sequence.
#[derive(Debug)]
struct OutputChannels {
    tokens_tx: mpsc::UnboundedSender<TokenOutput>,
    arrived_at: Instant,
    last_token_at: Option<Instant>,
    allocated_tx: Option<oneshot::Sender<usize>>,
    leased_tx: Option<oneshot::Sender<LeasedBlocks>>,
}

#[derive(Debug)]
struct RankState {
    scheduler: StepScheduler,
    outputs: HashMap<JobId, OutputChannels>,
    next_job: u64,
    latencies: LatencyHistograms,
    leases: LeaseTable,
}

/// One data-parallel rank.
#[derive(Debug)]
pub(crate) struct EngineRank {
    pub(crate) number: u32,
    pub(crate) publisher: KvEventPublisher,
    state: Mutex<RankState>,
    wake: Notify,
    lease_granted: Notify,
    pub(crate) timing: TimingModel,
    /// Time for which blocks wait for another engine; `None` means no limit.
    lease: Option<Duration>,
    encoding: EventEncoding,
}

impl EngineRank {
    pub(crate) fn new(
        number: u32,
        scheduler: StepScheduler,
        publisher: KvEventPublisher,
        timing: TimingModel,
        encoding: EventEncoding,
    ) -> Self {
        let state = Mutex::new(RankState {
            scheduler,
            outputs: HashMap::new(),
            next_job: 0,
            latencies: LatencyHistograms::default(),
            leases: LeaseTable::default(),
        });
        Self {
            number,
            publisher,
            state,
            wake: Notify::new(),
            lease_granted: Notify::new(),
            timing,
            lease: None,
            encoding,
        }
    }

    /// Limits the duration of every lease.
    pub(crate) fn with_lease(self, lease: Duration) -> Self {
        Self {
            lease: Some(lease),
            ..self
        }
    }

    /// Queues a sequence that will generate `answer`.
    pub(crate) fn submit(
        self: &Arc<Self>,
        sequence: TokenSequence,
        answer: Vec<u32>,
        remote_phase: RemotePhase,
    ) -> SequenceHandle {
        let (tokens_tx, tokens_rx) = mpsc::unbounded_channel();
        let (allocated_tx, allocated_rx) = oneshot::channel();
        let (leased_tx, leased_rx) = oneshot::channel();
        let channels = OutputChannels {
            tokens_tx,
            arrived_at: Instant::now(),
            last_token_at: None,
            allocated_tx: Some(allocated_tx),
            leased_tx: Some(leased_tx),
        };
        let mut state = self.state.lock();
        let job = JobId(state.next_job);
        state.next_job += 1;
        state.outputs.insert(job, channels);
        state
            .scheduler
            .submit(SchedulerJob::new(job, sequence, answer).with_remote_phase(remote_phase));
        drop(state);
        self.wake.notify_one();
        SequenceHandle {
            rank: self.clone(),
            job,
            tokens_rx,
            allocated_rx: Some(allocated_rx),
            leased_rx: Some(leased_rx),
        }
    }

    fn received(&self, job: JobId, answer: Option<Vec<u32>>) {
        self.state.lock().scheduler.received(job, answer);
        self.wake.notify_one();
    }

    fn recompute(&self, job: JobId) {
        self.state.lock().scheduler.recompute(job);
        self.wake.notify_one();
    }

    /// Returns true if a lease of that name exists.
    pub(crate) fn has_lease(&self, name: &str) -> bool {
        self.state.lock().leases.blocks(name).is_some()
    }

    /// Returns the current contents of the blocks with these numbers, whether or not they are still
    /// leased. Without numbers, returns the contents of the leased blocks.
    pub(crate) fn read_blocks(
        &self,
        lease: &str,
        numbers: Option<Vec<usize>>,
    ) -> Vec<Option<BlockContent>> {
        let state = self.state.lock();
        let numbers = numbers
            .or_else(|| state.leases.blocks(lease))
            .unwrap_or_default();
        state.scheduler.cache.read(&numbers)
    }

    /// Extends a lease after a heartbeat. As with vLLM, it then lasts two thirds of its duration
    /// from now on.
    pub(crate) fn extend_lease(&self, name: &str) {
        if let Some(lease) = self.lease {
            self.state
                .lock()
                .leases
                .extend(name, Instant::now() + lease * 2 / 3);
        }
    }

    /// Ends a lease. Returns whether it existed.
    pub(crate) fn end_lease(&self, name: &str) -> bool {
        let mut state = self.state.lock();
        let Some(mut sequence) = state.leases.remove(name) else {
            return false;
        };
        state.scheduler.cache.release(&mut sequence);
        drop(state);
        self.wake.notify_one();
        true
    }

    /// Expires leases until the task is dropped.
    pub(crate) async fn expire_leases(self: Arc<Self>) {
        loop {
            let next = self.state.lock().leases.next_end();
            match next {
                None => self.lease_granted.notified().await,
                Some(end) => {
                    // Wakes up for new leases, because a lease granted in the meantime can expire
                    // earlier.
                    tokio::time::timeout_at(end, self.lease_granted.notified())
                        .await
                        .ok();
                    let mut guard = self.state.lock();
                    let state = &mut *guard;
                    for mut sequence in state.leases.expire(Instant::now()) {
                        state.scheduler.cache.release(&mut sequence);
                    }
                    drop(guard);
                    self.wake.notify_one();
                }
            }
        }
    }

    fn abort(&self, job: JobId) {
        let mut state = self.state.lock();
        if state.outputs.remove(&job).is_some() {
            state.scheduler.abort(job);
        }
    }

    /// Clears the cache if no request holds a block. The event is published with the next step.
    pub(crate) fn reset(&self) -> bool {
        self.state.lock().scheduler.cache.reset()
    }

    /// Runs the scheduler until the task is dropped.
    pub(crate) async fn run(self: Arc<Self>, faults: Arc<FaultState>) {
        // Steps follow an ideal clock, so that timers that fire a millisecond late do not slow down
        // the engine.
        let mut clock = Instant::now();
        loop {
            let Some(step) = self.plan() else {
                self.wake.notified().await;
                clock = Instant::now();
                continue;
            };
            faults.crash_if_due();
            let duration = self
                .timing
                .step_duration(&step)
                .mul_f64(faults.step_factor());
            clock = clock.max(Instant::now() - MAX_CATCH_UP) + duration;
            tokio::time::sleep_until(clock).await;
            self.complete(&step);
        }
    }

    fn plan(&self) -> Option<SchedulerStep> {
        let now = Instant::now();
        let mut state = self.state.lock();
        let step = state.scheduler.plan();
        for (job, blocks) in state.scheduler.take_fetches() {
            if let Some(allocated_tx) = state
                .outputs
                .get_mut(&job)
                .and_then(|channels| channels.allocated_tx.take())
            {
                // If the receiver is closed, its handle aborts the sequence.
                allocated_tx.send(blocks).ok();
            }
        }
        let step = step?;
        for job in &step.admitted {
            if let Some(arrived) = state.outputs.get(job).map(|channels| channels.arrived_at) {
                state.latencies.queue.observe((now - arrived).as_secs_f64());
            }
        }
        Some(step)
    }

    fn complete(&self, step: &SchedulerStep) {
        let now = Instant::now();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let outputs = state.scheduler.complete(step);
        let events = state.scheduler.cache.take_events();
        if !events.is_empty() {
            let ts = SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs_f64();
            let block_size = state.scheduler.cache.block_size();
            self.publisher.publish(wire::encode(
                self.encoding,
                ts,
                &events,
                block_size,
                self.number,
            ));
        }
        self.grant_leases(state, now);
        for output in outputs {
            let Some(channels) = state.outputs.get_mut(&output.job) else {
                continue;
            };
            let latencies = &mut state.latencies;
            let since_arrival = (now - channels.arrived_at).as_secs_f64();
            match channels.last_token_at.replace(now) {
                None => latencies.first_token.observe(since_arrival),
                Some(last) => latencies.inter_token.observe((now - last).as_secs_f64()),
            }
            if output.is_last {
                latencies.request.observe(since_arrival);
            }
            // If the receiver is closed, its handle aborts the sequence.
            channels.tokens_tx.send(output).ok();
            if output.is_last {
                state.outputs.remove(&output.job);
            }
        }
    }

    /// Leases the blocks of finished prefills, before their last token is sent.
    fn grant_leases(&self, state: &mut RankState, now: Instant) {
        for (job, name, sequence) in state.scheduler.take_finished_prefills() {
            let (leased, replaced) =
                state
                    .leases
                    .grant(name, sequence, self.lease.map(|lease| now + lease));
            if let Some(mut replaced) = replaced {
                state.scheduler.cache.release(&mut replaced);
            }
            // If the client disconnected, no decode engine receives the description, and the lease
            // expires.
            if let Some(leased_tx) = state
                .outputs
                .get_mut(&job)
                .and_then(|channels| channels.leased_tx.take())
            {
                leased_tx.send(leased).ok();
            }
            self.lease_granted.notify_one();
        }
    }

    pub(crate) fn sample(&self) -> RankSample {
        let state = self.state.lock();
        let RankState {
            scheduler,
            latencies,
            leases,
            ..
        } = &*state;
        RankSample {
            rank: self.number,
            running: scheduler.running(),
            waiting: scheduler.waiting(),
            deferred: scheduler.deferred(),
            used_blocks: scheduler.cache.used_blocks(),
            num_blocks: scheduler.cache.num_blocks(),
            block_size: scheduler.cache.block_size(),
            prefix_caching: scheduler.cache.prefix_caching(),
            totals: scheduler.totals(),
            latencies: latencies.clone(),
            leases: leases.held(),
            leases_expired: leases.expired(),
        }
    }

    /// Returns the rank's state for tests that compare it with external observations.
    pub(crate) fn state(&self) -> Value {
        let state = self.state.lock();
        let scheduler = &state.scheduler;
        let cache = &state.scheduler.cache;
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
            "leases": state.leases.held(),
            "last_seq": self.publisher.last_number(),
            "cached": content,
        })
    }
}

/// A submitted sequence, which receives its tokens.
#[derive(Debug)]
pub(crate) struct SequenceHandle {
    rank: Arc<EngineRank>,
    job: JobId,
    tokens_rx: mpsc::UnboundedReceiver<TokenOutput>,
    allocated_rx: Option<oneshot::Receiver<usize>>,
    leased_rx: Option<oneshot::Receiver<LeasedBlocks>>,
}

impl SequenceHandle {
    /// Returns the next token, or `None` after the last one.
    pub(crate) async fn next(&mut self) -> Option<TokenOutput> {
        self.tokens_rx.recv().await
    }

    /// Waits until blocks are allocated for a transfer. Returns the number of blocks to fetch.
    pub(crate) async fn allocated_blocks(&mut self) -> usize {
        let Some(allocated_rx) = self.allocated_rx.take() else {
            return 0;
        };
        // The rank holds the sender as long as the handle exists.
        allocated_rx.await.unwrap_or_default()
    }

    /// Returns the simulated duration of a transfer of `blocks` blocks to this rank.
    pub(crate) fn transfer_time(&self, blocks: usize) -> Duration {
        self.rank.timing.transfer(blocks)
    }

    /// Marks the blocks of another engine as received.
    pub(crate) fn received(&self) {
        self.rank.received(self.job, None);
    }

    /// Marks the received blocks as those of another prompt, which leads to another answer.
    pub(crate) fn received_wrong(&self, answer: Vec<u32>) {
        self.rank.received(self.job, Some(answer));
    }

    /// Falls back to computing the prompt here.
    pub(crate) fn recompute(&self) {
        self.rank.recompute(self.job);
    }

    /// Returns the receiver for the description of the leased blocks. It arrives no later than the
    /// last token.
    pub(crate) fn take_leased(&mut self) -> Option<oneshot::Receiver<LeasedBlocks>> {
        self.leased_rx.take()
    }
}

impl Drop for SequenceHandle {
    fn drop(&mut self) {
        self.rank.abort(self.job);
    }
}

#[cfg(test)]
mod tests {
    use super::super::cache::{BlockCache, BlockKeys};
    use super::super::publisher::PublisherSockets;
    use super::super::scheduler::SchedulerLimits;
    use super::*;

    const TIMING: TimingModel = TimingModel {
        step_us: 4800.0,
        prefill_us_per_token: 70.0,
        decode_us_per_seq: 150.0,
        transfer_us_per_block: 200.0,
        speed: 1.0,
    };
    const FAST: TimingModel = TimingModel {
        speed: 20.0,
        ..TIMING
    };

    fn scheduler(num_blocks: usize) -> StepScheduler {
        let limits = SchedulerLimits {
            max_num_batched_tokens: 2048,
            max_num_seqs: 1,
        };
        StepScheduler::new(BlockCache::new(16, num_blocks), limits)
    }

    async fn rank(num_blocks: usize, timing: TimingModel) -> Arc<EngineRank> {
        let sockets = PublisherSockets {
            topic: String::new(),
            events: None,
            replay: None,
            buffered_batches: 10,
        };
        let publisher = KvEventPublisher::open(sockets).await.unwrap();
        let rank = Arc::new(EngineRank::new(
            0,
            scheduler(num_blocks),
            publisher,
            timing,
            EventEncoding::Map,
        ));
        tokio::spawn(rank.clone().run(Arc::default()));
        rank
    }

    fn prompt(len: u32) -> TokenSequence {
        TokenSequence::new((0..len).collect(), BlockKeys::default())
    }

    #[test]
    fn cold_warm_and_decode_times_match_pace() {
        let mut scheduler = scheduler(1024);
        let mut times = Vec::new();
        for id in 0..2 {
            scheduler.submit(SchedulerJob::new(JobId(id), prompt(4096), vec![1; 11]));
            let mut first = None;
            let mut total = Duration::ZERO;
            while let Some(step) = scheduler.plan() {
                total += TIMING.step_duration(&step);
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
        assert_eq!(TIMING.transfer(10), Duration::from_millis(2));
        assert_eq!(
            TimingModel {
                speed: 10.0,
                ..TIMING
            }
            .step_duration(&SchedulerStep::default()),
            TIMING.step_duration(&SchedulerStep::default()) / 10
        );
    }

    #[tokio::test]
    async fn late_timers_do_not_slow_steps() {
        let rank = rank(64, TIMING).await;
        let start = Instant::now();
        let mut handle = rank.submit(prompt(10), vec![1; 100], RemotePhase::None);
        while handle.next().await.is_some() {}
        // The 100 steps take 4.8 to 5.5 ms each, and never less, however slow the machine is.
        assert!(
            start.elapsed() >= Duration::from_millis(450),
            "{:?}",
            start.elapsed()
        );
    }

    #[tokio::test]
    async fn dropped_handle_frees_blocks_for_next_request() {
        let rank = rank(64, FAST).await;
        let mut first = rank.submit(prompt(100), vec![1; 500], RemotePhase::None);
        let mut second = rank.submit(prompt(100), vec![2; 2], RemotePhase::None);
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
    async fn reset_event_is_published_with_next_step() {
        let rank = rank(64, FAST).await;
        let mut handle = rank.submit(prompt(40), vec![1], RemotePhase::None);
        while handle.next().await.is_some() {}
        assert_eq!(rank.publisher.last_number(), Some(0));
        assert!(rank.reset());
        assert_eq!(rank.publisher.last_number(), Some(0));
        let mut handle = rank.submit(prompt(40), vec![1], RemotePhase::None);
        assert_eq!(handle.next().await.unwrap().cached, 0);
        assert_eq!(rank.publisher.last_number(), Some(1));
        assert_eq!(rank.state()["cached"].as_array().unwrap().len(), 2);
    }
}
