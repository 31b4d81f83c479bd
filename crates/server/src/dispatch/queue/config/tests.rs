use warmroute_core::queue::QueuePolicy;
use warmroute_settings::{DurationSetting, PathStep, Problem};

use super::*;

fn family_class(name: &str, family: &str, bucket: &str) -> ClassConfig {
    ClassConfig {
        family: Some(family.into()),
        bucket: Some(bucket.into()),
        ..named_class(name)
    }
}

fn named_class(name: &str) -> ClassConfig {
    serde_json::from_value(serde_json::json!({ "name": name })).unwrap()
}

fn bucket(min_tokens: u64, bucket: &str) -> BucketConfig {
    BucketConfig {
        min_tokens,
        bucket: bucket.into(),
    }
}

/// Returns a configuration with two buckets, one family, and a class that is selected by its name.
fn valid_config() -> QueueConfig {
    QueueConfig {
        default_family: Some("f".into()),
        uncached_buckets: vec![bucket(0, "small"), bucket(1000, "big")],
        classes: vec![
            family_class("small", "f", "small"),
            family_class("big", "f", "big"),
            named_class("vip"),
        ],
        ..QueueConfig::default()
    }
}

#[test]
fn valid_configuration_has_no_problems() {
    assert_eq!(QueueConfig::default().problems(), []);
    assert_eq!(valid_config().problems(), []);
}

/// Key, part of the error text, and the change that causes the error.
type ConfigFault = (&'static str, &'static str, fn(&mut QueueConfig));

const GENERAL_FAULTS: &[ConfigFault] = &[
    ("timeout", "would reject every queued request", |queue| {
        queue.timeout = DurationSetting::seconds(0)
    }),
    ("timeout", "48h is longer", |queue| {
        queue.timeout = DurationSetting::seconds(48 * 3600)
    }),
    ("retry_after", "500ms is less than 1s", |queue| {
        queue.retry_after = DurationSetting::millis(500)
    }),
    ("prefill_busy_threshold_frac", "-1 is not", |queue| {
        queue.prefill_busy_threshold_frac = Some(-1.0)
    }),
];

const CLASS_FAULTS: &[ConfigFault] = &[
    ("classes.2.name", "`` is not a valid name", |queue| {
        queue.classes[2].name = String::new()
    }),
    ("classes.2.name", "two classes `big`", |queue| {
        queue.classes[2].name = "big".into()
    }),
    ("classes.2.name", "also the name of a family", |queue| {
        queue.classes[2].name = "f".into()
    }),
    ("classes.0.quantum", "never be served", |queue| {
        queue.classes[0].quantum = 0
    }),
    ("classes.2.family", "no `bucket`", |queue| {
        queue.classes[2].family = Some("f".into())
    }),
    ("classes.2.bucket", "no `family`", |queue| {
        queue.classes[2].bucket = Some("big".into())
    }),
    (
        "classes.3.bucket",
        "already select the class `big`",
        |queue| queue.classes.push(family_class("b", "f", "big")),
    ),
    ("classes.3.bucket", "did you mean `small`", |queue| {
        queue.classes.push(family_class("b", "f", "smal"))
    }),
    ("classes.3.family", "`é` is not a valid name", |queue| {
        queue.classes.push(family_class("b", "é", "small"));
        queue.classes.push(family_class("c", "é", "big"));
    }),
    ("classes", "family `g` and bucket `big`", |queue| {
        queue.classes.push(family_class("b", "g", "small"))
    }),
];

const FAMILY_AND_BUCKET_FAULTS: &[ConfigFault] = &[
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
        "`so big` is not a valid name",
        |queue| {
            queue.uncached_buckets[1].bucket = "so big".into();
            queue.classes[1].bucket = Some("so big".into());
        },
    ),
    ("default_family", "no effect", |queue| {
        queue.classes.clear();
        queue.uncached_buckets.clear();
    }),
    ("uncached_buckets", "no effect", |queue| {
        queue.classes.clear();
        queue.default_family = None;
    }),
];

#[test]
fn each_error_is_reported_at_its_key() {
    let cases = [GENERAL_FAULTS, CLASS_FAULTS, FAMILY_AND_BUCKET_FAULTS].concat();
    for (path, expected, change) in cases {
        let mut queue = valid_config();
        change(&mut queue);
        let mut problems = queue.problems();
        // An unknown family that two keys name is reported twice.
        problems.dedup_by(|a, b| a.text == b.text);
        let found: Vec<_> = problems
            .iter()
            .map(|problem| (path_of(problem), problem.text.as_str()))
            .collect();
        assert!(
            found
                .iter()
                .any(|(at, text)| *at == path && text.contains(expected)),
            "{path}: {expected}: {found:?}"
        );
    }
}

#[test]
fn classes_require_buckets() {
    let queue = QueueConfig {
        uncached_buckets: vec![],
        classes: vec![named_class("vip")],
        ..valid_config()
    };
    let texts: Vec<_> = queue
        .problems()
        .into_iter()
        .map(|problem| path_of(&problem))
        .collect();
    assert_eq!(texts, ["uncached_buckets", "default_family"]);
}

fn path_of(problem: &Problem) -> String {
    let step = |step: &PathStep| match step {
        PathStep::Key(key) => key.clone(),
        PathStep::At(at) => at.to_string(),
    };
    problem.path.iter().map(step).collect::<Vec<_>>().join(".")
}

#[test]
fn class_policy_replaces_that_of_the_queue() {
    let mut queue = QueueConfig {
        policy: QueuePolicy::Wspt,
        ..valid_config()
    };
    queue.classes[1].policy = Some(QueuePolicy::Fcfs);
    let classes = queue.to_classes();
    let policies: Vec<_> = classes.iter().map(|class| class.policy).collect();
    let expected = [QueuePolicy::Wspt, QueuePolicy::Fcfs, QueuePolicy::Wspt];
    assert_eq!(policies, expected);
}

#[test]
fn class_selection_uses_name_or_family_and_length() {
    let document = serde_json::json!({
        "default_family": "f",
        "uncached_buckets": [{ "min_tokens": 0, "bucket": "small" }, { "min_tokens": 1000, "bucket": "big" }],
        "classes": [
            { "name": "f-big", "family": "f", "bucket": "big" },
            { "name": "f-small", "family": "f", "bucket": "small" },
            { "name": "g-small", "family": "g", "bucket": "small" },
            { "name": "g-big", "family": "g", "bucket": "big" },
            { "name": "vip" },
        ],
    });
    let config: QueueConfig = serde_json::from_value(document).unwrap();
    assert_eq!(config.problems(), []);
    let classes = config.to_classes();
    let cases = [
        (None, 0, "f-small"),
        (None, 999, "f-small"),
        (None, 1000, "f-big"),
        (Some("g"), 1, "g-small"),
        (Some("g"), 5000, "g-big"),
        (Some("vip"), 5000, "vip"),
        (Some("unknown"), 5000, "f-big"),
        // Only a class without a family is chosen by its name.
        (Some("g-big"), 1, "f-small"),
    ];
    for (requested, uncached, expected) in cases {
        let class = classes.resolve(requested, uncached);
        assert_eq!(
            &*classes.get(class).name,
            expected,
            "{requested:?} {uncached}"
        );
    }
    let default_classes = QueueConfig::default().to_classes();
    assert_eq!(
        &*default_classes
            .get(default_classes.resolve(Some("vip"), 5))
            .name,
        "default"
    );
}
