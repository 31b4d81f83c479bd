//! Continuous batching, decided step by step without a clock: which requests compute how many tokens next, who waits for
//! a block or a place, and who is preempted when the cache is full. Time is added by the rank that drives it, so the
//! same decisions can be tested in microseconds.

use std::collections::VecDeque;
use std::sync::Arc;

use super::cache::{Cache, NoRoom, Sequence};

/// What one step may hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) max_num_batched_tokens: usize,
    pub(crate) max_num_seqs: usize,
}

/// Name of a job on its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct JobId(pub(crate) u64);

/// What another engine has to do with a job.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Part {
    /// Nothing.
    #[default]
    Whole,
    /// Another engine goes on from here: the blocks stay when the job is done, under this name.
    Lend {
        name: Arc<str>,
        /// Whether it ends when nobody waits for it any more. Otherwise, once it runs, it runs to its end.
        can_be_aborted: bool,
    },
    /// Another engine computed the prompt; its blocks are still to be fetched.
    Fetch,
}

/// One sequence to compute and the tokens it will generate.
#[derive(Debug)]
pub(crate) struct Job {
    id: JobId,
    part: Part,
    sequence: Sequence,
    prompt: usize,
    answer: Vec<u32>,
    generated: usize,
    cached: Option<usize>,
}

impl Job {
    /// `answer` is everything this job will generate, decided beforehand because it depends on the prompt alone.
    pub(crate) fn new(id: JobId, sequence: Sequence, answer: Vec<u32>) -> Self {
        Self {
            id,
            part: Part::Whole,
            prompt: sequence.len(),
            sequence,
            answer,
            generated: 0,
            cached: None,
        }
    }

    pub(crate) fn with_part(self, part: Part) -> Self {
        Self { part, ..self }
    }

    fn must_end(&self) -> bool {
        matches!(
            self.part,
            Part::Lend {
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
pub(crate) struct Step {
    /// Jobs that take part.
    pub(crate) jobs: Vec<JobId>,
    /// Jobs that left the queue for the first time.
    pub(crate) admitted: Vec<JobId>,
    /// Prompt tokens to compute.
    pub(crate) prefill_tokens: usize,
    /// Sequences that only continue.
    pub(crate) decoding: usize,
}

/// A token that a step produced.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Output {
    pub(crate) job: JobId,
    pub(crate) token: u32,
    /// Prompt tokens found in the cache when the job was first admitted.
    pub(crate) cached: usize,
    pub(crate) is_first: bool,
    pub(crate) is_last: bool,
}

/// Counters of the engine's metrics page.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Totals {
    pub(crate) prefix_queries: u64,
    pub(crate) prefix_hits: u64,
    /// Prompt tokens that came from another engine.
    pub(crate) fetched: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) generation_tokens: u64,
    pub(crate) preemptions: u64,
    pub(crate) finished: u64,
    pub(crate) aborted: u64,
}

/// The scheduler of one rank: see the module.
#[derive(Debug)]
pub(crate) struct Scheduler {
    pub(crate) cache: Cache,
    limits: Limits,
    waiting: VecDeque<Job>,
    running: Vec<Job>,
    /// Jobs whose blocks are under way from another engine.
    fetching: Vec<Job>,
    /// Those of them that nobody was told of yet, with the number of blocks to fetch.
    fetches: Vec<(JobId, usize)>,
    /// Those whose blocks have come. They are first in line: what they hold, nobody else gets before they have run.
    received: VecDeque<Job>,
    /// What done jobs leave for other engines.
    lent: Vec<(JobId, Arc<str>, Sequence)>,
    totals: Totals,
}

impl Scheduler {
    pub(crate) fn new(cache: Cache, limits: Limits) -> Self {
        Self {
            cache,
            limits,
            waiting: VecDeque::new(),
            running: Vec::new(),
            fetching: Vec::new(),
            fetches: Vec::new(),
            received: VecDeque::new(),
            lent: Vec::new(),
            totals: Totals::default(),
        }
    }

    pub(crate) fn submit(&mut self, job: Job) {
        self.waiting.push_back(job);
    }

    /// Drops a job wherever it is; its blocks become free and stay cached. One that must end goes on.
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
                .position(|job| job.id == id && !job.must_end());
            at.map(|at| self.running.remove(at))
        };
        if let Some(job) = &mut dropped {
            self.cache.release(&mut job.sequence);
            self.totals.aborted += 1;
        }
    }

    /// The jobs that got room for the blocks they wait for, and how many blocks each of them lacks.
    pub(crate) fn take_fetches(&mut self) -> Vec<(JobId, usize)> {
        std::mem::take(&mut self.fetches)
    }

    /// The blocks of a job could not be had: it computes its prompt itself, before all that wait.
    pub(crate) fn recompute(&mut self, id: JobId) {
        let Some(at) = self.fetching.iter().position(|job| job.id == id) else {
            return;
        };
        let mut job = self.fetching.remove(at);
        self.cache.release(&mut job.sequence);
        job.part = Part::Whole;
        self.waiting.push_front(job);
    }

    /// The blocks of a job have arrived: it goes on as if it had computed them. What it says is another `answer` if they
    /// are of another prompt.
    pub(crate) fn received(&mut self, id: JobId, answer: Option<Vec<u32>>) {
        let Some(at) = self.fetching.iter().position(|job| job.id == id) else {
            return;
        };
        let mut job = self.fetching.remove(at);
        job.answer = answer.unwrap_or(job.answer);
        self.totals.fetched += (job.sequence.len() - job.sequence.computed()) as u64;
        self.cache.receive(&mut job.sequence);
        job.part = Part::Whole;
        self.received.push_back(job);
    }

    /// What done jobs left for other engines: whose it is, its name and the blocks, which somebody must release.
    pub(crate) fn take_lent(&mut self) -> Vec<(JobId, Arc<str>, Sequence)> {
        std::mem::take(&mut self.lent)
    }

    /// Those who wait for blocks of another engine among them, as vLLM counts.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len() + self.fetching.len() + self.received.len()
    }

    /// Those who wait for blocks of another engine.
    pub(crate) fn deferred(&self) -> usize {
        self.fetching.len()
    }

    pub(crate) fn running(&self) -> usize {
        self.running.len()
    }

    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    /// Plans the next step: first everyone who runs, then, unless a block was missing, those who wait. `None` when there
    /// is nothing to do until a block is released or received.
    pub(crate) fn plan(&mut self) -> Option<Step> {
        let mut step = Step::default();
        let mut budget = self.limits.max_num_batched_tokens;
        let is_short_of_blocks = self.plan_running(&mut step, &mut budget);
        if !is_short_of_blocks || step.jobs.is_empty() {
            self.plan_received(&mut step, &mut budget);
            self.plan_waiting(&mut step, &mut budget);
        }
        (!step.jobs.is_empty()).then_some(step)
    }

    fn plan_running(&mut self, step: &mut Step, budget: &mut usize) -> bool {
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
                Err(NoRoom) => {
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

    fn plan_waiting(&mut self, step: &mut Step, budget: &mut usize) {
        while *budget > 0 && self.running.len() < self.limits.max_num_seqs {
            let Some(mut job) = self.waiting.pop_front() else {
                return;
            };
            match self.admit(&mut job, *budget, &mut step.admitted) {
                Err(NoRoom) => return self.waiting.push_front(job),
                Ok(_) if job.part == Part::Fetch => self.fetching.push(job),
                Ok(tokens) => {
                    step.add(&job, tokens);
                    *budget -= tokens;
                    self.running.push(job);
                }
            }
        }
    }

    fn plan_received(&mut self, step: &mut Step, budget: &mut usize) {
        while *budget > 0 && self.running.len() < self.limits.max_num_seqs {
            let Some(mut job) = self.received.pop_front() else {
                return;
            };
            let tokens = job.sequence.len() - job.sequence.computed();
            // It got room for all its tokens before they were fetched.
            if self.cache.grow(&mut job.sequence, tokens).is_err() {
                return self.received.push_front(job);
            }
            step.add(&job, tokens);
            *budget -= tokens;
            self.running.push(job);
        }
    }

    /// Takes blocks for a job that holds none; returns how many tokens it computes now.
    fn admit(
        &mut self,
        job: &mut Job,
        budget: usize,
        admitted: &mut Vec<JobId>,
    ) -> Result<usize, NoRoom> {
        let hit = self.cache.lookup(&mut job.sequence);
        let cached = self.cache.hit_tokens(&hit);
        let lacking = job.sequence.len() - cached;
        let tokens = if job.part == Part::Fetch {
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

    /// Ends a step: every participant whose known tokens are all computed gives its next one.
    pub(crate) fn complete(&mut self, step: &Step) -> Vec<Output> {
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
            outputs.push(Output {
                job: job.id,
                token,
                cached: job.cached.unwrap_or_default(),
                is_first,
                is_last,
            });
            if is_last {
                self.totals.finished += 1;
                match job.part {
                    Part::Lend { name, .. } => self.lent.push((job.id, name, job.sequence)),
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

impl Step {
    fn add(&mut self, job: &Job, tokens: usize) {
        self.jobs.push(job.id);
        if tokens == 1 && job.generated > 0 && job.is_ready_to_sample() {
            self.decoding += 1;
        } else {
            self.prefill_tokens += tokens;
        }
    }
}

#[cfg(test)]
#[path = "scheduler/tests.rs"]
mod tests;
