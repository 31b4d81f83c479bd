//! Compares predictors with their naive model under random steps.

use super::*;

/// One step of a script. Picks are taken modulo the number of choices.
#[derive(Clone, Debug)]
enum Step {
    Record {
        slot: RankSlot,
        path: Vec<u8>,
        hold: bool,
    },
    Grow {
        pick: usize,
        blocks: u64,
    },
    Release {
        pick: usize,
    },
    Revoke {
        pick: usize,
    },
    Wait {
        millis: u64,
    },
    Expire,
    Reopen {
        slot: RankSlot,
    },
}

/// Generates scripts of at most `max_steps` steps on this many ranks. Prompts have fewer than
/// `max_len` blocks of this many kinds.
fn steps(
    max_steps: usize,
    ranks: u32,
    kinds: u8,
    max_len: usize,
) -> impl Strategy<Value = Vec<Step>> {
    let slot = move || prop_oneof![3 => Just(A), 2 => (0..ranks).prop_map(RankSlot)];
    let step = prop_oneof![
        10 => (slot(), vec(0..kinds, 0..max_len), any::<bool>())
            .prop_map(|(slot, path, hold)| Step::Record { slot, path, hold }),
        3 => (any::<usize>(), 1..4u64).prop_map(|(pick, blocks)| Step::Grow { pick, blocks }),
        5 => any::<usize>().prop_map(|pick| Step::Release { pick }),
        4 => any::<usize>().prop_map(|pick| Step::Revoke { pick }),
        5 => (1..500u64).prop_map(|millis| Step::Wait { millis }),
        4 => Just(Step::Expire),
        1 => slot().prop_map(|slot| Step::Reopen { slot }),
    ];
    vec(step, 1..max_steps)
}

/// Running request in the predictor and in the model.
struct Request {
    slot: RankSlot,
    opened: usize,
    prompt_path: Vec<u8>,
    path: Vec<u8>,
    before_use: UseSnapshot,
    generated: u64,
    lease: PredictionLease,
}

/// Predictor and models. Ranks with and without a capacity alternate.
struct PredictorAndModels {
    test_bed: TestBed,
    lru: bool,
    max_blocks: u64,
    models: Vec<Model>,
    opened: Vec<usize>,
    requests: Vec<Request>,
    seen: Vec<Vec<u8>>,
}

impl PredictorAndModels {
    fn new(lru: bool, max_blocks: u64, ranks: u32) -> Self {
        let policy = if lru {
            EvictionPolicy::Lru {
                default_blocks: None,
                fallback: ttl(max_blocks),
            }
        } else {
            EvictionPolicy::Ttl(ttl(max_blocks))
        };
        let test_bed = TestBed::new(policy);
        let opened = vec![0; ranks as usize];
        let mut pair = Self {
            test_bed,
            lru,
            max_blocks,
            models: Vec::new(),
            opened,
            requests: Vec::new(),
            seen: Vec::new(),
        };
        for slot in (0..ranks).map(RankSlot) {
            let model = pair.open(slot);
            pair.models.push(model);
        }
        pair
    }

    /// Opens a slot. Returns its model.
    fn open(&self, slot: RankSlot) -> Model {
        let capacity = slot
            .0
            .is_multiple_of(2)
            .then_some(self.max_blocks * (1 + u64::from(slot.0)));
        self.test_bed.predictor.open(slot, rank_of(slot), capacity);
        let (max_blocks, leases) = match capacity.filter(|_| self.lru) {
            Some(capacity) => (capacity, true),
            None => (self.max_blocks, false),
        };
        Model::new(max_blocks, leases, TTL)
    }

    fn apply(&mut self, step: &Step) {
        let now = self.test_bed.now();
        match step {
            Step::Record { slot, path, hold } => {
                let lease = self.test_bed.record(*slot, path);
                let (held, before_use) = self.models[slot.index()].record(path, now);
                let slot = *slot;
                let opened = self.opened[slot.index()];
                let prompt_path = path.clone();
                let path = path[..held].to_vec();
                self.requests.push(Request {
                    slot,
                    opened,
                    prompt_path,
                    path,
                    before_use,
                    generated: 0,
                    lease,
                });
                let prompt_path = &self.requests[self.requests.len() - 1].prompt_path;
                if !self.seen.contains(prompt_path) {
                    self.seen.push(prompt_path.clone());
                }
                if !hold {
                    self.release(self.requests.len() - 1);
                }
            }
            Step::Grow { pick, blocks } if !self.requests.is_empty() => {
                let at = pick % self.requests.len();
                let request = &mut self.requests[at];
                request.lease.grow(*blocks);
                if request.opened == self.opened[request.slot.index()] {
                    request.generated += blocks;
                    self.models[request.slot.index()].grow(*blocks);
                }
            }
            Step::Release { pick } if !self.requests.is_empty() => {
                self.release(pick % self.requests.len())
            }
            Step::Revoke { pick } if !self.requests.is_empty() => {
                self.revoke(pick % self.requests.len())
            }
            Step::Grow { .. } | Step::Release { .. } | Step::Revoke { .. } => {}
            Step::Wait { millis } => self.test_bed.wait(*millis),
            Step::Expire => {
                self.test_bed.predictor.expire();
                self.models.iter_mut().for_each(|model| model.expire(now));
            }
            Step::Reopen { slot } => {
                self.models[slot.index()] = self.open(*slot);
                self.opened[slot.index()] += 1;
            }
        }
    }

    fn revoke(&mut self, at: usize) {
        let Request {
            slot,
            opened,
            prompt_path,
            path,
            before_use,
            generated,
            lease,
        } = self.requests.swap_remove(at);
        let revoked = lease.revoke(&prompt(&prompt_path));
        if opened == self.opened[slot.index()] {
            assert_eq!(
                revoked,
                if self.models[slot.index()].leases() {
                    generated
                } else {
                    0
                }
            );
            let now = self.test_bed.now();
            self.models[slot.index()].revoke(&path, before_use, generated, now);
        }
    }

    fn release(&mut self, at: usize) {
        let Request {
            slot,
            opened,
            path,
            generated,
            lease,
            ..
        } = self.requests.swap_remove(at);
        drop(lease);
        if opened == self.opened[slot.index()] {
            let now = self.test_bed.now();
            self.models[slot.index()].release(&path, generated, now);
        }
    }

    fn check(&mut self) {
        self.check_counts();
        for at in 0..self.seen.len() {
            self.check_path(at);
        }
    }

    fn check_path(&mut self, at: usize) {
        let path = &self.seen[at];
        let overlaps = predicted_overlaps(&self.test_bed.predictor, &prompt(path));
        for (slot, model) in self.models.iter().enumerate() {
            let found = overlaps.get(RankSlot(slot as u32));
            assert_eq!(found.total(), found.device);
            assert_eq!(
                found.device as usize,
                model.overlap(path),
                "{slot:?} {path:?}"
            );
        }
    }

    fn check_counts(&self) {
        let stats = self.test_bed.predictor.stats();
        let indexed = self.test_bed.predictor.index.stats();
        let all: BTreeSet<&Vec<u8>> = self.models.iter().flat_map(Model::paths).collect();
        assert_eq!(indexed.distinct_blocks, all.len() as u64);
        for (slot, model) in self.models.iter().enumerate() {
            assert!(
                model.has_all_parents(),
                "a block was evicted before its descendants: {model:?}"
            );
            let found = &stats[slot];
            assert_eq!(
                (found.blocks, found.generated),
                (model.blocks(), model.generated()),
                "{slot:?}"
            );
            let removed = (found.evicted, found.expired, found.refused);
            assert_eq!(
                removed,
                (model.evicted, model.expired, model.refused),
                "{slot:?}"
            );
            assert_eq!(
                indexed.slots[slot].counts.device,
                model.blocks(),
                "{slot:?}"
            );
        }
    }

    /// Ends all requests and closes all slots. No block may remain.
    fn end(mut self) {
        while !self.requests.is_empty() {
            self.release(0);
        }
        self.check();
        for slot in (0..self.models.len() as u32).map(RankSlot) {
            self.test_bed.predictor.close(slot);
        }
        assert_eq!(self.test_bed.predictor.index.stats(), IndexStats::default());
    }
}

proptest! {
    #![proptest_config(warmroute_property_tests::property_config(10_000))]

    #[test]
    fn predictor_matches_model(
        lru in any::<bool>(),
        max_blocks in 1..20u64,
        steps in steps(30, 2, 2, 8),
    ) {
        let mut pair = PredictorAndModels::new(lru, max_blocks, 2);
        for step in &steps {
            pair.apply(step);
            pair.check();
        }
        pair.end();
    }
}

proptest! {
    #![proptest_config(warmroute_property_tests::property_config(300))]

    #[test]
    fn long_scripts_on_several_ranks_match_model(
        lru in any::<bool>(),
        max_blocks in 5..100u64,
        steps in steps(300, RANKS, 3, 16),
    ) {
        let mut pair = PredictorAndModels::new(lru, max_blocks, RANKS);
        for (at, step) in steps.iter().enumerate() {
            pair.apply(step);
            pair.check_counts();
            let last = pair.seen.len().saturating_sub(4);
            (last..pair.seen.len()).for_each(|seen| pair.check_path(seen));
            if !pair.seen.is_empty() {
                pair.check_path(at * 7919 % pair.seen.len());
            }
        }
        pair.end();
    }
}
