//! Deficit round robin between classes: every visit credits a class with its quantum of tokens,
//! which it spends on its requests. Rounds without a payable request are computed at once instead
//! of iterated. A plan takes effect only when it is committed, after the request was placed. A
//! class that turns out to be blocked is therefore not credited, and planning again changes
//! nothing.

/// Credits of all classes and the position of the round.
#[derive(Debug)]
pub(super) struct DeficitRoundRobin {
    quanta: Vec<u64>,
    deficits: Vec<u64>,
    cursor: usize,
    /// Whether the class at the cursor has received its quantum for this visit.
    credited: bool,
}

/// Next class, and the number of visits until it can pay.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoundPlan {
    pub(super) class: usize,
    /// 0 if the class at the cursor can pay from its remaining deficit.
    visits: u64,
}

impl DeficitRoundRobin {
    pub(super) fn new(quanta: Vec<u64>) -> Self {
        Self {
            deficits: vec![0; quanta.len()],
            quanta,
            cursor: 0,
            credited: false,
        }
    }

    /// Chooses the next class. `cost` returns the cost of the first request of a class, or `None`
    /// if all are blocked.
    pub(super) fn plan(&self, cost: impl Fn(usize) -> Option<u64>) -> Option<RoundPlan> {
        if self.credited && cost(self.cursor).is_some_and(|cost| cost <= self.deficits[self.cursor])
        {
            return Some(RoundPlan {
                class: self.cursor,
                visits: 0,
            });
        }
        let visits = |class: usize| {
            let missing = cost(class)?.saturating_sub(self.deficits[class]);
            Some(RoundPlan {
                class,
                visits: missing.div_ceil(self.quanta[class].max(1)).max(1),
            })
        };
        // `min_by_key` returns the first of equal elements, which is visited first.
        self.order()
            .filter_map(visits)
            .min_by_key(|plan| plan.visits)
    }

    /// Credits the visits of the plan and charges the request. `cost` must return the same values
    /// as for the plan.
    pub(super) fn commit(&mut self, plan: RoundPlan, cost: impl Fn(usize) -> Option<u64>) {
        let mut visits = plan.visits;
        for class in self.order() {
            if cost(class).is_some() {
                let credit = self.quanta[class].max(1).saturating_mul(visits);
                self.deficits[class] = self.deficits[class].saturating_add(credit);
            }
            if class == plan.class {
                visits = visits.saturating_sub(1);
            }
        }
        self.cursor = plan.class;
        self.credited = true;
        let deficit = &mut self.deficits[plan.class];
        *deficit = deficit.saturating_sub(cost(plan.class).unwrap_or(0));
    }

    /// Resets a class that has become empty: its credit expires and its visit ends.
    pub(super) fn reset_class(&mut self, class: usize) {
        self.deficits[class] = 0;
        if self.cursor == class {
            self.cursor = (class + 1) % self.quanta.len();
            self.credited = false;
        }
    }

    /// Returns all classes in the order of the coming visits.
    fn order(&self) -> impl Iterator<Item = usize> + use<> {
        let classes = self.quanta.len();
        let first = self.cursor + usize::from(self.credited);
        (0..classes).map(move |step| (first + step) % classes)
    }
}
