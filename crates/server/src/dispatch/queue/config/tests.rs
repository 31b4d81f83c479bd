use warmroute_core::queue::QueuePolicy;
use warmroute_settings::{PathStep, Problem};

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

#[test]
fn default_family_without_similar_name_is_reported() {
    let queue = QueueConfig {
        default_family: Some("other".into()),
        ..valid_config()
    };
    let text = "no class has the family `other`; name the family of some class";
    assert_eq!(queue.problems(), [Problem::of("default_family", text)]);
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
