//! Deficit round robin between classes: every visit gives a class its quantum of tokens, and it may spend them on its
//! requests. Rounds in which nobody can pay are not walked but computed. What is given in a plan counts only once the
//! request really went; so a class that turns out to be blocked got nothing for it, and asking again changes nothing.

/// Whose turn it is, and what everybody has saved.
#[derive(Debug)]
pub(super) struct Rounds {
    quanta: Vec<u64>,
    deficits: Vec<u64>,
    cursor: usize,
    /// Whether the class at the cursor got its quantum for this visit.
    credited: bool,
}

/// The next class to go, and the visits until then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) class: usize,
    /// 0: the class at the cursor goes on with what it has.
    visits: u64,
}

impl Rounds {
    pub(super) fn new(quanta: Vec<u64>) -> Self {
        Self {
            deficits: vec![0; quanta.len()],
            quanta,
            cursor: 0,
            credited: false,
        }
    }

    /// Who goes next, where `cost` tells what the first open request of a class costs.
    pub(super) fn plan(&self, cost: impl Fn(usize) -> Option<u64>) -> Option<Plan> {
        if self.credited && cost(self.cursor).is_some_and(|cost| cost <= self.deficits[self.cursor])
        {
            return Some(Plan {
                class: self.cursor,
                visits: 0,
            });
        }
        let visits = |class: usize| {
            let missing = cost(class)?.saturating_sub(self.deficits[class]);
            Some(Plan {
                class,
                visits: missing.div_ceil(self.quanta[class].max(1)).max(1),
            })
        };
        // Of equals the first, which is the first to be visited.
        self.order()
            .filter_map(visits)
            .min_by_key(|plan| plan.visits)
    }

    /// Gives what the plan promised and takes the price; `cost` as it was for the plan.
    pub(super) fn commit(&mut self, plan: Plan, cost: impl Fn(usize) -> Option<u64>) {
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

    /// Nobody of this class waits any more: nothing is saved for later, and its visit is over.
    pub(super) fn emptied(&mut self, class: usize) {
        self.deficits[class] = 0;
        if self.cursor == class {
            self.cursor = (class + 1) % self.quanta.len();
            self.credited = false;
        }
    }

    /// All classes, in the order of the coming visits.
    fn order(&self) -> impl Iterator<Item = usize> + use<> {
        let classes = self.quanta.len();
        let first = self.cursor + usize::from(self.credited);
        (0..classes).map(move |step| (first + step) % classes)
    }
}
