//! Semantic errors of a queue configuration.

use std::collections::BTreeSet;
use std::time::Duration;

use warmroute_settings::{Problem, all_within, nearest};

use super::{BucketConfig, ClassConfig, QueueConfig};

/// Maximum deadline.
const MAX_DEADLINE: Duration = Duration::from_secs(86_400);

impl QueueConfig {
    /// Returns the semantic errors of the configuration.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        problems.extend(check_fraction(self.prefill_busy_threshold_frac));
        if self.timeout.get().is_zero() {
            problems.push(Problem::of(
                "timeout",
                "a timeout of 0s would reject every queued request; the default is 30s",
            ));
        }
        if self.timeout.get() > MAX_DEADLINE {
            let text = format!(
                "{} is longer than any client waits; give at most 1d, the default is 30s",
                self.timeout
            );
            problems.push(Problem::of("timeout", text));
        }
        if self.retry_after.get() < Duration::from_secs(1) {
            let text = format!(
                "{} is less than 1s, the minimum of `Retry-After`; the default is 1s",
                self.retry_after
            );
            problems.push(Problem::of("retry_after", text));
        }
        if self.classes.is_empty() {
            problems.extend(self.check_unused_keys());
            return problems;
        }
        problems.extend(self.check_buckets());
        for (at, class) in self.classes.iter().enumerate() {
            let found = self.check_class(at, class);
            problems.extend(all_within("classes", all_within(at, found)));
        }
        problems.extend(self.check_combinations());
        problems.extend(self.check_default_family());
        problems
    }

    /// Returns problems for keys that have no effect without classes.
    fn check_unused_keys(&self) -> Vec<Problem> {
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

    fn check_buckets(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.uncached_buckets.is_empty() {
            let text = "`classes` are given but no buckets; list at least `- {min_tokens: 0, \
                bucket: all}`";
            problems.push(Problem::of("uncached_buckets", text));
        }
        let mut names = BTreeSet::new();
        let mut previous: Option<u64> = None;
        for (at, BucketConfig { min_tokens, bucket }) in self.uncached_buckets.iter().enumerate() {
            let mut push = |key: &str, text: String| {
                problems.push(Problem::of(key, text).within(at).within("uncached_buckets"));
            };
            match previous {
                None if *min_tokens != 0 => {
                    push(
                        "min_tokens",
                        format!("the first bucket begins at {min_tokens}; it must begin at 0"),
                    );
                }
                Some(previous) if *min_tokens <= previous => {
                    let text = "must be greater than the one before it; sort the buckets in \
                        ascending order";
                    push(
                        "min_tokens",
                        format!("{min_tokens} comes after {previous}, but {text}"),
                    );
                }
                _ => {}
            }
            previous = Some(*min_tokens);
            if let Some(text) = check_name(bucket) {
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

    fn check_class(&self, at: usize, class: &ClassConfig) -> Vec<Problem> {
        let mut problems: Vec<Problem> = Vec::new();
        problems.extend(check_name(&class.name).map(|text| Problem::of("name", text)));
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
            let text = "a class with a quantum of 0 would never be served; give at least 1";
            problems.push(Problem::of("quantum", text));
        }
        match (&class.family, &class.bucket) {
            (Some(family), Some(bucket)) => {
                problems.extend(check_name(family).map(|text| Problem::of("family", text)));
                problems.extend(self.check_bucket_exists(bucket));
                let same = |other: &&ClassConfig| {
                    (&other.family, &other.bucket) == (&class.family, &class.bucket)
                };
                if let Some(other) = before.iter().find(same) {
                    let text = format!(
                        "family `{family}` and bucket `{bucket}` already select the class `{}`; \
                        change one of them",
                        other.name
                    );
                    problems.push(Problem::of("bucket", text));
                }
            }
            (None, None) if self.families().contains(class.name.as_str()) => {
                let text = format!(
                    "`{}` is also the name of a family; a request could not tell them apart, \
                    rename one",
                    class.name
                );
                problems.push(Problem::of("name", text));
            }
            (None, None) => {}
            (Some(_), None) => {
                let text = "there is a family but no `bucket`; give both, or neither for a class \
                    selected by its name";
                problems.push(Problem::of("family", text));
            }
            (None, Some(_)) => {
                let text = "there is a bucket but no `family`; give both, or neither for a class \
                    selected by its name";
                problems.push(Problem::of("bucket", text));
            }
        }
        problems
    }

    fn check_bucket_exists(&self, bucket: &str) -> Option<Problem> {
        let known = || {
            self.uncached_buckets
                .iter()
                .map(|known| known.bucket.as_str())
        };
        if known().any(|known| known == bucket) {
            return None;
        }
        let fix = match nearest(bucket, known()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => "add it there or name another".to_owned(),
        };
        Some(Problem::of(
            "bucket",
            format!("`uncached_buckets` has no bucket `{bucket}`; {fix}"),
        ))
    }

    /// Returns the families of classes that have family and bucket.
    fn families(&self) -> BTreeSet<&str> {
        let in_family = self.classes.iter().filter(|class| class.bucket.is_some());
        in_family
            .filter_map(|class| class.family.as_deref())
            .collect()
    }

    fn check_combinations(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        for family in self.families() {
            for BucketConfig { bucket, .. } in &self.uncached_buckets {
                let matches = |class: &ClassConfig| {
                    class.family.as_deref() == Some(family)
                        && class.bucket.as_deref() == Some(bucket)
                };
                if !self.classes.iter().any(matches) {
                    let text =
                        format!("no class has family `{family}` and bucket `{bucket}`; add one");
                    problems.push(Problem::of("classes", text));
                }
            }
        }
        problems
    }

    fn check_default_family(&self) -> Option<Problem> {
        let families = self.families();
        match self.default_family.as_deref() {
            Some(family) if families.contains(family) => None,
            Some(family) => {
                let fix = match nearest(family, families) {
                    Some(near) => format!("did you mean `{near}`?"),
                    None => "name the family of some class".to_owned(),
                };
                Some(Problem::of(
                    "default_family",
                    format!("no class has the family `{family}`; {fix}"),
                ))
            }
            None => {
                let text = "`classes` are given but no `default_family`, so requests that name \
                    none have no class; add it";
                Some(Problem::at([], text))
            }
        }
    }
}

fn check_fraction(value: Option<f64>) -> Option<Problem> {
    let value = value.filter(|value| !(value.is_finite() && *value >= 0.0))?;
    Some(Problem::of(
        "prefill_busy_threshold_frac",
        format!("{value} is not a valid fraction; give 0 or more, for example 0.8"),
    ))
}

fn check_name(name: &str) -> Option<String> {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "_.-".contains(letter);
    let text = || format!("`{name}` is not a valid name; use letters, digits, `_`, `.` and `-`");
    (name.is_empty() || !name.chars().all(plain)).then(text)
}
