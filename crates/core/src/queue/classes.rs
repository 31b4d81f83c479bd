//! Queue classes. A request names a class, or a family of classes from which the length of its
//! uncached prompt selects one. Unknown names are ignored.

use std::sync::Arc;

use strum::{Display, IntoStaticStr};

use super::order::QueuePolicy;

/// Tokens per engine step if a worker does not report them; too large for any fraction to be
/// reached.
const UNKNOWN_BATCH_TOKENS: u64 = 10_000_000;

/// Threshold above which a worker is busy. Without values, no worker is ever busy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BusyThreshold {
    /// Maximum outstanding prefill tokens.
    pub prefill_tokens: Option<u64>,
    /// Maximum outstanding prefill tokens as a multiple of the tokens per engine step.
    pub prefill_fraction: Option<f64>,
}

impl BusyThreshold {
    /// Returns whether no threshold is set.
    pub fn is_unset(&self) -> bool {
        self.prefill_tokens.is_none() && self.prefill_fraction.is_none()
    }

    /// Returns whether a rank with this much outstanding prefill is busy. `batch` is its number of
    /// tokens per engine step.
    pub fn is_exceeded(&self, prefill_tokens: u64, batch: Option<u64>) -> bool {
        let batch = batch.unwrap_or(UNKNOWN_BATCH_TOKENS) as f64;
        self.prefill_tokens.is_some_and(|max| prefill_tokens > max)
            || self
                .prefill_fraction
                .is_some_and(|fraction| prefill_tokens as f64 > fraction * batch)
    }
}

/// Kind of a queue limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Display, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum QueueLimitKind {
    /// Number of requests.
    Requests,
    /// Sum of prompt tokens.
    PromptTokens,
    /// Sum of cached prompt tokens.
    CachedTokens,
}

impl QueueLimitKind {
    /// Returns the label in metrics and messages.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Queue limits of a class, per worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueLimits {
    /// Maximum number of requests.
    pub requests: Option<u64>,
    /// Maximum sum of prompt tokens.
    pub prompt_tokens: Option<u64>,
    /// Maximum sum of cached prompt tokens.
    pub cached_tokens: Option<u64>,
}

impl QueueLimits {
    /// Returns all limits in the order in which they are checked.
    pub(super) fn iter(&self) -> impl Iterator<Item = (QueueLimitKind, Option<u64>)> + use<> {
        [
            (QueueLimitKind::Requests, self.requests),
            (QueueLimitKind::PromptTokens, self.prompt_tokens),
            (QueueLimitKind::CachedTokens, self.cached_tokens),
        ]
        .into_iter()
    }
}

/// Index of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassId(pub usize);

impl ClassId {
    /// Returns the position of the class, from 0.
    pub fn index(self) -> usize {
        self.0
    }
}

/// Queue class.
#[derive(Clone, Debug, PartialEq)]
pub struct QueueClass {
    /// Name.
    pub name: Arc<str>,
    /// Order of the requests within the class.
    pub policy: QueuePolicy,
    /// Tokens that the class may place per round, relative to the other classes.
    pub quantum: u64,
    /// Queue limits.
    pub limits: QueueLimits,
}

/// Queue class, and the rule that assigns requests to it.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassDefinition {
    /// The class.
    pub class: QueueClass,
    /// Bucket of a family. A class without one is selected by its name.
    pub bucket: Option<FamilyBucket>,
}

/// Range of uncached prompt tokens within a family of classes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FamilyBucket {
    /// Name of the family.
    pub family: String,
    /// Minimum of uncached prompt tokens. The range ends where the next bucket of the family
    /// starts.
    pub min_uncached_tokens: u64,
}

/// All classes, with the rules that assign a request to one of them.
#[derive(Clone, Debug)]
pub struct QueueClasses {
    all: Vec<QueueClass>,
    named: Vec<ClassId>,
    families: Vec<ClassFamily>,
    /// Family of requests that name none.
    default: Option<usize>,
}

#[derive(Clone, Debug)]
struct ClassFamily {
    name: String,
    /// Minimum of uncached tokens and class, in ascending order.
    buckets: Vec<(u64, ClassId)>,
}

impl QueueClasses {
    /// Creates the classes in the order of `definitions`. The first one is the fallback. A request
    /// that names no family belongs to `default_family`.
    pub fn new(definitions: Vec<ClassDefinition>, default_family: Option<&str>) -> Self {
        let mut classes = Self {
            all: Vec::with_capacity(definitions.len()),
            named: vec![],
            families: vec![],
            default: None,
        };
        for (index, definition) in definitions.into_iter().enumerate() {
            let id = ClassId(index);
            match definition.bucket {
                None => classes.named.push(id),
                Some(bucket) => classes
                    .family_mut(bucket.family)
                    .buckets
                    .push((bucket.min_uncached_tokens, id)),
            }
            classes.all.push(definition.class);
        }
        for family in &mut classes.families {
            family.buckets.sort_unstable();
        }
        classes.default = classes
            .families
            .iter()
            .position(|family| Some(family.name.as_str()) == default_family);
        classes
    }

    fn family_mut(&mut self, name: String) -> &mut ClassFamily {
        let known = self.families.iter().position(|family| family.name == name);
        let index = known.unwrap_or_else(|| {
            self.families.push(ClassFamily {
                name,
                buckets: vec![],
            });
            self.families.len() - 1
        });
        &mut self.families[index]
    }

    /// Returns the class of a request that names `name` and has this many uncached prompt tokens.
    pub fn resolve(&self, name: Option<&str>, uncached: u64) -> ClassId {
        let is_named = |id: &&ClassId| name == Some(&*self.get(**id).name);
        if let Some(id) = self.named.iter().find(is_named) {
            return *id;
        }
        let named = self
            .families
            .iter()
            .find(|family| Some(family.name.as_str()) == name);
        let family = named.or(self.default.map(|default| &self.families[default]));
        let select = |family: &ClassFamily| {
            family
                .buckets
                .iter()
                .rfind(|(min_tokens, _)| *min_tokens <= uncached)
                .map(|(_, id)| *id)
        };
        family.and_then(select).unwrap_or(ClassId(0))
    }

    /// Returns a class.
    pub fn get(&self, id: ClassId) -> &QueueClass {
        &self.all[id.index()]
    }

    /// Returns all classes in the order of their ids.
    pub fn iter(&self) -> impl Iterator<Item = &QueueClass> {
        self.all.iter()
    }

    /// Returns all ids.
    pub fn ids(&self) -> impl Iterator<Item = ClassId> + use<> {
        (0..self.all.len()).map(ClassId)
    }
}
