//! Continuous batching without a clock. The scheduler plans the tokens of each step, queues
//! requests without a free block or slot, and preempts when the cache is full. The rank adds the
//! time, so tests of the scheduler run in microseconds.

use std::collections::VecDeque;
use std::sync::Arc;

use super::cache::{BlockCache, NoFreeBlockError, TokenSequence};

/// Limits of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SchedulerLimits {
    pub(crate) max_num_batched_tokens: usize,
    pub(crate) max_num_seqs: usize,
}

/// Id of a job on its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct JobId(pub(crate) u64);

/// The phase of a job that another engine computes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum RemotePhase {
    /// Both phases run here.
    #[default]
    None,
    /// Another engine decodes. The blocks of the finished job are leased under this name.
    Decode {
        name: Arc<str>,
        /// True if a started job ends when its client disconnects.
        can_be_aborted: bool,
    },
    /// Another engine computed the prompt, and its blocks must be fetched.
    Prefill,
}

/// One sequence to compute and the tokens to generate.
#[derive(Debug)]
pub(crate) struct SchedulerJob {
    id: JobId,
    remote_phase: RemotePhase,
    sequence: TokenSequence,
    prompt: usize,
    answer: Vec<u32>,
    generated: usize,
    cached: Option<usize>,
}

impl SchedulerJob {
    /// Creates a job. `answer` has all tokens that the job will generate; they depend only on the
    /// prompt.
    pub(crate) fn new(id: JobId, sequence: TokenSequence, answer: Vec<u32>) -> Self {
        Self {
            id,
            remote_phase: RemotePhase::None,
            prompt: sequence.len(),
            sequence,
            answer,
            generated: 0,
            cached: None,
        }
    }

    pub(crate) fn with_remote_phase(self, remote_phase: RemotePhase) -> Self {
        Self {
            remote_phase,
            ..self
        }
    }

    fn survives_abort(&self) -> bool {
        matches!(
            self.remote_phase,
            RemotePhase::Decode {
                can_be_aborted: false,
                ..
            }
        )
    }

    fn is_ready_to_sample(&self) -> bool {
        self.sequence.computed() == self.sequence.len()
    }
}

/// The work of one step.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct SchedulerStep {
    /// Jobs of this step.
    pub(crate) jobs: Vec<JobId>,
    /// Jobs admitted for the first time.
    pub(crate) admitted: Vec<JobId>,
    /// Prompt tokens to compute.
    pub(crate) prefill_tokens: usize,
    /// Sequences that only decode.
    pub(crate) decoding: usize,
}

/// A token that a step produced.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TokenOutput {
    pub(crate) job: JobId,
    pub(crate) token: u32,
    /// Prompt tokens found in the cache when the job was first admitted.
    pub(crate) cached: usize,
    pub(crate) is_first: bool,
    pub(crate) is_last: bool,
}

/// Counters of the engine's metrics page.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct SchedulerTotals {
    pub(crate) prefix_queries: u64,
    pub(crate) prefix_hits: u64,
    /// Prompt tokens fetched from another engine.
    pub(crate) fetched: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) generation_tokens: u64,
    pub(crate) preemptions: u64,
    pub(crate) finished: u64,
    pub(crate) aborted: u64,
}

/// The scheduler of one rank.
#[derive(Debug)]
pub(crate) struct StepScheduler {
    pub(crate) cache: BlockCache,
    limits: SchedulerLimits,
    waiting: VecDeque<SchedulerJob>,
    running: Vec<SchedulerJob>,
    /// Jobs that wait for blocks in transfer.
    fetching: Vec<SchedulerJob>,
    /// Fetches that were not reported yet, with the number of blocks.
    fetches: Vec<(JobId, usize)>,
    /// Jobs with received blocks. They run first, so that their blocks cannot be preempted before
    /// that.
    received: VecDeque<SchedulerJob>,
    /// Finished jobs whose blocks will be leased to a decode engine.
    finished_prefills: Vec<(JobId, Arc<str>, TokenSequence)>,
    totals: SchedulerTotals,
}

impl StepScheduler {
    pub(crate) fn new(cache: BlockCache, limits: SchedulerLimits) -> Self {
        Self {
            cache,
            limits,
            waiting: VecDeque::new(),
            running: Vec::new(),
            fetching: Vec::new(),
            fetches: Vec::new(),
            received: VecDeque::new(),
            finished_prefills: Vec::new(),
            totals: SchedulerTotals::default(),
        }
    }

    pub(crate) fn submit(&mut self, job: SchedulerJob) {
        self.waiting.push_back(job);
    }

    /// Removes a job. Its blocks become free and stay cached. A job that cannot be aborted
    /// continues.
    pub(crate) fn abort(&mut self, id: JobId) {
        let mut dropped = if let Some(at) = self.waiting.iter().position(|job| job.id == id) {
            self.waiting.remove(at)
        } else if let Some(at) = self.fetching.iter().position(|job| job.id == id) {
            Some(self.fetching.remove(at))
        } else if let Some(at) = self.received.iter().position(|job| job.id == id) {
            self.received.remove(at)
        } else {
            let at = self
                .running
                .iter()
                .position(|job| job.id == id && !job.survives_abort());
            at.map(|at| self.running.remove(at))
        };
        if let Some(job) = &mut dropped {
            self.cache.release(&mut job.sequence);
            self.totals.aborted += 1;
        }
    }

    /// Returns the jobs that have allocated their blocks, with the number of blocks to fetch.
    pub(crate) fn take_fetches(&mut self) -> Vec<(JobId, usize)> {
        std::mem::take(&mut self.fetches)
    }

    /// Falls back to computing the prompt of a job here, ahead of all waiting jobs.
    pub(crate) fn recompute(&mut self, id: JobId) {
        let Some(at) = self.fetching.iter().position(|job| job.id == id) else {
            return;
        };
        let mut job = self.fetching.remove(at);
        self.cache.release(&mut job.sequence);
        job.remote_phase = RemotePhase::None;
        self.waiting.push_front(job);
    }

    /// Continues a job with the received blocks as if it had computed them. If the blocks are of
    /// another prompt, `answer` replaces the answer of the job.
    pub(crate) fn received(&mut self, id: JobId, answer: Option<Vec<u32>>) {
        let Some(at) = self.fetching.iter().position(|job| job.id == id) else {
            return;
        };
        let mut job = self.fetching.remove(at);
        job.answer = answer.unwrap_or(job.answer);
        self.totals.fetched += (job.sequence.len() - job.sequence.computed()) as u64;
        self.cache.receive(&mut job.sequence);
        job.remote_phase = RemotePhase::None;
        self.received.push_back(job);
    }

    /// Returns the finished jobs with blocks to lease, each with its lease name. The caller must
    /// release the blocks.
    pub(crate) fn take_finished_prefills(&mut self) -> Vec<(JobId, Arc<str>, TokenSequence)> {
        std::mem::take(&mut self.finished_prefills)
    }

    /// Returns the number of waiting jobs. As in vLLM, jobs that wait for a transfer are included.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len() + self.fetching.len() + self.received.len()
    }

    /// Returns the number of jobs that wait for a transfer.
    pub(crate) fn deferred(&self) -> usize {
        self.fetching.len()
    }

    pub(crate) fn running(&self) -> usize {
        self.running.len()
    }

    pub(crate) fn totals(&self) -> SchedulerTotals {
        self.totals
    }

    /// Plans the next step. Running jobs come first. Waiting jobs follow unless a block was
    /// missing. Returns `None` if there is nothing to do until a block is released or received.
    pub(crate) fn plan(&mut self) -> Option<SchedulerStep> {
        let mut step = SchedulerStep::default();
        let mut budget = self.limits.max_num_batched_tokens;
        let is_short_of_blocks = self.plan_running(&mut step, &mut budget);
        if !is_short_of_blocks || step.jobs.is_empty() {
            self.plan_received(&mut step, &mut budget);
            self.plan_waiting(&mut step, &mut budget);
        }
        (!step.jobs.is_empty()).then_some(step)
    }

    fn plan_running(&mut self, step: &mut SchedulerStep, budget: &mut usize) -> bool {
        let mut has_preempted = false;
        let mut at = 0;
        while at < self.running.len() && *budget > 0 {
            let job = &mut self.running[at];
            let tokens = (job.sequence.len() - job.sequence.computed()).min(*budget);
            match self.cache.grow(&mut job.sequence, tokens) {
                Ok(()) => {
                    step.add(job, tokens);
                    *budget -= tokens;
                    at += 1;
                }
                Err(NoFreeBlockError) => {
                    has_preempted = true;
                    self.preempt_last();
                }
            }
        }
        has_preempted
    }

    fn preempt_last(&mut self) {
        if let Some(mut job) = self.running.pop() {
            self.cache.release(&mut job.sequence);
            self.totals.preemptions += 1;
            self.waiting.push_front(job);
        }
    }

    fn plan_waiting(&mut self, step: &mut SchedulerStep, budget: &mut usize) {
        while *budget > 0 && self.running.len() < self.limits.max_num_seqs {
            let Some(mut job) = self.waiting.pop_front() else {
                return;
            };
            match self.admit(&mut job, *budget, &mut step.admitted) {
                Err(NoFreeBlockError) => return self.waiting.push_front(job),
                Ok(_) if job.remote_phase == RemotePhase::Prefill => self.fetching.push(job),
                Ok(tokens) => {
                    step.add(&job, tokens);
                    *budget -= tokens;
                    self.running.push(job);
                }
            }
        }
    }

    fn plan_received(&mut self, step: &mut SchedulerStep, budget: &mut usize) {
        while *budget > 0 && self.running.len() < self.limits.max_num_seqs {
            let Some(mut job) = self.received.pop_front() else {
                return;
            };
            let tokens = job.sequence.len() - job.sequence.computed();
            // All tokens of the job were allocated before the fetch.
            if self.cache.grow(&mut job.sequence, tokens).is_err() {
                return self.received.push_front(job);
            }
            step.add(&job, tokens);
            *budget -= tokens;
            self.running.push(job);
        }
    }

    /// Allocates blocks for a job that holds none. Returns the number of tokens to compute now.
    fn admit(
        &mut self,
        job: &mut SchedulerJob,
        budget: usize,
        admitted: &mut Vec<JobId>,
    ) -> Result<usize, NoFreeBlockError> {
        let hit = self.cache.lookup(&mut job.sequence);
        let cached = self.cache.hit_tokens(&hit);
        let lacking = job.sequence.len() - cached;
        let tokens = if job.remote_phase == RemotePhase::Prefill {
            self.cache.reserve(&mut job.sequence, &hit, lacking)?;
            self.fetches
                .push((job.id, lacking.div_ceil(self.cache.block_size())));
            0
        } else {
            let tokens = lacking.min(budget);
            self.cache.admit(&mut job.sequence, &hit, tokens)?;
            tokens
        };
        if job.cached.is_none() {
            job.cached = Some(cached);
            self.totals.prefix_queries += job.prompt as u64;
            self.totals.prefix_hits += cached as u64;
            admitted.push(job.id);
        }
        Ok(tokens)
    }

    /// Completes a step. Every participant whose known tokens are all computed generates its next
    /// token.
    pub(crate) fn complete(&mut self, step: &SchedulerStep) -> Vec<TokenOutput> {
        let mut outputs = Vec::new();
        let mut running = Vec::with_capacity(self.running.len());
        for mut job in self.running.drain(..) {
            if !(step.jobs.contains(&job.id) && job.is_ready_to_sample()) {
                running.push(job);
                continue;
            }
            let token = job.answer[job.generated];
            job.generated += 1;
            self.totals.generation_tokens += 1;
            let is_first = job.generated == 1;
            if is_first {
                self.totals.prompt_tokens += job.prompt as u64;
            }
            let is_last = job.generated == job.answer.len();
            outputs.push(TokenOutput {
                job: job.id,
                token,
                cached: job.cached.unwrap_or_default(),
                is_first,
                is_last,
            });
            if is_last {
                self.totals.finished += 1;
                match job.remote_phase {
                    RemotePhase::Decode { name, .. } => {
                        self.finished_prefills.push((job.id, name, job.sequence))
                    }
                    _ => self.cache.release(&mut job.sequence),
                }
            } else {
                job.sequence.push(token);
                running.push(job);
            }
        }
        self.running = running;
        outputs
    }
}

impl SchedulerStep {
    fn add(&mut self, job: &SchedulerJob, tokens: usize) {
        self.jobs.push(job.id);
        if tokens == 1 && job.generated > 0 && job.is_ready_to_sample() {
            self.decoding += 1;
        } else {
            self.prefill_tokens += tokens;
        }
    }
}

#[cfg(test)]
mod tests;
