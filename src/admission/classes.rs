//! The classes of requests that wait apart from one another, as the settings describe them. A request may name a class, or
//! a family of classes of which the length of its uncached prompt picks one; a name nobody knows is no name.

use std::fmt;
use std::sync::Arc;

use super::config::QueueConfig;
use super::policy::Policy;

/// Tokens of an engine step where a worker does not say, so that a fraction of them is out of reach.
const UNKNOWN_BATCH: u64 = 10_000_000;

/// From when on a worker is busy for a class. Nothing given: never.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gate {
    /// Busy with more outstanding prefill tokens than this.
    pub prefill_tokens: Option<u64>,
    /// Busy with more outstanding prefill tokens than this part of what one engine step takes.
    pub prefill_fraction: Option<f64>,
}

impl Gate {
    /// Whether nothing could make a worker busy.
    pub fn never_busy(&self) -> bool {
        self.prefill_tokens.is_none() && self.prefill_fraction.is_none()
    }

    /// Whether a worker rank with this much prefill outstanding is busy; `batch` is what one engine step of it takes.
    pub fn busy(&self, prefill_tokens: u64, batch: Option<u64>) -> bool {
        let batch = batch.unwrap_or(UNKNOWN_BATCH) as f64;
        self.prefill_tokens
            .is_some_and(|most| prefill_tokens > most)
            || self
                .prefill_fraction
                .is_some_and(|fraction| prefill_tokens as f64 > fraction * batch)
    }
}

/// What may be too much in a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LimitKind {
    /// Requests.
    Requests,
    /// Prompt tokens.
    PromptTokens,
    /// Cached prompt tokens.
    CachedTokens,
}

impl LimitKind {
    /// As a label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::PromptTokens => "prompt_tokens",
            Self::CachedTokens => "cached_tokens",
        }
    }
}

impl fmt::Display for LimitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// How much of a class may wait, per worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Requests.
    pub requests: Option<u64>,
    /// Prompt tokens.
    pub prompt_tokens: Option<u64>,
    /// Cached ones among these.
    pub cached_tokens: Option<u64>,
}

impl Limits {
    /// Every limit, in the order in which they are looked at.
    pub(super) fn iter(&self) -> impl Iterator<Item = (LimitKind, Option<u64>)> + use<> {
        [
            (LimitKind::Requests, self.requests),
            (LimitKind::PromptTokens, self.prompt_tokens),
            (LimitKind::CachedTokens, self.cached_tokens),
        ]
        .into_iter()
    }
}

/// Number of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassId(pub(super) usize);

impl ClassId {
    pub(super) fn at(self) -> usize {
        self.0
    }
}

/// One class.
#[derive(Clone, Debug, PartialEq)]
pub struct Class {
    /// Its name.
    pub name: Arc<str>,
    /// Who goes first in it.
    pub policy: Policy,
    /// Tokens it may let go per round; classes share by these.
    pub quantum: u64,
    /// When a worker is busy for it.
    pub gate: Gate,
    /// How much may wait in it.
    pub limits: Limits,
}

/// All classes, and which request belongs in which.
#[derive(Clone, Debug)]
pub struct Classes {
    all: Vec<Class>,
    explicit: Vec<ClassId>,
    families: Vec<Family>,
    /// Family of requests that name none.
    default: Option<usize>,
}

#[derive(Clone, Debug)]
struct Family {
    name: String,
    /// Least uncached tokens and the class, from the least up.
    buckets: Vec<(u64, ClassId)>,
}

impl Classes {
    /// The classes of settings without problems.
    pub fn new(config: &QueueConfig) -> Self {
        let mut classes = Self {
            all: config.resolved(),
            explicit: vec![],
            families: vec![],
            default: None,
        };
        for (at, class) in config.classes.iter().enumerate() {
            let (Some(family), Some(bucket)) = (&class.family, &class.bucket) else {
                classes.explicit.push(ClassId(at));
                continue;
            };
            let least = config
                .uncached_buckets
                .iter()
                .find(|known| known.bucket == *bucket);
            let least = least.map_or(0, |known| known.min_tokens);
            let known = classes
                .families
                .iter()
                .position(|known| known.name == *family);
            let known = known.unwrap_or_else(|| {
                classes.families.push(Family {
                    name: family.clone(),
                    buckets: vec![],
                });
                classes.families.len() - 1
            });
            classes.families[known].buckets.push((least, ClassId(at)));
        }
        classes
            .families
            .iter_mut()
            .for_each(|family| family.buckets.sort_unstable());
        let default = config.default_family.as_deref();
        classes.default = classes
            .families
            .iter()
            .position(|family| Some(family.name.as_str()) == default);
        classes
    }

    /// The class of a request that names `asked` and has this many uncached prompt tokens.
    pub fn resolve(&self, asked: Option<&str>, uncached: u64) -> ClassId {
        let explicit = |id: &&ClassId| asked == Some(&*self.get(**id).name);
        if let Some(id) = self.explicit.iter().find(explicit) {
            return *id;
        }
        let named = self
            .families
            .iter()
            .find(|family| Some(family.name.as_str()) == asked);
        let family = named.or(self.default.map(|default| &self.families[default]));
        let fits = |family: &Family| {
            family
                .buckets
                .iter()
                .rfind(|(least, _)| *least <= uncached)
                .map(|(_, id)| *id)
        };
        family.and_then(fits).unwrap_or(ClassId(0))
    }

    /// A class.
    pub fn get(&self, id: ClassId) -> &Class {
        &self.all[id.at()]
    }

    /// All of them, by number.
    pub fn iter(&self) -> impl Iterator<Item = &Class> {
        self.all.iter()
    }

    /// All numbers.
    pub fn ids(&self) -> impl Iterator<Item = ClassId> + use<> {
        (0..self.all.len()).map(ClassId)
    }
}
