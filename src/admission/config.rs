//! Settings of the queue. With none given there is one class, no worker is ever busy, and nothing waits.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::classes::{Class, Gate, Limits};
use super::policy::Policy;
use crate::settings::{Period, Problem, nearest};

/// Name of the only class where none are listed.
const ONLY_CLASS: &str = "default";

/// Longest deadline that is taken for one.
const LONGEST_WAIT: Duration = Duration::from_secs(86_400);

/// `queue:`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QueueConfig {
    /// Who goes first inside a class.
    pub policy: Policy,
    /// A worker is busy with more outstanding prefill tokens than this; where all are busy, requests wait.
    pub prefill_busy_threshold: Option<u64>,
    /// The same, as a part of the tokens one engine step takes.
    pub prefill_busy_threshold_frac: Option<f64>,
    /// How long a request may wait. Envoy's `max_message_timeout` must allow as much, `sessions.wait` and 0.5 s more.
    pub deadline: Period,
    /// After so long a wait the caches are asked again what they hold of the prompt; 0s: never.
    pub refresh_after: Period,
    /// When a refused client is asked to come back.
    pub retry_after: Period,
    /// Family of requests that name neither a class nor a family.
    pub default_family: Option<String>,
    /// What the classes of a family are told apart by: the uncached tokens of a prompt.
    pub uncached_buckets: Vec<BucketConfig>,
    /// The classes.
    pub classes: Vec<ClassConfig>,
}

/// One entry of `uncached_buckets`: from `min_tokens` up to those of the next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BucketConfig {
    /// Least uncached tokens.
    pub min_tokens: u64,
    /// Its name.
    pub bucket: String,
}

/// One entry of `classes`: chosen by family and bucket, or, where it has neither, by its name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClassConfig {
    /// Its name.
    pub name: String,
    /// The family it belongs to.
    #[serde(default)]
    pub family: Option<String>,
    /// Which prompts of that family are its own.
    #[serde(default)]
    pub bucket: Option<String>,
    /// Who goes first; where left out, as the queue says.
    #[serde(default)]
    pub policy: Option<Policy>,
    /// Tokens it may let go per round; classes share by these.
    #[serde(default = "one")]
    pub quantum: u64,
    /// As the queue's; where a class gives one of the two, neither is taken from the queue.
    #[serde(default)]
    pub prefill_busy_threshold: Option<u64>,
    /// See `prefill_busy_threshold`.
    #[serde(default)]
    pub prefill_busy_threshold_frac: Option<f64>,
    /// Requests that may wait, per worker; 0: none ever.
    #[serde(default)]
    pub requests_per_worker: Option<u64>,
    /// Prompt tokens that may wait, per worker.
    #[serde(default)]
    pub prompt_tokens_per_worker: Option<u64>,
    /// Cached prompt tokens that may wait, per worker.
    #[serde(default)]
    pub cached_tokens_per_worker: Option<u64>,
}

const fn one() -> u64 {
    1
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            prefill_busy_threshold: None,
            prefill_busy_threshold_frac: None,
            deadline: Period::seconds(30),
            refresh_after: Period::seconds(10),
            retry_after: Period::seconds(1),
            default_family: None,
            uncached_buckets: Vec::new(),
            classes: Vec::new(),
        }
    }
}

impl QueueConfig {
    /// The classes with everything they take from the queue; one where none are listed.
    pub(super) fn resolved(&self) -> Vec<Class> {
        let gate = Gate {
            prefill_tokens: self.prefill_busy_threshold,
            prefill_fraction: self.prefill_busy_threshold_frac,
        };
        if self.classes.is_empty() {
            let limits = Limits::default();
            return vec![Class {
                name: ONLY_CLASS.into(),
                policy: self.policy,
                quantum: 1,
                gate,
                limits,
            }];
        }
        let resolve = |class: &ClassConfig| {
            let own = Gate {
                prefill_tokens: class.prefill_busy_threshold,
                prefill_fraction: class.prefill_busy_threshold_frac,
            };
            Class {
                name: class.name.as_str().into(),
                policy: class.policy.unwrap_or(self.policy),
                quantum: class.quantum,
                gate: if own.never_busy() { gate } else { own },
                limits: Limits {
                    requests: class.requests_per_worker,
                    prompt_tokens: class.prompt_tokens_per_worker,
                    cached_tokens: class.cached_tokens_per_worker,
                },
            }
        };
        self.classes.iter().map(resolve).collect()
    }

    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        problems.extend(fraction(self.prefill_busy_threshold_frac));
        if self.deadline.get().is_zero() {
            problems.push(Problem::of(
                "deadline",
                "nobody can wait for 0s; the default is 30s",
            ));
        }
        if self.deadline.get() > LONGEST_WAIT {
            let text = format!(
                "{} is longer than any client waits; give at most 1d, the default is 30s",
                self.deadline
            );
            problems.push(Problem::of("deadline", text));
        }
        if self.retry_after.get() < Duration::from_secs(1) {
            let text = format!(
                "{} is less than 1s, the least that `Retry-After` can say; the default is 1s",
                self.retry_after
            );
            problems.push(Problem::of("retry_after", text));
        }
        if self.classes.is_empty() {
            problems.extend(self.without_classes());
            return problems;
        }
        problems.extend(self.buckets());
        for (at, class) in self.classes.iter().enumerate() {
            let found = self.class(at, class);
            problems.extend(
                found
                    .into_iter()
                    .map(|problem| problem.within(at).within("classes")),
            );
        }
        problems.extend(self.combinations());
        problems.extend(self.default_family_problem());
        problems
    }

    /// What only classes give a meaning.
    fn without_classes(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let text =
            "no `classes` are given, so this has no effect; list the classes or leave it out";
        if self.default_family.is_some() {
            problems.push(Problem::of("default_family", text));
        }
        if !self.uncached_buckets.is_empty() {
            problems.push(Problem::of("uncached_buckets", text));
        }
        problems
    }

    fn buckets(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.uncached_buckets.is_empty() {
            let text = "`classes` are given but no buckets; list at least `- {min_tokens: 0, bucket: all}`";
            problems.push(Problem::of("uncached_buckets", text));
        }
        let mut names = BTreeSet::new();
        let mut least: Option<u64> = None;
        for (at, BucketConfig { min_tokens, bucket }) in self.uncached_buckets.iter().enumerate() {
            let mut push = |key: &str, text: String| {
                problems.push(Problem::of(key, text).within(at).within("uncached_buckets"));
            };
            match least {
                None if *min_tokens != 0 => {
                    push(
                        "min_tokens",
                        format!("the first bucket begins at {min_tokens}; it must begin at 0"),
                    );
                }
                Some(least) if *min_tokens <= least => {
                    let text = "must be more than the one before it; sort the buckets from the smallest up";
                    push(
                        "min_tokens",
                        format!("{min_tokens} comes after {least}, but {text}"),
                    );
                }
                _ => {}
            }
            least = Some(*min_tokens);
            if let Some(text) = misnamed(bucket) {
                push("bucket", text);
            }
            if !names.insert(bucket) {
                push(
                    "bucket",
                    format!("there are two buckets `{bucket}`; give each its own name"),
                );
            }
        }
        problems
    }

    fn class(&self, at: usize, class: &ClassConfig) -> Vec<Problem> {
        let mut problems: Vec<Problem> = Vec::new();
        problems.extend(misnamed(&class.name).map(|text| Problem::of("name", text)));
        problems.extend(fraction(class.prefill_busy_threshold_frac));
        let before = &self.classes[..at];
        if before.iter().any(|other| other.name == class.name) {
            problems.push(Problem::of(
                "name",
                format!(
                    "there are two classes `{}`; give each its own name",
                    class.name
                ),
            ));
        }
        if class.quantum == 0 {
            let text = "a class with a quantum of 0 would never have its turn; give at least 1";
            problems.push(Problem::of("quantum", text));
        }
        match (&class.family, &class.bucket) {
            (Some(family), Some(bucket)) => {
                problems.extend(misnamed(family).map(|text| Problem::of("family", text)));
                problems.extend(self.unknown_bucket(bucket));
                let same = |other: &&ClassConfig| {
                    (&other.family, &other.bucket) == (&class.family, &class.bucket)
                };
                if let Some(other) = before.iter().find(same) {
                    let text = format!(
                        "family `{family}` and bucket `{bucket}` lead to the class `{}` already; change one of them",
                        other.name
                    );
                    problems.push(Problem::of("bucket", text));
                }
            }
            (None, None) if self.families().contains(class.name.as_str()) => {
                let text = format!(
                    "`{}` is also the name of a family; a request could not tell them apart, rename one",
                    class.name
                );
                problems.push(Problem::of("name", text));
            }
            (None, None) => {}
            (Some(_), None) => {
                let text = "there is a family but no `bucket`; give both, or neither for a class chosen by its name";
                problems.push(Problem::of("family", text));
            }
            (None, Some(_)) => {
                let text = "there is a bucket but no `family`; give both, or neither for a class chosen by its name";
                problems.push(Problem::of("bucket", text));
            }
        }
        problems
    }

    fn unknown_bucket(&self, bucket: &str) -> Option<Problem> {
        let known = || {
            self.uncached_buckets
                .iter()
                .map(|known| known.bucket.as_str())
        };
        if known().any(|known| known == bucket) {
            return None;
        }
        let mend = match nearest(bucket, known()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => "add it there or name another".to_owned(),
        };
        Some(Problem::of(
            "bucket",
            format!("`uncached_buckets` has no bucket `{bucket}`; {mend}"),
        ))
    }

    /// Families of which both names are given.
    fn families(&self) -> BTreeSet<&str> {
        let belong = self.classes.iter().filter(|class| class.bucket.is_some());
        belong.filter_map(|class| class.family.as_deref()).collect()
    }

    fn combinations(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        for family in self.families() {
            for BucketConfig { bucket, .. } in &self.uncached_buckets {
                let fits = |class: &ClassConfig| {
                    class.family.as_deref() == Some(family)
                        && class.bucket.as_deref() == Some(bucket)
                };
                if !self.classes.iter().any(fits) {
                    let text =
                        format!("no class has family `{family}` and bucket `{bucket}`; add one");
                    problems.push(Problem::of("classes", text));
                }
            }
        }
        problems
    }

    fn default_family_problem(&self) -> Option<Problem> {
        let families = self.families();
        match self.default_family.as_deref() {
            Some(family) if families.contains(family) => None,
            Some(family) => {
                let mend = match nearest(family, families) {
                    Some(near) => format!("did you mean `{near}`?"),
                    None => "name the family of some class".to_owned(),
                };
                Some(Problem::of(
                    "default_family",
                    format!("no class has the family `{family}`; {mend}"),
                ))
            }
            None => {
                let text = "`classes` are given but no `default_family`, so requests that name none had no class; add it";
                Some(Problem::at([], text))
            }
        }
    }
}

fn fraction(value: Option<f64>) -> Option<Problem> {
    let value = value.filter(|value| !(value.is_finite() && *value >= 0.0))?;
    Some(Problem::of(
        "prefill_busy_threshold_frac",
        format!("{value} is not a part of anything; give 0 or more, for example 0.8"),
    ))
}

fn misnamed(name: &str) -> Option<String> {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "_.-".contains(letter);
    let text = || format!("`{name}` is not a name here; use letters, digits, `_`, `.` and `-`");
    (name.is_empty() || !name.chars().all(plain)).then(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Step;

    fn family_class(name: &str, family: &str, bucket: &str) -> ClassConfig {
        ClassConfig {
            family: Some(family.into()),
            bucket: Some(bucket.into()),
            ..explicit(name)
        }
    }

    fn explicit(name: &str) -> ClassConfig {
        serde_json::from_value(serde_json::json!({ "name": name })).unwrap()
    }

    fn bucket(min_tokens: u64, bucket: &str) -> BucketConfig {
        BucketConfig {
            min_tokens,
            bucket: bucket.into(),
        }
    }

    /// Two buckets, one family, and a class by name.
    fn good() -> QueueConfig {
        QueueConfig {
            default_family: Some("f".into()),
            uncached_buckets: vec![bucket(0, "small"), bucket(1000, "big")],
            classes: vec![
                family_class("small", "f", "small"),
                family_class("big", "f", "big"),
                explicit("vip"),
            ],
            ..QueueConfig::default()
        }
    }

    #[test]
    fn what_is_right_has_no_problems() {
        assert_eq!(QueueConfig::default().problems(), []);
        assert_eq!(good().problems(), []);
    }

    #[test]
    fn every_mistake_is_named_at_its_place() {
        type Spoil = fn(&mut QueueConfig);
        let table: &[(&str, &str, Spoil)] = &[
            ("deadline", "nobody can wait", |queue| {
                queue.deadline = Period::seconds(0)
            }),
            ("deadline", "48h is longer", |queue| {
                queue.deadline = Period::seconds(48 * 3600)
            }),
            ("retry_after", "500ms is less than 1s", |queue| {
                queue.retry_after = Period::millis(500)
            }),
            ("prefill_busy_threshold_frac", "-1 is not", |queue| {
                queue.prefill_busy_threshold_frac = Some(-1.0)
            }),
            (
                "classes.2.prefill_busy_threshold_frac",
                "NaN is not",
                |queue| {
                    queue.classes[2].prefill_busy_threshold_frac = Some(f64::NAN);
                },
            ),
            ("", "no `default_family`", |queue| {
                queue.default_family = None
            }),
            ("default_family", "family `g`", |queue| {
                queue.default_family = Some("g".into())
            }),
            ("default_family", "did you mean `f`", |queue| {
                queue.default_family = Some("ff".into())
            }),
            ("uncached_buckets.0.min_tokens", "begins at 5", |queue| {
                queue.uncached_buckets[0].min_tokens = 5
            }),
            (
                "uncached_buckets.2.min_tokens",
                "1000 comes after 1000",
                |queue| {
                    queue.uncached_buckets.push(bucket(1000, "huge"));
                    queue.classes.push(family_class("huge", "f", "huge"));
                },
            ),
            ("uncached_buckets.2.bucket", "two buckets `big`", |queue| {
                queue.uncached_buckets.push(bucket(2000, "big"))
            }),
            (
                "uncached_buckets.1.bucket",
                "`so big` is not a name",
                |queue| {
                    queue.uncached_buckets[1].bucket = "so big".into();
                    queue.classes[1].bucket = Some("so big".into());
                },
            ),
            ("classes.2.name", "`` is not a name", |queue| {
                queue.classes[2].name = String::new()
            }),
            ("classes.2.name", "two classes `big`", |queue| {
                queue.classes[2].name = "big".into()
            }),
            ("classes.2.name", "also the name of a family", |queue| {
                queue.classes[2].name = "f".into()
            }),
            ("classes.0.quantum", "never have its turn", |queue| {
                queue.classes[0].quantum = 0
            }),
            ("classes.2.family", "no `bucket`", |queue| {
                queue.classes[2].family = Some("f".into())
            }),
            ("classes.2.bucket", "no `family`", |queue| {
                queue.classes[2].bucket = Some("big".into())
            }),
            ("classes.3.bucket", "the class `big` already", |queue| {
                queue.classes.push(family_class("b", "f", "big"))
            }),
            ("classes.3.bucket", "did you mean `small`", |queue| {
                queue.classes.push(family_class("b", "f", "smal"))
            }),
            ("classes.3.family", "`é` is not a name", |queue| {
                queue.classes.push(family_class("b", "é", "small"));
                queue.classes.push(family_class("c", "é", "big"));
            }),
            ("classes", "family `g` and bucket `big`", |queue| {
                queue.classes.push(family_class("b", "g", "small"))
            }),
            ("default_family", "no effect", |queue| {
                queue.classes.clear();
                queue.uncached_buckets.clear();
            }),
            ("uncached_buckets", "no effect", |queue| {
                queue.classes.clear();
                queue.default_family = None;
            }),
        ];
        for (place, says, spoil) in table {
            let mut queue = good();
            spoil(&mut queue);
            let mut problems = queue.problems();
            // Whoever names a family wrongly twice is told twice.
            problems.dedup_by(|a, b| a.text == b.text);
            let found: Vec<_> = problems
                .iter()
                .map(|problem| (trail(problem), problem.text.as_str()))
                .collect();
            assert!(
                found
                    .iter()
                    .any(|(at, text)| at == place && text.contains(says)),
                "{place}: {says}: {found:?}"
            );
        }
    }

    #[test]
    fn buckets_are_asked_for_where_there_are_classes() {
        let queue = QueueConfig {
            uncached_buckets: vec![],
            classes: vec![explicit("vip")],
            ..good()
        };
        let texts: Vec<_> = queue
            .problems()
            .into_iter()
            .map(|problem| trail(&problem))
            .collect();
        assert_eq!(texts, ["uncached_buckets", "default_family"]);
    }

    fn trail(problem: &Problem) -> String {
        let step = |step: &Step| match step {
            Step::Key(key) => key.clone(),
            Step::At(at) => at.to_string(),
        };
        problem.trail.iter().map(step).collect::<Vec<_>>().join(".")
    }

    #[test]
    fn a_class_takes_its_thresholds_whole_from_itself_or_from_the_queue() {
        let mut queue = QueueConfig {
            prefill_busy_threshold: Some(7),
            policy: Policy::Wspt,
            ..good()
        };
        queue.classes[1].prefill_busy_threshold_frac = Some(0.5);
        queue.classes[1].policy = Some(Policy::Fcfs);
        let classes = queue.resolved();
        assert_eq!(
            classes[0].gate,
            Gate {
                prefill_tokens: Some(7),
                prefill_fraction: None
            }
        );
        assert_eq!(
            classes[1].gate,
            Gate {
                prefill_tokens: None,
                prefill_fraction: Some(0.5)
            }
        );
        assert_eq!(
            (classes[0].policy, classes[1].policy),
            (Policy::Wspt, Policy::Fcfs)
        );
    }
}
